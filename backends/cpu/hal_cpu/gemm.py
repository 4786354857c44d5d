"""Matrix products on the host processor: the torch kernels, and the embedding-bag one before them."""

from __future__ import annotations

from hal.types import Device, Kernel
from hal_cpu import embedding_bag
from hal_torch import gemm


def kernels(device: Device) -> list[Kernel]:
    """Return every candidate for gemm and prepack."""
    found = gemm.kernels(device)
    if embedding_bag.available():
        prepack, product = gemm.packed_claims(embedding_bag.NAME, gemm.GGUF_SCHEMES, priority=10)
        found += [
            Kernel(prepack, lambda spec: embedding_bag.prepack),
            Kernel(product, lambda spec: embedding_bag.gemm),
        ]
    return found
