"""torch.rms_norm, torch.rope, torch.silu_mul and TorchMemory."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hal.array import Array  # noqa: E402
from hal.errors import ContractError  # noqa: E402
from hal.types import Device, DType  # noqa: E402
from hal_ops import reference  # noqa: E402
from hal_torch.activation import silu_mul  # noqa: E402
from hal_torch.memory import TorchMemory, torch_dtype  # noqa: E402
from hal_torch.norm import rms_norm  # noqa: E402
from hal_torch.rope import rope  # noqa: E402

MEMORY = TorchMemory(Device(id="cpu:0", plugin="cpu", vendor="test", tensor_device="cpu"))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
BITS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e4m3fnuz": np.uint8, "float8_e5m2": np.uint8}


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).to(dtype)


def wide(x):
    return x.double().numpy()


def close(got, want):
    tolerance = TOLERANCE[got.dtype]
    np.testing.assert_allclose(wide(got), want, rtol=1.01 * tolerance, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_rms_norm(dtype, weight_dtype):
    x, weight = numbers(3, 2, 10, dtype=dtype) * 100, numbers(10, dtype=weight_dtype, seed=1)
    want = reference.rms_norm(wide(x), wide(weight), 1e-5)
    out = torch.empty_like(x)
    rms_norm(x, weight, 1e-5, out=out)
    close(out, want)
    rms_norm(x, weight, 1e-5, out=x)
    close(x, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_updates_the_residual(dtype):
    x, residual, weight = numbers(4, 8, dtype=dtype), numbers(4, 8, dtype=dtype, seed=1), numbers(8, seed=2)
    normed, total = reference.rms_norm(wide(x), wide(weight), 1e-6, residual=wide(residual))
    out, before = torch.empty_like(x), x.clone()
    rms_norm(x, weight, 1e-6, residual=residual, out=out)
    close(out, normed)
    close(residual, total)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [1, 3, 4])
def test_rope(dtype, interleaved, half):
    q, k = numbers(5, 3, 8, dtype=dtype), numbers(5, 8, 1, seed=1).to(dtype).transpose(1, 2)
    cos, sin = numbers(9, half, seed=2).cos(), numbers(9, half, seed=2).sin()
    positions = torch.tensor([0, 8, 3, 3, 1])
    arrays = (wide(q), wide(k), positions.numpy(), cos.numpy(), sin.numpy())
    want = reference.rope(*arrays, interleaved=interleaved)
    rest = q[..., 2 * half :].clone()
    rope(q, k, positions, cos, sin, interleaved=interleaved)
    close(q, want[0])
    close(k, want[1])
    assert torch.equal(q[..., 2 * half :], rest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype):
    x = numbers(4, 3, 12, dtype=dtype) * 4
    out = torch.empty(4, 3, 6, dtype=dtype)
    silu_mul(x, out=out)
    close(out, reference.silu_mul(wide(x)))


def test_nothing_to_do():
    empty = torch.empty(0, 2, 8)
    rms_norm(empty, torch.ones(8), 1e-5, out=empty)
    rope(empty, empty, torch.empty(0, dtype=torch.int64), torch.ones(1, 4), torch.ones(1, 4))
    silu_mul(empty, out=torch.empty(0, 2, 4))


@pytest.mark.parametrize("dtype", [d for d in DType if d.bits >= 8])
def test_round_trip(dtype):
    if dtype in BITS:
        bits = np.arange(24, dtype=BITS[dtype]).reshape(4, 6)
        host = Array.host(bits, dtype)
    else:
        bits = host = np.arange(24).reshape(4, 6).astype(dtype.value)
    tensor = MEMORY.from_host(host)
    assert tensor.dtype == torch_dtype(dtype) == MEMORY.empty((1,), dtype).dtype
    bits_then = bits.copy()
    bits[:] = 0
    back = MEMORY.to_host(tensor)
    if dtype in BITS:
        assert (back.dtype, back.shape, back.device) == (dtype, (4, 6), "cpu:0")
        back = back.native
    assert back.dtype == bits.dtype
    np.testing.assert_array_equal(back, bits_then)


def test_wrap_shares_memory():
    x = np.zeros((4, 6), np.float32)
    MEMORY.wrap(x[::2, 1:])[0, 0] = 7
    assert x[0, 1] == 7
    bits = np.zeros((3, 2), np.uint16)
    wrapped = MEMORY.wrap(Array.host(bits, "bfloat16"))
    wrapped[2, 1] = 1.0
    assert wrapped.dtype == torch.bfloat16 and bits[2, 1] == 0x3F80
    tensor = torch.zeros(2)
    assert MEMORY.wrap(tensor) is tensor
    parameter = torch.nn.Parameter(tensor)
    assert not MEMORY.wrap(parameter).requires_grad and MEMORY.wrap(parameter).data_ptr() == tensor.data_ptr()


def test_wrap_takes_ml_dtypes_and_dlpack():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.ones(3, ml_dtypes.bfloat16)
    assert MEMORY.wrap(x).dtype == torch.bfloat16 and MEMORY.wrap(x).tolist() == [1, 1, 1]

    class Foreign:
        def __dlpack__(self, **options):
            return np.arange(3.0).__dlpack__(**options)

        def __dlpack_device__(self):
            return np.arange(3.0).__dlpack_device__()

    assert MEMORY.wrap(Foreign()).tolist() == [0, 1, 2]


def test_wrap_reads_a_mapped_file_without_a_warning(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(8)))
    mapped = np.memmap(path, np.uint8, "r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = MEMORY.wrap(mapped[2:])
    assert tensor.data_ptr() == mapped.ctypes.data + 2
    del mapped  # the tensor keeps the mapping
    assert tensor.tolist() == [2, 3, 4, 5, 6, 7]


def test_negative_strides_are_copied_or_refused():
    x = np.arange(6, dtype=np.float32)[::-1]
    assert MEMORY.from_host(x).tolist() == [5, 4, 3, 2, 1, 0]
    with pytest.raises(ContractError, match="strides"):
        MEMORY.wrap(x)


def test_what_is_no_host_array_is_refused():
    with pytest.raises(ContractError, match="__dlpack__"):
        MEMORY.wrap([1, 2])
    with pytest.raises(ContractError, match="gpu:0"):
        MEMORY.wrap(Array("gpu:0", DType.float32, (1,), (1,), object()))
    with pytest.raises(ContractError, match="int4"):
        MEMORY.empty((1,), DType.int4)


def test_events_and_sizes():
    start = MEMORY.event()
    MEMORY.synchronize()
    end = MEMORY.event()
    end.wait()
    assert start.device == "cpu:0" and end.query() and 0 <= MEMORY.elapsed(start, end) < 60
    free, total = MEMORY.memory_info()
    assert 0 < free <= total
