"""The ``hal`` command. Subcommands of other packages join through the entry-point group ``hal.commands``."""

from hal.cli.main import main

__all__ = ["main"]
