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

from hal_ops.gguf import WEIGHTS
from hal_ops.scheme import PackedWeight, Scheme
from hal_torch import gguf
from hal_torch.gemm import finish

NAME = "cpu.embedding_bag"
_ROWS_BY_BAG = 8  # above that many rows of A, decoding the weights once and a real matrix product win
_CENTRE = {4: 8, 8: 128}
_PANELS = (192, 96, 64)  # columns that FBGEMM accumulates in registers; other widths were slower


def prepack(weight: Tensor, *, scheme: Scheme, shape: tuple[int, int], trans_b: bool = True) -> PackedWeight:
    """Rearrange GGUF blocks into panels of columns.

    Parts, for ``N`` padded to panels of ``P`` columns and ``G`` = K/32 groups: the table uint8
    ``[panels*K, P*bits/8 + tail]``, d fp16 ``[panels, G, P]`` and, for q4_1, z fp32 ``[G, panels*P]``.
    """
    width = _panel(shape[0])
    panels = -(-shape[0] // width)
    codes, scale, minimum = gguf.split(gguf.as_blocks(weight, scheme, shape), scheme)
    table = _table(_padded(codes.flatten(1), panels * width).unflatten(0, (panels, width)), scheme.bits)
    d = _padded(scale.squeeze(-1), panels * width)
    zero = None
    if minimum is not None:
        zero = _padded(minimum.squeeze(-1), panels * width).float().add_(d, alpha=_CENTRE[4]).T.contiguous()
    d = d.unflatten(0, (panels, width)).mT.contiguous()
    return PackedWeight(NAME, scheme, shape, (table, d, zero))


def gemm(a: Tensor, b: PackedWeight, *, out: Tensor, trans_a: bool = False, **epilogue: Any) -> None:
    """``a [..., M, K] @ w.T`` into ``out``, see the module."""
    n, k = b.shape
    a = a.mT if trans_a else a
    x = a.float().reshape(-1, k)
    multiply = _by_bags if len(x) <= _ROWS_BY_BAG else _by_panels
    y = multiply(x, b)
    if y.shape[1] != n:  # columns that only fill the last panel
        y = y[:, :n]
    finish(y if a.dim() == 2 else y.view(*a.shape[:-1], n), out, **epilogue)


def _by_bags(x: Tensor, b: PackedWeight) -> Tensor:
    """``[M, K]`` to ``[M, padded N]``, one row of ``x`` after the other."""
    table, scale, zero = b.parts
    panels, groups, width = scale.shape
    indices, offsets = _bags(len(table))
    bag = _operator(b.scheme.bits)
    d = scale.float()
    rows = []
    for m in range(len(x)):
        weights = x[m].expand(panels, -1).reshape(-1)
        sums = bag(table, indices, offsets, False, 0, False, weights, None, False)
        rows.append(sums.view(panels, groups, width).mul_(d).sum(1).view(1, -1))
    y = rows[0] if len(rows) == 1 else torch.cat(rows) if rows else x.new_empty(0, panels * width)
    if zero is not None:
        y.addmm_(x.view(len(x), groups, WEIGHTS).sum(-1), zero)
    return y


def _by_panels(x: Tensor, b: PackedWeight) -> Tensor:
    """``[M, K]`` to ``[M, padded N]``: each panel of weights is decoded once, in cache, and multiplied."""
    table, scale, zero = b.parts
    panels, groups, width = scale.shape
    rows = table.view(panels, groups * WEIGHTS, table.shape[1])
    y = torch.empty(len(x), panels * width)
    for panel in range(panels):
        columns = slice(panel * width, (panel + 1) * width)
        d = scale[panel].float()
        minimum = d * -_CENTRE[b.scheme.bits] if zero is None else zero[:, columns].sub(d, alpha=_CENTRE[4])
        planes = _planes(rows[panel], width, b.scheme.bits)
        for first, codes in enumerate(planes):
            lane = slice(first, None, len(planes))
            factor, offset = (part[:, lane].unsqueeze(1).contiguous() for part in (d, minimum))
            weight = torch.addcmul(offset, codes.float().view(groups, WEIGHTS, -1), factor)
            y[:, columns][:, lane] = x @ weight.flatten(0, 1)
    return y


def _planes(rows: Tensor, width: int, bits: int) -> tuple[Tensor, ...]:
    """The codes of a panel's table rows, uint8 ``[K, ...]``: all columns, or the even and the odd ones."""
    if bits == 8:
        return (rows[:, :width],)
    words = rows.view(torch.int32)[:, : width // 8]  # bitwise operations are faster on wide integers
    return (words & 0x0F0F0F0F).view(torch.uint8), ((words >> 4) & 0x0F0F0F0F).view(torch.uint8)


def _table(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[panels, P, K]`` to table rows: the codes of one k, then scale 1 and bias -c."""
    if bits == 8:
        rows = (codes.view(torch.uint8) ^ 128).mT
        tail = torch.tensor([1.0, -_CENTRE[8]], dtype=torch.float32).view(torch.uint8)
    else:  # an even column in the low nibble, its odd neighbour in the high one
        rows = (codes[:, 0::2] | codes[:, 1::2] << 4).mT
        tail = torch.tensor([1.0, -_CENTRE[4]], dtype=torch.float16).view(torch.uint8)
    return torch.cat((rows, tail.expand(*rows.shape[:-1], -1)), -1).flatten(0, 1)


def _padded(x: Tensor, n: int) -> Tensor:
    """Append rows of zeros up to ``n``; they make columns that are never returned."""
    return x if len(x) == n else torch.cat((x, x.new_zeros(n - len(x), *x.shape[1:])))


def _panel(n: int) -> int:
    """The panel width that pads least; narrow weights get one panel, a multiple of 16 wide."""
    narrow = max(1, -(-n // 16)) * 16
    return narrow if narrow <= _PANELS[0] else min(_PANELS, key=lambda width: -n % width)


@lru_cache(maxsize=64)
def _bags(rows: int) -> tuple[Tensor, Tensor]:
    """Indices 0..rows-1 and the start of every bag of 32, shared by all weights of one size."""
    indices = torch.arange(rows, dtype=torch.int32)
    return indices, indices[::WEIGHTS].contiguous()


@lru_cache(maxsize=2)
def _operator(bits: int) -> Callable[..., Tensor]:
    name = "embedding_bag_4bit_rowwise_offsets" if bits == 4 else "embedding_bag_byte_rowwise_offsets"
    operator: Callable[..., Tensor] = getattr(torch.ops.quantized, name).default
    return operator


def available() -> bool:
    """Whether torch runs its vectorised kernel here; elsewhere it has a scalar one."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")
