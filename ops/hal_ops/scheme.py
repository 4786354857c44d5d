"""``Scheme`` (how a weight is quantised) and ``PackedWeight`` (a weight as one kernel wants it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hal.errors import ContractError


@dataclass(frozen=True)
class Scheme:
    """A way to store a weight.

    ``bits`` per weight, ``group_size`` weights along K share a scale (None: one per column or none),
    ``zero`` is the kind of zero point, ``version`` tells apart revisions of one name.
    """

    name: str
    bits: int
    group_size: int | None
    zero: Literal["none", "int", "float"]
    version: int = 1

    @classmethod
    def parse(cls, value: Scheme | str) -> Scheme:
        """Return the scheme of that name.

        >>> Scheme.parse("gguf_q4_1").group_size
        32

        Raises:
            ContractError: the name is unknown.
        """
        if isinstance(value, Scheme):
            return value
        found = SCHEMES.get(value) if isinstance(value, str) else None
        if found is None:
            raise ContractError("scheme", "one of " + ", ".join(sorted(SCHEMES)), repr(value))
        return found

    def __str__(self) -> str:
        return self.name


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("dense", 0, None, "none"),
        Scheme("int8", 8, None, "none"),
        Scheme("fp8", 8, None, "none"),
        Scheme("fp8_block", 8, 128, "none"),
        Scheme("w4_group", 4, None, "int"),
        Scheme("w8_group", 8, None, "int"),
        Scheme("gguf_q4_0", 4, 32, "none"),
        Scheme("gguf_q4_1", 4, 32, "float"),
        Scheme("gguf_q8_0", 8, 32, "none"),
        Scheme("gptq", 4, None, "int"),
        Scheme("awq", 4, None, "int"),
    )
}


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight as ``hal_ops.prepack`` made it for one kernel; accepted as ``b`` of ``gemm``.

    ``shape`` is logical, ``(n, k)`` for a weight given as ``[N, K]``; ``parts`` belong to the kernel.
    """

    kernel: str
    scheme: Scheme
    shape: tuple[int, int]
    parts: tuple[Any, ...]
