"""torch.attention and torch.merge against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from hal.types import DType, OpSpec  # noqa: E402
from hal_ops import reference  # noqa: E402
from hal_ops.plan import plan_attention  # noqa: E402
from hal_torch import attention, schedule  # noqa: E402

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case:
    """Random inputs of one call; ``poison`` fills every key that no request owns with NaN."""

    def __init__(self, lengths, *, heads=(6, 2), dims=(8, 8), page=4, layout=None, dtype=torch.float32, seed=0):
        self.rng = np.random.default_rng(seed)
        self.q_lens, self.kv_lens = np.array(lengths, dtype=np.int64).reshape(-1, 2).T
        self.heads, self.dims, self.layout, self.page = heads, dims, layout, page
        self.q = self.random(int(self.q_lens.sum()), heads[0], dims[0]).to(dtype)
        self.q_indptr = np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32)
        if layout is None:
            self.kv_indptr, total = np.concatenate([[0], np.cumsum(self.kv_lens)]).astype(np.int32), sum(self.kv_lens)
            self.k, self.v = (self.random(int(total), heads[1], dim).to(dtype) for dim in dims)
            self.where = {"kv_indptr": self.kv_indptr}
        else:
            self._page(dtype)

    def random(self, *shape):
        return torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32))

    def _page(self, dtype):
        used = -(-self.kv_lens // self.page)
        columns, pages = int(used.max(initial=0)) + 2, int(used.sum()) + 3
        ids = iter(self.rng.permutation(pages))
        table = np.full((len(used), columns), 2**31 - 1, dtype=np.int32)
        table[::2] = -1
        shapes = [(pages, self.page, self.heads[1], dim) for dim in self.dims]
        caches = [torch.full(shape, float("nan")) for shape in shapes]
        for b, count in enumerate(used):
            table[b, :count] = [next(ids) for _ in range(count)]
            for cache in caches:
                for column in range(count):
                    live = min(self.page, int(self.kv_lens[b]) - column * self.page)
                    cache[int(table[b, column]), :live] = self.random(live, *cache.shape[2:])
        self.k, self.v = (
            c.to(dtype) if self.layout == "NHD" else c.transpose(1, 2).contiguous().to(dtype) for c in caches
        )
        self.where = {"block_table": table, "kv_lens": self.kv_lens.astype(np.int32)}

    def run(self, *, want_lse=True, kv_slack="any", out_dtype=None, **options):
        """Run the kernel; outputs start as NaN, so that a row that is not written shows."""
        fields = {"kv_slack": kv_slack} | ({"layout": self.layout} if self.layout else {})
        kernel = attention.build_attention(OpSpec("attention", (1, 0), fields))
        plan = plan_attention(q_indptr=self.q_indptr, **self.where)
        shape = (len(self.q), self.heads[0], self.dims[1])
        out = torch.full(shape, float("nan"), dtype=out_dtype or self.q.dtype)
        lse = torch.full(shape[:2], float("nan")) if want_lse else None
        kernel(self.q, self.k, self.v, plan, out=out, lse=lse, **{"scale": self.dims[0] ** -0.5} | options)
        return out, lse

    def expected(self, **options):
        numpy = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        arrays = (x.double().numpy() for x in (self.q, self.k, self.v))
        extra = {"layout": self.layout} if self.layout else {}
        return reference.attention(*arrays, q_indptr=self.q_indptr, **self.where, **extra, **numpy)

    def check(self, *, out_dtype=None, **options):
        out, lse = self.run(out_dtype=out_dtype, **options)
        want, want_lse = self.expected(**options)
        tolerance = TOLERANCE[out.dtype]
        np.testing.assert_allclose(out.double().numpy(), want, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(lse.double().numpy(), want_lse, rtol=5e-6, atol=5e-6)
        empty = np.isneginf(want_lse)
        assert not out[torch.from_numpy(empty)].any()
        bare, _ = self.run(want_lse=False, out_dtype=out_dtype, **options)
        np.testing.assert_allclose(bare.double().numpy(), want, rtol=tolerance, atol=tolerance)

    def cells(self):
        return int((self.q_lens * self.kv_lens).sum())


MIXED = [(1, 9), (5, 13), (0, 4), (1, 4), (3, 0), (1, 1), (6, 2), (1, 17), (1, 0), (0, 0), (4, 4)]
OPTIONS = {
    "plain": {},
    "noncausal": {"causal": False},
    "left": {"window": (3, -1)},
    "left0": {"window": (0, -1)},
    "right": {"causal": False, "window": (-1, 2)},
    "both": {"causal": False, "window": (2, 1)},
    "causal_right": {"window": (4, 3)},
    "softcap": {"softcap": 0.7},
    "scale": {"scale": 1.3},
    "sinks": {"sinks": torch.tensor([0.3, -2.0, 5.0, 0.0, 1.0, float("-inf")])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 1.0, 0.0, 2.0])},
    "alibi_window": {"alibi_slopes": torch.linspace(0.1, 1, 6), "window": (2, 2), "causal": False},
}
ALL = OPTIONS["sinks"] | OPTIONS["alibi"] | {"softcap": 2.0, "window": (5, -1), "scale": 0.9}


@pytest.mark.parametrize("layout", [None, "NHD", "HND"])
@pytest.mark.parametrize("name", [*OPTIONS, "all"])
def test_options(name, layout):
    Case(MIXED, layout=layout).check(**(ALL if name == "all" else OPTIONS[name]))


@pytest.mark.parametrize("layout", [None, "NHD"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_mask_and_bias(layout, per_head, causal):
    case = Case(MIXED, layout=layout)
    shape = (6, case.cells()) if per_head else (case.cells(),)
    mask = torch.from_numpy(case.rng.random(shape) > 0.6)
    bias = case.random(*shape)
    bias[torch.from_numpy(case.rng.random(shape) > 0.7)] = float("-inf")
    sinks = OPTIONS["sinks"]["sinks"]
    for options in ({"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias, "sinks": sinks, "softcap": 1.5}):
        case.check(causal=causal, **options)


def test_equal_finite_biases_are_a_plain_mean():
    case = Case([(2, 3)])
    bias = torch.full((6,), torch.finfo(torch.float32).min)
    out, _ = case.run(bias=bias, causal=False, scale=0.0)
    torch.testing.assert_close(out[0], case.v.mean(0).repeat_interleave(3, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [None, "NHD", "HND"])
def test_half_types(dtype, layout):
    case = Case(MIXED, layout=layout, dtype=dtype, dims=(8, 12))
    case.check(**ALL)
    case.check(out_dtype=torch.float32)


@pytest.mark.parametrize(("heads", "dims"), [((1, 1), (4, 4)), ((5, 1), (3, 7)), ((7, 7), (16, 2)), ((8, 2), (1, 1))])
@pytest.mark.parametrize("page", [1, 3, 16])
def test_shapes(heads, dims, page):
    for layout in (None, "NHD", "HND"):
        Case(MIXED, heads=heads, dims=dims, page=page, layout=layout).check()


@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(0, 5)], [(3, 0), (1, 0)]])
@pytest.mark.parametrize("layout", [None, "NHD"])
def test_nothing_to_do(lengths, layout):
    Case(lengths, layout=layout).check()


@pytest.mark.parametrize("layout", [None, "NHD", "HND"])
@pytest.mark.parametrize("options", [{}, ALL, {"causal": False, "window": (2, 3)}])
def test_small_scratch_chunks_and_tiles(monkeypatch, layout, options):
    monkeypatch.setattr(schedule, "SCRATCH", 7 * 4 * 2 * 8)  # seven keys
    monkeypatch.setattr(schedule, "TILE_ROWS", 2)
    Case([(1, 9), (9, 23), (1, 30), (1, 3), (1, 4), (4, 3)], layout=layout).check(**options)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scratch", [32 << 20, 7 * 4 * 2 * 8])
def test_bad_keys_reach_only_the_rows_that_see_them(monkeypatch, value, mask, scratch):
    monkeypatch.setattr(schedule, "SCRATCH", scratch)
    case = Case([(6, 8), (1, 9), (1, 7)])
    options = {"mask": torch.from_numpy(case.rng.random(case.cells()) > 0.4)} if mask else {"window": (3, -1)}
    case.v[4, 0, 2] = case.v[16, 1, 1] = case.v[-1, 0, 0] = value  # disallowed for some rows, allowed for others
    case.k[0] = case.v[0] = float("nan")  # outside the window of all but none
    if mask:
        cells = options["mask"][:48].view(6, 8)
        cells[:, 0] = False
    want, want_lse = case.expected(**options)
    out, lse = case.run(**options)
    np.testing.assert_allclose(out.numpy(), want, rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=3e-6, atol=3e-6)


def test_bad_allowed_key_spreads_to_its_request_alone():
    case = Case([(1, 4), (1, 4), (1, 3)])
    case.k[1, 0, 0] = float("nan")
    out, _ = case.run()
    assert out[0, :3].isnan().all()
    assert out[0, 3:].isfinite().all()
    assert out[1:].isfinite().all()


def test_strides():
    case, dense = (Case(MIXED, layout="NHD", seed=3) for _ in range(2))
    both = torch.stack([case.k, case.v], 1)  # K and V as views of one tensor
    case.k, case.v = both[:, 0], both[:, 1]
    case.q = torch.cat([case.q, case.q], -1)[..., :8]
    torch.testing.assert_close(case.run()[0], dense.run()[0])
    packed = torch.cat([dense.k, dense.v], -1)
    case.k, case.v = packed[..., :8], packed[..., 8:]
    torch.testing.assert_close(case.run()[0], dense.run()[0])
    ragged = Case(MIXED, seed=3)
    want = ragged.run()[0]
    ragged.k = ragged.k.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(ragged.run()[0], want)


def test_aliased_tables_and_reuse_of_the_plan():
    case = Case([(2, 8), (2, 8)], layout="NHD")
    case.where["block_table"][1] = case.where["block_table"][0]
    case.check()


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 18)), max_size=5),
    layout=st.sampled_from([None, "NHD", "HND"]),
    window=st.tuples(st.integers(-1, 8), st.integers(-1, 8)),
    causal=st.booleans(),
    page=st.sampled_from([1, 2, 8]),
    heads=st.sampled_from([(3, 1), (4, 4)]),
    scratch=st.sampled_from([32 << 20, 256]),
    seed=st.integers(0, 9),
)
def test_random_batches(lengths, layout, window, causal, page, heads, scratch, seed):
    before, schedule.SCRATCH = schedule.SCRATCH, scratch
    try:
        case = Case(lengths, layout=layout, page=page, heads=heads, dims=(4, 3), seed=seed)
        case.check(causal=causal, window=window)
    finally:
        schedule.SCRATCH = before


def merge(o_a, lse_a, o_b, lse_b):
    (kernel,) = (k for k in attention.kernels(None) if k.claim.op == "merge_attention_states")
    out, lse = torch.empty_like(o_a), torch.empty_like(lse_a)
    kernel.build(OpSpec("merge_attention_states", (1, 0), {}))(o_a, lse_a, o_b, lse_b, out=out, lse_out=lse)
    return out, lse


def test_merge_against_reference():
    rng = np.random.default_rng(0)
    o_a, o_b = (torch.from_numpy(rng.standard_normal((5, 3, 4), dtype=np.float32)) for _ in range(2))
    lse_a, lse_b = (torch.from_numpy(rng.standard_normal((5, 3), dtype=np.float32) * 20) for _ in range(2))
    lse_a[0], lse_b[1], lse_a[2], lse_b[2] = (float("-inf"),) * 4
    o_a[0] = float("nan")  # of an empty state
    want, want_lse = reference.merge_attention_states(*(x.numpy() for x in (o_a, lse_a, o_b, lse_b)))
    out, lse = merge(o_a, lse_a, o_b, lse_b)
    np.testing.assert_allclose(out.numpy(), want, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=2e-6)
    assert torch.equal(out[0], o_b[0])
    assert torch.equal(out[1], o_a[1])
    assert not out[2].any()


def test_merge_in_place():
    o_a, o_b = torch.randn(2, 4, 2, 3)
    lse_a, lse_b = torch.randn(2, 4, 2)
    want, want_lse = merge(o_a, lse_a, o_b, lse_b)
    kernel = attention.kernels(None)[1].build(OpSpec("merge_attention_states", (1, 0), {}))
    kernel(o_a, lse_a, o_b, lse_b, out=o_a, lse_out=lse_a)
    assert torch.equal(o_a, want)
    assert torch.equal(lse_a, want_lse)


def test_claims():
    claim = attention.kernels(None, prefix="cuda")[0].claim
    assert claim.kernel == "cuda.attention"
    assert claim.needs["features"].admits({"lse", "mask_per_head"})
    assert not claim.needs["features"].admits({"k_scale_head"})
    assert not claim.needs["determinism"].admits("batch")
    assert not claim.needs["kv_dtype"].admits(DType.float8_e4m3fn)
