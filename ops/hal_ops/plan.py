"""``AttentionPlan``: all that attention must know of a step's lengths, made once and shared by all layers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from hal import types
from hal.errors import ContractError
from hal_ops import arrays
from hal_ops.spec import bucket

T = TypeVar("T")


class AttentionPlan:
    """Lengths of one step, checked and on the host. Opaque to engines; made by ``plan_attention``.

    Kernels read ``batch``, ``total_q``, ``max_q``, ``max_kv``, ``paged``, ``q_lens``, ``kv_lens``
    (int64 ``[B]``), ``q_indptr_host``, ``kv_indptr_host`` (int64 ``[B+1]``), ``block_table_host``
    (int32 ``[B, P]`` or None) and the caller's arrays ``q_indptr``, ``kv_lens_array``,
    ``kv_indptr``, ``block_table``.
    """

    def __init__(
        self,
        *,
        q_indptr: Any,
        q_lens: Any,
        kv_lens: Any,
        kv_lens_array: Any,
        kv_indptr: Any,
        block_table: Any,
        block_table_host: Any,
        max_q: int,
        max_kv: int,
    ) -> None:
        import numpy as np

        self.q_indptr = q_indptr
        self.kv_lens_array = kv_lens_array
        self.kv_indptr = kv_indptr
        self.block_table = block_table
        self.block_table_host = block_table_host
        self.q_lens = q_lens
        self.kv_lens = kv_lens
        self.q_indptr_host = np.concatenate([[0], np.cumsum(q_lens)])
        self.kv_indptr_host = np.concatenate([[0], np.cumsum(kv_lens)])
        self.batch = len(q_lens)
        self.total_q = int(self.q_indptr_host[-1])
        self.total_kv = int(self.kv_indptr_host[-1])
        self.max_q = max_q
        self.max_kv = max_kv
        self.paged = block_table is not None
        # The largest page id in use and the widest request decide whether a cache of some shape fits.
        self.columns = int(block_table_host.shape[1]) if self.paged else 0
        self.bucket = (bucket(self.batch), bucket(max_q), bucket(max_kv), "one" if self.columns == 1 else "many")
        self._cache: dict[str, Any] = {}
        self._checked: set[tuple[int, int]] = set()
        self._lock = threading.RLock()  # what is built may itself need something cached

    def cached(self, key: str, build: Callable[[], T]) -> T:
        """Return what ``build`` made for ``key``; it runs once per plan, whatever the number of layers."""
        found: T | None = self._cache.get(key)
        if found is None:
            with self._lock:
                found = self._cache.get(key)
                if found is None:
                    found = self._cache[key] = build()
        return found

    def check_pages(self, pages: int, page: int) -> None:
        """Refuse a cache of ``pages`` pages of ``page`` tokens that does not hold what the table names.

        Raises:
            ContractError: a request is longer than its table row, or a used entry is no page of the cache.
        """
        if (pages, page) in self._checked:  # once per plan and cache shape, not once per layer
            return
        import numpy as np

        used = -(-self.kv_lens // page)
        if self.batch and int(used.max()) > self.columns:
            row = int(used.argmax())
            raise ContractError(
                "kv_lens",
                f"at most {self.columns * page} keys (table columns x page)",
                f"{self.kv_lens[row]} in request {row}",
            )
        live = np.arange(self.columns)[None, :] < used[:, None]
        bad = live & ((self.block_table_host < 0) | (self.block_table_host >= pages))
        if bad.any():
            row, column = (int(i) for i in np.argwhere(bad)[0])
            raise ContractError(
                "block_table", f"page ids in [0, {pages})", f"{self.block_table_host[row, column]} at [{row}, {column}]"
            )
        self._checked.add((pages, page))


def plan_attention(
    *,
    q_indptr: Any,
    kv_lens: Any = None,
    kv_indptr: Any = None,
    block_table: Any = None,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    q_lens_host: Any = None,
    kv_lens_host: Any = None,
    spec: types.OpSpec | None = None,
    device: Any = None,
) -> AttentionPlan:
    """Make the plan of one step; it may synchronise, running never does.

    Args:
        q_indptr: int32 ``[B+1]``, cumulative query lengths.
        kv_lens: int32 ``[B]``, keys per request (paged), the new tokens included.
        kv_indptr: int32 ``[B+1]``, cumulative key lengths (ragged).
        block_table: int32 ``[B, P]``, page ids (paged).
        max_q_len, max_kv_len: upper bounds that choose the kernel's size bucket; default: the true maxima.
        q_lens_host, kv_lens_host: the lengths as host integers, which saves a copy from the device.
        spec, device: with both, the vendor's own plan is prepared now instead of at the first layer.

    Raises:
        ContractError: lengths that are negative, not monotone or beyond their bound or table.

    >>> plan_attention(q_indptr=[0, 3, 4], kv_indptr=[0, 3, 9]).kv_lens.tolist()
    [3, 6]
    """
    q_lens = _lengths("q_indptr", q_indptr, q_lens_host)
    batch = len(q_lens)
    if (kv_indptr is None) == (block_table is None):
        actual = "neither" if kv_indptr is None else "both"
        raise ContractError("kv_indptr", "exactly one of kv_indptr (ragged) and block_table (paged)", actual)
    table_host = None
    if block_table is not None:
        table_host = arrays.index_host("block_table", block_table, rank=2)
        if table_host.shape[0] != batch:
            raise ContractError("block_table", f"{batch} rows", f"{table_host.shape[0]}")
        if kv_lens is None and kv_lens_host is None:
            raise ContractError("kv_lens", "lengths of the paged requests", "None")
        lens = _paged_lengths(kv_lens, kv_lens_host)
    elif kv_lens is not None:
        raise ContractError("kv_lens", "None: kv_indptr gives the lengths of ragged requests", "lengths")
    else:
        lens = _lengths("kv_indptr", kv_indptr, kv_lens_host)
    if len(lens) != batch:
        raise ContractError("kv_lens" if block_table is not None else "kv_indptr", f"{batch} requests", f"{len(lens)}")
    if batch and int(lens.min()) < 0:
        raise ContractError("kv_lens", "lengths of at least 0", f"{lens.min()}")
    plan = AttentionPlan(
        q_indptr=q_indptr,
        q_lens=q_lens,
        kv_lens=lens,
        kv_lens_array=kv_lens,
        kv_indptr=kv_indptr,
        block_table=block_table,
        block_table_host=table_host,
        max_q=_bound("max_q_len", q_lens, max_q_len),
        max_kv=_bound("max_kv_len", lens, max_kv_len),
    )
    if spec is not None and device is not None:
        _prepare(plan, spec, device)
    return plan


def _lengths(name: str, indptr: Any, host: Any) -> Any:
    """Return the lengths (int64) that cumulative ones stand for; ``host`` saves reading them from a device."""
    import numpy as np

    short = name.removesuffix("_indptr") + "_lens_host"
    lens = None if host is None else _host_lengths(short, host)
    if lens is None or _lies_on_host(name, indptr):
        values = arrays.index_host(name, indptr, rank=1).astype(np.int64)
        if len(values) == 0 or values[0] != 0:
            raise ContractError(name, "cumulative lengths that start with 0", f"{values[:3].tolist()}")
        found = np.diff(values)
        if lens is not None and not np.array_equal(lens, found):
            raise ContractError(short, f"the lengths of {name}, {found.tolist()}", f"{lens.tolist()}")
        lens = found
    if len(lens) and int(lens.min()) < 0:
        raise ContractError(name, "monotone, non-negative lengths", f"a length of {lens.min()}")
    return lens


def _paged_lengths(kv_lens: Any, host: Any) -> Any:
    import numpy as np

    lens = None if host is None else _host_lengths("kv_lens_host", host)
    if lens is not None and (kv_lens is None or not _lies_on_host("kv_lens", kv_lens)):
        return lens
    found = arrays.index_host("kv_lens", kv_lens, rank=1).astype(np.int64)
    if lens is not None and not np.array_equal(lens, found):
        raise ContractError("kv_lens_host", f"the lengths of kv_lens, {found.tolist()}", f"{lens.tolist()}")
    return found


def _host_lengths(name: str, host: Any) -> Any:
    """Return lengths given as host integers of any width."""
    import numpy as np

    lens = arrays.indices(name, host, "int64")
    if not arrays.is_numpy(lens):
        lens = arrays.index_host(name, lens, rank=1, dtype=arrays.meta(name, lens).dtype)
    if lens.dtype.kind not in "iu" or lens.ndim != 1:
        raise ContractError(name, "one dimension of integers", f"{lens.dtype} of shape {list(lens.shape)}")
    return lens.astype(np.int64)


def _lies_on_host(name: str, x: Any) -> bool:
    return isinstance(x, list | tuple) or arrays.meta(name, x).device == "host"


def _bound(name: str, lens: Any, bound: int | None) -> int:
    longest = int(lens.max()) if len(lens) else 0
    if bound is None:
        return longest
    if type(bound) is not int:
        raise ContractError(name, "an integer", repr(bound))
    if bound < longest:
        raise ContractError(name, f"at least the longest request, {longest}", str(bound))
    return bound


def _prepare(plan: AttentionPlan, spec: types.OpSpec, device: Any) -> None:
    import hal

    prepare = getattr(hal.bind(spec, device).fn, "prepare", None)  # optional: kernels that have a plan of their own
    if prepare is not None:
        prepare(plan)
