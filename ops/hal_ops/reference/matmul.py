"""gemm and the dequantisation that ``prepack`` stands for, naive."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from hal_ops.reference.values import Floats, as_float64

SCALE_BLOCK = 128  # edge of the blocks of a 2-D scale


def gemm(
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
) -> Floats:
    """``act(alpha * (dq(a) @ dq(b)) + beta*c + bias)``, element after element, ``[...,M,N]`` in float64.

    a ``[...,M,K]`` (``[...,K,M]`` with trans_a), b ``[...,K,N]``; leading dimensions broadcast. Scales
    are multipliers: scalar, per row of a ``[M]``, per column of b ``[N]``, or per block of 128
    (``[M,ceil(K/128)]`` and ``[ceil(K/128),ceil(N/128)]``); ``dq(a) = (a - a_zero) * a_scale``.
    ``c`` is not read when beta is 0. gelu: Hendrycks & Gimpel 2016.

    >>> gemm(np.ones((1, 2)), np.ones((2, 2)), bias=np.array([0, -5]), activation="relu").tolist()
    [[2.0, 0.0]]
    """
    a, b = _operand(a, trans_a, a_scale, a_zero, 0), _operand(b, trans_b, b_scale, None, 1)
    c = None if beta == 0 else as_float64(c)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2], () if c is None else c.shape[:-2])
    out = np.empty((*batch, a.shape[-2], b.shape[-1]))
    a, b = np.broadcast_to(a, (*batch, *a.shape[-2:])), np.broadcast_to(b, (*batch, *b.shape[-2:]))
    c = None if c is None else np.broadcast_to(c, out.shape)
    bias = None if bias is None else as_float64(bias)
    with np.errstate(invalid="ignore", over="ignore"):
        for at in np.ndindex(out.shape):
            *lead, i, j = at
            total = np.float64(alpha) * np.dot(a[(*lead, i)], b[(*lead, slice(None), j)])
            if c is not None:
                total += beta * c[at]
            if bias is not None:
                total += bias[j]
            out[at] = _activate(total, activation)
    return out


def dequantise(
    weight: Any, *, scheme: str = "dense", shape: tuple[int, int] | None = None, trans_b: bool = True
) -> Floats:
    """The matrix ``[N,K]`` (``[K,N]`` without trans_b) that ``prepack(weight, scheme=...)`` stands for, exact.

    ``weight`` is an array when the scheme is dense, else ``uint8`` GGUF blocks of the ``[N,K]`` matrix
    (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h): 32 weights along K share a
    block of float16 d (q4_1: and float16 m) and codes; weight = d*(q-8), d*q+m, d*q in q4_0, q4_1, q8_0.

    >>> block = struct.pack("<e32b", 0.5, *range(32))
    >>> dequantise(np.frombuffer(block, np.uint8), scheme="gguf_q8_0", shape=(1, 32))[0, :3].tolist()
    [0.0, 0.5, 1.0]
    """
    if scheme == "dense":
        return as_float64(weight)  # as it lies: trans_b says which way
    if shape is None:
        raise ValueError("raw GGUF blocks need shape=(n, k)")
    raw = np.ascontiguousarray(weight, dtype=np.uint8).tobytes()
    size = {"gguf_q4_0": 18, "gguf_q4_1": 20, "gguf_q8_0": 34}[scheme]
    weights = [w for start in range(0, len(raw), size) for w in _block(raw[start : start + size], scheme)]
    matrix = np.array(weights, dtype=np.float64).reshape(shape)
    return matrix if trans_b else matrix.T


def _block(raw: bytes, scheme: str) -> list[float]:
    if scheme == "gguf_q8_0":
        d, *codes = struct.unpack("<e32b", raw)
        return [d * code for code in codes]
    d, m = struct.unpack("<ee", raw[:4]) if scheme == "gguf_q4_1" else (*struct.unpack("<e", raw[:2]), None)
    packed = raw[-16:]
    nibbles = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
    return [d * (q - 8) if m is None else d * q + m for q in nibbles]


def _operand(x: Any, transposed: bool, scale: Any, zero: Any, axis: int) -> Floats:
    """The logical matrix, dequantised; a 1-D scale or zero runs along ``axis``."""
    matrix: Floats = as_float64(x).swapaxes(-1, -2) if transposed else as_float64(x)
    if scale is None and zero is None:
        return matrix
    result = np.empty_like(matrix)
    for i, j in np.ndindex(matrix.shape[-2:]):
        origin = 0.0 if zero is None else _shared(as_float64(zero), (i, j), matrix.shape[-2:], axis)
        factor = 1.0 if scale is None else _shared(as_float64(scale), (i, j), matrix.shape[-2:], axis)
        result[..., i, j] = (matrix[..., i, j] - origin) * factor
    return result


def _shared(scale: Floats, at: tuple[int, int], extents: tuple[int, ...], axis: int) -> float:
    if scale.size == 1:
        return float(scale.item())
    if scale.ndim == 1:
        return float(scale[at[axis]])
    axes = zip(at, scale.shape, extents, strict=True)
    return float(scale[tuple(x if count == extent else x // SCALE_BLOCK % count for x, count, extent in axes)])


def _activate(x: Any, name: str) -> Any:
    if name == "relu":
        return x if np.isnan(x) else max(x, 0.0)
    if name == "gelu":
        return 0.5 * x * math.erfc(-x / math.sqrt(2))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "silu":
        return x / (1 + np.exp(-x))
    return x
