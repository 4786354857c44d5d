"""Devices and kernels of all loaded plugins, asked once and kept until plugins change."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hal import generation, health, loading
from hal.errors import ContractError
from hal.types import Device, Kernel

if TYPE_CHECKING:
    from hal.memory import DeviceMemory

log = logging.getLogger("hal.registry")

_devices: dict[str, Device] | None = None
_kernels: dict[str, list[Kernel]] = {}
_memories: dict[str, DeviceMemory | None] = {}
_asked: tuple[str, ...] = ()  # the plugins that the tables above are made of


def devices(*, all: bool = False) -> list[Device]:
    """Return the usable devices, sorted by id; with ``all`` also those that are not, with their reason.

    >>> "cpu:0" in [device.id for device in devices()]
    True
    """
    return [found for found in map(_with_health, _table().values()) if all or found.available]


def device(id: str) -> Device:
    """Return the device of that id, available or not.

    Raises:
        ContractError: no plugin has a device of that id.
    """
    if not isinstance(id, str):
        raise ContractError("device", "a device id like 'cpu:0' or a hal.Device", repr(id))
    found = _table().get(id.lower())
    if found is None:
        known = ", ".join(_table()) or "none: no backend plugin is installed"
        raise ContractError("device", f"one of the known devices ({known})", repr(id))
    return _with_health(found)


def resolve(target: str | Device) -> Device:
    """Return the device that ``target`` names or is, as the registry knows it now."""
    return device(target.id if isinstance(target, Device) else target)


def kernels(id: str) -> list[Kernel]:
    """Return every kernel of one device. A plugin whose hook raises has none, and the log says why."""
    _table()
    with generation.lock:
        if id not in _kernels:
            _kernels[id] = _ask(device(id).plugin, "hal_kernels", device=device(id)) or []
        return _kernels[id]


def find_memory(id: str) -> DeviceMemory | None:
    """Return the ``DeviceMemory`` of one device, None when its plugin has no memory hook."""
    _table()
    if id not in _memories:
        with generation.lock:
            target = device(id)
            _memories[id] = loading.call(target.plugin, "hal_memory", device=target)
    return _memories[id]


def memory(id: str) -> DeviceMemory:
    """Return the ``DeviceMemory`` of one device.

    Raises:
        ContractError: its plugin has no memory hook.
    """
    found = find_memory(id)
    if found is None:
        raise ContractError("device", "a device whose plugin implements hal_memory", id)
    return found


def _table() -> dict[str, Device]:
    global _devices, _asked
    names = tuple(loading.loaded())
    if _devices is None or names != _asked:
        with generation.lock:
            found = [entry for name in names for entry in _probe(name)]
            _devices = {entry.id: entry for entry in sorted(found, key=lambda entry: entry.id)}
            _asked = names
            _kernels.clear()
            _memories.clear()
    return _devices


def _probe(name: str) -> list[Device]:
    found = _ask(name, "hal_devices")
    if found is None:
        reason = "the plugin's probe failed; see the log (HAL_TRACE=1)"
        return [Device(id=f"{name}:0", plugin=name, vendor=name, available=False, reason=reason)]
    for entry in found:
        if entry.plugin != name or not entry.id.startswith(f"{name}:") or entry.id != entry.id.lower():
            log.warning("plugin %s reports the device %s, which is not its own: ignored", name, entry.id)
    return [entry for entry in found if entry.plugin == name and entry.id.startswith(f"{name}:") and entry.id.islower()]


def _ask(name: str, hook: str, **arguments: Any) -> Any:
    try:
        return loading.call(name, hook, **arguments)
    except Exception as error:
        log.warning("%s of plugin %s raised %s: %s", hook, name, type(error).__name__, error, exc_info=True)
        return None


def _with_health(entry: Device) -> Device:
    reason = health.device_reason(entry.id)
    return entry if reason is None else replace(entry, available=False, reason=reason)
