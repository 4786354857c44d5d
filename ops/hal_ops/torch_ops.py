"""The operators as torch operators, for compiled regions. Import this module to use HAL under ``torch.compile``.

Each operator has a functional schema that returns fresh tensors and, where the function form takes
``out``, an out-schema that writes and returns nothing (a torch operator must not return its
arguments). At run time both call the function form, which plans, validates and dispatches as in
eager mode. Index tensors are planned inside, so ``plan=`` has no place in a compiled region.

>>> import torch
>>> import hal_ops, hal_ops.torch_ops
>>> double = torch.compile(lambda a, b: hal_ops.gemm(a, b) * 2, fullgraph=True, backend="eager")
>>> double(torch.eye(2), torch.eye(2)).tolist()
[[2.0, 0.0], [0.0, 2.0]]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.errors import ContractError
from hal.types import Device
from hal_ops import activation as activation_form
from hal_ops import attention as attention_form
from hal_ops import compiled, scheme
from hal_ops import gemm as gemm_form
from hal_ops import kv_write as kv_write_form
from hal_ops import merge_attention_states as merge_form
from hal_ops import rms_norm as rms_norm_form
from hal_ops import rope as rope_form

_library: Any = torch.library.Library("hal", "DEF")  # type: ignore[no-untyped-call]
_NEW = tuple[Tensor, ...]


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register one operator: schema, implementation for every device, and shape function."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hal::{name}", fake, lib=_library)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Shape function of operators that only write into their arguments."""


# ------------------------------------------------------------------------------------ attention
_ATTENTION = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_indptr, Tensor? kv_lens, Tensor? kv_indptr, Tensor? block_table, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? mask, Tensor? bias, Tensor? k_scale, Tensor? v_scale, "
    "str layout, float? scale, bool causal, int[2] window, float softcap, str determinism, str kv_slack, str? device"
)
_TENSORS = (
    "q_indptr",
    "kv_lens",
    "kv_indptr",
    "block_table",
    "alibi_slopes",
    "sinks",
    "mask",
    "bias",
    "k_scale",
    "v_scale",
)
_OPTIONS = ("layout", "scale", "causal", "window", "softcap", "determinism", "kv_slack", "device")


def _attention_arguments(rest: tuple[Any, ...]) -> dict[str, Any]:
    named = dict(zip((*_TENSORS, *_OPTIONS), rest, strict=True))
    named["window"] = tuple(named["window"])
    return named


def _attention_run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> _NEW:
    *arguments, out_dtype, return_lse = rest
    result = attention_form(
        q, k, v, out_dtype=out_dtype, return_lse=return_lse, **_attention_arguments(tuple(arguments))
    )
    return result if return_lse else (result, q.new_empty((0, q.shape[1]), dtype=torch.float32))


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> _NEW:
    *_, out_dtype, return_lse = rest
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[-1]), dtype=out_dtype or q.dtype)
    return out, q.new_empty((q.shape[0] if return_lse else 0, q.shape[1]), dtype=torch.float32)


def _attention_out_run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
    *arguments, out = rest
    attention_form(q, k, v, out=out, out_dtype=out.dtype, **_attention_arguments(tuple(arguments)))


_define(
    f"attention({_ATTENTION}, ScalarType? out_dtype, bool return_lse) -> (Tensor, Tensor)",
    _attention_run,
    _attention_fake,
)
_define(f"attention_out({_ATTENTION}, Tensor(a!) out) -> ()", _attention_out_run, _nothing)


