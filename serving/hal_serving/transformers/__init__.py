"""transformers models through HAL's operators: ``use_hal(model, prefill=, decode=)``."""

from hal_serving.transformers.adapter import Handle, use_hal
from hal_serving.transformers.cache import PagedCache
from hal_serving.transformers.linear import HalEmbedding, HalLinear

__all__ = ["HalEmbedding", "HalLinear", "Handle", "PagedCache", "use_hal"]
