"""Stored elements to float64 and back, for every dtype of the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.dtype import DType

Floats = NDArray[np.float64]

_FP8 = {  # dtype: exponent bias, mantissa bits, largest finite code
    DType.float8_e4m3fn: (7, 3, 0x7E),
    DType.float8_e4m3fnuz: (8, 3, 0x7F),
    DType.float8_e5m2: (15, 2, 0x7B),
}


def dtype_of(x: Any) -> DType:
    """Dtype of a numpy array, an ml_dtypes array or a ``hal.Array``."""
    return DType.parse(x.dtype)


def storage(x: Any) -> NDArray[Any]:
    """The stored elements in a dtype of numpy: ``uint16`` for bf16, ``uint8`` for fp8."""
    stored: NDArray[Any] = np.asarray(getattr(x, "native", x))
    return (
        stored if stored.dtype.kind in "biuf" and hasattr(np, stored.dtype.name) else stored.view(f"u{stored.itemsize}")
    )


@np.errstate(invalid="ignore")  # a signalling NaN is data here
def as_float64(x: Any) -> Floats:
    """Value of each element.

    >>> as_float64(np.float16([0.5, -2.0]))
    array([ 0.5, -2. ])
    """
    if hasattr(x, "native"):
        return decode(storage(x), dtype_of(x))
    return np.asarray(x).astype(np.float64)


@np.errstate(invalid="ignore")  # a signalling NaN is data here
def decode(stored: NDArray[Any], dtype: DType) -> Floats:
    """Value of stored elements; bf16 lies in ``uint16``, fp8 in ``uint8``.

    >>> decode(np.uint8([0x38, 0xB8]), DType.float8_e4m3fn)
    array([ 1., -1.])
    """
    if dtype is DType.bfloat16 and stored.dtype == np.uint16:
        halves = stored.astype(np.uint32)
        return np.left_shift(halves, 16, dtype=np.uint32).view(np.float32).astype(np.float64)
    if dtype in _FP8 and stored.dtype == np.uint8:
        table = np.array([_fp8_value(code, dtype) for code in range(256)])
        return np.asarray(table[stored])
    return np.asarray(stored, dtype=np.float64)


def encode(values: Floats, dtype: DType) -> NDArray[Any]:
    """Nearest stored element, ties to even; int8 and fp8 saturate. NaN becomes 0 in an integer type.

    >>> encode(np.array([2.5, 300.0]), DType.int8)
    array([  2, 127], dtype=int8)
    """
    if dtype is DType.bfloat16:
        rounded = _round_significand(values, bits=8, smallest=-133).astype(np.float32)
        return (rounded.view(np.uint32) >> 16).astype(np.uint16)
    if dtype in _FP8:
        return _encode_fp8(values, dtype)
    native = np.dtype(dtype.value)
    if native.kind in "iu":
        limits = np.iinfo(native)
        finite = np.nan_to_num(np.rint(values), posinf=limits.max, neginf=limits.min)
        return np.asarray(np.clip(finite, limits.min, limits.max).astype(native))
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values.astype(native))


def _fp8_value(code: int, dtype: DType) -> float:
    bias, mantissa_bits, largest = _FP8[dtype]
    sign, magnitude = (-1.0 if code & 0x80 else 1.0), code & 0x7F
    if dtype is DType.float8_e4m3fnuz and code == 0x80:
        return float("nan")
    if magnitude > largest:
        infinite = dtype is DType.float8_e5m2 and magnitude == largest + 1
        return sign * float("inf") if infinite else float("nan")
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    if exponent:
        mantissa += 1 << mantissa_bits
    return sign * mantissa * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)


def _encode_fp8(values: Floats, dtype: DType) -> NDArray[np.uint8]:
    bias, mantissa_bits, largest = _FP8[dtype]
    finite = np.array([_fp8_value(code, dtype) for code in range(largest + 1)])
    rounded = _round_significand(np.abs(values), bits=mantissa_bits + 1, smallest=1 - bias - mantissa_bits)
    code = np.searchsorted(finite, np.minimum(np.nan_to_num(rounded, nan=0.0), finite[-1])).astype(np.uint8)
    fnuz = dtype is DType.float8_e4m3fnuz  # it has no negative zero: that code is its NaN
    negative = np.signbit(values) & ~(fnuz & (code == 0))
    nan = np.uint8(0x80 if fnuz else 0x7F)
    return np.where(np.isnan(values), nan, code | (negative.astype(np.uint8) << 7)).astype(np.uint8)


def _round_significand(values: Floats, *, bits: int, smallest: int) -> Floats:
    """Round to ``bits`` significant bits, but to no finer a step than ``2**smallest``."""
    with np.errstate(invalid="ignore", over="ignore"):
        _, exponent = np.frexp(values)
        step = np.ldexp(1.0, np.maximum(exponent - bits, smallest))
        return np.where(np.isfinite(values), np.rint(values / step) * step, values)
