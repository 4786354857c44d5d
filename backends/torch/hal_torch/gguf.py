"""GGUF blocks, as they lie in a file, to torch tensors; ``hal_ops.gguf`` describes the blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.errors import ContractError
from hal_ops.gguf import LAYOUTS, WEIGHTS, row_bytes
from hal_ops.scheme import Scheme


def as_blocks(weight: Tensor, scheme: Scheme, shape: tuple[int, int]) -> Tensor:
    """View raw bytes as blocks, uint8 ``[N, K/32, block bytes]``. Nothing is copied when the bytes are contiguous.

    Raises:
        ContractError: K is no multiple of 32, or there are not as many bytes as ``shape`` = (N, K) takes.
    """
    n, k = shape
    required = n * row_bytes(scheme.name, k)
    if weight.dtype != torch.uint8 or weight.numel() != required:
        raise ContractError("weight", f"{required} bytes of uint8", f"{weight.numel()} of {weight.dtype}")
    return weight.reshape(n, k // WEIGHTS, LAYOUTS[scheme.name].bytes)


def split(blocks: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """Take blocks ``[N, G, bytes]`` apart.

    Returns:
        codes ``[N, G, 32]`` (uint8 0..15, or int8 for q8_0), scales fp16 ``[N, G, 1]`` and, for q4_1, minima
        fp16 ``[N, G, 1]``.
    """
    layout = LAYOUTS[scheme.name]
    header = blocks[..., : layout.header].contiguous().view(torch.float16)
    scale, minimum = header[..., :1], header[..., 1:] if layout.has_minimum else None
    data = blocks[..., layout.header :]
    if layout.bits == 8:
        return data.view(torch.int8), scale, minimum
    data = data.contiguous()  # short strided rows would cost more in both operations below than this copy
    return torch.cat((data & 15, data >> 4), -1), scale, minimum


def dequantize(blocks: Tensor, scheme: Scheme) -> Tensor:
    """Decode blocks ``[N, G, bytes]`` to the exact weights, rounded once to fp32: ``[N, 32*G]``."""
    codes, scale, minimum = split(blocks, scheme)
    weight = codes.to(torch.float32)
    if zero := LAYOUTS[scheme.name].zero:
        weight -= zero
    weight *= scale.float()
    if minimum is not None:
        weight += minimum.float()  # the product of 4 and 11 bits is exact, so that only this sum rounds
    return weight.flatten(1)
