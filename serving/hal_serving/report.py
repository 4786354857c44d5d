"""What ``hal run`` prints beside the text: tables on stdout, progress on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import hal
from hal.cli import output
from hal.types import Explanation

if TYPE_CHECKING:
    from hal_serving.run import Generation, Session

_STEPS = {
    "libraries": "loading transformers and torch",
    "weights": "placing weights",
    "tokenizer": "building the tokenizer",
    "kernels": "binding kernels, packing weights",
}


@contextmanager
def loading() -> Iterator[Callable[[str, int, int], None]]:
    """A progress line on stderr; yields the function (step, done, total) that moves it."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")

        def progress(step: str, done: int, total: int) -> None:
            # A step of one piece has no length to show: the bar pulses.
            bar.update(task, description=_STEPS[step], completed=done, total=total if total > 1 else None)

        yield progress


def waiting(what: str) -> AbstractContextManager[object]:
    """A spinner on stderr."""
    return Console(stderr=True).status(what)


def show_placement(session: Session) -> None:
    """Print the devices and which kernel serves each operator, and why."""
    console = output.console()
    devices = Table("device", "what it is", "", title="devices", title_justify="left")
    for device in hal.devices(all=True):
        state = "available" if device.available else f"not available: {device.reason}"
        devices.add_row(device.id, device.sku or device.vendor, state)
    console.print(devices)
    kernels = Table(title="kernels", title_justify="left")
    for column in ("operator", "role", "device", "kernel", "why"):
        kernels.add_column(column, overflow="fold")
    for row in sorted(_rows(session), key=lambda row: (row[0], row[1] != "prefill", *row[2:])):
        kernels.add_row(*row)
    console.print(kernels)
    console.print("`hal explain OPERATOR …` tells every refusal.", style="dim")


def _rows(session: Session) -> set[tuple[str, ...]]:
    """(operator, role, device, kernel, why); a device that was asked first and has no kernel stands in the last."""
    without = {(op, role): device for role, op, device, found in session.explanations if found.chosen is None}
    rows: set[tuple[str, ...]] = set()
    for role, op, device, found in session.explanations:
        if found.chosen is not None:
            passed = f"; {without[op, role]} has none" if (op, role) in without else ""
            rows.add((op, role, device, found.chosen, why(found) + passed))
    return rows


def why(explanation: Explanation) -> str:
    """One phrase on why the chosen kernel was chosen.

    >>> from hal.types import OpSpec
    >>> why(Explanation(OpSpec("gemm", (1, 0), {}), "a.gemm", (), {}, 0))
    'the only candidate'
    """
    outranked = {refusal.kernel for refusal in explanation.refusals if refusal.field == "rank"}
    refused = {refusal.kernel for refusal in explanation.refusals} - outranked
    if not outranked and not refused:
        return "the only candidate"
    place = f"ranks before {', '.join(sorted(outranked))}" if outranked else "the only one that fits"
    return f"{place}; {len(refused)} refused" if refused else place


def show_result(session: Session, done: Generation, equal: bool | None) -> None:
    """Print the measurements and the comparison with transformers alone."""
    formats = session.kv_formats
    lines = {
        "stopped": {
            "eos": "end of text",
            "length": "--max-tokens",
            "context": "the context is full",
            "interrupted": "interrupted",
        }[done.stopped],
        "time to first token": f"{done.prefill_s:.3f} s ({done.prompt_tokens} prompt tokens)",
        "prefill": f"{done.prefill_tokens_per_s:.1f} tokens/s on {session.prefill}",
        "decode": f"{done.decode_tokens_per_s:.1f} tokens/s on {session.decode} ({len(done.tokens)} tokens)",
        "KV moved": f"{done.kv_bytes_moved} bytes, from [{formats['prefill']}] to [{formats['decode']}]",
    }
    for name, value in lines.items():
        print(f"{name}: {value}")
    verdict = {True: "yes", False: "no", None: "not checked"}[equal]
    print(f"greedy tokens equal to transformers alone: {verdict}")
