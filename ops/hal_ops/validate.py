"""The checks that validators of several operators share. Each raises ``ContractError`` naming the argument."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hal.errors import ContractError
from hal.types import DType
from hal_ops import arrays
from hal_ops.arrays import Meta

FLOATS = (DType.float32, DType.float16, DType.bfloat16)
LEVELS = ("none", "meta", "full")


def array(
    name: str, x: Any, *, rank: int | None = None, dtypes: Iterable[DType] | None = None, dense_last: bool = True
) -> Meta:
    """Describe ``x`` and check rank, dtype and that its last dimension is dense."""
    described = arrays.meta(name, x)
    if rank is not None and len(described.shape) != rank:
        raise ContractError(name, f"{rank} dimensions", f"shape {list(described.shape)}")
    if dtypes is not None and described.dtype not in (allowed := tuple(dtypes)):
        raise ContractError(name, "dtype " + " or ".join(allowed), described.dtype.value)
    if dense_last and described.shape and described.shape[-1] > 1 and described.strides[-1] != 1:
        raise ContractError(name, "a dense last dimension", f"stride {described.strides[-1]}")
    return described


def same(name: str, what: str, required: Any, actual: Any) -> None:
    """Check that a property equals what another argument fixed."""
    if required != actual:
        raise ContractError(name, f"{what} {_text(required)}", f"{what} {_text(actual)}")


def shape(name: str, described: Meta, required: Sequence[int]) -> None:
    """Check a whole shape."""
    if tuple(described.shape) != tuple(required):
        raise ContractError(name, f"shape {list(required)}", f"shape {list(described.shape)}")


def together(first: tuple[str, Meta], *others: tuple[str, Meta | None]) -> None:
    """Check that all arrays lie on one device."""
    for name, described in others:
        if described is not None and described.device != first[1].device:
            raise ContractError(name, f"the device of {first[0]}, {first[1].device}", f"{described.device}")


def option(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check an option against its choices."""
    if value not in choices:
        raise ContractError(name, "one of " + ", ".join(map(str, choices)), repr(value))


def finite(name: str, value: Any, *, low: float | None = None) -> float:
    """Check a Python number: finite and, with ``low``, at least that."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ContractError(name, "a number", repr(value)) from None
    if not math.isfinite(number) or (low is not None and number < low):
        raise ContractError(name, "a finite number" + (f" of at least {low:g}" if low is not None else ""), repr(value))
    return number


def output(name: str, out: Any, tail: Sequence[int], dtype: DType) -> Meta:
    """Check what the signature of a given output fixes: dtype, all sizes but the first, that it can be written."""
    described = array(name, out, dtypes=(dtype,))
    if len(described.shape) != len(tail) + 1 or tuple(described.shape[1:]) != tuple(tail):
        raise ContractError(name, f"shape [T, {', '.join(map(str, tail))}]", f"shape {list(described.shape)}")
    writable(name, out, described)
    return described


def writable(name: str, x: Any, described: Meta) -> None:
    """Check that an array can be written: not read-only, no element reached twice."""
    if arrays.is_numpy(x) and not x.flags.writeable:
        raise ContractError(name, "a writable array", "a read-only array")
    repeated = [
        size for size, stride in zip(described.shape, described.strides, strict=True) if stride == 0 and size > 1
    ]
    if repeated:
        raise ContractError(
            name, "an array whose elements lie apart", f"an expanded array, strides {list(described.strides)}"
        )


def apart(name: str, out: Any, /, **inputs: Any) -> None:
    """Check that an array to be written shares no memory with the inputs; interleaved views count as shared."""
    low, high = arrays.span(out)
    for other, x in inputs.items():
        if x is not None:
            start, end = arrays.span(x)
            if low < end and start < high:
                raise ContractError(name, f"memory apart from {other}", f"memory shared with {other}")


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
