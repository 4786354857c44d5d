"""Addressing of keys and values, and the KV operators as pure functions that return new arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal_ops.reference.values import Floats, as_float64, dtype_of, encode, storage


class Rows:
    """Reads the row ``[D]`` of head ``h`` of token ``j`` of request ``b`` in float64, scale applied."""

    def __init__(self, cache: Any, scale: Any, layout: Any, name: str, block_table: Any, kv_indptr: Any) -> None:
        self._paged = block_table is not None
        self._table, self._indptr = block_table, kv_indptr
        elements = as_float64(cache)
        self._rows = unpack(elements, layout, name) if self._paged else elements
        self.heads, self.dim = self._rows.shape[-2:]
        self._scale = None if scale is None else as_float64(scale)
        self._head_first = layout == "HND"  # order of a per-token scale

    def row(self, b: int, j: int, h: int) -> Floats:
        """The row, ``[D]``."""
        at: tuple[int, ...]
        if self._paged:
            page_tokens = self._rows.shape[1]
            at = int(self._table[b][j // page_tokens]), j % page_tokens, h
        else:
            at = int(self._indptr[b]) + j, h
        row: Floats = self._rows[at]
        return row if self._scale is None else row * scale_at(self._scale, at, h, self._head_first, self._rows.shape)


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


def unpack(cache: NDArray[Any], layout: Any, name: str) -> NDArray[Any]:
    """Component ``name`` ("k" or "v") of a paged cache as ``[pages,N,H,D]``; a view for NHD and HND."""
    if layout == "NHD":
        return cache
    if layout == "HND":
        return cache.swapaxes(1, 2)
    component, kv = part(layout, name)
    pages = cache.size // component.elements(1)
    flat = cache.reshape(-1)
    rows = np.empty(component.logical_view(pages, kv=kv).shape, dtype=cache.dtype)
    for page, token, head, dim in np.ndindex(rows.shape):
        rows[page, token, head, dim] = flat[component.offset(page, token, head, dim, kv=kv, pages=pages)]
    return rows


def part(layout: Any, name: str) -> tuple[Any, int]:
    """The component that holds keys ("k") or values ("v"), and its index along a KV factor."""
    names = [component.name for component in layout.components]
    if name in names:
        return layout.components[names.index(name)], 0
    return layout.components[names.index("kv")], "kv".index(name)


def kv_write(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, *, layout: Any = "NHD", k_scale: Any = None, v_scale: Any = None
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
    result, dtype = storage(cache).copy(), dtype_of(cache)
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


def put(cache: NDArray[Any], layout: Any, name: str, at: tuple[int, int, int], row: NDArray[Any]) -> None:
    """Store the row ``[D]`` at (page, token, head)."""
    if layout in ("NHD", "HND"):
        unpack(cache, layout, name)[at] = row
        return
    component, kv = part(layout, name)
    pages = cache.size // component.elements(1)
    flat = cache.reshape(-1)
    for dim, element in enumerate(row):
        flat[component.offset(*at, dim, kv=kv, pages=pages)] = element


def logical_shape(cache: NDArray[Any], layout: Any, name: str) -> tuple[int, int, int, int]:
    """(pages, N, H, D) of component ``name``."""
    if layout in ("NHD", "HND"):
        return unpack(cache, layout, name).shape  # type: ignore[return-value]
    component, _ = part(layout, name)
    shape: tuple[int, int, int, int] = component.logical_view(cache.size // component.elements(1)).shape
    return shape


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
        logical = unpack(storage(cache), layout, name)
        page_tokens = logical.shape[1]
        rows = [
            logical[int(block_table[b][j // page_tokens]), j % page_tokens]
            for b, length in enumerate(lengths)
            for j in range(length)
        ]
        dense.append(np.array(rows, dtype=logical.dtype).reshape(len(rows), *logical.shape[2:]))
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
