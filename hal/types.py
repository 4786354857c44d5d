"""The records that engines, runtime and plugins exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, Protocol

from hal.constraint import Constraint, Flags, MultipleOf, OneOf, Range
from hal.dtype import DType

__all__ = [
    "Bound",
    "Claim",
    "Constraint",
    "DType",
    "Device",
    "Event",
    "EvidenceClass",
    "Explanation",
    "Flags",
    "Kernel",
    "MultipleOf",
    "OneOf",
    "OpSpec",
    "PluginInfo",
    "Range",
    "Refusal",
    "RefusalCode",
]

EvidenceClass = Literal["hardware", "simulated", "compiled", "interpreted", "none"]


@dataclass(frozen=True)
class PluginInfo:
    """One plugin that was found, loaded or not. ``contract`` is the negotiated "major.minor"."""

    name: str
    version: str
    contract: str
    loaded: bool
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of one plugin, present or not (``available`` and ``reason``)."""

    id: str
    plugin: str
    vendor: str
    sku: str = ""
    arch: str = ""
    driver: str = ""
    runtime: str = ""
    memory_bytes: int | None = None
    native_dtypes: frozenset[DType] = frozenset()
    emulated_dtypes: frozenset[DType] = frozenset()
    features: frozenset[str] = frozenset()
    limits: Mapping[str, int] = field(default_factory=dict, hash=False)
    available: bool = True
    reason: str | None = None
    tensor_device: str | None = None
    evidence: EvidenceClass = "none"


class RefusalCode(StrEnum):
    """Why a candidate was not chosen."""

    device = "device"
    driver = "driver"
    missing_dependency = "missing_dependency"
    dtype = "dtype"
    shape = "shape"
    layout = "layout"
    feature = "feature"
    resource = "resource"
    policy = "policy"
    evidence = "evidence"
    quarantined = "quarantined"
    contract = "contract"


@dataclass(frozen=True)
class Refusal:
    """One reason why one kernel does not serve one specification."""

    kernel: str
    code: RefusalCode
    field: str
    required: str
    actual: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.kernel} [{self.code}] {self.field}: required {self.required}, got {self.actual}{hint}"


class OpSpec:
    """What is asked of a kernel: operator, contract version and bucketed fields. Hashable.

    Fields at their neutral default are left out, so that a claim written before a field existed
    still serves requests that do not use it.

    >>> OpSpec("gemm", (1, 0), {"n": 8}) == OpSpec("gemm", (1, 0), {"n": 8})
    True
    """

    __slots__ = ("_hash", "contract", "fields", "op")
    op: str
    contract: tuple[int, int]
    fields: Mapping[str, Any]

    def __init__(self, op: str, contract: tuple[int, int], fields: Mapping[str, Any]) -> None:
        set_ = object.__setattr__
        set_(self, "op", op)
        set_(self, "contract", contract)
        set_(self, "fields", MappingProxyType(dict(fields)))
        set_(self, "_hash", hash((op, contract, frozenset(fields.items()))))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"OpSpec is frozen: cannot set {name}")

    def __hash__(self) -> int:
        hash_: int = self._hash  # type: ignore[attr-defined]
        return hash_

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpSpec):
            return NotImplemented
        return (self.op, self.contract, self.fields) == (other.op, other.contract, other.fields)

    def __repr__(self) -> str:
        return f"OpSpec({self})"

    def __reduce__(self) -> tuple[Any, ...]:  # a mapping proxy does not pickle
        return OpSpec, (self.op, self.contract, dict(self.fields))

    def __str__(self) -> str:
        def show(value: Any) -> str:
            return "+".join(sorted(value)) if isinstance(value, frozenset) else str(value)

        return f"{self.op}(" + ", ".join(f"{k}={show(v)}" for k, v in sorted(self.fields.items())) + ")"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one kernel declares that it can do. A field that ``needs`` does not name is unsupported."""

    op: str
    kernel: str
    contract: tuple[int, int] = (1, 0)
    needs: Mapping[str, Constraint] = field(default_factory=dict, hash=False)
    workspace_bytes: Callable[[OpSpec], int] | int = 0
    capture_safe: bool = False
    jit: bool = False
    determinism: Literal["none", "run", "batch"] = "none"
    numeric_class: Literal["A", "B", "C"] = "A"
    priority: int = 0
    refuse: Callable[[OpSpec], list[Refusal]] | None = None
    cost: Callable[[OpSpec], float] | None = None


@dataclass(frozen=True)
class Kernel:
    """What a plugin returns: a claim, and how to build the callable for one specification."""

    claim: Claim
    build: Callable[[OpSpec], Callable[..., Any]]


@dataclass(frozen=True)
class Explanation:
    """The record of one choice: what was asked, what won, why the others did not."""

    requested: OpSpec
    chosen: str | None
    refusals: tuple[Refusal, ...]
    evidence: Mapping[str, Any]
    generation: int


class Bound:
    """Result of ``hal.bind``.

    Engines call ``b.fn(...)`` each time and never keep ``fn``: the runtime replaces it when
    policy, health or plugins change. A call therefore costs one attribute load.
    """

    __slots__ = ("__weakref__", "fn", "kernel", "record")
    fn: Callable[..., Any]
    kernel: str
    record: Explanation

    def __init__(self, fn: Callable[..., Any], kernel: str, record: Explanation) -> None:
        self.fn = fn
        self.kernel = kernel
        self.record = record

    def __repr__(self) -> str:
        return f"Bound({self.record.requested} -> {self.kernel})"


class Event(Protocol):
    """A point in a device's stream that other work can wait for."""

    device: str
    native: Any

    def wait(self) -> None: ...

    def query(self) -> bool: ...
