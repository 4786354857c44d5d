"""Writing, reading and copying paged KV caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal import binding
from hal.errors import ContractError
from hal.types import DType, Event, OpSpec
from hal_ops import arrays, cache_shape, compiled, dispatch, validate
from hal_ops.attention_contract import KV_QUANTISED, scale_array, scale_form, scale_key
from hal_ops.cache_shape import Layout
from hal_ops.spec import spec

_write_table = dispatch.Table()


def kv_write(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    *,
    layout: Layout = "NHD",
    k_scale: Any = None,
    v_scale: Any = None,
    wait: Sequence[Event] = (),
    record: bool = False,
    device: Any = None,
) -> Event | None:
    """Write new keys and values into the slots of paged caches.

    Args:
        k, v: ``[T, Hkv, Dk]`` and ``[T, Hkv, Dv]``; rows beyond ``len(slots)`` are ignored.
        k_cache, v_cache: NHD ``[pages, page, Hkv, D]`` or HND ``[pages, Hkv, page, D]``, changed in place.
        slots: int64 ``[n]``, ``page_id * page + offset``; a negative slot skips its row.
        k_scale, v_scale: scales of quantised caches.
        wait: events that must pass first; ``record`` returns an event of the completion.

    Raises:
        ContractError: an argument breaks the contract, or a host slot is out of range; nothing was written.
        UnsupportedError: no kernel of the device fits.

    >>> import numpy as np
    >>> cache = np.zeros((2, 2, 1, 4), "float32")
    >>> kv_write(np.ones((1, 1, 4), "float32"), np.ones((1, 1, 4), "float32"), cache, cache.copy(), np.array([3]))
    >>> cache[1, 1, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    if compiled.active():
        compiled.ops.kv_write(k, v, k_cache, v_cache, slots, layout, k_scale, v_scale, wait, record, device)
        return None
    key = (
        arrays.rows(k), arrays.rows(v), arrays.signature(k_cache), arrays.signature(v_cache), arrays.growing(slots),
        layout, scale_key(k_scale), scale_key(v_scale), device, dispatch.default_device(),
    )  # fmt: skip
    route = _write_table.get(key)
    if route is None:
        route = _write_table.add(key, _write_route(k, v, k_cache, v_cache, slots, layout, k_scale, v_scale, device))
    capacity, on_host = route.facts
    _check_write(k, v, k_cache, v_cache, slots, wait, record, capacity, on_host)
    if route.wrap is not None:
        k, v, k_cache, v_cache, slots = route.native(k, v, k_cache, v_cache, slots)
        k_scale, v_scale = (x if scale_array(x) is None else route.native(x)[0] for x in (k_scale, v_scale))
    event: Event | None = route.run(
        k, v, k_cache, v_cache, slots, layout=cache_shape.lower(layout), k_scale=k_scale, v_scale=v_scale,
        wait=wait, record=record,
    )  # fmt: skip
    return event


def _write_route(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, layout: Any, k_scale: Any, v_scale: Any, device: Any
) -> dispatch.Route:
    wanted, capacity = _write_contract(k, v, k_cache, v_cache, slots, layout, k_scale, v_scale)
    facts = (capacity, arrays.meta("slots", slots).device == "host")
    _check_write(k, v, k_cache, v_cache, slots, (), False, *facts)
    extras = (k, v, v_cache, slots, scale_array(k_scale), scale_array(v_scale))
    return dispatch.route(wanted, k_cache, device, facts, *extras)


def _write_contract(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, layout: Any, k_scale: Any, v_scale: Any
) -> tuple[OpSpec, int]:
    """Check what a signature fixes; return the specification and the number of slots."""
    meta_k, meta_v = (validate.array(name, x, rank=3, dtypes=validate.FLOATS) for name, x in (("k", k), ("v", v)))
    validate.same("v", "dtype", meta_k.dtype.value, meta_v.dtype.value)
    caches, cache = _caches(k_cache, v_cache, layout)
    for name, x, dim in (("k", meta_k, cache.head_dim), ("v", meta_v, cache.v_head_dim)):
        validate.same(name, "heads", cache.heads, x.shape[1])
        validate.same(name, "head_dim", dim, x.shape[2])
    if caches[0].dtype in validate.FLOATS:
        validate.same("k", "dtype", caches[0].dtype.value, meta_k.dtype.value)
    for name, x, described in zip(("k_cache", "v_cache"), (k_cache, v_cache), caches, strict=True):
        validate.writable(name, x, described)
    validate.array("slots", slots, rank=1, dtypes=(DType.int64,))
    validate.together(("k", meta_k), ("v", meta_v), ("k_cache", caches[0]), ("v_cache", caches[1]))
    features = {"strided"} if cache.strided or not (cache_shape.dense(meta_k) and cache_shape.dense(meta_v)) else set()
    for side, x, dim, described in (
        ("k", k_scale, cache.head_dim, caches[0]),
        ("v", v_scale, cache.v_head_dim, caches[1]),
    ):
        if x is not None:
            features.add(f"{side}_scale_{scale_form(f'{side}_scale', x, cache.heads, dim, described.shape[:-1])}")
            if scale_array(x) is not None:
                validate.together(("k", meta_k), (f"{side}_scale", arrays.meta(f"{side}_scale", x)))
    wanted = spec("kv_write", k_dtype=meta_k.dtype, **_cache_fields(caches[0].dtype, cache, layout), features=features)
    return wanted, cache.pages * cache.page


def _check_write(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, wait: Any, record: Any, capacity: int, on_host: bool
) -> None:
    """Check what changes from call to call: row counts, slots on the host, and where the arrays lie."""
    if wait != () or record is not False:
        validate.events(wait, record)
    _check_slots(slots, k.shape[0], v.shape[0], capacity, on_host)
    validate.apart("k_cache", k_cache, k=k, v=v)
    validate.apart("v_cache", v_cache, k=k, v=v, k_cache=k_cache)


def _checked_write(
    bound_for: OpSpec, level: str, k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, *, layout: Any = "NHD",
    k_scale: Any = None, v_scale: Any = None, wait: Any = (), record: Any = False,
) -> OpSpec:  # fmt: skip
    wanted, capacity = _write_contract(k, v, k_cache, v_cache, slots, layout, k_scale, v_scale)
    on_host = level == "full" or arrays.meta("slots", slots).device == "host"
    _check_write(k, v, k_cache, v_cache, slots, wait, record, capacity, on_host)
    if level == "full":
        validate.values("k_scale", k_scale)
        validate.values("v_scale", v_scale)
    return wanted


dispatch.checked("kv_write", _checked_write)


def _caches(k_cache: Any, v_cache: Any, layout: Any) -> tuple[tuple[arrays.Meta, arrays.Meta], cache_shape.CacheShape]:
    rank = 4 if cache_shape.layout_name(layout) != "format" else None
    dtypes = (*validate.FLOATS, *KV_QUANTISED, DType.uint8)
    pair = [
        validate.array(name, x, rank=rank, dtypes=dtypes, dense_last=rank is not None)
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache))
    ]
    validate.same("v_cache", "dtype", pair[0].dtype.value, pair[1].dtype.value)
    return (pair[0], pair[1]), cache_shape.paged(pair[0], pair[1], layout)


