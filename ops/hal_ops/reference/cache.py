"""Addressing of keys and values, and the KV operators as pure functions that return new arrays."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal_ops.reference.values import Floats, as_float64, dtype_of, encode, storage


class Rows:
    """Reads the row ``[D]`` of head ``h`` of token ``j`` of request ``b`` in float64, scale applied."""

    def __init__(self, cache: Any, scale: Any, layout: Any, name: str, block_table: Any, kv_indptr: Any) -> None:
        self._elements = as_float64(cache)
        self._scale = None if scale is None else as_float64(scale)
        self._layout, self._name = layout, name
        self._table, self._indptr = block_table, kv_indptr
        paged = block_table is not None
        self._shape = logical_shape(self._elements, layout, name) if paged else self._elements.shape
        self.heads, self.dim = int(self._shape[-2]), int(self._shape[-1])

    def row(self, b: int, j: int, h: int) -> Floats:
        """The row, ``[D]``."""
        at: tuple[int, ...]
        if self._table is None:
            at = int(self._indptr[b]) + j, h
            row: Floats = self._elements[at]
        else:
            page_tokens = self._shape[1]
            at = int(self._table[b][j // page_tokens]), j % page_tokens, h
            row = get(self._elements, self._layout, self._name, at)
        return row if self._scale is None else row * scale_at(self._scale, at, h, self._layout == "HND", self._shape)


def scale_at(scale: Floats, at: tuple[int, ...], h: int, head_first: bool, shape: tuple[int, ...]) -> Any:
    """The multiplier of one row: a scalar, or ``[D]`` when the scale is per channel.

    ``at`` is (page, token, head) or (token, head) and ``shape`` the cache's in that order. A ragged
    2-D scale is per token when its shape is ``[S,Hkv]``, else per channel ``[Hkv,D]``.
    """
    if scale.size == 1:
        return scale.item()
    if scale.ndim == 1:
        return scale[h]
    if scale.ndim == 2 and (len(at) == 3 or scale.shape != shape[:-1]):
        return scale[h]
    return scale[(at[0], at[2], at[1]) if head_first and len(at) == 3 else at]


def logical_shape(cache: NDArray[Any], layout: Any, name: str) -> tuple[int, ...]:
    """(pages, N, H, D) of component ``name``, "k" or "v", of a paged cache."""
    if layout == "NHD":
        return cache.shape
    if layout == "HND":
        return cache.swapaxes(1, 2).shape
    component, _ = part(layout, name)
    return tuple(component.logical_view(cache.size // component.elements(1)).shape)


def get(cache: NDArray[Any], layout: Any, name: str, at: tuple[int, int, int]) -> NDArray[Any]:
    """The row ``[D]`` at (page, token, head)."""
    row: NDArray[Any] = cache.reshape(-1)[_offsets(cache, layout, name, at)]
    return row


def put(cache: NDArray[Any], layout: Any, name: str, at: tuple[int, int, int], row: NDArray[Any]) -> None:
    """Store the row ``[D]`` at (page, token, head) of a contiguous cache."""
    cache.reshape(-1)[_offsets(cache, layout, name, at)] = row


def _offsets(cache: NDArray[Any], layout: Any, name: str, at: tuple[int, int, int]) -> list[int]:
    page, token, head = at
    pages, tokens, heads, dims = logical_shape(cache, layout, name)
    if layout == "NHD":
        return [((page * tokens + token) * heads + head) * dims + dim for dim in range(dims)]
    if layout == "HND":
        return [((page * heads + head) * tokens + token) * dims + dim for dim in range(dims)]
    component, kv = part(layout, name)
    return [component.offset(page, token, head, dim, kv=kv, pages=pages) for dim in range(dims)]


def part(layout: Any, name: str) -> tuple[Any, int]:
    """The component that holds keys ("k") or values ("v"), and its index along a KV factor."""
    names = [component.name for component in layout.components]
    if name in names:
        return layout.components[names.index(name)], 0
    return layout.components[names.index("kv")], "kv".index(name)


def kv_write(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    *,
    layout: Any = "NHD",
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Copies of the caches with token ``t`` of k ``[T',Hkv,Dk]``, v ``[T',Hkv,Dv]`` stored at ``slots[t]``.

    ``slot = page * page_tokens + offset``; a negative slot, or one past the cache, is skipped. The
    stored number is the nearest to ``value / scale``, saturating in int8 and fp8; equal dtypes
    without a scale are copied bit by bit.

    >>> caches = kv_write(np.ones((2, 1, 1)), np.ones((2, 1, 1)), *np.zeros((2, 1, 3, 1, 1)), [2, -1])
    >>> caches[0].ravel().tolist()
    [0.0, 0.0, 1.0]
    """
    return (
        _write(k, k_cache, slots, layout, "k", k_scale),
        _write(v, v_cache, slots, layout, "v", v_scale),
    )


