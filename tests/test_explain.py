"""``hal.explain`` and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_backend import SILU, Fake, codes, installed, kernel
from test_plugins import write_plugin

import hal

NAMES = "attention gemm kv_convert kv_copy kv_gather kv_write merge_attention_states prepack rms_norm rope silu_mul"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": "200"} | environment
    command = [sys.executable, "-m", "hal.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


def read(*arguments: str, code: int = 0, **environment: str) -> Any:
    result = run(*arguments, "--json", **environment)
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout)


def test_a_reason_for_every_kernel_not_chosen() -> None:
    kernels = [
        kernel("best.silu", priority=9),
        kernel("low.silu"),
        kernel("narrow.silu", needs={"dtype": hal.OneOf({"float16"}), "dim": hal.Range(1, None)}),
        kernel("blind.silu", needs={}),
        kernel(
            "picky.silu", refuse=lambda request: [hal.Refusal("picky.silu", hal.RefusalCode.resource, "a", "b", "c")]
        ),
        kernel("denied.silu"),
        kernel("sick.silu"),
        kernel("broken.silu", priority=10, build=lambda request: 1 / 0),  # type: ignore[arg-type,return-value]
    ]
    fake = Fake(kernels=kernels)
    fake.devices.append(fake.device("1", available=False, reason="unplugged"))
    with installed(fake):
        hal.quarantine("sick.silu", reason="wrong sums")
        with hal.policy(deny=["denied.*"]):
            record = hal.explain(SILU, fake.id)
            assert record.chosen == "best.silu" and record.requested == SILU
            assert codes(record) == {
                "low.silu": {"policy"}, "narrow.silu": {"dtype"}, "blind.silu": {"dtype", "shape"},
                "picky.silu": {"resource"}, "denied.silu": {"policy"}, "sick.silu": {"quarantined"},
                "broken.silu": {"quarantined"},
            }  # fmt: skip
            assert record.evidence["device"] == fake.id and record.evidence["sku"] == "F1"
            everywhere = hal.explain(SILU)
            assert everywhere.chosen is not None
            unplugged = [refusal for refusal in everywhere.refusals if "unplugged" in refusal.actual]
            assert {refusal.kernel for refusal in unplugged} == {one.claim.kernel for one in kernels}
        only = hal.explain(SILU, "fake:1")
        assert only.chosen is None and only.evidence["device"] == "fake:1"


def test_explain_json_with_the_option_names_of_the_issue() -> None:
    options = "--dtype float16 --head-dim 64 --q-heads 9 --kv-heads 3 --paged"
    found = read("explain", "attention", *options.split())
    assert set(found) >= {"requested", "chosen", "refusals", "evidence"}
    assert found["requested"]["gqa_ratio"] == 3 and found["requested"]["layout"] == "NHD"
    assert found["chosen"] and found["devices"]["cpu:0"]
    for refusal in found["refusals"]:
        assert set(refusal) == {"kernel", "code", "field", "required", "actual", "hint"}


def test_explain_exit_codes_and_reasons() -> None:
    table = run("explain", "gemm", "--dtype", "int8", "--device", "cpu:0")
    assert table.returncode == 3 and "a_dtype" in table.stdout and "no kernel" in table.stdout
    for arguments, code, word in (
        (("gemm", "--dtype", "float12"), 2, "float12"),
        (("gemm", "--m", "x"), 2, "--m"),
        (("gemm", "--m", "-5"), 2, "-5"),
        (("gemm", "--feature", "lse"), 2, "--feature"),
        (("gemm", "--nonsense"), 2, "--nonsense"),
        (("nothing",), 2, "nothing"),
        (("attention", "--q-heads", "9", "--kv-heads", "2"), 2, "--q-heads"),
        (("gemm", "--device", "cpu:9"), 3, "cpu:9"),
    ):
        result = run("explain", *arguments, HAL_PLUGINS="")
        assert result.returncode == code and word in result.stderr, (arguments, result.stderr)
        assert "Traceback" not in result.stderr
    assert read("explain", "rope", "--dtype", "fp32", code=3, HAL_PLUGINS="")["devices"] == {}
    nobody = run("explain", "rope", HAL_PLUGINS="")
    assert nobody.returncode == 3 and "no device" in nobody.stdout.lower()


def test_devices_json() -> None:
    found = {entry["id"]: entry for entry in read("devices")}
    fields = {
        "id",
        "vendor",
        "sku",
        "arch",
        "available",
        "reason",
        "host_visible",
        "dtypes",
        "memory_bytes",
        "evidence",
    }
    for device in ("cpu:0", "onnxruntime:cpu"):
        assert fields <= set(found[device]) and found[device]["available"] and found[device]["host_visible"]


def test_plugins_json_and_table() -> None:
    found = {entry["name"]: entry for entry in read("plugins")}
    assert set(found["cpu"]) == {"name", "version", "contract", "loaded", "error"} and found["cpu"]["loaded"]
    assert "cpu" in run("plugins").stdout


def test_help_texts() -> None:
    top = run("--help")
    assert top.returncode == 0
    for word in ("devices", "plugins", "explain", "Exit codes"):
        assert word in top.stdout
    operators = run("explain", "--help")
    assert operators.returncode == 0 and all(name in operators.stdout for name in NAMES.split())
    one = run("explain", "attention", "-h")
    assert one.returncode == 0 and "--q-heads" in one.stdout and "--head-dim" in one.stdout
    assert run("--version").stdout.strip().endswith(hal.__version__)
    assert run("explode").returncode == 2


def test_a_broken_setting_is_one_line() -> None:
    for environment in ({"HAL_STRICT": "maybe"}, {"HAL_CONFIG": "/nowhere/hal.toml"}):
        result = run("devices", **environment)
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert len(result.stderr.splitlines()) == 1 and next(iter(environment)) in result.stderr


def test_a_command_that_does_not_load_breaks_itself_only(tmp_path: Path) -> None:
    write_plugin(tmp_path, "unused", None, None)
    entry = tmp_path / "hal_unused-1.dist-info" / "entry_points.txt"
    entry.write_text("[hal.commands]\nboom = module_of_nobody:command\n")
    path = {"PYTHONPATH": str(tmp_path)}
    assert "boom" in run("--help", **path).stdout
    result = run("boom", "--flag", **path)
    assert result.returncode == 1 and "module_of_nobody" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hal.cli", "plugins", "--json"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "No space left" in done.stderr
