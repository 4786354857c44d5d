"""hal_cpu: the probe, the manifest and the kernels as the runtime sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hal  # noqa: E402
import hal_cpu  # noqa: E402
import hal_ops  # noqa: E402
from hal.types import DType  # noqa: E402
from hal_cpu import device, embedding_bag  # noqa: E402
from hal_ops import reference  # noqa: E402
from hal_ops.gguf import LAYOUTS  # noqa: E402

INTEL = "vendor_id\t: GenuineIntel\nmodel name\t: Xeon 8\nflags\t\t: avx2 avx512f avx512_bf16\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\n"


def blocks(scheme, n, k):
    rng = np.random.default_rng(0)
    layout = LAYOUTS[scheme]
    raw = rng.integers(0, 256, (n, k // 32, layout.bytes), dtype=np.uint8)
    header = rng.uniform(0.01, 0.02, (n, k // 32, layout.header // 2))
    raw[..., : layout.header] = header.astype("<f2").view(np.uint8)
    return raw.reshape(n, -1)


def test_importing_the_plugin_imports_no_torch():
    code = "import sys, hal_cpu; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_device():
    cpu = hal.device("cpu:0")
    assert cpu.available and cpu.tensor_device == "cpu" and cpu.evidence == "hardware"
    assert DType.float32 in cpu.native_dtypes
    assert cpu.native_dtypes | cpu.emulated_dtypes == {DType.float32, DType.float16, DType.bfloat16}
    assert not cpu.native_dtypes & cpu.emulated_dtypes
    assert cpu.sku and cpu.vendor and cpu.runtime.startswith("torch ") and cpu.limits["threads"] >= 1
    assert cpu.memory_bytes > 1 << 28


@pytest.mark.parametrize(
    ("text", "machine", "vendor", "arch"),
    [
        (INTEL, "x86_64", "intel", "x86_64-avx512"),
        (ARM, "aarch64", "arm", "aarch64-sve"),
        ("", "riscv64", "unknown", "riscv64"),
    ],
)
def test_probe_reads_cpuinfo(tmp_path, monkeypatch, text, machine, vendor, arch):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    facts = device._cpuinfo(path)
    monkeypatch.setattr(device, "_cpuinfo", lambda: facts)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    found = device.probe()
    assert (found.vendor, found.arch) == (vendor, arch)
    assert (DType.bfloat16 in found.native_dtypes) == (text == INTEL)


def test_no_cpuinfo_is_no_error(tmp_path):
    assert device._cpuinfo(tmp_path / "missing") == {}


def test_manifest_lists_the_operators_of_the_kernels():
    manifest = json.loads(Path(hal_cpu.__file__).with_name("hal_manifest.json").read_text())
    kernels = hal_cpu.hal_kernels(hal.device("cpu:0"))
    assert set(manifest["ops"]) == {kernel.claim.op for kernel in kernels}
    assert manifest["version"] == hal_cpu.__version__
    names = [(kernel.claim.op, kernel.claim.kernel) for kernel in kernels]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("scheme", sorted(LAYOUTS))
def test_blocks_through_the_function_forms(scheme):
    raw = blocks(scheme, 24, 64)
    a = np.random.default_rng(1).standard_normal((3, 64), dtype=np.float32)
    want = reference.gemm(a, reference.dequantise(raw, scheme=scheme, shape=(24, 64)).T)
    packed = hal_ops.prepack(torch.from_numpy(raw), scheme=scheme, shape=(24, 64))
    assert packed.kernel == (embedding_bag.NAME if embedding_bag.available() else "torch.gguf")
    np.testing.assert_allclose(hal_ops.gemm(torch.from_numpy(a), packed).numpy(), want, rtol=1e-5, atol=1e-5)
    with hal.policy(deny=[embedding_bag.NAME]):
        packed = hal_ops.prepack(raw, scheme=scheme, shape=(24, 64))
        assert packed.kernel == "torch.gguf"
        np.testing.assert_allclose(hal_ops.gemm(a, packed), want, rtol=1e-5, atol=1e-5)


def test_dense_through_the_function_forms():
    a, b = np.ones((2, 3, 4), np.float16), np.ones((4, 5), np.float16)
    assert (hal_ops.gemm(a, b, alpha=0.5) == 2).all()
    packed = hal_ops.prepack(torch.ones(5, 4), scheme="dense")
    assert packed.kernel == "torch.packed_dense"
    assert torch.equal(hal_ops.gemm(torch.ones(2, 4), packed), torch.full((2, 5), 4.0))
