"""Rows: where the ``[D]`` row of a token's head lies in a ragged tensor or a paged cache of any strides."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor


def canonical(x: Tensor, layout: str = "NHD") -> Tensor:
    """View of a cache as ``[pages, page, H, D]``; ragged ``[S, H, D]`` becomes pages of one token."""
    if x.dim() == 3:
        return x.unsqueeze(1)
    return x.transpose(1, 2) if layout == "HND" else x


@dataclass(frozen=True, slots=True)
class Grid:
    """Memory layout of a canonical cache: its rows lie at multiples of ``unit`` elements.

    One matrix ``[rows, D]`` with row stride ``unit`` then holds every row, whatever the strides, so
    that one ``index_select`` gathers tokens and heads in any order.
    """

    page: int
    unit: int
    page_step: int
    token_step: int
    head_step: int

    @classmethod
    def of(cls, x: Tensor) -> Grid:
        """Layout of a canonical cache; the steps are in units."""
        pages, page, heads, _ = x.shape
        steps = [s if n > 1 else 0 for s, n in zip(x.stride()[:3], (pages, page, heads), strict=True)]
        unit = gcd(*steps) or 1
        return cls(page, unit, *(s // unit for s in steps))

    def addresses(self, table: Any, requests: Any, tokens: Any) -> Any:
        """Units from the first row to head 0 of each token, int64.

        Args:
            table: host page ids ``[B, P]``, or int64 ``[B]`` first rows when the keys are ragged.
            requests, tokens: int64 host arrays that broadcast to one shape.
        """
        if table.ndim == 1:
            return (table[requests] + tokens) * self.page_step
        pages = table[requests, tokens // self.page].astype(np.int64)
        return pages * self.page_step + tokens % self.page * self.token_step


@dataclass(frozen=True, slots=True)
class Fetch:
    """How to read the same keys of ``n`` requests: a view when they lie evenly, else a gather."""

    grid: Grid
    count: int
    start: int
    step: int
    index: Tensor | None  # int64 [n, 1, count], in units

    @classmethod
    def of(cls, grid: Grid, addresses: Any, device: torch.device) -> Fetch:
        """Choose for host addresses ``[n, count]`` in units."""
        n, count = addresses.shape
        start = int(addresses[0, 0])
        step = int(addresses[0, 1]) - start if count > 1 else 1
        even = n == 1 and step >= 0 and bool((np.diff(addresses[0]) == step).all())
        index = None if even else torch.from_numpy(np.ascontiguousarray(addresses)).to(device)[:, None]
        return cls(grid, count, start, step, index)

    def __call__(self, x: Tensor) -> Tensor:
        """``[n * H, count, D]`` in float32 of canonical ``x``; may be a view of it."""
        heads, dim = x.shape[2:]
        unit, hop = self.grid.unit, self.grid.head_step
        if self.index is None:
            origin = x.storage_offset() + self.start * unit
            return x.as_strided((heads, self.count, dim), (hop * unit, self.step * unit, 1), origin).float()
        last = sum((size - 1) * stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
        rows = x.as_strided((last // unit + 1, dim), (unit, 1))
        index = self.index
        if heads > 1:
            index = index + torch.arange(0, heads * hop, hop, device=x.device)[:, None]
        return rows.index_select(0, index.flatten()).view(-1, self.count, dim).float()
