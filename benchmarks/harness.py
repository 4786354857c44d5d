"""What the benchmarks share: interleaved timing, a description of the machine, a JSON result."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
import timeit
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("torch", "numpy", "onnxruntime", "transformers", "pluggy", "hal-runtime")


class Times(NamedTuple):
    """Median and best round: on a shared machine whole rounds run at half speed, and the best is the code alone."""

    median: float
    best: float


def interleave(
    calls: Mapping[str, Callable[[], Any] | str], *, number: int, rounds: int = 31, names: dict[str, Any] | None = None
) -> dict[str, Times]:
    """Return the processor seconds per call of each peer.

    The peers take turns, so that a busy machine hits all alike. A statement as text (with its ``names``) is timed
    without the function call around it.
    """
    timers = {name: timeit.Timer(call, timer=time.thread_time, globals=names) for name, call in calls.items()}
    for timer in timers.values():
        timer.timeit(number)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer.timeit(number) / number)
    return {name: Times(statistics.median(values), min(values)) for name, values in samples.items()}


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that a figure depends on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "versions": versions,
    }


def main(name: str, measure: Callable[[], dict[str, Any]]) -> None:
    """Run one benchmark from the command line: JSON to stdout and, with ``--out``, to a file."""
    parser = argparse.ArgumentParser(description=f"Benchmark: {name}")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    out: Path | None = parser.parse_args().out
    text = json.dumps({"benchmark": name, "machine": machine(), **measure()}, indent=1)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
