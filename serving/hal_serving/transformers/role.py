"""Where work runs: the two roles of a model, what ran for each, and the forward that is running now."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import hal
from hal.errors import UnsupportedError
from hal.types import Explanation, OpSpec
from hal_serving.transformers.format import CacheFormat


class Role:
    """One side of a placement, ``"prefill"`` or ``"decode"``: a device, its KV format, and a record of what ran."""

    def __init__(self, name: str, device: str, kv_format: CacheFormat) -> None:
        self.name = name
        self.device = device
        self.kv_format = kv_format
        self.writers: dict[Any, str] = {}  # which device writes KV, kept by the attention function
        self._explanations: dict[tuple[str, OpSpec], Explanation] = {}
        self._kv_devices: dict[OpSpec, str] = {}
        self._seen: set[Any] = set()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Role:
        return self  # a copy of a cache (a shared prompt prefix) runs where the original runs

    def first(self, key: Any) -> bool:
        """Whether ``key`` comes up for the first time; a cheap guard before a specification is built and noted."""
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def note(self, spec: OpSpec, device: str | None = None) -> Explanation:
        """Record the kernel that serves ``spec`` for this role, on ``device`` when it is not the role's own."""
        device = device or self.device
        found = self._explanations.get((device, spec))
        if found is None:
            found = hal.explain(spec, device)
            with self._lock:
                self._explanations[device, spec] = found
        return found

    def kv_device(self, spec: OpSpec, tensor_device: str) -> str:
        """Return the device that runs a KV operator: the role's own, else the one that owns the tensors.

        Raises:
            UnsupportedError: neither has a kernel; every reason is inside.
        """
        found = self._kv_devices.get(spec)
        if found is None:
            found = self._kv_devices[spec] = self._find_kv_device(spec, tensor_device)
        return found

    def _find_kv_device(self, spec: OpSpec, tensor_device: str) -> str:
        owners = [device.id for device in hal.devices() if device.tensor_device == tensor_device]
        refusals: list[Any] = []
        for device in dict.fromkeys([self.device, *owners]):
            explanation = self.note(spec, device)
            if explanation.chosen is not None:
                return device
            refusals += explanation.refusals
        raise UnsupportedError(f"nothing moves KV for {self.name} on {self.device}: {spec}", refusals)

    @property
    def explanations(self) -> list[tuple[str, str, str, Explanation]]:
        """(role, operator, device, explanation) of everything that ran, in the order of first use."""
        with self._lock:
            return [(self.name, spec.op, device, found) for (device, spec), found in self._explanations.items()]

    @property
    def kernels(self) -> dict[str, list[str]]:
        """Operator -> names of the kernels that ran it."""
        names: dict[str, list[str]] = {}
        for _, op, _, explanation in self.explanations:
            kernels = names.setdefault(op, [])
            if explanation.chosen is not None and explanation.chosen not in kernels:
                kernels.append(explanation.chosen)
        return names


class Placement:
    """The roles of one model and the count of KV bytes that went from one to the other."""

    def __init__(self, prefill: Role, decode: Role) -> None:
        self.prefill = prefill
        self.decode = decode
        self.roles = (prefill, decode)
        self.kv_bytes_moved = 0
        self._lock = threading.Lock()

    def count_moved(self, payload: int) -> None:
        """Add to the bytes of KV handed over."""
        with self._lock:
            self.kv_bytes_moved += payload

    def __deepcopy__(self, memo: dict[int, Any]) -> Placement:
        return self


@dataclass
class Forward:
    """One running forward: the role of its linear layers, and what its layers share (``memo``)."""

    role: Role
    memo: dict[Any, Any] = field(default_factory=dict)
    parent: Forward | None = None


# Context-local, so that threads and nested models do not see each other's forward.
_CURRENT: ContextVar[Forward | None] = ContextVar("hal_forward", default=None)


def current() -> Forward | None:
    """The forward that runs in this thread, None outside of one."""
    return _CURRENT.get()


def enter(role: Role) -> None:
    """Start a forward in ``role``."""
    _CURRENT.set(Forward(role, parent=_CURRENT.get()))


def leave() -> None:
    """End the innermost forward."""
    forward = _CURRENT.get()
    _CURRENT.set(forward.parent if forward is not None else None)
