"""The checks that validators of several operators share. Each raises ``ContractError`` naming the argument."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
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
    # An empty array has no elements that could lie apart, and numpy gives it strides of 0.
    if (
        dense_last
        and described.shape
        and 0 not in described.shape[:-1]
        and described.shape[-1] > 1
        and described.strides[-1] != 1
    ):
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
    if not isinstance(value, str) or value not in choices:
        raise ContractError(name, "one of " + ", ".join(map(str, choices)), repr(value))


def flag(name: str, value: Any) -> None:
    """Check a switch."""
    if type(value) is not bool:
        raise ContractError(name, "True or False", repr(value))


def dtype(name: str, value: Any, choices: Sequence[DType]) -> DType:
    """Parse a dtype and check it against the choices."""
    try:
        parsed = DType.parse(value)
    except ContractError as error:
        raise ContractError(name, error.required, error.actual) from None
    option(name, parsed, choices)
    return parsed


def events(wait: Any, record: Any) -> None:
    """Check the two arguments that order an operator among others."""
    if not isinstance(wait, list | tuple) or not all(hasattr(event, "wait") for event in wait):
        raise ContractError("wait", "a sequence of events", repr(wait))
    flag("record", record)


def finite(name: str, value: Any, *, low: float | None = None) -> float:
    """Check a number, of Python or a numpy scalar: finite and, with ``low``, at least that."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ContractError(name, "a number", repr(value))
    number = float(value)
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


def values(name: str, x: Any, *, infinite: bool = False) -> None:
    """Check the numbers of an optional array or scalar: finite, or just no NaN. Copies them to the host."""
    if x is None:
        return
    import hal
    from hal_ops.reference.values import as_float64

    numbers_ = as_float64(x if isinstance(x, int | float) else hal.to_host(x))
    bad = numbers_ != numbers_ if infinite else abs(numbers_) == math.inf
    if bad.any() or (numbers_ != numbers_).any():
        raise ContractError(name, "numbers that are not NaN" if infinite else "finite numbers", "a value that is not")


def writable(name: str, x: Any, described: Meta) -> None:
    """Check that an array can be written: not read-only, no element reached twice."""
    if arrays.read_only(x):
        raise ContractError(name, "a writable array", "a read-only array")
    reach = 0  # elements that the dimensions looked at so far span, the smallest stride first
    for stride, size in sorted((abs(s), n) for s, n in zip(described.strides, described.shape, strict=True) if n > 1):
        if stride <= reach and 0 not in described.shape:
            raise ContractError(
                name, "an array whose elements lie apart", f"an expanded array, strides {list(described.strides)}"
            )
        reach += (size - 1) * stride


def apart(name: str, target: Any, /, **others: Any) -> None:
    """Check that an array to be written shares no memory with others; columns of one buffer do not."""
    low, high = arrays.span(target)
    for other, x in others.items():
        if x is not None:
            start, end = arrays.span(x)
            if low < end and start < high and not _interleaved(target, x):
                raise ContractError(name, f"memory apart from {other}", f"memory shared with {other}")


def clearly_apart(sizes: tuple[int, ...] | None, *rows: tuple[Any, int]) -> bool:
    """Whether the first of several dense tensors surely shares no memory with the others: a cheap ``apart``.

    Args:
        sizes: what ``arrays.row_bytes`` said of the tensors.
        rows: each tensor with the size of its first dimension.
    """
    if sizes is None:
        return False
    target, count = rows[0]
    low = target.data_ptr()
    high = low + count * sizes[0]
    for (x, count), size in zip(rows[1:], sizes[1:], strict=True):
        start = x.data_ptr()
        if start < high and low < start + count * size:
            return False
    return True


def all_apart(written: Mapping[str, Any], read: Mapping[str, Any] | None = None) -> None:
    """Check many arrays at once: those written share memory with no other. Cheap where they lie apart.

    An empty array, or one whose memory is unknown, shares none.
    """
    read = read or {}
    spans = sorted((*arrays.span(x), name) for name, x in (*written.items(), *read.items()))
    for place, (_, end, name) in enumerate(spans):
        for start, _, other in spans[place + 1 :]:
            if start >= end:
                break
            target, source = (name, other) if name in written else (other, name)
            if target in written:
                apart(target, written[target], **{source: written[source] if source in written else read[source]})


def same_place(name: str, target: Any, other: str, x: Any) -> None:
    """Check that an array to be written is another one itself or shares no memory with it."""
    if arrays.span(target) != arrays.span(x) or arrays.meta(name, target).strides != arrays.meta(other, x).strides:
        apart(name, target, **{other: x})


def _interleaved(a: Any, b: Any) -> bool:
    """Whether two views whose spans meet surely share no element: columns, heads or pages of one buffer.

    Both are taken apart along their largest strides. While those agree and rows do not reach into
    the next one, the arrays meet only where a row of ``a`` meets the same row of ``b``.
    """
    (start_a, end_a), (start_b, end_b) = arrays.span(a), arrays.span(b)
    if start_b < start_a:
        return _interleaved(b, a)
    dims_a, dims_b = _steps(a), _steps(b)
    size_a, size_b, offset = end_a - start_a, end_b - start_b, start_b - start_a
    while dims_a and dims_b and dims_a[-1][0] == dims_b[-1][0] > 0:
        step, count_a = dims_a.pop()
        size_a -= step * (count_a - 1)
        size_b -= step * (dims_b.pop()[1] - 1)
        offset %= step
        if size_a > step or offset + size_b > step:
            return False
        if offset >= size_a:
            return True
    return False


def _steps(x: Any) -> list[tuple[int, int]]:
    """(stride in bytes, size) of the dimensions that have more than one element, the largest last."""
    described = arrays.meta("x", x)
    width = described.dtype.itemsize
    return sorted((s * width, n) for s, n in zip(described.strides, described.shape, strict=True) if n > 1)


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
