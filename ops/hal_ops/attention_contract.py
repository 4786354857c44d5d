"""The contract of attention: its validator and the specification of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

from hal.errors import ContractError
from hal.types import DType, OpSpec
from hal_ops import arrays, cache_shape, validate
from hal_ops.arrays import Meta
from hal_ops.plan import AttentionPlan
from hal_ops.spec import spec

_MASK = (DType.bool,)
KV_QUANTISED = (DType.int8, DType.float8_e4m3fn, DType.float8_e4m3fnuz, DType.float8_e5m2)


class Facts(NamedTuple):
    """What a call needs beside the kernel, fixed by its signature."""

    out_shape: tuple[int, int]  # heads and value dims
    out_dtype: DType
    pages: int  # page tokens; 0 when ragged
    scale: float
    row_bytes: tuple[int, ...] | None  # of out, q, k and v where all are dense tensors


class Options(NamedTuple):
    """The options of a call, as the function form takes them."""

    layout: Any
    scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    alibi_slopes: Any
    sinks: Any
    mask: Any
    bias: Any
    k_scale: Any
    v_scale: Any
    out: Any
    out_dtype: Any
    return_lse: bool
    determinism: str
    kv_slack: str
    check: str


def validate_call(q: Any, k: Any, v: Any, plan: AttentionPlan, o: Options) -> tuple[OpSpec, Facts]:
    """Check everything that one signature fixes; return the specification and what a call needs.

    Raises:
        ContractError: naming the argument, what was required and what came.
    """
    validate.option("check", o.check, validate.LEVELS)
    meta_q = validate.array("q", q, rank=3, dtypes=validate.FLOATS)
    rank = 4 if plan.paged and cache_shape.layout_name(o.layout) != "format" else None if plan.paged else 3
    meta_k, meta_v = (
        validate.array(name, x, rank=rank, dense_last=rank is not None) for name, x in (("k", k), ("v", v))
    )
    cache = cache_shape.paged(meta_k, meta_v, o.layout, ("k", "v")) if plan.paged else _ragged(meta_k, meta_v, o.layout)
    _check_heads(meta_q, meta_k, meta_v, cache)
    _check_options(o)
    _check_extras(meta_q, meta_k, meta_v, cache, plan, o)
    out_dtype = meta_q.dtype if o.out_dtype is None else validate.dtype("out_dtype", o.out_dtype, validate.FLOATS)
    if o.out is not None:
        described = validate.output("out", o.out, (meta_q.shape[1], cache.v_head_dim), out_dtype)
        validate.together(("q", meta_q), ("out", described))
    wanted = _spec(meta_q, meta_k, cache, plan, o, out_dtype)
    scale = cache.head_dim**-0.5 if o.scale is None else float(o.scale)
    facts = Facts((meta_q.shape[1], cache.v_head_dim), out_dtype, cache.page, scale, arrays.row_bytes(o.out, q, k, v))
    return wanted, facts


def _ragged(k: Meta, v: Meta, layout: Any) -> cache_shape.CacheShape:
    if cache_shape.layout_name(layout) != "NHD":
        raise ContractError("layout", "NHD for ragged keys and values", str(layout))
    for what, axis in (("tokens", 0), ("heads", 1)):
        validate.same("v", what, k.shape[axis], v.shape[axis])
    strided = not (cache_shape.dense(k) and cache_shape.dense(v))
    return cache_shape.CacheShape(0, 0, k.shape[1], k.shape[2], v.shape[2], strided)


def _check_heads(q: Meta, k: Meta, v: Meta, cache: cache_shape.CacheShape) -> None:
    validate.same("k", "head_dim", q.shape[2], cache.head_dim)
    if cache.heads == 0 or q.shape[1] % cache.heads:
        raise ContractError("q", f"query heads that {cache.heads} key/value heads divide", f"{q.shape[1]} heads")
    if min(q.shape[1], cache.head_dim, cache.v_head_dim) < 1:
        raise ContractError("q", "at least one head and one dimension", f"shape {list(q.shape)}")
    validate.same("v", "dtype", k.dtype.value, v.dtype.value)
    if k.dtype in validate.FLOATS:
        validate.same("k", "dtype", q.dtype.value, k.dtype.value)
    elif k.dtype not in KV_QUANTISED:
        raise ContractError("k", f"dtype {q.dtype} or one of " + ", ".join(KV_QUANTISED), k.dtype.value)
    validate.together(("q", q), ("k", k), ("v", v))


def _check_options(o: Options) -> None:
    if o.scale is not None:
        validate.finite("scale", o.scale)
    validate.finite("softcap", o.softcap, low=0.0)
    if not (isinstance(o.window, tuple) and len(o.window) == 2 and all(type(w) is int and w >= -1 for w in o.window)):
        raise ContractError("window", "a pair (left, right) of integers, -1 or more", repr(o.window))
    validate.flag("causal", o.causal)
    validate.flag("return_lse", o.return_lse)
    validate.option("determinism", o.determinism, ("none", "run", "batch"))
    validate.option("kv_slack", o.kv_slack, ("any", "finite"))


def _check_extras(q: Meta, k: Meta, v: Meta, cache: cache_shape.CacheShape, plan: AttentionPlan, o: Options) -> None:
    heads = q.shape[1]
    for name, x in (("alibi_slopes", o.alibi_slopes), ("sinks", o.sinks)):
        if x is not None:
            described = validate.array(name, x, dtypes=(DType.float32,))
            validate.shape(name, described, (heads,))
            validate.together(("q", q), (name, described))
    for name, x, dtypes in (("mask", o.mask, _MASK), ("bias", o.bias, validate.FLOATS)):
        if x is not None:
            described = validate.array(name, x, dtypes=dtypes)
            if len(described.shape) not in (1, 2) or (len(described.shape) == 2 and described.shape[0] != heads):
                raise ContractError(
                    name, f"shape [sum(Lq*Lk)] or [{heads}, sum(Lq*Lk)]", f"shape {list(described.shape)}"
                )
            validate.together(("q", q), (name, described))
    for name, x, kv, dim in (("k_scale", o.k_scale, k, cache.head_dim), ("v_scale", o.v_scale, v, cache.v_head_dim)):
        if x is not None:
            scale_form(name, x, cache.heads, dim, kv.shape[:-1])
            if scale_array(x) is not None:
                validate.together(("q", q), (name, arrays.meta(name, x)))


def scale_array(x: Any) -> Any:
    """Return a dequantisation scale that is an array, None for a number or None."""
    return None if isinstance(x, int | float) else x


def scale_key(x: Any) -> Any:
    """Return the signature of a scale; a number is its own."""
    return x if isinstance(x, int | float) else arrays.signature(x)


def scale_form(name: str, x: Any, heads: int, dim: int, token_shape: tuple[int, ...]) -> str:
    """Return which form a dequantisation scale has: tensor, head, channel or token.

    Raises:
        ContractError: a shape that is none of the four, or a scalar that is not finite.
    """
    if isinstance(x, int | float):
        validate.finite(name, x)
        return "tensor"
    described = validate.array(name, x, dtypes=validate.FLOATS, dense_last=False)
    forms = {(): "tensor", (1,): "tensor", (heads,): "head", (heads, dim): "channel", tuple(token_shape): "token"}
    form = forms.get(tuple(described.shape))
    if form is None:
        required = f"a scalar, [{heads}], [{heads}, {dim}] or {list(token_shape)}"
        raise ContractError(name, required, f"shape {list(described.shape)}")
    return form


def _spec(q: Meta, k: Meta, cache: cache_shape.CacheShape, plan: AttentionPlan, o: Options, out_dtype: DType) -> OpSpec:
    batch, max_q, max_kv, table = plan.bucket
    return spec(
        "attention",
        q_dtype=q.dtype,
        kv_dtype=k.dtype,
        out_dtype=out_dtype,
        head_dim=cache.head_dim,
        v_head_dim=cache.v_head_dim,
        kv_heads=cache.heads,
        gqa_ratio=q.shape[1] // cache.heads,
        paged=plan.paged,
        layout=cache_shape.layout_name(o.layout),
        page=cache.page if plan.paged else None,
        table=table if plan.paged else None,
        kv_slack=o.kv_slack,
        max_q=max_q,
        max_kv=max_kv,
        batch=batch,
        features=_features(q, k, cache, o),
        determinism=o.determinism,
    )


def _features(q: Meta, k: Meta, cache: cache_shape.CacheShape, o: Options) -> set[str]:
    flags = {
        "noncausal": not o.causal,
        "window_left": o.window[0] >= 0,
        "window_right": o.window[1] >= 0,
        "softcap": o.softcap > 0,
        "alibi": o.alibi_slopes is not None,
        "sinks": o.sinks is not None,
        "mask": o.mask is not None and len(o.mask.shape) == 1,
        "mask_per_head": o.mask is not None and len(o.mask.shape) == 2,
        "bias": o.bias is not None and len(o.bias.shape) == 1,
        "bias_per_head": o.bias is not None and len(o.bias.shape) == 2,
        "lse": o.return_lse,
        "strided": cache.strided or not cache_shape.dense(q),
    }
    for side, x, dim in (("k", o.k_scale, cache.head_dim), ("v", o.v_scale, cache.v_head_dim)):
        if x is not None:
            flags[f"{side}_scale_{scale_form(f'{side}_scale', x, cache.heads, dim, k.shape[:-1])}"] = True
    return {name for name, used in flags.items() if used}


def validate_sizes(
    queries: int, keys: int, values: int, plan: AttentionPlan, facts: Facts, mask: Any, bias: Any
) -> None:
    """Check the first dimensions of q, k and v: they change from step to step and are no part of the signature."""
    if queries != plan.total_q:
        raise ContractError("q", f"{plan.total_q} tokens, the end of q_indptr", f"{queries} tokens")
    if values != keys:
        raise ContractError("v", f"{keys} rows, as k", f"{values} rows")
    if facts.pages:
        plan.check_pages(keys, facts.pages)
    elif keys < plan.total_kv:
        raise ContractError("k", f"at least {plan.total_kv} tokens, the end of kv_indptr", f"{keys} tokens")
    if mask is None is bias:
        return
    cells = int((plan.q_lens * plan.kv_lens).sum())
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None and x.shape[-1] != cells:
            raise ContractError(name, f"sum(Lq*Lk) = {cells} values per head", f"{x.shape[-1]}")


def validate_step(q: Any, k: Any, v: Any, plan: AttentionPlan, o: Options, facts: Facts) -> None:
    """Check everything that a signature does not fix; calls with a known signature take the parts one by one."""
    validate_sizes(q.shape[0], k.shape[0], v.shape[0], plan, facts, o.mask, o.bias)
    if o.out is not None:
        validate_out(o.out, plan, q=q, k=k, v=v, mask=o.mask, bias=o.bias)
    if o.check == "full":
        validate_values(o.alibi_slopes, o.sinks, o.k_scale, o.v_scale)


def validate_values(alibi_slopes: Any, sinks: Any, k_scale: Any, v_scale: Any) -> None:
    """Check numbers (``check="full"``): finite slopes and scales, sinks not NaN. It copies them to the host."""
    for name, x in (("alibi_slopes", alibi_slopes), ("k_scale", k_scale), ("v_scale", v_scale)):
        validate.values(name, x)
    validate.values("sinks", sinks, infinite=True)


def validate_out(out: Any, plan: AttentionPlan, **inputs: Any) -> None:
    """Check a given output's token count and that it shares no memory with the inputs."""
    if out.shape[0] != plan.total_q:
        raise ContractError("out", f"{plan.total_q} tokens, as q", f"{out.shape[0]} tokens")
    validate.apart("out", out, **inputs)
