"""From a GGUF file or a Hugging Face folder to a transformers model.

The model of a GGUF file is made on torch's meta device and filled with views of the mapped file:
quantised blocks stay as they are in ``HalLinear`` and ``HalEmbedding``. ``stock_model`` builds
transformers' own float32 model of the same file, to compare with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hal_serving.errors import ModelError
from hal_serving.gguf import GGUFFile, GGUFTensor
from hal_serving.transformers.linear import HalEmbedding, HalLinear

Progress = Callable[[int, int], None]

_PACKED = {
    GGMLQuantizationType.Q4_0: "gguf_q4_0",
    GGMLQuantizationType.Q4_1: "gguf_q4_1",
    GGMLQuantizationType.Q8_0: "gguf_q8_0",
}
_CONFIG = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_TOKEN_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}
_MODEL_TYPES = ("llama", "qwen2", "qwen3")
_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)")


def config_of(file: GGUFFile) -> PretrainedConfig:
    """transformers' configuration of the model in ``file``.

    Raises:
        ModelError: the architecture is not supported, or metadata that it needs is missing.
    """
    arch = file.architecture
    if arch not in _MODEL_TYPES:
        raise ModelError(f"{file.path}: architecture {arch!r} is not supported (supported: {', '.join(_MODEL_TYPES)})")
    metadata = file.metadata
    if (scaling := metadata.get(f"{arch}.rope.scaling.type", "none")) != "none":
        raise ModelError(f"{file.path}: rope scaling {scaling!r} is not supported")
    values = {name: _positive(file, f"{arch}.{key}", file.require(f"{arch}.{key}")) for key, name in _CONFIG.items()}
    heads = values["num_attention_heads"]
    kv_heads, rope_theta = (
        _positive(file, f"{arch}.{key}", metadata.get(f"{arch}.{key}", default))
        for key, default in (("attention.head_count_kv", heads), ("rope.freq_base", 10000.0))
    )
    head_dim = metadata.get(f"{arch}.attention.key_length", values["hidden_size"] // heads)
    if metadata.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path}: rotary embedding of a part of the head is not supported")
    values["vocab_size"] = _tensor(file, "token_embd.weight").shape[0]
    return AutoConfig.for_model(
        arch,
        **values,
        head_dim=head_dim,
        num_key_value_heads=kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        tie_word_embeddings="output.weight" not in file.tensors,
        **{f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKEN_IDS.items()},
    )


def _positive(file: GGUFFile, key: str, value: Any) -> Any:
    """Check a size or a factor: a file with 0 heads or a frequency of NaN is corrupt."""
    if not (isinstance(value, int | float) and 0 < value < math.inf):
        raise ModelError(f"{file.path}: {key} is {value!r}, not a positive number")
    return value


def hal_model(file: GGUFFile, dtype: torch.dtype, progress: Progress = lambda done, total: None) -> PreTrainedModel:
    """The model with HAL linears on the file's own blocks; everything else in ``dtype``.

    Raises:
        ModelError: unsupported architecture or quantisation, or tensors missing, unknown or misshapen.
    """
    model = _empty_model(file, dtype)
    modules = list(_placed(file, model))
    for done, (path, module, weight, bias) in enumerate(modules):
        progress(done, len(modules))
        if isinstance(module, nn.Linear):
            model.set_submodule(path, _linear(weight, bias, dtype))
        elif isinstance(module, nn.Embedding) and weight.type in _PACKED:
            blocks, scheme = _stored(weight, dtype)
            rows, width = weight.shape
            model.set_submodule(path, HalEmbedding(blocks, scheme, (rows, width), dtype))
        else:
            module.weight = nn.Parameter(_dense(weight, dtype), requires_grad=False)
    if model.config.tie_word_embeddings:
        model.set_submodule("lm_head", _linear(_tensor(file, "token_embd.weight"), None, dtype))
    progress(len(modules), len(modules))
    return model


def stock_model(file: GGUFFile) -> PreTrainedModel:
    """transformers' own float32 model with the dequantised weights of ``file``.

    Raises:
        ModelError: as ``hal_model``.
    """
    model = _empty_model(file, torch.float32)
    for _, module, weight, bias in _placed(file, model):
        module.weight = nn.Parameter(_dense(weight, torch.float32), requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(_dense(bias, torch.float32), requires_grad=False)
    model.tie_weights()
    return model


def _empty_model(file: GGUFFile, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights: parameters on the meta device, the rotary frequencies real."""
    config = config_of(file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    rotary = type(model.model.rotary_emb)(config)
    if _ROPE_FACTORS in file.tensors:
        rotary.inv_freq = rotary.inv_freq / torch.from_numpy(file.tensors[_ROPE_FACTORS].dense())
        rotary.original_inv_freq = rotary.inv_freq
    model.model.rotary_emb = rotary
    return model.eval()


def _placed(file: GGUFFile, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, GGUFTensor, GGUFTensor | None]]:
    """Every module that carries weights with its tensors, in file order, checked against the model."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        stem, _, kind = name.rpartition(".")
        path = _module_path(stem)
        expected = shapes.pop(f"{path}.{kind}", None)
        if path is None or expected is None:
            raise ModelError(f"{file.path}: tensor {name} has no place in a {file.architecture} model")
        if tensor.shape != expected:
            raise ModelError(f"{file.path}: tensor {name} has shape {tensor.shape}, the configuration says {expected}")
        if kind == "weight":
            bias = file.tensors.get(f"{stem}.bias")
            yield path, model.get_submodule(path), _unpermuted(file, tensor), bias and _unpermuted(file, bias)
    if shapes:
        raise ModelError(f"{file.path}: no tensor for {', '.join(sorted(shapes)[:3])} ({len(shapes)} missing)")


def _module_path(stem: str) -> str | None:
    if match := _BLOCK.fullmatch(stem):
        module = _MODULES.get(match[2])
        return module and f"model.layers.{match[1]}.{module}"
    return _TOP.get(stem)


def _unpermuted(file: GGUFFile, tensor: GGUFTensor) -> GGUFTensor:
    """Undo llama.cpp's order of rotary rows, which pairs neighbours where transformers pairs halves.

    Whole rows move, so blocks move as bytes.
    """
    if file.architecture != "llama" or not re.search(r"\.attn_[qk]\.", tensor.name):
        return tensor
    kv = ".attn_k." in tensor.name and file.metadata.get("llama.attention.head_count_kv")
    heads = kv or file.require("llama.attention.head_count")
    return GGUFTensor(tensor.name, tensor.type, tensor.shape, unpermute_rows(tensor.data, heads))


def unpermute_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder dim 0 per head from (0, h/2, 1, h/2+1, …) to (0, 1, …): pairs to halves. A copy.

    >>> unpermute_rows(np.array([0, 2, 1, 3]), heads=1)
    array([0, 1, 2, 3])
    """
    half = len(rows) // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _linear(weight: GGUFTensor, bias: GGUFTensor | None, dtype: torch.dtype) -> HalLinear:
    data, scheme = _stored(weight, dtype)
    n, k = weight.shape
    return HalLinear(data, scheme=scheme, shape=(n, k), bias=None if bias is None else _dense(bias, dtype))


def _stored(weight: GGUFTensor, dtype: torch.dtype) -> tuple[torch.Tensor, str]:
    """(blocks as they lie in the file, scheme), or dense values where no scheme reads the blocks."""
    scheme = _PACKED.get(weight.type)
    return (torch.from_numpy(weight.rows()), scheme) if scheme else (_dense(weight, dtype), "dense")


def _dense(tensor: GGUFTensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(tensor.dense()).to(dtype)


def _tensor(file: GGUFFile, name: str) -> GGUFTensor:
    try:
        return file.tensors[name]
    except KeyError:
        raise ModelError(f"{file.path}: tensor {name} is missing") from None


def stock_from_folder(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own model of a Hugging Face folder (safetensors, config.json), weights in ``dtype``.

    Raises:
        ModelError: transformers cannot load it.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{folder}: {str(error).splitlines()[0]}") from error
