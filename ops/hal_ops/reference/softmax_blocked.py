"""Attention with an online softmax over blocks of keys, and the merge of states through logaddexp."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal_ops.reference.cache_blocked import Tokens
from hal_ops.reference.values import Floats, as_float64


@np.errstate(invalid="ignore", divide="ignore", over="ignore")  # NaN and inf are data here
def attention_blocked(
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
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    mask: Any = None,
    bias: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    block: int = 16,
) -> tuple[Floats, Floats]:
    """``reference.attention`` by blocks of ``block`` keys (Milakov & Gimelshein 2018, online softmax).

    >>> one = np.ones((1, 1, 4))
    >>> attention_blocked(one, one, one, q_indptr=[0, 1], kv_indptr=[0, 1])[1].item()
    2.0
    """
    q, indptr = as_float64(q), np.asarray(q_indptr, dtype=np.int64)
    lengths = np.asarray(np.diff(kv_indptr) if kv_lens is None else kv_lens, dtype=np.int64)
    keys = Tokens(k, k_scale, layout, "k", block_table, kv_indptr)
    values = Tokens(v, v_scale, layout, "v", block_table, kv_indptr)
    out, lse = np.zeros((*q.shape[:2], values.dim)), np.full(q.shape[:2], -np.inf)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    cells = np.cumsum([0, *(np.diff(indptr) * lengths)])
    for b, lk in enumerate(lengths.tolist()):
        rows = slice(indptr[b], indptr[b + 1])
        grid = (indptr[b + 1] - indptr[b], lk)
        state = _State(q[rows].swapaxes(0, 1), sinks, values.dim)
        kept = _request_cells(mask, cells[b : b + 2], grid)
        added = _request_cells(bias, cells[b : b + 2], grid)
        for first in range(0, lk, block):
            j = np.arange(first, min(first + block, lk))
            distance = j[None, :] - (np.arange(grid[0])[:, None] + lk - grid[0])  # j - p
            allowed = _allowed(distance, causal, window)[None]
            scores = state.scores(keys.of(b, j))
            if softcap > 0:
                scores = np.tanh(scores / softcap) * softcap
            if alibi_slopes is not None:
                scores = scores - as_float64(alibi_slopes)[:, None, None] * np.abs(distance)
            if added is not None:
                scores = scores + as_float64(added[..., j])
                allowed = allowed & ~np.isneginf(as_float64(added[..., j]))
            if kept is not None:
                allowed = allowed & kept[..., j].astype(bool)
            state.update(scores, np.broadcast_to(allowed, scores.shape), values.of(b, j))
        out[rows], lse[rows] = (x.swapaxes(0, 1) for x in state.result())
    return out, lse


class _State:
    """Running maximum, sum of weights and weighted sum of every (head, query) of one request."""

    def __init__(self, q: Floats, sinks: Any, dim: int) -> None:
        self.q = q
        sinks = np.full(len(q), -np.inf) if sinks is None else as_float64(sinks)
        self.top = np.repeat(sinks[:, None], q.shape[1], axis=1)
        self.total = np.where(np.isneginf(self.top), 0.0, 1.0)
        self.sum = np.zeros((*q.shape[:2], dim))

    def scores(self, keys: Floats) -> Floats:
        """``[Hq,Lq,block]`` from scaled queries and keys ``[block,Hkv,Dk]``."""
        return np.asarray(np.einsum("hid,jhd->hij", self.q, self._per_query_head(keys)))

    def update(self, scores: Floats, allowed: NDArray[np.bool_], values: Floats) -> None:
        """Take in one block of keys; ``values [block,Hkv,Dv]``."""
        scores = np.where(allowed, scores, -np.inf)
        top = np.maximum(self.top, scores.max(axis=-1, initial=-np.inf))
        pivot = np.where(np.isneginf(top), 0.0, top)
        decay, weights = np.exp(self.top - pivot), np.exp(scores - pivot[..., None])
        self.total = self.total * decay + weights.sum(axis=-1)
        products = weights[..., None] * self._per_query_head(values).swapaxes(0, 1)[:, None]
        # Where, not a product with zero: a disallowed value may be NaN.
        self.sum = self.sum * decay[..., None] + np.where(allowed[..., None], products, 0.0).sum(axis=2)
        self.top = top

    def result(self) -> tuple[Floats, Floats]:
        """``(out [Hq,Lq,Dv], lse [Hq,Lq])``."""
        empty = self.total == 0
        out = np.where(empty[..., None], 0.0, self.sum / self.total[..., None])
        return out, np.where(empty, -np.inf, self.top + np.log(self.total))

    def _per_query_head(self, tokens: Floats) -> Floats:
        kv_heads = tokens.shape[1]
        return np.repeat(tokens, len(self.q) // kv_heads, axis=1) if kv_heads else tokens


@np.errstate(invalid="ignore", divide="ignore", over="ignore")  # NaN and inf are data here
def merge_attention_states_blocked(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Floats, Floats]:
    """``reference.merge_attention_states`` on whole arrays: weights are ``exp(lse_x - lse)``."""
    o_a, lse_a, o_b, lse_b = map(as_float64, (o_a, lse_a, o_b, lse_b))
    lse = np.logaddexp(lse_a, lse_b)
    out = np.zeros_like(o_a)
    for o, part in ((o_a, lse_a), (o_b, lse_b)):
        there = ~np.isneginf(part)
        out += np.where(there[..., None], np.exp(part - lse)[..., None] * o, 0.0)
    return out, lse


def _allowed(distance: NDArray[np.int64], causal: bool, window: tuple[int, int]) -> NDArray[np.bool_]:
    left, right = window
    allowed = np.ones(distance.shape, dtype=bool)
    if causal:
        allowed &= distance <= 0
    if left >= 0:
        allowed &= -distance <= left
    if right >= 0:
        allowed &= distance <= right
    return allowed


def _request_cells(x: Any, cells: NDArray[np.int64], grid: tuple[int, int]) -> NDArray[Any] | None:
    """Mask or bias of one request, ``[Lq,Lk]`` or ``[Hq,Lq,Lk]``."""
    if x is None:
        return None
    x = np.asarray(x)[..., cells[0] : cells[1]]
    return np.asarray(x.reshape(*x.shape[:-1], *grid))
