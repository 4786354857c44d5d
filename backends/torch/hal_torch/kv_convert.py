"""torch.kv_convert: requests from caches of one format into caches of another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from torch import Tensor

from hal.constraint import Flags, OneOf
from hal.dtype import DType
from hal.errors import UnsupportedError
from hal.types import OpSpec, Refusal, RefusalCode
from hal_torch.pages import Pages, cast, holder, request_slots

CHUNK = 32 << 20  # bytes of rows in flight

_DTYPES = OneOf(
    {DType.float32, DType.float16, DType.bfloat16, DType.int8, DType.uint8}
    | {DType.float8_e4m3fn, DType.float8_e4m3fnuz, DType.float8_e5m2}
)
_LAYOUTS = OneOf({"NHD", "HND", "format"})
NEEDS = {
    "src_dtype": _DTYPES,
    "dst_dtype": _DTYPES,
    "src_layout": _LAYOUTS,
    "dst_layout": _LAYOUTS,
    "features": Flags({"lossy"}),
}


def refuse(kernel: str, spec: OpSpec) -> list[Refusal]:
    """uint8 elements mean something only together with a zero point: they are copied, not converted."""
    src, dst = spec.fields["src_dtype"], spec.fields["dst_dtype"]
    if src is dst or DType.uint8 not in (src, dst):
        return []
    return [Refusal(kernel, RefusalCode.dtype, "dst_dtype", f"{src}, as src_dtype", str(dst))]


def kv_convert(
    src: Sequence[Tensor],
    src_format: Any,
    dst: Sequence[Tensor],
    dst_format: Any,
    *,
    src_table: Tensor,
    dst_table: Tensor,
    kv_lens: Tensor,
    src_scales: None = None,
    dst_scales: None = None,
    compute_scales: bool = False,
    lossy: bool = False,
) -> None:
    """Copy the tokens of each request; bytes move unchanged where the dtypes agree.

    Args:
        src, dst: tensors by layer, then component, one dimension per factor of the component's order.
        src_table, dst_table: page ids ``[B, P]`` of either side, int32.
        kv_lens: tokens per request ``[B]``.

    Raises:
        UnsupportedError: a component has scales or is a state; nothing was written.
    """
    parts = _parts(src_format)
    _parts(dst_format)
    ratio = src_format.compress_ratio
    entries = -(-kv_lens // ratio)
    device = dst[0].device
    here = request_slots(src_table, entries, src_format.page_tokens // ratio, device)
    there = request_slots(dst_table, entries, dst_format.page_tokens // ratio, device)
    for layer, name in product(range(len(src_format.layer_ids)), parts):
        source, target = _open(src, src_format, name, layer), _open(dst, dst_format, name, layer)
        row = source.heads * holder(src_format, name).head_dim * source.dtype.itemsize
        step = max(1, CHUNK // row)
        for old, new in zip(here.split(step), there.split(step), strict=True):
            target.write(new, cast(source.read(old), target.dtype))


def _parts(form: Any) -> list[str]:
    """Names of what a format holds, k and v standing for a packed kv."""
    for component in form.components:
        if component.scale is not None or component.name == "state":
            what = "a state" if component.name == "state" else "scales"
            raise UnsupportedError(f"kv_convert: component {component.name} has {what}")
    return [name for c in form.components for name in (("k", "v") if c.name == "kv" else (c.name,))]


def _open(tensors: Sequence[Tensor], form: Any, name: str, layer: int) -> Pages:
    component = holder(form, name)
    tensor = tensors[layer * len(form.components) + form.components.index(component)]
    return Pages.of(tensor, form, name, layer)
