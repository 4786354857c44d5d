"""HAL: who computes an operator. Devices, plugins, matching, binding, policy, health, explanation.

What is computed is the business of ``hal_ops``; how, that of the backend plugins.
"""

from hal.array import Array
from hal.binding import bind, explain
from hal.dtype import DType
from hal.errors import (
    CompileError,
    ContractError,
    DeviceLost,
    HalError,
    NumericError,
    OutOfMemory,
    TransientError,
    UnsupportedError,
)
from hal.health import quarantine
from hal.loading import plugins, register, unregister
from hal.memory import asarray, check, empty, to_device, to_host
from hal.placement import use
from hal.policies import policy
from hal.registry import device, devices
from hal.types import (
    Bound,
    Claim,
    Device,
    Event,
    Explanation,
    Flags,
    Kernel,
    MultipleOf,
    OneOf,
    OpSpec,
    PluginInfo,
    Range,
    Refusal,
    RefusalCode,
)

__version__ = "0.1.0"
__all__ = [
    "Array",
    "Bound",
    "Claim",
    "CompileError",
    "ContractError",
    "DType",
    "Device",
    "DeviceLost",
    "Event",
    "Explanation",
    "Flags",
    "HalError",
    "Kernel",
    "MultipleOf",
    "NumericError",
    "OneOf",
    "OpSpec",
    "OutOfMemory",
    "PluginInfo",
    "Range",
    "Refusal",
    "RefusalCode",
    "TransientError",
    "UnsupportedError",
    "asarray",
    "bind",
    "check",
    "device",
    "devices",
    "empty",
    "explain",
    "plugins",
    "policy",
    "quarantine",
    "register",
    "to_device",
    "to_host",
    "unregister",
    "use",
]
