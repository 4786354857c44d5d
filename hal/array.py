"""``Array``: a buffer that no framework addresses, or a host array of a dtype that numpy lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hal.dtype import DType
from hal.errors import ContractError


@dataclass(frozen=True, eq=False)
class Array:
    """A typed, strided view of a device buffer.

    ``strides`` count elements. ``native`` is what the plugin works with; on the host it is a numpy
    array of the same width (bf16 over uint16, fp8 over uint8) and the same shape and strides.
    """

    device: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    native: Any

    @classmethod
    def host(cls, bits: Any, dtype: DType | str) -> Array:
        """Wrap a numpy array of raw bits as an array of ``dtype`` on ``cpu:0``.

        Raises:
            ContractError: the elements are not as wide as ``dtype``.

        >>> import numpy
        >>> Array.host(numpy.zeros((2, 3), "uint16"), "bf16").shape
        (2, 3)
        """
        parsed = DType.parse(dtype)
        if bits.itemsize != parsed.itemsize:
            raise ContractError("bits", f"elements of {parsed.itemsize} bytes for {parsed}", f"{bits.dtype}")
        strides = tuple(stride // bits.itemsize for stride in bits.strides)
        return cls("cpu:0", parsed, tuple(bits.shape), strides, bits)
