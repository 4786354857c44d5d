"""The ONNX Attention operator (opset 23): ragged keys, masks, windows on both sides, float32 inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hal_onnxruntime import session
from hal_onnxruntime.session import BOOL, FLOAT, node
from hal_ops.plan import AttentionPlan

NAME = "ort.attention"
# Rows of scores that exist at a time: bounds the workspace, and causal blocks skip the keys behind them.
Q_BLOCK = 256
# Which keys query rows i..j may see: bool [1 or Hq, j-i, Lk].
AllowedRows = Callable[[int, int], np.ndarray]


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    plan: AttentionPlan,
    *,
    out: np.ndarray,
    scale: float,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: np.ndarray | None = None,
    **refused: Any,
) -> None:
    """Attention on ragged keys ``[S, Hkv, D]``, or on HND caches with a block table of one column (copied)."""
    q, scale = positive(q, scale)
    mask = None if mask is None else np.atleast_2d(mask)
    cell = 0  # where this request's Lq x Lk cells begin in the mask
    for b in range(plan.batch):
        rows = slice(*(int(x) for x in plan.q_indptr_host[b : b + 2]))
        lq, lk = rows.stop - rows.start, int(plan.kv_lens[b])
        if lk == 0:  # no page either: the cache and the table may be empty
            out[rows] = 0
            continue
        if plan.paged:
            page = plan.block_table_host[b, 0]
            keys, values = (x[page, :, :lk].swapaxes(0, 1) for x in (k, v))
        else:
            keys, values = (x[plan.kv_indptr_host[b] : plan.kv_indptr_host[b + 1]] for x in (k, v))
        kept = None if mask is None else mask[:, cell : cell + lq * lk].reshape(len(mask), lq, lk)
        request(q[rows], keys, values, out[rows], scale, softcap, allowed_rows(lq, lk, causal, window, kept))
        cell += lq * lk


def allowed_rows(
    lq: int, lk: int, causal: bool, window: tuple[int, int], mask: np.ndarray | None = None
) -> AllowedRows:
    """Say which keys the rows of one request may see; ``mask`` is bool ``[1 or Hq, Lq, Lk]``."""
    right = 0 if causal else window[1]

    def rows(i: int, j: int) -> np.ndarray:
        at, key = np.arange(i, j)[:, None] + lk - lq, np.arange(lk)
        seen = np.ones((j - i, lk), bool) if right < 0 else key <= at + right
        if window[0] >= 0:
            seen &= key >= at - window[0]
        return seen[None] if mask is None else seen & mask[:, i:j]

    return rows


def request(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    scale: float,
    softcap: float,
    allowed: AllowedRows,
) -> None:
    """One request: q, out ``[Lq, Hq, D]``, k, v ``[Lk, Hkv, D]`` of any strides, block by block of query rows."""
    q, k, v = (np.ascontiguousarray(x, np.float32) for x in (q, k, v))
    run = partial(_call, scale=scale, softcap=softcap)
    for i in range(0, len(q), Q_BLOCK):
        rows = slice(i, min(i + Q_BLOCK, len(q)))
        seen = allowed(i, rows.stop)
        used = np.flatnonzero(seen.any((0, 1)))
        if used.size == 0:
            out[rows] = 0
            continue
        span = slice(int(used[0]), int(used[-1]) + 1)
        result = _block(run, q[rows], k[span], v[span], seen[..., span])
        with np.errstate(over="ignore"):  # float16 overflows to infinity, as everywhere
            out[rows] = result


def _block(run: Callable[..., np.ndarray], q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    if seen.all():
        return run(q, k, v, None)
    if not (finite(k) and finite(v)):
        return _row_by_row(run, q, k, v, seen)
    result = run(q, k, v, seen)
    empty = np.broadcast_to(~seen.any(-1), (q.shape[1], len(q)))
    result[empty.T] = 0  # older versions return the mean of v there
    return result


def _row_by_row(
    run: Callable[..., np.ndarray], q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray
) -> np.ndarray:
    """The same for keys or values that are not finite: what a row may not see must not reach it, not even times 0."""
    result = np.zeros((*q.shape[:2], v.shape[2]), np.float32)
    for h, i in np.ndindex(seen.shape[:2]):
        heads = slice(None) if len(seen) == 1 else h
        keys = seen[h, i]
        if keys.any():
            result[i, heads] = run(q[i : i + 1], k[keys], v[keys], None)[0, heads]
    return result


def _call(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    seen: np.ndarray | None,
    *,
    scale: float,
    softcap: float,
) -> np.ndarray:
    """q ``[L, Hq, D]``, k, v ``[S, Hkv, D]``, seen bool ``[1 or Hq, L, S]`` -> ``[L, Hq, Dv]``; contiguous float32."""
    feed = {name: x.reshape(1, len(x), -1) for name, x in (("q", q), ("k", k), ("v", v))}
    if seen is not None:
        feed["mask"] = np.ascontiguousarray(seen)[None]
    built = _session(q.shape[1], k.shape[1], scale, softcap, seen is not None)
    return session.run(NAME, built, feed).reshape(*q.shape[:2], v.shape[2])


@lru_cache(maxsize=256)
def _session(heads: int, kv_heads: int, scale: float, softcap: float, masked: bool) -> Any:
    inputs = {"q": FLOAT, "k": FLOAT, "v": FLOAT, **({"mask": BOOL} if masked else {})}
    # Never is_causal: without a cache ONNX aligns it top-left.
    operator = node(
        "Attention", list(inputs), "out", q_num_heads=heads, kv_num_heads=kv_heads, scale=scale, softcap=softcap
    )
    return session.cached(NAME, session.model([operator], inputs, {"out": FLOAT}))


def positive(q: np.ndarray, scale: float) -> tuple[np.ndarray, float]:
    """Move sign and zero of the scale into q: Attention takes its root, GroupQueryAttention reads 0 as the default."""
    return (q, float(scale)) if scale > 0 else (q * q.dtype.type(np.sign(scale)), abs(float(scale)) or 1.0)


def finite(x: np.ndarray) -> bool:
    """Whether all elements are finite, in one pass. A sum that overflows says no, which only costs time."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(x.sum(dtype=np.float32)))
