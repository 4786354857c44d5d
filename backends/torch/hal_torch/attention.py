"""torch.attention: attention in plain torch operators, exact on every device that torch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from hal.constraint import Constraint, Flags, OneOf, Range
from hal.dtype import DType
from hal.types import Claim, Device, Kernel, OpSpec
from hal_torch import merge
from hal_torch.merge import merge_attention_states
from hal_torch.rows import canonical
from hal_torch.schedule import Band, Batch, Chunk, Heads, Request, Schedule, Scheduler
from hal_torch.tile import HUGE, Tile, Values, add_sink, softmax

FLOATS = OneOf({DType.float32, DType.float16, DType.bfloat16})
POSITIVE = Range(1, None)
FEATURES = Flags(
    {"noncausal", "window_left", "window_right", "softcap", "alibi", "sinks"}
    | {"mask", "mask_per_head", "bias", "bias_per_head", "lse", "strided"}
)


def kernels(device: Device, prefix: str = "torch") -> list[Kernel]:
    """Attention kernels for a torch device; ``prefix`` is the library part of their names."""
    needs: dict[str, Constraint] = {
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
        _, page, kv_heads, dim = k.shape
        heads = Heads(kv_heads, q.shape[1] // kv_heads, dim, v.shape[3])
        band = Band.of(causal, window)
        dense = mask is not None or bias is not None
        shapes = f"{heads.ratio} {kv_heads} {dim} {heads.v_dim} {page} {k.stride()} {v.stride()}"
        key = f"torch.attention {q.device} {shapes} {causal} {window} {dense}"
        schedule = plan.cached(key, lambda: Scheduler(plan, k, v, heads, band, batched=not dense).build())
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

    @property
    def dense(self) -> bool:
        """Whether a mask or bias says cell by cell what is allowed."""
        return self.mask is not None or self.bias is not None

    @property
    def bent(self) -> bool:
        """Whether a softcap or ALiBi changes the scores."""
        return self.softcap > 0 or self.slopes is not None

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
        """Requests of one query each, none of them empty: one gather, one product."""
        heads, n, free = self.heads, batch.size, batch.shortest
        keys, values = batch.k(k), batch.v(v)
        rows = batch.read(q).float() * self.scale
        scores = torch.bmm(rows.reshape(n * heads.kv, heads.ratio, heads.dim), keys.transpose(1, 2))
        if self.bent:
            self._bend(scores.view(n, heads.q, 1, -1), batch.distance)
        if batch.blocked is not None:
            scores.view(n, heads.q, -1)[..., free:].masked_fill_(batch.blocked[:, None], -inf)
            # The padding repeats a key that is allowed, but 0 * inf of it would still be NaN.
            values.view(n, heads.kv, -1, heads.v_dim)[:, :, free:].masked_fill_(batch.blocked[:, None, :, None], 0)
        want_lse = self.lse is not None or self.sinks is not None
        weights, lse = softmax(scores, want_lse=want_lse, may_be_empty=False)
        o = torch.bmm(weights, values).view(n, heads.q, heads.v_dim)
        if lse is not None:
            lse = lse.view(n, heads.q)
            if self.sinks is not None:
                lse = add_sink(o, lse, self.sinks)
            if self.lse is not None:
                batch.write(self.lse, lse)
        batch.write(self.out, o)

    def _whole(self, request: Request, q: Tensor, k: Tensor, v: Tensor) -> None:
        """A request whose keys are read at once, tile by tile."""
        (chunk,) = request.chunks
        want_lse = self.lse is not None or self.sinks is not None
        for start, stop, o, lse in self._tiles(request, chunk, q, k, v, want_lse):
            if o is None:
                self._nothing(start, stop)
                continue
            if self.sinks is not None:
                lse = add_sink(o, lse, self.sinks.view(-1, 1))
            self.out[start:stop].copy_(o.transpose(0, 1))
            if self.lse is not None:
                self.lse[start:stop].copy_(lse.transpose(0, 1))

    def _chunked(self, request: Request, q: Tensor, k: Tensor, v: Tensor) -> None:
        """A request whose keys are read chunk by chunk; the partial results are merged as states."""
        o = torch.zeros(self.heads.q, request.lq, self.heads.v_dim, device=q.device)
        # A sink is a state of its own: no output, weight exp(sink).
        lse = torch.full((self.heads.q, request.lq), -inf, device=q.device)
        if self.sinks is not None:
            lse.copy_(self.sinks.view(-1, 1))
        for chunk in request.chunks:
            for start, stop, *part in self._tiles(request, chunk, q, k, v, want_lse=True):
                if part[0] is not None:
                    o_tile, lse_tile = (x[:, start - request.row : stop - request.row] for x in (o, lse))
                    merge_attention_states(o_tile, lse_tile, *part, out=o_tile, lse_out=lse_tile)
        span = slice(request.row, request.row + request.lq)
        self.out[span].copy_(o.transpose(0, 1))
        if self.lse is not None:
            self.lse[span].copy_(lse.transpose(0, 1))

    def _tiles(
        self, request: Request, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, want_lse: bool
    ) -> Iterator[tuple[int, int, Any, Any]]:
        """Query rows ``[start, stop)``, output ``[Hq, R, Dv]`` and LSE of each tile; None if it sees no key."""
        keys, values, guarded = chunk.k(k), chunk.v(v), None
        for first, last in request.tiles(self.heads):
            rows = request.row + first, request.row + last
            position = first + request.lk - request.lq
            start, stop = self.band.keys(position, position + last - first - 1, request.lk)
            start, stop = max(start, chunk.start), min(stop, chunk.stop)
            if start >= stop:
                yield *rows, None, None
                continue
            tile = Tile.of(self.band, last - first, position, start, stop, q.device)
            at = slice(start - chunk.start, stop - chunk.start)
            scores = self._scores(tile, q[slice(*rows)], keys[:, at])
            free, seen = self._hide(tile, request, scores.view(self.heads.q, tile.rows, -1))
            empty = tile.may_be_empty or self.dense
            weights, lse = softmax(scores, want_lse=want_lse, may_be_empty=empty)
            if seen is None:
                o = torch.bmm(weights, values[:, at])
            else:
                if guarded is None:  # without a left bound no tile has fewer keys that all its rows see than the first
                    guarded = Values(values, at.start + free if self.band.left is None else 0)
                o = guarded.weigh(weights, at.start, free, seen)
            yield *rows, o.view(self.heads.q, tile.rows, -1), None if lse is None else lse.view(self.heads.q, -1)

    def _scores(self, tile: Tile, q: Tensor, keys: Tensor) -> Tensor:
        """Scores of all keys, hidden ones included, ``[Hkv, ratio * R, C]``."""
        rows = (q.float() * self.scale).transpose(0, 1).reshape(self.heads.kv, -1, self.heads.dim)
        scores = torch.bmm(rows, keys.transpose(1, 2))
        if self.bent:
            self._bend(scores.view(self.heads.q, tile.rows, -1), tile.distance)
        return scores

    def _bend(self, grid: Tensor, distance: Callable[[], Tensor]) -> None:
        """Softcap and ALiBi on scores ``[..., Hq, R, C]``, in place."""
        if self.softcap > 0:
            grid.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.slopes is not None:
            grid.addcmul_(self.slopes.view(-1, 1, 1), distance(), value=-1)

    def _hide(self, tile: Tile, request: Request, grid: Tensor) -> tuple[int, Tensor | None]:
        """Add the bias and hide what is not allowed in scores ``[Hq, R, C]``, in place.

        Returns:
            The number of leading keys that all rows see, and HUGE where a row sees one of the others,
            ``[R, C - free]`` or ``[Hq, R, C - free]``; None when values need no guard.
        """
        if not self.dense:
            tile.hide(grid)
            return tile.free, tile.seen(HUGE) if tile.partial and self.poison else None
        seen = torch.nn.functional.pad(tile.seen(1.0), (tile.free, 0), value=1.0) > 0
        if self.mask is not None:
            seen = seen & _cells(self.mask, tile, request)
        if self.bias is not None:
            bias = _cells(self.bias, tile, request).float()
            grid.add_(bias)
            seen = seen & (bias != -inf)
        grid.masked_fill_(~seen, -inf)
        return 0, seen.float().mul_(HUGE) if self.poison else None


def _cells(x: Tensor, tile: Tile, request: Request) -> Tensor:
    """The tile's part of a mask or bias, ``[R, C]`` or ``[Hq, R, C]``."""
    mine = x[..., request.cell : request.cell + request.lq * request.lk].unflatten(-1, (request.lq, request.lk))
    first = tile.position - request.lk + request.lq
    return mine[..., first : first + tile.rows, tile.start : tile.stop]
