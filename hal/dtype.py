"""``DType``: the one dtype vocabulary of the project."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from hal.errors import ContractError

_BITS = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "uint8": 8,
    "int4": 4,
    "uint4": 4,
    "int32": 32,
    "int64": 64,
    "bool": 8,
}
_ALIASES = {
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "i8": "int8",
    "u8": "uint8",
    "i32": "int32",
    "i64": "int64",
    "bool_": "bool",
}


class DType(StrEnum):
    """Element type of an array.

    ``DType.parse`` accepts torch, numpy and ml_dtypes objects as well as names:

    >>> DType.parse("bf16")
    <DType.bfloat16: 'bfloat16'>
    >>> import numpy
    >>> DType.parse(numpy.dtype("float16")) is DType.float16
    True
    """

    float64 = "float64"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float8_e4m3fn = "float8_e4m3fn"
    float8_e4m3fnuz = "float8_e4m3fnuz"
    float8_e5m2 = "float8_e5m2"
    int8 = "int8"
    uint8 = "uint8"
    int4 = "int4"
    uint4 = "uint4"
    int32 = "int32"
    int64 = "int64"
    bool = "bool"

    @property
    def bits(self) -> int:
        """Width of one element in bits."""
        return _BITS[self.value]

    @property
    def itemsize(self) -> int:
        """Width of one element in bytes; 4-bit types count as one, being stored packed."""
        return max(1, self.bits // 8)

    @property
    def is_float(self) -> bool:  # type: ignore[valid-type]  # "bool" is a member of this enum
        """Whether the type is a floating-point one."""
        return "float" in self.value

    @classmethod
    def parse(cls, value: Any) -> DType:
        """Turn a name or a dtype object of torch, numpy or ml_dtypes into a ``DType``.

        Raises:
            ContractError: ``value`` names no dtype of the vocabulary.
        """
        if isinstance(value, cls):
            return value
        try:
            found = _PARSED.get(value)
        except TypeError:  # unhashable, so no dtype of anybody; the look-up says so
            return cls._lookup(value)
        if found is None:
            found = _PARSED[value] = cls._lookup(value)
        return found

    @classmethod
    def _lookup(cls, value: Any) -> DType:
        name = value if isinstance(value, str) else getattr(value, "name", None)
        if name is None:  # torch.float32 prints as "torch.float32"; numpy.float32 is a class
            name = getattr(value, "__name__", str(value)).removeprefix("torch.")
        name = str(name).lower()
        try:
            if not getattr(value, "isnative", True):
                raise ValueError("a numpy dtype of the other byte order has the name of the native one")
            return cls(_ALIASES.get(name, name))
        except ValueError:
            known = ", ".join(member.value for member in cls)
            raise ContractError("dtype", f"one of {known}", repr(value)) from None


_PARSED: dict[Any, DType] = {}
