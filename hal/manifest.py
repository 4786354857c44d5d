"""A plugin's manifest: data that is read without importing the plugin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hal.errors import ContractError

CONTRACT = (1, 0)  # the newest contract that this runtime speaks


@dataclass(frozen=True)
class Manifest:
    """Name, version and contract range (both ends inclusive) of a plugin, and what it needs."""

    name: str
    vendor: str
    version: str
    contract_min: tuple[int, int]
    contract_max: tuple[int, int]
    ops: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    hint: str = ""

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Manifest:
        """Check the manifest's fields.

        Raises:
            ContractError: a field is missing or malformed; ``argument`` is ``manifest.<field>``.
        """
        if not isinstance(data, Mapping):
            raise ContractError("manifest", "a mapping", type(data).__name__)
        for key in ("name", "vendor", "version"):
            if not isinstance(data.get(key), str) or not data[key]:
                raise ContractError(f"manifest.{key}", "a non-empty string", repr(data.get(key)))
        if not re.fullmatch(r"[a-z0-9_]+", data["name"]):
            raise ContractError("manifest.name", "lower case letters, digits and _", repr(data["name"]))
        contract = data.get("contract")
        if not isinstance(contract, Mapping):
            raise ContractError("manifest.contract", '{"min": "1.0", "max": "1.0"}', repr(contract))
        low, high = (_version(f"manifest.contract.{end}", contract.get(end)) for end in ("min", "max"))
        if low > high:
            raise ContractError("manifest.contract", "min at most max", f"{contract}")
        lists = {key: _strings(f"manifest.{key}", data.get(key, ())) for key in ("ops", "requires")}
        return cls(data["name"], data["vendor"], data["version"], low, high, hint=str(data.get("hint", "")), **lists)

    @classmethod
    def read(cls, module: str) -> Manifest:
        """Read ``hal_manifest.json`` beside the package ``module`` without importing it.

        Raises:
            ContractError: no such package, no manifest, or a malformed one.
        """
        import importlib.util
        import json
        from pathlib import Path

        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError) as error:
            raise ContractError("plugin", f"an importable package {module}", str(error)) from error
        if found is None or not found.submodule_search_locations:
            raise ContractError("plugin", f"an installed package {module}", "no such package")
        path = Path(next(iter(found.submodule_search_locations))) / "hal_manifest.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ContractError(
                "manifest", "a readable JSON file hal_manifest.json in the package", str(error)
            ) from error
        return cls.parse(data)

    def negotiate(self) -> str:
        """Return the highest contract that both sides speak, as "major.minor".

        Raises:
            ContractError: the plugin is too old or too new for this runtime.
        """
        ours = "{}.{}".format(*CONTRACT)
        theirs = "{}.{} to {}.{}".format(*self.contract_min, *self.contract_max)
        if self.contract_max < (CONTRACT[0], 0):
            raise ContractError("manifest.contract", f"contract {ours} (the plugin is too old)", theirs)
        if self.contract_min > CONTRACT:
            raise ContractError(
                "manifest.contract", f"contract {ours} (the plugin is too new; upgrade hal-runtime)", theirs
            )
        return "{}.{}".format(*min(CONTRACT, self.contract_max))


def _version(name: str, value: Any) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d+)", value) if isinstance(value, str) else None
    if match is None:
        raise ContractError(name, 'a string "major.minor"', repr(value))
    return int(match[1]), int(match[2])


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ContractError(name, "a list of strings", repr(value))
    return tuple(value)
