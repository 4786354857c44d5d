"""The whole surface of a plugin. Hooks are called plugin by plugin, never broadcast.

Beside these hooks a plugin carries ``hal_<vendor>/hal_manifest.json``, read without importing it:
``{"name", "vendor", "version", "contract": {"min", "max"}, "ops", "requires", "hint"}``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from hal.types import Device, Kernel

if TYPE_CHECKING:
    from hal.memory import DeviceMemory

hookspec = pluggy.HookspecMarker("hal")
hookimpl = pluggy.HookimplMarker("hal")


@hookspec
def hal_devices() -> list[Device]:  # type: ignore[empty-body]
    """Every device of this plugin; without hardware one placeholder with ``available=False`` and the reason."""


@hookspec
def hal_kernels(device: Device) -> list[Kernel]:  # type: ignore[empty-body]
    """Every kernel that this plugin has for the device."""


@hookspec
def hal_memory(device: Device) -> DeviceMemory:  # type: ignore[empty-body]
    """How to allocate, copy and wrap arrays on the device."""


@hookspec
def hal_health(device: Device) -> str | None:
    """(optional) None when the device is well, else what is wrong with it."""
