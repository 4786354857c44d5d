"""The device ``onnxruntime:cpu``, and how its claims word their limits."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

from hal.constraint import OneOf
from hal.dtype import DType
from hal.types import Device

ID = "onnxruntime:cpu"
F32, F16 = DType.float32, DType.float16


@dataclass(frozen=True)
class OneOfBecause(OneOf):
    """``OneOf`` that tells in ``hal explain`` why there is no more.

    >>> str(OneOfBecause({"HND"}, "its cache is head-major"))
    'one of HND (its cache is head-major)'
    """

    why: str = ""

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.why})"


FLOATS = OneOfBecause({F32, F16}, "ONNX Runtime's CPU provider has no bfloat16 or fp8 Attention or MatMul")


def probe() -> Device:
    """Describe the CPU provider; unavailable, with the fix, when a package is missing or broken."""
    common: dict[str, Any] = {
        "id": ID,
        "plugin": "onnxruntime",
        "vendor": "microsoft",
        "sku": platform.processor() or platform.machine(),
        "arch": platform.machine(),
    }
    try:
        import onnx  # noqa: F401  (model protos are made with it)
        import onnxruntime
    except Exception as error:  # a broken shared object raises OSError, a mismatched one whatever it likes
        reason = f"cannot import onnxruntime and onnx: {error}; fix: pip install 'onnxruntime>=1.23' onnx"
        return Device(**common, available=False, reason=reason, evidence="none")
    return Device(
        **common,
        runtime=f"onnxruntime {onnxruntime.__version__}",
        memory_bytes=memory_info()[1] or None,
        # float16 is stored; the products and sums are made in float32.
        native_dtypes=frozenset({F32}),
        emulated_dtypes=frozenset({F16}),
        features=frozenset({"host_visible"}),
        limits={"threads": threads()},
        evidence="hardware",
    )


def threads() -> int:
    """Threads that one call may use: ``OMP_NUM_THREADS``, else the usable CPUs, at most 8.

    Each session has a pool of its own, so the bound also keeps the number of idle threads sane.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, 8)


def memory_info() -> tuple[int, int]:
    """(free, total) bytes of host memory; zeros where the system does not tell."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0, 0
