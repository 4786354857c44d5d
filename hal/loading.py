"""Finding, loading and calling plugins; what failed to load is kept with its reason."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pluggy

from hal import config, generation, health, hookspecs
from hal.errors import ContractError
from hal.manifest import Manifest
from hal.types import PluginInfo

log = logging.getLogger("hal.loading")
GROUP = "hal.backends"

_manager = pluggy.PluginManager("hal")
_manager.add_hookspecs(hookspecs)
_infos: dict[str, PluginInfo] = {}
_discovered = False


def plugins() -> list[PluginInfo]:
    """Return every plugin that was found, those that failed to load included.

    >>> [p.name for p in plugins() if p.name == "cpu" and p.loaded]
    ['cpu']
    """
    discover()
    return [_infos[name] for name in sorted(_infos)]


def attached() -> dict[str, Any]:
    """Return the loaded plugins, name -> module or object, in order of name."""
    discover()
    return {name: plugin for name, plugin in sorted(_manager.list_name_plugin()) if plugin is not None}


def discover() -> None:
    """Load the installed plugins once, each step isolated: a plugin that fails never stops another."""
    global _discovered
    if _discovered:
        return
    with generation.lock:
        if _discovered:
            return
        config.load()  # an error in the settings is the caller's to know, not the fault of a plugin
        _discovered = True
        # Importing it costs 10 ms or more, and a process that only registers in-process plugins needs it too late.
        from importlib.metadata import entry_points

        for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
            _load_entry(entry.name, entry.value.partition(":")[0].strip(), entry.dist.name if entry.dist else "?")
        generation.bump()


def register(plugin: Any, manifest: Mapping[str, Any]) -> None:
    """Register an in-process plugin: a module or object with the hook functions.

    Args:
        plugin: carries functions marked with ``hal.hookspecs.hookimpl``.
        manifest: what ``hal_manifest.json`` would hold.

    Raises:
        ContractError: malformed manifest, contract out of range, a name already taken, or a wrong hook signature.
    """
    discover()
    parsed = Manifest.parse(manifest)
    contract = parsed.negotiate()
    with generation.lock:
        known = _infos.get(parsed.name)
        if known is not None and known.loaded:
            raise ContractError("manifest.name", "a name not yet taken", repr(parsed.name))
        _attach(parsed.name, plugin)
        _infos[parsed.name] = PluginInfo(parsed.name, parsed.version, contract, True)
        generation.bump()


def unregister(name: str) -> None:
    """Remove a loaded plugin; its kernels are replaced wherever they are bound.

    Raises:
        ContractError: no plugin of that name is loaded.
    """
    with generation.lock:
        if name not in _infos or not _infos[name].loaded:
            raise ContractError("name", "a loaded plugin", repr(name))
        _manager.unregister(name=name)
        del _infos[name]
        health.forget(name)
        generation.bump()


def call(name: str, hook: str, **arguments: Any) -> Any:
    """Call one hook of one plugin. None when the plugin does not implement it. Exceptions pass through."""
    for implementation in getattr(_manager.hook, hook).get_hookimpls():  # a copy: plugins may come and go meanwhile
        if implementation.plugin_name == name:
            return implementation.function(*(arguments[argument] for argument in implementation.argnames))
    return None


def _load_entry(name: str, module: str, distribution: str) -> None:
    info = PluginInfo(name, "?", "?", False)
    try:
        manifest = Manifest.read(module)
        info = PluginInfo(manifest.name, manifest.version, "?", False)
        refusal = _not_allowed(manifest.name)
        if refusal:
            _keep(replace(info, error=refusal))
            return
        if manifest.name in _infos and _infos[manifest.name].loaded:
            raise ContractError("manifest.name", "a name not yet taken", f"{manifest.name!r} again from {distribution}")
        info = replace(info, contract=manifest.negotiate())
        _attach(manifest.name, importlib.import_module(module))
        if manifest.name in _infos:  # one of that name that failed makes room
            _keep(_infos.pop(manifest.name))
        _infos[manifest.name] = replace(info, loaded=True)
    # A plugin may do anything at import, sys.exit included; only Ctrl-C is not its fault.
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        log.warning("plugin %s from %s did not load: %s: %s", name, distribution, type(error).__name__, error)
        text = str(error) if isinstance(error, ContractError) else f"{type(error).__name__}: {error}"
        _keep(replace(info, error=text))


def _keep(info: PluginInfo) -> None:
    """File the record of a plugin that failed, beside another one of the same name rather than over it."""
    name = info.name
    while name in _infos or _manager.has_plugin(name):
        name += " (duplicate)"
    _infos[name] = replace(info, name=name)


def _not_allowed(name: str) -> str | None:
    settings = config.load()
    if settings.allow_plugins is not None and name not in settings.allow_plugins:
        return f"not in the allow list (HAL_PLUGINS={','.join(sorted(settings.allow_plugins))})"
    if name in settings.deny:
        return "denied (HAL_DENY or the configuration file)"
    return None


def _attach(name: str, plugin: Any) -> None:
    try:
        _manager.register(plugin, name=name)
    except pluggy.PluginValidationError as error:
        if _manager.has_plugin(name):
            _manager.unregister(name=name)
        raise ContractError("plugin", "hook functions with the signatures of hal.hookspecs", str(error)) from error
    except ValueError as error:  # the same object under two names
        raise ContractError("plugin", "an object not yet registered", str(error)) from error
