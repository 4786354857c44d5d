"""Tile: a block of query rows of one request against a block of its keys, and what is exact about it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from hal_torch.schedule import Band

HUGE = 1e38  # its square is inf in float32


@dataclass(frozen=True, slots=True)
class Tile:
    """R queries against C keys.

    All rows see the first ``free`` keys. Row r does not see key ``free + c`` when ``c - r >= late``
    or ``c - r <= early``; None where there is no such limit.
    """

    rows: int
    position: int  # of the first query, counted in keys of the request
    start: int  # first key
    stop: int
    free: int
    late: int | None
    early: int | None
    may_be_empty: bool  # a row may see no key of the tile
    device: torch.device

    @classmethod
    def of(cls, band: Band, rows: int, position: int, start: int, stop: int, device: torch.device) -> Tile:
        """Work out which of the keys ``[start, stop)`` the band lets each row see."""
        free, late, early = stop - start, None, None
        may_be_empty = False
        if band.left is not None and position + rows - 1 - band.left > start:
            free, early = 0, position - band.left - start - 1
            may_be_empty = early + rows >= stop - start
        if band.right is not None and position + band.right + 1 < stop:
            late = position + band.right + 1 - start
            may_be_empty |= late <= 0
            free = max(0, min(free, late))
            late -= free
        return cls(rows, position, start, stop, free, late, early, may_be_empty, device)

    @property
    def partial(self) -> bool:
        """Whether some row does not see some key."""
        return self.late is not None or self.early is not None

    def distance(self) -> Tensor:
        """``|j - p|``, float32 ``[R, C]``."""
        p = torch.arange(self.position, self.position + self.rows, device=self.device)
        j = torch.arange(self.start, self.stop, device=self.device)
        return (j - p[:, None]).abs_().float()

    def hide(self, grid: Tensor) -> None:
        """Set the scores ``[..., R, C]`` of keys that a row does not see to -inf, NaN included."""
        tail = grid[..., self.free :]
        if self.late is not None:  # zeroing and adding is several times faster than masked_fill_
            tail.tril_(self.late - 1).add_(self._full(-inf).triu_(self.late))
        if self.early is not None:
            tail.triu_(self.early + 1).add_(self._full(-inf).tril_(self.early))

    def seen(self, value: float) -> Tensor:
        """``[R, C - free]``: ``value`` where the row sees the key, else 0."""
        cells = self._full(value)
        if self.late is not None:
            cells.tril_(self.late - 1)
        return cells if self.early is None else cells.triu_(self.early + 1)

    def _full(self, value: float) -> Tensor:
        return torch.full((self.rows, self.stop - self.start - self.free), value, device=self.device)


class Values:
    """Values ``[H, C, D]`` whose NaN and Inf must reach only the rows that see them.

    ``0 * NaN`` is NaN: a product with the weights would spread a bad value to rows that give it no
    weight. So the columns that some row does not see are multiplied without their bad values,
    which are then added to the rows that see them.
    """

    def __init__(self, v: Tensor, first: int) -> None:
        """Guard the columns from ``first`` on."""
        tail = v[:, first:]
        self._v, self._first = v, first
        self._clean = torch.nan_to_num(tail, nan=0.0, posinf=0.0, neginf=0.0)
        # Marks of +inf and of -inf; a NaN is both.
        self._marks = torch.cat([tail < inf, tail > -inf], -1).logical_not_().float().mul_(HUGE)

    def weigh(self, weights: Tensor, start: int, free: int, seen: Tensor) -> Tensor:
        """Product with weights ``[H, g * R, C]`` for the columns from ``start`` on, of which all rows see ``free``.

        Args:
            seen: HUGE where a row sees a column, else 0: ``[R, C - free]``, or ``[H * g, R, C - free]``.
        """
        rows, columns = seen.shape[-2:]
        begin = start + free - self._first
        o = torch.bmm(weights[..., free:], self._clean[:, begin : begin + columns])
        if free:
            o.baddbmm_(weights[..., :free], self._v[:, start : start + free])
        if seen.dim() == 3:
            seen = seen.reshape(len(o), -1, columns)
        # HUGE * HUGE is inf, and 0 where nothing bad is seen; inf - inf makes the NaN.
        plus, minus = torch.matmul(seen, self._marks[:, begin : begin + columns]).chunk(2, -1)
        o.unflatten(1, (-1, rows)).add_((plus - minus).unflatten(1, (-1, rows)))
        return o


def softmax(scores: Tensor, *, want_lse: bool, may_be_empty: bool) -> tuple[Tensor, Tensor | None]:
    """Softmax over the last dimension and its natural-log LSE; a row of -inf gives zeros and -inf."""
    weights = torch.softmax(scores, -1)
    if not want_lse and not may_be_empty:
        return weights, None
    lse = torch.logsumexp(scores, -1)
    if may_be_empty:
        weights.masked_fill_((lse == -inf).unsqueeze(-1), 0)
    return weights, lse


def add_sink(o: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Scale ``o [..., D]`` in place for ``exp(sink)`` in the denominator; returns the LSE that includes it."""
    share = torch.sigmoid(lse - sink).masked_fill_(lse == -inf, 0)
    o.mul_(share.unsqueeze(-1))
    return torch.logaddexp(lse, sink.expand_as(lse))
