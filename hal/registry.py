"""Devices and kernels of all loaded plugins, asked once and kept until their plugin leaves."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hal import generation, health, loading
from hal.errors import ContractError, UnsupportedError
from hal.types import Device, Kernel

if TYPE_CHECKING:
    from hal.memory import DeviceMemory

log = logging.getLogger("hal.registry")

_devices: dict[str, Device] = {}
_kernels: dict[str, list[Kernel]] = {}
_memories: dict[str, DeviceMemory | None] = {}
_problems: dict[str, str] = {}  # device id -> what its plugin's hal_kernels raised
_asked: dict[str, Any] = {}  # the plugins that the tables above are made of


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
    """Return every kernel of one device. A plugin whose hook raises has none; ``problem`` says why."""
    target = device(id)
    with generation.lock:
        found = _kernels.get(id)
        if found is None:
            answer, problem = _ask(target.plugin, "hal_kernels", device=target)
            found = _kernels[id] = [kernel for kernel in answer or [] if isinstance(kernel, Kernel)]
            if problem:
                _problems[id] = problem
        return found


def problem(id: str) -> str | None:
    """Return why the plugin of a device could not name its kernels, or None."""
    return _problems.get(id)


def find_memory(id: str) -> DeviceMemory | None:
    """Return the ``DeviceMemory`` of one device, None when its plugin has no memory hook.

    Raises:
        UnsupportedError: the hook raised.
    """
    target = device(id)
    with generation.lock:
        if id not in _memories:
            answer, problem = _ask(target.plugin, "hal_memory", device=target)
            if problem:
                raise UnsupportedError(f"{id}: {problem}")
            _memories[id] = answer
        return _memories[id]


def memory(id: str) -> DeviceMemory:
    """Return the ``DeviceMemory`` of one device.

    Raises:
        ContractError: its plugin has no memory hook.
        UnsupportedError: the hook raised.
    """
    found = find_memory(id)
    if found is None:
        raise ContractError("device", "a device whose plugin implements hal_memory", id)
    return found


def _table() -> dict[str, Device]:
    if loading.attached() != _asked:
        with generation.lock:
            _update(loading.attached())
    return _devices


def _update(plugins: dict[str, Any]) -> None:
    """Ask the plugins that are new and forget those that left; the others keep devices, kernels and memories."""
    global _devices, _asked
    changed = {name for name in {*plugins, *_asked} if plugins.get(name) is not _asked.get(name)}
    found = [entry for entry in _devices.values() if entry.plugin not in changed]
    found += [entry for name in plugins if name in changed for entry in _probe(name)]
    for table in (_kernels, _memories, _problems):
        for id in [id for id in table if id.partition(":")[0] in changed]:
            del table[id]
    _devices, _asked = {entry.id: entry for entry in sorted(found, key=lambda entry: entry.id)}, plugins


def _probe(name: str) -> list[Device]:
    found, problem = _ask(name, "hal_devices")
    if not isinstance(found, list | tuple):
        reason = problem or f"hal_devices of plugin {name} is missing or returned no list"
        return [Device(id=f"{name}:0", plugin=name, vendor=name, available=False, reason=reason)]
    return [entry for entry in found if _owns(name, entry)]


def _owns(name: str, entry: Any) -> bool:
    own = isinstance(entry, Device) and entry.plugin == name and entry.id.startswith(f"{name}:") and entry.id.islower()
    if not own:
        log.warning("plugin %s reports %r, which is no device of its own: ignored", name, entry)
    return own


def _ask(name: str, hook: str, **arguments: Any) -> tuple[Any, str | None]:
    """Return what a hook answers and what went wrong. One plugin must not stop the others, by sys.exit neither."""
    try:
        return loading.call(name, hook, **arguments), None
    except (Exception, SystemExit) as error:
        problem = f"{hook} of plugin {name} raised {type(error).__name__}: {error}"
        log.warning(problem, exc_info=True)
        return None, problem


def _with_health(entry: Device) -> Device:
    reason = health.device_reason(entry.id)
    return entry if reason is None else replace(entry, available=False, reason=reason)
