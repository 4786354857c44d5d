"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import Any

from hal.errors import ContractError
from hal.types import OpSpec
from hal_ops import arrays, compiled, dispatch, validate
from hal_ops.spec import spec

_table = dispatch.Table()


def rms_norm(x: Any, weight: Any, eps: float, *, residual: Any = None, out: Any = None, device: Any = None) -> Any:
    """``x / sqrt(mean(x^2) + eps) * weight`` along the last dimension, in fp32.

    Args:
        x: ``[..., D]`` fp32, fp16 or bf16.
        weight: ``[D]``.
        residual: like x; becomes ``residual + x`` in place, and that sum is normalised.
        out: result to write, like x; may be x itself.

    Returns:
        ``[..., D]`` of x's dtype.

    Raises:
        ContractError: an argument breaks the contract; nothing was written.
        UnsupportedError: no kernel of the device fits.

    Source: Zhang & Sennrich 2019.

    >>> import numpy as np
    >>> rms_norm(np.full((1, 4), 3, "float32"), np.ones(4, "float32"), 0.0).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    if compiled.active():
        return compiled.ops.rms_norm(x, weight, eps, residual, out, device)
    key = (
        arrays.rows(x), arrays.signature(weight), arrays.rows(residual) if residual is not None else None,
        arrays.rows(out) if out is not None else None, eps, device, dispatch.default_device(),
    )  # fmt: skip
    route = _table.get(key)
    if route is None:
        route = _table.add(key, _route(x, weight, eps, residual, out, device))
    if residual is not None or out is not None:
        _check_sizes(x, weight, residual, out)
    result = arrays.empty(x, x.shape, route.facts) if out is None else out
    x, weight, residual, out = route.native(x, weight, residual, result)
    route.run(x, weight, eps, residual=residual, out=out)
    return result


def _route(x: Any, weight: Any, eps: float, residual: Any, out: Any, device: Any) -> dispatch.Route:
    wanted = _contract(x, weight, eps, residual, out)
    _check_sizes(x, weight, residual, out)
    return dispatch.route(wanted, x, device, wanted.fields["dtype"], weight, residual, out)


def _check_sizes(x: Any, weight: Any, residual: Any, out: Any) -> None:
    """Check what changes from call to call: token counts and where results lie."""
    for name, other in (("residual", residual), ("out", out)):
        if other is not None and other.shape[0] != x.shape[0]:
            raise ContractError(name, f"shape {list(x.shape)}", f"shape {list(other.shape)}")
    if residual is not None:
        validate.apart("residual", residual, x=x, out=out, weight=weight)
    if out is not None:
        validate.apart("out", out, weight=weight)
        validate.same_place("out", out, "x", x)


def _contract(x: Any, weight: Any, eps: float, residual: Any, out: Any) -> OpSpec:
    """Check what a signature fixes; return the specification."""
    first = validate.array("x", x, dtypes=validate.FLOATS)
    if not first.shape or not first.shape[-1]:
        raise ContractError("x", "a last dimension of at least 1", f"shape {list(first.shape)}")
    scale = validate.array("weight", weight, dtypes=validate.FLOATS)
    validate.shape("weight", scale, first.shape[-1:])
    validate.finite("eps", eps, low=0.0)
    for name, other in (("residual", residual), ("out", out)):
        if other is not None:
            described = validate.array(name, other, dtypes=(first.dtype,))
            validate.shape(name, described, first.shape)
            validate.writable(name, other, described)
            validate.together(("x", first), (name, described))
    validate.together(("x", first), ("weight", scale))
    features = {"residual"} if residual is not None else ()
    return spec("rms_norm", dtype=first.dtype, weight_dtype=scale.dtype, dim=first.shape[-1], features=features)


def _checked(
    bound_for: OpSpec, level: str, x: Any, weight: Any, eps: float, *, residual: Any = None, out: Any
) -> OpSpec:
    wanted = _contract(x, weight, eps, residual, out)
    _check_sizes(x, weight, residual, out)
    return wanted


dispatch.checked("rms_norm", _checked)
