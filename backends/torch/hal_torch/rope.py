"""Rotary position embedding, in place and in fp32."""

from __future__ import annotations

from torch import Tensor

from hal.constraint import Constraint, Flags, OneOf, Range
from hal.types import Claim, Device, DType, Kernel

FLOATS = OneOf({DType.float32, DType.float16, DType.bfloat16})


def rope(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """Rotate the first ``2 * cos.shape[1]`` dimensions of ``q [T, Hq, D]`` and ``k [T, Hkv, D]`` in place.

    ``positions`` integer ``[T]``, ``cos`` and ``sin`` ``[max_pos, rot/2]``. Pairs are the two halves of the
    rotated dimensions, or neighbours when ``interleaved``.
    """
    half = cos.shape[-1]
    rows = positions.long()
    c, s = cos[rows].unsqueeze(1).float(), sin[rows].unsqueeze(1).float()
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    for x in (q, k):
        one, two = x[..., first], x[..., second]
        wide_one, wide_two = one.float(), two.float()
        # Both products exist before either half is overwritten.
        rotated = wide_one * c - wide_two * s
        two.copy_(wide_two * c + wide_one * s)
        one.copy_(rotated)


def kernels(device: Device) -> list[Kernel]:
    """Return the rotary embedding kernel."""
    needs: dict[str, Constraint] = {
        "dtype": FLOATS,
        "cos_dtype": FLOATS,
        "head_dim": Range(1, None),
        "rot_dim": Range(1, None),
        "features": Flags({"interleaved"}),
    }
    claim = Claim(op="rope", kernel="torch.rope", needs=needs, determinism="batch")
    return [Kernel(claim, lambda spec: rope)]
