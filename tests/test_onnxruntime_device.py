"""onnxruntime:cpu as a device: lazy imports, the placeholder, memory, settings."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest

import hal_onnxruntime
from hal.array import Array
from hal.dtype import DType
from hal.errors import ContractError
from hal_onnxruntime import device
from hal_onnxruntime.memory import HostMemory


def python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture(scope="module")
def memory():
    return HostMemory("onnxruntime:cpu")


def test_import_loads_no_sdk():
    code = "import sys, hal_onnxruntime; print(*{'onnx', 'onnxruntime', 'torch', 'numpy'} & set(sys.modules))"
    assert python(code) == ""


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_a_missing_package_gives_a_placeholder(missing):
    code = f"""
import sys
sys.modules[{missing!r}] = None
import hal_onnxruntime as plugin
(found,) = plugin.hal_devices()
assert not found.available and found.evidence == "none" and found.id == "onnxruntime:cpu"
assert plugin.hal_kernels(found) == []
print(found.reason)
"""
    reason = python(code)
    assert missing in reason and "pip install" in reason


def test_device():
    pytest.importorskip("onnxruntime")
    (found,) = hal_onnxruntime.hal_devices()
    assert found.available and found.tensor_device is None and found.runtime.startswith("onnxruntime ")
    assert (found.id, found.plugin, found.vendor) == ("onnxruntime:cpu", "onnxruntime", "microsoft")
    assert found.features == {"host_visible"} and found.evidence == "hardware"
    assert found.native_dtypes == {DType.float32} and found.emulated_dtypes == {DType.float16}


def test_manifest_names_what_the_kernels_serve():
    pytest.importorskip("onnxruntime")
    manifest = json.loads((files("hal_onnxruntime") / "hal_manifest.json").read_text())
    kernels = hal_onnxruntime.hal_kernels(device.probe())
    assert set(manifest["ops"]) == {kernel.claim.op for kernel in kernels}
    assert all(kernel.claim.kernel.startswith("ort.") for kernel in kernels)
    assert manifest["version"] == hal_onnxruntime.__version__


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("2,1", 2), ("junk", None), ("0", None), ("", None)])
def test_threads_follow_the_environment(monkeypatch, value, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert device.threads() == threads or (threads is None and 1 <= device.threads() <= 8)


def test_torch_tensors_are_viewed_not_copied(memory):
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.float16, torch.int32, torch.bool):
        tensor = torch.zeros(4, 6, dtype=dtype)[:, 1:4]
        view = memory.wrap(tensor)
        assert view.ctypes.data == tensor.data_ptr() and view.shape == (4, 3) and view.flags.writeable
    assert memory.wrap(torch.zeros(2, requires_grad=True)).shape == (2,)
    with pytest.raises(ContractError, match="bfloat16"):
        memory.wrap(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(ContractError):
        memory.wrap(torch.zeros(2, device="meta"))


def test_numpy_passes_and_what_numpy_lacks_is_refused(memory):
    x = np.zeros(3, np.float32)
    assert memory.wrap(x) is x and memory.to_host(x) is x
    copied = memory.from_host(x)
    assert copied is not x and np.array_equal(copied, x)
    with pytest.raises(ContractError, match="bfloat16"):
        memory.wrap(Array.host(np.zeros(2, np.uint16), "bfloat16"))
    with pytest.raises(ContractError, match="no bfloat16"):
        memory.wrap("not an array")
    assert memory.empty((2, 3), DType.float16).dtype == np.float16
    with pytest.raises(ContractError, match="bfloat16"):
        memory.empty((2,), DType.bfloat16)


def test_events_measure_seconds(memory):
    start, end = memory.event(), memory.event()
    assert start.query() and 0 <= memory.elapsed(start, end) < 10
    start.wait()
    memory.synchronize()
    free, total = memory.memory_info()
    assert 0 <= free <= total
