"""Plugin for the host processor. Importing it imports no torch; the hooks do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.hookspecs import hookimpl
from hal.types import Device, Kernel

if TYPE_CHECKING:
    from hal.memory import DeviceMemory

__version__ = "0.1.0"


@hookimpl
def hal_devices() -> list[Device]:
    """The one device ``cpu:0``."""
    from hal_cpu.device import probe

    return [probe()]


@hookimpl
def hal_kernels(device: Device) -> list[Kernel]:
    """Torch kernels for every operator and, where the processor has the instructions, faster ones."""
    from hal_cpu import attention, gemm, kv
    from hal_torch import activation, norm, rope

    modules = (attention, gemm, kv, norm, rope, activation)
    return [kernel for module in modules for kernel in module.kernels(device)]


@hookimpl
def hal_memory(device: Device) -> DeviceMemory:
    """Host memory as torch tensors."""
    from hal_torch.memory import TorchMemory

    return TorchMemory(device)
