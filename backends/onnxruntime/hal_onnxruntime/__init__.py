"""ONNX Runtime's CPU provider as device ``onnxruntime:cpu``. The SDK is imported inside the hooks only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.hookspecs import hookimpl
from hal.types import Device, Kernel

if TYPE_CHECKING:
    from hal_onnxruntime.memory import HostMemory

__version__ = "0.1.0"


@hookimpl
def hal_devices() -> list[Device]:
    """The CPU provider, or a placeholder that says what is missing."""
    from hal_onnxruntime import device

    return [device.probe()]


@hookimpl
def hal_kernels(device: Device) -> list[Kernel]:
    """Attention, gemm and prepack; none when ONNX Runtime is missing."""
    if not device.available:
        return []
    from hal_onnxruntime import attention, gemm, kv

    return [*attention.kernels(), *gemm.kernels(), *kv.kernels()]


@hookimpl
def hal_memory(device: Device) -> HostMemory:
    """Host memory as numpy arrays."""
    from hal_onnxruntime.memory import HostMemory

    return HostMemory(device.id)
