"""Policies: blocks, environment, file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_backend import SILU, Fake, codes, installed, kernel

import hal
from hal import ContractError, config, evidence, policies


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """An environment without settings; what a test sets is read anew and forgotten afterwards."""
    for name in ("CONFIG", "PLUGINS", "DENY", "STRICT", "ALLOW_CPU_FALLBACK", "TRACE"):
        monkeypatch.delenv(f"HAL_{name}", raising=False)
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def forget() -> None:
    config.load.cache_clear()
    evidence._load.cache_clear()


def test_blocks_nest_and_end(fresh: pytest.MonkeyPatch) -> None:
    outside = policies.current()
    with hal.policy(pin={"gemm": "a.*"}, prefer=["x"], deny=["y"], strict=True):
        with hal.policy(pin={"gemm": "b.*", "rope": "c.*"}, prefer=("z",), strict=False, allow_cpu_fallback=True):
            inside = policies.current()
            assert inside.pin == {"gemm": "b.*", "rope": "c.*"} and inside.prefer == ("z", "x")
            assert inside.deny == ("y",) and not inside.strict and inside.allow_cpu_fallback
        assert policies.current().pin == {"gemm": "a.*"} and policies.current().strict
        with pytest.raises(KeyError), hal.policy(deny=["q"]):
            raise KeyError
        assert policies.current().deny == ("y",)
    assert policies.current() == outside


def test_blocks_may_close_in_any_order(fresh: pytest.MonkeyPatch) -> None:
    first, second = hal.policy(deny=["a"]), hal.policy(deny=["a"])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert policies.current().deny == ("a",)
    second.__exit__(None, None, None)
    assert policies.current().deny == ()


@pytest.mark.parametrize(
    "arguments",
    [
        {"prefer": "torch.*"}, {"deny": "x"}, {"prefer": [1]}, {"deny": 3}, {"pin": "x"}, {"pin": {"gemm": 3}},
        {"pin": ["gemm"]}, {"strict": "yes"}, {"allow_cpu_fallback": 1},
    ],
)  # fmt: skip
def test_refuses_wrong_kinds(fresh: pytest.MonkeyPatch, arguments: dict[str, Any]) -> None:
    before = policies.current()
    with pytest.raises(ContractError) as caught, hal.policy(**arguments):
        pass
    assert caught.value.argument in arguments and policies.current() == before


@pytest.mark.parametrize("pattern", ["fake.silu", "fake", "fake:0", "fa*", "*"])
def test_denial_by_kernel_plugin_or_device(fresh: pytest.MonkeyPatch, pattern: str) -> None:
    with installed(Fake()) as fake, hal.policy(deny=[pattern]):
        record = hal.explain(SILU, fake.id)
        assert codes(record) == {"fake.silu": {"policy"}} and pattern in record.refusals[0].actual


def test_pin_refuses_the_others(fresh: pytest.MonkeyPatch) -> None:
    with installed(Fake(kernels=[kernel("a.silu", priority=5), kernel("b.silu")])) as fake:
        with hal.policy(pin={"silu_mul": "b.*"}):
            record = hal.explain(SILU, fake.id)
            assert record.chosen == "b.silu" and record.refusals[0].field == "pin"
        with hal.policy(pin={"silu_mul": "c.*"}), pytest.raises(hal.UnsupportedError, match=r"pinned kernel c\.\*"):
            hal.bind(SILU, fake.id)
        with hal.policy(pin={"gemm": "b.*"}):
            assert hal.bind(SILU, fake.id).kernel == "a.silu"


def test_strict_admits_certified_kernels_only(fresh: pytest.MonkeyPatch) -> None:
    with installed(Fake(kernels=[kernel("a.silu", priority=5), kernel("b.silu")])) as fake:
        with hal.policy(strict=True), pytest.raises(hal.UnsupportedError, match="certified"):
            hal.bind(SILU, fake.id)
        evidence.store(evidence.Evidence("silu_mul", "b.silu", "fake", "", "F1", "1.0", "1", "abc", "today"))
        with hal.policy(strict=True):
            bound = hal.bind(SILU, fake.id)
            assert bound.kernel == "b.silu" and codes(bound.record) == {"a.silu": {"evidence"}}


def test_environment(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("HAL_DENY", "a.silu, other")
    fresh.setenv("HAL_STRICT", "off")
    fresh.setenv("HAL_ALLOW_CPU_FALLBACK", "YES")
    fresh.setenv("HAL_PIN_SILU_MUL", "b.silu")
    forget()
    current = policies.current()
    assert (current.deny, current.strict, current.allow_cpu_fallback) == (("a.silu", "other"), False, True)
    assert current.pin["silu_mul"] == "b.silu"
    with installed(Fake(kernels=[kernel("a.silu", priority=5), kernel("b.silu")])) as fake:
        assert hal.bind(SILU, fake.id).kernel == "b.silu"


@pytest.mark.parametrize("name", ["HAL_STRICT", "HAL_ALLOW_CPU_FALLBACK", "HAL_TRACE"])
def test_a_switch_that_is_none(fresh: pytest.MonkeyPatch, name: str) -> None:
    fresh.setenv(name, "maybe")
    forget()
    with pytest.raises(ContractError) as caught:
        config.load()
    assert caught.value.argument == name


FILE = """
[plugins]
allow = ["fake"]
[policy]
strict = true
prefer = ["b.*"]
deny = ["c.silu"]
pin = {gemm = "torch.gemm"}
"""


def test_file_and_environment_over_it(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hal.toml").write_text(FILE)
    fresh.setenv("HAL_CONFIG", str(tmp_path / "hal.toml"))
    forget()
    read = config.load()
    assert read.allow_plugins == {"fake"} and read.strict and read.prefer == ("b.*",) and read.deny == ("c.silu",)
    assert read.pin == {"gemm": "torch.gemm"}
    fresh.setenv("HAL_STRICT", "0")
    fresh.setenv("HAL_DENY", "")
    fresh.setenv("HAL_PLUGINS", "x,y")
    fresh.setenv("HAL_PIN_GEMM", "other")
    forget()
    read = config.load()
    assert not read.strict and read.deny == () and read.allow_plugins == {"x", "y"} and read.pin == {"gemm": "other"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("strict = true", "tables"), ("[policies]", "policies"), ("[policy]\nstrickt = true", "strickt"),
        ("[policy]\nstrict = 1", "strict"), ('[policy]\nprefer = "a"', "prefer"), ("[policy]\ndeny = [1]", "deny"),
        ("[policy]\npin = {gemm = 1}", "pin"), ("[policy", "TOML"), ("\xff", "TOML"), (None, "TOML"),
    ],
)  # fmt: skip
def test_errors_in_the_file(fresh: pytest.MonkeyPatch, tmp_path: Path, text: str | None, word: str) -> None:
    path = tmp_path / "hal.toml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    fresh.setenv("HAL_CONFIG", str(path))
    forget()
    with pytest.raises(ContractError) as caught:
        config.load()
    assert caught.value.argument == "HAL_CONFIG" and word in str(caught.value) and str(path) in str(caught.value)
