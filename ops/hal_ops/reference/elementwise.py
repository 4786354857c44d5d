"""rms_norm, rope and silu_mul, naive."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hal_ops.reference.values import Floats, as_float64


@np.errstate(invalid="ignore", over="ignore")
def rms_norm(x: Any, weight: Any, eps: float, *, residual: Any = None) -> Floats | tuple[Floats, Floats]:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang & Sennrich 2019).

    With ``residual`` (shape of x): normalises ``residual + x`` and returns ``(out, residual + x)``.

    >>> rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), 0.0).round(4).tolist()
    [[0.8485, 2.2627]]
    """
    x, weight = as_float64(x), as_float64(weight)
    total = x if residual is None else as_float64(residual) + x
    out = np.empty_like(total)
    for at in np.ndindex(total.shape[:-1]):
        row = total[at]
        mean = sum(float(e) * float(e) for e in row) / len(row)
        for d, element in enumerate(row):
            out[(*at, d)] = element / math.sqrt(mean + eps) * weight[d]
    return out if residual is None else (out, total)


@np.errstate(invalid="ignore", over="ignore")
def rope(q: Any, k: Any, positions: Any, cos: Any, sin: Any, *, interleaved: bool = False) -> tuple[Floats, Floats]:
    """Rotate pairs of q ``[T,Hq,D]`` and k ``[T,Hkv,D]`` by the angle of their position (Su et al. 2021).

    cos, sin ``[max_pos, rot/2]``; the first ``rot`` dimensions rotate. Pairs are ``(d, d + rot/2)``, or
    ``(2d, 2d + 1)`` when interleaved.

    >>> q = np.array([[[1.0, 0.0, 7.0]]])
    >>> rope(q, q, [0], np.zeros((1, 1)), np.ones((1, 1)))[0].tolist()
    [[[0.0, 1.0, 7.0]]]
    """
    cos, sin = as_float64(cos), as_float64(sin)
    half = cos.shape[-1]
    rotated = []
    for x in (as_float64(q), as_float64(k)):
        out = x.copy()
        for t, h, d in np.ndindex(*x.shape[:2], half):
            one, two = (2 * d, 2 * d + 1) if interleaved else (d, d + half)
            c, s = cos[int(positions[t]), d], sin[int(positions[t]), d]
            out[t, h, one] = x[t, h, one] * c - x[t, h, two] * s
            out[t, h, two] = x[t, h, two] * c + x[t, h, one] * s
        rotated.append(out)
    return rotated[0], rotated[1]


@np.errstate(invalid="ignore", over="ignore")
def silu_mul(x: Any) -> Floats:
    """``silu(x[..., :d]) * x[..., d:]`` (Shazeer 2020), ``[...,2d]`` to ``[...,d]``.

    >>> silu_mul(np.array([0.0, 2.0])).tolist()
    [0.0]
    """
    x = as_float64(x)
    half = x.shape[-1] // 2
    out = np.empty((*x.shape[:-1], half))
    for *lead, d in np.ndindex(out.shape):
        gate = x[(*lead, d)]
        out[(*lead, d)] = gate / (1 + np.exp(-gate)) * x[(*lead, half + d)]
    return out
