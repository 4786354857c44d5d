"""RMS norm: ``x / sqrt(mean(x^2) + eps) * weight``, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.constraint import Constraint, Flags, OneOf, Range
from hal.types import Claim, Device, DType, Kernel

FLOATS = OneOf({DType.float32, DType.float16, DType.bfloat16})


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor) -> None:
    """Normalise the last dimension of ``x [..., D]`` into ``out``, which may be ``x``.

    With ``residual`` (shape of ``x``) the sum of both is stored there and normalised before it is rounded.
    """
    wide = x.float()
    if residual is not None:
        wide = wide + residual
        residual.copy_(wide)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    out.copy_((wide * inverse).mul_(weight))


def kernels(device: Device) -> list[Kernel]:
    """Return the RMS norm kernel."""
    needs: dict[str, Constraint] = {
        "dtype": FLOATS,
        "weight_dtype": FLOATS,
        "dim": Range(1, None),
        "features": Flags({"residual"}),
    }
    claim = Claim(op="rms_norm", kernel="torch.rms_norm", needs=needs, determinism="run")
    return [Kernel(claim, lambda spec: rms_norm)]
