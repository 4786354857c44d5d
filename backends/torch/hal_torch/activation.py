"""Gated activation of a feed-forward layer, in fp32."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from hal.constraint import Constraint, OneOf, Range
from hal.types import Claim, Device, DType, Kernel


def silu_mul(x: Tensor, *, out: Tensor) -> None:
    """Write ``silu(x[..., :d]) * x[..., d:]`` into ``out [..., d]``; ``x`` is ``[..., 2d]``."""
    gate, up = x.chunk(2, -1)
    out.copy_(silu(gate.float()).mul_(up))


def kernels(device: Device) -> list[Kernel]:
    """Return the SiLU gate kernel."""
    needs: dict[str, Constraint] = {
        "dtype": OneOf({DType.float32, DType.float16, DType.bfloat16}),
        "dim": Range(1, None),
    }
    claim = Claim(op="silu_mul", kernel="torch.silu_mul", needs=needs, determinism="run")
    return [Kernel(claim, lambda spec: silu_mul)]
