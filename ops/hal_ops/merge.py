"""Merging partial attention results over disjoint keys."""

from __future__ import annotations

from typing import Any

from hal.errors import ContractError
from hal.types import DType, OpSpec
from hal_ops import arrays, compiled, dispatch, validate
from hal_ops.spec import spec

_table = dispatch.Table()


def merge_attention_states(
    o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, *, out: Any = None, lse_out: Any = None, device: Any = None
) -> tuple[Any, Any]:
    """Merge two attention results over disjoint keys of the same queries.

    ``lse = logaddexp(lse_a, lse_b)``, ``o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b``. The pair
    ``(0, -inf)`` is the identity; two of them give ``(0, -inf)``.

    Args:
        o_a, o_b: ``[T, H, D]`` fp32, fp16 or bf16.
        lse_a, lse_b: float32 ``[T, H]``, natural log.
        out, lse_out: results to write, shaped like the inputs; ``out`` may be ``o_a`` itself, and
            ``lse_out`` ``lse_a`` itself.

    Returns:
        ``(o, lse)``.

    Raises:
        ContractError: shapes or dtypes that differ.
        UnsupportedError: no kernel of the device fits.

    Source: Milakov & Gimelshein 2018 (online softmax).

    >>> import numpy as np
    >>> o, lse = np.ones((1, 1, 2), "float32"), np.zeros((1, 1), "float32")
    >>> merge_attention_states(o, lse, 0 * o, lse - np.inf)[0].tolist()
    [[[1.0, 1.0]]]
    """
    if compiled.active():
        return compiled.ops.merge_attention_states(o_a, lse_a, o_b, lse_b, out, lse_out, device)  # type: ignore[no-any-return]
    arguments = (o_a, lse_a, o_b, lse_b, out, lse_out)
    key = (*(x if x is None else arrays.rows(x) for x in arguments), device, dispatch.default_device())
    route = _table.get(key)
    if route is None:
        route = _table.add(key, _route(o_a, lse_a, o_b, lse_b, out, lse_out, device))
    _check_sizes(o_a, lse_a, o_b, lse_b, out, lse_out)
    if out is None:
        out = arrays.empty(o_a, o_a.shape, route.facts)
    if lse_out is None:
        lse_out = arrays.empty(lse_a, lse_a.shape, DType.float32)
    *states, native_out, native_lse = route.native(o_a, lse_a, o_b, lse_b, out, lse_out)
    route.run(*states, out=native_out, lse_out=native_lse)
    return out, lse_out


def _route(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out: Any, lse_out: Any, device: Any) -> dispatch.Route:
    wanted = _contract(o_a, lse_a, o_b, lse_b, out, lse_out)
    _check_sizes(o_a, lse_a, o_b, lse_b, out, lse_out)
    return dispatch.route(wanted, o_a, device, wanted.fields["dtype"], lse_a, o_b, lse_b, out, lse_out)


def _check_sizes(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out: Any, lse_out: Any) -> None:
    """Check what changes from call to call: token counts and where results lie."""
    tokens = o_a.shape[0]
    for name, x in (("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b), ("out", out), ("lse_out", lse_out)):
        if x is not None and x.shape[0] != tokens:
            raise ContractError(name, f"{tokens} tokens, as o_a", f"{x.shape[0]} tokens")
    if out is not None:
        validate.apart("out", out, o_b=o_b, lse_a=lse_a, lse_b=lse_b, lse_out=lse_out)
        validate.same_place("out", out, "o_a", o_a)
    if lse_out is not None:
        validate.apart("lse_out", lse_out, lse_b=lse_b, o_a=o_a, o_b=o_b)
        validate.same_place("lse_out", lse_out, "lse_a", lse_a)


def _contract(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out: Any, lse_out: Any) -> OpSpec:
    """Check what a signature fixes; return the specification."""
    first = validate.array("o_a", o_a, rank=3, dtypes=validate.FLOATS)
    for name, x in (("o_b", o_b), ("out", out)):
        if x is not None:
            described = validate.array(name, x, dtypes=(first.dtype,))
            validate.shape(name, described, first.shape)
            validate.together(("o_a", first), (name, described))
    for name, x in (("lse_a", lse_a), ("lse_b", lse_b), ("lse_out", lse_out)):
        if x is not None:
            described = validate.array(name, x, dtypes=(DType.float32,))
            validate.shape(name, described, first.shape[:2])
            validate.together(("o_a", first), (name, described))
    for name, x in (("out", out), ("lse_out", lse_out)):
        if x is not None:
            validate.writable(name, x, arrays.meta(name, x))
    return spec("merge_attention_states", dtype=first.dtype, heads=first.shape[1], head_dim=first.shape[2])


def _checked(
    bound_for: OpSpec, level: str, o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, *, out: Any, lse_out: Any
) -> OpSpec:
    wanted = _contract(o_a, lse_a, o_b, lse_b, out, lse_out)
    _check_sizes(o_a, lse_a, o_b, lse_b, out, lse_out)
    return wanted


dispatch.checked("merge_attention_states", _checked)