def _cache_fields(dtype: DType, cache: cache_shape.CacheShape, layout: Any) -> dict[str, Any]:
    return {
        "kv_dtype": dtype,
        "head_dim": cache.head_dim,
        "v_head_dim": cache.v_head_dim,
        "kv_heads": cache.heads,
        "layout": cache_shape.layout_name(layout),
        "page": cache.page,
    }


def _check_slots(slots: Any, k_rows: int, v_rows: int, capacity: int, on_host: bool) -> None:
    count = slots.shape[0]
    for name, rows in (("k", k_rows), ("v", v_rows)):
        if rows < count:
            raise ContractError(name, f"at least {count} rows, one per slot", f"{rows} rows")
    if on_host and count:  # on a device they are checked by the kernel, which posts an error for hal.check
        values = arrays.index_host("slots", slots, rank=1, dtype="int64")
        if int(values.max()) >= capacity:
            place = int(values.argmax())
            raise ContractError("slots", f"slots below {capacity} (pages x page)", f"{values[place]} at [{place}]")


def kv_gather(
    k_cache: Any, v_cache: Any, block_table: Any, kv_lens: Any, *, layout: Layout = "NHD", device: Any = None
) -> tuple[Any, Any, Any]:
    """Read paged caches into dense keys and values, request after request.

    Args:
        k_cache, v_cache: paged caches as for ``kv_write``.
        block_table: int32 ``[B, P]`` page ids; entries beyond ``ceil(len / page)`` may hold anything.
        kv_lens: int32 ``[B]``, tokens per request.

    Returns:
        ``(k [S, Hkv, Dk], v [S, Hkv, Dv], kv_indptr int32 [B+1])`` with ``S = sum(kv_lens)``.

    Raises:
        ContractError: an argument breaks the contract, or a length lies beyond its table.
        UnsupportedError: no kernel of the device fits.

    >>> import numpy as np
    >>> cache = np.arange(8, dtype="float32").reshape(4, 2, 1, 1)
    >>> table, lens = np.array([[2, 0]], "int32"), np.array([3], "int32")
    >>> kv_gather(cache, cache, table, lens)[0].ravel().tolist()
    [4.0, 5.0, 0.0]
    """
    block_table = arrays.indices("block_table", block_table, "int32")
    kv_lens = arrays.indices("kv_lens", kv_lens, "int32")
    wanted = _gather_contract(k_cache, v_cache, block_table, kv_lens, layout)
    route = dispatch.route(wanted, k_cache, device, None, v_cache, block_table, kv_lens)
    native = route.native(k_cache, v_cache, block_table, kv_lens)
    k, v, indptr = route.run(*native, layout=cache_shape.lower(layout))
    return arrays.like_caller(k, k_cache), arrays.like_caller(v, k_cache), arrays.like_caller(indptr, k_cache)


