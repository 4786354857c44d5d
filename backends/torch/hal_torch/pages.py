"""Pages: one part (keys, values, ...) of a paged cache in any layout, read and written by slot."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """View the elements as integers: bytes move unchanged, also where torch lacks an operator for the dtype."""
    return x.view(_BITS[x.element_size()])


class Pages:
    """A cache seen as ``[pages, N..., H..., D...]``; slot = page id * tokens per page + offset."""

    def __init__(self, x: Tensor, digits: tuple[int, ...], heads: int) -> None:
        """Take ``x`` with ``len(digits)`` dimensions for the token in the page, the major one first."""
        self.dtype = x.dtype
        self.page = prod(digits)
        self.slots = x.shape[0] * self.page
        self.heads = heads
        self._digits = digits
        self._dim = prod(x.shape[1 + len(digits) :]) // heads
        self._cells = bits(x)
        flat = len(digits) == 1 and x.stride(0) == x.stride(1) * self.page
        self._flat = self._cells.flatten(0, 1) if flat else None

    @classmethod
    def of(cls, cache: Tensor, layout: Any, name: str, layer: int = 0) -> Pages:
        """Open part ``name`` of a cache whose layout is "NHD", "HND" or a ``KVCacheFormat``."""
        if layout == "NHD":
            return cls(cache, (cache.shape[1],), cache.shape[2])
        if layout == "HND":
            return cls(cache.transpose(1, 2), (cache.shape[2],), cache.shape[1])
        component = holder(layout, name)
        axes = [factor.axis for factor in component.order]
        for axis, index in (("KV", "kv".index(name) if component.name == "kv" else 0), ("L", layer)):
            if axis in axes:
                cache = cache.select(axes.index(axis), index)
                axes.remove(axis)
        order = [i for axis in "BNHD" for i, found in enumerate(axes) if found == axis]
        cache = cache.permute(order)
        tokens = axes.count("N")
        return cls(cache, tuple(cache.shape[1 : 1 + tokens]), component.size_of("H"))

    def read(self, slots: Tensor) -> Tensor:
        """Copy of the rows at int64 ``slots [n]``, ``[n, H, D]``."""
        rows = self._cells[self._index(slots)] if self._flat is None else self._flat.index_select(0, slots)
        return rows.reshape(len(slots), self.heads, self._dim).view(self.dtype)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Store rows ``[n, H, D]`` of the cache's dtype at int64 ``slots [n]``."""
        rows = bits(rows).reshape(len(slots), *self._cells.shape[1 + len(self._digits) :])
        if self._flat is None:
            self._cells.index_put_(self._index(slots), rows)
        else:
            self._flat.index_copy_(0, slots, rows)

    def _index(self, slots: Tensor) -> tuple[Tensor, ...]:
        """One index per leading dimension."""
        index = []
        for size in reversed(self._digits):
            index.append(slots % size)
            slots = slots // size
        return slots, *reversed(index)


def holder(form: Any, name: str) -> Any:
    """Component of a ``KVCacheFormat`` that holds part ``name``, alone or packed."""
    parts = {component.name: component for component in form.components}
    return parts[name] if name in parts else parts["kv"]


def request_slots(table: Tensor, lens: Tensor, page: int, device: torch.device) -> Tensor:
    """Slots of all tokens of all requests, int64 ``[sum(lens)]``, one request after the other.

    The size of the result depends on ``lens``: this waits for them when they lie on a device.
    """
    table, lens = table.to(device), lens.to(device, torch.int64)
    total = int(lens.sum())
    request = torch.repeat_interleave(torch.arange(len(lens), device=device), lens, output_size=total)
    token = torch.arange(total, device=device) - (lens.cumsum(0) - lens)[request]
    return table[request, token // page].long() * page + token % page


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest element of ``dtype``, ties to even; int8 and fp8 saturate, and NaN becomes 0 in int8."""
    if x.dtype == dtype:
        return x
    if dtype.itemsize > 1:
        return x.to(dtype)
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        return x.float().clamp(-largest, largest).to(dtype)
    limits = torch.iinfo(dtype)
    return x.float().round().nan_to_num(nan=0.0).clamp(limits.min, limits.max).to(dtype)
