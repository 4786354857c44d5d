"""Errors of the serving side that a user can act on."""

from __future__ import annotations

from hal.errors import HalError


class ModelError(HalError):
    """The model or the prompt cannot be used: missing, corrupt, of an unsupported kind, too long."""


class DeviceError(HalError):
    """The device that was asked for is unknown or unavailable."""
