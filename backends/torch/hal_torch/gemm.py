"""Matrix products: dense, and with weights that stay quantised in GGUF blocks.

``D = act(alpha * (A @ B) + beta * C + bias)``, accumulated in fp32 and rounded once to the dtype of ``out``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hal.constraint import Constraint, Flags, OneOf, Range
from hal.types import Claim, Device, DType, Kernel, OpSpec, Refusal, RefusalCode
from hal_ops.gguf import LAYOUTS, WEIGHTS
from hal_ops.scheme import PackedWeight, Scheme
from hal_torch import gguf

FLOATS = OneOf({DType.float32, DType.float16, DType.bfloat16})
EPILOGUE = {"bias", "relu", "gelu", "gelu_tanh", "silu", "alpha", "beta"}
GGUF_SCHEMES = frozenset(LAYOUTS)

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
        finish(product, out, columns, bias=bias, activation=activation, alpha=alpha, beta=beta, c=c)


def finish(
    product: Tensor,
    out: Tensor,
    columns: slice | None = None,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Tensor | None = None,
    **unused: Any,
) -> None:
    """Apply all that follows the product, fp32 ``[..., M, N]`` which is consumed, and write ``out``.

    With ``columns`` the product holds those alone, while ``bias``, ``c`` and ``out`` are whole. ``c`` broadcasts to
    ``out`` and is not read when ``beta`` is 0.
    """
    if columns is not None:
        c = None if c is None else c.expand(out.shape)[..., columns]
        bias = None if bias is None else bias[columns]
        out = out[..., columns]
    if alpha != 1.0:
        product.mul_(alpha)
    if beta != 0.0 and c is not None:
        product.add_(c, alpha=beta)
    if bias is not None:
        product.add_(bias)
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
        finish(product, out, columns, **epilogue)


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
    extent = Range(WEIGHTS, None)
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
    any_size, scheme = Range(0, None), OneOf({"dense"})
    flags = EPILOGUE | {"trans_a", "batched_a", "strided"}
    common: dict[str, Constraint] = {
        "a_dtype": FLOATS,
        "out_dtype": FLOATS,
        "scheme": scheme,
        "m": any_size,
        "n": any_size,
        "k": any_size,
    }
    plain = {**common, "b_dtype": FLOATS, "features": Flags(flags | {"trans_b", "batched_b"})}
    kept = {**common, "packed": OneOf({"torch.packed_dense"}), "features": Flags(flags)}
    keeping: dict[str, Constraint] = {
        "scheme": scheme,
        "n": any_size,
        "k": any_size,
        "w_dtype": FLOATS,
        "features": Flags({"trans_b"}),
    }
    gguf_prepack, gguf_gemm = packed_claims("torch.gguf", GGUF_SCHEMES)

    def claim(op: str, kernel: str, needs: dict[str, Constraint]) -> Claim:
        return Claim(op=op, kernel=kernel, needs=needs, determinism="run")

    return [
        Kernel(claim("gemm", "torch.gemm", plain), lambda spec: dense),
        Kernel(claim("gemm", "torch.packed_dense", kept), lambda spec: packed_dense),
        Kernel(claim("prepack", "torch.packed_dense", keeping), lambda spec: prepack_dense),
        Kernel(gguf_gemm, lambda spec: quantised),
        Kernel(gguf_prepack, lambda spec: prepack_blocks),
    ]
