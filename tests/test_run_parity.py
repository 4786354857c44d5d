"""Greedy tokens through HAL equal those of transformers alone, whoever prefills and whoever decodes."""

from __future__ import annotations

from itertools import product

import pytest

from hal_serving.run import Session, open_session
from hal_serving.source import open_model

TOKENS = 12
DEVICES = ("cpu:0", "onnxruntime:cpu")
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees",
    "Q: What is 12 + 30?\nA:",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "Die Hauptstadt von Deutschland ist",
    "La lune est un satellite naturel 🌙 de",
    "Hello",
    "The quick brown fox jumps over the lazy dog. " * 8 + "The dog",
]


@pytest.fixture(scope="module")
def reference() -> dict[str, list[int]]:
    """What transformers alone generates for each prompt."""
    session = _session("cpu:0", "cpu:0")
    return {prompt: session.reference_tokens(session.encode(prompt), TOKENS) for prompt in PROMPTS}


def _session(prefill: str, decode: str) -> Session:
    return open_session(open_model(None), prefill=prefill, decode=decode)


@pytest.mark.parametrize(("prefill", "decode"), product(DEVICES, DEVICES))
def test_tokens_equal_those_of_transformers(reference: dict[str, list[int]], prefill: str, decode: str) -> None:
    session = _session(prefill, decode)
    found = {prompt: session.generate(session.encode(prompt), max_tokens=TOKENS) for prompt in PROMPTS}
    assert {prompt: done.tokens for prompt, done in found.items()} == reference
    for prompt, done in found.items():
        # A prompt of one token has no prefill step of its own: nothing is handed over.
        assert (done.kv_bytes_moved > 0) == (done.prompt_tokens > 1), prompt
    assert session.kernels["prefill"].keys() >= {"attention", "gemm", "prepack", "kv_write"}
    assert session.kernels["decode"].keys() >= {"attention", "gemm", "prepack", "kv_write"}
