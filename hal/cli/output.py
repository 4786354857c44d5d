"""What commands share: ``--json``, tables, consoles. JSON goes to stdout alone; everything else may wrap and colour."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

json_option: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON value to stdout."
)


def print_json(value: Any) -> None:
    """Print one JSON value."""
    click.echo(json.dumps(value, indent=2, default=str))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table; long cells fold, nothing is cut off."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    console().print(table)


def console() -> Console:
    """Return the console of stdout. A pipe or a file has no width of its own and gets room for whole words."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
    return Console(width=width, markup=False, emoji=False)  # reasons hold [brackets] of their own


def size(count: int | None) -> str:
    """Write a number of bytes for people.

    >>> size(3 << 30)
    '3.0 GiB'
    """
    if count is None:
        return ""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(count.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{count / 1024**power:.{1 if power else 0}f} {units[power]}"
