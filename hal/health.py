"""Quarantine, demotion and pending errors: what the runtime remembers about failures, by class.

UNSUPPORTED raised before any side effect -> the kernel is passed over for that specification.
COMPILE -> demoted at bind. OOM and TRANSIENT -> raised, nothing remembered.
DEVICE_LOST -> the device is quarantined. NUMERIC -> the kernel is quarantined on that device.
"""

from __future__ import annotations

import logging

from hal import generation
from hal.errors import CompileError, DeviceLost, HalError, NumericError, UnsupportedError
from hal.types import OpSpec, Refusal, RefusalCode

log = logging.getLogger("hal.health")

_devices: dict[str, str] = {}  # device id -> reason
_kernels: dict[tuple[str, str], str] = {}  # (device id or "*", kernel) -> reason
_demoted: dict[tuple[str, str, OpSpec], list[Refusal]] = {}
_pending: dict[str, HalError] = {}


def quarantine(device_or_kernel: str, *, reason: str) -> None:
    """Stop using a device (``"cuda:0"``) or a kernel (``"torch.gemm"``, on every device) until the process ends.

    Whatever was bound to it is bound anew at once; a bound slot with no other candidate raises
    ``UnsupportedError`` when called.
    """
    with generation.lock:
        if ":" in device_or_kernel:
            _devices[device_or_kernel.lower()] = reason
        else:
            _kernels["*", device_or_kernel] = reason
        log.warning("%s is quarantined: %s", device_or_kernel, reason)
        generation.bump()


def release(device_or_kernel: str) -> None:
    """Lift a quarantine, after a repair or between tests."""
    with generation.lock:
        _devices.pop(device_or_kernel.lower(), None)
        for key in [key for key in _kernels if key[1] == device_or_kernel]:
            del _kernels[key]
        generation.bump()


def forget(plugin: str) -> None:
    """Drop what was held against kernels that left with their plugin. Quarantines stay: they may be the hardware's."""
    prefix = f"{plugin}:"
    for key in [key for key in _demoted if key[0].startswith(prefix)]:
        del _demoted[key]
    for device in [device for device in _pending if device.startswith(prefix)]:
        _pending.pop(device, None)


def device_reason(device: str) -> str | None:
    """Return why the device is quarantined, or None."""
    reason = _devices.get(device)
    return None if reason is None else f"quarantined: {reason}"


def refusals(device: str, kernel: str, spec: OpSpec) -> list[Refusal]:
    """Return what is held against a kernel on a device for a specification."""
    reason = _kernels.get((device, kernel)) or _kernels.get(("*", kernel))
    if reason is not None:
        return [Refusal(kernel, RefusalCode.quarantined, "health", "a kernel in good health", reason)]
    return _demoted.get((device, kernel, spec), [])


def observe(device: str, kernel: str, spec: OpSpec, error: Exception) -> bool:
    """Remember a failure of a bound kernel. True when another candidate may serve the same call.

    Only ``UnsupportedError`` promises that nothing was written, so only it allows that.
    """
    observe_device(device, error)
    if isinstance(error, NumericError):
        with generation.lock:
            _kernels[device, kernel] = str(error)
            log.warning("%s on %s is quarantined: %s", kernel, device, error)
            generation.bump()
    elif isinstance(error, UnsupportedError):
        found = list(error.refusals) or [Refusal(kernel, RefusalCode.feature, "call", "a supported call", str(error))]
        demote(device, kernel, spec, found)
        return True
    return False


def observe_device(device: str, error: Exception) -> None:
    """Quarantine a device that is lost."""
    if isinstance(error, DeviceLost):
        quarantine(device, reason=error.reason)


def demote(device: str, kernel: str, spec: OpSpec, reasons: list[Refusal]) -> None:
    """Pass over a kernel for one specification from now on."""
    with generation.lock:
        _demoted[device, kernel, spec] = reasons
        log.warning("%s on %s is passed over for %s: %s", kernel, device, spec, reasons[0])
        generation.bump()


def build_refusals(kernel: str, error: Exception) -> list[Refusal]:
    """Turn what ``Kernel.build`` raised into refusals."""
    if isinstance(error, UnsupportedError) and error.refusals:
        return list(error.refusals)
    what = str(error) if isinstance(error, CompileError) else f"{type(error).__name__}: {error}"
    return [Refusal(kernel, RefusalCode.quarantined, "build", "a kernel that builds", what)]


def post(device: str, error: HalError) -> None:
    """Leave an asynchronous error to be raised by ``hal.check`` or the next call on the device."""
    _pending.setdefault(device.lower(), error)


def raise_pending(device: str) -> None:
    """Raise and forget the error that was posted for the device, if any."""
    error = _pending.pop(device, None) if _pending else None
    if error is not None:
        raise error
