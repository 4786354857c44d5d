"""Float64 references of every operator: what the contract says, in code that is read rather than run fast.

``reference.attention`` and its like are naive loops. ``reference.attention_blocked`` and its like
compute the same in another structure; both agree to 1e-12 of the natural scale of a result.
Inputs are numpy arrays, ml_dtypes arrays or ``hal.Array``; KV operators return stored elements, the
rest float64.
"""

from hal_ops.reference.cache import kv_convert, kv_copy, kv_gather, kv_write
from hal_ops.reference.cache_blocked import kv_convert_blocked, kv_copy_blocked, kv_gather_blocked, kv_write_blocked
from hal_ops.reference.elementwise import rms_norm, rope, silu_mul
from hal_ops.reference.elementwise_blocked import rms_norm_blocked, rope_blocked, silu_mul_blocked
from hal_ops.reference.matmul import dequantise, gemm
from hal_ops.reference.matmul_blocked import dequantise_blocked, gemm_blocked
from hal_ops.reference.softmax import attention, merge_attention_states
from hal_ops.reference.softmax_blocked import attention_blocked, merge_attention_states_blocked
from hal_ops.reference.values import as_float64, decode, dtype_of, encode, storage

__all__ = [
    "as_float64",
    "attention",
    "attention_blocked",
    "decode",
    "dequantise",
    "dequantise_blocked",
    "dtype_of",
    "encode",
    "gemm",
    "gemm_blocked",
    "kv_convert",
    "kv_convert_blocked",
    "kv_copy",
    "kv_copy_blocked",
    "kv_gather",
    "kv_gather_blocked",
    "kv_write",
    "kv_write_blocked",
    "merge_attention_states",
    "merge_attention_states_blocked",
    "rms_norm",
    "rms_norm_blocked",
    "rope",
    "rope_blocked",
    "silu_mul",
    "silu_mul_blocked",
    "storage",
]
