"""ort.gqa and ort.attention against the float64 reference: alignment, windows, poison, empty rows, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from hypothesis import given, settings
from hypothesis import strategies as st

from hal import match
from hal_onnxruntime import attention, gqa, onnx_attention, probe
from hal_ops import reference
from hal_ops.plan import plan_attention
from hal_ops.spec import spec

TOLERANCE = {"float32": 3e-6, "float16": 2e-3}
KERNELS = {kernel.claim.kernel: kernel for kernel in attention.kernels()}
MIXED = [(1, 1), (1, 9), (4, 9), (9, 9), (0, 3), (3, 0), (7, 3), (0, 0), (1, 0)]  # (Lq, Lk), empty rows included


class Case:
    """Inputs of one call. Paged caches have one page per request, in shuffled order, and NaN in all that is unused."""

    def __init__(self, lengths, *, paged=True, heads=(6, 2), dims=(16, 16), page=16, dtype="float32", pages=None):
        rng = self.rng = np.random.default_rng(len(lengths))
        q_lens, self.kv_lens = np.array(lengths, dtype=np.int32).reshape(-1, 2).T
        self.q_indptr = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        self.q = rng.standard_normal((int(q_lens.sum()), heads[0], dims[0])).astype(dtype)
        self.index = {"q_indptr": self.q_indptr}
        batch, total = len(q_lens), int(self.kv_lens.sum())
        if not paged:
            self.k, self.v = (rng.standard_normal((total, heads[1], dim)).astype(dtype) for dim in dims)
            self.index["kv_indptr"] = np.concatenate([[0], np.cumsum(self.kv_lens)]).astype(np.int32)
            self.layout = {}
        else:
            pages = rng.permutation(batch + 2)[:batch] if pages is None else np.array(pages)
            self.k, self.v = (np.full((batch + 2, heads[1], page, dim), np.nan, dtype) for dim in dims)
            for at, length in zip(pages, self.kv_lens, strict=True):
                for cache, dim in ((self.k, dims[0]), (self.v, dims[1])):
                    cache[at, :, :length] = rng.standard_normal((heads[1], length, dim))
            table = np.where(self.kv_lens > 0, pages, -1).astype(np.int32)[:, None]  # unused entries may hold anything
            self.index |= {"kv_lens": self.kv_lens, "block_table": table}
            self.layout = {"layout": "HND"}
        self.out = np.full((len(self.q), heads[0], dims[1]), 7, dtype)

    def run(self, kernel, *, scale=0.3, **options):
        plan = plan_attention(**self.index)
        kernel(self.q, self.k, self.v, plan, out=self.out, scale=scale, **options)
        return self.out

    def expected(self, *, scale=0.3, **options):
        with np.errstate(all="ignore"):
            return reference.attention(self.q, self.k, self.v, scale=scale, **self.index, **self.layout, **options)[0]

    def check(self, kernel, **options):
        before = self.k.copy(), self.v.copy()
        got, want = self.run(kernel, **options).astype(np.float64), self.expected(**options)
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[str(self.q.dtype)], equal_nan=True)
        assert (got[want == 0] == 0).all()  # empty rows exactly
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, (self.k, self.v), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("left", [-1, 0, 1, 3, 40])
def test_gqa_mixed_batch(dtype, softcap, left):
    Case(MIXED, dtype=dtype).check(gqa.attention, softcap=softcap, window=(left, -1))


@pytest.mark.parametrize("dim", [8, 24, 64, 80, 128])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (5, 1)])
def test_gqa_heads_and_dims(dim, heads):
    Case([(3, 5), (1, 12)], dims=(dim, dim), heads=heads).check(gqa.attention, scale=dim**-0.5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gqa_decode_batch_is_one_call(dtype, monkeypatch):
    calls = []
    run = gqa.session.run_in_place
    monkeypatch.setattr(gqa.session, "run_in_place", lambda *a: (calls.append(1), run(*a)))
    Case([(1, 9), (1, 1), (1, 16), (1, 4)], pages=[1, 2, 3, 4], dtype=dtype).check(gqa.attention)
    assert len(calls) == 1
    Case([(1, 9), (1, 1), (1, 16)], pages=[2, 1, 0], dtype=dtype).check(gqa.attention)
    assert len(calls) == 4


def test_gqa_chunked_prefill_equals_whole(monkeypatch):
    monkeypatch.setattr(onnx_attention, "Q_BLOCK", 5)
    case = Case([(13, 16), (16, 16)])
    case.check(gqa.attention)
    case.check(gqa.attention, window=(3, -1), softcap=1.5)


def test_gqa_full_page_and_long_request():
    Case([(1, 300), (40, 300)], page=300, heads=(2, 1), dims=(8, 8)).check(gqa.attention)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.0])
def test_scale_of_any_sign(scale):
    Case([(3, 5)]).check(gqa.attention, scale=scale)
    Case([(3, 5)], paged=False).check(onnx_attention.attention, scale=scale)


def test_gqa_leaves_read_only_and_strided_caches_to_attention():
    case = Case([(2, 5), (1, 9)])
    for name in "kv":
        getattr(case, name).flags.writeable = False
    case.check(gqa.attention)
    case = Case([(2, 5), (1, 9)])
    both = np.stack([case.k, case.v], axis=3)  # K and V interleaved per token
    case.k, case.v = both[:, :, :, 0], both[:, :, :, 1]
    case.check(gqa.attention)


def test_strided_query_and_output():
    case = Case([(3, 5), (1, 9)])
    wide = np.zeros((len(case.q), 3, *case.q.shape[1:]), np.float32)
    wide[:, 0] = case.q
    case.q, case.out = wide[:, 0], wide[:, 2]
    case.check(gqa.attention)
    case.check(onnx_attention.attention, causal=False)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (2, -1), (-1, 1), (0, 0), (3, 2)])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_attention_mixed_batch(paged, causal, window, softcap):
    case = Case(MIXED, paged=paged, dims=(8, 12))
    case.check(onnx_attention.attention, causal=causal, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_attention_mask(dtype, per_head, softcap):
    lengths = [(4, 9), (3, 3), (2, 0), (7, 3), (1, 5)]
    case = Case(lengths, paged=False, dtype=dtype)
    cells = sum(a * b for a, b in lengths)
    mask = case.rng.random((6, cells) if per_head else cells) > 0.4
    mask[..., :9] = False  # a whole row
    case.check(onnx_attention.attention, mask=mask, softcap=softcap)
    case.check(onnx_attention.attention, mask=mask, causal=False, softcap=softcap)


def test_attention_blocks_of_queries(monkeypatch):
    monkeypatch.setattr(onnx_attention, "Q_BLOCK", 3)
    case = Case([(8, 11), (7, 7)], paged=False)
    case.check(onnx_attention.attention)
    case.check(onnx_attention.attention, window=(1, -1))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("window", [(-1, -1), (2, -1)])
@pytest.mark.parametrize("kernel", [gqa.attention, onnx_attention.attention])
def test_disallowed_keys_do_not_leak_and_allowed_ones_propagate(kernel, window, which, bad):
    for position in (0, 4, 8):
        case = Case([(9, 9), (1, 9), (3, 9)], heads=(2, 1), dims=(8, 8))
        for at in case.index["block_table"][:, 0]:
            getattr(case, which)[at, :, position] = bad
        got, want = case.run(kernel, window=window), case.expected(window=window)
        clean = np.isfinite(want)
        assert clean.any() or position == 0
        np.testing.assert_allclose(got[clean], want[clean], rtol=0, atol=3e-6)
        assert np.isnan(got[np.isnan(want)]).all()


def test_nothing_to_do():
    for paged in (True, False):
        for lengths in ([], [(0, 0)], [(0, 5)]):
            case = Case(lengths, paged=paged)
            assert case.run(gqa.attention if paged else onnx_attention.attention).shape == (0, 6, 16)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), max_size=4),
    left=st.integers(-1, 6),
    softcap=st.sampled_from([0.0, 1.0]),
    ratio=st.sampled_from([1, 3, 4]),
)
def test_both_kernels_follow_the_reference(lengths, left, softcap, ratio):
    case = Case(lengths, heads=(2 * ratio, 2), dims=(8, 8), page=12)
    for kernel in (gqa.attention, onnx_attention.attention):
        case.check(kernel, window=(left, -1), softcap=softcap)


def test_same_call_same_bits_and_threads():
    case = Case([(9, 9), (1, 12), (4, 16)])
    expected = case.run(gqa.attention).copy()

    def call(_):
        plan, out = plan_attention(**case.index), np.empty_like(case.out)
        for _ in range(20):
            gqa.attention(case.q, case.k, case.v, plan, out=out, scale=0.3)
            assert np.array_equal(out, expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(8)))


def test_installed_version_is_probed():
    assert probe.window_counts_self() in (True, False)
    assert probe.masks_after_softcap()


def _spec(**changes):
    fields = {
        **dict.fromkeys(("q_dtype", "kv_dtype", "out_dtype"), "float32"),
        "head_dim": 64,
        "v_head_dim": 64,
        "kv_heads": 3,
        "gqa_ratio": 3,
        "paged": True,
        "layout": "HND",
        "page": 512,
        "table": "one",
        "kv_slack": "any",
        "max_q": 1,
        "max_kv": 128,
        "batch": 1,
    }
    return spec("attention", **{**fields, **changes})


def _refusals(kernel, **changes):
    return " ".join(str(refusal) for refusal in match.refusals(KERNELS[kernel].claim, _spec(**changes)))


@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        ("ort.gqa", {}, ""),
        ("ort.gqa", {"features": {"window_left", "softcap", "strided"}}, ""),
        ("ort.gqa", {"v_head_dim": 32}, "ort.attention takes them"),
        ("ort.gqa", {"head_dim": 60, "v_head_dim": 60}, "a multiple of 8"),
        ("ort.gqa", {"q_dtype": "bfloat16"}, "no bfloat16"),
        ("ort.gqa", {"table": "many"}, "one contiguous buffer per request"),
        ("ort.gqa", {"layout": "NHD"}, "one of HND"),
        ("ort.gqa", {"features": {"lse"}}, "lse"),
        ("ort.gqa", {"features": {"noncausal"}}, "noncausal"),
        ("ort.gqa", {"paged": False, "page": None, "table": None, "layout": "NHD"}, "paged"),
        ("ort.attention", {"paged": False, "page": None, "table": None, "layout": "NHD"}, ""),
        ("ort.attention", {"features": {"noncausal", "softcap", "mask_per_head"}, "v_head_dim": 32}, ""),
        ("ort.attention", {"layout": "NHD"}, "KVCacheFormat.hnd"),
        ("ort.attention", {"features": {"bias"}}, "bias"),
        ("ort.attention", {"features": {"alibi", "sinks"}}, "alibi, sinks"),
    ],
)
def test_claims(kernel, changes, reason):
    found = _refusals(kernel, **changes)
    assert reason in found if reason else not found
    if not reason:
        assert KERNELS[kernel].build(_spec(**changes))


def test_softcap_is_refused_where_the_mask_comes_first(monkeypatch):
    monkeypatch.setattr(probe, "masks_after_softcap", lambda: False)
    assert "upgrade onnxruntime" in _refusals("ort.attention", features={"softcap"})
