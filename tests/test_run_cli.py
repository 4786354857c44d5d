"""``hal run`` as a user meets it: output, options, and one line with an exit code for whatever goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transformers import LlamaConfig, LlamaForCausalLM

import hal
from hal_serving.cli import run as command
from hal_serving.gguf import GGUFFile
from hal_serving.run import Session, TextStream, open_session
from hal_serving.source import bundled_model, open_model
from hal_serving.tokenizer import load_tokenizer

QUICK = ("--max-tokens", "6")


def hal_run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """``hal run`` in a process of its own."""
    line = [sys.executable, "-m", "hal.cli", "run", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, **options)


def in_process(*arguments: str | Path) -> Result:
    """``hal run`` here, which saves the import of transformers."""
    return CliRunner().invoke(command, [*map(str, arguments)])


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Nothing on stdout, one line on stderr with all ``words``, the exit code."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


# ---------------------------------------------------------------- what goes wrong


def test_a_bad_model_is_one_line_and_exit_2(tmp_path: Path) -> None:
    refused(hal_run("--model", tmp_path / "absent.gguf"), 2, "no such model", "absent.gguf")
    refused(hal_run("--model", tmp_path), 2, "neither a .gguf file nor a config.json")
    corrupt, truncated = tmp_path / "corrupt.gguf", tmp_path / "truncated.gguf"
    corrupt.write_bytes(b"not a model at all")
    refused(hal_run("--model", corrupt), 2, "corrupt.gguf", "not a GGUF file")
    with bundled_model().open("rb") as file:
        truncated.write_bytes(file.read(3 << 20))
    refused(hal_run("--model", truncated), 2, "truncated.gguf", "the file is truncated", str(3 << 20))


def test_a_bad_folder_is_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = in_process("--model", tmp_path)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr and str(tmp_path) in done.stderr


def test_a_bad_prompt_is_one_line_and_exit_2(tmp_path: Path) -> None:
    refused(hal_run(""), 2, "the prompt is empty")
    refused(hal_run("--prompt-file", "-", input=" \n"), 2, "the prompt is empty")
    refused(hal_run("--prompt-file", tmp_path / "absent"), 2, "cannot read the prompt file", "No such file")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    refused(hal_run("--prompt-file", tmp_path / "latin"), 2, "is not UTF-8", "byte 3")


def test_a_prompt_longer_than_the_context_gives_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("word " * 9000)
    done = in_process("--prompt-file", tmp_path / "long")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "the prompt has 9001 tokens" in done.stderr and "8192" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dtype", "int8"),
        ("--max-tokens", "0"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--seed", "-1"),
        ("--no-such-option",),
        ("a prompt", "--prompt-file", "-"),
    ],
)
def test_bad_arguments_exit_2(arguments: tuple[str, ...]) -> None:
    done = in_process(*arguments)
    assert done.exit_code == 2
    assert done.stdout == "" and "Error" in done.stderr


def test_a_device_that_is_not_there_is_one_line_and_exit_3() -> None:
    refused(hal_run("--prefill", "quantum:0"), 3, "unknown device 'quantum:0'", "cpu:0")
    assert in_process("--decode", "quantum:0", "--json").exit_code == 3


def test_an_unavailable_device_gives_its_reason_and_exit_3(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = hal.Device(
        id="absent:0", plugin="absent", vendor="nobody", available=False, reason="no driver: install one"
    )
    listed = [*hal.devices(all=True), absent]
    monkeypatch.setattr(hal, "devices", lambda all=False: listed)
    done = in_process("--prefill", "absent:0")
    assert done.exit_code == 3
    assert "device absent:0 is not available: no driver: install one" in done.stderr


def test_when_no_kernel_fits_the_reasons_are_printed_and_exit_3() -> None:
    with hal.policy(deny=["*.attention"]):
        done = in_process(*QUICK, "--prefill", "cpu:0", "--decode", "cpu:0")
    assert done.exit_code == 3
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert "torch.attention [policy] deny" in done.stderr


# ---------------------------------------------------------------- what goes right


def test_json_is_the_only_thing_on_stdout() -> None:
    done = hal_run("The capital of France is", *QUICK, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["text"].startswith(" Paris")
    assert len(result["tokens"]) == 6
    assert result["reference_equal"] is True
    for rate in ("ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s", "kv_bytes_moved"):
        assert result[rate] > 0
    assert (result["prefill"], result["decode"]) == ("onnxruntime:cpu", "cpu:0")
    for role in ("prefill", "decode"):
        assert {"attention", "gemm", "kv_write"} <= result["kernels"][role].keys()
    assert result["kv_formats"]["prefill"] != result["kv_formats"]["decode"]


def test_the_report_names_devices_kernels_and_numbers() -> None:
    done = in_process("The capital of France is", *QUICK)
    assert done.exit_code == 0, done.stderr
    for words in ("onnxruntime:cpu", "cpu:0", "attention", "kv_convert", "The capital of France is Paris"):
        assert words in done.stdout
    for words in ("time to first token:", "prefill:", "decode:", "KV moved:"):
        assert words in done.stdout
    assert done.stdout.endswith("greedy tokens equal to transformers alone: yes\n")


def test_sampling_depends_on_the_seed_alone() -> None:
    session = open_session(open_model(None), prefill="cpu:0", decode="cpu:0")
    ids = session.encode("Once upon a time")
    first, again, other = (session.generate(ids, max_tokens=8, temperature=1.5, seed=seed).tokens for seed in (1, 1, 2))
    assert first == again != other


def test_bfloat16_runs_on_the_cpu_and_compares_with_nothing() -> None:
    result = json.loads(in_process(*QUICK, "--dtype", "bfloat16", "--json").stdout)
    assert (result["prefill"], result["decode"], result["reference_equal"]) == ("cpu:0", "cpu:0", None)
    assert "Paris" in result["text"]


def test_a_difference_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "reference_tokens", lambda self, ids, limit: [0])
    done = in_process(*QUICK, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["reference_equal"] is False


def test_the_chat_template_makes_an_answer(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("What is the capital of France?\n")
    options = ("--chat", "--prompt-file", tmp_path / "prompt", "--no-check", "--json", "--max-tokens", "40")
    result = json.loads(in_process(*options).stdout)
    assert "Paris" in result["text"] and "<|im_end|>" not in result["text"]
    assert result["stopped"] == "eos"
    assert result["reference_equal"] is None


def test_a_hugging_face_folder_runs(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(GGUFFile.open(bundled_model()))
    tokenizer.save_pretrained(tmp_path)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    done = in_process("--model", tmp_path, "--json", *QUICK)
    result = json.loads(done.stdout)
    assert done.exit_code == 0, done.stderr
    assert result["reference_equal"] is True and 0 < len(result["tokens"]) <= 6


def test_text_comes_in_whole_characters() -> None:
    tokenizer = load_tokenizer(GGUFFile.open(bundled_model()))
    text = "naïve 漢字 🙂👩‍👩‍👧 end"
    tokens = tokenizer(text).input_ids
    pieces: list[str] = []
    stream = TextStream(tokenizer, pieces.append)
    for token in tokens:
        stream.push(token)
    assert stream.finish(tokens) == text == "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)


def test_ctrl_c_prints_what_there_is_and_exits_130() -> None:
    prompt = "Once upon a time, in a village by the sea,"  # the model has much to say about it
    line = [sys.executable, "-m", "hal.cli", "run", prompt, "--max-tokens", "4000", "--no-check"]

    def heed() -> None:  # a shell that runs its jobs in the background lets them ignore SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed) as process:
        assert process.stdout is not None and process.stderr is not None
        seen = b""
        while not seen.partition(prompt.encode())[2].strip():  # until the first token beyond the prompt
            piece = os.read(process.stdout.fileno(), 65536)
            assert piece, process.stderr.read().decode()
            seen += piece
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors.decode()
    assert "stopped: interrupted" in rest.decode()
    assert b"Traceback" not in errors
