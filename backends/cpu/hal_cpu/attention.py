"""Attention and merging of partial results on the host processor: the torch kernels."""

from hal_torch.attention import kernels

__all__ = ["kernels"]
