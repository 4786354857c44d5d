"""``hal run``: the command line of the main job.

Exit codes: 0 done, 1 the tokens differ from transformers' own, 2 bad arguments, model or prompt,
3 no device or kernel fits, 130 interrupted.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hal import config
from hal.errors import ContractError, HalError, UnsupportedError
from hal_serving.errors import DeviceError, ModelError

if TYPE_CHECKING:
    from hal_serving.gguf import GGUFFile
    from hal_serving.run import Generation, Session

DEFAULT_PROMPT = "The capital of France is"
CHECK_FAILED, BAD_INPUT, NOTHING_FITS, INTERRUPTED = 1, 2, 3, 130


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    prompt: str
    model: Path | None
    prefill: str | None
    decode: str | None
    dtype: str
    max_tokens: int
    temperature: float
    seed: int
    chat: bool
    check: bool
    as_json: bool


def _finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter("not a finite number")
    return value


@click.command()
@click.argument("prompt", required=False)
@click.option("--prompt-file", metavar="FILE", help="Read the prompt from FILE, from standard input when it is '-'.")
@click.option("--model", type=click.Path(path_type=Path), help="A .gguf file or a folder with a model.")
@click.option("--prefill", metavar="DEVICE", help="Device of the prompt; see `hal devices`.")
@click.option("--decode", metavar="DEVICE", help="Device of the tokens after it.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=1), default=40, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, callback=_finite, help="0: greedy (default).")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of sampling.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option("--check/--no-check", default=True, help="Compare with transformers alone (float32, greedy).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def run(prompt: str | None, prompt_file: str | None, debug: bool, **options: Any) -> None:
    """Generate text: PROMPT is prefilled on one device and continued on another.

    Every attention, linear layer and KV move goes through HAL's operators.
    """
    with _exit_codes(debug or config.load().trace):
        _run(Options(prompt=_prompt(prompt, prompt_file), **options))


def _run(options: Options) -> None:
    from hal_serving.devices import pick_devices
    from hal_serving.source import open_model

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are local; nothing may wait for a network
    # Two backends bring two thread pools. An OpenMP thread that spins while the other pool works costs a factor of
    # three on a busy machine. The variable is read when torch is loaded, so it is set before any device is probed.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    source = open_model(options.model)  # what is wrong with the arguments shows before anything heavy is imported
    prefill, decode = pick_devices(options.dtype, options.prefill, options.decode)
    session = _load(source, options.dtype, prefill, decode)
    ids = session.encode(options.prompt, chat=options.chat)
    if options.as_json:
        done = _generate(session, ids, options)
        equal, interrupted = _compare(session, ids, done, options)
        click.echo(json.dumps(_json(session, done, equal), ensure_ascii=False))
    else:
        from hal_serving import report

        report.show_placement(session)
        click.echo(f"\n{options.prompt}", nl=False)
        done = _generate(session, ids, options)
        click.echo("\n")
        equal, interrupted = _compare(session, ids, done, options)
        report.show_result(session, done, equal)
    if interrupted:
        sys.exit(INTERRUPTED)
    if equal is False:
        sys.exit(CHECK_FAILED)


def _load(source: GGUFFile | Path, dtype: str, prefill: str, decode: str) -> Session:
    from hal_serving.report import loading

    with loading() as progress:
        progress("libraries", 0, 1)
        from transformers.utils import logging

        from hal_serving.run import open_session

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        return open_session(source, dtype=dtype, prefill=prefill, decode=decode, progress=progress)


def _generate(session: Session, ids: list[int], options: Options) -> Generation:
    show = (lambda piece: None) if options.as_json else (lambda piece: click.echo(piece, nl=False))
    return session.generate(
        ids, max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed, on_text=show
    )


def _compare(session: Session, ids: list[int], done: Generation, options: Options) -> tuple[bool | None, bool]:
    """(tokens equal those of transformers alone, or None when that says nothing; interrupted)."""
    if done.stopped == "interrupted":
        return None, True
    if not options.check or options.dtype != "float32" or options.temperature != 0:
        return None, False
    from hal_serving.report import waiting

    try:
        with waiting("comparing with transformers alone"):
            return session.reference_tokens(ids, options.max_tokens) == done.tokens, False
    except KeyboardInterrupt:
        return None, True


def _json(session: Session, done: Generation, equal: bool | None) -> dict[str, Any]:
    kernels = {role: {op: ", ".join(names) for op, names in ops.items()} for role, ops in session.kernels.items()}
    return {
        "text": done.text,
        "tokens": done.tokens,
        "reference_equal": equal,
        "ttft_s": done.prefill_s,
        "prefill_tokens_per_s": done.prefill_tokens_per_s,
        "decode_tokens_per_s": done.decode_tokens_per_s,
        "kv_bytes_moved": done.kv_bytes_moved,
        "kv_formats": session.kv_formats,
        "prefill": session.prefill,
        "decode": session.decode,
        "kernels": kernels,
        "prompt_tokens": done.prompt_tokens,
        "stopped": done.stopped,
    }


def _prompt(prompt: str | None, prompt_file: str | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give PROMPT or --prompt-file, not both")
    text = _read(prompt_file) if prompt_file is not None else DEFAULT_PROMPT if prompt is None else prompt
    if not text.strip():
        raise ModelError("the prompt is empty")
    return text


def _read(prompt_file: str) -> str:
    """The text of a prompt file. One newline at its end belongs to the file, not to the prompt."""
    try:
        if prompt_file == "-" and sys.stdin is None:
            raise ModelError("cannot read the prompt: standard input is closed")
        raw = sys.stdin.buffer.read() if prompt_file == "-" else Path(prompt_file).read_bytes()
        return raw.decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise ModelError(f"cannot read the prompt file {prompt_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"the prompt file {prompt_file} is not UTF-8: {error.reason} at byte {error.start}") from error


@contextmanager
def _exit_codes(debug: bool) -> Iterator[None]:
    """Turn every exception into one line on stderr and an exit code; with ``debug`` the traceback comes first."""
    try:
        yield
    except (click.ClickException, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        if debug:
            traceback.print_exc()
        click.echo(f"hal run: {_line(error)}", err=True)
        sys.exit(_code(error))


def _line(error: Exception) -> str:
    if isinstance(error, UnsupportedError):
        return "; ".join([error.message, *dict.fromkeys(map(str, error.refusals))])
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install 'hal-serving[transformers]'"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, HalError) else f"{type(error).__name__}: {text} (--debug shows where)"


def _code(error: Exception) -> int:
    if isinstance(error, (DeviceError, UnsupportedError)):
        return NOTHING_FITS
    return BAD_INPUT if isinstance(error, (ModelError, ContractError, ModuleNotFoundError)) else CHECK_FAILED