def _write(rows: Any, cache: Any, slots: Any, layout: Any, name: str, scale: Any) -> NDArray[Any]:
    result, dtype = storage(cache).copy(), dtype_of(cache)  # the copy is contiguous
    scale = None if scale is None else as_float64(scale)
    verbatim = scale is None and dtype_of(rows) is dtype
    rows = storage(rows) if verbatim else as_float64(rows)
    pages, page_tokens, heads, _ = shape = logical_shape(result, layout, name)
    for t, slot in enumerate(int(s) for s in slots):
        if not 0 <= slot < pages * page_tokens:
            continue
        page, token = divmod(slot, page_tokens)
        for h in range(heads):
            row = rows[t, h]
            if scale is not None:
                row = row / scale_at(scale, (page, token, h), h, layout == "HND", shape)
            put(result, layout, name, (page, token, h), row if verbatim else encode(row, dtype))
    return result


def kv_gather(
    k_cache: Any, v_cache: Any, block_table: Any, kv_lens: Any, *, layout: Any = "NHD"
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int32]]:
    """Stored keys ``[S,Hkv,Dk]`` and values ``[S,Hkv,Dv]`` of all requests, and their ``indptr [B+1]``.

    >>> pages = np.arange(4.0).reshape(2, 2, 1, 1)
    >>> k, v, indptr = kv_gather(pages, pages, [[1, 0]], [3])
    >>> k.ravel().tolist(), indptr.tolist()
    ([2.0, 3.0, 0.0], [0, 3])
    """
    lengths = [int(n) for n in kv_lens]
    dense = []
    for cache, name in ((k_cache, "k"), (v_cache, "v")):
        stored = storage(cache)
        _, page_tokens, heads, dim = logical_shape(stored, layout, name)
        rows = [
            get(stored, layout, name, (int(block_table[b][j // page_tokens]), j % page_tokens, h))
            for b, length in enumerate(lengths)
            for j in range(length)
            for h in range(heads)
        ]
        dense.append(np.array(rows, dtype=stored.dtype).reshape(sum(lengths), heads, dim))
    return dense[0], dense[1], np.cumsum([0, *lengths]).astype(np.int32)


def kv_copy(caches: Any, mapping: Any) -> list[NDArray[Any]]:
    """Copies of the caches with page ``src`` stored at page ``dst`` for each row of ``mapping [n,2]``.

    All reads happen before all writes.

    >>> kv_copy([np.arange(3)], [[0, 1], [1, 2]])
    [array([0, 0, 1])]
    """
    results = []
    for cache in caches:
        before, after = storage(cache), storage(cache).copy()
        for src, dst in mapping:
            after[dst] = before[src]
        results.append(after)
    return results


def kv_convert(
    src: Any,
    src_format: Any,
    dst: Any,
    dst_format: Any,
    *,
    src_table: Any,
    dst_table: Any,
    kv_lens: Any,
    src_scales: Any = None,
    dst_scales: Any = None,
) -> list[NDArray[Any]]:
    """Copies of the dst tensors with the first ``kv_lens[b]`` tokens of each request taken from src.

    src, dst: one array per (layer, component), layer by layer. Tables ``[B,P]`` name the pages of a
    request on each side. Scales map "k" and "v" to multipliers. Equal dtypes without scales are
    copied bit by bit, else the nearest element to ``value / dst_scale`` is stored.
    """
    results = [storage(array).copy() for array in dst]
    for layer, name in product(range(len(dst_format.layer_ids)), logical_names(dst_format)):
        source = src[_tensor(src_format, layer, name)]
        result, dtype = results[_tensor(dst_format, layer, name)], dtype_of(dst[_tensor(dst_format, layer, name)])
        scales = [None if s is None or name not in s else as_float64(s[name]) for s in (src_scales, dst_scales)]
        verbatim = all(scale is None for scale in scales) and dtype_of(source) is dtype
        stored = storage(source) if verbatim else as_float64(source)
        shapes = logical_shape(stored, src_format, name), logical_shape(result, dst_format, name)
        for b, length in enumerate(int(n) for n in kv_lens):
            for j, h in np.ndindex(length, shapes[0][2]):
                here, there = (
                    (int(table[b][j // shape[1]]), j % shape[1], h)
                    for table, shape in zip((src_table, dst_table), shapes, strict=True)
                )
                row = get(stored, src_format, name, here)
                if scales[0] is not None:
                    row = row * scale_at(scales[0], here, h, False, shapes[0])
                if scales[1] is not None:
                    row = row / scale_at(scales[1], there, h, False, shapes[1])
                put(result, dst_format, name, there, row if verbatim else encode(row, dtype))
    return results


def logical_names(layout: Any) -> list[str]:
    """Names of the components of a format, "k" and "v" standing for a packed "kv"."""
    return [name for c in layout.components for name in (("k", "v") if c.name == "kv" else (c.name,))]


def _tensor(layout: Any, layer: int, name: str) -> int:
    """Index of the tensor that holds ``name`` of the layer."""
    return layer * len(layout.components) + int(layout.components.index(part(layout, name)[0]))
