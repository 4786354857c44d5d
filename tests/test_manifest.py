"""Manifests: fields, and which contracts are spoken."""

from __future__ import annotations

from typing import Any

import pytest
from fake_backend import manifest

from hal import ContractError
from hal.manifest import Manifest


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"name": None}, "manifest.name"), ({"name": ""}, "manifest.name"), ({"name": "Fake"}, "manifest.name"),
        ({"name": "a:b"}, "manifest.name"), ({"vendor": 3}, "manifest.vendor"), ({"version": ""}, "manifest.version"),
        ({"contract": None}, "manifest.contract"), ({"contract": "1.0"}, "manifest.contract"),
        ({"contract": {"min": "1.0"}}, "manifest.contract.max"),
        ({"contract": {"min": 1, "max": "1.0"}}, "manifest.contract.min"),
        ({"contract": {"min": "1.x", "max": "1.0"}}, "manifest.contract.min"),
        ({"contract": {"min": "1.1", "max": "1.0"}}, "manifest.contract"),
        ({"ops": "gemm"}, "manifest.ops"), ({"requires": [1]}, "manifest.requires"),
    ],
)  # fmt: skip
def test_malformed(fields: dict[str, Any], argument: str) -> None:
    with pytest.raises(ContractError) as caught:
        Manifest.parse(manifest(**fields))
    assert caught.value.argument == argument


@pytest.mark.parametrize("data", [None, [], "text"])
def test_no_mapping(data: Any) -> None:
    with pytest.raises(ContractError, match="manifest"):
        Manifest.parse(data)


@pytest.mark.parametrize(
    ("low", "high", "agreed"),
    [("1.0", "1.0", "1.0"), ("0.9", "1.0", "1.0"), ("1.0", "1.7", "1.0"), ("1.0", "2.0", "1.0")],
)
def test_highest_common_contract(low: str, high: str, agreed: str) -> None:
    assert Manifest.parse(manifest(contract={"min": low, "max": high})).negotiate() == agreed


@pytest.mark.parametrize(
    ("low", "high", "why"), [("0.1", "0.9", "too old"), ("1.1", "1.2", "too new"), ("2.0", "2.0", "too new")]
)
def test_no_common_contract(low: str, high: str, why: str) -> None:
    with pytest.raises(ContractError, match=why):
        Manifest.parse(manifest(contract={"min": low, "max": high})).negotiate()


def test_read_without_importing() -> None:
    with pytest.raises(ContractError, match="no such package"):
        Manifest.read("hal_of_nobody")
    with pytest.raises(ContractError, match="hal_manifest"):
        Manifest.read("json")