def _gather_contract(k_cache: Any, v_cache: Any, block_table: Any, kv_lens: Any, layout: Any) -> OpSpec:
    caches, cache = _caches(k_cache, v_cache, layout)
    validate.together(("k_cache", caches[0]), ("v_cache", caches[1]))
    check_table("block_table", block_table, "kv_lens", kv_lens, cache.pages, cache.page)
    features = {"strided"} if cache.strided else set()
    return spec("kv_gather", **_cache_fields(caches[0].dtype, cache, layout), features=features)


def _checked_gather(
    bound_for: OpSpec, level: str, k_cache: Any, v_cache: Any, block_table: Any, kv_lens: Any, *, layout: Any = "NHD"
) -> OpSpec:
    return _gather_contract(k_cache, v_cache, block_table, kv_lens, layout)


dispatch.checked("kv_gather", _checked_gather)


def check_table(table_name: str, table: Any, lens_name: str, lens: Any, pages: int, page: int) -> None:
    """Check that every used entry of a block table is a page and that no request is longer than its row.

    Raises:
        ContractError: naming ``table_name`` or ``lens_name``.
    """
    import numpy as np

    host_table = arrays.index_host(table_name, table, rank=2)
    host_lens = arrays.index_host(lens_name, lens, rank=1).astype(np.int64)
    validate.same(table_name, "rows", len(host_lens), host_table.shape[0])
    if len(host_lens) and int(host_lens.min()) < 0:
        raise ContractError(lens_name, "lengths of at least 0", str(host_lens.min()))
    used = -(-host_lens // page)
    columns = host_table.shape[1]
    if len(used) and int(used.max()) > columns:
        row = int(used.argmax())
        raise ContractError(
            lens_name, f"at most {columns * page} tokens (table columns x page)", f"{host_lens[row]} at [{row}]"
        )
    bad = (np.arange(columns)[None, :] < used[:, None]) & ((host_table < 0) | (host_table >= pages))
    if bad.any():
        row, column = (int(place) for place in np.argwhere(bad)[0])
        raise ContractError(table_name, f"page ids in [0, {pages})", f"{host_table[row, column]} at [{row}, {column}]")


def kv_copy(
    caches: Any, mapping: Any, *, wait: Sequence[Event] = (), record: bool = False, device: Any = None
) -> Event | None:
    """Copy whole pages inside caches; all reads happen before all writes.

    Args:
        caches: one array or a sequence of arrays with pages along their first dimension.
        mapping: host int64 ``[n, 2]``, rows ``(source page, destination page)``; source equal to
            destination is allowed and does nothing, an empty mapping is success.
        wait, record: as for ``kv_write``.

    Raises:
        ContractError: a page out of range or a destination that occurs twice; nothing was written.
        UnsupportedError: no kernel of the device fits.

    >>> import numpy as np
    >>> cache = np.arange(3.0, dtype="float32").reshape(3, 1)
    >>> kv_copy(cache, np.array([[0, 1], [1, 2]]))
    >>> cache.ravel().tolist()
    [0.0, 0.0, 1.0]
    """
    sequence = tuple(caches) if isinstance(caches, list | tuple) else (caches,)
    wanted, pairs = _copy_contract(sequence, mapping, wait, record)
    route = dispatch.route(wanted, sequence[0], device, None, *sequence[1:])
    event: Event | None = route.run(route.native(*sequence), pairs, wait=wait, record=record)
    return event


def _copy_contract(sequence: tuple[Any, ...], mapping: Any, wait: Any, record: Any) -> tuple[OpSpec, Any]:
    """Check the arguments; return the specification and the mapping on the host."""
    if not sequence:
        raise ContractError("caches", "at least one array", "an empty sequence")
    validate.events(wait, record)
    described = [validate.array("caches", x, dense_last=False) for x in sequence]
    if not all(one.shape for one in described):
        raise ContractError("caches", "arrays with pages along their first dimension", "a scalar")
    pairs = _check_mapping(mapping, min(one.shape[0] for one in described))
    for x, one in zip(sequence, described, strict=True):
        validate.writable("caches", x, one)
        validate.same("caches", "dtype", described[0].dtype.value, one.dtype.value)
    validate.together(("caches", described[0]), *(("caches", one) for one in described[1:]))
    validate.all_apart({f"caches[{place}]": x for place, x in enumerate(sequence)})
    strided = not all(cache_shape.dense(one) for one in described)
    return spec("kv_copy", kv_dtype=described[0].dtype, features={"strided"} if strided else ()), pairs


def _checked_copy(
    bound_for: OpSpec, level: str, caches: Any, mapping: Any, *, wait: Any = (), record: Any = False
) -> OpSpec:
    return _copy_contract(tuple(caches), mapping, wait, record)[0]


dispatch.checked("kv_copy", _checked_copy)
binding.ON_HOST["kv_copy"] = frozenset({1})


def _check_mapping(mapping: Any, pages: int) -> Any:
    import numpy as np

    pairs = arrays.indices("mapping", mapping, "int64")
    if arrays.meta("mapping", pairs).device != "host":
        raise ContractError(
            "mapping", "int64 [n, 2] on the host", f"an array on {arrays.meta('mapping', pairs).device}"
        )
    if isinstance(mapping, list | tuple) and not len(mapping):
        pairs = pairs.reshape(0, 2)
    pairs = arrays.index_host("mapping", pairs, rank=2, dtype="int64")
    validate.same("mapping", "columns", 2, pairs.shape[1])
    if len(pairs) and (int(pairs.min()) < 0 or int(pairs.max()) >= pages):
        bad = int(pairs.min()) if int(pairs.min()) < 0 else int(pairs.max())
        raise ContractError("mapping", f"pages in [0, {pages})", str(bad))
    targets, counts = np.unique(pairs[:, 1], return_counts=True)
    if (counts > 1).any():
        raise ContractError("mapping", "each destination once", f"{targets[counts > 1][0]} several times")
    return pairs
