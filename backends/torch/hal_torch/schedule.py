"""Schedule: which query rows meet which keys, decided on the host once per step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hal_torch.rows import Fetch, Grid

SCRATCH = 32 << 20  # bytes of one gather of K or V, and of one score tile
TILE_ROWS = 64  # query tokens of a tile: short ones skip more of a causal triangle and their scores stay in a cache


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of the heads."""

    kv: int
    ratio: int
    dim: int
    v_dim: int

    @property
    def q(self) -> int:
        """Query heads."""
        return self.kv * self.ratio

    @property
    def token_bytes(self) -> int:
        """Float32 bytes of the larger of one token's K and V."""
        return 4 * self.kv * max(self.dim, self.v_dim)


@dataclass(frozen=True, slots=True)
class Band:
    """Allowed keys of a query at position p: ``p - left <= j <= p + right``; None is open."""

    left: int | None
    right: int | None

    @classmethod
    def of(cls, causal: bool, window: tuple[int, int]) -> Band:
        left, right = (None if w < 0 else int(w) for w in window)
        return cls(left, 0 if causal else right)

    def keys(self, first: int, last: int, length: int) -> tuple[int, int]:
        """Keys ``[start, stop)`` that some query at position ``first`` to ``last`` sees."""
        start = 0 if self.left is None else max(0, first - self.left)
        stop = length if self.right is None else min(length, last + self.right + 1)
        return start, max(start, stop)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Keys ``[start, stop)`` of one request and how to read them."""

    start: int
    stop: int
    k: Fetch
    v: Fetch


@dataclass(frozen=True, slots=True)
class Request:
    """One request, whose keys come in one or more chunks."""

    row: int  # first query row
    lq: int
    lk: int
    cell: int  # first element in mask and bias
    chunks: tuple[Chunk, ...]

    def tiles(self, heads: Heads) -> Iterator[tuple[int, int]]:
        """Query intervals whose scores fit in the scratch."""
        widest = max(chunk.stop - chunk.start for chunk in self.chunks)
        rows = max(1, min(TILE_ROWS, SCRATCH // (4 * heads.q * widest)))
        for first in range(0, self.lq, rows):
            yield first, min(first + rows, self.lq)


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests of one query each, padded to one number of keys by repeating the last key."""

    size: int
    rows: slice | Tensor  # query rows; int64 [n] unless consecutive
    shortest: int
    blocked: Tensor | None  # bool [n, width - shortest], True = padding; None without padding
    position: Tensor  # float32 [n], of the query, counted from its first key here
    k: Fetch
    v: Fetch

    def read(self, x: Tensor) -> Tensor:
        """The batch's rows of ``x``."""
        return x[self.rows] if isinstance(self.rows, slice) else x.index_select(0, self.rows)

    def write(self, x: Tensor, values: Tensor) -> None:
        """Set the batch's rows of ``x``."""
        if isinstance(self.rows, slice):
            x[self.rows].copy_(values)
        else:
            x.index_copy_(0, self.rows, values.to(x.dtype))

    def distance(self) -> Tensor:
        """``|j - p|``, float32 ``[n, 1, 1, width]``."""
        return (torch.arange(self.k.count, device=self.position.device) - self.position[:, None, None, None]).abs_()


@dataclass(frozen=True, slots=True)
class Schedule:
    """All the work of one step; ``empty`` are query row intervals ``[start, stop)`` that see no key."""

    requests: tuple[Request, ...]
    batches: tuple[Batch, ...]
    empty: tuple[tuple[int, int], ...]


class Scheduler:
    """Builds a ``Schedule`` from a plan and the layout of the caches."""

    def __init__(self, plan: Any, k: Tensor, v: Tensor, heads: Heads, band: Band, batched: bool) -> None:
        self._heads, self._band, self._batched = heads, band, batched
        self._device = k.device
        self._k, self._v = Grid.of(k), Grid.of(v)
        self._plan = plan
        self._table = plan.block_table_host if plan.paged else plan.kv_indptr_host
        self._cells = np.concatenate([[0], np.cumsum(plan.q_lens * plan.kv_lens)])

    def build(self) -> Schedule:
        """Sort the requests into batches of decodes, other ones and empty ones."""
        requests: list[Request] = []
        decodes: list[tuple[int, int, int]] = []
        empty: list[tuple[int, int]] = []
        rows, q_lens, kv_lens = (
            x.tolist() for x in (self._plan.q_indptr_host[:-1], self._plan.q_lens, self._plan.kv_lens)
        )
        for b, (row, lq, lk) in enumerate(zip(rows, q_lens, kv_lens, strict=True)):
            start, stop = self._band.keys(lk - lq, lk - 1, lk)
            if lq and start == stop:
                empty.append((row, row + lq))
            elif lq == 1 and self._batched and (stop - start) * self._heads.token_bytes <= SCRATCH:
                decodes.append((b, start, stop))
            elif lq:
                requests.append(self._request(b, start, stop))
        batches = tuple(self._batch(sorted(group)) for group in self._groups(decodes))
        return Schedule(tuple(requests), batches, tuple(empty))

    def _groups(self, decodes: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
        """Split by length: a group fits in the budget and at most half of it is padding."""
        # Fresh memory is slow on a CPU, and what fits in its cache need not be read twice from memory.
        budget = min(SCRATCH, 1 << 20) if self._device.type == "cpu" else SCRATCH
        group: list[tuple[int, int, int]] = []
        longest = 0
        for item in sorted(decodes, key=lambda d: d[1] - d[2]):  # longest first
            size = item[2] - item[1]
            full = (len(group) + 1) * longest * self._heads.token_bytes > budget
            if group and (full or 2 * size < longest):
                yield group
                group = []
            if not group:
                longest = size
            group.append(item)
        if group:
            yield group

    def _fetch(self, requests: Any, tokens: Any) -> tuple[Fetch, Fetch]:
        k = Fetch.of(self._k, self._k.addresses(self._table, requests, tokens), self._device)
        if self._v == self._k:
            return k, k
        return k, Fetch.of(self._v, self._v.addresses(self._table, requests, tokens), self._device)

    def _request(self, b: int, start: int, stop: int) -> Request:
        plan = self._plan
        width = max(1, SCRATCH // self._heads.token_bytes)
        chunks = []
        for first in range(start, stop, width):
            last = min(first + width, stop)
            chunks.append(Chunk(first, last, *self._fetch(np.array([[b]]), np.arange(first, last)[None])))
        row, lq, lk = int(plan.q_indptr_host[b]), int(plan.q_lens[b]), int(plan.kv_lens[b])
        return Request(row, lq, lk, int(self._cells[b]), tuple(chunks))

    def _batch(self, group: list[tuple[int, int, int]]) -> Batch:
        b, start, stop = np.array(group).T
        size = stop - start
        width, shortest = int(size.max()), int(size.min())
        column = np.arange(width)
        k, v = self._fetch(b[:, None], np.minimum(start[:, None] + column, stop[:, None] - 1))
        rows = self._plan.q_indptr_host[b]
        first, last = int(rows[0]), int(rows[-1])
        return Batch(
            size=len(b),
            rows=slice(first, last + 1) if last - first == len(b) - 1 else self._upload(rows),
            shortest=shortest,
            blocked=self._upload(column[shortest:] >= size[:, None]) if width > shortest else None,
            position=self._upload((self._plan.kv_lens[b] - 1 - start).astype(np.float32)),
            k=k,
            v=v,
        )

    def _upload(self, x: Any) -> Tensor:
        return torch.from_numpy(x).to(self._device)
