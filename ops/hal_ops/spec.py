"""The vocabulary: which fields an ``OpSpec`` of each operator has, and their neutral defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hal.errors import ContractError
from hal.types import DType, OpSpec

CONTRACT = (1, 0)


@dataclass(frozen=True)
class Field:
    """One field of the vocabulary. A value equal to ``default`` is left out of the spec."""

    kind: type
    doc: str
    default: Any = None
    choices: tuple[str, ...] = ()


_DETERMINISM = Field(str, "bits that must repeat", "none", ("none", "run", "batch"))
_LAYOUTS = ("NHD", "HND", "format")
_KV_SCALES = tuple(f"{side}_scale_{form}" for side in "kv" for form in ("tensor", "head", "token", "channel"))
_CACHE = {
    "kv_dtype": Field(DType, "dtype of the cache"),
    "head_dim": Field(int, "dimensions of a key head"),
    "v_head_dim": Field(int, "dimensions of a value head"),
    "kv_heads": Field(int, "key/value heads"),
    "layout": Field(str, "order of page, head and token in the cache", choices=_LAYOUTS),
    "page": Field(int, "tokens per page"),
}


def _flags(*flags: str) -> Field:
    return Field(frozenset, "optional parts that are used", frozenset(), flags)


VOCABULARY: dict[str, dict[str, Field]] = {
    "attention": {
        "q_dtype": Field(DType, "dtype of q"),
        **_CACHE,
        "out_dtype": Field(DType, "dtype of the output"),
        "gqa_ratio": Field(int, "query heads per key/value head"),
        "paged": Field(bool, "k and v are paged caches"),
        "table": Field(str, "columns of the block table", choices=("one", "many")),
        "kv_slack": Field(str, "what unused KV may hold", choices=("any", "finite")),
        "max_q": Field(int, "longest query, rounded up to a power of two"),
        "max_kv": Field(int, "longest key sequence, rounded up to a power of two"),
        "batch": Field(int, "requests, rounded up to a power of two"),
        "features": _flags(
            *("noncausal", "window_left", "window_right", "softcap", "alibi", "sinks"),
            *("mask", "mask_per_head", "bias", "bias_per_head", "lse", "strided"),
            *_KV_SCALES,
        ),
        "determinism": _DETERMINISM,
    },
    "merge_attention_states": {
        "dtype": Field(DType, "dtype of the partial outputs"),
        "heads": Field(int, "query heads"),
        "head_dim": Field(int, "dimensions of a value head"),
    },
    "gemm": {
        "a_dtype": Field(DType, "dtype of a"),
        "b_dtype": Field(DType, "dtype of b when it is an array"),
        "out_dtype": Field(DType, "dtype of the output"),
        "m": Field(int, "rows of the output, rounded up to a power of two"),
        "n": Field(int, "columns of the output"),
        "k": Field(int, "length of the sums"),
        "scheme": Field(str, "how b is stored"),
        "packed": Field(str, "kernel that packed b"),
        "features": _flags(
            *("trans_a", "trans_b", "bias", "relu", "gelu", "gelu_tanh", "silu", "alpha", "beta"),
            *("batched_a", "batched_b", "a_scale", "a_zero", "b_scale", "b_zero", "strided"),
        ),
        "group_size": Field(int, "weights along k that share a scale"),
        "a_quant": Field(str, "quantisation of a inside the kernel", "none", ("none", "int8")),
        "determinism": _DETERMINISM,
    },
    "prepack": {
        "scheme": Field(str, "how the weight is stored"),
        "n": Field(int, "rows of the logical weight"),
        "k": Field(int, "columns of the logical weight"),
        "w_dtype": Field(DType, "dtype of the weight when it is not made of blocks"),
        "features": _flags("trans_b"),
    },
    "kv_write": {
        "k_dtype": Field(DType, "dtype of the new keys and values"),
        **_CACHE,
        "features": _flags(*_KV_SCALES, "strided"),
    },
    "kv_gather": {**_CACHE, "features": _flags("strided")},
    "kv_copy": {"kv_dtype": Field(DType, "dtype of the caches"), "features": _flags("strided")},
    "kv_convert": {
        "src_dtype": Field(DType, "dtype of the source"),
        "dst_dtype": Field(DType, "dtype of the destination"),
        "src_layout": Field(str, "layout of the source", choices=_LAYOUTS),
        "dst_layout": Field(str, "layout of the destination", choices=_LAYOUTS),
        "features": _flags("lossy", "scales", "compute_scales", "opaque"),
    },
    "rms_norm": {
        "dtype": Field(DType, "dtype of x"),
        "weight_dtype": Field(DType, "dtype of the weight"),
        "dim": Field(int, "length of a row"),
        "features": _flags("residual"),
    },
    "rope": {
        "dtype": Field(DType, "dtype of q and k"),
        "cos_dtype": Field(DType, "dtype of cos and sin"),
        "head_dim": Field(int, "dimensions of a head"),
        "rot_dim": Field(int, "dimensions that rotate"),
        "features": _flags("interleaved"),
    },
    "silu_mul": {"dtype": Field(DType, "dtype of x"), "dim": Field(int, "columns of the output")},
}


def bucket(n: int) -> int:
    """Round up to a power of two, so that a spec does not change with every token.

    >>> [bucket(n) for n in (0, 1, 5, 64)]
    [1, 1, 8, 64]
    """
    return 1 << max(0, n - 1).bit_length()


def spec(op: str, **fields: Any) -> OpSpec:
    """Make the specification of one operator call from named fields.

    Args:
        op: operator name, e.g. ``"attention"``.
        fields: fields of that operator's vocabulary; None and neutral defaults are left out.

    Raises:
        ContractError: unknown operator or field, or a value of the wrong kind.

    >>> print(spec("silu_mul", dtype="fp16", dim=128))
    silu_mul(dim=128, dtype=float16)
    """
    known = VOCABULARY.get(op)
    if known is None:
        raise ContractError("op", "one of " + ", ".join(VOCABULARY), repr(op))
    clean = {}
    for name, value in fields.items():
        field = known.get(name)
        if field is None:
            raise ContractError(name, f"a field of {op}: " + ", ".join(known), "an unknown field")
        if value is None:
            continue
        value = _coerce(name, field, value)
        if value != field.default:
            clean[name] = value
    return OpSpec(op, CONTRACT, clean)


def _coerce(name: str, field: Field, value: Any) -> Any:
    if field.kind is DType:
        try:
            return DType.parse(value)
        except ContractError as error:
            raise ContractError(name, error.required, error.actual) from None
    if field.kind is frozenset:
        return _flag_set(name, field, value)
    if not isinstance(value, field.kind) or (field.kind is int and isinstance(value, bool)):
        raise ContractError(name, f"a value of type {field.kind.__name__}", repr(value))
    if isinstance(value, int) and value < 0:
        raise ContractError(name, "an integer of at least 0", repr(value))
    if field.choices and value not in field.choices:
        raise ContractError(name, "one of " + ", ".join(field.choices), str(value))
    return value


def _flag_set(name: str, field: Field, value: Any) -> frozenset[str]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise ContractError(name, "a set of flags", repr(value))
    flags = frozenset(value)
    if not flags.issubset(field.choices):
        wrong = sorted(map(str, flags.difference(field.choices)))
        raise ContractError(name, "any of " + ", ".join(field.choices), ", ".join(wrong))
    return flags
