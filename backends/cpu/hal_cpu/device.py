"""Which processor is this? Facts of ``/proc/cpuinfo`` where there is one, else of ``platform``."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from hal.types import Device, DType

_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "hygon"}
_ARM_IMPLEMENTERS = {"0x41": "arm", "0x48": "hisilicon", "0x51": "qualcomm", "0x61": "apple", "0x70": "phytium"}
# Widest first: (suffix of arch, flag of /proc/cpuinfo).
_VECTORS = (("avx512", "avx512f"), ("avx2", "avx2"), ("sve2", "sve2"), ("sve", "sve"), ("neon", "asimd"))
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def probe() -> Device:
    """Describe the host processor; not available where torch cannot be imported."""
    runtime, reason = _torch()
    facts = _cpuinfo()
    flags = frozenset((facts.get("flags") or facts.get("Features") or "").split())
    native = {DType.float32} | ({DType.bfloat16} if flags & _BF16_FLAGS else set())
    return Device(
        id="cpu:0",
        plugin="cpu",
        vendor=_vendor(facts),
        sku=facts.get("model name") or platform.processor() or platform.machine(),
        arch=_arch(platform.machine().lower(), flags),
        driver=f"{platform.system().lower()} {platform.release()}",
        runtime=runtime,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        native_dtypes=frozenset(native),
        emulated_dtypes=frozenset({DType.float16, DType.bfloat16} - native),
        features=frozenset({"host_visible", "dlpack"}),
        limits={"threads": _threads()},
        available=reason is None,
        reason=reason,
        tensor_device="cpu",
        evidence="hardware" if reason is None else "none",
    )


def _torch() -> tuple[str, str | None]:
    """The version of torch, or why there is none. A broken installation raises OSError."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return "", f"torch cannot be imported ({error}): pip install torch"
    return f"torch {torch.__version__}", None


def _cpuinfo(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """The fields of the first processor; empty where the file does not exist."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    pairs = re.findall(r"^([^\t:\n]+?)\s*:[ \t]*(.*)$", text.split("\n\n")[0], re.MULTILINE)
    return dict(pairs)


def _vendor(facts: dict[str, str]) -> str:
    if name := facts.get("vendor_id"):
        return _VENDORS.get(name, name.lower())
    if code := facts.get("CPU implementer"):
        return _ARM_IMPLEMENTERS.get(code, "arm")
    return "apple" if platform.system() == "Darwin" else "unknown"


def _arch(machine: str, flags: frozenset[str]) -> str:
    vectors = next((name for name, flag in _VECTORS if flag in flags), None)
    return f"{machine}-{vectors}" if vectors else machine


def _threads() -> int:
    """Processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
