"""Settings from the TOML file that HAL_CONFIG names and from the environment, which wins."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hal.errors import ContractError

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


@dataclass(frozen=True)
class Config:
    """What the operator of this process set. ``allow_plugins`` is None when every plugin may load."""

    allow_plugins: frozenset[str] | None = None
    deny: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    pin: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    allow_cpu_fallback: bool = False
    trace: bool = False
    cache_dir: str = ""


@lru_cache(maxsize=1)
def load() -> Config:
    """Read the settings once per process; ``load.cache_clear()`` forgets them.

    The file has two tables, both optional::

        [plugins]
        allow = ["cpu", "onnxruntime"]
        [policy]
        strict = false
        allow_cpu_fallback = false
        prefer = ["torch.*"]
        deny = ["onnxruntime"]
        pin = {attention = "torch.attention"}

    Raises:
        ContractError: the file is missing, is not TOML, or holds an unknown key or a value of another kind.
    """
    file = _read_file(os.environ.get("HAL_CONFIG"))
    plugins, policy = file.get("plugins", {}), file.get("policy", {})
    allow = _names("HAL_PLUGINS", plugins.get("allow"))
    pin = dict(policy.get("pin", {}))
    for name, value in os.environ.items():
        if name.startswith("HAL_PIN_") and value:
            pin[name.removeprefix("HAL_PIN_").lower()] = value
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    config = Config(
        allow_plugins=None if allow is None else frozenset(allow),
        deny=tuple(_names("HAL_DENY", policy.get("deny")) or ()),
        prefer=tuple(policy.get("prefer", ())),
        pin=pin,
        strict=_switch("HAL_STRICT", policy.get("strict", False)),
        allow_cpu_fallback=_switch("HAL_ALLOW_CPU_FALLBACK", policy.get("allow_cpu_fallback", False)),
        trace=_switch("HAL_TRACE", False),
        cache_dir=os.environ.get("HAL_CACHE_DIR") or os.path.join(home, "hal"),
    )
    if config.trace:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("hal").setLevel(logging.DEBUG)
    return config


_KINDS: dict[str, dict[str, type]] = {
    "plugins": {"allow": list},
    "policy": {"strict": bool, "allow_cpu_fallback": bool, "prefer": list, "deny": list, "pin": dict},
}


def _read_file(path: str | None) -> dict[str, Any]:
    if not path:
        return {}
    import tomllib  # only processes that have a file pay for it

    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ContractError("HAL_CONFIG", "a readable TOML file", f"{path}: {error}") from error
    for table, content in data.items():
        if table not in _KINDS or not isinstance(content, dict):
            raise ContractError("HAL_CONFIG", "the tables plugins and policy", f"{table} in {path}")
        for key, value in content.items():
            kind = _KINDS[table].get(key)
            if kind is None:
                raise ContractError("HAL_CONFIG", f"the keys {', '.join(_KINDS[table])} in {table}", f"{key} in {path}")
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            if not isinstance(value, kind) or not all(isinstance(item, str) for item in items):
                wanted = kind.__name__ + ("" if kind is bool else " of strings")
                raise ContractError("HAL_CONFIG", f"{table}.{key} of type {wanted}", f"{value!r} in {path}")
    return data


def _names(variable: str, default: list[str] | None) -> list[str] | None:
    value = os.environ.get(variable)
    return default if value is None else [name.strip() for name in value.split(",") if name.strip()]


def _switch(variable: str, default: bool) -> bool:
    value = os.environ.get(variable)
    if value is None:
        return default
    if value.lower() not in _TRUE | _FALSE:
        raise ContractError(variable, "1 or 0", repr(value))
    return value.lower() in _TRUE
