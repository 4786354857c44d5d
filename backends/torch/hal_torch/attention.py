"""torch.attention: attention in plain torch operators, exact on every device that torch has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from hal.constraint import Flags, OneOf, Range
from hal.dtype import DType
from hal.types import Claim, Device, Kernel, OpSpec
from hal_torch import merge
from hal_torch.merge import merge_attention_states
from hal_torch.rows import canonical
from hal_torch.schedule import Band, Batch, Chunk, Heads, Request, Schedule, Scheduler
from hal_torch.tile import Tile, add_sink, softmax, weigh

FLOATS = OneOf({DType.float32, DType.float16, DType.bfloat16})
POSITIVE = Range(1, None)
FEATURES = Flags(
    {"noncausal", "window_left", "window_right", "softcap", "alibi", "sinks"}
    | {"mask", "mask_per_head", "bias", "bias_per_head", "lse", "strided"}
)


def kernels(device: Device, prefix: str = "torch") -> list[Kernel]:
    """Attention kernels for a torch device; ``prefix`` is the library part of their names."""
    needs = {
        "q_dtype": FLOATS,
        "kv_dtype": FLOATS,
        "out_dtype": FLOATS,
        "head_dim": POSITIVE,
        "v_head_dim": POSITIVE,
        "kv_heads": POSITIVE,
        "gqa_ratio": POSITIVE,
        "paged": OneOf({True, False}),
        "layout": OneOf({"NHD", "HND"}),
        "page": POSITIVE,
        "table": OneOf({"one", "many"}),
        "kv_slack": OneOf({"any", "finite"}),
        "max_q": POSITIVE,
        "max_kv": POSITIVE,
        "batch": POSITIVE,
        "features": FEATURES,
        "determinism": OneOf({"run"}),
    }
    claim = Claim(op="attention", kernel=f"{prefix}.attention", needs=needs, determinism="run")
    return [Kernel(claim, build_attention), merge.kernel(prefix)]


def build_attention(spec: OpSpec) -> Callable[..., None]:
    """Bind the layout and the promise about slack; lengths and strides are read from each call."""
    layout = spec.fields.get("layout", "NHD")
    poison = spec.fields.get("kv_slack", "any") == "any"

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Any,
        *,
        out: Tensor,
        scale: float,
        causal: bool = True,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        lse: Tensor | None = None,
        k_scale: None = None,
        v_scale: None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        if plan.paged:
            k, v = canonical(k, layout), canonical(v, layout)
        else:
            k, v = canonical(k), canonical(v)
        heads = Heads(k.shape[2], q.shape[1] // k.shape[2], k.shape[3], v.shape[3])
        band = Band.of(causal, window)
        dense = mask is not None or bias is not None
        key = f"torch.attention {q.device} {heads} {k.stride()} {v.stride()} {k.shape[1]} {causal} {window} {dense}"
        schedule = plan.cached(key, Scheduler(plan, k, v, heads, band, batched=not dense).build)
        call = Call(heads, band, float(scale), float(softcap), poison, sinks, alibi_slopes, mask, bias, out, lse)
        call.run(schedule, q, k, v)

    return attention


@dataclass(slots=True)
class Call:
    """The options of one call. Scores are ``[n * Hkv, ratio * R, C]``: n requests, R queries, C keys."""

    heads: Heads
    band: Band
    scale: float
    softcap: float
    poison: bool
    sinks: Tensor | None
    slopes: Tensor | None
    mask: Tensor | None
    bias: Tensor | None
    out: Tensor
    lse: Tensor | None

    def run(self, schedule: Schedule, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Serve every request of the schedule."""
        for start, stop in schedule.empty:
            self._nothing(start, stop)
        for batch in schedule.batches:
            self._decode(batch, q, k, v)
        for request in schedule.requests:
            if len(request.chunks) == 1:
                self._whole(request, q, k, v)
            else:
                self._chunked(request, q, k, v)

    def _nothing(self, start: int, stop: int) -> None:
        self.out[start:stop] = 0
        if self.lse is not None:
            self.lse[start:stop] = -inf if self.sinks is None else self.sinks

    def _decode(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Several requests of one query each: one gather, one product. None of them is empty."""
        heads, n, free = self.heads, len(batch.rows), batch.shortest
        keys, values = batch.k(k), batch.v(v)
        rows = q.index_select(0, batch.rows).float().mul_(self.scale)
        scores = torch.bmm(rows.view(n * heads.kv, heads.ratio, heads.dim), keys.transpose(1, 2))
        grid = scores.view(n, heads.q, 1, -1)
        columns = torch.arange(keys.shape[1], device=q.device)
        self._bend(grid, None if self.slopes is None else (columns - batch.position).abs_())
        if batch.blocked is not None:
            grid[..., free:].masked_fill_(batch.blocked, -inf)
            # The padding repeats a key that is allowed, but 0 * inf of it would still be NaN.
            values.view(n, heads.kv, -1, heads.v_dim)[:, :, free:].masked_fill_(batch.blocked.transpose(2, 3), 0)
        want_lse = self.lse is not None or self.sinks is not None
        weights, lse = softmax(scores, want_lse=want_lse, may_be_empty=False)
        o = torch.bmm(weights, values).view(n, heads.q, heads.v_dim)
        if lse is not None:
            lse = lse.view(n, heads.q)
            if self.sinks is not None:
                lse = add_sink(o, lse, self.sinks)
            if self.lse is not None:
                self.lse.index_copy_(0, batch.rows, lse)
        self.out.index_copy_(0, batch.rows, o.to(self.out.dtype))

    def _whole(self, request: Request, q: Tensor, k: Tensor, v: Tensor) -> None:
        """A request whose keys are read at once, tile by tile."""
        (chunk,) = request.chunks
        keys, values = chunk.k(k), chunk.v(v)
        want_lse = self.lse is not None or self.sinks is not None
        for first, last in request.tiles(self.heads):
            start, stop = request.row + first, request.row + last
            tile = self._tile(request, chunk, first, last, q.device)
            if tile is None:
                self._nothing(start, stop)
                continue
            o, lse = self._attend(tile, request, chunk, q[start:stop], keys, values, want_lse)
            if self.sinks is not None:
                lse = add_sink(o, lse, self.sinks.view(-1, 1))
            self.out[start:stop].copy_(o.transpose(0, 1))
            if self.lse is not None:
                self.lse[start:stop].copy_(lse.transpose(0, 1))

    def _chunked(self, request: Request, q: Tensor, k: Tensor, v: Tensor) -> None:
        """A request whose keys are read chunk by chunk; the partial results are merged as states."""
        heads = self.heads
        o = torch.zeros(heads.q, request.lq, heads.v_dim, device=q.device)
        # A sink is a state of its own: no output, weight exp(sink).
        lse = torch.full((heads.q, request.lq), -inf, device=q.device)
        if self.sinks is not None:
            lse.copy_(self.sinks.view(-1, 1))
        for chunk in request.chunks:
            keys, values = chunk.k(k), chunk.v(v)
            for first, last in request.tiles(heads):
                tile = self._tile(request, chunk, first, last, q.device)
                if tile is not None:
                    rows = q[request.row + first : request.row + last]
                    part = self._attend(tile, request, chunk, rows, keys, values, want_lse=True)
                    state = o[:, first:last], lse[:, first:last]
                    merge_attention_states(*state, *part, out=state[0], lse_out=state[1])
        span = slice(request.row, request.row + request.lq)
        self.out[span].copy_(o.transpose(0, 1))
        if self.lse is not None:
            self.lse[span].copy_(lse.transpose(0, 1))

    def _tile(self, request: Request, chunk: Chunk, first: int, last: int, device: torch.device) -> Tile | None:
        """The keys of a chunk that queries ``[first, last)`` see; None when there are none."""
        position = first + request.lk - request.lq
        start, stop = self.band.keys(position, position + last - first - 1, request.lk)
        start, stop = max(start, chunk.start), min(stop, chunk.stop)
        return Tile(last - first, position, start, stop, device) if start < stop else None

    def _attend(
        self, tile: Tile, request: Request, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, want_lse: bool
    ) -> tuple[Tensor, Any]:
        """Output ``[Hq, R, Dv]`` and, when wanted, LSE ``[Hq, R]`` of one tile, without the sink."""
        heads = self.heads
        span = slice(tile.start - chunk.start, tile.stop - chunk.start)
        k, v = k[:, span], v[:, span]
        rows = (q.float() * self.scale).transpose(0, 1).reshape(heads.kv, -1, heads.dim)
        scores = torch.bmm(rows, k.transpose(1, 2))
        grid = scores.view(heads.q, tile.rows, -1)
        self._bend(grid, None if self.slopes is None else tile.distance())
        free, blocked = tile.blocked(self.band)
        if self.mask is not None or self.bias is not None:
            free, blocked = 0, self._dense(tile, request, grid, free, blocked)
        if blocked is not None:
            grid[..., free:].masked_fill_(blocked, -inf)
        dense = self.mask is not None or self.bias is not None
        weights, lse = softmax(scores, want_lse=want_lse, may_be_empty=dense or tile.may_be_empty(self.band))
        guarded = blocked is not None and self.poison
        o = weigh(weights, v, free, blocked) if guarded else torch.bmm(weights, v)
        return o.view(heads.q, tile.rows, -1), None if lse is None else lse.view(heads.q, -1)

    def _bend(self, grid: Tensor, distance: Tensor | None) -> None:
        """Softcap and ALiBi on scores ``[..., Hq, R, C]``, in place."""
        if self.softcap > 0:
            grid.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.slopes is not None:
            grid.addcmul_(self.slopes.view(-1, 1, 1), distance, value=-1)

    def _dense(self, tile: Tile, request: Request, grid: Tensor, free: int, blocked: Tensor | None) -> Tensor:
        """Add the bias to scores ``[Hq, R, C]`` in place; returns all that is blocked, ``[1 or Hq, R, C]``."""

        def cells(x: Tensor) -> Tensor:
            """The tile's cells of a mask or bias, ``[1 or Hq, R, C]``."""
            mine = x[..., request.cell : request.cell + request.lq * request.lk].unflatten(-1, (request.lq, request.lk))
            first = tile.position - request.lk + request.lq
            mine = mine[..., first : first + tile.rows, tile.start : tile.stop]
            return mine if mine.dim() == 3 else mine[None]

        total = torch.zeros(1, *grid.shape[1:], dtype=torch.bool, device=grid.device)
        if blocked is not None:
            total[..., free:] = blocked
        if self.mask is not None:
            total = total | ~cells(self.mask)
        if self.bias is not None:
            bias = cells(self.bias).float()
            grid.add_(bias)
            total = total | (bias == -inf)
        return total
