"""torch.gemm, torch.packed_dense, torch.gguf and cpu.embedding_bag against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from hal.match import refusals  # noqa: E402
from hal.types import Device, DType  # noqa: E402
from hal_cpu import embedding_bag  # noqa: E402
from hal_ops import reference  # noqa: E402
from hal_ops.gguf import LAYOUTS, row_bytes  # noqa: E402
from hal_ops.scheme import Scheme  # noqa: E402
from hal_ops.spec import spec  # noqa: E402
from hal_torch import gemm, gguf  # noqa: E402

DEVICE = Device(id="cpu:0", plugin="cpu", vendor="test", tensor_device="cpu")
PACKERS = {
    "torch.gguf": (gemm.prepack_blocks, gemm.quantised),
    embedding_bag.NAME: (embedding_bag.prepack, embedding_bag.gemm),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = ["none", "relu", "gelu", "gelu_tanh", "silu"]
STEP = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half a unit in the last place


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).to(dtype)


def blocks(scheme, n, k, seed=0):
    """Blocks of random codes whose weights are near 1 in size."""
    rng = np.random.default_rng(seed)
    layout = LAYOUTS[scheme]
    raw = rng.integers(0, 256, (n, k // 32, layout.bytes), dtype=np.uint8)
    d = rng.uniform(0.5, 1.5, (n, k // 32, 1)) / 2 ** (layout.bits - 1)
    header = np.concatenate([d, rng.uniform(-1.2, -0.8, d.shape)], -1) if layout.has_minimum else d
    raw[..., : layout.header] = header.astype("<f2").view(np.uint8)
    return torch.from_numpy(raw)


def close(got, want, k):
    """One rounding to the dtype of the output beside fp32 accumulation over ``k`` terms of size 1."""
    error = np.abs(got.double().numpy() - want)
    assert not np.isnan(error).any()
    bound = 1.01 * STEP[got.dtype] * np.abs(want) + 1e-6 * (np.sqrt(k) + 2)
    assert (error <= bound).all(), float((error / bound).max())


@settings(max_examples=60)
@given(st.data())
def test_dense_against_reference(data):
    m, n, k = (data.draw(st.integers(0, 9), label) for label in "mnk")
    trans_a, trans_b = data.draw(st.booleans()), data.draw(st.booleans())
    lead_a, lead_b = data.draw(
        st.sampled_from([((), ()), ((2,), ()), ((), (3,)), ((2, 1), (3,)), ((1,), (2,)), ((0,), ())])
    )
    dtype, out_dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    alpha, beta = data.draw(st.sampled_from([(1.0, 0.0), (0.5, 0.0), (1.0, 2.0), (-2.0, 0.25)]))
    a = numbers(*lead_a, *((k, m) if trans_a else (m, k)), dtype=dtype)
    b = numbers(*lead_b, *((n, k) if trans_b else (k, n)), dtype=dtype, seed=1)
    shape = (*np.broadcast_shapes(lead_a, lead_b), m, n)
    c = data.draw(st.sampled_from([numbers(*shape, seed=2), numbers(n, seed=2), numbers(m, 1, seed=2)]))
    options = {"trans_a": trans_a, "trans_b": trans_b, "alpha": alpha, "beta": beta}
    options["activation"] = data.draw(st.sampled_from(ACTIVATIONS))
    bias = data.draw(st.sampled_from([None, numbers(n, seed=3)]))
    out = torch.full(shape, float("nan"), dtype=out_dtype)
    gemm.dense(a, b, out=out, bias=bias, c=c, **options)
    arrays = (x.double().numpy() for x in (a, b))
    want = reference.gemm(*arrays, bias=None if bias is None else bias.numpy(), c=c.numpy(), **options)
    close(out, want, k)


def test_c_is_not_read_when_beta_is_zero():
    a, b, c = numbers(2, 4), numbers(4, 3), torch.full((2, 3), float("nan"))
    out = torch.full((2, 3), float("nan"))
    gemm.dense(a, b, out=out, c=c, alpha=2.0)
    close(out, 2 * (a.double() @ b.double()).numpy(), 4)


def test_no_terms_leave_bias_and_c():
    out = torch.empty(2, 3)
    gemm.dense(
        torch.empty(2, 0),
        torch.empty(0, 3),
        out=out,
        bias=torch.ones(3),
        beta=2.0,
        c=torch.ones(2, 3),
        activation="relu",
    )
    assert (out == 3).all()


def test_strides():
    a = numbers(10, 12)[::2, ::3]
    b = numbers(4, 14, 2, seed=1)[..., 0].flip(1)[:, ::2]
    out = torch.zeros(5, 14)[:, ::2]
    gemm.dense(a, b, out=out)
    close(out, a.double().numpy() @ b.double().numpy(), 4)
    broadcast = numbers(1, 4).expand(3, 4)
    out = torch.empty(3, 7)
    gemm.dense(broadcast, b, out=out)
    close(out, broadcast.double().numpy() @ b.double().numpy(), 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_widened_tiles_cover_every_column(dtype, monkeypatch):
    monkeypatch.setitem(gemm._TILE, "cpu", 64)
    a, b, bias, c = numbers(3, 40, dtype=dtype), numbers(11, 40, dtype=dtype, seed=1), numbers(11), numbers(3, 11)
    out = torch.empty(3, 11)
    gemm.dense(a, b, out=out, trans_b=True, bias=bias, beta=1.0, c=c)
    close(out, a.double().numpy() @ b.double().numpy().T + bias.numpy() + c.numpy(), 40)


def test_packed_dense():
    weight = numbers(5, 8)
    packed = gemm.prepack_dense(weight, scheme=Scheme.parse("dense"), shape=(5, 8), trans_b=True)
    assert packed.parts[0].data_ptr() == weight.data_ptr()
    out = torch.empty(2, 5)
    gemm.packed_dense(numbers(2, 8), packed, out=out, trans_b=False)
    close(out, numbers(2, 8).double().numpy() @ weight.double().numpy().T, 8)


@pytest.mark.parametrize("scheme", sorted(LAYOUTS))
def test_decoding_equals_the_gguf_library(scheme):
    quants = pytest.importorskip("gguf")
    raw = blocks(scheme, 3, 64)
    kind = quants.GGMLQuantizationType[scheme.removeprefix("gguf_").upper()]
    want = quants.dequantize(raw.numpy().reshape(3, -1), kind)
    np.testing.assert_array_equal(gguf.dequantize(raw, Scheme.parse(scheme)).numpy(), want)


@pytest.mark.parametrize("kernel", PACKERS)
@pytest.mark.parametrize("scheme", sorted(LAYOUTS))
@pytest.mark.parametrize(("n", "k"), [(1, 32), (5, 96), (40, 64), (200, 32), (0, 32)])
def test_blocks_against_reference(kernel, scheme, n, k, monkeypatch):
    monkeypatch.setitem(gemm._TILE, "cpu", 128)
    prepack, multiply = PACKERS[kernel]
    raw = blocks(scheme, n, k)
    packed = prepack(raw.flatten(), scheme=Scheme.parse(scheme), shape=(n, k), trans_b=True)
    assert (packed.kernel, packed.shape) == (kernel, (n, k))
    weight = reference.dequantise(raw.numpy(), scheme=scheme, shape=(n, k))
    for m in (0, 1, 3, 12):
        for dtype in DTYPES:
            a = numbers(m, k, dtype=dtype)
            out = torch.full((m, n), float("nan"), dtype=dtype)
            multiply(a, packed, out=out)
            close(out, a.double().numpy() @ weight.T, k)


@pytest.mark.parametrize("kernel", PACKERS)
def test_blocks_with_everything(kernel):
    prepack, multiply = PACKERS[kernel]
    raw = blocks("gguf_q4_1", 70, 64)
    packed = prepack(raw, scheme=Scheme.parse("gguf_q4_1"), shape=(70, 64))
    weight = reference.dequantise(raw.numpy(), scheme="gguf_q4_1", shape=(70, 64))
    a, bias, c = numbers(2, 64, 3, dtype=torch.bfloat16), numbers(70, seed=1), numbers(2, 3, 70, seed=2)
    options = {"trans_a": True, "activation": "silu", "alpha": 0.5, "beta": -1.0}
    out = torch.empty(2, 3, 70)
    multiply(a, packed, out=out, bias=bias, c=c, **options)
    close(out, reference.gemm(a.double().numpy(), weight.T, bias=bias.numpy(), c=c.numpy(), **options), 64)


def test_blocks_are_not_copied(tmp_path):
    path = tmp_path / "weight"
    path.write_bytes(blocks("gguf_q4_1", 4, 64).numpy().tobytes())
    mapped = torch.from_file(str(path), size=4 * row_bytes("gguf_q4_1", 64), dtype=torch.uint8)
    packed = gemm.prepack_blocks(mapped, scheme=Scheme.parse("gguf_q4_1"), shape=(4, 64))
    assert packed.parts[0].data_ptr() == mapped.data_ptr()


@pytest.mark.parametrize(("scheme", "limit"), [("gguf_q4_0", 1.05), ("gguf_q4_1", 1.2), ("gguf_q8_0", 1.05)])
def test_repacked_blocks_stay_small(scheme, limit):
    raw = blocks(scheme, 384, 256)
    packed = embedding_bag.prepack(raw, scheme=Scheme.parse(scheme), shape=(384, 256))
    assert sum(part.nbytes for part in packed.parts if part is not None) <= limit * raw.nbytes


@pytest.mark.parametrize("kernel", PACKERS)
def test_a_group_of_equal_inputs_does_not_cancel(kernel):
    """Sums of x * code grow with the mean of x; fp32 must still see the small differences."""
    prepack, multiply = PACKERS[kernel]
    raw = blocks("gguf_q4_1", 64, 576)
    packed = prepack(raw, scheme=Scheme.parse("gguf_q4_1"), shape=(64, 576))
    weight = reference.dequantise(raw.numpy(), scheme="gguf_q4_1", shape=(64, 576))
    a = numbers(1, 576) * 0.1 + 1
    out = torch.empty(1, 64)
    multiply(a, packed, out=out)
    close(out, a.double().numpy() @ weight.T, 576)


def test_claims_name_what_is_served():
    claims = {(kernel.claim.op, kernel.claim.kernel): kernel.claim for kernel in gemm.kernels(DEVICE)}
    fields = {"a_dtype": DType.bfloat16, "out_dtype": DType.float32, "m": 1, "n": 8, "k": 64}
    dense = {**fields, "b_dtype": DType.bfloat16, "scheme": "dense"}
    packed = {**fields, "scheme": "gguf_q4_1", "packed": "torch.gguf"}

    def wrong(kernel, **wanted):
        return [refusal.field for refusal in refusals(claims["gemm", kernel], spec("gemm", **wanted))]

    assert not wrong(
        "torch.gemm", **dense, features={"trans_a", "trans_b", "bias", "silu", "alpha", "beta", "batched_b"}
    )
    assert not wrong("torch.gguf", **packed, features={"bias", "batched_a"}, determinism="run")
    assert wrong("torch.gguf", **packed, features={"trans_b"}) == ["features"]
    assert wrong("torch.gguf", **packed, determinism="batch") == ["determinism"]
    assert set(wrong("torch.gemm", **{**dense, "a_dtype": DType.int8}, a_quant="int8")) == {"a_dtype", "a_quant"}
    assert set(wrong("torch.gemm", **packed)) == {"scheme", "packed"}
    untransposed = spec("prepack", scheme="gguf_q4_0", n=8, k=64)
    assert [r.field for r in refusals(claims["prepack", "torch.gguf"], untransposed)] == ["features"]
