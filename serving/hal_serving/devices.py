"""Which devices a run uses."""

from __future__ import annotations

import hal
from hal.types import Device
from hal_serving.errors import DeviceError

PREFERRED_PREFILL, PREFERRED_DECODE = "onnxruntime:cpu", "cpu:0"


def pick_devices(dtype: str, prefill: str | None = None, decode: str | None = None) -> tuple[str, str]:
    """The device ids for (prefill, decode); a role that is not given gets the first that accepts ``dtype``.

    Raises:
        DeviceError: a device is unknown or unavailable.
    """
    known = {device.id: device for device in hal.devices(all=True)}
    for name in filter(None, (prefill, decode)):
        _demand(name, known)
    usable = [PREFERRED_PREFILL, PREFERRED_DECODE]
    usable = [name for name in usable if name in known and known[name].available and _accepts(known[name], dtype)]
    if not (prefill and decode) and not usable:
        _demand(PREFERRED_DECODE, known)
        raise DeviceError(f"no default device accepts {dtype}: name them with --prefill and --decode")
    return (prefill or usable[0]).lower(), (decode or usable[-1]).lower()


def _demand(name: str, known: dict[str, Device]) -> None:
    device = known.get(name.lower())
    if device is None:
        raise DeviceError(f"unknown device {name!r}; known devices: {', '.join(sorted(known)) or 'none'}")
    if not device.available:
        raise DeviceError(f"device {name} is not available: {device.reason or 'it gives no reason'}")


def _accepts(device: Device, dtype: str) -> bool:
    return hal.DType.parse(dtype) in device.native_dtypes | device.emulated_dtypes
