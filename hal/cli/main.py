"""The command group: built-in commands, commands of other packages, and what errors look like."""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import click

import hal
from hal.cli.devices import devices
from hal.cli.plugins import plugins
from hal.errors import ContractError, DeviceLost, HalError, UnsupportedError

GROUP = "hal.commands"


class Commands(click.Group):
    """The built-in commands and those of installed packages; one that fails to load breaks itself only."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(entry.name for entry in entry_points(group=GROUP))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        built_in = super().get_command(ctx, cmd_name)
        if built_in is not None:
            return built_in
        found = next((entry for entry in entry_points(group=GROUP) if entry.name == cmd_name), None)
        return None if found is None else _load(found)


def _load(entry: EntryPoint) -> click.Command:
    try:
        command = entry.load()
        if isinstance(command, click.Command):
            return command
        problem = f"{entry.value} is no click command"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    reason = f"the command could not be loaded from {entry.value}: {problem}"

    @click.command(entry.name, help=reason, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1)
    def broken(arguments: tuple[str, ...]) -> NoReturn:
        raise click.ClickException(reason)

    return broken


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hal.__version__, prog_name="hal")
def cli() -> None:
    """Run operators of language models on whatever accelerators this machine has.

    \b
    Exit codes: 0 done, 1 a check failed, 2 bad arguments, 3 no device or kernel fits.
    """


cli.add_command(devices)
cli.add_command(plugins)


def main() -> None:
    """Run the command line; errors of HAL become one clear message and an exit code."""
    if sys.stdout is None:  # closed by the caller, who wants the exit code alone
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        sys.exit(cli.main(prog_name="hal", standalone_mode=False) or 0)
    except click.exceptions.Abort:  # Ctrl-C
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2 if isinstance(error, click.UsageError) else error.exit_code)
    except HalError as error:
        if os.environ.get("HAL_TRACE"):  # read bare: the settings themselves may be what is wrong
            raise
        click.echo(f"hal: {error}", err=True)
        sys.exit(exit_code(error))
    except BrokenPipeError:  # the reader of our output, such as head, went away
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:  # a full disk under stdout, say
        if os.environ.get("HAL_TRACE"):
            raise
        click.echo(f"hal: {error}", err=True)
        sys.exit(1)


def exit_code(error: HalError) -> int:
    """Return the exit code of an error: 2 for a bad argument, 3 where no device or kernel fits, else 1."""
    unfit = isinstance(error, UnsupportedError | DeviceLost)
    unknown_device: Any = isinstance(error, ContractError) and error.argument == "device"
    if unfit or unknown_device:
        return 3
    return 2 if isinstance(error, ContractError) else 1
