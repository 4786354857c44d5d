"""KV operators: ONNX Runtime has none that this device could claim.

``ScatterND``, ``ScatterElements`` and ``TensorScatter`` return a new tensor: writing one token would
copy the whole cache. ``GroupQueryAttention`` appends in place, but only inside attention, where the
contract says that the cache holds the new tokens already. The caches of this device are host arrays,
so ``cpu:0`` writes, gathers, copies and converts them in place: ``kv_write(..., device="cpu:0")``.
"""

from __future__ import annotations

from hal.types import Kernel


def kernels() -> list[Kernel]:
    """None; the module says why."""
    return []
