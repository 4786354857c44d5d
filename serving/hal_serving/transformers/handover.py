"""The hand-over: all KV of a cache goes from the prefill role's format to the decode role's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import hal
import hal_ops
from hal_serving.transformers.format import CacheFormat
from hal_serving.transformers.pool import PagePool

if TYPE_CHECKING:
    from hal_serving.transformers.cache import PagedCache


def hand_over(cache: PagedCache) -> tuple[PagePool, list[list[int]]]:
    """Return the pool and the tables that decode goes on with.

    They are the present ones where both roles name the same device and format. Else everything is converted by
    ``kv_convert``, layers of equal shape in one call, and the bytes of the live tokens are counted as moved.
    """
    placement, source = cache.placement, cache.require_pool()
    longest = int(cache.lens.max(initial=0)) + 1
    target = placement.decode.kv_format.fitting(longest)
    if placement.prefill.device == placement.decode.device and target.serves(source.format):
        return source, cache.tables
    pool = PagePool(target)
    batch, max_len = cache.expected
    if max_len is not None:
        pool.widen(max_len)
        pool.reserve(batch * pool.format.columns(max_len))
    lens = cache.lens.tolist()
    pool.reserve(sum(pool.format.columns(length + 1) for length in lens))
    tables = [[pool.take() for _ in range(pool.format.columns(length))] for length in lens]
    for layers in _alike(source):
        _convert(cache, layers, source, cache.tables, pool, tables)
    return pool, tables


def _alike(pool: PagePool) -> list[list[int]]:
    """Layers grouped by the shapes and dtypes of their tensors."""
    groups: dict[Any, list[int]] = {}
    for layer, (k, v) in pool.layers.items():
        groups.setdefault((k.shape, v.shape, k.dtype), []).append(layer)
    return list(groups.values())


def _convert(
    cache: PagedCache,
    layers: list[int],
    source: PagePool,
    source_tables: list[list[int]],
    target: PagePool,
    target_tables: list[list[int]],
) -> None:
    k, v = source.layers[layers[0]]
    heads = k.shape[2 if source.format.layout == "NHD" else 1]
    like = (k.new_empty((0, heads, k.shape[3])), v.new_empty((0, heads, v.shape[3])))
    src = [tensor for layer in layers for tensor in source.layers[layer]]
    dst = [tensor for layer in layers for tensor in target.caches(layer, *like)]
    role = cache.placement.decode
    spec = hal_ops.spec(
        "kv_convert",
        src_dtype=k.dtype,
        dst_dtype=k.dtype,
        src_layout=source.format.layout,
        dst_layout=target.format.layout,
    )
    hal_ops.kv_convert(
        src,
        _descriptor(source.format, layers, heads, k, v),
        dst,
        _descriptor(target.format, layers, heads, k, v),
        src_table=_table(source_tables),
        dst_table=_table(target_tables),
        kv_lens=torch.from_numpy(cache.lens.astype(np.int32)),
        device=role.kv_device(spec, str(k.device)),
    )
    cache.placement.count_moved(
        int(cache.lens.sum()) * heads * (k.shape[3] + v.shape[3]) * k.element_size() * len(layers)
    )


def _descriptor(
    kv_format: CacheFormat, layers: list[int], heads: int, k: torch.Tensor, v: torch.Tensor
) -> hal_ops.KVCacheFormat:
    make = hal_ops.KVCacheFormat.nhd if kv_format.layout == "NHD" else hal_ops.KVCacheFormat.hnd
    return make(
        dtype=hal.DType.parse(k.dtype),
        page_tokens=kv_format.page,
        kv_heads=heads,
        head_dim=k.shape[3],
        v_head_dim=v.shape[3],
        layer_ids=tuple(layers),
    )


def _table(tables: list[list[int]]) -> torch.Tensor:
    width = max(map(len, tables), default=0) or 1
    return torch.tensor([pages + [0] * (width - len(pages)) for pages in tables], dtype=torch.int32)
