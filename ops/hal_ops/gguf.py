"""Block layouts of GGUF weights: sizes, and their split into codes and scales with numpy.

A row of K weights is K/32 blocks, one after the other; 32 weights along K share a block. Layouts:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hal.errors import ContractError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WEIGHTS = 32  # per block, in all of these layouts


@dataclass(frozen=True)
class BlockLayout:
    """One block: little-endian float16 d, perhaps float16 m, then the codes of 32 weights.

    Four-bit codes lie two to a byte: byte i holds weight i in its low half, weight i + 16 in its high half.
    A weight is ``d * (code - zero) + m``.
    """

    scheme: str
    bits: int
    zero: int
    has_minimum: bool

    @property
    def header(self) -> int:
        """Bytes before the codes."""
        return 4 if self.has_minimum else 2

    @property
    def bytes(self) -> int:
        """Bytes of one block."""
        return self.header + WEIGHTS * self.bits // 8


LAYOUTS = {
    layout.scheme: layout
    for layout in (
        BlockLayout("gguf_q4_0", 4, 8, False),
        BlockLayout("gguf_q4_1", 4, 0, True),
        BlockLayout("gguf_q8_0", 8, 0, False),
    )
}


@dataclass(frozen=True, eq=False)
class Blocks:
    """Weights ``[N,K]`` taken apart: ``weight = d * (code - zero) + m``, d and m shared by 32 weights along K.

    codes: uint8 ``[N,K]`` in 0..15 of the four-bit schemes, int8 ``[N,K]`` of q8_0. d, m: float16 ``[N,K/32]``,
    m None where the scheme has none. zero: 8 in q4_0, else 0.
    """

    codes: NDArray[Any]
    d: NDArray[np.float16]
    m: NDArray[np.float16] | None
    zero: int


def row_bytes(scheme: str, k: int) -> int:
    """Bytes of one row of ``k`` weights.

    >>> row_bytes("gguf_q4_0", 64), row_bytes("gguf_q4_1", 64), row_bytes("gguf_q8_0", 64)
    (36, 40, 68)

    Raises:
        ContractError: the scheme is no GGUF scheme, or k is no multiple of 32.
    """
    if scheme not in LAYOUTS:
        raise ContractError("scheme", "one of " + ", ".join(LAYOUTS), repr(scheme))
    if k < 0 or k % WEIGHTS:
        raise ContractError("k", f"a multiple of {WEIGHTS}", str(k))
    return k // WEIGHTS * LAYOUTS[scheme].bytes


def split(scheme: str, raw: NDArray[np.uint8], shape: tuple[int, int]) -> Blocks:
    """Codes and scales of the blocks of an ``[N,K]`` matrix; d and m are copied, as are the codes.

    ``raw`` is uint8 of any shape with ``N * row_bytes(scheme, K)`` elements.

    Raises:
        ContractError: another dtype or number of bytes.
    """
    import numpy as np

    n, k = shape
    need = n * row_bytes(scheme, k)
    if raw.dtype != np.uint8 or raw.size != need:
        raise ContractError(
            "weight", f"uint8 with {need} elements for {scheme} {n}x{k}", f"{raw.dtype} with {raw.size}"
        )
    layout = LAYOUTS[scheme]
    blocks = raw.reshape(n, k // WEIGHTS, layout.bytes)
    header = np.ascontiguousarray(blocks[..., : layout.header]).view("<f2")
    payload = blocks[..., layout.header :]
    if layout.bits == 4:
        codes = np.concatenate([payload & 15, payload >> 4], axis=-1)
    else:
        codes = np.ascontiguousarray(payload).view(np.int8)
    minimum = np.ascontiguousarray(header[..., 1]) if layout.has_minimum else None
    return Blocks(codes.reshape(n, k), np.ascontiguousarray(header[..., 0]), minimum, layout.zero)


def decode(scheme: str, raw: NDArray[np.uint8], shape: tuple[int, int], dtype: str = "float32") -> NDArray[Any]:
    """The matrix ``[N,K]`` in ``dtype``: float64 (exact) or float32 (exact but for one rounding in q4_1).

    >>> import numpy as np
    >>> block = np.array([1.0], "<f2").tobytes() + bytes([0x98] * 16)
    >>> decode("gguf_q4_0", np.frombuffer(block, np.uint8), (1, 32))[0, 15:17].tolist()
    [0.0, 1.0]
    """
    import numpy as np

    n, k = shape
    blocks = split(scheme, raw, shape)
    codes = blocks.codes.reshape(n, k // WEIGHTS, WEIGHTS).astype(dtype)
    codes -= np.dtype(dtype).type(blocks.zero)
    codes *= blocks.d[..., None].astype(dtype)
    if blocks.m is not None:
        codes += blocks.m[..., None].astype(dtype)
    return codes.reshape(n, k)
