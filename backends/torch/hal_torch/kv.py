"""torch.kv_write, torch.kv_gather and torch.kv_copy: paged caches in plain torch operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hal.constraint import Flags, OneOf, Range
from hal.dtype import DType
from hal.types import Claim, Device, Event, Kernel
from hal_torch import kv_convert
from hal_torch.memory import TorchMemory
from hal_torch.pages import Pages, bits, cast, request_slots

CHUNK = 32 << 20  # bytes of scratch of one step of a copy

_FLOATS = frozenset({DType.float32, DType.float16, DType.bfloat16})
_QUANTISED = frozenset({DType.float8_e4m3fn, DType.float8_e4m3fnuz, DType.float8_e5m2, DType.int8})
_POSITIVE = Range(1, None)
_CACHE = {
    "kv_dtype": OneOf(_FLOATS | _QUANTISED | {DType.uint8}),
    "head_dim": _POSITIVE,
    "v_head_dim": _POSITIVE,
    "kv_heads": _POSITIVE,
    "layout": OneOf({"NHD", "HND", "format"}),
    "page": _POSITIVE,
    "features": Flags({"strided"}),
}
_WRITE = _CACHE | {"k_dtype": OneOf(_FLOATS), "kv_dtype": OneOf(_FLOATS | _QUANTISED)}
_COPY = {"kv_dtype": OneOf(frozenset(DType) - {DType.int4, DType.uint4}), "features": Flags({"strided"})}


def kernels(device: Device, prefix: str = "torch") -> list[Kernel]:
    """KV kernels for a torch device; ``prefix`` is the library part of their names."""
    memory = TorchMemory(device)

    def kernel(op: str, run: Callable[..., Any], needs: dict[str, Any], **claim: Any) -> Kernel:
        return Kernel(Claim(op=op, kernel=f"{prefix}.{op}", needs=needs, determinism="run", **claim), lambda spec: run)

    refuse = partial(kv_convert.refuse, f"{prefix}.kv_convert")
    return [
        kernel("kv_write", _ordered(kv_write, memory), _WRITE),
        kernel("kv_gather", kv_gather, _CACHE),
        kernel("kv_copy", _ordered(kv_copy, memory), _COPY),
        kernel("kv_convert", _ordered(kv_convert.kv_convert, memory), kv_convert.NEEDS, refuse=refuse),
    ]


def _ordered(run: Callable[..., None], memory: TorchMemory) -> Callable[..., Any]:
    """Add ``wait`` (events that come first) and ``record`` (return an event of the completion)."""

    def ordered(*args: Any, wait: Sequence[Event] = (), record: bool = False, **kwargs: Any) -> Event | None:
        for event in wait:
            event.wait()
        run(*args, **kwargs)
        return memory.event() if record else None

    return ordered


def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    layout: Any = "NHD",
    k_scale: None = None,
    v_scale: None = None,
) -> None:
    """Store row t of k and v at ``slots[t]``; a slot outside the cache skips its row."""
    slots = slots.to(k_cache.device)
    k_pages, v_pages = Pages.of(k_cache, layout, "k"), Pages.of(v_cache, layout, "v")
    count, capacity = len(slots), k_pages.slots
    if not count or not capacity:
        return
    k, v = cast(k[:count], k_pages.dtype), cast(v[:count], v_pages.dtype)
    if slots.device.type != "cpu":
        k_pages.write(*_place(k_pages, slots, k))
        v_pages.write(*_place(v_pages, slots, v))
        return
    low, high = slots.aminmax()
    if int(low) < 0 or int(high) >= capacity:
        kept = ((slots >= 0) & (slots < capacity)).nonzero().flatten()
        slots, k, v = slots[kept], k[kept], v[kept]
    k_pages.write(slots, k)
    v_pages.write(slots, v)


def _place(pages: Pages, slots: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Let the rows that are skipped repeat a row that is not: the host need not know how many there are.

    When all are skipped they write back what lies in the first slot.
    """
    valid = (slots >= 0) & (slots < pages.slots)
    first = valid.int().argmax().view(1)
    slot = slots.index_select(0, first).clamp(0, pages.slots - 1)
    row = torch.where(valid.any(), rows.index_select(0, first), pages.read(slot))
    return torch.where(valid, slots, slot), torch.where(valid[:, None, None], rows, row)


def kv_gather(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, *, layout: Any = "NHD"
) -> tuple[Tensor, Tensor, Tensor]:
    """Dense k ``[S, Hkv, Dk]``, v ``[S, Hkv, Dv]`` of all requests and their int32 indptr ``[B+1]``."""
    k, v = Pages.of(k_cache, layout, "k"), Pages.of(v_cache, layout, "v")
    slots = request_slots(block_table, kv_lens, k.page, k_cache.device)
    ends = kv_lens.to(k_cache.device).cumsum(0, dtype=torch.int32)
    return k.read(slots), v.read(slots), torch.nn.functional.pad(ends, (1, 0))


def kv_copy(caches: Sequence[Tensor], mapping: Any) -> None:
    """Copy pages ``mapping[:, 0]`` over pages ``mapping[:, 1]`` (host int64 ``[n, 2]``) as if all were read first."""
    mapping = mapping[mapping[:, 0] != mapping[:, 1]]
    # Only what is overwritten must be kept aside; the others are copied piece by piece.
    aside = np.isin(mapping[:, 0], mapping[:, 1])
    for cache in caches:
        pages = bits(cache)
        if len(mapping) == 0 or cache.numel() == 0:
            continue
        step = max(1, CHUNK // (cache[0].numel() * cache.element_size()))
        saved, targets = (torch.from_numpy(mapping[aside, side].copy()).to(cache.device) for side in (0, 1))
        kept = pages.index_select(0, saved)
        for start in range(0, len(mapping), step):
            piece = mapping[start : start + step][~aside[start : start + step]]
            source, target = (torch.from_numpy(piece[:, side].copy()).to(cache.device) for side in (0, 1))
            pages.index_copy_(0, target, pages.index_select(0, source))
        pages.index_copy_(0, targets, kept)
