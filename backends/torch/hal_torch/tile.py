"""Tile: a block of query rows of one request against a block of its keys."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from hal_torch.schedule import Band


@dataclass(frozen=True, slots=True)
class Tile:
    """R queries from ``position`` on against the C keys ``[start, stop)``; all positions count keys."""

    rows: int
    position: int
    start: int
    stop: int
    device: torch.device

    def distance(self) -> Tensor:
        """``|j - p|``, float32 ``[R, C]``."""
        p = torch.arange(self.position, self.position + self.rows, device=self.device)
        j = torch.arange(self.start, self.stop, device=self.device)
        return (j - p[:, None]).abs_().float()

    def blocked(self, band: Band) -> tuple[int, Tensor | None]:
        """Number of leading keys that all rows see, and of the others which are blocked: bool ``[1, R, C - free]``."""
        width = self.stop - self.start
        ahead = width if band.right is None else self.position + band.right + 1 - self.start  # free keys of row 0
        behind = 0 if band.left is None else self.position + self.rows - 1 - band.left - self.start  # lost by the last
        if behind <= 0 and ahead >= width:
            return width, None
        free = 0 if behind > 0 else max(0, ahead)
        ones = torch.ones(1, self.rows, width - free, dtype=torch.bool, device=self.device)
        late = ones.triu(ahead - free)
        return free, late if behind <= 0 else late.logical_or_(ones.tril_(behind - self.rows))

    def may_be_empty(self, band: Band) -> bool:
        """Whether a row may see no key of the tile."""
        first_row_late = band.right is not None and self.position + band.right < self.start
        last_row_past = band.left is not None and self.position + self.rows - 1 - band.left >= self.stop
        return first_row_late or last_row_past


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


def weigh(weights: Tensor, v: Tensor, free: int, blocked: Tensor) -> Tensor:
    """``weights @ v`` in which a NaN or Inf of a blocked value reaches no row that must not see it.

    Args:
        weights: ``[H, g * R, C]``, zero where blocked.
        v: ``[H, C, D]``; all rows see the first ``free`` values.
        blocked: bool ``[1 or H * g, R, C - free]``.
    """
    tail = v[:, free:]
    o = torch.bmm(weights[..., free:], tail.masked_fill(~tail.isfinite(), 0))
    if free:
        o.baddbmm_(weights[..., :free], v[:, :free])
    # What the finite product left out: count per row the allowed +inf and -inf; a NaN is both.
    nan = tail.isnan()
    signs = torch.cat([nan | (tail == inf), nan | (tail == -inf)], -1).float()
    allowed = (~blocked).float()
    if len(blocked) > 1:
        allowed = allowed.view(len(v), -1, tail.shape[1])
    rows = blocked.shape[-2]
    plus, minus = (torch.matmul(allowed, signs) > 0).unflatten(1, (-1, rows)).chunk(2, -1)
    zero = o.new_zeros(())
    grid = o.unflatten(1, (-1, rows))
    grid += torch.where(plus, inf, zero) - torch.where(minus, inf, zero)
    return o
