"""GroupQueryAttention on HND caches whose block table has one column: each request's page is ONNX Runtime's cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hal.types import OpSpec
from hal_onnxruntime import onnx_attention, probe, session
from hal_onnxruntime.session import INT32, node
from hal_ops.plan import AttentionPlan

NAME = "ort.gqa"
FLOAT_INPUTS = ("q", "k", "v", "past_k", "past_v")
OUTPUTS = ("out", "present_k", "present_v")


def build(spec: OpSpec) -> Callable[..., None]:
    """Return the kernel. A graph that this ONNX Runtime cannot build fails here, not in a call."""
    fields = spec.fields
    heads = (fields["kv_heads"] * fields["gqa_ratio"], fields["kv_heads"])
    _session(np.dtype(str(fields["kv_dtype"])), *heads, float(fields["head_dim"] ** -0.5), -1, 0.0)
    return attention


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
    **refused: Any,
) -> None:
    """Causal attention on caches ``[pages, Hkv, page, D]``, in place.

    A page is bound as both past and present. The operator appends new keys; the cache holds them
    already, so it is given those very rows and writes the same bytes again.
    """
    q, scale = onnx_attention.positive(q, scale)
    run = partial(_call, scale=scale, window=window, softcap=softcap)
    first = plan.cached("ort.gqa.first_page", lambda: _decode_batch(plan))
    pages = slice(first, first + plan.batch)
    if first >= 0 and window[0] < 0 and _in_place(k[pages]) and _in_place(v[pages]):
        run(q[:, None], k[pages], v[pages], plan.kv_lens, out[:, None])
        return
    for b in range(plan.batch):
        start, stop = (int(x) for x in plan.q_indptr_host[b : b + 2])
        length = int(plan.kv_lens[b])
        empty = max(0, stop - start - length)  # leading rows that stand before the first key
        out[start : start + empty] = 0
        if start + empty < stop:
            page = int(plan.block_table_host[b, 0])
            rows = slice(start + empty, stop)
            _request(run, q[rows], k[page : page + 1], v[page : page + 1], length, out[rows])


def _request(run: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, length: int, out: np.ndarray) -> None:
    """One request that has keys: q, out ``[Lq, Hq, D]``, k, v ``[1, Hkv, page, D]``."""
    window, scale, softcap = (run.keywords[name] for name in ("window", "scale", "softcap"))
    keys, values = k[0, :, :length], v[0, :, :length]
    # A key that a row does not attend to must not reach it, but the operator multiplies its value by 0.
    hidden = len(q) > 1 or window[0] >= 0
    finite = not hidden or (onnx_attention.finite(keys) and onnx_attention.finite(values))
    if not (finite and _in_place(k) and _in_place(v)):
        allowed = onnx_attention.allowed_rows(len(q), length, True, window)
        keys, values = keys.swapaxes(0, 1), values.swapaxes(0, 1)
        onnx_attention.request(q, keys, values, out, scale, softcap, allowed)
        return
    for i in range(0, len(q), onnx_attention.Q_BLOCK):
        j = min(i + onnx_attention.Q_BLOCK, len(q))
        run(q[None, i:j], k, v, np.array([length - len(q) + j]), out[None, i:j])


def _call(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lens: np.ndarray,
    out: np.ndarray,
    *,
    scale: float,
    window: tuple[int, int],
    softcap: float,
) -> None:
    """q, out ``[B, L, Hq, D]``; k, v ``[B, Hkv, page, D]`` with ``lens`` keys, the last L of which are q's own."""
    batch, length, heads, _ = q.shape
    rows, request = lens[:, None] + np.arange(-length, 0), np.arange(batch)[:, None]
    target = np.ascontiguousarray(out)
    inputs = {
        "q": np.ascontiguousarray(q).reshape(batch, length, -1),
        "k": k[request, :, rows].reshape(batch, length, -1),
        "v": v[request, :, rows].reshape(batch, length, -1),
        "past_k": k,
        "past_v": v,
        "seqlens": (lens - 1).astype(np.int32),
        "total": np.array(lens.max(), np.int32),
    }
    outputs = {"out": target.reshape(batch, length, -1), "present_k": k, "present_v": v}
    # The contract's window does not count the query's own token.
    local = -1 if window[0] < 0 else window[0] + int(probe.window_counts_self())
    session.run_in_place(NAME, _session(k.dtype, heads, k.shape[1], scale, local, softcap), inputs, outputs)
    if target is not out:
        out[...] = target


@lru_cache(maxsize=256)
def _session(dtype: np.dtype, heads: int, kv_heads: int, scale: float, local: int, softcap: float) -> Any:
    operator = node(
        "GroupQueryAttention",
        [*FLOAT_INPUTS, "seqlens", "total"],
        OUTPUTS,
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=scale,
        local_window_size=local,
        softcap=softcap,
    )
    kind = session.element_type(dtype)
    inputs = {**dict.fromkeys(FLOAT_INPUTS, kind), "seqlens": INT32, "total": INT32}
    return session.cached(NAME, session.model([operator], inputs, dict.fromkeys(OUTPUTS, kind)))


def _decode_batch(plan: AttentionPlan) -> int:
    """First page of a batch that one call can serve: one token each, pages in a row; else -1."""
    pages = plan.block_table_host[:, 0]
    if plan.batch < 2 or (plan.q_lens != 1).any() or (plan.kv_lens < 1).any() or (np.diff(pages) != 1).any():
        return -1
    return int(pages[0])


def _in_place(cache: np.ndarray) -> bool:
    return cache.flags.c_contiguous and cache.flags.writeable
