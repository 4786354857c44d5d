"""GGUF blocks to what MatMulNBits reads: planes of 4-bit codes, scales, and offsets per block.

MatMulNBits computes ``(code - 8) * scale`` in blocks of 32 along K. Its 8-bit and its zero-point
variants are many times slower at float32 accuracy, so every scheme becomes symmetric 4-bit planes:

- ``q4_0``: w = d*(q-8), one plane.
- ``q4_1``: w = d*q + m = d*(q-8) + (m + 8d): one plane and an offset, which meets the sum of A over the block.
- ``q8_0``: w = d*q with q + 128 = 16h + l: w = 16d*(h-8) + d*(l-8) + 8d: two planes and an offset.
"""

from __future__ import annotations

import numpy as np

from hal.errors import ContractError
from hal_ops.scheme import Scheme

GROUP = 32
BLOCK_BYTES = {"gguf_q4_0": 18, "gguf_q4_1": 20, "gguf_q8_0": 34}


def planes(raw: np.ndarray, scheme: Scheme, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Repack raw blocks (uint8, any shape) of an ``[N, K]`` matrix.

    Returns:
        ``codes<i>`` uint8 ``[N, K/32, 16]`` (low nibble first, in order) and ``scales<i>`` float32
        ``[N * K/32]`` of each plane; ``offsets`` float32 ``[K/32, N]`` unless the scheme is q4_0.

    Raises:
        ContractError: the bytes are not as many as the shape takes.
    """
    n, k = shape
    required = n * (k // GROUP) * BLOCK_BYTES[scheme.name]
    if raw.dtype != np.uint8 or raw.size != required or k % GROUP:
        raise ContractError("weight", f"{required} bytes of blocks for shape {shape}", f"{raw.size} of {raw.dtype}")
    blocks = np.ascontiguousarray(raw).reshape(n, k // GROUP, -1)
    d = _half(blocks[..., :2])
    if scheme.name == "gguf_q8_0":
        low, high = _split_bytes(blocks[..., 2:])
        return {
            "codes0": high,
            "scales0": 16 * d.reshape(-1),
            "codes1": low,
            "scales1": d.reshape(-1),
            "offsets": _offsets(8 * d),
        }
    packed = {"codes0": _reorder_nibbles(blocks[..., -16:]), "scales0": d.reshape(-1)}
    if scheme.name == "gguf_q4_1":
        packed["offsets"] = _offsets(_half(blocks[..., 2:4]) + 8 * d)
    return packed


def _half(two_bytes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(two_bytes).view("<f2")[..., 0].astype(np.float32)


def _offsets(per_block: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(per_block.T)


def _reorder_nibbles(codes: np.ndarray) -> np.ndarray:
    """GGUF's byte i holds weights i and i+16; the result's byte i holds weights 2i and 2i+1."""
    return np.concatenate(_split_pairs(codes), axis=-1)


def _split_bytes(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Signed bytes ``[..., 32]`` plus 128, as planes of their low and high halves, ``[..., 16]`` each."""
    return _split_pairs(codes ^ 128)


def _split_pairs(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low nibbles of each two bytes in one byte, and high nibbles likewise. Works on pairs, to keep the loops dense."""
    pairs = np.ascontiguousarray(codes).view("<u2")
    low = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
    high = ((pairs >> 4) & 0x0F) | ((pairs >> 8) & 0xF0)
    return low.astype(np.uint8), high.astype(np.uint8)
