"""Good calls of every operator, and what makes them bad: the tables behind ``test_contract_errors.py``.

A case takes the arguments of a good call, replaces some, and names the argument to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import hal_ops
from hal_ops import KVCacheFormat, plan_attention

Arguments = dict[str, Any]
rng = np.random.default_rng(0)


def f32(*shape: int) -> Any:
    return rng.standard_normal(shape).astype("float32")


def i32(*values: Any) -> Any:
    return np.array(values, "int32")


def fmt(order: str = "nhd", page: int = 2, **fields: Any) -> KVCacheFormat:
    make = getattr(KVCacheFormat, order)
    fields = {"dtype": "float32", "page_tokens": page, "kv_heads": 2, "head_dim": 8} | fields
    return make(**fields)  # type: ignore[no-any-return]


def attention() -> Arguments:
    return {
        "q": f32(3, 4, 8), "k": f32(4, 2, 2, 8), "v": f32(4, 2, 2, 8), "q_indptr": i32(0, 1, 3), "kv_lens": i32(3, 4),
        "block_table": i32([0, 1], [2, 3]), "out": f32(3, 4, 8), "mask": np.ones(11, bool), "bias": f32(4, 11),
        "sinks": f32(4), "alibi_slopes": f32(4),
    }  # fmt: skip


def ragged() -> Arguments:
    return {
        "q": f32(3, 4, 8),
        "k": f32(7, 2, 8),
        "v": f32(7, 2, 8),
        "q_indptr": i32(0, 1, 3),
        "kv_indptr": i32(0, 3, 7),
    }


def plan() -> Arguments:
    return {"q_indptr": i32(0, 1, 3), "kv_lens": i32(3, 4), "block_table": i32([0, 1], [2, 3])}


def merge() -> Arguments:
    return {"o_a": f32(3, 2, 4), "lse_a": f32(3, 2), "o_b": f32(3, 2, 4), "lse_b": f32(3, 2),
            "out": f32(3, 2, 4), "lse_out": f32(3, 2)}  # fmt: skip


def gemm() -> Arguments:
    return {"a": f32(3, 4), "b": f32(4, 5), "bias": f32(5), "c": f32(3, 5), "beta": 0.5, "out": f32(3, 5)}


def prepack() -> Arguments:
    return {"weight": f32(5, 4), "scheme": "dense"}


def blocks() -> Arguments:
    return {"weight": np.zeros((3, 36), "uint8"), "scheme": "gguf_q4_0", "shape": (3, 64)}


def kv_write() -> Arguments:
    return {"k": f32(3, 2, 8), "v": f32(3, 2, 8), "k_cache": f32(4, 2, 2, 8), "v_cache": f32(4, 2, 2, 8),
            "slots": np.array([0, 5, -1])}  # fmt: skip


def kv_gather() -> Arguments:
    return {
        "k_cache": f32(4, 2, 2, 8),
        "v_cache": f32(4, 2, 2, 8),
        "block_table": i32([0, 1], [2, -1]),
        "kv_lens": i32(3, 2),
    }


def kv_copy() -> Arguments:
    return {"caches": [f32(4, 2, 3), f32(5, 2)], "mapping": np.array([[0, 1], [1, 2]])}


def kv_convert() -> Arguments:
    return {
        "src": [f32(4, 2, 2, 8), f32(4, 2, 2, 8)], "src_format": fmt(), "dst": [f32(2, 2, 4, 8), f32(2, 2, 4, 8)],
        "dst_format": fmt("hnd", 4), "src_table": i32([0, 1], [2, -1]), "dst_table": i32([0], [1]),
        "kv_lens": i32(3, 2),
    }  # fmt: skip


def rms_norm() -> Arguments:
    return {"x": f32(3, 8), "weight": f32(8), "eps": 1e-6, "residual": f32(3, 8), "out": f32(3, 8)}


def rope() -> Arguments:
    return {
        "q": f32(3, 4, 8),
        "k": f32(3, 2, 8),
        "positions": np.array([0, 4, 9]),
        "cos": f32(10, 4),
        "sin": f32(10, 4),
    }


def silu_mul() -> Arguments:
    return {"x": f32(3, 8), "out": f32(3, 4)}


Change = Callable[[Arguments], Any]
Case = tuple[Callable[[], Arguments], Arguments | Change, str]


def with_(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda arguments: {name: change(arguments[name])}


def half(x: Any) -> Any:
    return x.astype("float16")


def double(x: Any) -> Any:
    return x.astype("float64")


def longer(x: Any) -> Any:
    return np.concatenate([x, x], axis=0)


def wider(x: Any) -> Any:
    return np.concatenate([x, x], axis=-1)


def thinner(x: Any) -> Any:
    return np.ascontiguousarray(x[..., :-1])


def inner(x: Any) -> Any:
    return x[0]


def gapped(x: Any) -> Any:
    return wider(x)[..., ::2]


def frozen(x: Any) -> Any:
    x.flags.writeable = False
    return x


def expanded(x: Any) -> Any:
    return np.lib.stride_tricks.as_strided(x, x.shape, (0, *x.strides[1:]))


def sliding(x: Any) -> Any:
    """Rows that reach into the next one."""
    return np.lib.stride_tricks.as_strided(np.zeros(x.size, x.dtype), x.shape, (x.itemsize, *x.strides[1:]))


def cases() -> Iterator[Case]:
    # ---- every array of every operator: no array, foreign dtype, another rank
    arrays_of = {
        attention: "q k v q_indptr kv_lens block_table out mask bias sinks alibi_slopes",
        ragged: "q k v q_indptr kv_indptr", plan: "q_indptr kv_lens block_table",
        merge: "o_a lse_a o_b lse_b out lse_out", gemm: "a b bias c out", prepack: "weight", blocks: "weight",
        kv_write: "k v k_cache v_cache slots", kv_gather: "k_cache v_cache block_table kv_lens", kv_copy: "mapping",
        kv_convert: "src_table dst_table kv_lens", rms_norm: "x weight residual out",
        rope: "q k positions cos sin", silu_mul: "x out",
    }  # fmt: skip
    for good, names in arrays_of.items():
        for name in names.split():
            yield good, {name: "text"}, name
            yield good, {name: 3}, name
            yield good, with_(name, lambda x: x.astype("int16")), name
            yield good, with_(name, lambda x: x.astype("complex64")), name
            yield (
                good,
                with_(name, lambda x: x.astype(x.dtype.newbyteorder()) if x.itemsize > 1 else x.view("V1")),
                name,
            )
            if good is not blocks and (good, name) not in [
                (gemm, "a"),
                (gemm, "b"),
                (gemm, "c"),
                (rms_norm, "x"),
                (silu_mul, "x"),
            ]:
                yield good, with_(name, lambda x: x[None]), name
    # ---- arrays to be written: read-only, expanded, overlapping rows
    written = {attention: "out", merge: "out lse_out", gemm: "out", kv_write: "k_cache v_cache",
               rms_norm: "out residual", rope: "q k", silu_mul: "out"}  # fmt: skip
    for good, names in written.items():
        for name in names.split():
            for change in (frozen, expanded, sliding):
                yield good, with_(name, change), name
    # ---- devices
    for good in (attention, ragged, merge, gemm, prepack, blocks, kv_write, kv_gather, kv_copy, kv_convert, rms_norm,
                 rope, silu_mul):  # fmt: skip
        for device in ("nowhere:0", 3, ["cpu:0"], torch.device("cpu")):
            yield good, {"device": device}, "device"
    yield from attention_cases()
    yield from gemm_cases()
    yield from kv_cases()
    yield from convert_cases()
    yield from companion_cases()


def attention_cases() -> Iterator[Case]:
    for change, blame in [
        (with_("q", inner), "q"), (with_("q", thinner), "k"), (with_("q", longer), "q"), (with_("q", half), "k"),
        (with_("q", lambda x: np.ascontiguousarray(x[:, :3])), "q"), (with_("q", gapped), "q"),
        (with_("q", double), "q"),
        (with_("q", lambda x: x[:, :0]), "q"), (with_("k", half), "v"), (with_("k", inner), "k"),
        (with_("k", longer), "v"), (with_("v", longer), "v"), (with_("v", half), "v"), (with_("k", double), "v"),
        (with_("k", gapped), "k"), (with_("v", gapped), "v"), (with_("v", lambda x: x[:, :1]), "v"),
        (with_("v", lambda x: x[:, :, :1]), "v"), ({"q_indptr": i32(0, 2, 1)}, "q_indptr"),
        ({"q_indptr": i32(1, 2, 3)}, "q_indptr"), ({"q_indptr": i32()}, "q_indptr"), ({"q_indptr": i32(0, 1, 9)}, "q"),
        ({"q_indptr": [0, 1.5, 3]}, "q_indptr"), ({"q_indptr": np.array([0, 1, 3])}, "q_indptr"),
        ({"q_indptr": i32(0, 1, 2, 3)}, "block_table"), ({"kv_lens": i32(3, -1)}, "kv_lens"),
        ({"kv_lens": i32(3, 5)}, "kv_lens"), ({"kv_lens": i32(3)}, "kv_lens"), ({"kv_lens": None}, "kv_lens"),
        ({"kv_lens": np.array([3, 4])}, "kv_lens"), ({"block_table": i32([0, 1], [2, 4])}, "block_table"),
        ({"block_table": i32([0, -1], [2, 3])}, "block_table"), ({"block_table": i32([0, 1])}, "block_table"),
        ({"block_table": None}, "kv_indptr"), ({"kv_indptr": i32(0, 3, 7)}, "kv_indptr"),
        ({"plan": "plan"}, "plan"), (lambda a: {"plan": plan_attention(**plan())}, "plan"),
        ({"layout": "nhd"}, "layout"), ({"layout": None}, "layout"), ({"layout": []}, "layout"),
        ({"layout": fmt(page=4)}, "k"), ({"layout": fmt(dtype="float16")}, "k"), ({"scale": float("nan")}, "scale"),
        ({"scale": float("inf")}, "scale"), ({"scale": "1"}, "scale"), ({"scale": True}, "scale"),
        ({"scale": np.ones(2)}, "scale"), ({"causal": 2}, "causal"), ({"causal": None}, "causal"),
        ({"window": 3}, "window"), ({"window": [1, 2]}, "window"), ({"window": (-2, 0)}, "window"),
        ({"window": (1.5, 0)}, "window"), ({"window": (1, 2, 3)}, "window"), ({"softcap": -1.0}, "softcap"),
        ({"softcap": float("nan")}, "softcap"), ({"softcap": None}, "softcap"), (with_("sinks", half), "sinks"),
        (with_("sinks", longer), "sinks"), (with_("alibi_slopes", inner), "alibi_slopes"),
        (with_("alibi_slopes", double), "alibi_slopes"), (with_("mask", longer), "mask"),
        ({"mask": np.ones((3, 11), bool)}, "mask"), (lambda a: {"mask": np.ones(22, bool)[::2]}, "mask"),
        ({"mask": np.ones(11, "uint8")}, "mask"), ({"mask": np.ones((), bool)}, "mask"),
        (with_("bias", thinner), "bias"),
        (with_("bias", lambda x: x[:3]), "bias"), (with_("bias", double), "bias"), ({"k_scale": "x"}, "k_scale"),
        ({"k_scale": float("nan")}, "k_scale"), ({"k_scale": f32(3)}, "k_scale"),
        ({"k_scale": f32(4, 2, 3)}, "k_scale"),
        ({"k_scale": i32(1, 2)}, "k_scale"), ({"k_scale": True}, "k_scale"), ({"v_scale": float("inf")}, "v_scale"),
        ({"v_scale": f32(8, 2)}, "v_scale"), (with_("out", longer), "out"), (with_("out", thinner), "out"),
        (with_("out", half), "out"), (with_("out", gapped), "out"), (with_("out", double), "out"),
        (lambda a: {"out": a["q"]}, "out"), (lambda a: {"out": a["k"].reshape(-1)[5:101].reshape(3, 4, 8)}, "out"),
        ({"out_dtype": "float12"}, "out_dtype"), ({"out_dtype": "int8"}, "out_dtype"), ({"out_dtype": "fp16"}, "out"),
        ({"return_lse": 2}, "return_lse"), ({"determinism": "always"}, "determinism"),
        ({"determinism": None}, "determinism"),
        ({"kv_slack": "some"}, "kv_slack"), ({"check": "all"}, "check"), ({"check": None}, "check"),
        ({"sinks": np.array([0, 1, np.nan, 2], "float32"), "check": "full"}, "sinks"),
        ({"alibi_slopes": np.array([0, 1, np.inf, 2], "float32"), "check": "full"}, "alibi_slopes"),
        ({"k_scale": np.array([1, np.nan], "float32"), "check": "full"}, "k_scale"),
        ({"v_scale": np.array([-np.inf, 1], "float32"), "check": "full"}, "v_scale"),
    ]:  # fmt: skip
        yield attention, change, blame
    for change, blame in [
        ({"layout": "HND"}, "layout"), ({"q_indptr": None}, "q_indptr"),
        ({"kv_indptr": None}, "kv_indptr"), ({"kv_indptr": i32(0, 3, 8)}, "k"),
        ({"kv_indptr": i32(0, 7, 3)}, "kv_indptr"),
        ({"kv_indptr": i32(0, 7)}, "kv_indptr"), ({"kv_lens": i32(3, 4)}, "kv_lens"), (with_("v", longer), "v"),
        (with_("v", lambda x: x[:, :1]), "v"), ({"k": f32(7, 3, 8)}, "v"),
    ]:  # fmt: skip
        yield ragged, change, blame
    for change, blame in [
        ({"max_q_len": 1}, "max_q_len"), ({"max_q_len": 2.5}, "max_q_len"), ({"max_kv_len": 3}, "max_kv_len"),
        ({"max_kv_len": "4"}, "max_kv_len"), ({"q_lens_host": [1, 3]}, "q_lens_host"),
        ({"q_lens_host": [1.0, 2.0]}, "q_lens_host"),
        ({"q_lens_host": "ab"}, "q_lens_host"), ({"kv_lens_host": [4, 4]}, "kv_lens_host"),
        ({"kv_lens_host": np.ones((2, 2), int)}, "kv_lens_host"), ({"kv_lens": None, "kv_lens_host": [1]}, "kv_lens"),
        ({"spec": "attention", "device": "cpu:0"}, "spec"), ({"block_table": None}, "kv_indptr"),
        ({"q_indptr": None}, "q_indptr"), ({"block_table": [[0], [1, 2]]}, "block_table"),
    ]:  # fmt: skip
        yield plan, change, blame


def gemm_cases() -> Iterator[Case]:
    for change, blame in [
        (with_("a", inner), "a"), (with_("a", half), "b"), (with_("a", double), "a"), (with_("a", thinner), "b"),
        (with_("b", inner), "b"), (with_("b", double), "b"), ({"trans_b": True}, "b"), ({"trans_a": True}, "b"),
        ({"a": f32(2, 3, 4), "b": f32(3, 4, 5)}, "b"), ({"trans_a": 1.5}, "trans_a"), ({"trans_b": "yes"}, "trans_b"),
        (with_("bias", longer), "bias"), (with_("bias", double), "bias"), (lambda a: {"bias": f32(10)[::2]}, "bias"),
        ({"activation": "tanh"}, "activation"), ({"activation": None}, "activation"),
        ({"activation": ["relu"]}, "activation"),
        ({"alpha": float("nan")}, "alpha"), ({"alpha": float("inf")}, "alpha"), ({"alpha": "1"}, "alpha"),
        ({"alpha": np.ones(1)}, "alpha"), ({"beta": float("nan")}, "beta"), ({"beta": None}, "beta"),
        ({"beta": True}, "beta"),
        ({"c": None}, "c"), (with_("c", thinner), "c"), ({"c": f32(2, 3, 5)}, "c"), (with_("c", double), "c"),
        ({"a_scale": f32(2)}, "a_scale"), ({"a_scale": i32(1)}, "a_scale"), ({"a_scale": 1.0}, "a_scale"),
        ({"a_zero": f32(3, 3)}, "a_zero"), ({"b_scale": f32(4, 4)}, "b_scale"), ({"b_scale": "x"}, "b_scale"),
        ({"b_zero": f32(7)}, "b_zero"), ({"b_scale": f32(3, 5), "group_size": 2}, "b_scale"),
        ({"a_scale": np.array([np.nan], "float32"), "check": "full"}, "a_scale"), ({"group_size": 0}, "group_size"),
        ({"group_size": 1.5}, "group_size"), ({"group_size": True}, "group_size"), ({"a_quant": "int4"}, "a_quant"),
        (with_("out", longer), "out"), (with_("out", thinner), "out"), (with_("out", half), "out"),
        (with_("out", inner), "out"),
        ({"out_dtype": "bool"}, "out_dtype"), ({"out_dtype": object()}, "out_dtype"), ({"out_dtype": "fp16"}, "out"),
        ({"determinism": 1}, "determinism"), ({"check": "some"}, "check"),
        (lambda a: {"out": a["c"]}, "out"),
    ]:  # fmt: skip
        yield gemm, change, blame
    yield gemm, lambda a: {"b": hal_ops.prepack(f32(5, 4), scheme="dense"), "trans_b": True}, "trans_b"
    yield gemm, lambda a: {"b": hal_ops.prepack(f32(5, 6), scheme="dense")}, "b"
    for change, blame in [
        ({"scheme": "q5"}, "scheme"), ({"scheme": None}, "scheme"), ({"scheme": []}, "scheme"),
        ({"trans_b": 1}, "trans_b"),
        ({"shape": (4, 5)}, "shape"), ({"shape": 5}, "shape"), (with_("weight", inner), "weight"),
        (with_("weight", double), "weight"),
        ({"weight": {"qweight": f32(2, 2)}}, "weight"),
    ]:  # fmt: skip
        yield prepack, change, blame
    for change, blame in [
        ({"shape": None}, "shape"), ({"shape": (3, 65)}, "shape"), ({"shape": (-3, 64)}, "shape"),
        ({"shape": 192}, "shape"),
        ({"shape": (3.0, 64)}, "shape"), ({"shape": (4, 64)}, "weight"), ({"trans_b": False}, "trans_b"),
        (with_("weight", lambda x: x.astype("int8")), "weight"),
        (lambda a: {"weight": np.zeros((3, 72), "uint8")[:, ::2]}, "weight"),
    ]:  # fmt: skip
        yield blocks, change, blame


def kv_cases() -> Iterator[Case]:
    for change, blame in [
        (with_("k", inner), "k"), (with_("k", half), "v"), (with_("k", thinner), "k"),
        (with_("k", lambda x: x[:, :1]), "k"),
        (with_("k", lambda x: x[:2]), "k"), (with_("v", lambda x: x[:2]), "v"), (with_("v", thinner), "v"),
        (with_("v", gapped), "v"),
        (lambda a: {"k": half(a["k"]), "v": half(a["v"])}, "k"), (with_("k_cache", inner), "k_cache"),
        (with_("k_cache", longer), "v_cache"),
        (with_("v_cache", half), "v_cache"), (with_("v_cache", gapped), "v_cache"),
        ({"layout": "HND", "k_cache": f32(4, 3, 2, 8)}, "v_cache"),
        ({"layout": "DHN"}, "layout"), ({"layout": fmt(page=3)}, "k_cache"), ({"layout": 1}, "layout"),
        ({"slots": np.array([0, 8, 1])}, "slots"), ({"slots": np.array([0, 5, 1], "int32")}, "slots"),
        ({"slots": [0, 1, 2]}, "slots"),
        ({"slots": np.zeros(4, "int64")}, "k"), (lambda a: {"slots": np.arange(6)[::2]}, "slots"),
        ({"slots": np.array([0.0])}, "slots"),
        ({"k_scale": "x"}, "k_scale"), ({"k_scale": f32(5)}, "k_scale"), ({"v_scale": float("nan")}, "v_scale"),
        ({"v_scale": True}, "v_scale"),
        ({"wait": None}, "wait"), ({"wait": (1,)}, "wait"), ({"wait": 5}, "wait"), ({"record": "yes"}, "record"),
        (lambda a: {"v_cache": a["k_cache"]}, "v_cache"),
        (lambda a: {"k": a["k_cache"].reshape(-1, 2, 8)[1:4]}, "k_cache"),
        (lambda a: {"v": a["v_cache"].reshape(-1, 2, 8)[1:4]}, "v_cache"),
        ({"k_cache": np.zeros((4, 2, 2, 8), "int8")}, "v_cache"),
    ]:  # fmt: skip
        yield kv_write, change, blame
    for change, blame in [
        ({"block_table": i32([0, 4], [2, -1])}, "block_table"), ({"block_table": i32([-1, 1], [2, 3])}, "block_table"),
        ({"block_table": i32([0, 1])}, "block_table"), ({"block_table": [[0], [1, 2]]}, "block_table"),
        ({"kv_lens": i32(3, 5)}, "kv_lens"),
        ({"kv_lens": i32(-1, 2)}, "kv_lens"), ({"kv_lens": [1.0, 2.0]}, "kv_lens"),
        ({"kv_lens": np.array([3, 2])}, "kv_lens"),
        ({"layout": "NDH"}, "layout"), (with_("v_cache", half), "v_cache"), (with_("v_cache", longer), "v_cache"),
        (with_("k_cache", gapped), "k_cache"), (with_("k_cache", inner), "k_cache"),
    ]:  # fmt: skip
        yield kv_gather, change, blame
    for change, blame in [
        ({"caches": []}, "caches"), ({"caches": None}, "caches"), ({"caches": "text"}, "caches"),
        ({"caches": [f32(4), 3]}, "caches"),
        ({"caches": np.float32(3)}, "caches"), ({"caches": np.zeros((), "float32")}, "caches"),
        ({"caches": [f32(4), half(f32(4))]}, "caches"),
        (lambda a: {"caches": [a["caches"][0], frozen(a["caches"][1])]}, "caches"),
        (lambda a: {"caches": expanded(a["caches"][0])}, "caches"),
        (lambda a: {"caches": [a["caches"][0]] * 2}, "caches[0]"),
        (lambda a: {"caches": [a["caches"][0], a["caches"][0][1:]]}, "caches[0]"),
        ({"mapping": np.array([[0, 4]])}, "mapping"), ({"mapping": np.array([[-1, 1]])}, "mapping"),
        ({"mapping": np.array([[0, 1], [2, 1]])}, "mapping"),
        ({"mapping": np.array([[0, 1, 2]])}, "mapping"), ({"mapping": i32([0, 1])}, "mapping"),
        ({"mapping": [[0, 1.5]]}, "mapping"),
        ({"mapping": [[0], [1, 2]]}, "mapping"), ({"mapping": None}, "mapping"), ({"wait": 3}, "wait"),
        ({"record": None}, "record"),
    ]:  # fmt: skip
        yield kv_copy, change, blame


def convert_cases() -> Iterator[Case]:
    for change, blame in [
        ({"src": f32(4, 2, 2, 8)}, "src"), ({"src": None}, "src"), (lambda a: {"src": a["src"][:1]}, "src"),
        (lambda a: {"dst": a["dst"] * 2}, "dst"),
        ({"src": ["x", "y"]}, "src[0]"), (lambda a: {"src": [a["src"][0], half(a["src"][1])]}, "src[1]"),
        (lambda a: {"src": [a["src"][0], inner(a["src"][1])]}, "src[1]"),
        (lambda a: {"dst": [a["dst"][0][:, :1], a["dst"][1]]}, "dst[0]"),
        ({"src_format": "NHD"}, "src_format"), ({"dst_format": None}, "dst_format"),
        ({"dst_format": fmt("hnd", 4, head_dim=4)}, "dst_format"),
        ({"dst_format": fmt("hnd", 4, kv_heads=4)}, "dst_format"),
        ({"dst_format": fmt("hnd", 4, layer_ids=(1,))}, "dst_format"),
        ({"dst_format": fmt("hnd", 4, dtype="float16")}, "lossy"),
        ({"dst_format": fmt("hnd", 4, dtype="int8")}, "lossy"),
        ({"dst_format": fmt("hnd", 2)}, "dst[0]"), ({"src_table": i32([0, 4], [2, -1])}, "src_table"),
        ({"src_table": i32([0, 1])}, "src_table"),
        ({"dst_table": i32([0], [2])}, "dst_table"), ({"dst_table": i32([0], [0])}, "dst_table"),
        ({"dst_table": [[0.5], [1]]}, "dst_table"),
        ({"kv_lens": i32(3, 5)}, "kv_lens"), ({"kv_lens": i32(3, -2)}, "kv_lens"), ({"kv_lens": i32(3)}, "src_table"),
        ({"lossy": 1}, "lossy"),
        ({"compute_scales": "x"}, "compute_scales"), ({"src_scales": [1]}, "src_scales"),
        ({"dst_scales": {1: 2}}, "dst_scales"),
        ({"wait": "x"}, "wait"), ({"record": 1}, "record"),
        (lambda a: {"dst": [a["dst"][0], frozen(a["dst"][1])]}, "dst[1]"),
        (lambda a: {"dst": [expanded(a["dst"][0]), a["dst"][1]]}, "dst[0]"),
        (lambda a: {"dst": [a["dst"][0]] * 2}, "dst[0]"),
        (lambda a: {"dst": a["src"], "dst_format": a["src_format"], "dst_table": i32([3], [0])}, "kv_lens"),
        (lambda a: {"dst": [a["src"][1], f32(4, 2, 2, 8)], "dst_format": fmt(), "dst_table": i32([3], [1]),
                    "kv_lens": i32(2, 2)}, "dst[0]"),
    ]:  # fmt: skip
        yield kv_convert, change, blame


def companion_cases() -> Iterator[Case]:
    for change, blame in [
        (with_("lse_a", half), "lse_a"), (with_("lse_b", lambda x: x[:, :1]), "lse_b"), (with_("o_b", half), "o_b"),
        (with_("o_b", thinner), "o_b"),
        (with_("o_b", longer), "o_b"), (with_("lse_b", lambda x: x[:2]), "lse_b"), (with_("out", longer), "out"),
        (with_("lse_out", longer), "lse_out"),
        (with_("o_a", double), "o_a"), (with_("o_a", gapped), "o_a"), (with_("out", half), "out"),
        (lambda a: {"out": a["o_b"]}, "out"),
        (lambda a: {"lse_out": a["lse_b"]}, "lse_out"), (lambda a: shifted(a, "out", "o_a"), "out"),
        (lambda a: shifted(a, "lse_out", "lse_a"), "lse_out"),
    ]:  # fmt: skip
        yield merge, change, blame
    for change, blame in [
        ({"x": np.zeros((), "float32")}, "x"), ({"x": f32(3, 0)}, "x"), (with_("x", double), "x"),
        (with_("x", gapped), "x"),
        (with_("weight", longer), "weight"), (with_("weight", double), "weight"), (with_("weight", inner), "weight"),
        ({"eps": -1.0}, "eps"),
        ({"eps": float("nan")}, "eps"), ({"eps": None}, "eps"), ({"eps": "0"}, "eps"), ({"eps": True}, "eps"),
        (with_("residual", longer), "residual"),
        (with_("residual", half), "residual"), (with_("out", thinner), "out"), (with_("out", longer), "out"),
        (lambda a: {"residual": a["x"]}, "residual"),
        (lambda a: {"residual": a["out"]}, "residual"), (lambda a: shifted(a, "out", "x"), "out"),
        (with_("x", lambda x: x[:2]), "residual"),
    ]:  # fmt: skip
        yield rms_norm, change, blame
    for change, blame in [
        (with_("q", inner), "q"), (with_("k", half), "k"), (with_("k", thinner), "k"), (with_("k", longer), "k"),
        (with_("q", gapped), "q"),
        ({"positions": np.array([0, 10, 1])}, "positions"), ({"positions": np.array([0, -1, 1])}, "positions"),
        ({"positions": np.arange(4)}, "positions"),
        ({"positions": i32(0, 1, 2)}, "positions"), ({"positions": [0, 1, 2]}, "positions"),
        (lambda a: {"positions": np.arange(6)[::2]}, "positions"),
        ({"cos": f32(10, 5), "sin": f32(10, 5)}, "cos"), ({"cos": f32(10, 0), "sin": f32(10, 0)}, "cos"),
        (with_("cos", lambda x: x[:5]), "sin"),
        (with_("sin", half), "sin"), (with_("cos", double), "cos"), ({"interleaved": 2}, "interleaved"),
        ({"interleaved": None}, "interleaved"),
        (lambda a: {"k": a["q"]}, "k"), (lambda a: {"k": a["q"][:, :2]}, "k"),
        (lambda a: {"cos": a["q"].reshape(-1, 4)[:10]}, "q"), (lambda a: {"sin": a["k"].reshape(-1, 4)[:10]}, "k"),
    ]:  # fmt: skip
        yield rope, change, blame
    for change, blame in [
        ({"x": f32(3, 7)}, "x"), ({"x": f32(3, 0)}, "x"), ({"x": np.zeros((), "float32")}, "x"),
        (with_("x", double), "x"), (with_("x", gapped), "x"),
        (with_("out", longer), "out"), (with_("out", thinner), "out"), (with_("out", half), "out"),
        (with_("out", inner), "out"),
        (lambda a: {"out": np.ascontiguousarray(a["x"])[:, :4]}, "out"),
        (lambda a: {"out": a["x"].reshape(-1)[4:16].reshape(3, 4)}, "out"),
    ]:  # fmt: skip
        yield silu_mul, change, blame


def shifted(arguments: Arguments, name: str, like: str) -> Arguments:
    """``name`` overlaps ``like`` without being it."""
    shape = arguments[like].shape
    size, row = arguments[like].size, arguments[like][0].size
    buffer = f32(size + row)
    return {like: buffer[:size].reshape(shape), name: buffer[row:].reshape(shape)}


CALLS: dict[Callable[[], Arguments], Callable[..., Any]] = {
    attention: hal_ops.attention, ragged: hal_ops.attention, plan: plan_attention, prepack: hal_ops.prepack,
    merge: hal_ops.merge_attention_states, gemm: hal_ops.gemm, blocks: hal_ops.prepack, kv_write: hal_ops.kv_write,
    kv_gather: hal_ops.kv_gather, kv_copy: hal_ops.kv_copy, kv_convert: hal_ops.kv_convert, rms_norm: hal_ops.rms_norm,
    rope: hal_ops.rope, silu_mul: hal_ops.silu_mul,
}  # fmt: skip
CASES = list(cases())
