"""Attention over ragged or paged keys and values: the function form, its validator and its specification."""

from __future__ import annotations

from typing import Any, Literal

from hal.errors import ContractError, HalError
from hal.types import DType, OpSpec
from hal_ops import arrays, compiled, dispatch, validate
from hal_ops.attention_contract import (
    Facts,
    Options,
    scale_array,
    scale_key,
    validate_call,
    validate_out,
    validate_sizes,
    validate_step,
    validate_values,
)
from hal_ops.cache_shape import Layout
from hal_ops.plan import AttentionPlan, plan_attention

_table = dispatch.Table()


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    q_indptr: Any = None,
    kv_lens: Any = None,
    kv_indptr: Any = None,
    block_table: Any = None,
    plan: AttentionPlan | None = None,
    layout: Layout = "NHD",
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    mask: Any = None,
    bias: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    determinism: Literal["none", "run", "batch"] = "none",
    kv_slack: Literal["finite", "any"] = "any",
    check: Literal["none", "meta", "full"] = "meta",
    device: Any = None,
) -> Any:
    """Softmax attention of packed queries over ragged or paged keys and values.

    Query ``i`` of a request with ``Lq`` queries and ``Lk`` keys stands at ``p = i + Lk - Lq``. Key
    ``j`` is allowed iff ``j < Lk``, ``j <= p`` when causal, ``p - left <= j <= p + right`` for a
    window, and the mask keeps it. The score is ``scale * (q . k)``, then
    ``softcap * tanh(s / softcap)``, then ``- slope * |j - p|``, then ``+ bias``. A row without an
    allowed key gives exactly 0 and an LSE of -inf (with a sink: 0 and the sink).

    Args:
        q: ``[T, Hq, Dk]`` fp32, fp16 or bf16; requests one after the other.
        k, v: ragged ``[S, Hkv, Dk]`` and ``[S, Hkv, Dv]``; or paged caches, NHD
            ``[pages, page, Hkv, D]`` or HND ``[pages, Hkv, page, D]``.
        q_indptr: int32 ``[B+1]``, cumulative query lengths; None with one request or with ``plan``.
        kv_lens: int32 ``[B]``, keys per request, the new tokens included (paged).
        kv_indptr: int32 ``[B+1]``, cumulative key lengths (ragged); None with one request.
        block_table: int32 ``[B, P]``; entries beyond ``ceil(Lk / page)`` may hold anything.
        plan: result of ``plan_attention``, made once per step and shared by all layers.
        scale: factor of the scores; None means ``1 / sqrt(Dk)``.
        window: ``(left, right)`` inclusive, -1 is open; "W tokens, self included" is ``(W-1, -1)``.
        alibi_slopes, sinks: float32 ``[Hq]``.
        mask: bool ``[sum(Lq*Lk)]`` or ``[Hq, sum(Lq*Lk)]``, row-major per request, True keeps.
        bias: float, shaped like mask; ``-inf`` masks.
        k_scale, v_scale: factors that dequantise k and v: scalar, ``[Hkv]``, ``[Hkv, D]``, or the
            shape of the cache without D.
        out: ``[T, Hq, Dv]``, written and returned.
        return_lse: also return the natural-log LSE, float32 ``[T, Hq]``, sink included.
        determinism: ask for repeatable bits per call ("run") or per request ("batch").
        kv_slack: "finite" promises finite numbers in unused KV; "any" allows NaN there.
        check: "meta" validates shapes, dtypes, strides and options; "full" also values; "none" nothing.

    Returns:
        ``out``, or ``(out, lse)``.

    Raises:
        ContractError: an argument breaks the contract; nothing was written.
        UnsupportedError: no kernel of the device fits; the reasons are inside.

    Source of the formula: Vaswani et al. 2017; grouped heads: Ainslie et al. 2023; soft capping:
    Gemma 2 (2024); ALiBi: Press et al. 2021; sinks: Xiao et al. 2023.

    >>> import numpy as np
    >>> q = np.ones((2, 4, 8), "float32")  # two tokens, four query heads
    >>> k = v = np.ones((3, 2, 8), "float32")  # three keys, two key/value heads
    >>> attention(q, k, v).shape
    (2, 4, 8)
    """
    if compiled.active():
        return compiled.ops.attention(
            q, k, v, q_indptr, kv_lens, kv_indptr, block_table, plan, layout, scale, causal, window, softcap,
            alibi_slopes, sinks, mask, bias, k_scale, v_scale, out, out_dtype, return_lse, determinism, kv_slack,
            device,
        )  # fmt: skip
    if plan is None:
        plan = _plan(q, k, q_indptr, kv_lens, kv_indptr, block_table)
    elif not isinstance(plan, AttentionPlan) or not (q_indptr is kv_lens is kv_indptr is block_table is None):
        _check_plan(plan, q_indptr=q_indptr, kv_lens_array=kv_lens, kv_indptr=kv_indptr, block_table=block_table)
    (queries, q_rows), (keys, k_rows), (values, v_rows) = arrays.split(q), arrays.split(k), arrays.split(v)
    rows, out_rows = (0, None) if out is None else arrays.split(out)
    key = (
        q_rows, k_rows, v_rows, out_rows, layout, plan.bucket, plan.paged, causal, window, softcap, scale,
        _extras_key(alibi_slopes, sinks, mask, bias, k_scale, v_scale, keys), out_dtype, return_lse, determinism,
        kv_slack, check, device, dispatch.default_device(),
    )  # fmt: skip
    route = _table.get(key)
    if route is None:
        options = Options(
            layout, scale, causal, window, softcap, alibi_slopes, sinks, mask, bias, k_scale, v_scale,
            out, out_dtype, return_lse, determinism, kv_slack, check,
        )  # fmt: skip
        route = _table.add(key, _route(q, k, v, plan, options, device))
    facts: Facts = route.facts
    validate_sizes(queries, keys, values, plan, facts, mask, bias)  # whatever check says: no kernel reads beyond
    if check != "none":
        apart = validate.clearly_apart(facts.row_bytes, (out, rows), (q, queries), (k, keys), (v, values))
        if out is not None and not (apart and rows == plan.total_q and mask is None is bias):
            validate_out(out, plan, q=q, k=k, v=v, mask=mask, bias=bias)
        if check == "full":
            validate_values(alibi_slopes, sinks, k_scale, v_scale)
    total = plan.total_q
    if out is None:
        out = arrays.empty(q, (total, *facts.out_shape), facts.out_dtype)
    lse = arrays.empty(q, (total, facts.out_shape[0]), DType.float32) if return_lse else None
    if route.wrap is None:
        while True:  # as Route.run, without the price of passing sixteen arguments on
            record = route.bound.record
            try:
                route.bound.fn(
                    q, k, v, plan, out=out, scale=facts.scale, causal=causal, window=window, softcap=softcap, lse=lse,
                    k_scale=k_scale, v_scale=v_scale, sinks=sinks, alibi_slopes=alibi_slopes, mask=mask, bias=bias,
                )  # fmt: skip
                break
            except HalError as error:
                route.recover(record, error)
    else:
        _run_wrapped(route, q, k, v, plan, out, lse, facts.scale, causal, window, softcap,
                     k_scale, v_scale, sinks, alibi_slopes, mask, bias)  # fmt: skip
    return (out, lse) if return_lse else out


