"""``TorchMemory``: allocation, copies and events on any device that torch addresses."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hal.array import Array
from hal.dtype import DType
from hal.errors import ContractError
from hal.types import Device, Event

# Dtypes that numpy lacks travel as the bits of an unsigned integer of the same width.
_BITS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def torch_dtype(dtype: DType | str) -> torch.dtype:
    """Return torch's spelling of a dtype.

    Raises:
        ContractError: torch cannot compute with it (int4, uint4).
    """
    parsed = DType.parse(dtype)
    if parsed.bits < 8:  # torch has the names, but no operator knows them
        raise ContractError("dtype", "a dtype of 8 bits or more", parsed.value)
    found: torch.dtype = getattr(torch, parsed.value)
    return found


@dataclass
class TorchEvent:
    """A point in a torch stream; on a CPU, where everything has already happened, a point in time."""

    device: str
    native: Any

    def wait(self) -> None:
        """Make the current stream wait; returns at once on a CPU."""
        if not isinstance(self.native, float):
            self.native.wait()

    def query(self) -> bool:
        """Whether the point has been reached."""
        return isinstance(self.native, float) or bool(self.native.query())


class TorchMemory:
    """The ``DeviceMemory`` of one torch device. Native arrays are tensors, which own their memory as usual."""

    def __init__(self, device: Device) -> None:
        self.id = device.id
        self.device = torch.device(device.tensor_device or "cpu")
        self.on_host = self.device.type == "cpu"

    def empty(self, shape: Sequence[int], dtype: DType) -> Tensor:
        """Allocate an uninitialised tensor."""
        return torch.empty(tuple(shape), dtype=torch_dtype(dtype), device=self.device)

    def from_host(self, x: Any) -> Tensor:
        """Copy a numpy array, a host ``hal.Array`` or a host tensor to the device."""
        if isinstance(x, np.ndarray) and any(stride < 0 for stride in x.strides):
            x = x.copy()  # torch knows no negative strides
        return _view(x).to(self.device, copy=True)

    def to_host(self, x: Any) -> Any:
        """Copy to a numpy array, or to a ``hal.Array`` for a dtype that numpy lacks. A host tensor is viewed."""
        tensor = self.wrap(x).detach().cpu()
        bits = _BITS.get(tensor.dtype)
        if bits is None:
            return tensor.numpy()
        return Array.host(tensor.view(bits).numpy(), DType.parse(tensor.dtype))

    def wrap(self, x: Any) -> Tensor:
        """View ``x`` as a tensor of this device without a copy; a tensor comes back as it is, without its gradient.

        Raises:
            ContractError: ``x`` lies elsewhere, or torch cannot view it (negative strides, foreign dtype).
        """
        if isinstance(x, Tensor):
            return x.detach() if x.requires_grad else x
        tensor = _view(x)
        if tensor.device.type != self.device.type:
            raise ContractError("x", f"an array on {self.id}", f"one on {tensor.device}")
        return tensor

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        if not self.on_host:
            torch.get_device_module(self.device).synchronize(self.device)

    def event(self) -> Event:
        """Mark this point of the current stream."""
        if self.on_host:
            return TorchEvent(self.id, time.perf_counter())
        native = torch.Event(self.device, enable_timing=True)
        native.record()
        return TorchEvent(self.id, native)

    def elapsed(self, start: Event, end: Event) -> float:
        """Return the seconds between two events, having waited for the second."""
        if self.on_host:
            return float(end.native - start.native)
        end.native.synchronize()
        return float(start.native.elapsed_time(end.native)) / 1000

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) in bytes."""
        if not self.on_host:
            free, total = torch.get_device_module(self.device).mem_get_info(self.device)
            return int(free), int(total)
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _view(x: Any) -> Tensor:
    """View an array of any kind as a tensor that shares its memory."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, np.ndarray):
        return _view_numpy(x, torch_dtype(x.dtype))  # ml_dtypes arrays count as numpy arrays and know their name
    if isinstance(x, Array):
        if not isinstance(x.native, np.ndarray):
            raise ContractError("x", "an array on the host", f"one on {x.device}")
        return _view_numpy(x.native, torch_dtype(x.dtype))
    if not hasattr(x, "__dlpack__"):
        raise ContractError("x", "a tensor, a numpy array, a hal.Array or an object with __dlpack__", type(x).__name__)
    return torch.from_dlpack(x)


def _view_numpy(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    bits = _BITS.get(dtype)
    if bits is not None:
        x = x.view(np.uint16 if bits is torch.uint16 else np.uint8)
    try:
        tensor = torch.from_numpy(x if x.flags.writeable else np.asarray(_Writable(x)))
    except ValueError as error:  # negative strides, or strides that are no multiple of the element
        raise ContractError("x", "strides that torch can view", f"{x.strides}; pass a copy") from error
    return tensor.view(dtype)


class _Writable:
    """A view of a read-only array, a memory-mapped file for instance, that torch accepts without a warning.

    Kernels write to ``out``, caches and the like only; the pages of the mapping stay write-protected.
    """

    def __init__(self, x: np.ndarray) -> None:
        interface = x.__array_interface__
        self.owner = x  # numpy keeps this object alive as the base of the view, and it keeps the memory
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
