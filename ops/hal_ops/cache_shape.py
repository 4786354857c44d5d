"""What a pair of K and V arrays says about itself: pages, page, heads and head dims of any layout."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from hal.errors import ContractError
from hal_ops import validate
from hal_ops.arrays import Meta
from hal_ops.kv_format import KVCacheFormat

Layout = Literal["NHD", "HND"] | KVCacheFormat


class CacheShape(NamedTuple):
    """Sizes of a paged cache. ``strided``: K or V is not dense in its own layout."""

    pages: int
    page: int
    heads: int
    head_dim: int
    v_head_dim: int
    strided: bool


def layout_name(layout: Any) -> str:
    """Return "NHD", "HND" or "format".

    Raises:
        ContractError: neither a known name nor a ``KVCacheFormat``.
    """
    if isinstance(layout, KVCacheFormat):
        return layout.name
    if not isinstance(layout, str) or layout not in ("NHD", "HND"):
        raise ContractError("layout", "NHD, HND or a KVCacheFormat", repr(layout))
    return str(layout)


def lower(layout: Any) -> Any:
    """Return the layout's name where it has one, else the format itself: what kernels receive."""
    name = layout_name(layout)
    return layout if name == "format" else name


def paged(k: Meta, v: Meta, layout: Any, names: tuple[str, str] = ("k_cache", "v_cache")) -> CacheShape:
    """Check that two arrays are the caches of one layout and return their sizes."""
    name = layout_name(layout)
    if isinstance(layout, KVCacheFormat):
        return _described(k, v, layout, names)
    head_axis, page_axis = (2, 1) if name == "NHD" else (1, 2)
    for what, axis in (("pages", 0), ("page size", page_axis), ("heads", head_axis)):
        validate.same(names[1], what, k.shape[axis], v.shape[axis])
    if k.shape[page_axis] < 1 or k.shape[head_axis] < 1:
        raise ContractError(names[0], "at least one token per page and one head", f"shape {list(k.shape)}")
    strided = not (dense(k) and dense(v))
    return CacheShape(k.shape[0], k.shape[page_axis], k.shape[head_axis], k.shape[3], v.shape[3], strided)


def _described(k: Meta, v: Meta, layout: KVCacheFormat, names: tuple[str, str]) -> CacheShape:
    parts = {component.name: component for component in layout.components}
    if "k" not in parts or "v" not in parts:
        raise ContractError("layout", "a format with the components k and v", ", ".join(parts))
    for name, described, part in zip(names, (k, v), (parts["k"], parts["v"]), strict=True):
        if part.order[0].axis != "B" or not described.shape:
            raise ContractError("layout", "a format whose tensors begin with the page axis", f"{part.order[0].axis}")
        validate.same(name, "dtype", part.storage_dtype.value, described.dtype.value)
        validate.shape(name, described, layout.shape(part, described.shape[0]))
    sizes = (k.shape[0], layout.page_tokens, layout.head_count, parts["k"].head_dim, parts["v"].head_dim)
    return CacheShape(*sizes, not (dense(k) and dense(v)))


def dense(described: Meta) -> bool:
    """Whether the array is contiguous in row-major order."""
    expected = 1
    for size, stride in zip(reversed(described.shape), reversed(described.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
