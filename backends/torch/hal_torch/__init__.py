"""Kernels composed of torch operators, for every device that torch addresses. A library, not a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal.types import Device, Kernel

__version__ = "0.1.0"


def kernels(device: Device) -> list[Kernel]:
    """Return every kernel of this library for ``device``. Imports torch."""
    from hal_torch import activation, attention, gemm, kv, norm, rope

    modules = (attention, gemm, kv, norm, rope, activation)
    return [kernel for module in modules for kernel in module.kernels(device)]