def _extras_key(alibi_slopes: Any, sinks: Any, mask: Any, bias: Any, k_scale: Any, v_scale: Any, keys: int) -> Any:
    if alibi_slopes is sinks is mask is bias is k_scale is v_scale is None:
        return None
    per_head = arrays.signature(alibi_slopes), arrays.signature(sinks)
    per_key = keys if k_scale is not None or v_scale is not None else None  # a scale may have a value per key
    return per_head, arrays.growing(mask), arrays.growing(bias), scale_key(k_scale), scale_key(v_scale), per_key


def _check_plan(plan: Any, **given: Any) -> None:
    """Check that a plan is one, and that index arrays given beside it are those that it was made of."""
    if not isinstance(plan, AttentionPlan):
        raise ContractError("plan", "an AttentionPlan (see plan_attention)", type(plan).__name__)
    for name, x in given.items():
        if x is not None and x is not getattr(plan, name):
            raise ContractError("plan", f"a plan made of this {name.removesuffix('_array')}", "one made of another")


def _plan(q: Any, k: Any, q_indptr: Any, kv_lens: Any, kv_indptr: Any, block_table: Any) -> AttentionPlan:
    """Plan a call that brought none; one ragged request needs no index arrays."""
    validate.array("q", q, rank=3)
    if block_table is None and (q_indptr is None) != (kv_indptr is None):
        missing = "q_indptr" if q_indptr is None else "kv_indptr"
        raise ContractError(missing, "both indptr arrays, or neither for one request", "None")
    if q_indptr is None:
        q_indptr = [0, q.shape[0]]
    if block_table is None and kv_indptr is None:
        kv_indptr = [0, validate.array("k", k, rank=3).shape[0]]
    return plan_attention(q_indptr=q_indptr, kv_lens=kv_lens, kv_indptr=kv_indptr, block_table=block_table)


