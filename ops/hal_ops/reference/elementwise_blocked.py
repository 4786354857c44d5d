"""rms_norm, rope and silu_mul on whole arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from hal_ops.reference.values import Floats, as_float64


@np.errstate(invalid="ignore", over="ignore")
def rms_norm_blocked(x: Any, weight: Any, eps: float, *, residual: Any = None) -> Floats | tuple[Floats, Floats]:
    """``reference.rms_norm`` through the dot product of each row with itself."""
    total = as_float64(x) if residual is None else as_float64(x) + as_float64(residual)
    square = np.einsum("...d,...d->...", total, total)[..., None] / total.shape[-1]
    out = total * (as_float64(weight) / np.sqrt(square + eps))
    return out if residual is None else (out, total)


@np.errstate(invalid="ignore", over="ignore")
def rope_blocked(
    q: Any, k: Any, positions: Any, cos: Any, sin: Any, *, interleaved: bool = False
) -> tuple[Floats, Floats]:
    """``reference.rope`` as a product with the complex number ``cos + i sin``."""
    at = np.asarray(positions, dtype=np.int64)
    turn = (as_float64(cos) + 1j * as_float64(sin))[at][:, None, :]
    half = turn.shape[-1]
    one, two = slice(0, half), slice(half, 2 * half)
    if interleaved:
        one, two = slice(0, 2 * half, 2), slice(1, 2 * half, 2)

    def rotated(x: Floats) -> Floats:
        out = x.copy()
        pairs = (x[..., one] + 1j * x[..., two]) * turn
        out[..., one], out[..., two] = pairs.real, pairs.imag
        return out

    return rotated(as_float64(q)), rotated(as_float64(k))


@np.errstate(invalid="ignore", over="ignore")
def silu_mul_blocked(x: Any) -> Floats:
    """``reference.silu_mul`` through ``silu(x) = x * (1 + tanh(x/2)) / 2``."""
    gate, up = np.split(as_float64(x), 2, axis=-1)
    return gate * (0.5 + 0.5 * np.tanh(gate / 2)) * up
