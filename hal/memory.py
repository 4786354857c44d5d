"""Arrays on devices: allocation and copies, through the memory hook of the device's plugin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from hal import health, loading, registry
from hal.array import Array
from hal.dtype import DType
from hal.errors import ContractError, DeviceLost, HalError
from hal.types import Device, Event


class DeviceMemory(Protocol):
    """What a plugin's ``hal_memory`` returns for a device. Sizes in bytes, times in seconds."""

    def empty(self, shape: Sequence[int], dtype: DType) -> Any: ...

    def from_host(self, x: Any) -> Any: ...

    def to_host(self, x: Any) -> Any: ...

    def wrap(self, x: Any) -> Any: ...

    def synchronize(self) -> None: ...

    def event(self) -> Event: ...

    def elapsed(self, start: Event, end: Event) -> float: ...

    def memory_info(self) -> tuple[int, int]: ...


def empty(shape: Sequence[int], dtype: DType | str, device: str | Device) -> Any:
    """Allocate an uninitialised array of ``shape`` in the device's native kind.

    >>> tuple(empty((2, 3), "float32", "cpu:0").shape)
    (2, 3)
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) else (None,)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ContractError("shape", "a sequence of non-negative integers", repr(shape))
    return registry.memory(_usable(device).id).empty(sizes, DType.parse(dtype))


def asarray(x: Any) -> Any:
    """Return ``x`` as an array that the operators take, without a copy.

    Torch tensors, numpy arrays and ``hal.Array`` are returned as they are; anything else needs
    ``__dlpack__`` and becomes a torch tensor when torch is loaded, else a numpy array.

    Raises:
        ContractError: ``x`` is no array.
    """
    if isinstance(x, Array) or type(x).__module__.partition(".")[0] in ("numpy", "torch"):
        return x
    if not hasattr(x, "__dlpack__"):
        raise ContractError("x", "a tensor, a numpy array, a hal.Array or an object with __dlpack__", type(x).__name__)
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.from_dlpack(x)
    import numpy

    return numpy.from_dlpack(x)


def to_device(x: Any, device: str | Device) -> Any:
    """Copy a host array, or an array of any device, to ``device``; the result is of its native kind."""
    return registry.memory(_usable(device).id).from_host(to_host(x))


def to_host(x: Any) -> Any:
    """Copy an array to the host: numpy, or a ``hal.Array`` where numpy lacks the dtype. Host arrays are not copied."""
    from hal.placement import native_device

    x = asarray(x)
    if type(x).__module__.partition(".")[0] == "numpy" or (isinstance(x, Array) and x.device == "cpu:0"):
        return x
    return registry.memory(native_device(x)).to_host(x)


def check(device: str | Device) -> None:
    """Wait for the device and raise what went wrong on it since the last check.

    Raises:
        DeviceLost: the device does not answer or its plugin says that it is ill; it is quarantined.
        HalError: an asynchronous error, such as a slot out of range in a device tensor.
    """
    target = _usable(device)
    memory = registry.find_memory(target.id)
    try:
        if memory is not None:
            memory.synchronize()
        reason = loading.call(target.plugin, "hal_health", device=target)
    except HalError as error:
        health.observe_device(target.id, error)
        raise
    except Exception as error:  # a device that cannot even say how it is
        reason = f"{type(error).__name__}: {error}"
    health.raise_pending(target.id)
    if reason is not None:
        health.quarantine(target.id, reason=reason)
        raise DeviceLost(target.id, reason)


def _usable(device: str | Device) -> Device:
    target = registry.resolve(device)
    if not target.available:
        raise DeviceLost(target.id, target.reason or "not available")
    return target
