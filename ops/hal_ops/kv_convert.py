"""Moving requests between KV caches of different formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.errors import ContractError
from hal.types import DType, Event, OpSpec
from hal_ops import arrays, dispatch, validate
from hal_ops.kv import check_table
from hal_ops.kv_format import Component, KVCacheFormat
from hal_ops.spec import spec


def kv_convert(
    src: Sequence[Any],
    src_format: KVCacheFormat,
    dst: Sequence[Any],
    dst_format: KVCacheFormat,
    *,
    src_table: Any,
    dst_table: Any,
    kv_lens: Any,
    src_scales: Mapping[str, Any] | None = None,
    dst_scales: Mapping[str, Any] | None = None,
    compute_scales: bool = False,
    lossy: bool = False,
    wait: Sequence[Event] = (),
    record: bool = False,
    device: Any = None,
) -> Event | None:
    """Copy requests from caches of one format into caches of another.

    Layout, page size, dtype, K/V split and the order of axes may differ; last pages may be partial.
    Where the dtypes agree the bytes are copied exactly.

    Args:
        src, dst: arrays, one per layer and component: for each layer of ``layer_ids``, for each component.
        src_format, dst_format: what the arrays mean; never guessed from their shapes.
        src_table, dst_table: int32 ``[B, P]`` page ids of each side.
        kv_lens: int32 ``[B]``, tokens per request.
        lossy: allow a dtype that cannot hold every value of the source's.
        src_scales, dst_scales, compute_scales: of quantised formats.
        wait, record: as for ``kv_write``.

    Raises:
        ContractError: formats that hold different layers, heads or dims, tables or lengths out of
            range, a lossy change without ``lossy``; nothing was written.
        UnsupportedError: no kernel of the device fits.

    >>> import numpy as np
    >>> nhd = KVCacheFormat.nhd(dtype="fp32", page_tokens=2, kv_heads=1, head_dim=1)
    >>> hnd = KVCacheFormat.hnd(dtype="fp32", page_tokens=4, kv_heads=1, head_dim=1)
    >>> src = [np.arange(6, dtype="float32").reshape(3, 2, 1, 1) for _ in "kv"]
    >>> dst = [np.zeros((1, 1, 4, 1), "float32") for _ in "kv"]
    >>> table = np.array([[2, 0]], "int32"), np.array([[0]], "int32")
    >>> kv_convert(src, nhd, dst, hnd, src_table=table[0], dst_table=table[1], kv_lens=np.array([3], "int32"))
    >>> dst[0].ravel().tolist()
    [4.0, 5.0, 0.0, 0.0]
    """
    src_table, dst_table, kv_lens = (
        arrays.indices(name, x, "int32")
        for name, x in (("src_table", src_table), ("dst_table", dst_table), ("kv_lens", kv_lens))
    )
    wanted = _contract(
        src, src_format, dst, dst_format, src_table=src_table, dst_table=dst_table, kv_lens=kv_lens,
        src_scales=src_scales, dst_scales=dst_scales, compute_scales=compute_scales, lossy=lossy, wait=wait,
        record=record,
    )  # fmt: skip
    route = dispatch.route(wanted, dst[0], device, None, *src, *dst[1:], src_table, dst_table, kv_lens)
    event: Event | None = route.run(
        route.native(*src), src_format, route.native(*dst), dst_format,
        src_table=route.native(src_table)[0], dst_table=route.native(dst_table)[0], kv_lens=route.native(kv_lens)[0],
        src_scales=src_scales, dst_scales=dst_scales, compute_scales=compute_scales, lossy=lossy,
        wait=wait, record=record,
    )  # fmt: skip
    return event


def _contract(
    src: Any, src_format: KVCacheFormat, dst: Any, dst_format: KVCacheFormat, *, src_table: Any, dst_table: Any,
    kv_lens: Any, src_scales: Any = None, dst_scales: Any = None, compute_scales: bool = False, lossy: bool = False,
    wait: Any = (), record: Any = False,
) -> OpSpec:  # fmt: skip
    """Check the arguments, which are those of the bound form; return the specification."""
    _check_options(src_scales, dst_scales, compute_scales, lossy)
    validate.events(wait, record)
    _check_formats(src_format, dst_format, lossy)
    src_pages = _check_arrays("src", src, src_format)
    dst_pages = _check_arrays("dst", dst, dst_format)
    check_table("src_table", src_table, "kv_lens", kv_lens, src_pages, src_format.page_tokens)
    check_table("dst_table", dst_table, "kv_lens", kv_lens, dst_pages, dst_format.page_tokens)
    _check_writes(dst, src, dst_table, kv_lens, dst_format.page_tokens)
    first, second = src_format.components[0], dst_format.components[0]
    opaque = any(part.opaque for part in (*src_format.components, *dst_format.components))
    return spec(
        "kv_convert",
        src_dtype=first.storage_dtype,
        dst_dtype=second.storage_dtype,
        src_layout=src_format.name,
        dst_layout=dst_format.name,
        features=_features(lossy, src_scales or dst_scales, compute_scales, opaque),
    )


def _checked(bound_for: OpSpec, level: str, *arguments: Any, **options: Any) -> OpSpec:
    return _contract(*arguments, **options)


dispatch.checked("kv_convert", _checked)


def _check_options(src_scales: Any, dst_scales: Any, compute_scales: Any, lossy: Any) -> None:
    validate.flag("compute_scales", compute_scales)
    validate.flag("lossy", lossy)
    for name, scales in (("src_scales", src_scales), ("dst_scales", dst_scales)):
        if scales is not None and not (isinstance(scales, Mapping) and all(isinstance(key, str) for key in scales)):
            raise ContractError(name, "a mapping from component to scales, or None", repr(scales))


def _features(lossy: bool, scales: Any, compute_scales: bool, opaque: bool) -> set[str]:
    flags = {"lossy": lossy, "scales": bool(scales), "compute_scales": compute_scales, "opaque": opaque}
    return {name for name, used in flags.items() if used}


def _check_formats(src: KVCacheFormat, dst: KVCacheFormat, lossy: bool) -> None:
    for name, value in (("src_format", src), ("dst_format", dst)):
        if not isinstance(value, KVCacheFormat):
            raise ContractError(name, "a KVCacheFormat", type(value).__name__)
    for field in ("layer_ids", "total_kv_heads", "head_start", "head_count", "compress_ratio"):
        validate.same("dst_format", field, getattr(src, field), getattr(dst, field))
    ours, theirs = ({name: dim for name, (dim, _) in _parts(form).items()} for form in (src, dst))
    validate.same("dst_format", "head dims per part", ours, theirs)
    before_, after_ = _parts(src), _parts(dst)
    narrowing = [pair for name in before_ if not _holds(*(pair := (before_[name][1], after_[name][1])))]
    if narrowing and not lossy:
        before, after = narrowing[0]
        raise ContractError("lossy", f"True for {before} to {after}, which loses values", "False")


def _parts(value: KVCacheFormat) -> dict[str, tuple[int, DType]]:
    """Head dim and dtype by part, the K and V of a packed component counted apart."""
    parts: dict[str, tuple[int, DType]] = {}
    for component in value.components:
        names = ("k", "v") if component.name == "kv" else (component.name,)
        parts |= dict.fromkeys(names, (component.head_dim, component.storage_dtype))
    return parts


_EXACT = {"float16": {"float16", "float32"}, "bfloat16": {"bfloat16", "float32"}}


def _holds(before: str, after: str) -> bool:
    """Whether the dtype ``after`` holds every value of ``before``."""
    return before == after or after in _EXACT.get(before, ())


def _check_arrays(name: str, caches: Any, form: KVCacheFormat) -> int:
    if not isinstance(caches, list | tuple):
        raise ContractError(name, "a sequence of arrays", type(caches).__name__)
    expected = len(form.layer_ids) * len(form.components)
    if len(caches) != expected:
        raise ContractError(name, f"{expected} arrays (layers x components)", f"{len(caches)} arrays")
    pages = []
    for place, cache in enumerate(caches):
        component = form.components[place % len(form.components)]
        label = f"{name}[{place}]"
        described = validate.array(label, cache, dtypes=(component.storage_dtype,), dense_last=False)
        count = _pages(label, component, described.shape)
        validate.shape(label, described, form.shape(component, count))
        pages.append(count)
    return min(pages)


def _pages(label: str, component: Component, shape: tuple[int, ...]) -> int:
    """Return the size of the page axis; the other sizes are checked against the format afterwards."""
    axes = [factor.axis for factor in component.order]
    if len(shape) != len(axes):
        raise ContractError(label, f"{len(axes)} dimensions, {' '.join(axes)}", f"shape {list(shape)}")
    return shape[axes.index("B")]


def _check_writes(dst: Sequence[Any], src: Sequence[Any], dst_table: Any, kv_lens: Any, page: int) -> None:
    """Refuse destinations that read-only, shared or written twice would make depend on luck."""
    import numpy as np

    targets = {f"dst[{place}]": cache for place, cache in enumerate(dst)}
    sources = {f"src[{place}]": cache for place, cache in enumerate(src)}
    described = {label: arrays.meta(label, cache) for label, cache in (targets | sources).items()}
    validate.together(("dst[0]", described["dst[0]"]), *described.items())
    for label, cache in targets.items():
        validate.writable(label, cache, described[label])
    validate.all_apart(targets, sources)
    table = arrays.index_host("dst_table", dst_table, rank=2)
    used = -(-arrays.index_host("kv_lens", kv_lens, rank=1).astype(np.int64) // page)
    live = table[np.arange(table.shape[1])[None, :] < used[:, None]]
    pages, counts = np.unique(live, return_counts=True)
    if (counts > 1).any():
        raise ContractError("dst_table", "each destination page once", f"page {pages[counts > 1][0]} several times")
