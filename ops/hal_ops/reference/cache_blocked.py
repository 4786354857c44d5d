"""The KV operators through whole-array index arithmetic on strided views."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.dtype import DType
from hal_ops.reference.values import Floats, as_float64, decode, dtype_of, encode, storage


def logical(cache: NDArray[Any], layout: Any, name: str) -> NDArray[Any]:
    """One component as ``[pages,N,H,D]``: a view for NHD and HND, else perhaps a copy."""
    if isinstance(layout, str):
        return cache if layout == "NHD" else cache.transpose(0, 2, 1, 3)
    index = _index(layout, name)
    component = layout.components[index]
    view = component.logical_view(cache.size // component.elements(1), kv=int(name == "v" and component.name == "kv"))
    flat = cache.reshape(-1)[view.offset :]
    factors = np.lib.stride_tricks.as_strided(flat, view.sizes, [stride * flat.itemsize for stride in view.strides])
    return factors.transpose(view.permutation).reshape(view.shape)


class Tokens:
    """Tokens ``j`` of request ``b`` as ``[len(j),Hkv,D]`` in float64, scale applied."""

    def __init__(self, cache: Any, scale: Any, layout: Any, name: str, block_table: Any, kv_indptr: Any) -> None:
        cache = as_float64(cache)
        self._rows = cache if block_table is None else logical(cache, layout, name)
        self._scale = None if scale is None else spread(as_float64(scale), self._rows.shape, layout == "HND")
        self._table, self._indptr = block_table, kv_indptr
        self.dim = self._rows.shape[-1]

    def of(self, b: int, j: NDArray[np.int64]) -> Floats:
        """Those tokens."""
        at: Any = j + int(self._indptr[b]) if self._table is None else pages_of(self._table[b], j, self._rows.shape[1])
        rows: Floats = self._rows[at]
        return rows if self._scale is None else rows * np.broadcast_to(self._scale, self._rows.shape)[at]


def pages_of(pages: Any, j: NDArray[np.int64], page_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(page, place in it) of tokens ``j``."""
    return np.asarray(pages, dtype=np.int64)[j // page_tokens], j % page_tokens


def spread(scale: Floats, shape: tuple[int, ...], head_first: bool) -> Floats:
    """The scale with dimensions of size 1 put in, so that it broadcasts to ``shape`` ([...,H,D])."""
    if scale.size == 1:
        return scale.reshape(())
    if scale.ndim == 1:
        return scale[:, None]
    if scale.ndim == 3:
        return (scale.transpose(0, 2, 1) if head_first else scale)[..., None]
    return scale[..., None] if scale.shape == shape[:-1] else scale


def kv_write_blocked(
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
    """``reference.kv_write``: one scatter per cache."""
    new = []
    for rows, cache, scale, name in ((k, k_cache, k_scale, "k"), (v, v_cache, v_scale, "v")):
        result = storage(cache).copy()
        shape = logical(result, layout, name).shape
        slot = np.asarray(slots, dtype=np.int64)
        used = np.flatnonzero((slot >= 0) & (slot < shape[0] * shape[1]))
        at = np.divmod(slot[used], shape[1])
        divisor = _rows_of(scale, shape, layout == "HND", at)
        _store(
            result, layout, name, at, _converted(storage(rows)[used], dtype_of(rows), dtype_of(cache), None, divisor)
        )
        new.append(result)
    return new[0], new[1]


def kv_gather_blocked(
    k_cache: Any, v_cache: Any, block_table: Any, kv_lens: Any, *, layout: Any = "NHD"
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int32]]:
    """``reference.kv_gather``: one gather per cache."""
    indptr = np.concatenate([[0], np.cumsum(kv_lens)]).astype(np.int32)
    k, v = (logical(storage(cache), layout, name) for cache, name in ((k_cache, "k"), (v_cache, "v")))
    return k[_places(block_table, kv_lens, k.shape[1])], v[_places(block_table, kv_lens, v.shape[1])], indptr


def kv_copy_blocked(caches: Any, mapping: Any) -> list[NDArray[Any]]:
    """``reference.kv_copy``: each cache taken by an index that says where every page comes from."""
    pairs = np.asarray(mapping, dtype=np.int64).reshape(-1, 2)
    results = []
    for cache in map(storage, caches):
        source = np.arange(len(cache))
        source[pairs[:, 1]] = pairs[:, 0]
        results.append(cache[source])
    return results


def kv_convert_blocked(
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
    """``reference.kv_convert``: one gather and one scatter per layer and component."""
    results = [storage(array).copy() for array in dst]
    for layer, component in np.ndindex(len(dst_format.layer_ids), len(dst_format.components)):
        at = layer * len(dst_format.components) + component
        name = dst_format.components[component].name
        for part in ("k", "v") if name == "kv" else (name,):
            source = src[layer * len(src_format.components) + _index(src_format, part)]
            rows = logical(storage(source), src_format, part)
            shape = logical(results[at], dst_format, part).shape
            here, there = _places(src_table, kv_lens, rows.shape[1]), _places(dst_table, kv_lens, shape[1])
            factor = _rows_of((src_scales or {}).get(part), rows.shape, False, here)
            divisor = _rows_of((dst_scales or {}).get(part), shape, False, there)
            new = _converted(rows[here], dtype_of(source), dtype_of(dst[at]), factor, divisor)
            _store(results[at], dst_format, part, there, new)
    return results


Places = tuple[NDArray[np.int64], NDArray[np.int64]]


def _places(table: Any, kv_lens: Any, page_tokens: int) -> Places:
    """(page, place in it) of every token of every request, one request after the other."""
    lengths = np.asarray(kv_lens, dtype=np.int64)
    request = np.repeat(np.arange(len(lengths)), lengths)
    j = np.arange(len(request)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    pages = np.asarray(table, dtype=np.int64).reshape(len(lengths), -1)
    return pages[request, j // page_tokens], j % page_tokens


def _index(layout: Any, name: str) -> int:
    names = [component.name for component in layout.components]
    return names.index(name if name in names else "kv")


def _rows_of(scale: Any, shape: tuple[int, ...], head_first: bool, at: Places) -> Floats | None:
    return None if scale is None else np.broadcast_to(spread(as_float64(scale), shape, head_first), shape)[at]


def _converted(
    rows: NDArray[Any], old: DType, new: DType, factor: Floats | None, divisor: Floats | None
) -> NDArray[Any]:
    """Stored rows of dtype ``old`` as stored rows of dtype ``new``."""
    if old is new and factor is None and divisor is None:
        return rows
    values = decode(rows, old)
    values = values if factor is None else values * factor
    return encode(values if divisor is None else values / divisor, new)


def _store(cache: NDArray[Any], layout: Any, name: str, at: Places, rows: NDArray[Any]) -> None:
    """Scatter rows ``[n,H,D]`` to (page, place) of a contiguous cache."""
    if isinstance(layout, str):
        logical(cache, layout, name)[at] = rows
        return
    index = np.arange(cache.size)  # where each logical element lies in the buffer
    cache.reshape(-1)[logical(index, layout, name)[at]] = rows
