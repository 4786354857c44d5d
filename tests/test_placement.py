"""Where a call runs: ``device=``, then ``hal.use``, then the tensor's own device."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from fake_backend import Fake, installed, kernel, silu_mul

import hal
import hal_ops
from hal import ContractError, DType, placement

X = np.ones((2, 8), "float32")


def logging(name: str, log: list[str]) -> Fake:
    def run(x: Any, *, out: Any) -> None:
        log.append(name)
        silu_mul(x, out=out)

    return Fake(name, kernels=[kernel(f"{name}.silu", run=run)])


def test_order() -> None:
    log: list[str] = []
    with installed(logging("one", log), logging("two", log)):
        hal_ops.silu_mul(X)  # cpu:0
        with hal.use("one:0"):
            hal_ops.silu_mul(X)
            hal_ops.silu_mul(X, device="two:0")
            with hal.use(hal.device("two:0")):
                hal_ops.silu_mul(X)
            hal_ops.silu_mul(X)
            hal_ops.silu_mul(X, device="cpu:0")
        hal_ops.silu_mul(X, device=hal.device("one:0"))
        hal_ops.silu_mul(X, device="ONE:0")
        hal_ops.silu_mul(X)
    assert log == ["one", "two", "two", "one", "one", "one"]


def test_default_belongs_to_the_thread() -> None:
    log: list[str] = []
    with installed(logging("one", log)), hal.use("one:0"):
        worker = threading.Thread(target=lambda: hal_ops.silu_mul(X))
        worker.start()
        worker.join()
        assert log == []
        hal_ops.silu_mul(X)
        assert log == ["one"]
    assert placement._default.get() is None


@pytest.mark.parametrize("device", ["cpu:7", "", "nobody:0", 3, ["cpu:0"], object()])
def test_unknown_device(device: Any) -> None:
    with pytest.raises(ContractError) as caught:
        hal_ops.silu_mul(X, device=device)
    assert caught.value.argument == "device"
    with pytest.raises(ContractError), hal.use(device):
        pass


def test_a_tensor_runs_on_its_own_device_and_nowhere_else() -> None:
    """The meta device of torch stands for an accelerator."""
    x = torch.empty(2, 8, device="meta")
    with pytest.raises(ContractError) as caught:
        hal_ops.silu_mul(x)
    assert caught.value.argument == "device" and "meta" in str(caught.value)
    seen: list[Any] = []
    gpu = Fake("gpu", kernels=[kernel("gpu.silu", run=lambda x, *, out: seen.append((x.device.type, out.device.type)))])
    gpu.devices = [gpu.device(tensor_device="meta:0", features=frozenset())]
    gpu.memory.wrap = lambda array: array
    with installed(gpu):
        assert hal_ops.silu_mul(x).shape == (2, 4) and seen == [("meta", "meta")]
        for array, device in ((x, "cpu:0"), (X, "gpu:0"), (torch.ones(2, 8), "gpu:0")):
            with pytest.raises(ContractError) as caught:
                hal_ops.silu_mul(array, device=device)
            assert caught.value.argument == "device" and device in caught.value.actual
        with pytest.raises(ContractError) as caught:
            hal_ops.silu_mul(x, out=torch.empty(2, 4))
        assert caught.value.argument == "out"
    with pytest.raises(ContractError):
        hal_ops.silu_mul(x)  # the plugin left, and so did the way to it


def test_an_array_of_a_device_runs_there() -> None:
    seen: list[Any] = []
    fake = Fake(kernels=[kernel("fake.silu", run=lambda x, *, out: seen.append((x.device, out.device)))])
    fake.memory.empty = lambda shape, dtype: hal.Array("fake:0", dtype, tuple(shape), (4, 1), None)
    with installed(fake, Fake("other")):
        x = hal.Array("fake:0", DType.float32, (2, 8), (8, 1), None)
        out = hal_ops.silu_mul(x)
        assert out.device == "fake:0" and seen == [("fake:0", "fake:0")]
        with pytest.raises(ContractError, match="fake:0"):
            hal_ops.silu_mul(x, device="other:0")
