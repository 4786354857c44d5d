"""Matrix product with scaling, bias and activation, on plain and packed weights."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from hal.errors import ContractError, HalError
from hal.types import DType, OpSpec
from hal_ops import arrays, cache_shape, compiled, dispatch, validate
from hal_ops.arrays import Meta
from hal_ops.scheme import PackedWeight
from hal_ops.spec import bucket, spec

_table = dispatch.Table()
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


class _Facts(NamedTuple):
    """The output of one signature; ``rows_vary`` when the first dimension of ``a`` is not part of it."""

    shape: tuple[int, ...]
    dtype: DType
    rows_vary: bool
    row_bytes: tuple[int, ...] | None  # of out, a and a plain b where all are dense tensors and rows vary


def gemm(
    a: Any,
    b: Any,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Any = None,
    activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Any = None,
    a_scale: Any = None,
    a_zero: Any = None,
    b_scale: Any = None,
    b_zero: Any = None,
    group_size: int | None = None,
    a_quant: Literal["none", "int8"] = "none",
    out: Any = None,
    out_dtype: Any = None,
    determinism: Literal["none", "run", "batch"] = "none",
    check: Literal["none", "meta", "full"] = "meta",
    device: Any = None,
) -> Any:
    """``act(alpha * (A @ B) + beta * C + bias)`` with fp32 accumulation.

    Args:
        a: ``[..., M, K]`` (``[..., K, M]`` with ``trans_a``) fp32, fp16 or bf16; any strides.
        b: ``[..., K, N]`` (``[..., N, K]`` with ``trans_b``), or a ``PackedWeight`` made by
            ``prepack``, which already is the ``[K, N]`` operand. Leading dimensions broadcast as
            in ``numpy.matmul``.
        bias: ``[N]``.
        activation: applied last; ``gelu`` is the erf form, ``gelu_tanh`` the tanh approximation.
        beta, c: ``c`` broadcasts to the result; it is never read when ``beta`` is 0.
        a_scale, a_zero, b_scale, b_zero, group_size: of quantised operands.
        a_quant: "int8" lets the kernel quantise ``a`` on the fly, at the price of accuracy.
        out, out_dtype: result to write; its dtype, by default that of ``a``.
        determinism, check, device: as for ``attention``.

    Returns:
        ``[..., M, N]``. With ``K = 0`` that is ``act(beta * C + bias)``, with ``M = 0`` an empty result.

    Raises:
        ContractError: an argument breaks the contract; nothing was written.
        UnsupportedError: no kernel of the device fits; the reasons are inside.

    Source: BLAS xGEMM (Dongarra et al. 1990); GELU: Hendrycks & Gimpel 2016.

    >>> import numpy as np
    >>> a, b = np.ones((2, 3), "float32"), np.ones((3, 4), "float32")
    >>> gemm(a, b, bias=np.ones(4, "float32")).tolist()
    [[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]
    """
    if compiled.active():
        return compiled.ops.gemm(
            a, b, trans_a, trans_b, bias, activation, alpha, beta, c, a_scale, a_zero, b_scale, b_zero, group_size,
            a_quant, out, out_dtype, determinism, device,
        )  # fmt: skip
    packed = isinstance(b, PackedWeight)
    key = (
        _left(a, trans_a), (b.kernel, b.shape, b.scheme.name) if packed else arrays.signature(b), trans_a, trans_b,
        _extras_key(bias, c, a_scale, a_zero, b_scale, b_zero), activation, alpha, beta, group_size, a_quant,
        out if out is None else arrays.rows(out), out_dtype, determinism, check, device, dispatch.default_device(),
    )  # fmt: skip
    route = _table.get(key)
    if route is None:
        options = _Options(trans_a, trans_b, bias, activation, alpha, beta, c, a_scale, a_zero, b_scale, b_zero,
                           group_size, a_quant, out, out_dtype, determinism, check)  # fmt: skip
        route = _table.add(key, _route(a, b, options, device))
    facts: _Facts = route.facts
    shape = (a.shape[0], *facts.shape[1:]) if facts.rows_vary else facts.shape
    if out is None:
        out = arrays.empty(a, shape, facts.dtype)
    elif check != "none" and not (bias is c is None and _clearly_right(out, shape, facts, a, b)):
        _check_out(out, shape, a=a, b=None if packed else b, c=c, bias=bias)
    if check == "full":
        _check_values(a_scale, b_scale)
    result = out
    if route.wrap is not None:
        a, bias, c, a_scale, a_zero, b_scale, b_zero, out = route.native(
            a, bias, c, a_scale, a_zero, b_scale, b_zero, out
        )
        b = b if packed else route.native(b)[0]
    while True:  # as Route.run, without the price of passing fourteen arguments on
        record = route.bound.record
        try:
            route.bound.fn(
                a, b, trans_a=trans_a, trans_b=trans_b, bias=bias, activation=activation, alpha=alpha, beta=beta, c=c,
                a_scale=a_scale, a_zero=a_zero, b_scale=b_scale, b_zero=b_zero, group_size=group_size, a_quant=a_quant,
                out=out,
            )  # fmt: skip
            return result
        except HalError as error:
            route.recover(record, error)


class _Options(NamedTuple):
    trans_a: bool
    trans_b: bool
    bias: Any
    activation: str
    alpha: float
    beta: float
    c: Any
    a_scale: Any
    a_zero: Any
    b_scale: Any
    b_zero: Any
    group_size: int | None
    a_quant: str
    out: Any
    out_dtype: Any
    determinism: str
    check: str


def _left(a: Any, trans_a: bool) -> Any:
    """Signature of ``a``; of a plain matrix the row count enters rounded up, since it changes at every step."""
    count, rest = arrays.split(a)
    if trans_a or len(getattr(a, "shape", ())) != 2:
        return arrays.signature(a)
    return rest, bucket(count)


def _extras_key(bias: Any, c: Any, a_scale: Any, a_zero: Any, b_scale: Any, b_zero: Any) -> Any:
    """Signature of the operands that most calls leave out."""
    if bias is c is a_scale is a_zero is b_scale is b_zero is None:
        return None
    return tuple(map(arrays.signature, (bias, c, a_scale, a_zero, b_scale, b_zero)))


def _route(a: Any, b: Any, o: _Options, device: Any) -> dispatch.Route:
    wanted, facts = _contract(a, b, o)
    plain = None if isinstance(b, PackedWeight) else b
    if o.out is not None:
        _check_out(o.out, facts.shape, a=a, b=plain, c=o.c, bias=o.bias)
    if o.check == "full":
        _check_values(o.a_scale, o.b_scale)
    return dispatch.route(wanted, a, device, facts, plain, o.bias, o.c, o.a_scale, o.a_zero, o.b_scale, o.b_zero, o.out)


def _clearly_right(out: Any, shape: tuple[int, ...], facts: _Facts, a: Any, b: Any) -> bool:
    """Whether ``_check_out`` would surely find nothing: the common case, on the path of every call."""
    if facts.row_bytes is None or out.shape != shape:
        return False
    plain = () if isinstance(b, PackedWeight) else ((b, b.shape[0]),)
    return validate.clearly_apart(facts.row_bytes, (out, shape[0]), (a, shape[0]), *plain)


def _check_out(out: Any, shape: tuple[int, ...], **inputs: Any) -> None:
    if tuple(out.shape) != tuple(shape):
        raise ContractError("out", f"shape {list(shape)}", f"shape {list(out.shape)}")
    validate.apart("out", out, **inputs)


def _check_values(a_scale: Any, b_scale: Any) -> None:
    validate.values("a_scale", a_scale)
    validate.values("b_scale", b_scale)


def _checked(
    bound_for: OpSpec, level: str, a: Any, b: Any, *, trans_a: bool = False, trans_b: bool = False, bias: Any = None,
    activation: str = "none", alpha: float = 1.0, beta: float = 0.0, c: Any = None, a_scale: Any = None,
    a_zero: Any = None, b_scale: Any = None, b_zero: Any = None, group_size: int | None = None, a_quant: str = "none",
    out: Any,
) -> OpSpec:  # fmt: skip
    options = _Options(
        trans_a, trans_b, bias, activation, alpha, beta, c, a_scale, a_zero, b_scale, b_zero, group_size, a_quant,
        out, arrays.meta("out", out).dtype, bound_for.fields.get("determinism", "none"), level,
    )  # fmt: skip
    wanted, facts = _contract(a, b, options)
    _check_out(out, facts.shape, a=a, b=None if isinstance(b, PackedWeight) else b, c=c, bias=bias)
    if level == "full":
        _check_values(a_scale, b_scale)
    return wanted


dispatch.checked("gemm", _checked)


def _contract(a: Any, b: Any, o: _Options) -> tuple[OpSpec, _Facts]:
    """Check what a signature fixes; return the specification and what a call needs."""
    _check_options(o)
    meta_a = validate.array("a", a, dtypes=DTYPES, dense_last=False)
    meta_b = None if isinstance(b, PackedWeight) else validate.array("b", b, dtypes=DTYPES, dense_last=False)
    left = _matrix("a", meta_a.shape, o.trans_a)
    if meta_b is None:
        if o.trans_b:
            raise ContractError("trans_b", "False with a packed weight, which is the [K, N] operand", "True")
        right: tuple[int, ...] = (b.shape[1], b.shape[0])
    else:
        right = _matrix("b", meta_b.shape, o.trans_b)
        if meta_b.dtype in validate.FLOATS or meta_a.dtype not in validate.FLOATS:  # else: quantised weights
            validate.same("b", "dtype", meta_a.dtype.value, meta_b.dtype.value)
        validate.together(("a", meta_a), ("b", meta_b))
    validate.same("b", "K", left[-1], right[-2])
    shape = (*_broadcast("b", left[:-2], right[:-2]), left[-2], right[-1])
    _check_operands(meta_a, shape, o)
    _check_quantisation(meta_a, left, right, o)
    out_dtype = _out_dtype(meta_a.dtype, o)
    if o.out is not None:
        described = validate.output("out", o.out, shape[1:], out_dtype)
        validate.together(("a", meta_a), ("out", described))
    wanted = spec(
        "gemm",
        a_dtype=meta_a.dtype,
        b_dtype=meta_b.dtype if meta_b else None,
        out_dtype=out_dtype,
        m=bucket(left[-2]),
        n=right[-1],
        k=left[-1],
        scheme=b.scheme.name if isinstance(b, PackedWeight) else "dense",
        packed=b.kernel if isinstance(b, PackedWeight) else None,
        features=_features(meta_a, meta_b, o),
        group_size=o.group_size,
        a_quant=o.a_quant,
        determinism=o.determinism,
    )
    rows_vary = len(meta_a.shape) == 2 and not o.trans_a and len(shape) == 2
    dense = arrays.row_bytes(o.out, a, *(() if meta_b is None else (b,))) if rows_vary else None
    return wanted, _Facts(shape, out_dtype, rows_vary, dense)


DTYPES = (*validate.FLOATS, DType.int8, DType.float8_e4m3fn, DType.float8_e4m3fnuz, DType.float8_e5m2)


def _matrix(name: str, shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    if len(shape) < 2:
        raise ContractError(name, "at least 2 dimensions", f"shape {list(shape)}")
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


def _broadcast(name: str, left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    import numpy as np

    try:
        return tuple(np.broadcast_shapes(left, right))
    except ValueError:
        raise ContractError(name, f"leading dimensions that broadcast with {list(left)}", f"{list(right)}") from None


def _check_options(o: _Options) -> None:
    validate.option("check", o.check, validate.LEVELS)
    validate.option("activation", o.activation, ACTIVATIONS)
    validate.option("a_quant", o.a_quant, ("none", "int8"))
    validate.option("determinism", o.determinism, ("none", "run", "batch"))
    for name, number in (("alpha", o.alpha), ("beta", o.beta)):
        validate.finite(name, number)
    validate.flag("trans_a", o.trans_a)
    validate.flag("trans_b", o.trans_b)
    if o.beta != 0 and o.c is None:
        raise ContractError("c", "an array when beta is not 0", "None")
    if o.group_size is not None and (type(o.group_size) is not int or o.group_size < 1):
        raise ContractError("group_size", "a positive integer", repr(o.group_size))


def _check_operands(a: Meta, shape: tuple[int, ...], o: _Options) -> None:
    if o.bias is not None:
        described = validate.array("bias", o.bias, dtypes=validate.FLOATS)
        validate.shape("bias", described, (shape[-1],))
        validate.together(("a", a), ("bias", described))
    if o.c is not None:
        described = validate.array("c", o.c, dtypes=validate.FLOATS, dense_last=False)
        validate.together(("a", a), ("c", described))
        if _broadcast("c", shape, described.shape) != shape:
            raise ContractError("c", f"a shape that broadcasts to {list(shape)}", f"shape {list(described.shape)}")


def _out_dtype(a: DType, o: _Options) -> DType:
    if o.out_dtype is not None:
        return validate.dtype("out_dtype", o.out_dtype, (*validate.FLOATS, DType.int32))
    if a in validate.FLOATS:
        return a
    scaled = o.a_scale is not None or o.b_scale is not None
    return DType.int32 if a is DType.int8 and not scaled else DType.float32


SCALE_BLOCK = 128  # weights along each side of a block of the block-wise fp8 form
_ZEROS = (*validate.FLOATS, DType.int8, DType.uint8, DType.int32)


def _check_quantisation(a: Meta, left: tuple[int, ...], right: tuple[int, ...], o: _Options) -> None:
    """Check scales and zero points: one value, one per row of a or column of b, or one per group or block along K."""
    (m, k), n = left[-2:], right[-1]
    blocks = [-(-side // SCALE_BLOCK) for side in (k, n)]
    groups = -(-k // o.group_size) if o.group_size else k
    forms_a: list[tuple[int, ...]] = [(), (1,), (m,), (m, 1), (m, blocks[0])]
    forms_b: list[tuple[int, ...]] = [(), (1,), (n,), (1, n), (blocks[0], blocks[1]), (groups, n)]
    for name, x, forms, dtypes in (
        ("a_scale", o.a_scale, forms_a, validate.FLOATS),
        ("a_zero", o.a_zero, forms_a, _ZEROS),
        ("b_scale", o.b_scale, forms_b, validate.FLOATS),
        ("b_zero", o.b_zero, forms_b, _ZEROS),
    ):
        if x is not None:
            described = validate.array(name, x, dtypes=dtypes, dense_last=False)
            if tuple(described.shape) not in forms:
                required = " or ".join(str(list(form)) for form in forms)
                raise ContractError(name, f"shape {required}", f"shape {list(described.shape)}")
            validate.together(("a", a), (name, described))


def _features(a: Meta, b: Meta | None, o: _Options) -> set[str]:
    flags = {
        "trans_a": o.trans_a,
        "trans_b": o.trans_b,
        "bias": o.bias is not None,
        o.activation: o.activation != "none",
        "alpha": o.alpha != 1.0,
        "beta": o.beta != 0.0,
        "batched_a": len(a.shape) > 2,
        "batched_b": b is not None and len(b.shape) > 2,
        "a_scale": o.a_scale is not None,
        "a_zero": o.a_zero is not None,
        "b_scale": o.b_scale is not None,
        "b_zero": o.b_zero is not None,
        "strided": not cache_shape.dense(a) or (b is not None and not cache_shape.dense(b)),
    }
    return {name for name, used in flags.items() if used}
