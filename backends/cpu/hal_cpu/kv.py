"""Paged cache on the host processor: the torch kernels."""

from hal_torch.kv import kernels

__all__ = ["kernels"]
