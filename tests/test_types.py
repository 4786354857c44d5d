"""The records of ``hal.types`` and the dtype vocabulary."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import hal
from hal import ContractError, DType, OpSpec
from hal_ops import spec


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("fp16", DType.float16), ("BF16", DType.bfloat16), ("float32", DType.float32), (DType.int8, DType.int8),
        (torch.bfloat16, DType.bfloat16), (torch.float8_e5m2, DType.float8_e5m2), (torch.bool, DType.bool),
        (np.dtype("float64"), DType.float64), (np.float16, DType.float16), (np.bool_, DType.bool),
        (ml_dtypes.bfloat16, DType.bfloat16), (np.dtype(ml_dtypes.float8_e4m3fn), DType.float8_e4m3fn),
        (ml_dtypes.int4, DType.int4),
    ],
)  # fmt: skip
def test_dtype_parses(value: Any, expected: DType) -> None:
    assert DType.parse(value) is expected


@pytest.mark.parametrize(
    "value", ["float12", 3, None, [], {}, ([],), object, torch.complex64, np.dtype(">f4"), np.dtype("V4"), ""]
)
def test_dtype_refuses(value: Any) -> None:
    with pytest.raises(ContractError) as caught:
        DType.parse(value)
    assert caught.value.argument == "dtype"


def test_dtype_facts() -> None:
    assert f"{DType.float16}" == str(DType.float16) == "float16"
    assert (DType.bfloat16.bits, DType.int4.bits, DType.int4.itemsize, DType.float64.itemsize) == (16, 4, 1, 8)
    assert DType.float8_e5m2.is_float and not DType.int8.is_float


def test_spec_is_frozen_and_hashable() -> None:
    one, other = spec("silu_mul", dtype="fp32", dim=4), spec("silu_mul", dim=4, dtype=torch.float32)
    assert one == other and hash(one) == hash(other) and one != spec("silu_mul", dtype="fp32", dim=8)
    assert pickle.loads(pickle.dumps(one)) == one and one != "silu_mul"
    with pytest.raises(AttributeError):
        one.op = "gemm"  # type: ignore[misc]
    with pytest.raises(TypeError):
        one.fields["dim"] = 8  # type: ignore[index]


def test_neutral_fields_are_left_out() -> None:
    plain = spec("gemm", a_dtype="fp32", n=8, features=(), determinism="none", a_quant="none", group_size=None)
    assert set(plain.fields) == {"a_dtype", "n"}


@pytest.mark.parametrize(
    ("op", "fields", "argument"),
    [
        ("nope", {}, "op"), ("gemm", {"q_dtype": "fp32"}, "q_dtype"), ("gemm", {"n": "8"}, "n"),
        ("gemm", {"n": True}, "n"), ("gemm", {"n": -1}, "n"), ("gemm", {"a_dtype": "float12"}, "a_dtype"),
        ("gemm", {"features": {"lse"}}, "features"), ("gemm", {"features": "bias"}, "features"),
        ("gemm", {"features": 3}, "features"), ("gemm", {"features": {1, "x"}}, "features"),
        ("gemm", {"determinism": "always"}, "determinism"), ("attention", {"paged": 1}, "paged"),
        ("attention", {"layout": "DHN"}, "layout"),
    ],
)  # fmt: skip
def test_spec_refuses(op: str, fields: dict[str, Any], argument: str) -> None:
    with pytest.raises(ContractError) as caught:
        spec(op, **fields)
    assert caught.value.argument == argument


def test_refusal_and_errors_read_well() -> None:
    refusal = hal.Refusal("x.y", hal.RefusalCode.dtype, "q_dtype", "one of float32", "int8", "convert it")
    text = str(hal.UnsupportedError("nothing fits", [refusal]))
    for part in ("nothing fits", "x.y", "dtype", "q_dtype", "one of float32", "int8", "convert it"):
        assert part in text
    error = ContractError("k", "rank 3", "rank 2")
    assert isinstance(error, ValueError) and pickle.loads(pickle.dumps(error)).argument == "k"
    assert str(hal.DeviceLost("x:0", "fell off")) == "x:0: fell off"


def test_array_checks_the_width_of_its_bits() -> None:
    array = hal.Array.host(np.zeros((2, 3), "uint16")[:, ::2], "bf16")
    assert array.shape == (2, 2) and array.strides == (3, 2) and array.dtype is DType.bfloat16
    with pytest.raises(ContractError) as caught:
        hal.Array.host(np.zeros(2, "uint8"), "bf16")
    assert caught.value.argument == "bits"


def test_device_is_hashable_whatever_its_limits() -> None:
    device = hal.Device(id="x:0", plugin="x", vendor="x", limits={"threads": 3})
    assert {device: 1}[device] == 1 and OpSpec("a", (1, 0), {}) != device
