"""What the attention kernels claim: GroupQueryAttention where it fits, the ONNX Attention operator for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hal.constraint import Constraint, Flags, MultipleOf, OneOf, Range
from hal.types import Claim, Kernel, OpSpec, Refusal, RefusalCode
from hal_onnxruntime import gqa, onnx_attention, probe
from hal_onnxruntime.device import FLOATS, OneOfBecause

ANY = Range(1, None)
ONE_PAGE = OneOfBecause({"one"}, "its cache is one contiguous buffer per request: page = longest request")


def kernels() -> list[Kernel]:
    """Both attention kernels; GroupQueryAttention is preferred."""
    needs: dict[str, Constraint] = {
        **dict.fromkeys(("q_dtype", "kv_dtype", "out_dtype"), FLOATS),
        **dict.fromkeys(("kv_heads", "gqa_ratio", "page", "max_q", "max_kv", "batch"), ANY),
        "table": ONE_PAGE,
        "kv_slack": OneOf({"any", "finite"}),
    }
    narrow = needs | dict.fromkeys(("head_dim", "v_head_dim"), MultipleOf(8))
    narrow |= {"paged": OneOf({True}), "layout": OneOf({"HND"})}
    narrow |= {"features": Flags({"window_left", "softcap", "strided"})}
    wide = needs | dict.fromkeys(("head_dim", "v_head_dim"), ANY)
    wide |= {"paged": OneOf({True, False}), "layout": OneOf({"NHD", "HND"})}
    more = {"noncausal", "window_left", "window_right", "softcap", "mask", "mask_per_head", "strided"}
    wide |= {"features": Flags(more)}
    return [
        _kernel(gqa.NAME, narrow, _refuse_gqa, gqa.build, priority=10),
        _kernel(onnx_attention.NAME, wide, _refuse_onnx, lambda spec: onnx_attention.attention, priority=0),
    ]


def _kernel(
    name: str,
    needs: dict[str, Constraint],
    refuse: Callable[[OpSpec], list[Refusal]],
    build: Callable[[OpSpec], Callable[..., Any]],
    priority: int,
) -> Kernel:
    claim = Claim(
        op="attention", kernel=name, needs=needs, refuse=refuse, priority=priority, determinism="run", numeric_class="A"
    )
    return Kernel(claim, build)


def _refuse_gqa(spec: OpSpec) -> list[Refusal]:
    key = spec.fields.get("head_dim")
    value = spec.fields.get("v_head_dim", key)
    found = []
    if key != value:
        hint = f"{onnx_attention.NAME} takes them"
        found.append(Refusal(gqa.NAME, RefusalCode.shape, "v_head_dim", f"head_dim, {key}", str(value), hint))
    dtypes = {str(spec.fields[name]) for name in ("q_dtype", "kv_dtype", "out_dtype") if name in spec.fields}
    if len(dtypes) > 1:
        wanted = "one dtype of q, cache and output"
        found.append(Refusal(gqa.NAME, RefusalCode.dtype, "out_dtype", wanted, ", ".join(sorted(dtypes))))
    return found


def _refuse_onnx(spec: OpSpec) -> list[Refusal]:
    found = []
    name = onnx_attention.NAME
    if spec.fields.get("paged") and spec.fields.get("layout") == "NHD":
        hint = "make the cache with KVCacheFormat.hnd, or convert it with kv_convert"
        found.append(Refusal(name, RefusalCode.layout, "layout", "HND when paged", "NHD", hint))
    if "softcap" in spec.fields.get("features", ()) and not probe.masks_after_softcap():
        hint = "upgrade onnxruntime: this version masks before the softcap"
        found.append(Refusal(name, RefusalCode.driver, "features", "a mask after the softcap", "softcap", hint))
    return found
