"""Which device a function form runs on: ``device=``, else ``hal.use(...)``, else the tensor's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hal import generation, registry
from hal.array import Array
from hal.errors import ContractError
from hal.types import Device

_default: ContextVar[str | None] = ContextVar("hal_device", default=None)
_native: dict[Any, str] = {}  # torch.device or "cpu" -> device id


@contextmanager
def use(device: str | Device) -> Iterator[None]:
    """Make ``device`` the default of function forms in this thread or task while the block runs.

    Raises:
        ContractError: unknown device.
    """
    token = _default.set(registry.resolve(device).id)
    try:
        yield
    finally:
        _default.reset(token)


def place(x: Any, device: str | Device | None = None) -> str:
    """Return the id of the device that a call with the array ``x`` runs on."""
    if device is not None:
        return device if type(device) is str else registry.resolve(device).id
    return _default.get() or native_device(x)


def native_device(x: Any) -> str:
    """Return the id of the device whose plugin is native for the array; ``cpu:0`` for host arrays.

    Raises:
        ContractError: no loaded plugin addresses the array's device.
    """
    if isinstance(x, Array):
        return x.device
    where = getattr(x, "device", "cpu")
    found = _native.get(where)
    if found is None:
        found = _native[where] = _search(str(where))
    return found


def _search(where: str) -> str:
    spellings = {where, where.removesuffix(":0"), where if ":" in where else f"{where}:0"}
    if "cpu" in spellings:
        return "cpu:0"
    for device in registry.devices():
        if device.tensor_device in spellings:
            return device.id
    raise ContractError("device", "a tensor on a device that a loaded plugin addresses", where)


generation.on_change(_native.clear)
