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
TILE_ROWS = 128  # query tokens of a tile: short tiles skip more of a causal triangle, long ones multiply faster
ALONE = 1 << 16  # elements of K from which keys that need no gather are better read in place than batched


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
    """Several requests of one query each, padded to one number of keys by repeating the last key."""

    rows: Tensor  # int64 [n]
    shortest: int
    blocked: Tensor | None  # bool [n, 1, 1, width - shortest], True = padding; None without padding
    position: Tensor  # float32 [n, 1, 1, 1], of the query, counted from its first key here
    k: Fetch
    v: Fetch


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
        """Sort the requests into single ones, batches of decodes and empty ones."""
        singles: list[Request] = []
        decodes: list[tuple[int, int, int]] = []
        empty: list[tuple[int, int]] = []
        rows, q_lens, kv_lens = (
            x.tolist() for x in (self._plan.q_indptr_host[:-1], self._plan.q_lens, self._plan.kv_lens)
        )
        for b, (row, lq, lk) in enumerate(zip(rows, q_lens, kv_lens, strict=True)):
            start, stop = self._band.keys(lk - lq, lk - 1, lk)
            if lq and start == stop:
                empty.append((row, row + lq))
            elif lq == 1 and self._batched and not self._large(b, start, stop):
                decodes.append((b, start, stop))
            elif lq:
                singles.append(self._request(b, start, stop))
        batches = []
        for group in self._groups(decodes):
            if len(group) == 1:
                singles.append(self._request(*group[0]))
            else:
                batches.append(self._batch(group))
        return Schedule(tuple(singles), tuple(batches), tuple(empty))

    def _large(self, b: int, start: int, stop: int) -> bool:
        """Whether a decode is better served alone: it fills the scratch, or is long and needs no gather."""
        size = stop - start
        if size * self._heads.token_bytes > SCRATCH:
            return True
        if size * self._heads.kv * self._heads.dim < ALONE:
            return False
        address = self._k.addresses(self._table, b, np.arange(start, stop))
        return bool((np.diff(address, n=2) == 0).all())

    def _groups(self, decodes: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
        """Split by length: a group fits in the scratch and at most half of it is padding."""
        group: list[tuple[int, int, int]] = []
        for item in sorted(decodes, key=lambda d: d[1] - d[2]):  # longest first
            if group:
                longest = group[0][2] - group[0][1]
                full = (len(group) + 1) * longest * self._heads.token_bytes > SCRATCH
                if full or 2 * (item[2] - item[1]) < longest:
                    yield group
                    group = []
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
        blocked = column[shortest:] >= size[:, None]
        position = (self._plan.kv_lens[b] - 1 - start).astype(np.float32)

        def upload(x: Any) -> Tensor:
            return torch.from_numpy(x).to(self._device)

        return Batch(
            rows=upload(self._plan.q_indptr_host[b]),
            shortest=shortest,
            blocked=upload(blocked)[:, None, None] if width > shortest else None,
            position=upload(position)[:, None, None, None],
            k=k,
            v=v,
        )
