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
def loaded() -> Session:
    """The model, once: it is placed anew for each pairing, and keeps the weights that a device has packed."""
    return open_session(open_model(None), prefill="cpu:0", decode="cpu:0")


@pytest.fixture(scope="module")
def reference(loaded: Session) -> dict[str, list[int]]:
    """What transformers alone generates for each prompt."""
    return {prompt: loaded.reference_tokens(loaded.encode(prompt), TOKENS) for prompt in PROMPTS}


@pytest.mark.parametrize(("prefill", "decode"), [*product(DEVICES, DEVICES)])
def test_tokens_equal_those_of_transformers(
    loaded: Session, reference: dict[str, list[int]], prefill: str, decode: str
) -> None:
    session = Session(loaded.model, loaded.tokenizer, loaded.stock, prefill=prefill, decode=decode)
    found = {prompt: session.generate(session.encode(prompt), max_tokens=TOKENS) for prompt in PROMPTS}
    assert {prompt: done.tokens for prompt, done in found.items()} == reference
    formats = session.kv_formats
    for prompt, done in found.items():
        # Equal formats, as of one device with itself, need no conversion.
        assert (done.kv_bytes_moved > 0) == (formats["prefill"] != formats["decode"]), prompt
    for role in ("prefill", "decode"):
        assert session.kernels[role].keys() >= {"attention", "gemm", "kv_write"}
