"""Attention and the merge of attention states, naive."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal_ops.reference.cache import Rows
from hal_ops.reference.values import Floats, as_float64

Window = tuple[int, int]


@np.errstate(invalid="ignore", over="ignore")  # NaN and inf are data here
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    q_indptr: Any,
    kv_lens: Any = None,
    kv_indptr: Any = None,
    block_table: Any = None,
    layout: Any = "NHD",
    scale: float | None = None,
    causal: bool = True,
    window: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    mask: Any = None,
    bias: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[Floats, Floats]:
    """Softmax attention, one query, head and key after the other (Vaswani et al. 2017).

    Shapes are those of ``hal_ops.attention``: q ``[T,Hq,Dk]``; k, v ragged ``[S,Hkv,D]`` with
    ``kv_indptr [B+1]``, or paged with ``block_table [B,P]`` and ``kv_lens [B]``. Any dtype.
    Rows of disallowed keys are never read.

    Returns:
        ``(out [T,Hq,Dv], lse [T,Hq])``, float64; lse in natural log, sink included.

    >>> one = np.ones((1, 1, 4))
    >>> out, lse = attention(one, one, 3 * one, q_indptr=[0, 1], kv_indptr=[0, 1])
    >>> out.ravel().tolist(), lse.item()
    ([3.0, 3.0, 3.0, 3.0], 2.0)
    """
    q = as_float64(q)
    total, heads, dim = q.shape
    keys = Rows(k, k_scale, layout, "k", block_table, kv_indptr)
    values = Rows(v, v_scale, layout, "v", block_table, kv_indptr)
    group = heads // keys.heads if keys.heads else 1
    scale = dim**-0.5 if scale is None else scale
    out, lse = np.zeros((total, heads, values.dim)), np.full((total, heads), -np.inf)
    cell = 0  # where this request's Lq x Lk cells begin in mask and bias
    for b, lk in enumerate(_lengths(kv_lens, kv_indptr)):
        first, lq = int(q_indptr[b]), int(q_indptr[b + 1]) - int(q_indptr[b])
        for i in range(lq):
            p = i + lk - lq
            for h in range(heads):
                scores, rows = [], []
                for j in range(lk):
                    at = cell + i * lk + j
                    if not _visible(p, j, causal, window) or not _keeps(mask, bias, h, at):
                        continue
                    score = scale * np.dot(q[first + i, h], keys.row(b, j, h // group))
                    if softcap > 0:
                        score = softcap * np.tanh(score / softcap)
                    if alibi_slopes is not None:
                        score = score - float(alibi_slopes[h]) * abs(j - p)
                    if bias is not None:
                        score = score + float(_of_head(bias, h)[at])
                    scores.append(score)
                    rows.append(values.row(b, j, h // group))
                sink = None if sinks is None else float(sinks[h])
                out[first + i, h], lse[first + i, h] = _weighted_mean(scores, rows, sink, values.dim)
        cell += lq * lk
    return out, lse


@np.errstate(invalid="ignore")
def merge_attention_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Floats, Floats]:
    """Attention over the union of two key sets, from the results over each: o ``[T,H,D]``, lse ``[T,H]``.

    A state of lse ``-inf`` is empty, and its ``o`` is not read.

    >>> o, lse = merge_attention_states([[[1.0]]], [[0.0]], [[[3.0]]], [[0.0]])
    >>> o.item(), round(lse.item(), 6)
    (2.0, 0.693147)
    """
    o_a, lse_a, o_b, lse_b = map(as_float64, (o_a, lse_a, o_b, lse_b))
    out, lse = np.zeros_like(o_a), np.full_like(lse_a, -np.inf)
    for at in np.ndindex(lse_a.shape):
        states = [(part[at], o[at]) for o, part in ((o_a, lse_a), (o_b, lse_b)) if part[at] != -np.inf]
        out[at], lse[at] = _weighted_mean([s for s, _ in states], [row for _, row in states], None, o_a.shape[-1])
    return out, lse


def _visible(p: int, j: int, causal: bool, window: Window) -> bool:
    left, right = window
    return (not causal or j <= p) and (left < 0 or j >= p - left) and (right < 0 or j <= p + right)


def _keeps(mask: Any, bias: Any, h: int, at: int) -> bool:
    return (mask is None or bool(_of_head(mask, h)[at])) and (bias is None or _of_head(bias, h)[at] != -np.inf)


def _of_head(cells: Any, h: int) -> NDArray[Any]:
    cells = np.asarray(cells)
    return np.asarray(cells if cells.ndim == 1 else cells[h])


def _lengths(kv_lens: Any, kv_indptr: Any) -> list[int]:
    return [int(n) for n in (np.diff(np.asarray(kv_indptr)) if kv_lens is None else np.asarray(kv_lens))]


def _weighted_mean(scores: list[Any], rows: list[Floats], sink: float | None, dim: int) -> tuple[Floats, float]:
    """Mean of the rows weighted by ``exp(score)``, and the log of the sum of the weights."""
    logits = np.array([*scores, *([] if sink is None else [sink])], dtype=np.float64)
    top = logits.max(initial=-np.inf)
    if top == -np.inf:
        return np.zeros(dim), -np.inf
    weights = np.exp(logits - top)
    total = np.zeros(dim)
    for weight, row in zip(weights, rows, strict=False):  # the sink has a weight, but no row
        total += weight * row
    return total / weights.sum(), float(top + np.log(weights.sum()))
