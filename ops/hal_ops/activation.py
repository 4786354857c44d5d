"""Gated activations."""

from __future__ import annotations

from typing import Any

from hal.errors import ContractError
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
        if out.shape[0] != x.shape[0]:
            raise ContractError("out", f"shape {list(shape)}", f"shape {list(out.shape)}")
        validate.apart("out", out, x=x)
    route.run(*route.native(x), out=route.native(out)[0])
    return out


def _route(x: Any, out: Any, device: Any) -> dispatch.Route:
    described = validate.array("x", x, dtypes=validate.FLOATS)
    if not described.shape or described.shape[-1] % 2:
        raise ContractError("x", "an even number of columns", f"shape {list(described.shape)}")
    dim = described.shape[-1] // 2
    if out is not None:
        validate.together(
            ("x", described), ("out", validate.output("out", out, (*described.shape[1:-1], dim), described.dtype))
        )
    wanted = spec("silu_mul", dtype=described.dtype, dim=dim)
    return dispatch.route(wanted, x, device, (described.dtype, dim), out)
