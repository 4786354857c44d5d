"""Matrix products: dense, and with weights that stay quantised in GGUF blocks.

``D = act(alpha * (A @ B) + beta * C + bias)``, accumulated in fp32 and rounded once to the dtype of ``out``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hal.constraint import Flags, OneOf, Range
from hal.types import Claim, Device, DType, Kernel, OpSpec, Refusal, RefusalCode
from hal_ops.scheme import PackedWeight, Scheme
from hal_torch import gguf

FLOATS = OneOf({DType.float32, DType.float16, DType.bfloat16})
EPILOGUE = {"bias", "relu", "gelu", "gelu_tanh", "silu", "alpha", "beta"}
GGUF_SCHEMES = frozenset(gguf.BLOCK_BYTES)

# Elements of one widened tile of B: 1 MiB of fp32 stays near the core on a CPU, elsewhere launches are what costs.
_TILE = {"cpu": 1 << 18}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu_,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def dense(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Tensor | None = None,
    activation: str = "none",
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Tensor | None = None,
    **unused: Any,
) -> None:
    """``a [..., M, K] @ b [..., K, N]`` into ``out``; leading dimensions broadcast as in ``numpy.matmul``."""
    a, b = a.mT if trans_a else a, b.mT if trans_b else b
    plain = bias is None and activation == "none" and alpha == 1.0 and beta == 0.0
    # On a CPU torch multiplies 16-bit matrices far slower than widened ones, see below.
    if plain and a.dtype == b.dtype == out.dtype and (a.dtype == torch.float32 or a.device.type != "cpu"):
        torch.matmul(a, b, out=out)
        return
    wide = a.float()
    for columns in _tiles(b):
        product = wide @ b[..., columns].float()
        finish(product, out[..., columns], columns, bias=bias, activation=activation, alpha=alpha, beta=beta, c=c)


def finish(
    product: Tensor,
    out: Tensor,
    columns: slice = slice(None),
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Tensor | None = None,
    **unused: Any,
) -> None:
    """Apply everything that follows the product, fp32 ``[..., M, N]`` which is consumed, and write ``out``.

    ``columns`` says which columns of ``bias`` and ``c`` belong to these. ``c`` is not read when ``beta`` is 0.
    """
    if alpha != 1.0:
        product.mul_(alpha)
    if beta != 0.0 and c is not None:
        # C may have more leading dimensions than the product, or a single column that is broadcast.
        product = torch.add(product, c.expand(*c.shape[:-1], c.shape[-1])[..., columns].float(), alpha=beta)
    if bias is not None:
        product.add_(bias[columns])
    out.copy_(_ACTIVATIONS[activation](product))


def quantised(a: Tensor, b: PackedWeight, *, out: Tensor, trans_a: bool = False, **epilogue: Any) -> None:
    """``a [..., M, K] @ w.T`` for blocks ``w [N, K/32, bytes]``: decoded tile by tile, multiplied in fp32."""
    (blocks,) = b.parts
    n, k = b.shape
    wide = (a.mT if trans_a else a).float()
    rows = _tile_length(blocks.device, k)
    for start in range(0, n, rows):
        columns = slice(start, start + rows)
        product = wide @ gguf.dequantize(blocks[columns], b.scheme).mT
        finish(product, out[..., columns], columns, **epilogue)


def packed_dense(a: Tensor, b: PackedWeight, *, out: Tensor, trans_b: bool = False, **options: Any) -> None:
    """``dense`` with the tensor ``[K, N]`` that ``prepack`` kept."""
    dense(a, b.parts[0], out=out, **options)


def prepack_blocks(weight: Tensor, *, scheme: Scheme, shape: tuple[int, int], trans_b: bool = True) -> PackedWeight:
    """Keep GGUF blocks as they lie in the file, a memory-mapped one included: nothing is copied."""
    return PackedWeight("torch.gguf", scheme, shape, (gguf.as_blocks(weight, scheme, shape),))


def prepack_dense(weight: Tensor, *, scheme: Scheme, shape: tuple[int, int], trans_b: bool = True) -> PackedWeight:
    """Keep the tensor, seen as ``[K, N]``."""
    return PackedWeight("torch.packed_dense", scheme, shape, (weight.mT if trans_b else weight,))


def _tiles(b: Tensor) -> Iterator[slice]:
    """Split the columns of ``b [..., K, N]`` so that a widened tile is small; fp32 needs no widening."""
    n = b.shape[-1]
    columns = max(1, n) if b.dtype == torch.float32 else _tile_length(b.device, b[..., :1].numel())
    return (slice(start, start + columns) for start in range(0, n, columns))


def _tile_length(device: torch.device, elements: int) -> int:
    return max(1, _TILE.get(device.type, 1 << 26) // max(1, elements))


def packed_claims(kernel: str, schemes: frozenset[str], *, priority: int = 0) -> tuple[Claim, Claim]:
    """The claims of a kernel that reads what it packed itself from GGUF blocks: (prepack, gemm)."""
    extent = Range(gguf.GROUP, None)
    prepack = Claim(
        op="prepack",
        kernel=kernel,
        needs={"scheme": OneOf(schemes), "n": Range(0, None), "k": extent, "features": Flags({"trans_b"})},
        priority=priority,
        determinism="run",
        refuse=lambda spec: _refuse_untransposed(kernel, spec),
    )
    gemm = Claim(
        op="gemm",
        kernel=kernel,
        needs={
            "a_dtype": FLOATS,
            "out_dtype": FLOATS,
            "m": Range(0, None),
            "n": Range(0, None),
            "k": extent,
            "scheme": OneOf(schemes),
            "packed": OneOf({kernel}),
            "features": Flags(EPILOGUE | {"trans_a", "batched_a", "strided"}),
        },
        priority=priority,
        determinism="run",
    )
    return prepack, gemm


def _refuse_untransposed(kernel: str, spec: OpSpec) -> list[Refusal]:
    if "trans_b" in spec.fields.get("features", ()):
        return []
    hint = "GGUF blocks run along K: give the weight as [N, K] with trans_b=True"
    return [Refusal(kernel, RefusalCode.layout, "features", "trans_b", "not transposed", hint)]


def kernels(device: Device) -> list[Kernel]:
    """Return the dense product, and packing and product for dense weights and GGUF blocks."""
    extents = {"m": Range(0, None), "n": Range(0, None), "k": Range(0, None)}
    common = {"a_dtype": FLOATS, "out_dtype": FLOATS, "scheme": OneOf({"dense"}), **extents}
    flags = EPILOGUE | {"trans_a", "batched_a", "strided"}
    dense_needs = {**common, "b_dtype": FLOATS, "features": Flags(flags | {"trans_b", "batched_b"})}
    name = "torch.packed_dense"
    packed_needs = {**common, "packed": OneOf({name}), "features": Flags(flags)}
    prepack_needs = {
        "scheme": OneOf({"dense"}),
        "n": extents["n"],
        "k": extents["k"],
        "w_dtype": FLOATS,
        "features": Flags({"trans_b"}),
    }
    prepack_gguf, gemm_gguf = packed_claims("torch.gguf", GGUF_SCHEMES)
    return [
        Kernel(Claim(op="gemm", kernel="torch.gemm", needs=dense_needs, determinism="run"), lambda spec: dense),
        Kernel(Claim(op="gemm", kernel=name, needs=packed_needs, determinism="run"), lambda spec: packed_dense),
        Kernel(Claim(op="prepack", kernel=name, needs=prepack_needs, determinism="run"), lambda spec: prepack_dense),
        Kernel(gemm_gguf, lambda spec: quantised),
        Kernel(prepack_gguf, lambda spec: prepack_blocks),
    ]