def attention(
    q: Any, k: Any, v: Any, q_indptr: Any, kv_lens: Any, kv_indptr: Any, block_table: Any, plan: Any, layout: Any,
    scale: Any, causal: Any, window: Any, softcap: Any, alibi_slopes: Any, sinks: Any, mask: Any, bias: Any,
    k_scale: Any, v_scale: Any, out: Any, out_dtype: Any, return_lse: Any, determinism: Any, kv_slack: Any, device: Any,
) -> Any:  # fmt: skip
    """The attention function form inside a compiled region."""
    if plan is not None:
        raise ContractError("plan", "None in a compiled region: pass the index tensors", "an AttentionPlan")
    arguments = (
        q, k, v, q_indptr, kv_lens, kv_indptr, block_table, alibi_slopes, sinks, mask, bias,
        _tensor_scale(q, k_scale), _tensor_scale(q, v_scale), _layout(layout), scale, causal, list(window), softcap,
        determinism, kv_slack, _device(device),
    )  # fmt: skip
    if out is not None and not return_lse:
        torch.ops.hal.attention_out(*arguments, out)
        return out
    result, lse = torch.ops.hal.attention(*arguments, _torch_dtype(out_dtype), return_lse)
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def _tensor_scale(q: Tensor, value: Any) -> Any:
    return q.new_full((), value, dtype=torch.float32) if isinstance(value, int | float) else value


# ------------------------------------------------------------------------------------ merge
def _merge_run(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, device: str | None) -> _NEW:
    return merge_form(o_a, lse_a, o_b, lse_b, device=device)


def _merge_fake(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, device: str | None) -> _NEW:
    return o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)


def _merge_out_run(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, out: Tensor, lse_out: Tensor, device: str | None
) -> None:
    merge_form(o_a, lse_a, o_b, lse_b, out=out, lse_out=lse_out, device=device)


_MERGE = "Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b"
_define(f"merge_attention_states({_MERGE}, str? device) -> (Tensor, Tensor)", _merge_run, _merge_fake)
_define(
    f"merge_attention_states_out({_MERGE}, Tensor(a!) out, Tensor(b!) lse_out, str? device) -> ()",
    _merge_out_run,
    _nothing,
)


def merge_attention_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out: Any, lse_out: Any, device: Any) -> Any:
    """The merge function form inside a compiled region."""
    if out is None and lse_out is None:
        return torch.ops.hal.merge_attention_states(o_a, lse_a, o_b, lse_b, _device(device))
    out = torch.empty_like(o_a) if out is None else out
    lse_out = torch.empty_like(lse_a) if lse_out is None else lse_out
    torch.ops.hal.merge_attention_states_out(o_a, lse_a, o_b, lse_b, out, lse_out, _device(device))
    return out, lse_out


# ------------------------------------------------------------------------------------ gemm
_GEMM = (
    "Tensor? bias, Tensor? c, Tensor? a_scale, Tensor? a_zero, Tensor? b_scale, Tensor? b_zero, bool trans_a, "
    "bool trans_b, str activation, float alpha, float beta, int? group_size, str a_quant, str determinism, str? device"
)
_GEMM_NAMES = (
    "bias", "c", "a_scale", "a_zero", "b_scale", "b_zero", "trans_a", "trans_b", "activation", "alpha", "beta",
    "group_size", "a_quant", "determinism", "device",
)  # fmt: skip
_PACKED = "Tensor[] parts, str kernel, str scheme, int n, int k"


def _gemm_shape(a: Tensor, right: tuple[Any, ...], trans_a: bool) -> tuple[Any, ...]:
    rows = a.shape[-1] if trans_a else a.shape[-2]
    leading: tuple[Any, ...] = torch.broadcast_shapes(a.shape[:-2], right[:-2])  # type: ignore[no-untyped-call]
    return (*leading, rows, right[-1])


