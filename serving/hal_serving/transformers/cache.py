"""``PagedCache``: transformers' ``Cache`` over paged KV that is written and read by operators alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

import hal_ops
from hal.errors import ContractError
from hal_ops.spec import bucket
from hal_serving.transformers.handover import hand_over
from hal_serving.transformers.pool import PagePool
from hal_serving.transformers.role import Placement, Role


@dataclass
class Step:
    """One forward on a cache: what its layers share. ``columns`` new tokens per row, padding included."""

    columns: int
    plan: Any = None  # AttentionPlan; None until the first layer brings the mask
    slots: torch.Tensor | None = None  # int64 [T], where the new tokens go
    rows: torch.Tensor | None = None  # int64 [T], which of the batch * columns tokens are real; None: all
    noted: set[Any] = field(default_factory=set)  # kinds of layers that are on record
    sizes: tuple[int, int, int] = (0, 0, 0)  # batch, longest query and key sequence, bucketed

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        return Step(0)  # caches are copied between forwards


class PagedLayer(CacheLayerMixin):
    """One layer's view of a ``PagedCache``. New K and V wait here for the attention function, which knows the mask."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: PagedCache, index: int) -> None:
        super().__init__()
        self.cache = cache
        self.index = index
        self.seen = 0
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: tensors are made when the attention function writes."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new K and V ``[B, Hkv, L, D]``; they come back marked with this layer, for the attention function."""
        if self.pending is not None:
            raise RuntimeError(
                f"layer {self.index}: keys were added to HAL's cache but never attended to; "
                'HAL\'s cache works with attn_implementation="hal" only'
            )
        self.cache.advance(self, key_states.shape[0], key_states.shape[2])
        self.pending = (key_states, value_states)
        self.is_initialized = True
        key_states.hal_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand out the K and V that wait."""
        if self.pending is None:
            raise RuntimeError(f"layer {self.index}: attention ran twice on the same keys")
        pending, self.pending = self.pending, None
        return pending

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset) that a mask of the next ``query_length`` tokens covers: always the whole history."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Columns seen so far, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """-1: the cache grows."""
        return -1


class PagedCache(Cache):
    """KV of one batch in pages, first in the prefill role's format, after the hand-over in the decode role's.

    Padding is never stored: ``lens`` counts the real tokens of each row, ``seen`` the columns that transformers
    counts. A row is a list of pages; rows may share pages until one of them writes.

    Args:
        placement: the roles.
        layers: number of layers of the model.
        batch: rows that are expected, for sizing.
        max_len: tokens per row that are expected, for sizing; a longer row makes the cache grow.
    """

    def __init__(self, placement: Placement, layers: int, *, batch: int = 1, max_len: int | None = None) -> None:
        super().__init__(layers=[PagedLayer(self, index) for index in range(layers)])
        self.placement = placement
        self.expected = (batch, max_len)
        self._clear()

    def _clear(self) -> None:
        self.role: Role = self.placement.prefill
        self.pool: PagePool | None = None
        self.tables: list[list[int]] = []
        self.lens = np.zeros(0, np.int64)
        self.seen = 0
        self.padding: torch.Tensor | None = None  # bool [B, seen], False where a column is padding; None: nowhere
        self.step = Step(0)
        for layer in self.layers:
            layer.seen = 0
            layer.pending = None

    # ------------------------------------------------------------------ one forward

    def advance(self, layer: PagedLayer, batch: int, columns: int) -> None:
        """Count ``columns`` new tokens of ``layer``; the first layer of a forward starts a step."""
        if layer.seen == self.seen:
            if self.seen and any(other.seen not in (0, self.seen) for other in self.layers):
                raise RuntimeError("a forward on this cache stopped half way; call reset() and start again")
            if self.seen and batch != len(self.tables):
                raise ContractError("key_states", f"the cache's batch of {len(self.tables)}", f"a batch of {batch}")
            if not self.seen:
                self.tables = [[] for _ in range(batch)]
                self.lens = np.zeros(batch, np.int64)
            self.step = Step(columns)
            self.seen += columns
        layer.seen += columns
        if layer.seen != self.seen:
            raise RuntimeError("a forward on this cache stopped half way; call reset() and start again")

    def plan(self, mask: torch.Tensor | None, device: torch.device) -> Step:
        """Return the step that runs; the first layer to ask makes its plan, slots and room.

        Args:
            mask: bool ``[B, seen]``, False where a column is padding; None: nothing new is padding.
            device: where index tensors go.
        """
        step = self.step
        if step.plan is not None:
            return step
        new = self._real(step, mask)
        self._settle(step.columns)
        lens = self.lens + new
        self._make_room(lens)
        table = self._table()
        step.slots = torch.from_numpy(self._slots(table, new)).to(device)
        step.sizes = (bucket(len(new)), bucket(int(new.max(initial=0))), bucket(int(lens.max(initial=0))))
        indptr = np.zeros(len(new) + 1, np.int32)
        np.cumsum(new, out=indptr[1:])
        step.plan = hal_ops.plan_attention(
            q_indptr=torch.from_numpy(indptr).to(device),
            kv_lens=torch.from_numpy(lens.astype(np.int32)).to(device),
            block_table=torch.from_numpy(table).to(device),
            q_lens_host=new,
            kv_lens_host=lens,
        )
        self.lens = lens
        return step

    def _real(self, step: Step, mask: torch.Tensor | None) -> np.ndarray:
        """Real tokens among each row's new ones, int64 ``[B]``; remembers the padding and sets ``step.rows``."""
        batch, columns = len(self.tables), step.columns
        before = self.seen - columns
        if mask is None:
            if self.padding is not None:
                self.padding = torch.nn.functional.pad(self.padding, (0, columns), value=True)
            return np.full(batch, columns, np.int64)
        if tuple(mask.shape) != (batch, self.seen):
            raise ContractError(
                "attention_mask",
                f"[{batch}, {self.seen}]: every column of the cache and the new ones",
                f"{list(mask.shape)}",
            )
        past = mask[:, :before]
        if not (past.all() if self.padding is None else torch.equal(past, self.padding)):
            raise ContractError("attention_mask", "the columns that are in the cache masked as before", "another mask")
        self.padding = mask
        fresh = mask[:, before:]
        if not fresh.all():
            step.rows = fresh.reshape(-1).nonzero()[:, 0]
        return fresh.sum(1).cpu().numpy().astype(np.int64)

    def _settle(self, columns: int) -> None:
        """Choose where this step's KV lives: decode as soon as single tokens follow a prompt, and for good."""
        if columns == 1 and self.seen > columns and self.role is not self.placement.decode:
            self.role = self.placement.decode
            if self.pool is not None:
                self.pool, self.tables = hand_over(self)
        if self.pool is None:
            self.pool = PagePool(self.role.kv_format)
            batch, max_len = self.expected
            if max_len is not None:
                self.pool.widen(max_len)
                self.pool.reserve(batch * self.pool.format.columns(max_len))

    def _make_room(self, lens: np.ndarray) -> None:
        """Give every row the pages for ``lens`` tokens, and a last page of its own where it will write."""
        pool = self.require_pool()
        pool.widen(int(lens.max(initial=0)))
        page = pool.format.page
        copies = []
        for table, old, new in zip(self.tables, self.lens.tolist(), lens.tolist(), strict=True):
            if new > old and old % page and pool.refs[table[old // page]] > 1:
                shared = table[old // page]
                table[old // page] = pool.take()
                pool.release(shared)
                copies.append((shared, table[old // page]))
            while len(table) * page < new:
                table.append(pool.take())
        if copies:
            self._copy(copies)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        mapping = np.array(pairs, np.int64)
        for k_cache, v_cache in self.require_pool().layers.values():
            spec = hal_ops.spec("kv_copy", kv_dtype=k_cache.dtype)
            device = self.role.kv_device(spec, str(k_cache.device))
            hal_ops.kv_copy((k_cache, v_cache), mapping, device=device)

    def _table(self) -> np.ndarray:
        """Block table int32 ``[B, P]``; entries beyond a row's pages are 0."""
        table = np.zeros((len(self.tables), max(map(len, self.tables), default=0) or 1), np.int32)
        for row, pages in zip(table, self.tables, strict=True):
            row[: len(pages)] = pages
        return table

    def _slots(self, table: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Where each new token goes, int64 ``[T]``: page times page size plus offset."""
        page = self.require_pool().format.page
        row = np.repeat(np.arange(len(new)), new)
        position = np.arange(len(row)) - np.repeat(np.cumsum(new) - new, new) + np.repeat(self.lens, new)
        return table[row, position // page].astype(np.int64) * page + position % page

    def require_pool(self) -> PagePool:
        """The pages of the present role."""
        if self.pool is None:
            raise RuntimeError("the cache holds nothing yet")
        return self.pool

    # ------------------------------------------------------------------ what generate() does with a cache

    def reset(self) -> None:
        """Forget everything; the next forward starts in the prefill role again."""
        self._clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` columns of every row."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, got {tokens_to_remove}")
        columns = min(-tokens_to_remove, self.seen)
        if columns == 0:
            return
        self.seen -= columns
        for layer in self.layers:
            layer.seen = min(layer.seen, self.seen)
        if self.padding is None:
            self.lens = self.lens - columns
        else:
            self.padding = self.padding[:, : self.seen]
            self.lens = self.padding.sum(1).cpu().numpy().astype(np.int64)
        pool = self.require_pool()
        for table, length in zip(self.tables, self.lens.tolist(), strict=True):
            while len(table) > pool.format.columns(length):
                pool.release(table.pop())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` a continuation of the present row ``beam_idx[i]``. Pages are shared, and copied on write."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._select([row for row in range(len(self.tables)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` (positions, or a bool mask)."""
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._select(rows.tolist())

    def _select(self, rows: Sequence[int]) -> None:
        if self.pool is None:
            return
        old, self.tables = self.tables, [list(self.tables[row]) for row in rows]
        for page in (page for table in self.tables for page in table):
            self.pool.share(page)
        for page in (page for table in old for page in table):
            self.pool.release(page)
        self.lens = self.lens[list(rows)]
        if self.padding is not None:
            self.padding = self.padding[list(rows)]
