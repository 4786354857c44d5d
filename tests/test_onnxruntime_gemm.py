"""ort.gemm, ort.matmul_const and ort.matmul_nbits against the float64 reference and gguf's own dequantisation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from hal import match
from hal.errors import CompileError, ContractError, OutOfMemory, UnsupportedError
from hal_onnxruntime import gemm, gguf, session
from hal_ops import reference
from hal_ops.scheme import SCHEMES
from hal_ops.spec import spec

GGUF = ["gguf_q4_0", "gguf_q4_1", "gguf_q8_0"]
ACTIVATIONS = ["none", "relu", "gelu", "gelu_tanh", "silu"]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def check(got, want, dtype="float32"):
    np.testing.assert_allclose(got, want, rtol=1e-5 if dtype == "float32" else 1e-3, atol=1e-5)


def blocks(rng, scheme, n, k):
    """Random blocks with zero, negative and large scales among them."""
    raw = rng.integers(0, 256, (n * k // 32, gguf.BLOCK_BYTES[scheme]), dtype=np.uint8)
    halves = 2 if scheme == "gguf_q4_1" else 1
    scales = (rng.standard_normal((len(raw), halves)) * 0.1).astype("<f2")
    scales[::5, 0] = 0
    raw[:, : 2 * halves] = scales.view(np.uint8)
    return raw


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_dense(rng, dtype, trans_a, trans_b):
    a = rng.standard_normal((7, 5) if trans_a else (5, 7)).astype(dtype)
    b = rng.standard_normal((4, 7) if trans_b else (7, 4)).astype(dtype)
    out = np.empty((5, 4), dtype)
    gemm.dense(a, b, trans_a=trans_a, trans_b=trans_b, out=out)
    check(out, reference.gemm(a, b, trans_a=trans_a, trans_b=trans_b), dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", ["dense", "const", "gguf_q4_1"])
def test_epilogue(rng, activation, form):
    scheme = SCHEMES[form if form.startswith("gguf") else "dense"]
    w = blocks(rng, form, 6, 32) if form.startswith("gguf") else rng.standard_normal((6, 32)).astype("float32")
    full = reference.dequantise(w, scheme=scheme.name, shape=(6, 32))
    a, bias, c = (rng.standard_normal(shape).astype("float32") for shape in ((2, 3, 32), (6,), (3, 1)))
    options = {"bias": bias, "activation": activation, "alpha": 0.5, "beta": -2.0, "c": c}
    out = np.empty((2, 3, 6), np.float32)
    if form == "dense":
        gemm.dense(a, w, trans_b=True, out=out, **options)
    else:
        pack = gemm.prepack_dense if form == "const" else gemm.prepack_gguf
        gemm.packed(a, pack(w, scheme=scheme, shape=(6, 32)), out=out, **options)
    check(out, reference.gemm(a, full, trans_b=True, **options))


def test_activations_keep_their_tails():
    x = np.array([[-30.0, -9.0, -1.0, 0.0, 3.0, 30.0, np.nan]], np.float32)
    for activation in ("relu", "silu"):
        out = np.empty_like(x)
        gemm.dense(np.ones((1, 1), np.float32), x, activation=activation, out=out)
        want = reference.gemm(np.ones((1, 1)), x, activation=activation)
        np.testing.assert_allclose(out, want, rtol=1e-6)


@pytest.mark.parametrize("trans", [False, True])
def test_leading_dimensions_broadcast(rng, trans):
    a, b = rng.standard_normal((2, 1, 3, 5)).astype("float32"), rng.standard_normal((4, 5, 6)).astype("float32")
    bias, c = rng.standard_normal(6).astype("float32"), rng.standard_normal((4, 1, 6)).astype("float32")
    if trans:
        a, b = np.ascontiguousarray(a.swapaxes(-1, -2)), np.ascontiguousarray(b.swapaxes(-1, -2))
    options = {"trans_a": trans, "trans_b": trans, "bias": bias, "beta": 3.0, "c": c}
    out = np.empty((2, 4, 3, 6), np.float32)
    gemm.dense(a, b, out=out, **options)
    check(out, reference.gemm(a, b, **options))


def test_strided_operands_and_output(rng):
    a, b = rng.standard_normal((6, 14)).astype("float32")[::2, ::2], rng.standard_normal((4, 7)).astype("float32").T
    wide = np.full((3, 9), 7, np.float32)
    gemm.dense(a, b, out=wide[:, 2:6])
    check(wide[:, 2:6], reference.gemm(a, b))
    assert (wide[:, :2] == 7).all() and (wide[:, 6:] == 7).all()


def test_empty_extents_and_unread_c(rng):
    bias = np.array([1, -2], np.float32)
    out = np.empty((3, 2), np.float32)
    gemm.dense(np.zeros((3, 0), np.float32), np.zeros((0, 2), np.float32), bias=bias, activation="relu", out=out)
    assert out.tolist() == [[1, 0]] * 3
    gemm.dense(np.zeros((2, 1, 3, 0), np.float32), np.zeros((0, 2), np.float32), out=(lead := np.empty((2, 1, 3, 2))))
    assert (lead == 0).all()
    gemm.dense(np.zeros((0, 4), np.float32), np.zeros((4, 2), np.float32), out=np.empty((0, 2), np.float32))
    poison = np.full((3, 2), np.nan, np.float32)
    gemm.dense(np.ones((3, 4), np.float32), np.ones((4, 2), np.float32), beta=0.0, c=poison, out=out)
    assert (out == 4).all()
    packed = gemm.prepack_dense(np.ones((2, 4), np.float32), scheme=SCHEMES["dense"], shape=(2, 4))
    gemm.packed(np.zeros((0, 4), np.float32), packed, out=np.empty((0, 2), np.float32))


def test_float16_overflows_to_infinity_without_a_warning():
    out = np.empty((1, 1), np.float16)
    gemm.dense(np.full((1, 8), 200, np.float16), np.full((8, 1), 200, np.float16), out=out)
    assert np.isinf(out).all()


@pytest.mark.parametrize("scheme", GGUF)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (5, 96), (70, 256)])
def test_gguf_weights_are_exact(rng, scheme, n, k):
    quants = pytest.importorskip("gguf.quants")
    from gguf.constants import GGMLQuantizationType

    raw = blocks(rng, scheme, n, k)
    kind = GGMLQuantizationType[scheme.removeprefix("gguf_").upper()]
    want = quants.dequantize(raw, kind).reshape(n, k)
    packed = gemm.prepack_gguf(raw.reshape(-1), scheme=SCHEMES[scheme], shape=(n, k))
    assert packed.kernel == "ort.matmul_nbits" and packed.shape == (n, k)
    out = np.empty((k, n), np.float32)
    gemm.packed(np.eye(k, dtype=np.float32), packed, out=out)  # every weight by itself
    np.testing.assert_allclose(out.T, want, rtol=2e-6, atol=2e-6 * np.abs(want).max())
    zero = (want.reshape(n, -1, 32) == 0).all(-1)
    if scheme != "gguf_q4_1":  # d = 0
        assert zero.any() and (out.T.reshape(n, -1, 32)[zero] == 0).all()


@pytest.mark.parametrize("scheme", GGUF)
@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gguf_products(rng, scheme, m, dtype):
    raw, a = blocks(rng, scheme, 48, 128), rng.standard_normal((m, 128)).astype(dtype)
    packed = gemm.prepack_gguf(raw, scheme=SCHEMES[scheme], shape=(48, 128))
    raw[:] = 255  # the session has its own copy
    raw = blocks(np.random.default_rng(0), scheme, 48, 128)
    weight = reference.dequantise(raw, scheme=scheme, shape=(48, 128))
    out = np.empty((m, 48), dtype)
    gemm.packed(a, packed, out=out)
    bound = np.abs(a.astype(np.float64)) @ np.abs(weight).T
    error = np.abs(out - a.astype(np.float64) @ weight.T)
    assert (error <= 1e-6 * bound + (6e-4 if dtype == "float16" else 0) * np.abs(out)).all()


def test_gguf_wrong_size(rng):
    with pytest.raises(ContractError, match="1152 bytes"):
        gemm.prepack_gguf(np.zeros(100, np.uint8), scheme=SCHEMES["gguf_q4_0"], shape=(32, 64))


@pytest.mark.parametrize("trans_b", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dense_constant(rng, trans_b, dtype):
    w, a = rng.standard_normal((6, 8)).astype(dtype), rng.standard_normal((2, 3, 8)).astype(dtype)
    packed = gemm.prepack_dense(w if trans_b else w.T, scheme=SCHEMES["dense"], shape=(6, 8), trans_b=trans_b)
    want = reference.gemm(a, w, trans_b=True)
    w[:] = 0  # the session has its own copy
    out = np.empty((2, 3, 6), dtype)
    gemm.packed(a, packed, out=out)
    check(out, want, dtype)
    gemm.packed(np.ascontiguousarray(a.swapaxes(-1, -2)), packed, trans_a=True, out=out)
    check(out, want, dtype)


def test_same_call_same_bits_and_threads(rng):
    packed = gemm.prepack_gguf(blocks(rng, "gguf_q8_0", 64, 64), scheme=SCHEMES["gguf_q8_0"], shape=(64, 64))
    inputs = [rng.standard_normal((m, 64)).astype("float32") for m in (1, 2, 5, 1, 3, 8)]

    def product(a):
        out = np.empty((len(a), 64), np.float32)
        gemm.packed(a, packed, out=out, bias=a[0], activation="silu")
        return out

    expected = [product(a) for a in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            for got, want in zip(pool.map(product, inputs), expected, strict=True):
                assert np.array_equal(got, want)


def _refusals(op, kernel, **fields):
    claim = next(k.claim for k in gemm.kernels() if (k.claim.op, k.claim.kernel) == (op, kernel))
    return " ".join(str(refusal) for refusal in match.refusals(claim, spec(op, **fields)))


def test_claims():
    dense = dict.fromkeys(("a_dtype", "b_dtype", "out_dtype"), "float32") | {"m": 1, "n": 8, "k": 0, "scheme": "dense"}
    assert not _refusals("gemm", "ort.gemm", **dense, features={"trans_b", "bias", "silu", "batched_b", "beta"})
    assert "no bfloat16" in _refusals("gemm", "ort.gemm", **{**dense, "a_dtype": "bfloat16"})
    assert "a_quant" in _refusals("gemm", "ort.gemm", **dense, a_quant="int8")
    assert "b_scale" in _refusals("gemm", "ort.gemm", **dense, features={"b_scale"})
    packed = {"a_dtype": "float16", "out_dtype": "float32", "m": 1, "n": 8, "k": 64, "scheme": "gguf_q4_1"}
    assert not _refusals("gemm", "ort.matmul_nbits", **packed, packed="ort.matmul_nbits")
    assert "packed" in _refusals("gemm", "ort.matmul_nbits", **packed, packed="torch.gguf")
    assert not _refusals("prepack", "ort.matmul_nbits", scheme="gguf_q8_0", n=5, k=64, features={"trans_b"})
    assert "scheme" in _refusals("prepack", "ort.matmul_nbits", scheme="awq", n=5, k=64)


def test_failures_keep_their_text_and_get_a_class():
    with pytest.raises(CompileError, match="NoSuchOperator"):
        session.cached("k", session.model([session.node("NoSuchOperator", ["x"], "y")], {"x": 1}, {"y": 1}))
    bfloat16 = dict.fromkeys("ab", 16)
    with pytest.raises(UnsupportedError, match="MatMul") as caught:
        session.cached("k", session.model([session.node("MatMul", ["a", "b"], "y")], bfloat16, {"y": 16}))
    assert "NOT_IMPLEMENTED" in caught.value.refusals[0].actual
    with pytest.raises(OutOfMemory, match="std::bad_alloc"), session.translated("k"):
        raise RuntimeError("std::bad_alloc")
    with pytest.raises(OutOfMemory), session.translated("k"):
        raise MemoryError
