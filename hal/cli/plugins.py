"""``hal plugins``."""

from __future__ import annotations

from dataclasses import asdict

import click

import hal
from hal.cli.output import json_option, print_json, print_table


@click.command()
@json_option
def plugins(as_json: bool) -> None:
    """List the installed backend plugins, those that failed to load with their error."""
    found = hal.plugins()
    if as_json:
        print_json([asdict(plugin) for plugin in found])
        return
    rows = [(p.name, p.version, p.contract, "yes" if p.loaded else f"no: {p.error}") for p in found]
    print_table("Plugins", ("name", "version", "contract", "loaded"), rows)
