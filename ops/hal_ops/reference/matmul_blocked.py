"""gemm by blocks of K on whole arrays, and dequantisation through ``hal_ops.gguf``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hal_ops import gguf
from hal_ops.reference.values import Floats, as_float64


@np.errstate(invalid="ignore", over="ignore")  # NaN and inf are data here
def gemm_blocked(
    a: Any,
    b: Any,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Any = None,
    activation: str = "none",
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Any = None,
    a_scale: Any = None,
    a_zero: Any = None,
    b_scale: Any = None,
    block: int = 32,
) -> Floats:
    """``reference.gemm``, accumulated over blocks of ``block`` along K.

    >>> gemm_blocked(np.ones((1, 2)), np.ones((2, 2)), block=1).tolist()
    [[2.0, 2.0]]
    """
    a, b = as_float64(a), as_float64(b)
    a = np.moveaxis(a, -1, -2) if trans_a else a
    b = np.moveaxis(b, -1, -2) if trans_b else b
    if a_zero is not None:
        a = a - _spread(a_zero, a.shape[-2:], row_wise=True)
    if a_scale is not None:
        a = a * _spread(a_scale, a.shape[-2:], row_wise=True)
    if b_scale is not None:
        b = b * _spread(b_scale, b.shape[-2:], row_wise=False)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = np.zeros((*batch, a.shape[-2], b.shape[-1]))
    for first in range(0, a.shape[-1], block):
        total += a[..., first : first + block] @ b[..., first : first + block, :]
    total = total * alpha
    if beta != 0:
        total = total + as_float64(c) * beta
    return np.asarray(_ACTIVATIONS[activation](total if bias is None else total + as_float64(bias)))


def dequantise_blocked(
    weight: Any, *, scheme: str = "dense", shape: tuple[int, int] | None = None, trans_b: bool = True
) -> Floats:
    """``reference.dequantise`` of all blocks at once."""
    if scheme == "dense":
        return as_float64(weight)
    if shape is None:
        raise ValueError("raw GGUF blocks need shape=(n, k)")
    matrix: Floats = gguf.decode(scheme, np.asarray(weight), shape, "float64")
    return matrix if trans_b else matrix.T


def _spread(scale: Any, shape: tuple[int, ...], *, row_wise: bool) -> Floats:
    """A scalar, vector or block scale as something that broadcasts to the matrix ``shape``."""
    spread: Floats = as_float64(scale)
    if spread.size == 1:
        return spread.reshape(())
    if spread.ndim == 1:
        return spread[:, None] if row_wise else spread[None, :]
    for axis, extent in enumerate(shape):
        if spread.shape[axis] not in (1, extent):
            spread = np.repeat(spread, 128, axis=axis).take(range(extent), axis=axis)
    return spread


def _gelu(x: Floats) -> Floats:
    return np.asarray(x * (1 + np.vectorize(math.erf, otypes=[float])(x / np.sqrt(2))) / 2)


def _gelu_tanh(x: Floats) -> Floats:
    return np.asarray(x / (1 + np.exp(-np.sqrt(8 / np.pi) * (x + 0.044715 * x * x * x))))


def _silu(x: Floats) -> Floats:
    return np.asarray(x * (0.5 + 0.5 * np.tanh(x / 2)))


_ACTIVATIONS: dict[str, Any] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}
