"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

from hal.errors import ContractError
from hal.types import DType, OpSpec
from hal_ops import arrays, compiled, dispatch, validate
from hal_ops.spec import spec

_table = dispatch.Table()


def rope(q: Any, k: Any, positions: Any, cos: Any, sin: Any, *, interleaved: bool = False, device: Any = None) -> None:
    """Rotate the first ``rot`` dimensions of q and k by their position, in place.

    With halves (the default) dimension ``i`` pairs with ``i + rot/2``, interleaved ``2i`` with
    ``2i + 1``: ``(a, b) -> (a cos - b sin, b cos + a sin)``.

    Args:
        q: ``[T, Hq, D]``, k: ``[T, Hkv, D]``, fp32, fp16 or bf16, changed in place.
        positions: int64 ``[T]``.
        cos, sin: ``[max_pos, rot/2]``.

    Raises:
        ContractError: an argument breaks the contract, or a host position is out of range; nothing was written.
        UnsupportedError: no kernel of the device fits.

    Source: Su et al. 2021 (RoFormer).

    >>> import numpy as np
    >>> q = np.array([[[1.0, 0.0]]], "float32")
    >>> rope(q, q.copy(), np.array([0]), np.array([[0.0]], "float32"), np.array([[1.0]], "float32"))
    >>> q.ravel().tolist()
    [0.0, 1.0]
    """
    if compiled.active():
        compiled.ops.rope(q, k, positions, cos, sin, interleaved, device)
        return
    key = (
        arrays.rows(q), arrays.rows(k), arrays.growing(positions), arrays.signature(cos), arrays.signature(sin),
        interleaved, device, dispatch.default_device(),
    )  # fmt: skip
    route = _table.get(key)
    if route is None:
        route = _table.add(key, _route(q, k, positions, cos, sin, interleaved, device))
    _check_sizes(q, k, positions, cos, sin, on_host=route.facts)
    route.run(*route.native(q, k, positions, cos, sin), interleaved=interleaved)


def _route(q: Any, k: Any, positions: Any, cos: Any, sin: Any, interleaved: bool, device: Any) -> dispatch.Route:
    wanted = _contract(q, k, positions, cos, sin, interleaved)
    on_host = arrays.meta("positions", positions).device == "host"
    _check_sizes(q, k, positions, cos, sin, on_host=on_host)
    return dispatch.route(wanted, q, device, on_host, k, positions, cos, sin)


def _check_sizes(q: Any, k: Any, positions: Any, cos: Any, sin: Any, *, on_host: bool) -> None:
    """Check what changes from call to call: token counts, where q and k lie, and positions on the host."""
    tokens, limit = q.shape[0], cos.shape[0]
    for name, x in (("k", k), ("positions", positions)):
        if x.shape[0] != tokens:
            raise ContractError(name, f"{tokens} tokens, as q", f"{x.shape[0]}")
    validate.apart("k", k, q=q, cos=cos, sin=sin)
    validate.apart("q", q, cos=cos, sin=sin)
    if on_host and tokens:
        values = arrays.index_host("positions", positions, rank=1, dtype="int64")
        if int(values.min()) < 0 or int(values.max()) >= limit:
            raise ContractError("positions", f"positions in [0, {limit})", f"{values.min()} to {values.max()}")


def _contract(q: Any, k: Any, positions: Any, cos: Any, sin: Any, interleaved: bool) -> OpSpec:
    """Check what a signature fixes; return the specification."""
    first = validate.array("q", q, rank=3, dtypes=validate.FLOATS)
    second = validate.array("k", k, rank=3, dtypes=(first.dtype,))
    validate.same("k", "head_dim", first.shape[2], second.shape[2])
    table = validate.array("cos", cos, rank=2, dtypes=validate.FLOATS)
    other = validate.array("sin", sin, rank=2, dtypes=(table.dtype,))
    validate.shape("sin", other, table.shape)
    if not 0 < 2 * table.shape[1] <= first.shape[2]:
        raise ContractError("cos", f"1 to {first.shape[2] // 2} columns", f"{table.shape[1]} columns")
    validate.array("positions", positions, rank=1, dtypes=(DType.int64,))
    validate.flag("interleaved", interleaved)
    for name, x, described in (("q", q, first), ("k", k, second)):
        validate.writable(name, x, described)
    validate.together(("q", first), ("k", second), ("cos", table), ("sin", other))
    return spec(
        "rope",
        dtype=first.dtype,
        cos_dtype=table.dtype,
        head_dim=first.shape[2],
        rot_dim=2 * table.shape[1],
        features={"interleaved"} if interleaved else (),
    )


def _checked(
    bound_for: OpSpec, level: str, q: Any, k: Any, positions: Any, cos: Any, sin: Any, *, interleaved: bool = False
) -> OpSpec:
    wanted = _contract(q, k, positions, cos, sin, interleaved)
    on_host = level == "full" or arrays.meta("positions", positions).device == "host"
    _check_sizes(q, k, positions, cos, sin, on_host=on_host)
    return wanted


dispatch.checked("rope", _checked)
