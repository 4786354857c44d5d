"""Evidence records: storing, finding, validity, and their weight in the ranking."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_backend import SILU, Fake, installed, kernel

import hal
from hal import config, evidence
from hal.evidence import Evidence

RECORD = Evidence("silu_mul", "a.silu", "fake", "", "F1", "1.0", "1.0", "abc", "2026-11-30", {str(SILU): 2e-6})


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
    config.load.cache_clear()
    evidence._load.cache_clear()
    yield tmp_path / "evidence"
    monkeypatch.undo()
    config.load.cache_clear()
    evidence._load.cache_clear()


@pytest.fixture
def fake() -> Iterator[Fake]:
    with installed(Fake(kernels=[kernel("a.silu"), kernel("b.silu", priority=5)])) as found:
        yield found


def test_store_and_find(fake: Fake, cache: Path) -> None:
    device = fake.devices[0]
    assert evidence.find(device, "silu_mul", "a.silu") is None
    path = evidence.store(RECORD)
    assert path.parent == cache and not list(cache.glob("*.tmp"))
    assert evidence.find(device, "silu_mul", "a.silu") == RECORD
    assert RECORD.why_invalid(device) is None and evidence.latency(RECORD, SILU) == 2e-6
    evidence.store(replace(RECORD, date="later"))
    assert len(list(cache.iterdir())) == 1
    found = evidence.find(device, "silu_mul", "a.silu")
    assert found is not None and found.date == "later"
    assert evidence.find(device, "gemm", "a.silu") is None and evidence.find(device, "silu_mul", "b.silu") is None


@pytest.mark.parametrize(("field", "word"), [("build", "plugin build"), ("sku", "SKU"), ("driver", "driver")])
def test_evidence_of_something_else_is_invalid(fake: Fake, field: str, word: str) -> None:
    evidence.store(replace(RECORD, **{field: "another"}))
    found = evidence.find(fake.devices[0], "silu_mul", "a.silu")
    assert found is not None
    why = found.why_invalid(fake.devices[0])
    assert why is not None and word in why and "another" in why
    assert hal.bind(SILU, fake.id).kernel == "b.silu"
    with hal.policy(strict=True), pytest.raises(hal.UnsupportedError, match="another"):
        hal.bind(SILU, fake.id)


def test_valid_evidence_beats_priority_and_latency_decides_among_it(fake: Fake) -> None:
    bound = hal.bind(SILU, fake.id)
    assert bound.kernel == "b.silu" and bound.record.evidence["certified"] is False
    evidence.store(RECORD)
    assert bound.kernel == "a.silu" and bound.record.evidence["certified"] is True, "slots follow new evidence"
    assert bound.record.evidence["result_hash"] == "abc"
    evidence.store(replace(RECORD, kernel="b.silu", latency_s={str(SILU): 1e-6}))
    assert bound.kernel == "b.silu"
    evidence.store(replace(RECORD, kernel="b.silu", latency_s={}))
    assert bound.kernel == "a.silu", "measured comes before not measured"
    with hal.policy(prefer=["b.*"]):
        assert bound.kernel == "b.silu", "preference comes before evidence"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe", b"[]", b"3", b"null", b'{"op": "silu_mul"}', "unknown", "latency", "seconds", "text",
    ],
)  # fmt: skip
def test_a_corrupt_file_is_ignored(fake: Fake, cache: Path, content: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = evidence.store(RECORD)
    data = json.loads(path.read_text())
    changes = {
        "unknown": {"x": 1},
        "latency": {"latency_s": [1]},
        "seconds": {"latency_s": {"a": "b"}},
        "text": {"op": []},
    }
    raw = content if isinstance(content, bytes) else json.dumps(data | changes[content]).encode()
    (cache / "0.json").write_bytes(raw)
    evidence._load.cache_clear()
    assert evidence.find(fake.devices[0], "silu_mul", "a.silu") == RECORD
    assert "0.json" in caplog.text and hal.bind(SILU, fake.id).kernel == "a.silu"


def test_build_hash_follows_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "hal_hashed"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = evidence.build_hash("hashed")
    (package / "kernel.so").write_bytes(b"1")
    (package / "__pycache__").mkdir()
    evidence.build_hash.cache_clear()
    second = evidence.build_hash("hashed")
    assert len(first) == len(second) == 64 and first != second
    (package / "__pycache__" / "x.pyc").write_bytes(b"1")
    evidence.build_hash.cache_clear()
    assert evidence.build_hash("hashed") == second and evidence.build_hash("of_nobody") == ""