def _gemm_run(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    *arguments, out_dtype = rest
    return gemm_form(a, b, out_dtype=out_dtype, **dict(zip(_GEMM_NAMES, arguments, strict=True)))  # type: ignore[no-any-return]


def _gemm_fake(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    named = dict(zip((*_GEMM_NAMES, "out_dtype"), rest, strict=True))
    right = (*b.shape[:-2], b.shape[-1], b.shape[-2]) if named["trans_b"] else b.shape
    return a.new_empty(_gemm_shape(a, tuple(right), named["trans_a"]), dtype=named["out_dtype"] or a.dtype)


def _gemm_out_run(a: Tensor, b: Tensor, *rest: Any) -> None:
    *arguments, out = rest
    gemm_form(a, b, out=out, out_dtype=out.dtype, **dict(zip(_GEMM_NAMES, arguments, strict=True)))


def _weight(parts: list[Tensor], kernel: str, name: str, n: int, k: int) -> scheme.PackedWeight:
    return scheme.PackedWeight(kernel, scheme.Scheme.parse(name), (n, k), tuple(parts))


def _packed_run(a: Tensor, parts: list[Tensor], kernel: str, name: str, n: int, k: int, *rest: Any) -> Tensor:
    return _gemm_run(a, _weight(parts, kernel, name, n, k), *rest)  # type: ignore[arg-type]


def _packed_fake(a: Tensor, parts: list[Tensor], kernel: str, name: str, n: int, k: int, *rest: Any) -> Tensor:
    named = dict(zip((*_GEMM_NAMES, "out_dtype"), rest, strict=True))
    return a.new_empty(_gemm_shape(a, (k, n), named["trans_a"]), dtype=named["out_dtype"] or a.dtype)


def _packed_out_run(a: Tensor, parts: list[Tensor], kernel: str, name: str, n: int, k: int, *rest: Any) -> None:
    _gemm_out_run(a, _weight(parts, kernel, name, n, k), *rest)  # type: ignore[arg-type]


_define(f"gemm(Tensor a, Tensor b, {_GEMM}, ScalarType? out_dtype) -> Tensor", _gemm_run, _gemm_fake)
_define(f"gemm_out(Tensor a, Tensor b, {_GEMM}, Tensor(a!) out) -> ()", _gemm_out_run, _nothing)
_define(f"gemm_packed(Tensor a, {_PACKED}, {_GEMM}, ScalarType? out_dtype) -> Tensor", _packed_run, _packed_fake)
_define(f"gemm_packed_out(Tensor a, {_PACKED}, {_GEMM}, Tensor(a!) out) -> ()", _packed_out_run, _nothing)


def gemm(
    a: Any, b: Any, trans_a: Any, trans_b: Any, bias: Any, activation: Any, alpha: Any, beta: Any, c: Any, a_scale: Any,
    a_zero: Any, b_scale: Any, b_zero: Any, group_size: Any, a_quant: Any, out: Any, out_dtype: Any, determinism: Any,
    device: Any,
) -> Any:  # fmt: skip
    """The gemm function form inside a compiled region."""
    options = (
        bias, c, a_scale, a_zero, b_scale, b_zero, trans_a, trans_b, activation, float(alpha), float(beta), group_size,
        a_quant, determinism, _device(device),
    )  # fmt: skip
    if isinstance(b, scheme.PackedWeight):
        for part in b.parts:
            if not isinstance(part, Tensor):
                raise ContractError("b", "a weight packed as tensors in a compiled region", f"one packed by {b.kernel}")
        operands: tuple[Any, ...] = (a, list(b.parts), b.kernel, b.scheme.name, b.shape[0], b.shape[1])
        functional, in_place = torch.ops.hal.gemm_packed, torch.ops.hal.gemm_packed_out
    else:
        operands = (a, b)
        functional, in_place = torch.ops.hal.gemm, torch.ops.hal.gemm_out
    if out is None:
        return functional(*operands, *options, _torch_dtype(out_dtype))
    in_place(*operands, *options, out)
    return out


# ------------------------------------------------------------------------------------ cache and companions
def _kv_write_run(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *rest: Any) -> None:
    k_scale, v_scale, layout, device = rest
    kv_write_form(k, v, k_cache, v_cache, slots, layout=layout, k_scale=k_scale, v_scale=v_scale, device=device)


def _rms_norm_run(x: Tensor, weight: Tensor, eps: float, device: str | None) -> Tensor:
    return rms_norm_form(x, weight, eps, device=device)  # type: ignore[no-any-return]


def _rms_norm_out_run(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor, device: str | None
) -> None:
    rms_norm_form(x, weight, eps, residual=residual, out=out, device=device)


def _rope_run(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> None:
    interleaved, device = rest
    rope_form(q, k, positions, cos, sin, interleaved=interleaved, device=device)


def _silu_mul_run(x: Tensor, device: str | None) -> Tensor:
    return activation_form.silu_mul(x, device=device)  # type: ignore[no-any-return]


def _silu_mul_out_run(x: Tensor, out: Tensor, device: str | None) -> None:
    activation_form.silu_mul(x, out=out, device=device)


_define(
    "kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor? k_scale, "
    "Tensor? v_scale, str layout, str? device) -> ()",
    _kv_write_run,
    _nothing,
)
_define(
    "rms_norm(Tensor x, Tensor weight, float eps, str? device) -> Tensor",
    _rms_norm_run,
    lambda x, weight, eps, device: x.new_empty(x.shape),
)
_define(
    "rms_norm_out(Tensor x, Tensor weight, float eps, Tensor(a!)? residual, Tensor(b!) out, str? device) -> ()",
    _rms_norm_out_run,
    _nothing,
)
_define(
    "rope(Tensor(a!) q, Tensor(b!) k, Tensor positions, Tensor cos, Tensor sin, bool interleaved, str? device) -> ()",
    _rope_run,
    _nothing,
)
_define(
    "silu_mul(Tensor x, str? device) -> Tensor",
    _silu_mul_run,
    lambda x, device: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
)
_define("silu_mul_out(Tensor x, Tensor(a!) out, str? device) -> ()", _silu_mul_out_run, _nothing)


def kv_write(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, layout: Any, k_scale: Any, v_scale: Any, wait: Any,
    record: Any, device: Any,
) -> None:  # fmt: skip
    """The kv_write function form inside a compiled region."""
    if record or len(wait):
        raise ContractError("wait", "no events in a compiled region", "events")
    scales = _tensor_scale(k, k_scale), _tensor_scale(k, v_scale)
    torch.ops.hal.kv_write(k, v, k_cache, v_cache, slots, *scales, _layout(layout), _device(device))


def rms_norm(x: Any, weight: Any, eps: Any, residual: Any, out: Any, device: Any) -> Any:
    """The rms_norm function form inside a compiled region."""
    if residual is None and out is None:
        return torch.ops.hal.rms_norm(x, weight, eps, _device(device))
    out = torch.empty_like(x) if out is None else out
    torch.ops.hal.rms_norm_out(x, weight, eps, residual, out, _device(device))
    return out


def rope(q: Any, k: Any, positions: Any, cos: Any, sin: Any, interleaved: Any, device: Any) -> None:
    """The rope function form inside a compiled region."""
    torch.ops.hal.rope(q, k, positions, cos, sin, interleaved, _device(device))


def silu_mul(x: Any, out: Any, device: Any) -> Any:
    """The silu_mul function form inside a compiled region."""
    if out is None:
        return torch.ops.hal.silu_mul(x, _device(device))
    torch.ops.hal.silu_mul_out(x, out, _device(device))
    return out


def _layout(layout: Any) -> str:
    if not isinstance(layout, str):
        raise ContractError("layout", "NHD or HND in a compiled region", type(layout).__name__)
    return layout


def _device(device: Any) -> str | None:
    return device.id if isinstance(device, Device) else device


def _torch_dtype(dtype: Any) -> Any:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    raise ContractError("out_dtype", "a torch.dtype in a compiled region", repr(dtype))


compiled.ops = sys.modules[__name__]
compiled.active = torch.compiler.is_compiling
