"""Float64 references of every operator: what the contract says, in code that is read rather than run fast.

``reference.attention`` and its like are naive loops. ``reference.attention_blocked`` and its like
compute the same in another structure; both agree to 1e-12 of the natural scale of a result.
Inputs are numpy arrays, ml_dtypes arrays or ``hal.Array``; KV operators return stored elements, the
rest float64.
"""

from hal_ops.reference.cache import kv_copy, kv_gather, kv_write
from hal_ops.reference.elementwise import rms_norm, rope, silu_mul
from hal_ops.reference.matmul import dequantise, gemm
from hal_ops.reference.softmax import attention, merge_attention_states
from hal_ops.reference.values import as_float64, decode, encode, storage

__all__ = [
    "as_float64",
    "attention",
    "decode",
    "dequantise",
    "encode",
    "gemm",
    "kv_copy",
    "kv_gather",
    "kv_write",
    "merge_attention_states",
    "rms_norm",
    "rope",
    "silu_mul",
    "storage",
]
