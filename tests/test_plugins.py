"""Plugins that are broken, old, new or doubled: each is named with its reason, and the rest works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_backend import SILU, Fake, codes, installed, kernel, manifest

import hal
from hal import ContractError
from hal.hookspecs import hookimpl

GOOD = """
from hal.hookspecs import hookimpl
from hal.types import Claim, Device, Kernel
@hookimpl
def hal_devices(): return [Device(id="{name}:0", plugin="{name}", vendor="v")]
@hookimpl
def hal_kernels(device): return []
"""


def write_plugin(folder: Path, name: str, code: str | None, data: Any, entry: str = "", dist: str = "") -> None:
    """A distribution with an entry point, as pip would leave it."""
    package = folder / f"hal_{entry or name}"
    package.mkdir(exist_ok=True)
    if code is not None:
        (package / "__init__.py").write_text(code)
    if data is not None:
        text = data if isinstance(data, str) else json.dumps(data)
        (package / "hal_manifest.json").write_text(text)
    info = folder / f"{dist or package.name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist or package.name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[hal.backends]\n{name} = {package.name}\n")


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(folder), "HAL_CACHE_DIR": str(folder / "cache")} | environment
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=60)


def plugins(folder: Path, **environment: str) -> dict[str, dict[str, Any]]:
    result = run(folder, "-m", "hal.cli", "plugins", "--json", **environment)
    assert result.returncode == 0, result.stderr
    return {plugin["name"]: plugin for plugin in json.loads(result.stdout)}


def test_every_kind_of_broken_plugin(tmp_path: Path) -> None:
    write_plugin(tmp_path, "good", GOOD.format(name="good"), manifest("good"))
    write_plugin(tmp_path, "raises", "raise RuntimeError('no such luck')", manifest("raises"))
    write_plugin(tmp_path, "exits", "import sys; sys.exit(7)", manifest("exits"))
    write_plugin(tmp_path, "lacks", "import a_vendor_sdk_that_is_missing", manifest("lacks"))
    write_plugin(tmp_path, "syntax", "def (", manifest("syntax"))
    write_plugin(tmp_path, "silent", "raise SystemError", None)
    write_plugin(tmp_path, "garbled", "raise SystemError", "{not json")
    write_plugin(tmp_path, "listed", "raise SystemError", [1])
    write_plugin(tmp_path, "malformed", "raise SystemError", manifest("malformed", contract="1.0"))
    write_plugin(tmp_path, "old", "raise SystemError", manifest("old", contract={"min": "0.1", "max": "0.9"}))
    write_plugin(tmp_path, "new", "raise SystemError", manifest("new", contract={"min": "1.1", "max": "2.0"}))
    write_plugin(tmp_path, "twin", GOOD.format(name="good"), manifest("good"))
    wrong = "from hal.hookspecs import hookimpl\n@hookimpl\ndef hal_kernels(gadget): return []"
    write_plugin(tmp_path, "wrong", wrong, manifest("wrong"))
    found = plugins(tmp_path, HAL_TRACE="1")
    assert set(found["good"]) == {"name", "version", "contract", "loaded", "error"}
    assert found["good"] == {"name": "good", "version": "1.2.3", "contract": "1.0", "loaded": True, "error": None}
    reasons = {
        "raises": "RuntimeError: no such luck", "exits": "SystemExit: 7", "lacks": "a_vendor_sdk_that_is_missing",
        "syntax": "SyntaxError", "silent": "hal_manifest.json", "garbled": "JSON", "listed": "mapping",
        "malformed": "manifest.contract", "old": "too old", "new": "too new", "wrong": "gadget",
        "good (duplicate)": "a name not yet taken",
    }  # fmt: skip
    for name, reason in reasons.items():
        assert not found[name]["loaded"] and reason in found[name]["error"], found[name]
    assert found["raises"]["version"] == "1.2.3" and found["silent"]["version"] == "?"


def test_a_failed_twin_does_not_take_the_name(tmp_path: Path) -> None:
    write_plugin(tmp_path, "a_first", "", manifest("good", contract={"min": "2.0", "max": "2.0"}))
    write_plugin(tmp_path, "good", GOOD.format(name="good"), manifest("good"))
    found = plugins(tmp_path, HAL_PLUGINS="good")
    assert found["good"]["loaded"] and "too new" in found["good (duplicate)"]["error"]
    devices = json.loads(run(tmp_path, "-m", "hal.cli", "devices", "--json", HAL_PLUGINS="good").stdout)
    assert [device["id"] for device in devices] == ["good:0"]


@pytest.mark.parametrize(
    ("environment", "loaded", "word"),
    [
        ({"HAL_PLUGINS": "one"}, {"one"}, "allow list"),
        ({"HAL_PLUGINS": ""}, set(), "allow list"),
        ({"HAL_DENY": "two, cpu,onnxruntime"}, {"one"}, "denied"),
    ],
)
def test_allow_and_deny(tmp_path: Path, environment: dict[str, str], loaded: set[str], word: str) -> None:
    for name in ("one", "two"):
        write_plugin(tmp_path, name, GOOD.format(name=name), manifest(name))
    found = plugins(tmp_path, **environment)
    assert {name for name, plugin in found.items() if plugin["loaded"]} == loaded
    assert word in found["two"]["error"]


def test_a_plugin_that_is_refused_is_not_imported(tmp_path: Path) -> None:
    write_plugin(tmp_path, "loud", "print('IMPORTED')", manifest("loud"))
    assert "IMPORTED" not in run(tmp_path, "-m", "hal.cli", "plugins", HAL_DENY="loud").stdout


def test_register_and_unregister() -> None:
    with installed(Fake()) as fake:
        info = next(plugin for plugin in hal.plugins() if plugin.name == "fake")
        assert info == hal.PluginInfo("fake", "1.2.3", "1.0", True)
        assert hal.device("FAKE:0") == fake.devices[0]
        hal.unregister("fake")
        assert all(plugin.name != "fake" for plugin in hal.plugins())
        with pytest.raises(ContractError, match="fake:0"):
            hal.device("fake:0")
        with pytest.raises(ContractError) as caught:
            hal.unregister("fake")
        assert caught.value.argument == "name"
        hal.register(fake, manifest())
        assert hal.bind(SILU, fake.id).kernel == "fake.silu"


def test_register_refuses() -> None:
    class Wrong:
        @hookimpl
        def hal_kernels(self, gadget: Any) -> list[Any]:
            return []

    with installed(Fake()) as fake:
        cases: list[tuple[Any, Any, str]] = [
            (Fake("fake"), manifest("fake"), "manifest.name"),
            (fake, manifest("other"), "plugin"),
            (Wrong(), manifest("wrong"), "plugin"),
            (Fake("x"), manifest("x", contract={"min": "3.0", "max": "3.0"}), "manifest.contract"),
            (Fake("x"), None, "manifest"),
        ]
        for plugin, data, argument in cases:
            with pytest.raises(ContractError) as caught:
                hal.register(plugin, data)
            assert caught.value.argument == argument
        assert hal.bind(SILU, fake.id).kernel == "fake.silu"
        with installed(Fake("wrong")):  # the refused one left nothing behind
            assert hal.bind(SILU, "wrong:0").kernel == "fake.silu"


@pytest.mark.parametrize("error", [RuntimeError("driver says no"), SystemExit(3), ImportError("sdk")])
def test_hooks_that_raise(error: BaseException) -> None:
    with installed(Fake("bad", devices=error), Fake()):
        placeholder = hal.device("bad:0")
        assert not placeholder.available and str(error) in str(placeholder.reason)
        assert placeholder not in hal.devices() and placeholder in hal.devices(all=True)
        assert hal.bind(SILU, "fake:0").kernel == "fake.silu"
    with installed(Fake("bad", kernels=error)), pytest.raises(hal.UnsupportedError, match=str(error)):
        hal.bind(SILU, "bad:0")
    with installed(Fake("bad", memory=error)), pytest.raises(hal.UnsupportedError, match=str(error)):
        hal.empty((2,), "float32", "bad:0")


def test_hooks_that_are_missing_or_answer_nonsense() -> None:
    with installed(Fake("bad", devices=3)):
        assert "hal_devices" in str(hal.device("bad:0").reason)
    with installed(Fake("bad", devices=["x", Fake("fake").device(), Fake("bad").device("7"), Fake("BAD").device()])):
        assert [device.id for device in hal.devices(all=True) if device.plugin.lower() == "bad"] == ["bad:7"]
    with installed(Fake("bad", kernels=[None, kernel("bad.one")])):
        assert hal.bind(SILU, "bad:0").kernel == "bad.one"
    hal.register(object(), manifest("empty"))
    try:
        assert not hal.device("empty:0").available
    finally:
        hal.unregister("empty")


def test_other_plugins_are_not_asked_again() -> None:
    with installed(Fake()) as fake:
        bound = hal.bind(SILU, fake.id)
        fn, before = bound.fn, list(fake.asked)
        with installed(Fake("other")):
            hal.bind(SILU, "other:0")
            assert fake.asked == before and bound.fn is fn


def test_unavailable_device_is_listed_with_its_reason() -> None:
    fake = Fake()
    fake.devices = [fake.device(available=False, reason="no driver: install it")]
    with installed(fake):
        record = hal.explain(SILU, fake.id)
        assert record.chosen is None and codes(record) == {"fake.silu": {"device"}}
        assert "install it" in str(record.refusals[0])
        with pytest.raises(hal.DeviceLost, match="install it"):
            hal.empty((1,), "float32", fake.id)
