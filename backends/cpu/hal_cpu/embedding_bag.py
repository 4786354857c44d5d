"""``cpu.embedding_bag``: GGUF weights multiplied by torch's weighted sums of quantised embedding rows.

``y[n] = sum_g d[n,g] * sum_{k in g} x[k] * (q[n,k] - c) + sum_g z[n,g] * sum_{k in g} x[k]`` with ``z = m + c*d``
(``w = d*q + m`` in q4_1; z = 0 in the others). The inner sum is what an embedding bag computes: the rows of its
table are the codes of one k, every group of 32 rows is one bag, x are the sample weights. torch's kernel (FBGEMM)
decodes and accumulates in vector registers in fp32, the table is read once, and codes stay 4 or 8 bits wide.
The centre c = 8 or 128 lies in the rows as their bias, so that sums are of small numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hal_ops.scheme import PackedWeight, Scheme
from hal_torch import gguf
from hal_torch.gemm import finish

NAME = "cpu.embedding_bag"
_ROWS_BY_BAG = 8  # above that many rows of A, decoding the weights once and a real matrix product win
_PANELS = (192, 96, 64)  # columns that FBGEMM accumulates in registers; other widths were slower


def prepack(weight: Tensor, *, scheme: Scheme, shape: tuple[int, int], trans_b: bool = True) -> PackedWeight:
    """Rearrange GGUF blocks into panels of columns.

    Parts, for ``N`` padded to panels of ``P`` columns and ``G`` = K/32 groups: the table uint8
    ``[panels*K, P*bits/8 + tail]``, d fp16 ``[panels, G, P]`` and, for q4_1, z fp32 ``[G, panels*P]``.
    Columns 2i and 2i+1 of a 4-bit row, one byte, are columns i and P/2+i of its panel.
    """
    blocks = gguf.as_blocks(weight, scheme, shape)
    n, k = shape
    width = _panel(n)
    panels = -(-n // width)
    codes, scale, minimum = gguf.split(blocks, scheme)
    table = _table(codes.flatten(1), panels, width, scheme.bits)
    order = _columns(panels, width, scheme.bits)
    d = _padded(scale.squeeze(-1), panels * width)[order]
    if minimum is None:
        z = None
    else:
        z = _padded(minimum.squeeze(-1), panels * width)[order].float() + 8 * d.float()
        z = z.T.contiguous()
    d = d.view(panels, width, -1).transpose(1, 2).contiguous()
    return PackedWeight(NAME, scheme, shape, (table, d, z))


def gemm(a: Tensor, b: PackedWeight, *, out: Tensor, trans_a: bool = False, **epilogue: Any) -> None:
    """``a [..., M, K] @ w.T`` into ``out``, see the module."""
    n, k = b.shape
    x = (a.mT if trans_a else a).float()
    lead = x.shape[:-1]
    x = x.reshape(-1, k)
    multiply = _by_bags if len(x) <= _ROWS_BY_BAG else _by_panels
    finish(multiply(x, b)[:, :n].unflatten(0, lead), out, **epilogue)


def _by_bags(x: Tensor, b: PackedWeight) -> Tensor:
    """``[M, K]`` to ``[M, padded N]``, one row of ``x`` after the other."""
    table, scale, zero = b.parts
    panels, groups, width = scale.shape
    indices, offsets = _bags(len(table))
    bag = _operator(b.scheme.bits)
    d = scale.float()
    y = torch.empty(len(x), panels, width)
    for row, result in zip(x, y, strict=True):
        weights = row.expand(panels, -1).reshape(-1)
        sums = bag(table, indices, offsets, False, 0, False, weights, None, False)
        torch.linalg.vecdot(sums.view(panels, groups, width), d, dim=1, out=result)
    y = y.flatten(1)
    if zero is not None:
        y.addmm_(x.unflatten(1, (groups, gguf.GROUP)).sum(-1), zero)
    return y if b.scheme.bits == 8 else _natural(y, panels)


def _by_panels(x: Tensor, b: PackedWeight) -> Tensor:
    """``[M, K]`` to ``[M, padded N]``: each panel of weights is decoded once into a buffer and multiplied."""
    table, scale, zero = b.parts
    panels, groups, width = scale.shape
    bits = b.scheme.bits
    rows = table.view(panels, groups * gguf.GROUP, -1)
    codes = torch.empty(groups, gguf.GROUP, width)
    y = torch.empty(len(x), panels * width)
    for panel in range(panels):
        columns = slice(panel * width, (panel + 1) * width)
        d = scale[panel].float()
        minimum = d * -(1 << (bits - 1)) if zero is None else zero[:, columns].sub(d, alpha=8)
        _decode(rows[panel], bits, codes.flatten(0, 1))
        if bits == 4:
            d, minimum = _natural(d, 1), _natural(minimum, 1)
        weight = torch.addcmul(minimum.unsqueeze(1), codes, d.unsqueeze(1))
        torch.mm(x, weight.flatten(0, 1), out=y[:, columns])
    return y


def _decode(rows: Tensor, bits: int, codes: Tensor) -> None:
    """Codes of a panel's table rows to fp32 ``[K, P]``, columns in their natural order."""
    width = codes.shape[-1]
    if bits == 8:
        codes.copy_(rows[:, :width])
        return
    words = rows.view(torch.int32)[:, : width // 8]  # bitwise operations are faster on wide integers
    low, high = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    codes[:, : width // 2].copy_(low.view(torch.uint8))
    codes[:, width // 2 :].copy_(high.view(torch.uint8))


def _natural(x: Tensor, panels: int) -> Tensor:
    """Undo the pairing of columns: ``[M, panels * P]``."""
    return x.unflatten(-1, (panels, -1, 2)).transpose(-1, -2).flatten(-3)


def _columns(panels: int, width: int, bits: int) -> Tensor:
    """Which column of the weight lies at each position of the packed order."""
    columns = torch.arange(panels * width).view(panels, width)
    if bits == 4:
        columns = columns.view(panels, 2, width // 2).transpose(1, 2)
    return columns.reshape(-1)


def _table(codes: Tensor, panels: int, width: int, bits: int) -> Tensor:
    """Codes ``[N, K]`` to table rows: the codes of one k, then scale 1 and bias -c as the operator expects them."""
    k = codes.shape[1]
    tail_dtype, centre = (torch.float16, 8.0) if bits == 4 else (torch.float32, 128.0)
    if bits == 8:
        codes = codes.view(torch.uint8) ^ 128
    rows = _padded(codes, panels * width).view(panels, width, k).transpose(1, 2)
    if bits == 4:
        rows = rows[..., : width // 2] | rows[..., width // 2 :] << 4
    tail = torch.tensor([1.0, -centre], dtype=tail_dtype).view(torch.uint8)
    table = torch.empty(panels, k, rows.shape[-1] + len(tail), dtype=torch.uint8)
    table[..., : rows.shape[-1]] = rows
    table[..., rows.shape[-1] :] = tail
    return table.flatten(0, 1)


def _padded(x: Tensor, n: int) -> Tensor:
    """Append rows of zeros up to ``n``; they make columns that are never returned."""
    return x if len(x) == n else torch.cat((x, x.new_zeros(n - len(x), *x.shape[1:])))


def _panel(n: int) -> int:
    """The panel width that pads least; narrow weights get one panel, a multiple of 16 wide."""
    narrow = -(-n // 16) * 16
    return narrow if narrow <= _PANELS[0] else min(_PANELS, key=lambda width: -n % width)


@lru_cache(maxsize=64)
def _bags(rows: int) -> tuple[Tensor, Tensor]:
    """Indices 0..rows-1 and the start of every bag of 32, shared by all weights of one size."""
    indices = torch.arange(rows, dtype=torch.int32)
    return indices, indices[:: gguf.GROUP].contiguous()


@lru_cache(maxsize=2)
def _operator(bits: int) -> Callable[..., Tensor]:
    name = "embedding_bag_4bit_rowwise_offsets" if bits == 4 else "embedding_bag_byte_rowwise_offsets"
    operator: Callable[..., Tensor] = getattr(torch.ops.quantized, name).default
    return operator


def available() -> bool:
    """Whether torch runs its vectorised kernel here; elsewhere it has a scalar one."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")
