"""Evidence: records that a kernel passed the suite on this plugin build, SKU and driver, and how fast it was.

Records are JSON files in ``HAL_CACHE_DIR/evidence``. They are local and unsigned: they prove
nothing to anybody who does not trust this machine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from hal import config, generation
from hal.types import Device, OpSpec

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("hal.evidence")


@dataclass(frozen=True)
class Evidence:
    """One record. ``latency_s`` maps ``str(OpSpec)`` to measured seconds."""

    op: str
    kernel: str
    plugin: str
    build: str
    sku: str
    driver: str
    suite: str
    result_hash: str
    date: str
    latency_s: Mapping[str, float] = field(default_factory=dict)

    def why_invalid(self, device: Device) -> str | None:
        """Return what differs between the record and the device in use, or None."""
        pairs = (
            ("plugin build", self.build, build_hash(device.plugin)),
            ("SKU", self.sku, device.sku),
            ("driver", self.driver, device.driver),
        )
        return next(
            (f"{what} {now or '?'} (proven on {then or '?'})" for what, then, now in pairs if then != now), None
        )


def folder() -> Path:
    """Return where records lie."""
    from pathlib import Path

    return Path(config.load().cache_dir) / "evidence"


def store(record: Evidence) -> Path:
    """Write one record, replacing an earlier one of the same kernel, operator, plugin and SKU."""
    import hashlib
    import json

    key = hashlib.sha256("\0".join((record.op, record.kernel, record.plugin, record.sku)).encode()).hexdigest()[:16]
    path = folder() / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(record), indent=1, sort_keys=True), encoding="utf-8")
    temporary.replace(path)  # atomic: a killed process leaves the old record or the new one
    with generation.lock:
        _load.cache_clear()
        generation.bump()
    return path


def find(device: Device, op: str, kernel: str) -> Evidence | None:
    """Return the record of a kernel of the device's plugin, valid or not."""
    return _load().get((device.plugin, op, kernel, device.sku)) or _load().get((device.plugin, op, kernel))


def latency(record: Evidence | None, spec: OpSpec) -> float:
    """Return the measured seconds, infinity when not measured."""
    return record.latency_s.get(str(spec), float("inf")) if record else float("inf")


@lru_cache(maxsize=1)
def _load() -> dict[tuple[str, ...], Evidence]:
    import json

    found: dict[tuple[str, ...], Evidence] = {}
    if not folder().is_dir():
        return found
    for path in sorted(folder().glob("*.json")):
        try:
            record = Evidence(**_fields(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError) as error:
            log.warning("evidence %s is unreadable and ignored: %s", path, error)
            continue
        found[record.plugin, record.op, record.kernel, record.sku] = record
        found.setdefault((record.plugin, record.op, record.kernel), record)
    return found


def _fields(data: Any) -> dict[str, Any]:
    """Check the kinds of what a file holds: a record that is believed takes part in every choice."""
    latency_s = data.get("latency_s", {}) if isinstance(data, dict) else None
    if not isinstance(latency_s, dict) or not all(type(seconds) in (int, float) for seconds in latency_s.values()):
        raise ValueError("not an object with latencies in seconds")
    if not all(isinstance(value, str) for name, value in data.items() if name != "latency_s"):
        raise ValueError("a field that is no text")
    return dict(data)


@cache
def build_hash(plugin: str) -> str:
    """Return the sha256 over the files of a plugin's package, its shared objects included."""
    import hashlib
    import importlib.util
    from pathlib import Path

    try:
        spec = importlib.util.find_spec(f"hal_{plugin}")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return ""
    root = Path(next(iter(spec.submodule_search_locations)))
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(root)).encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()
