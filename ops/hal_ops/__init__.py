"""HAL operators: what is computed. Contracts, validation, references, costs, and the functions that engines call.

>>> import numpy as np
>>> import hal_ops
>>> a = np.eye(2, dtype="float32")
>>> hal_ops.gemm(a, a).tolist()
[[1.0, 0.0], [0.0, 1.0]]
"""

from hal import match
from hal.types import RefusalCode
from hal_ops.activation import silu_mul
from hal_ops.attention import attention
from hal_ops.gemm import gemm
from hal_ops.kv import kv_copy, kv_gather, kv_write
from hal_ops.kv_convert import kv_convert
from hal_ops.kv_format import Component, Factor, KVCacheFormat, KVIdentity, Scale
from hal_ops.merge import merge_attention_states
from hal_ops.norm import rms_norm
from hal_ops.plan import AttentionPlan, plan_attention
from hal_ops.prepack import prepack
from hal_ops.rope import rope
from hal_ops.scheme import PackedWeight, Scheme
from hal_ops.spec import spec

__version__ = "0.1.0"
__all__ = [
    "AttentionPlan",
    "Component",
    "Factor",
    "KVCacheFormat",
    "KVIdentity",
    "PackedWeight",
    "Scale",
    "Scheme",
    "attention",
    "gemm",
    "kv_convert",
    "kv_copy",
    "kv_gather",
    "kv_write",
    "merge_attention_states",
    "plan_attention",
    "prepack",
    "rms_norm",
    "rope",
    "silu_mul",
    "spec",
]

match.FIELD_CODES.update(
    dict.fromkeys(("layout", "page", "paged", "table", "src_layout", "dst_layout"), RefusalCode.layout)
)
