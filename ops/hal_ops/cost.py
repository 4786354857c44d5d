"""The least work an operator can do: floating-point operations, and bytes that must be read and written.

Used to rank kernels, to plan, and to say how far a measured time is from the device's ceiling. Every
input byte that matters is read once and every output byte written once, index arrays included. A
multiply-add counts as two operations; an exponential, division or square root as one. Of attention only
the two matrix products are counted (Dao et al. 2022, appendix), over the (query, key) pairs that are allowed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hal.dtype import DType
from hal.errors import ContractError
from hal_ops import gguf

if TYPE_CHECKING:
    from hal_ops.kv_format import KVCacheFormat

AnyDType = DType | str
INDEX, SLOT, LSE = 4, 8, 4  # bytes of an int32 index, an int64 slot or position, a float32 lse


@dataclass(frozen=True)
class Cost:
    """Work of one call."""

    flops: int
    bytes_read: int
    bytes_written: int


def cost(op: str, **facts: Any) -> Cost:
    """Return the cost of one call of ``op``; the facts are the keywords of the function of that name below.

    >>> cost("gemm", m=1, n=8, k=4, a_dtype="float32", b_dtype="float32")
    Cost(flops=64, bytes_read=144, bytes_written=32)

    Raises:
        ContractError: an unknown operator, a missing or an unknown fact.
    """
    model = _MODELS.get(op)
    if model is None:
        raise ContractError("op", "one of " + ", ".join(sorted(_MODELS)), repr(op))
    signature = inspect.signature(model)
    try:
        signature.bind(**facts)
    except TypeError as error:
        raise ContractError("facts", f"{op}{signature}", str(error)) from None
    return model(**facts)


def attention(
    *,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    q_dtype: AnyDType,
    v_head_dim: int | None = None,
    kv_dtype: AnyDType | None = None,
    out_dtype: AnyDType | None = None,
    page: int | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    lse: bool = False,
) -> Cost:
    """Attention over requests of ``q_lens`` queries and ``kv_lens`` keys; ``page`` None means ragged."""
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    pairs = keys = entries = 0
    for lq, lk in zip(q_lens, kv_lens, strict=True):
        seen, first, end = _allowed(lq, lk, causal, window)
        pairs += seen
        keys += end - first
        entries += _pages(first, end, page) if page else 0
    total, batch = sum(q_lens), len(q_lens)
    tables = (batch + 1) + (batch + entries if page else batch + 1)
    return Cost(
        flops=2 * pairs * q_heads * (head_dim + v_head_dim),
        bytes_read=_bytes(total * q_heads * head_dim, q_dtype)
        + _bytes(keys * kv_heads * (head_dim + v_head_dim), kv_dtype or q_dtype)
        + tables * INDEX,
        bytes_written=_bytes(total * q_heads * v_head_dim, out_dtype or q_dtype) + total * q_heads * LSE * lse,
    )


def merge_attention_states(*, tokens: int, heads: int, head_dim: int, dtype: AnyDType) -> Cost:
    """Two states of o ``[tokens,heads,head_dim]`` and lse ``[tokens,heads]`` into one."""
    state = _bytes(tokens * heads * head_dim, dtype) + tokens * heads * LSE
    return Cost(flops=3 * tokens * heads * head_dim, bytes_read=2 * state, bytes_written=state)


def gemm(
    *,
    m: int,
    n: int,
    k: int,
    a_dtype: AnyDType,
    b_dtype: AnyDType | None = None,
    scheme: str = "dense",
    out_dtype: AnyDType | None = None,
    batch: int = 1,
    batched_b: bool = False,
    bias: bool = False,
    beta: bool = False,
) -> Cost:
    """``batch`` products ``[m,k] @ [k,n]``, of which b is one for all unless ``batched_b``.

    ``scheme`` is "dense" (b of ``b_dtype``) or a GGUF scheme; bias and c have the dtype of the result.
    """
    out_dtype = out_dtype or a_dtype
    b_bytes = _weight_bytes(n, k, scheme, b_dtype or a_dtype) * (batch if batched_b else 1)
    out_bytes = _bytes(batch * m * n, out_dtype)
    return Cost(
        flops=2 * batch * m * n * k,
        bytes_read=_bytes(batch * m * k, a_dtype) + b_bytes + _bytes(n, out_dtype) * bias + out_bytes * beta,
        bytes_written=out_bytes,
    )


def prepack(*, n: int, k: int, scheme: str = "dense", w_dtype: AnyDType = DType.float32) -> Cost:
    """A weight ``[n,k]`` stored anew in as many bytes."""
    size = _weight_bytes(n, k, scheme, w_dtype)
    return Cost(flops=0, bytes_read=size, bytes_written=size)


def kv_write(
    *,
    tokens: int,
    kv_heads: int,
    head_dim: int,
    k_dtype: AnyDType,
    v_head_dim: int | None = None,
    kv_dtype: AnyDType | None = None,
) -> Cost:
    """Keys and values of ``tokens`` tokens with a slot into their cache."""
    elements = tokens * kv_heads * (head_dim + (head_dim if v_head_dim is None else v_head_dim))
    return Cost(
        flops=0,
        bytes_read=_bytes(elements, k_dtype) + tokens * SLOT,
        bytes_written=_bytes(elements, kv_dtype or k_dtype),
    )


def kv_gather(
    *,
    kv_lens: Sequence[int],
    kv_heads: int,
    head_dim: int,
    kv_dtype: AnyDType,
    page: int,
    v_head_dim: int | None = None,
) -> Cost:
    """Paged keys and values of all requests into dense ones."""
    dims = head_dim + (head_dim if v_head_dim is None else v_head_dim)
    size = _bytes(sum(kv_lens) * kv_heads * dims, kv_dtype)
    entries = len(kv_lens) + sum(_pages(0, length, page) for length in kv_lens)
    return Cost(flops=0, bytes_read=size + entries * INDEX, bytes_written=size + (len(kv_lens) + 1) * INDEX)


def kv_copy(*, pages: int, page_bytes: int) -> Cost:
    """``pages`` pages, each of ``page_bytes`` over all tensors, to other places; two indices a page."""
    return Cost(flops=0, bytes_read=pages * (page_bytes + 2 * SLOT), bytes_written=pages * page_bytes)


def kv_convert(*, kv_lens: Sequence[int], src_format: KVCacheFormat, dst_format: KVCacheFormat) -> Cost:
    """The tokens of all requests from one format into another, all layers."""

    def token_bytes(form: KVCacheFormat) -> int:
        return len(form.layer_ids) * sum(component.bytes_per_token for component in form.components)

    entries = sum(_pages(0, n, form.page_tokens) for n in kv_lens for form in (src_format, dst_format))
    return Cost(
        flops=0,
        bytes_read=sum(kv_lens) * token_bytes(src_format) + (len(kv_lens) + entries) * INDEX,
        bytes_written=sum(kv_lens) * token_bytes(dst_format),
    )


def rms_norm(
    *, tokens: int, dim: int, dtype: AnyDType, weight_dtype: AnyDType | None = None, residual: bool = False
) -> Cost:
    """Rows ``[tokens,dim]``; with a residual, that is read and written as well."""
    size = _bytes(tokens * dim, dtype)
    return Cost(
        flops=tokens * (dim * (5 if residual else 4) + 3),  # per row: mean, + eps and the root's reciprocal
        bytes_read=size * (2 if residual else 1) + _bytes(dim, weight_dtype or dtype),
        bytes_written=size * (2 if residual else 1),
    )


def rope(
    *,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    rot_dim: int,
    dtype: AnyDType,
    cos_dtype: AnyDType | None = None,
) -> Cost:
    """The rotated ``rot_dim`` dimensions of every head of q and k, in place."""
    elements = tokens * (q_heads + kv_heads) * rot_dim
    size = _bytes(elements, dtype)
    angles = _bytes(tokens * rot_dim, cos_dtype or dtype)
    return Cost(flops=3 * elements, bytes_read=size + angles + tokens * SLOT, bytes_written=size)


def silu_mul(*, tokens: int, dim: int, dtype: AnyDType) -> Cost:
    """``[tokens, 2*dim]`` into ``[tokens, dim]``: exp, add, divide, and the product with the other half."""
    return Cost(
        flops=4 * tokens * dim,
        bytes_read=_bytes(2 * tokens * dim, dtype),
        bytes_written=_bytes(tokens * dim, dtype),
    )


_MODELS: dict[str, Callable[..., Cost]] = {
    model.__name__: model
    for model in (
        attention,
        merge_attention_states,
        gemm,
        prepack,
        kv_write,
        kv_gather,
        kv_copy,
        kv_convert,
        rms_norm,
        rope,
        silu_mul,
    )
}


def _allowed(lq: int, lk: int, causal: bool, window: tuple[int, int]) -> tuple[int, int, int]:
    """Allowed pairs of one request, and the interval of keys that any of its queries sees."""
    import numpy as np

    p = np.arange(lq, dtype=np.int64) + lk - lq
    left, right = window
    first = np.maximum(p - left, 0) if left >= 0 else np.zeros_like(p)
    last = np.full_like(p, lk - 1)
    for bound in ([p] if causal else []) + ([p + right] if right >= 0 else []):
        last = np.minimum(last, bound)
    seen = np.maximum(last - first + 1, 0)
    if not seen.any():
        return 0, 0, 0
    # Both ends of the interval move by at most one from query to query, so that their union has no gap.
    return int(seen.sum()), int(first[seen > 0].min()), int(last[seen > 0].max()) + 1


def _pages(first: int, end: int, page: int) -> int:
    """Pages that hold the tokens ``first`` to ``end - 1``."""
    return (end - 1) // page - first // page + 1 if end > first else 0


def _bytes(elements: int, dtype: AnyDType) -> int:
    return elements * DType.parse(dtype).bits // 8


def _weight_bytes(n: int, k: int, scheme: str, dtype: AnyDType) -> int:
    return _bytes(n * k, dtype) if scheme == "dense" else n * gguf.row_bytes(scheme, k)