def _route(q: Any, k: Any, v: Any, plan: AttentionPlan, o: Options, device: Any) -> dispatch.Route:
    wanted, facts = validate_call(q, k, v, plan, o)
    if o.check != "none":
        validate_step(q, k, v, plan, o, facts)
    extras = (o.out, o.alibi_slopes, o.sinks, o.mask, o.bias, scale_array(o.k_scale), scale_array(o.v_scale))
    return dispatch.route(wanted, q, device, facts, k, v, *extras)


def _run_wrapped(
    route: dispatch.Route, q: Any, k: Any, v: Any, plan: AttentionPlan, out: Any, lse: Any, scale: float,
    causal: bool, window: tuple[int, int], softcap: float, k_scale: Any, v_scale: Any, sinks: Any,
    alibi_slopes: Any, mask: Any, bias: Any,
) -> None:  # fmt: skip
    q, k, v, out, lse, sinks, alibi_slopes, mask, bias = route.native(
        q, k, v, out, lse, sinks, alibi_slopes, mask, bias
    )
    k_scale, v_scale = (x if scale_array(x) is None else route.native(x)[0] for x in (k_scale, v_scale))
    route.run(
        q, k, v, plan, out=out, scale=scale, causal=causal, window=window, softcap=softcap, lse=lse,
        k_scale=k_scale, v_scale=v_scale, sinks=sinks, alibi_slopes=alibi_slopes, mask=mask, bias=bias,
    )  # fmt: skip


def _checked(
    bound_for: OpSpec, level: str, q: Any, k: Any, v: Any, plan: Any, *, out: Any, scale: Any = None,
    causal: Any = True, window: Any = (-1, -1), softcap: Any = 0.0, lse: Any = None, k_scale: Any = None,
    v_scale: Any = None, sinks: Any = None, alibi_slopes: Any = None, mask: Any = None, bias: Any = None,
) -> OpSpec:  # fmt: skip
    _check_plan(plan)
    fields = bound_for.fields
    options = Options(
        fields.get("layout", "NHD"), scale, causal, window, softcap, alibi_slopes, sinks, mask, bias, k_scale, v_scale,
        out, arrays.meta("out", out).dtype, lse is not None,
        fields.get("determinism", "none"), fields.get("kv_slack", "any"), level,
    )  # fmt: skip
    wanted, facts = validate_call(q, k, v, plan, options)
    validate_step(q, k, v, plan, options, facts)
    if lse is not None:
        described = validate.output("lse", lse, facts.out_shape[:1], DType.float32)
        validate.together(("q", arrays.meta("q", q)), ("lse", described))
        validate.same("lse", "tokens", plan.total_q, described.shape[0])
        validate.apart("lse", lse, q=q, k=k, v=v, out=out)
    return wanted


dispatch.checked("attention", _checked)
