"""The public names, signatures and fields of the code are those of docs/api.pyi, which is normative."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

API = Path(__file__).parents[1] / "docs" / "api.pyi"

# Normative, and brought by a later change. A name that comes into being must leave this set.
PENDING = {
    "gelu_mul", "grouped_gemm", "kv_digest", "kv_swap", "kv_write_mla", "mla", "moe_permute", "moe_unpermute",
    "plan_reshard", "quantize", "topk_softmax",
}  # fmt: skip

# The sections of the file, and the module from which a user takes their names.
SECTIONS = {
    "hal/errors.py": "hal",
    "hal/types.py": "hal",
    "hal": "hal",
    "hal/hookspecs.py (pluggy; called plugin by plugin, never broadcast)": "hal.hookspecs",
    "hal_ops": "hal_ops",
}
ALIASES = {"Layout"}  # a name for a union of types, spelled out in annotations


@dataclass(frozen=True)
class Entry:
    """One definition of api.pyi and the module that must have it."""

    module: str
    node: ast.FunctionDef | ast.ClassDef

    @property
    def name(self) -> str:
        return self.node.name

    def found(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


def entries() -> list[Entry]:
    text = API.read_text()
    headers = {
        number: match[1]
        for number, line in enumerate(text.splitlines(), 1)
        if (match := re.match(r"# -{10,} (.+)", line))
    }
    assert set(headers.values()) == set(SECTIONS)
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            section = headers[max(line for line in headers if line < node.lineno)]
            found.append(Entry(SECTIONS[section], node))
    return found


ENTRIES = entries()
PRESENT = [entry for entry in ENTRIES if entry.name not in PENDING]
FUNCTIONS = [entry for entry in PRESENT if isinstance(entry.node, ast.FunctionDef)]
CLASSES = [entry for entry in PRESENT if isinstance(entry.node, ast.ClassDef)]


def name_of(entry: Entry) -> str:
    return f"{entry.module}.{entry.name}"


Parameter = tuple[str, str, Any]
REQUIRED = "required"


def wanted_parameters(function: ast.FunctionDef) -> list[Parameter]:
    """(name, kind, default) of each parameter as api.pyi has it."""
    arguments = function.args
    positional = arguments.posonlyargs + arguments.args
    defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    found = [(a.arg, "POSITIONAL_OR_KEYWORD", d) for a, d in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        found.append((arguments.vararg.arg, "VAR_POSITIONAL", None))
    found += [(a.arg, "KEYWORD_ONLY", d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        found.append((arguments.kwarg.arg, "VAR_KEYWORD", None))
    return [(name, kind, REQUIRED if d is None else ast.literal_eval(d)) for name, kind, d in found]


def actual_parameters(function: Callable[..., Any]) -> list[Parameter]:
    return [
        (p.name, p.kind.name, REQUIRED if p.default is p.empty else p.default)
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]


def wanted_fields(node: ast.ClassDef) -> list[str]:
    return [s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]


def has_field(cls: type, name: str) -> bool:
    """Whether instances of ``cls`` have ``name``: annotated, a slot, a property, or set by the constructor."""
    if any(name in c.__dict__ or name in inspect.get_annotations(c) for c in cls.__mro__):
        return True
    return f"self.{name} =" in inspect.getsource(cls)


def public(module: str) -> set[str]:
    names: set[str] = set(importlib.import_module(module).__all__)
    return names


@pytest.mark.parametrize("entry", PRESENT, ids=name_of)
def test_name_exists_and_is_public(entry: Entry) -> None:
    assert entry.found() is not None
    assert entry.module == "hal.hookspecs" or entry.name in public(entry.module)


@pytest.mark.parametrize("module", ["hal", "hal_ops"])
def test_nothing_else_is_public(module: str) -> None:
    text = API.read_text()
    for name in sorted(public(module)):
        assert re.search(rf"\b{name}\b", text), f"{module}.{name} is public but not in api.pyi"


@pytest.mark.parametrize("entry", FUNCTIONS, ids=name_of)
def test_signature_is_the_same(entry: Entry) -> None:
    assert isinstance(entry.node, ast.FunctionDef)
    assert actual_parameters(entry.found()) == wanted_parameters(entry.node)


@pytest.mark.parametrize("entry", CLASSES, ids=name_of)
def test_class_has_the_fields_and_bases(entry: Entry) -> None:
    assert isinstance(entry.node, ast.ClassDef)
    cls = entry.found()
    missing = [name for name in wanted_fields(entry.node) if not has_field(cls, name)]
    assert not missing
    bases = {base.__name__ for base in cls.__mro__}
    assert {ast.unparse(base) for base in entry.node.bases} <= bases
    for method in entry.node.body:
        if isinstance(method, ast.FunctionDef):
            wanted = [p for p in wanted_parameters(method) if p[0] != "self"]
            assert actual_parameters(getattr(cls, method.name)) == wanted


@pytest.mark.parametrize("entry", [e for e in CLASSES if e.name in ("DType", "RefusalCode")], ids=name_of)
def test_vocabulary_has_the_members(entry: Entry) -> None:
    assert isinstance(entry.node, ast.ClassDef)
    words = (ast.get_docstring(entry.node) or "").split(";")[0].rstrip(".").split()
    cls = entry.found()
    assert issubclass(cls, enum.Enum)
    assert [member.value for member in cls] == words


@pytest.mark.parametrize("name", ["Device", "Refusal", "Claim"])
def test_record_is_frozen(name: str) -> None:
    cls = getattr(importlib.import_module("hal"), name)
    assert cls.__dataclass_params__.frozen


def test_pending_names_do_not_exist_yet() -> None:
    assert {entry.name for entry in ENTRIES} >= PENDING
    here = {name for name in PENDING if hasattr(importlib.import_module("hal_ops"), name)}
    assert not here, "take these names out of PENDING"


def test_types_named_in_comments_exist() -> None:
    ops = importlib.import_module("hal_ops")
    for name in (
        "KVCacheFormat",
        "Component",
        "Scale",
        "Factor",
        "KVIdentity",
        "AttentionPlan",
        "Scheme",
        "PackedWeight",
    ):
        assert inspect.isclass(getattr(ops, name)), name


def test_a_difference_is_noticed() -> None:
    node = ast.parse("def f(a, b=1, *, c: int = 2): ...").body[0]
    assert isinstance(node, ast.FunctionDef)

    def same(a: Any, b: int = 1, *, c: int = 2) -> None: ...
    def other_default(a: Any, b: int = 2, *, c: int = 2) -> None: ...
    def other_order(b: Any, a: int = 1, *, c: int = 2) -> None: ...
    def other_kind(a: Any, b: int = 1, c: int = 2) -> None: ...

    assert actual_parameters(same) == wanted_parameters(node)
    for other in (other_default, other_order, other_kind):
        assert actual_parameters(other) != wanted_parameters(node)
