"""Cost models against counts made one pair, key and byte at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.errors import ContractError
from hal_ops.cost import Cost, cost
from hal_ops.kv_format import KVCacheFormat

lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 13)), max_size=3)
edges = st.integers(-1, 6)


@settings(max_examples=200, deadline=None)
@given(lengths, st.booleans(), edges, edges, st.sampled_from([None, 1, 4]), st.booleans())
def test_attention_counts_allowed_pairs(requests, causal, left, right, page, lse):
    pairs, keys, pages = 0, 0, 0
    for lq, lk in requests:
        seen = set()
        for i in range(lq):
            p = i + lk - lq
            for j in range(lk):
                if (not causal or j <= p) and (left < 0 or j >= p - left) and (right < 0 or j <= p + right):
                    pairs += 1
                    seen.add(j)
        keys += len(seen)
        pages += len({j // page for j in seen}) if page else 0
    total, batch = sum(lq for lq, _ in requests), len(requests)
    hq, hkv, dk, dv = 4, 2, 8, 6
    tables = (batch + 1) + (batch + pages if page else batch + 1)  # q_indptr, then kv_lens and table, or kv_indptr
    got = cost(
        "attention",
        q_lens=[lq for lq, _ in requests],
        kv_lens=[lk for _, lk in requests],
        q_heads=hq,
        kv_heads=hkv,
        head_dim=dk,
        v_head_dim=dv,
        q_dtype="float32",
        kv_dtype="int8",
        out_dtype="float16",
        page=page,
        causal=causal,
        window=(left, right),
        lse=lse,
    )
    assert got == Cost(
        flops=pairs * hq * (2 * dk + 2 * dv),
        bytes_read=total * hq * dk * 4 + keys * hkv * (dk + dv) + 4 * tables,
        bytes_written=total * hq * dv * 2 + (4 * total * hq if lse else 0),
    )


def test_gemm_counts_multiply_adds():
    m, n, k = 3, 5, 64
    adds = sum(2 for _ in range(m) for _ in range(n) for _ in range(k))
    facts = {"m": m, "n": n, "k": k, "a_dtype": "float16"}
    dense = cost("gemm", **facts)
    assert dense == Cost(adds, 2 * (m * k + k * n), 2 * m * n)
    full = cost("gemm", **facts, bias=True, beta=True)
    assert full.bytes_read - dense.bytes_read == 2 * n + 2 * m * n
    packed = cost("gemm", **facts, scheme="gguf_q4_1")
    assert packed.bytes_read == 2 * m * k + n * 2 * 20
    batched = cost("gemm", **facts, batch=7)
    assert batched == Cost(7 * adds, 2 * (7 * m * k + k * n), 2 * 7 * m * n)
    assert cost("gemm", **facts, batch=7, batched_b=True).bytes_read == 2 * 7 * (m * k + k * n)


def test_prepack_moves_the_weight_once():
    assert cost("prepack", n=4, k=64, w_dtype="bfloat16") == Cost(0, 512, 512)
    assert cost("prepack", n=4, k=64, scheme="gguf_q8_0") == Cost(0, 4 * 2 * 34, 4 * 2 * 34)


def test_merge_counts():
    tokens, heads, dim = 3, 2, 4
    state = tokens * heads * (dim * 2 + 4)
    got = cost("merge_attention_states", tokens=tokens, heads=heads, head_dim=dim, dtype="float16")
    assert got == Cost(3 * tokens * heads * dim, 2 * state, state)


def test_kv_counts():
    shape = {"kv_heads": 2, "head_dim": 8, "v_head_dim": 4}
    assert cost("kv_write", tokens=3, **shape, k_dtype="float32", kv_dtype="int8") == Cost(0, 3 * (96 + 8), 3 * 24)
    lens, page = [5, 0, 4], 4
    entries = sum(len({j // page for j in range(n)}) for n in lens)
    got = cost("kv_gather", kv_lens=lens, page=page, **shape, kv_dtype="float16")
    assert got == Cost(0, 9 * 48 + 4 * (3 + entries), 9 * 48 + 4 * 4)
    assert cost("kv_copy", pages=3, page_bytes=100) == Cost(0, 3 * 100 + 3 * 16, 300)
    src = KVCacheFormat.nhd(dtype="float32", page_tokens=4, **shape, layer_ids=(0, 1))
    dst = KVCacheFormat.hnd(dtype="float16", page_tokens=2, **shape, layer_ids=(0, 1))
    got = cost("kv_convert", kv_lens=lens, src_format=src, dst_format=dst)
    assert got == Cost(0, 9 * 2 * 96 + 4 * (3 + entries + 3 + 2), 9 * 2 * 48)


def test_small_companions():
    assert cost("rms_norm", tokens=2, dim=8, dtype="float16", weight_dtype="float32") == Cost(70, 64, 32)
    assert cost("rms_norm", tokens=2, dim=8, dtype="float16", residual=True) == Cost(86, 80, 64)
    assert cost("silu_mul", tokens=2, dim=8, dtype="float32") == Cost(64, 128, 64)
    # 2 tokens, 3 + 1 heads, 2 pairs a head, 6 operations a pair; cos and sin of 2 angles; int64 positions.
    got = cost("rope", tokens=2, q_heads=3, kv_heads=1, rot_dim=4, dtype="float16", cos_dtype="float32")
    assert got == Cost(2 * 4 * 2 * 6, 2 * 16 * 2 + 2 * 2 * 2 * 4 + 2 * 8, 64)


def test_unknown_names_are_refused():
    with pytest.raises(ContractError, match="one of attention"):
        cost("conv2d")
    with pytest.raises(ContractError, match="k_dtype"):
        cost("kv_write", tokens=1, kv_heads=1, head_dim=1)
    with pytest.raises(ContractError, match="colour"):
        cost("silu_mul", tokens=1, dim=1, dtype="float32", colour=1)
