"""Host memory: native arrays are ``numpy.ndarray``; CPU tensors of any framework are viewed, not copied."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hal.array import Array
from hal.dtype import DType
from hal.errors import ContractError
from hal_onnxruntime.device import memory_info

SUPPORTED = "a host array of a dtype that numpy has (no bfloat16, no fp8)"
# By name, because numpy also knows the others once ml_dtypes has been imported.
NUMPY_DTYPES = frozenset({"float64", "float32", "float16", "int64", "int32", "int8", "uint8", "bool"})


@dataclass(frozen=True)
class HostEvent:
    """A moment in seconds. Every call has finished when it returns, so there is nothing to wait for."""

    device: str
    native: float

    def wait(self) -> None: ...

    def query(self) -> bool:
        return True


class HostMemory:
    """``DeviceMemory`` of ``onnxruntime:cpu``."""

    def __init__(self, device: str) -> None:
        self.device = device

    def empty(self, shape: Sequence[int], dtype: DType) -> np.ndarray:
        """Allocate an uninitialised array.

        Raises:
            ContractError: numpy has no such dtype.
        """
        name = str(DType.parse(dtype))
        if name not in NUMPY_DTYPES:
            raise ContractError("dtype", SUPPORTED, name)
        return np.empty(tuple(shape), np.dtype(name))

    def from_host(self, x: Any) -> np.ndarray:
        """Copy a host array."""
        return np.array(self.wrap(x))

    def to_host(self, x: Any) -> np.ndarray:
        """Return the array itself: it lies on the host."""
        return self.wrap(x)

    def wrap(self, x: Any) -> np.ndarray:
        """View a host array as numpy without a copy.

        Raises:
            ContractError: the array is on another device, or numpy has no such dtype.
        """
        if isinstance(x, np.ndarray):
            return x
        if isinstance(x, Array):
            raise ContractError("x", SUPPORTED, f"{x.dtype} on {x.device}")
        try:
            # numpy marks what older DLPack producers hand out read-only; a torch tensor's own view is writable.
            return x.detach().numpy() if hasattr(x, "detach") else np.from_dlpack(x)
        except (AttributeError, BufferError, RuntimeError, TypeError) as error:
            what = f"{getattr(x, 'dtype', type(x).__name__)} on {getattr(x, 'device', 'no device')}"
            raise ContractError("x", SUPPORTED, f"{what}: {error}") from None

    def synchronize(self) -> None:
        """Nothing runs in the background."""

    def event(self) -> HostEvent:
        """Return the present moment."""
        return HostEvent(self.device, time.perf_counter())

    def elapsed(self, start: HostEvent, end: HostEvent) -> float:
        """Seconds between two events."""
        return end.native - start.native

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        return memory_info()
