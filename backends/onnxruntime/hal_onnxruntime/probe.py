"""What differs between versions of ONNX Runtime, found out by asking the installed one once."""

from __future__ import annotations

from functools import cache

import numpy as np

from hal_onnxruntime import session
from hal_onnxruntime.session import BOOL, FLOAT, INT32, node


@cache
def window_counts_self() -> bool:
    """Whether ``local_window_size`` of GroupQueryAttention counts the query's own token (it did not always)."""
    inputs = ("q", "k", "v", "past_k", "past_v")
    outputs = ("out", "present_k", "present_v")
    attributes = {"num_heads": 1, "kv_num_heads": 1, "local_window_size": 1}
    operator = node("GroupQueryAttention", [*inputs, "seqlens", "total"], outputs, domain="com.microsoft", **attributes)
    types = {**dict.fromkeys(inputs, FLOAT), "seqlens": INT32, "total": INT32}
    built = session.cached("ort.gqa", session.model([operator], types, dict.fromkeys(outputs, FLOAT)))
    zero = np.zeros((1, 1, 8), np.float32)
    past = np.zeros((1, 1, 1, 8), np.float32)
    feed = {"q": zero, "k": zero, "v": zero, "past_k": past, "past_v": past + 1, "seqlens": np.array([1], np.int32)}
    seen = session.run("ort.gqa", built, {**feed, "total": np.array(2, np.int32)})
    return not seen.any()  # the previous token's value is 1, the own one 0


@cache
def masks_after_softcap() -> bool:
    """Whether Attention masks after the softcap (before it, a masked key keeps a weight)."""
    types = {"q": FLOAT, "k": FLOAT, "v": FLOAT, "mask": BOOL}
    operator = node("Attention", list(types), "out", q_num_heads=1, kv_num_heads=1, softcap=1.0)
    built = session.cached("ort.attention", session.model([operator], types, {"out": FLOAT}))
    keys = np.zeros((1, 2, 8), np.float32)
    values = np.stack([np.zeros(8), np.ones(8)])[None].astype(np.float32)
    feed = {"q": keys[:, :1], "k": keys, "v": values, "mask": np.array([[True, False]])}
    return not session.run("ort.attention", built, feed).any()
