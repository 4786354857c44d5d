"""The naive references against the blocked ones, and both against answers known exactly."""

import math
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hal.array import Array
from hal.dtype import DType
from hal.errors import ContractError
from hal_ops import gguf, reference
from hal_ops.kv_format import Component, Factor, KVCacheFormat

EXACT = 1e-12
seeds = st.integers(0, 2**32 - 1)


def close(actual, expected, scale=1.0):
    """Equal to 1e-12 of the natural scale; NaN, infinities and their signs at the same places."""
    np.testing.assert_allclose(actual, expected, rtol=EXACT, atol=EXACT * scale)


def x_packed_format(page, heads, dim, v_dim):
    """Keys packed by 2 along D, values token-last: nothing that NHD or HND code would read rightly."""
    keys = (Factor("B"), Factor("H", heads), Factor("D", dim // 2), Factor("N", page), Factor("D", 2))
    values = (Factor("B"), Factor("H", heads), Factor("D", v_dim), Factor("N", page))
    components = (Component("k", dim, "float64", keys), Component("v", v_dim, "float64", values))
    return KVCacheFormat(page_tokens=page, total_kv_heads=heads, head_count=heads, components=components)


def packed_format(page, heads, dim):
    order = (Factor("B"), Factor("H", heads), Factor("N", page), Factor("KV", 2), Factor("D", dim))
    component = Component("kv", dim, "float64", order)
    return KVCacheFormat(page_tokens=page, total_kv_heads=heads, head_count=heads, components=(component,))


def stored(logical, layout, name):
    """A cache ``[pages,N,H,D]`` as the layout stores it."""
    if layout == "NHD":
        return logical
    if layout == "HND":
        return np.ascontiguousarray(logical.swapaxes(1, 2))
    pages, page, heads, dim = logical.shape
    if name == "k":
        return np.ascontiguousarray(logical.reshape(pages, page, heads, dim // 2, 2).transpose(0, 2, 3, 1, 4))
    return np.ascontiguousarray(logical.transpose(0, 2, 3, 1))


@st.composite
def attention_calls(draw):
    rng = np.random.default_rng(draw(seeds))
    lq = draw(st.lists(st.integers(0, 4), max_size=3))
    lk = draw(st.lists(st.integers(0, 7), min_size=len(lq), max_size=len(lq)))
    group, heads, dim, v_dim = draw(st.sampled_from([1, 3])), draw(st.integers(1, 2)), 4, draw(st.sampled_from([2, 6]))
    hq, cells = group * heads, int(np.dot(lq, lk))
    layout = draw(st.sampled_from(["ragged", "NHD", "HND", "format"]))
    call = {"q": rng.normal(size=(sum(lq), hq, dim)) * draw(st.sampled_from([0.0, 1.0, 30.0]))}
    call["q_indptr"] = np.cumsum([0, *lq]).astype(np.int32)
    if layout == "ragged":
        shape = (sum(lk), heads)
        call["kv_indptr"] = np.cumsum([0, *lk]).astype(np.int32)
        call |= {"k": rng.normal(size=(*shape, dim)), "v": rng.normal(size=(*shape, v_dim))}
    else:
        page = draw(st.sampled_from([1, 3, 8]))
        columns = 1 + max(lk, default=0) // page
        pages = columns * len(lq) + 1
        table = rng.permutation(pages)[: columns * len(lq)].reshape(len(lq), columns).astype(np.int32)
        shape = (pages, page, heads)
        chosen = x_packed_format(page, heads, dim, v_dim) if layout == "format" else layout
        k, v = rng.normal(size=(*shape, dim)), rng.normal(size=(*shape, v_dim))
        for b, length in enumerate(lk):  # what lies past a request's end is poison, as are its unused table entries
            for j in range(length, columns * page):
                k[table[b, j // page], j % page] = v[table[b, j // page], j % page] = np.nan
            table[b, -(-length // page) :] = -1
        call |= {"k": stored(k, chosen, "k"), "v": stored(v, chosen, "v"), "layout": chosen}
        call |= {"block_table": table, "kv_lens": np.array(lk, dtype=np.int32)}
    call["causal"] = draw(st.booleans())
    call["window"] = (draw(st.integers(-1, 3)), draw(st.integers(-1, 3)))
    call["softcap"] = draw(st.sampled_from([0.0, 2.0]))
    call["scale"] = draw(st.sampled_from([None, 0.3]))
    cell_shape = st.sampled_from([(cells,), (hq, cells)])
    if draw(st.booleans()):
        call["alibi_slopes"] = rng.uniform(0, 1, hq)
    if draw(st.booleans()):
        call["sinks"] = rng.normal(size=hq)
    if draw(st.booleans()):
        call["mask"] = rng.random(draw(cell_shape)) < 0.6
    if draw(st.booleans()):
        bias = rng.normal(size=draw(cell_shape))
        call["bias"] = np.where(rng.random(bias.shape) < 0.3, -np.inf, bias)
    for name, width in (("k_scale", dim), ("v_scale", v_dim)):
        kind = draw(st.sampled_from([None, (), (heads,), (heads, width), shape]))
        if kind is not None:
            scale = rng.uniform(0.5, 2, kind)
            call[name] = scale.swapaxes(1, 2) if kind == shape and layout == "HND" else scale
    return call


@settings(max_examples=250)
@given(attention_calls(), st.sampled_from([1, 2, 16]))
def test_attention_naive_and_blocked_agree(call, block):
    out, lse = reference.attention(**call)
    out_blocked, lse_blocked = reference.attention_blocked(**call, block=block)
    assert not np.isnan(out).any() and not np.isnan(lse).any()
    # A score of size s carries an error of s * 2**-53, which is a relative error of the weights.
    scale = 1.0 + np.abs(lse[np.isfinite(lse)]).max(initial=0.0)
    close(out_blocked, out, scale * 8)
    close(lse_blocked, lse, scale)


BOTH = pytest.mark.parametrize("attention", [reference.attention, reference.attention_blocked])


def ones(tokens, heads=1, dim=2):
    return np.ones((tokens, heads, dim))


@BOTH
def test_rows_without_keys_are_zero_and_minus_infinity(attention):
    # Lq > Lk: bottom-right alignment leaves the first two of three rows without a key.
    out, lse = attention(ones(3), ones(1), ones(1), q_indptr=[0, 3], kv_indptr=[0, 1])
    assert out[:2].tolist() == [[[0.0, 0.0]]] * 2 and np.isneginf(lse[:2]).all()
    assert out[2].tolist() == [[1.0, 1.0]]
    sink = np.array([-0.7])
    out, lse = attention(ones(3), ones(1), ones(1), q_indptr=[0, 3], kv_indptr=[0, 1], sinks=sink)
    assert not out[:2].any() and (lse[:2] == -0.7).all()


@BOTH
def test_empty_sizes(attention):
    nothing = np.zeros((0, 2, 4))
    out, lse = attention(nothing, nothing, nothing, q_indptr=[0], kv_indptr=[0])
    assert out.shape == (0, 2, 4) and lse.shape == (0, 2)
    out, lse = attention(ones(1), ones(0), ones(0), q_indptr=[0, 1], kv_indptr=[0, 0], causal=False)
    assert not out.any() and np.isneginf(lse).all()


@BOTH
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_disallowed_keys_are_not_touched(attention, poison):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(4, 2, 4)) for _ in range(3))
    call = {"q_indptr": [0, 1], "kv_indptr": [0, 4], "causal": False, "softcap": 5.0}
    call |= {"mask": np.array([True, False, True, True]), "bias": np.array([0.1, 0, -np.inf, 0]), "window": (2, -1)}
    clean = attention(q[:1], k, v, **call)
    k, v = k.copy(), v.copy()
    k[:3], v[:3] = poison, poison  # key 0 is out of the window, 1 is masked, 2 has a bias of -inf
    dirty = attention(q[:1], k, v, **call)
    assert all(np.array_equal(a, b) for a, b in zip(clean, dirty, strict=True))


@BOTH
def test_nan_in_an_allowed_input_propagates(attention):
    k, v = ones(3, heads=2), ones(3, heads=2)
    v[1, 0, 1] = np.nan
    call = {"q_indptr": [0, 3], "kv_indptr": [0, 3]}
    out, lse = attention(ones(3, heads=2), k, v, **call)
    where = np.zeros(out.shape, dtype=bool)
    where[1:, 0, 1] = True
    assert np.array_equal(np.isnan(out), where) and not np.isnan(lse).any()
    k[1, 0, 0] = np.nan
    out, lse = attention(ones(3, heads=2), k, v, **call)
    assert np.isnan(out[1:, 0]).all() and np.isnan(lse[1:, 0]).all() and not np.isnan(out[:, 1]).any()


@BOTH
def test_equal_finite_minima_are_a_plain_mean(attention):
    v = np.arange(3.0).reshape(3, 1, 1)
    bias = np.full(3, np.finfo(np.float32).min)
    q = np.zeros((1, 1, 1))
    out, _ = attention(q, q.repeat(3, 0), v, q_indptr=[0, 1], kv_indptr=[0, 3], bias=bias)
    assert out.item() == pytest.approx(1.0, abs=1e-15)


@BOTH
def test_order_of_softcap_alibi_and_bias(attention):
    """One key: lse is its score, computed here by hand."""
    q, k = np.full((1, 1, 1), 3.0), np.full((2, 1, 1), 2.0)
    call = {"q_indptr": [0, 1], "kv_indptr": [0, 2], "scale": 0.5, "softcap": 4.0, "alibi_slopes": np.array([0.25])}
    _, lse = attention(q, k, k, **call, mask=np.array([True, False]), bias=np.array([0.125, 7.0]))
    assert lse.item() == pytest.approx(4 * math.tanh(3 / 4) - 0.25 + 0.125, abs=1e-15)


@BOTH
def test_extreme_logits(attention):
    k = np.array([5e5, -5e5, 0.0]).reshape(3, 1, 1)
    q = np.ones((1, 1, 1))
    out, lse = attention(q, k, k, q_indptr=[0, 1], kv_indptr=[0, 3], scale=1.0)
    assert out.item() == 5e5 and lse.item() == 5e5


@BOTH
def test_stored_dtypes_are_dequantised(attention):
    q = ones(1)
    k = np.zeros((1, 1, 2))
    codes = np.uint8([[[0x38, 0xB8]]])  # 1 and -1 in e4m3fn, half of that in e4m3fnuz
    for dtype, value in ((DType.float8_e4m3fn, 1.0), (DType.float8_e4m3fnuz, 0.5)):
        out, _ = attention(q, k, Array.host(codes, dtype), q_indptr=[0, 1], kv_indptr=[0, 1], v_scale=2.0)
        assert out.ravel().tolist() == [2 * value, -2 * value]
    bits = np.uint16([[[0x3F80, 0xC000]]])
    out, _ = attention(q, k, Array.host(bits, "bfloat16"), q_indptr=[0, 1], kv_indptr=[0, 1])
    assert out.ravel().tolist() == [1.0, -2.0]


@settings(max_examples=60)
@given(seeds, st.integers(0, 3), st.integers(0, 3))
def test_merge_agrees_and_has_an_identity(seed, tokens, heads):
    rng = np.random.default_rng(seed)
    o_a, o_b = rng.normal(size=(2, tokens, heads, 3))
    lse_a, lse_b = rng.normal(size=(2, tokens, heads)) * 20
    o_a[:1], lse_a[:1] = 0, -np.inf
    lse_b[:, :1], o_b[:, :1] = -np.inf, 0
    naive = reference.merge_attention_states(o_a, lse_a, o_b, lse_b)
    blocked = reference.merge_attention_states_blocked(o_a, lse_a, o_b, lse_b)
    for x, y in zip(naive, blocked, strict=True):
        close(y, x, 100)
    for out, lse in (naive, blocked):
        assert np.array_equal(out[:1], o_b[:1]) and np.array_equal(lse[:1], lse_b[:1])
        assert np.array_equal(out[:, :1], o_a[:, :1]) and np.array_equal(lse[:, :1], lse_a[:, :1])


@BOTH
def test_split_and_merge_is_the_whole(attention):
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(2, 1, 4)), rng.normal(size=(9, 1, 4)), rng.normal(size=(9, 1, 4))
    whole = attention(q, k, v, q_indptr=[0, 2], kv_indptr=[0, 9], causal=False)
    parts = [
        attention(q, k[s], v[s], q_indptr=[0, 2], kv_indptr=[0, len(k[s])], causal=False)
        for s in (np.s_[:4], np.s_[4:])
    ]
    for x, y in zip(reference.merge_attention_states(*parts[0], *parts[1]), whole, strict=True):
        close(x, y)


@st.composite
def gemm_calls(draw):
    rng = np.random.default_rng(draw(seeds))
    m, n, k = draw(st.integers(0, 4)), draw(st.sampled_from([1, 5, 130])), draw(st.sampled_from([0, 1, 7, 130, 260]))
    assume(m * n * k < 80_000)
    call = {"trans_a": draw(st.booleans()), "trans_b": draw(st.booleans())}
    batch = draw(st.sampled_from([((), ()), ((2,), ()), ((), (2,)), ((3, 1), (2,))]))
    a, b = rng.normal(size=(*batch[0], m, k)), rng.normal(size=(*batch[1], k, n))
    call["a"] = a.swapaxes(-1, -2) if call["trans_a"] else a
    call["b"] = b.swapaxes(-1, -2) if call["trans_b"] else b
    call["activation"] = draw(st.sampled_from(["none", "relu", "gelu", "gelu_tanh", "silu"]))
    call["alpha"] = draw(st.sampled_from([1.0, -0.5]))
    call["beta"] = draw(st.sampled_from([0.0, 2.0]))
    lead = np.broadcast_shapes(*batch)
    call["c"] = (
        rng.normal(size=draw(st.sampled_from([(m, n), (*lead, m, n)]))) if call["beta"] else np.full((m, n), np.nan)
    )
    if draw(st.booleans()):
        call["bias"] = rng.normal(size=n)
    blocks = -(-k // 128), -(-n // 128)
    for name, shapes in {
        "a_scale": [(), (m,), (m, blocks[0])],
        "a_zero": [(), (m,)],
        "b_scale": [(), (n,), blocks],
    }.items():
        shape = draw(st.sampled_from([None, *shapes]))
        if shape is not None:
            call[name] = rng.uniform(0.5, 2, shape)
    return call


@settings(max_examples=100)
@given(gemm_calls(), st.sampled_from([1, 32]))
def test_gemm_naive_and_blocked_agree(call, block):
    naive = reference.gemm(**call)
    assert not np.isnan(naive).any()  # beta = 0 leaves the NaN of c unread
    close(reference.gemm_blocked(**call, block=block), naive, 1 + np.abs(naive).max(initial=0))


GEMMS = pytest.mark.parametrize("gemm", [reference.gemm, reference.gemm_blocked])


@GEMMS
def test_gemm_known_answers(gemm):
    a, b = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(gemm(a, b), a @ b)
    np.testing.assert_array_equal(gemm(a.T, b.T, trans_a=True, trans_b=True, alpha=2.0), 2 * (a @ b))
    c = np.ones((2, 4))
    np.testing.assert_array_equal(gemm(a, b, beta=3.0, c=c, bias=np.arange(4.0)), a @ b + 3 + np.arange(4))
    empty = gemm(np.zeros((2, 0)), np.zeros((0, 4)), beta=1.0, c=-c, bias=np.arange(4.0), activation="relu")
    np.testing.assert_array_equal(empty, [[0, 0, 1, 2]] * 2)
    assert gemm(np.zeros((0, 3)), b).shape == (0, 4)
    np.testing.assert_array_equal(
        gemm(np.int8([[100, 100]]), np.int8([[100], [100]]), a_zero=50, a_scale=0.5), [[5000.0]]
    )


@GEMMS
def test_gemm_activations(gemm):
    x = np.array([[-3.0, -0.5, 0.0, 2.0]])
    phi = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x[0]])
    close(gemm(x, np.eye(4), activation="gelu"), x * phi)
    tanh = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    close(gemm(x, np.eye(4), activation="gelu_tanh"), 0.5 * x * (1 + tanh))
    close(gemm(x, np.eye(4), activation="silu"), x / (1 + np.exp(-x)))


@GEMMS
def test_gemm_nan_in_inputs_propagates(gemm):
    a = np.ones((2, 2))
    a[1, 0] = np.nan
    for activation in ("none", "relu", "gelu", "gelu_tanh", "silu"):
        assert np.isnan(gemm(a, np.ones((2, 2)), activation=activation)).tolist() == [[False] * 2, [True] * 2]


@settings(max_examples=40)
@given(seeds, st.sampled_from(sorted(gguf.LAYOUTS)), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_dequantise_agrees_bit_by_bit(seed, scheme, n, blocks, trans_b):
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, blocks, gguf.LAYOUTS[scheme].bytes), dtype=np.uint8)
    header = gguf.LAYOUTS[scheme].header
    raw[..., :header] = rng.normal(size=(n, blocks, header // 2)).astype("<f2").view(np.uint8)
    shape = (n, blocks * 32)
    naive = reference.dequantise(raw, scheme=scheme, shape=shape, trans_b=trans_b)
    blocked = reference.dequantise_blocked(raw, scheme=scheme, shape=shape, trans_b=trans_b)
    assert naive.shape == (shape if trans_b else shape[::-1])
    np.testing.assert_array_equal(blocked, naive)
    single = gguf.decode(scheme, raw, shape)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, naive.reshape(shape) if trans_b else naive.T, rtol=2**-23, atol=2**-22)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_mean_what_the_gguf_library_says(name):
    """The library's own quantiser writes the blocks, and its own dequantiser reads them."""
    library = pytest.importorskip("gguf")
    kind, scheme = library.GGMLQuantizationType[name], f"gguf_{name.lower()}"
    weight = np.random.default_rng(5).normal(size=(3, 64)).astype(np.float32)
    raw = library.quants.quantize(weight, kind)
    assert raw.shape == (3, gguf.row_bytes(scheme, 64))
    expected = library.quants.dequantize(raw, kind)
    np.testing.assert_array_equal(gguf.decode(scheme, raw, (3, 64)), expected)
    np.testing.assert_array_equal(reference.dequantise(raw, scheme=scheme, shape=(3, 64)).astype(np.float32), expected)


def test_block_sizes_are_checked():
    with pytest.raises(ContractError, match="multiple of 32"):
        gguf.row_bytes("gguf_q4_0", 33)
    with pytest.raises(ContractError, match="one of gguf_q4_0"):
        gguf.row_bytes("dense", 32)
    with pytest.raises(ContractError, match="36 elements"):
        gguf.split("gguf_q4_0", np.zeros(35, np.uint8), (2, 32))


@settings(max_examples=60)
@given(seeds, st.sampled_from(["NHD", "HND", "format", "packed"]), st.sampled_from([1, 3]), st.booleans())
def test_kv_write_and_gather_agree(seed, kind, page, scaled):
    rng = np.random.default_rng(seed)
    pages, heads, dim = 5, 2, 4
    v_dim = dim if kind == "packed" else 6
    k, v = rng.normal(size=(4, heads, dim)), rng.normal(size=(4, heads, v_dim))
    slots = rng.permutation(np.arange(-1, pages * page))[:3]  # fewer slots than rows
    slots[0] = rng.choice([slots[0], -1, pages * page + 1])
    layout = {"format": x_packed_format(page, heads, dim, v_dim), "packed": packed_format(page, heads, dim)}.get(
        kind, kind
    )
    call = {"layout": layout}
    if scaled:
        token = (pages, heads, page) if kind == "HND" else (pages, page, heads)
        call["k_scale"], call["v_scale"] = rng.uniform(0.5, 2, token), rng.uniform(0.5, 2, heads)
    if kind == "packed":
        caches = [rng.normal(size=(pages, heads, page, 2 * dim))] * 2
    else:
        caches = [stored(rng.normal(size=(pages, page, heads, d)), layout, n) for d, n in ((dim, "k"), (v_dim, "v"))]
    naive = reference.kv_write(k, v, *caches, slots, **call)
    blocked = reference.kv_write_blocked(k, v, *caches, slots, **call)
    for x, y, before in zip(naive, blocked, caches, strict=True):
        np.testing.assert_array_equal(x, y)
        changed = 0 if scaled else np.count_nonzero(x != before)
        assert changed <= 3 * heads * max(dim, v_dim)
    table, lens = rng.permutation(pages)[:4].reshape(2, 2), rng.integers(0, 2 * page + 1, 2)
    for x, y in zip(
        reference.kv_gather(*naive, table, lens, layout=layout),
        reference.kv_gather_blocked(*naive, table, lens, layout=layout),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


WRITES = pytest.mark.parametrize("kv_write", [reference.kv_write, reference.kv_write_blocked])


@WRITES
def test_kv_write_stores_where_the_slot_says(kv_write):
    k = np.arange(1.0, 5).reshape(4, 1, 1)
    before = np.zeros((2, 2, 1, 1))
    after, _ = kv_write(k, k, before, before, [3, -1, 0, 4])
    assert after.ravel().tolist() == [3.0, 0.0, 0.0, 1.0] and not before.any()


@WRITES
def test_kv_write_saturates_and_copies_bits(kv_write):
    k = np.array([1e6, -1e6, 2.5, np.nan]).reshape(1, 1, 4)
    after, _ = kv_write(k, k, np.zeros((1, 1, 1, 4), np.int8), np.zeros((1, 1, 1, 4), np.int8), [0], k_scale=0.5)
    assert after.ravel().tolist() == [127, -128, 5, 0]
    fp8 = Array.host(np.zeros((1, 1, 1, 4), np.uint8), "float8_e4m3fn")
    after, _ = kv_write(k, k, fp8, fp8, [0])
    assert after.ravel().tolist() == [0x7E, 0xFE, 0x42, 0x7F]
    bits = Array.host(np.uint16([[[0x7FC1, 0x8000, 1, 0xFF80]]]), "bfloat16")  # a NaN's payload survives
    cache = Array.host(np.zeros((1, 1, 1, 4), np.uint16), "bfloat16")
    after, _ = kv_write(bits, bits, cache, cache, [0])
    assert after.dtype == np.uint16 and after.ravel().tolist() == [0x7FC1, 0x8000, 1, 0xFF80]


@pytest.mark.parametrize("kv_copy", [reference.kv_copy, reference.kv_copy_blocked])
def test_kv_copy_is_a_snapshot(kv_copy):
    cache = np.arange(4.0)[:, None]
    assert kv_copy([cache, -cache], [[0, 1], [1, 2], [3, 3]])[0].ravel().tolist() == [0, 0, 1, 3]
    assert kv_copy([cache], np.zeros((0, 2), np.int64))[0].ravel().tolist() == [0, 1, 2, 3]


@settings(max_examples=30)
@given(seeds, st.sampled_from([1, 3, 4]), st.sampled_from([1, 2, 5]), st.booleans(), st.booleans())
def test_kv_convert_agrees_and_comes_back(seed, src_page, dst_page, scaled, packed):
    rng = np.random.default_rng(seed)
    heads, dim, lens = 2, 4, [int(n) for n in rng.integers(0, 7, 2)]
    size = {"kv_heads": heads, "head_dim": dim, "layer_ids": (4, 2), "dtype": "float64"}
    src_format = KVCacheFormat.hnd(page_tokens=src_page, **size)
    dst_format = KVCacheFormat.nhd(page_tokens=dst_page, **size)
    if packed:
        component = packed_format(dst_page, heads, dim).components
        dst_format = KVCacheFormat(
            page_tokens=dst_page, layer_ids=(4, 2), total_kv_heads=heads, head_count=heads, components=component
        )
    src = [rng.normal(size=src_format.shape(c, 14)) for _ in (4, 2) for c in src_format.components]
    dst = [rng.normal(size=dst_format.shape(c, 14)) for _ in (4, 2) for c in dst_format.components]
    src_table, dst_table = (rng.permutation(14)[: 2 * 7].reshape(2, 7) for _ in range(2))
    call = {"src_table": src_table, "dst_table": dst_table, "kv_lens": lens}
    if scaled:
        call["src_scales"] = {"k": rng.uniform(0.5, 2, heads)}
        call["dst_scales"] = {"v": rng.uniform(0.5, 2, (14, dst_page, heads))}
    naive = reference.kv_convert(src, src_format, dst, dst_format, **call)
    for x, y in zip(naive, reference.kv_convert_blocked(src, src_format, dst, dst_format, **call), strict=True):
        np.testing.assert_array_equal(x, y)
    if not scaled:
        empty = [np.zeros_like(x) for x in src]
        back = {"src_table": dst_table, "dst_table": src_table, "kv_lens": lens}
        returned = reference.kv_convert(naive, dst_format, empty, src_format, **back)
        for layer in (0, 2):
            old, new = (
                reference.kv_gather(*arrays[layer : layer + 2], src_table, lens, layout="HND")
                for arrays in (src, returned)
            )
            assert np.array_equal(old[0], new[0]) and np.array_equal(old[1], new[1])


@settings(max_examples=60)
@given(seeds, st.integers(0, 3), st.booleans(), st.booleans())
def test_companions_agree(seed, tokens, interleaved, residual):
    rng = np.random.default_rng(seed)
    x, weight, rest = rng.normal(size=(tokens, 6)), rng.normal(size=6), rng.normal(size=(tokens, 6))
    close(reference.silu_mul_blocked(x), reference.silu_mul(x))
    call = (x, weight, 1e-6)
    if residual:
        for a, b in zip(
            reference.rms_norm(*call, residual=rest), reference.rms_norm_blocked(*call, residual=rest), strict=True
        ):
            close(a, b)
    else:
        close(reference.rms_norm_blocked(*call), reference.rms_norm(*call))
    angles = rng.normal(size=(9, 2))
    q, k, at = rng.normal(size=(tokens, 3, 6)), rng.normal(size=(tokens, 1, 6)), rng.integers(0, 9, tokens)
    naive = reference.rope(q, k, at, np.cos(angles), np.sin(angles), interleaved=interleaved)
    blocked = reference.rope_blocked(q, k, at, np.cos(angles), np.sin(angles), interleaved=interleaved)
    for a, b, before in zip(naive, blocked, (q, k), strict=True):
        close(a, b)
        np.testing.assert_array_equal(a[..., 4:], before[..., 4:])
        close(np.linalg.norm(a, axis=-1), np.linalg.norm(before, axis=-1))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"])
def test_decode_and_encode_agree_with_ml_dtypes(name):
    kind, dtype = np.dtype(getattr(ml_dtypes, name)), DType(name)
    bits = np.arange(2 ** (8 * kind.itemsize)).astype(f"u{kind.itemsize}")
    values = reference.decode(bits, dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        np.testing.assert_array_equal(values, bits.view(kind).astype(np.float64))
    np.testing.assert_array_equal(reference.as_float64(bits.view(kind)), values)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(reference.encode(values[finite], dtype), bits[finite])
    assert np.isnan(reference.decode(reference.encode(np.array([np.nan, -np.nan]), dtype), dtype)).all()
    between = np.sort(values[finite])
    middle = (between[1:] + between[:-1]) / 2  # every tie
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = middle.astype(kind).view(bits.dtype)
    np.testing.assert_array_equal(
        reference.decode(reference.encode(middle, dtype), dtype), reference.decode(expected, dtype)
    )


def test_encode_of_numpy_dtypes():
    values = np.array([1.5, 2.5, -300.0, np.inf, -np.inf])
    assert reference.encode(values, DType.int8).tolist() == [2, 2, -128, 127, -128]
    assert reference.encode(values, DType.float16).dtype == np.float16
    assert reference.storage(values.astype(ml_dtypes.bfloat16)).dtype == np.uint16
