"""A vendor that exists in this process only: devices, kernels, memory and failures are whatever a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import hal
from hal import health
from hal.hookspecs import hookimpl
from hal.types import Claim, Device, DType, Kernel, OpSpec
from hal_ops import reference, spec
from hal_ops.arrays import host_empty
from hal_ops.spec import VOCABULARY

SILU = spec("silu_mul", dtype="float32", dim=4)  # the smallest request there is


class Anything:
    """A constraint that admits every value."""

    def admits(self, value: Any) -> bool:
        return True

    def __str__(self) -> str:
        return "anything"


def everything(op: str) -> dict[str, Anything]:
    """Needs that admit all of an operator's vocabulary."""
    return {name: Anything() for name in VOCABULARY[op] if name != "determinism"}


def store(out: Any, values: Any) -> None:
    """Round float64 values into an output of any dtype."""
    reference.storage(out)[...] = reference.encode(values, reference.dtype_of(out))


def silu_mul(x: Any, *, out: Any) -> None:
    store(out, reference.silu_mul(x))


def gemm(a: Any, b: Any, *, out: Any, group_size: Any = None, a_quant: Any = "none", **options: Any) -> None:
    store(out, reference.gemm(a, b, **options))


def attention(q: Any, k: Any, v: Any, plan: Any, *, out: Any, lse: Any = None, **options: Any) -> None:
    where = {"kv_indptr": plan.kv_indptr_host}
    if plan.paged:
        where = {"block_table": plan.block_table_host, "kv_lens": plan.kv_lens}
    values, sums = reference.attention(q, k, v, q_indptr=plan.q_indptr_host, **where, **options)
    store(out, values)
    if lse is not None:
        lse[...] = sums


RUN: dict[str, Callable[..., Any]] = {"silu_mul": silu_mul, "gemm": gemm, "attention": attention}


def kernel(
    name: str,
    op: str = "silu_mul",
    *,
    run: Callable[..., Any] | None = None,
    build: Callable[[OpSpec], Callable[..., Any]] | None = None,
    **claim: Any,
) -> Kernel:
    """A kernel that computes the reference unless told otherwise and claims the whole vocabulary."""
    claim.setdefault("needs", everything(op))
    return Kernel(Claim(op=op, kernel=name, **claim), build or (lambda _: run or RUN[op]))


def raising(error: BaseException) -> Callable[..., Any]:
    """A function of any arguments that raises."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


@dataclass
class FakeEvent:
    device: str
    native: float

    def wait(self) -> None: ...

    def query(self) -> bool:
        return True


class FakeMemory:
    """Native arrays are numpy arrays, or ``hal.Array`` for dtypes that numpy lacks."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.synchronized = 0
        self.fail: Exception | None = None

    def empty(self, shape: Sequence[int], dtype: DType) -> Any:
        return host_empty(shape, dtype)

    def from_host(self, x: Any) -> Any:
        return x.copy() if isinstance(x, np.ndarray) else hal.Array.host(x.native.copy(), x.dtype)

    def to_host(self, x: Any) -> Any:
        return x

    def wrap(self, x: Any) -> Any:
        return x if isinstance(x, np.ndarray | hal.Array) else x.numpy()

    def synchronize(self) -> None:
        self.synchronized += 1
        if self.fail is not None:
            raise self.fail

    def event(self) -> FakeEvent:
        return FakeEvent(self.device, 0.0)

    def elapsed(self, start: Any, end: Any) -> float:
        return float(end.native - start.native)

    def memory_info(self) -> tuple[int, int]:
        return 1, 2


@dataclass
class Fake:
    """The plugin object. A hook whose attribute is an exception raises it."""

    name: str = "fake"
    kernels: Any = field(default_factory=lambda: [kernel("fake.silu")])
    devices: Any = None
    memory: Any = None
    health: Any = None
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.devices is None:
            self.devices = [self.device()]
        if self.memory is None:
            self.memory = FakeMemory(f"{self.name}:0")

    def device(self, unit: str = "0", **fields: Any) -> Device:
        fields = {"features": frozenset({"host_visible"}), "sku": "F1", "driver": "1.0", "vendor": "nobody"} | fields
        return Device(id=f"{self.name}:{unit}", plugin=self.name, **fields)

    @property
    def id(self) -> str:
        return f"{self.name}:0"

    def _answer(self, hook: str, value: Any) -> Any:
        self.asked.append(hook)
        if isinstance(value, BaseException):
            raise value
        return value

    @hookimpl
    def hal_devices(self) -> Any:
        return self._answer("devices", self.devices)

    @hookimpl
    def hal_kernels(self, device: Device) -> Any:
        return self._answer("kernels", self.kernels)

    @hookimpl
    def hal_memory(self, device: Device) -> Any:
        return self._answer("memory", self.memory)

    @hookimpl
    def hal_health(self, device: Device) -> Any:
        return self._answer("health", self.health)


def manifest(name: str = "fake", **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "vendor": "nobody",
        "version": "1.2.3",
        "contract": {"min": "1.0", "max": "1.0"},
        "ops": [],
        "requires": [],
    } | fields


@contextmanager
def installed(*fakes: Fake) -> Iterator[Fake]:
    """Register vendors; afterwards they are gone and nothing is held against anybody."""
    for fake in fakes:
        hal.register(fake, manifest(fake.name))
    try:
        yield fakes[0]
    finally:
        loaded = {plugin.name for plugin in hal.plugins() if plugin.loaded}
        for fake in fakes:
            if fake.name in loaded:
                hal.unregister(fake.name)
        for memory in (health._devices, health._kernels, health._demoted, health._pending):
            memory.clear()


def codes(record: hal.Explanation) -> dict[str, set[str]]:
    """Kernel -> codes of its refusals."""
    found: dict[str, set[str]] = {}
    for refusal in record.refusals:
        found.setdefault(refusal.kernel, set()).add(str(refusal.code))
    return found
