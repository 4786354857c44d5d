"""Error classes. The class of an error decides what the runtime does next; see ``hal.health``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal.types import Refusal


class HalError(Exception):
    """Base of every error that the runtime raises on purpose."""


class ContractError(HalError, ValueError):
    """An argument breaks the operator's contract. Nothing was written.

    >>> error = ContractError("k", "head_dim 64", "head_dim 80")
    >>> print(error)
    k: required head_dim 64, got head_dim 80
    """

    def __init__(self, argument: str, required: str, actual: str) -> None:
        super().__init__(argument, required, actual)
        self.argument = argument
        self.required = required
        self.actual = actual

    def __str__(self) -> str:
        return f"{self.argument}: required {self.required}, got {self.actual}"


class UnsupportedError(HalError):
    """No kernel fits. ``refusals`` holds the reason of every candidate."""

    def __init__(self, message: str, refusals: Sequence[Refusal] = ()) -> None:
        super().__init__(message, tuple(refusals))
        self.message = message
        self.refusals = tuple(refusals)

    def __str__(self) -> str:
        return "\n".join([self.message, *(f"  - {refusal}" for refusal in self.refusals)])


class CompileError(HalError):
    """A kernel could not be built. It is demoted when this is raised while binding."""


class OutOfMemory(HalError):
    """The device has no room for the call. Never demotes a kernel."""


class TransientError(HalError):
    """The call failed for a passing reason. Never demotes a kernel."""


class DeviceLost(HalError):
    """The device is gone. The runtime quarantines it."""

    def __init__(self, device: str, reason: str = "the device stopped answering") -> None:
        super().__init__(device, reason)
        self.device = device
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.device}: {self.reason}"


class NumericError(HalError):
    """A kernel produced numbers that cannot be right. The runtime quarantines the kernel."""
