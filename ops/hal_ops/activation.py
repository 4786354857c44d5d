"""Gated activations."""

from __future__ import annotations

from typing import Any

from hal.errors import ContractError
from hal.types import OpSpec
from hal_ops import arrays, compiled, dispatch, validate
from hal_ops.spec import spec

_table = dispatch.Table()


def silu_mul(x: Any, *, out: Any = None, device: Any = None) -> Any:
    """``silu(x[..., :d]) * x[..., d:]`` with ``silu(a) = a / (1 + exp(-a))``, in fp32.

    Args:
        x: ``[..., 2d]`` fp32, fp16 or bf16.
        out: ``[..., d]``, written and returned.

    Raises:
        ContractError: an argument breaks the contract; nothing was written.
        UnsupportedError: no kernel of the device fits.

    Source: Shazeer 2020 (SwiGLU).

    >>> import numpy as np
    >>> silu_mul(np.array([[0.0, 5.0]], "float32")).tolist()
    [[0.0]]
    """
    if compiled.active():
        return compiled.ops.silu_mul(x, out, device)
    key = (arrays.rows(x), arrays.rows(out) if out is not None else None, device, dispatch.default_device())
    route = _table.get(key)
    if route is None:
        route = _table.add(key, _route(x, out, device))
    dtype, dim = route.facts
    shape = (*x.shape[:-1], dim)
    if out is None:
        out = arrays.empty(x, shape, dtype)
    else:
        _check_out(out, x, shape)
    route.run(*route.native(x), out=route.native(out)[0])
    return out


def _route(x: Any, out: Any, device: Any) -> dispatch.Route:
    wanted = _contract(x, out)
    return dispatch.route(wanted, x, device, (wanted.fields["dtype"], wanted.fields["dim"]), out)


def _contract(x: Any, out: Any) -> OpSpec:
    """Check what a signature fixes; return the specification."""
    described = validate.array("x", x, dtypes=validate.FLOATS)
    if not described.shape or described.shape[-1] % 2 or not described.shape[-1]:
        raise ContractError("x", "an even number of columns, 2 at least", f"shape {list(described.shape)}")
    dim = described.shape[-1] // 2
    if out is not None:
        shape = (*described.shape[:-1], dim)
        validate.together(("x", described), ("out", validate.output("out", out, shape[1:], described.dtype)))
        _check_out(out, x, shape)
    return spec("silu_mul", dtype=described.dtype, dim=dim)


def _check_out(out: Any, x: Any, shape: tuple[int, ...]) -> None:
    if out.shape[0] != shape[0]:
        raise ContractError("out", f"shape {list(shape)}", f"shape {list(out.shape)}")
    validate.apart("out", out, x=x)


def _checked(bound_for: OpSpec, level: str, x: Any, *, out: Any) -> OpSpec:
    return _contract(x, out)


dispatch.checked("silu_mul", _checked)
