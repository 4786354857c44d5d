"""GGUF blocks, as they lie in a file, to torch tensors.

A block holds 32 weights along K (layouts as published in ggml's ``ggml-common.h``):
``q4_0`` = f16 d, 16 bytes, w = d*(q-8); ``q4_1`` = f16 d, f16 m, 16 bytes, w = d*q + m;
``q8_0`` = f16 d, 32 int8, w = d*q. Byte i of a 4-bit block has weight i in its low nibble and
weight i+16 in its high one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.errors import ContractError
from hal_ops.scheme import Scheme

GROUP = 32
BLOCK_BYTES = {"gguf_q4_0": 18, "gguf_q4_1": 20, "gguf_q8_0": 34}


def as_blocks(weight: Tensor, scheme: Scheme, shape: tuple[int, int]) -> Tensor:
    """View raw bytes as blocks, uint8 ``[N, K/32, block bytes]``. Nothing is copied when the bytes are contiguous.

    Raises:
        ContractError: K is no multiple of 32, or there are not as many bytes as ``shape`` = (N, K) takes.
    """
    n, k = shape
    if k % GROUP:
        raise ContractError("shape", f"K a multiple of {GROUP} for {scheme.name}", f"K = {k}")
    size = BLOCK_BYTES[scheme.name]
    required = n * (k // GROUP) * size
    if weight.dtype != torch.uint8 or weight.numel() != required:
        raise ContractError("weight", f"{required} bytes of uint8", f"{weight.numel()} of {weight.dtype}")
    return weight.reshape(n, k // GROUP, size)


def split(blocks: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """Take blocks ``[N, G, bytes]`` apart.

    Returns:
        codes ``[N, G, 32]`` (uint8 0..15, or int8 for q8_0), scales fp16 ``[N, G, 1]`` and, for q4_1, minima
        fp16 ``[N, G, 1]``.
    """
    halves = 2 if scheme.name == "gguf_q4_1" else 1
    constants = blocks[..., : 2 * halves].contiguous().view(torch.float16)
    scale, minimum = constants[..., :1], constants[..., 1:] if halves == 2 else None
    data = blocks[..., 2 * halves :]
    if scheme.bits == 8:
        return data.view(torch.int8), scale, minimum
    data = data.contiguous()  # short strided rows would cost more in both operations below than this copy
    return torch.cat((data & 15, data >> 4), -1), scale, minimum


def dequantize(blocks: Tensor, scheme: Scheme) -> Tensor:
    """Decode blocks ``[N, G, bytes]`` to the exact weights, rounded once to fp32: ``[N, 32*G]``."""
    codes, scale, minimum = split(blocks, scheme)
    weight = codes.to(torch.float32)
    if scheme.name == "gguf_q4_0":
        weight -= 8
    weight *= scale.float()
    if minimum is not None:
        weight += minimum.float()  # the product of 4 and 11 bits is exact, so that only this sum rounds
    return weight.flatten(1)
