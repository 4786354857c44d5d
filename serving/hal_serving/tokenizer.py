"""The tokenizer of a GGUF file, built straight from its metadata.

Byte-level BPE with a known pre-tokenizer is assembled here in a fraction of a second; everything
else goes through transformers' conversion, which takes many seconds for the same result.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hal_serving.errors import ModelError
from hal_serving.gguf import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# How text is cut before merging. Names are those of tokenizer.ggml.pre.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLIT = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2}
_GPT2 = {"default", "gpt-2"}
_DIGITS_APART = {"smollm"}


def load_tokenizer(file: GGUFFile) -> PreTrainedTokenizerBase:
    """The tokenizer with special tokens and chat template as the file states them.

    Raises:
        ModelError: the metadata is incomplete, or transformers cannot convert it either.
    """
    metadata = file.metadata
    known = metadata.get("tokenizer.ggml.pre", "default") in {*_SPLIT, *_GPT2, *_DIGITS_APART}
    if file.require("tokenizer.ggml.model") == "gpt2" and known:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=_byte_level_bpe(file), **_special_tokens(file))
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
        except Exception as error:  # the conversion raises whatever its parts raise
            raise ModelError(f"{file.path}: the tokenizer cannot be converted: {error}") from error
    if not tokenizer.chat_template:
        tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _byte_level_bpe(file: GGUFFile) -> Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    tokens = file.require("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
    try:
        model = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=_SPLIT.get(pre) == _LLAMA3,
        )
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{file.path}: the vocabulary is inconsistent: {error}") from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if _SPLIT.get(pre) == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        add(
            [
                AddedToken(tokens[i], special=kind == _CONTROL, normalized=False)
                for i, k in enumerate(kinds)
                if k == kind
            ]
        )
    tokenizer.post_processor = _post_processor(file, tokens)
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _SPLIT:
        cut = pre_tokenizers.Split(Regex(_SPLIT[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGITS_APART:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def _post_processor(file: GGUFFile, tokens: list[str]) -> processors.PostProcessor:
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    if not file.metadata.get("tokenizer.ggml.add_bos_token") or bos is None:
        return processors.ByteLevel(trim_offsets=False)
    token = tokens[bos]
    return processors.TemplateProcessing(single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, bos)])


def _special_tokens(file: GGUFFile) -> dict[str, str]:
    tokens = file.require("tokenizer.ggml.tokens")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    for name, index in ids.items():
        if index is not None and not 0 <= index < len(tokens):
            raise ModelError(f"{file.path}: the {name} token {index} is outside the vocabulary of {len(tokens)}")
    return {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}
