"""Arrays on devices: allocation, copies, views."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from fake_backend import Fake, installed

import hal
from hal import ContractError, DType
from hal_ops import arrays, reference

FLOATS = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "int8", "uint8", "int32", "int64", "bool", "float8_e4m3fn"])
def test_round_trip_is_exact(dtype: str) -> None:
    host = arrays.host_empty((3, 4), DType(dtype))
    stored = reference.storage(host)
    stored[...] = np.arange(12).reshape(3, 4).astype(stored.dtype)
    there = hal.to_device(host, "cpu:0")
    assert isinstance(there, torch.Tensor) and DType.parse(there.dtype) == dtype
    back = hal.to_host(there)
    assert type(back) is type(host) and np.array_equal(reference.storage(back), stored)
    there.zero_()
    assert stored.any() == (dtype != "bool" or stored.any()), "to_device copies"


def test_empty() -> None:
    x = hal.empty((2, 0, 3), torch.bfloat16, hal.device("cpu:0"))
    assert tuple(x.shape) == (2, 0, 3) and x.dtype is torch.bfloat16
    assert hal.empty([], "fp32", "CPU:0").shape == ()
    for shape in ((-1,), 3, (1.0,), (True,), None, "ab"):
        with pytest.raises(ContractError) as caught:
            hal.empty(shape, "fp32", "cpu:0")  # type: ignore[arg-type]
        assert caught.value.argument == "shape"
    for arguments, argument in ((((1,), "fp31", "cpu:0"), "dtype"), (((1,), "fp32", "cpu:9"), "device")):
        with pytest.raises(ContractError) as caught:
            hal.empty(*arguments)
        assert caught.value.argument == argument


def test_asarray_returns_arrays_as_they_are() -> None:
    for x in (np.zeros(2), torch.zeros(2), hal.Array.host(np.zeros(2, "uint16"), "bf16")):
        assert hal.asarray(x) is x

    class Foreign:
        def __init__(self) -> None:
            self.data = np.arange(3.0)

        def __dlpack__(self, **options: Any) -> Any:
            return self.data.__dlpack__()

        def __dlpack_device__(self) -> Any:
            return self.data.__dlpack_device__()

    assert hal.asarray(Foreign()).tolist() == [0.0, 1.0, 2.0]
    for x in ([1.0], 3, None, "x"):
        with pytest.raises(ContractError) as caught:
            hal.asarray(x)
        assert caught.value.argument == "x"
        with pytest.raises(ContractError):
            hal.to_host(x)


def test_host_arrays_are_not_copied_to_the_host() -> None:
    x = np.zeros(2)
    assert hal.to_host(x) is x
    assert np.shares_memory(hal.to_host(torch.from_numpy(x)), x)


def test_bfloat16_values_survive() -> None:
    values = np.array([1.0, -2.5, 3e38, 1e-40], "float32").astype(ml_dtypes.bfloat16)
    array = hal.Array.host(values.view("uint16"), "bf16")
    assert torch.equal(hal.to_device(array, "cpu:0").float(), torch.from_numpy(values.astype("float32")))


def test_memory_of_a_vendor_that_no_framework_addresses() -> None:
    with installed(Fake()) as fake:
        assert isinstance(hal.empty((2,), "bf16", fake.id), hal.Array)
        x = np.arange(3, dtype="float32")
        there = hal.to_device(x, fake.id)
        assert there is not x and hal.to_host(there).tolist() == [0, 1, 2]
        assert fake.asked.count("memory") == 1, "the hook is asked once"
        far = hal.Array(fake.id, DType.float32, (3,), (1,), there)
        fake.memory.to_host = lambda array: array.native
        assert hal.to_host(far) is there
        assert hal.to_device(far, "cpu:0").tolist() == [0, 1, 2], "by way of the host"


@pytest.mark.parametrize(
    ("make", "dtype", "strides"),
    [
        (lambda: torch.zeros(2, 3), "float32", (3, 1)),
        (lambda: np.zeros((2, 3), "float16")[:, ::2], "float16", (3, 2)),
        (lambda: np.zeros((2, 3), ml_dtypes.bfloat16), "bfloat16", (3, 1)),
        (lambda: hal.Array.host(np.zeros((2, 3), "uint8"), "float8_e5m2"), "float8_e5m2", (3, 1)),
    ],
)
def test_meta(make: Any, dtype: str, strides: tuple[int, ...]) -> None:
    described = arrays.meta("x", make())
    assert (described.dtype, described.strides, described.device) == (dtype, strides, "host")


def packed_field() -> Any:
    return np.zeros(3, dtype=[("a", "u1"), ("b", "f4")])["b"]


@pytest.mark.parametrize(
    "x",
    [
        [1.0], None, 3, np.float32(3), np.zeros(2, "int16"), np.zeros(2, ">f4"), np.zeros(2, object), packed_field(),
        torch.zeros(2, dtype=torch.complex64), torch.zeros(2, 2).to_sparse(), torch.zeros(2, dtype=torch.int16),
    ],
)  # fmt: skip
def test_what_is_no_array_is_refused_by_name(x: Any) -> None:
    with pytest.raises(ContractError) as caught:
        arrays.meta("k_cache", x)
    assert caught.value.argument == "k_cache"
    hash((arrays.signature(x), arrays.rows(x), arrays.growing(x)))


def test_signatures_tell_apart_what_validation_reads() -> None:
    class Mine(np.ndarray[Any, Any]):
        pass

    base = np.zeros((4, 6), "float32")
    for form in (arrays.signature, arrays.rows):
        assert form(base.view(Mine)) != form(base[:, :3].copy().view(Mine)), "subclasses are arrays, too"
        frozen = base.copy()
        frozen.flags.writeable = False
        assert form(frozen) != form(base)
        assert form(torch.zeros(6)) != form(torch.zeros(8)), "the size of a vector is its last one"
        assert form(torch.zeros(1, 4)) != form(torch.zeros(1, 4).expand(5, 4))
    assert arrays.rows(base) == arrays.rows(np.zeros((9, 6), "float32")) != arrays.rows(base[:1])
    assert arrays.rows(torch.zeros(5, 4)) == arrays.rows(torch.zeros(7, 4))
    assert arrays.growing(torch.zeros(5)) == arrays.growing(torch.zeros(7)) != arrays.growing(torch.zeros(14)[::2])


@pytest.mark.parametrize(
    ("values", "fits"),
    [([1, 2], True), ([], True), ([[1, 2], [3, 4]], True), ([1.0], False), ([2**40], False), (["a"], False),
     ([None], False), ([[1], [2, 3]], False)],
)  # fmt: skip
def test_lists_of_indices(values: Any, fits: bool) -> None:
    if fits:
        assert arrays.indices("x", values, "int32").dtype == "int32"
    else:
        with pytest.raises(ContractError):
            arrays.indices("x", values, "int32")
