"""``hal explain``: one subcommand per operator, its options made from the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

import hal
from hal.cli.output import json_option, print_json, print_table
from hal.errors import ContractError
from hal.match import show
from hal.types import DType, Explanation, OpSpec
from hal_ops.spec import VOCABULARY, Field, bucket, spec

# What people say -> the fields that it sets.
DTYPE_FIELDS = {
    "attention": ("q_dtype", "kv_dtype", "out_dtype"),
    "gemm": ("a_dtype", "b_dtype", "out_dtype"),
    "prepack": ("w_dtype",),
    "kv_write": ("k_dtype", "kv_dtype"),
    "kv_convert": ("src_dtype", "dst_dtype"),
    "rms_norm": ("dtype", "weight_dtype"),
    "rope": ("dtype", "cos_dtype"),
}
BUCKETED = ("m", "max_q", "max_kv", "batch")


@click.group()
def explain() -> None:
    """Tell which kernel would serve an operator, and why each other one would not.

    \b
    hal explain attention --dtype float16 --head-dim 64 --q-heads 9 --kv-heads 3 --paged
    """


def _option(name: str, field: Field) -> Callable[[Any], Any]:
    flag = f"--{name.replace('_', '-')}"
    if field.kind is bool:
        return click.option(flag, name, is_flag=True, default=None, help=field.doc)
    if field.kind is frozenset:
        choice = click.Choice(field.choices)
        return click.option("--feature", name, type=choice, multiple=True, help=f"{field.doc}; repeatable")
    if field.kind is DType:
        return click.option(flag, name, help=f"{field.doc} [dtype]")
    if field.choices:
        return click.option(flag, name, type=click.Choice(field.choices), help=field.doc)
    return click.option(flag, name, type=click.IntRange(min=0) if field.kind is int else str, help=field.doc)


def _command(op: str, vocabulary: dict[str, Field]) -> click.Command:
    def run(as_json: bool, device: str | None, **values: Any) -> None:
        _run(op, device, as_json, values)

    command: Any = run
    for name, field in reversed(vocabulary.items()):
        command = _option(name, field)(command)
    if op in DTYPE_FIELDS and "dtype" not in vocabulary:
        command = click.option("--dtype", help="sets " + ", ".join(DTYPE_FIELDS[op]) + " where they are not given")(
            command
        )
    if op == "attention":
        command = click.option("--q-heads", type=int, help="query heads; with --kv-heads it gives the gqa ratio")(
            command
        )
    command = click.option("--device", help="judge the kernels of this device only")(command)
    return click.command(op, help=f"Explain {op}. A field that is not given is not judged.")(json_option(command))


for _op, _vocabulary in VOCABULARY.items():
    explain.add_command(_command(_op, _vocabulary))


def _run(op: str, device: str | None, as_json: bool, values: dict[str, Any]) -> None:
    requested = _requested(op, values)
    devices = [hal.device(device)] if device else hal.devices(all=True)
    records = {target.id: hal.explain(requested, target) for target in devices}
    if as_json:
        print_json(_json(requested, records))
    else:
        _print(requested, records)
    if not any(record.chosen for record in records.values()):
        raise SystemExit(3)


def _requested(op: str, values: dict[str, Any]) -> OpSpec:
    fields = {name: value for name, value in values.items() if value is not None and value != ()}
    dtype = fields.get("dtype") if "dtype" in VOCABULARY[op] else fields.pop("dtype", None)
    if dtype is not None:
        for name in DTYPE_FIELDS.get(op, ()):
            fields.setdefault(name, dtype)
    q_heads = fields.pop("q_heads", None)
    if q_heads is not None:
        kv_heads = fields.setdefault("kv_heads", q_heads)
        if kv_heads < 1 or q_heads % kv_heads:
            raise ContractError("--q-heads", f"a multiple of --kv-heads {kv_heads}", str(q_heads))
        fields.setdefault("gqa_ratio", q_heads // kv_heads)
    if "head_dim" in fields and "v_head_dim" in VOCABULARY[op]:
        fields.setdefault("v_head_dim", fields["head_dim"])
    if fields.get("paged"):
        fields.setdefault("layout", "NHD")
        fields.setdefault("page", 16)
        fields.setdefault("table", "many")
    for name in BUCKETED:
        if name in fields:
            fields[name] = bucket(fields[name])
    return spec(op, **fields)


def _json(requested: OpSpec, records: dict[str, Explanation]) -> dict[str, Any]:
    first = next((record for record in records.values() if record.chosen), None)
    return {
        "requested": {"op": requested.op, **{name: _plain(value) for name, value in requested.fields.items()}},
        "chosen": first.chosen if first else None,
        "refusals": [asdict(refusal) for record in records.values() for refusal in record.refusals],
        "evidence": dict(first.evidence) if first else {},
        "devices": {device: record.chosen for device, record in records.items()},
    }


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def _print(requested: OpSpec, records: dict[str, Explanation]) -> None:
    asked = ", ".join(f"{name}={show(value)}" for name, value in sorted(requested.fields.items()))
    click.echo(f"{requested.op}: {asked or 'anything'}\n")
    if not records:
        click.echo("no device: no backend plugin is loaded (see hal plugins)")
    for where, record in records.items():
        facts = record.evidence
        verdict = f"{where} -> {record.chosen or 'no kernel'}"
        if record.chosen:
            verdict += (
                f"   [{facts['class']}, {'certified' if facts['certified'] else 'not certified'}, {facts['runtime']}]"
            )
        rows = [(r.kernel, r.code, r.field, r.required, r.actual, r.hint) for r in record.refusals]
        if rows:
            print_table(verdict, ("not chosen", "code", "field", "required", "actual", "hint"), rows)
        else:
            click.echo(verdict)
