"""``hal devices``."""

from __future__ import annotations

from typing import Any

import click

import hal
from hal.cli.output import json_option, print_json, print_table, size
from hal.types import Device


@click.command()
@json_option
def devices(as_json: bool) -> None:
    """List every device of every plugin, those that cannot be used with the reason and the fix."""
    found = hal.devices(all=True)
    if as_json:
        print_json([record(device) for device in found])
        return
    rows = [
        (
            device.id,
            device.vendor,
            " ".join(filter(None, (device.sku, device.arch and f"({device.arch})"))),
            size(device.memory_bytes),
            ", ".join(sorted(device.native_dtypes)) + _emulated(device),
            device.evidence if device.evidence == "hardware" else f"{device.evidence} (not run on hardware)",
            "yes" if device.available else f"no: {device.reason}",
        )
        for device in found
    ]
    print_table("Devices", ("id", "vendor", "device", "memory", "dtypes", "evidence", "usable"), rows)
    if not found:
        click.echo("No backend plugin is installed; try: pip install hal-cpu", err=True)


def _emulated(device: Device) -> str:
    return f" (emulated: {', '.join(sorted(device.emulated_dtypes))})" if device.emulated_dtypes else ""


def record(device: Device) -> dict[str, Any]:
    """Return a device as the JSON output shows it."""
    return {
        "id": device.id,
        "vendor": device.vendor,
        "sku": device.sku,
        "arch": device.arch,
        "available": device.available,
        "reason": device.reason,
        "host_visible": "host_visible" in device.features,
        "dtypes": sorted(device.native_dtypes | device.emulated_dtypes),
        "emulated_dtypes": sorted(device.emulated_dtypes),
        "memory_bytes": device.memory_bytes,
        "evidence": device.evidence,
        "driver": device.driver,
        "runtime": device.runtime,
    }
