"""The distributions are versioned together, and the manifests say the same as the packages."""

from __future__ import annotations

import importlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECTS = sorted(
    {ROOT / "pyproject.toml", *ROOT.glob("backends/*/pyproject.toml"), *ROOT.glob("serving/pyproject.toml")}
)
MANIFESTS = sorted(ROOT.glob("backends/*/hal_*/hal_manifest.json"))


def project(pyproject: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(pyproject.read_text())["project"]
    return table


VERSION = project(ROOT / "pyproject.toml")["version"]


def test_there_is_something_to_compare() -> None:
    assert len(PYPROJECTS) >= 5 and len(MANIFESTS) >= 2


@pytest.mark.parametrize("path", PYPROJECTS, ids=lambda path: path.parent.name)
def test_distribution_is_in_lockstep(path: Path) -> None:
    table = project(path)
    assert table["version"] == VERSION
    requirements = [
        *table.get("dependencies", []),
        *(r for rs in table.get("optional-dependencies", {}).values() for r in rs),
    ]
    for requirement in requirements:
        if requirement.startswith("hal-"):
            assert requirement.endswith(f"=={VERSION}"), f"{requirement}: pin the version of this repository"


def test_package_version_is_that_of_the_distribution() -> None:
    assert importlib.import_module("hal").__version__ == VERSION


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.parent.name)
def test_manifest_agrees(path: Path) -> None:
    manifest = json.loads(path.read_text())
    entry_points = project(path.parents[1] / "pyproject.toml")["entry-points"]["hal.backends"]
    assert manifest["version"] == VERSION
    assert entry_points == {manifest["name"]: path.parent.name}


def test_changelog_has_an_entry() -> None:
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_pin_torch_as_the_makefile_asks() -> None:
    pin = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert pin in (ROOT / "Makefile").read_text()
