"""The main job: a language model through the operators, prefill on one device and decode on another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hal.types import Explanation
from hal_serving.errors import ModelError
from hal_serving.gguf import GGUFFile
from hal_serving.model import hal_model, stock_from_folder, stock_model
from hal_serving.tokenizer import load_tokenizer
from hal_serving.transformers import use_hal

Progress = Callable[[str, int, int], None]  # step, done, total
_WARM_UP_TOKENS = 4


@dataclass(kw_only=True)
class Generation:
    """What one prompt gave. ``tokens`` are the generated ids, the one that ended them included."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stopped: str = "length"  # "eos", "length", "context" (it is full) or "interrupted"
    prefill_s: float = 0.0
    decode_s: float = 0.0
    kv_bytes_moved: int = 0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second until the first token was known; 0 when it never was."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first; 0 when there was none."""
        return (len(self.tokens) - 1) / self.decode_s if self.decode_s else 0.0


class Session:
    """A loaded model with its tokenizer and its two devices. Generates one prompt at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        stock: Callable[[], PreTrainedModel],
        *,
        prefill: str,
        decode: str,
    ) -> None:
        self.tokenizer = tokenizer
        self.prefill = prefill
        self.decode = decode
        self.model = model
        self.stock = stock
        self._reference: PreTrainedModel | None = None
        self._handle = use_hal(model, prefill=prefill, decode=decode).hal_handle

    @property
    def context(self) -> int:
        """The longest sequence, prompt and generated tokens together."""
        return int(self.model.config.max_position_embeddings)

    @property
    def kernels(self) -> dict[str, dict[str, list[str]]]:
        """Role -> operator -> names of the kernels that have served."""
        return self._handle.kernels

    @property
    def explanations(self) -> list[tuple[str, str, str, Explanation]]:
        """(role, operator, device, explanation) of every kernel that has served."""
        return self._handle.explanations

    @property
    def kv_formats(self) -> dict[str, str]:
        """Role -> format of its KV cache, in words."""
        return self._handle.kv_formats

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Token ids of ``prompt``, taken as it is or as a user's turn in the model's chat template.

        Raises:
            ModelError: empty, longer than the context leaves room for, or the model has no chat template.
        """
        if not prompt.strip():
            raise ModelError("the prompt is empty")
        if chat and not self.tokenizer.chat_template:
            raise ModelError("the model has no chat template: leave out --chat")
        if chat:
            turn = [{"role": "user", "content": prompt}]
            prompt = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(prompt, add_special_tokens=not chat).input_ids
        if len(ids) >= self.context:
            raise ModelError(f"the prompt has {len(ids)} tokens; the model's context of {self.context} leaves no room")
        return ids

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int = 40,
        temperature: float = 0.0,
        seed: int = 0,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Generation:
        """Continue ``prompt_ids``, greedily at temperature 0.

        ``on_text`` gets the text piece by piece, whole characters only. Ctrl-C ends the generation;
        what there is by then is returned.
        """
        room = self.context - len(prompt_ids)
        done = Generation(prompt_tokens=len(prompt_ids), stopped="length" if max_tokens <= room else "context")
        budget = min(max_tokens, room)
        choose = _chooser(temperature, seed)
        stream = TextStream(self.tokenizer, on_text)
        moved = self._handle.kv_bytes_moved
        cache = self._handle.cache(batch=1, max_len=len(prompt_ids) + budget)
        ids = torch.tensor([list(prompt_ids)])
        start = time.perf_counter()
        try:
            while len(done.tokens) < budget:
                logits = self.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
                ids = choose(ids, logits)
                done.tokens.append(int(ids))
                elapsed = time.perf_counter() - start
                done.prefill_s = done.prefill_s or elapsed
                done.decode_s = elapsed - done.prefill_s
                if done.tokens[-1] in self._eos_ids():
                    done.stopped = "eos"
                    break
                stream.push(done.tokens[-1])
        except KeyboardInterrupt:
            done.stopped = "interrupted"
        done.text = stream.finish(done.tokens)
        done.kv_bytes_moved = self._handle.kv_bytes_moved - moved
        return done

    def warm_up(self) -> None:
        """Bind every kernel by a short generation, so that the first real one measures work, not preparation."""
        prompt = [min(1, self.model.config.vocab_size - 1)] * _WARM_UP_TOKENS
        if self.generate(prompt, max_tokens=3).stopped == "interrupted":
            raise KeyboardInterrupt

    @torch.inference_mode()
    def reference_tokens(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """What transformers alone generates greedily in float32, from the same weights."""
        if self._reference is None:
            self._reference = self.stock()
        ids = torch.tensor([list(prompt_ids)])
        output = self._reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(max_tokens, self.context - len(prompt_ids)),
            do_sample=False,
            pad_token_id=next(iter(self._eos_ids()), 0),
        )
        return output[0, len(prompt_ids) :].tolist()

    def _eos_ids(self) -> set[int]:
        ids = self.model.generation_config.eos_token_id
        return set(ids) if isinstance(ids, list) else {ids} - {None}


class TextStream:
    """Turns token ids into text as they come, holding back characters that are not complete yet."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._on_text = on_text
        self._sent = ""

    def push(self, token: int) -> None:
        """Add one id and send what it completes."""
        self._send(self._stream.step(self._tokenizer.backend_tokenizer, token) or "")

    def finish(self, tokens: list[int]) -> str:
        """Send what was held back; returns the whole text."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if text.startswith(self._sent):
            self._send(text[len(self._sent) :])
        return text

    def _send(self, piece: str) -> None:
        if piece:
            self._sent += piece
            self._on_text(piece)


def _chooser(temperature: float, seed: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """fn(ids [1, L], logits [1, V]) -> the next id [1, 1]."""
    if temperature == 0:
        return lambda ids, logits: logits.argmax(-1, keepdim=True)
    warp = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    generator = torch.Generator().manual_seed(seed)

    def sample(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        probabilities = warp(ids, logits.float()).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator)

    return sample


def open_session(
    source: GGUFFile | Path,
    *,
    dtype: str = "float32",
    prefill: str,
    decode: str,
    progress: Progress = lambda step, done, total: None,
) -> Session:
    """Load a model, place it on two devices and bind its kernels.

    Args:
        source: a GGUF file or a Hugging Face folder, see ``open_model``.
        dtype: of activations and KV, and of weights that are not quantised.
        progress: called with ("weights" | "tokenizer" | "kernels", done, total).

    Raises:
        ModelError: the model is broken or of an unsupported kind.
        ContractError: unknown device.
        UnsupportedError: no kernel of a device fits; every reason is inside.
    """
    torch_dtype = getattr(torch, dtype)
    progress("weights", 0, 1)
    stock: Callable[[], PreTrainedModel]
    if isinstance(source, GGUFFile):
        model = hal_model(source, torch_dtype, partial(progress, "weights"))
        stock = partial(stock_model, source)
    else:
        model = stock_from_folder(source, torch_dtype)
        stock = partial(stock_from_folder, source, torch.float32)
    progress("tokenizer", 0, 1)
    tokenizer = load_tokenizer(source) if isinstance(source, GGUFFile) else _folder_tokenizer(source)
    progress("kernels", 0, 1)
    session = Session(model, tokenizer, stock, prefill=prefill, decode=decode)
    session.warm_up()
    return session


def _folder_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {str(error).splitlines()[0]}") from error
