"""Importing costs nothing that was not asked for: no SDK before a kernel of it is chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SDKS = ("torch", "onnx", "onnxruntime", "openvino", "transformers", "gguf", "tokenizers", "triton", "pyopencl")
BACKENDS = sorted(init.parent.name for init in ROOT.glob("backends/*/hal_*/__init__.py"))
PLUGINS = sorted(manifest.parent.name for manifest in ROOT.glob("backends/*/hal_*/hal_manifest.json"))

# An SDK that is not there, as seen by whoever imports it.
WITHOUT_SDKS = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {SDKS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def run(source: str) -> str:
    """Standard output of a fresh interpreter, outside the repository."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env={**os.environ, "HAL_CONFIG": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_core_imports_no_sdk() -> None:
    loaded = run(f"import sys, hal, hal_ops; print(*sorted(set(sys.modules) & set({SDKS!r})))")
    assert loaded.split() == []


def seconds(source: str) -> float:
    """Processor time of a fresh interpreter that finds its bytecode, as an installed package does."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", source], env)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0, source
    return usage.ru_utime + usage.ru_stime


def test_core_imports_as_fast_as_what_it_stands_on() -> None:
    # The least of several, taken in turns: what others do on the machine only ever adds.
    seconds("import hal, hal_ops")  # writes the bytecode
    ours, theirs = [], []
    for _ in range(25):
        ours.append(seconds("import hal, hal_ops"))
        theirs.append(seconds("import numpy, pluggy"))
        if len(ours) >= 5 and min(ours) <= 1.2 * min(theirs):
            return
    pytest.fail(f"{min(ours):.3f} s against {min(theirs):.3f} s")


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_imports_no_sdk(name: str) -> None:
    loaded = run(f"import sys, {name}; print(*sorted(set(sys.modules) & set({SDKS!r})))")
    assert loaded.split() == []


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_imports_where_its_sdk_is_absent(name: str) -> None:
    run(f"{WITHOUT_SDKS}\nimport {name}")


@pytest.mark.parametrize("name", PLUGINS)
def test_without_its_sdk_a_plugin_says_so(name: str) -> None:
    source = f"""{WITHOUT_SDKS}
import {name}
for device in {name}.hal_devices():
    print(device.available, device.reason)
"""
    lines = run(source).splitlines()
    assert lines, "a plugin lists a placeholder for the device that it cannot reach"
    for line in lines:
        available, reason = line.split(" ", 1)
        assert available == "False" and reason not in ("", "None"), line
