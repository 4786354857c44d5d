"""transformers models through HAL give what transformers gives: tokens and logits, on every pairing of devices."""

from __future__ import annotations

import copy
import functools
import threading
from pathlib import Path
from typing import Any

import pytest

import hal

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from hal_serving.transformers import role as roles  # noqa: E402
from hal_serving.transformers import use_hal  # noqa: E402
from hal_serving.transformers.linear import HalLinear  # noqa: E402

CPU, ORT = "cpu:0", "onnxruntime:cpu"
PAIRINGS = [(CPU, CPU), (ORT, CPU), (CPU, ORT), (ORT, ORT)]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
PAD = 0
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,  # far apart logits: an argmax that rounding cannot flip
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),  # biases in q, k and v
    "qwen3": ("Qwen3", {"head_dim": 16}),  # norms of q and k
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": 5, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0},
    ),
}


@functools.cache
def stock(name: str) -> Any:
    """A tiny random model of one family as transformers runs it. Shared: tests must not change it."""
    family, extra = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES | extra)
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    return model


def placed(name: str, prefill: str = CPU, decode: str = CPU) -> tuple[Any, Any]:
    """A copy of the stock model on HAL devices; skips where a device does not take the model."""
    model = copy.deepcopy(stock(name))
    known = {device.id for device in hal.devices()}
    if missing := {prefill, decode} - known:
        pytest.skip(f"no such device here: {sorted(missing)}")
    try:
        return model, use_hal(model, prefill=prefill, decode=decode).hal_handle
    except hal.UnsupportedError as error:
        if {prefill, decode} == {CPU}:
            raise  # cpu:0 takes every model
        pytest.skip(f"refused: {error}")


def prompt(length: int, rows: int = 1, seed: int = 3) -> Any:
    return torch.randint(2, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: tuple[int, ...] = (9, 4, 12)) -> dict[str, Any]:
    ids = prompt(max(lengths), len(lengths))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = PAD
        mask[row, : max(lengths) - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    with torch.no_grad():
        return model.generate(**{"max_new_tokens": 10, "do_sample": False} | options)


@pytest.mark.parametrize(("prefill", "decode"), PAIRINGS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logits_equal_stock(name: str, prefill: str, decode: str) -> None:
    model, handle = placed(name, prefill, decode)
    options = {"input_ids": prompt(11), "return_dict_in_generate": True, "output_logits": True}
    ours, theirs = generated(model, **options), generated(stock(name), **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), **TOLERANCE)
    assert handle.kernels["prefill"]["attention"]
    assert handle.kernels["decode"]["gemm"]


@pytest.mark.parametrize(("prefill", "decode"), PAIRINGS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_left_padded_batch_equals_stock(name: str, prefill: str, decode: str) -> None:
    model, _ = placed(name, prefill, decode)
    options = left_padded() | {"return_dict_in_generate": True, "output_logits": True}
    ours, theirs = generated(model, **options), generated(stock(name), **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), **TOLERANCE)


def test_left_padded_row_equals_the_row_alone() -> None:
    model, _ = placed("llama")
    batch = left_padded()
    together = generated(model, **batch)
    alone = generated(model, input_ids=batch["input_ids"][1:2, -4:])
    assert torch.equal(together[1, -10:], alone[0, -10:])


@pytest.mark.parametrize(("prefill", "decode"), PAIRINGS)
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": True},
    ],
    ids=["sampling", "several", "beams", "beam-sampling"],
)
def test_decoding_strategies_equal_stock(options: dict[str, Any], prefill: str, decode: str) -> None:
    model, _ = placed("llama", prefill, decode)
    options = {"input_ids": prompt(7, rows=2), **options}
    assert torch.equal(generated(model, **options), generated(stock("llama"), **options))


def test_beams_of_left_padded_prompts_equal_stock() -> None:
    model, _ = placed("mistral")
    options = left_padded() | {"num_beams": 3}
    assert torch.equal(generated(model, **options), generated(stock("mistral"), **options))


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize(("prefill", "decode"), PAIRINGS)
def test_chat_continues_on_the_same_cache(name: str, prefill: str, decode: str) -> None:
    model, handle = placed(name, prefill, decode)
    cache = handle.cache(max_len=16)  # shorter than the chat: it must grow
    theirs = transformers.DynamicCache(config=stock(name).config)
    ids, other = prompt(9), prompt(9)
    for turn in range(3):
        ids = generated(model, input_ids=ids, cache=cache, max_new_tokens=6)
        other = generated(stock(name), input_ids=other, cache=theirs, max_new_tokens=6)
        assert torch.equal(ids, other)
        more = prompt(5, seed=20 + turn)
        ids, other = torch.cat([ids, more], 1), torch.cat([other, more], 1)
    assert cache.role.name == "decode"


@pytest.mark.parametrize("chunk", [1, 4])
def test_chunked_prefill_equals_stock(chunk: int) -> None:
    model, _ = placed("llama")
    options = left_padded() | {"prefill_chunk_size": chunk}
    assert torch.equal(generated(model, **options), generated(stock("llama"), **options))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_without_a_cache_equals_stock(name: str) -> None:
    model, handle = placed(name)
    options = left_padded() | {"use_cache": False}
    assert torch.equal(generated(model, **options), generated(stock(name), **options))
    assert "kv_write" not in handle.kernels["prefill"] | handle.kernels["decode"]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_cache_of_transformers_works(name: str) -> None:
    model, _ = placed(name)
    options = left_padded()
    cache = transformers.DynamicCache(config=model.config)
    assert torch.equal(generated(model, **options, cache=cache), generated(stock(name), **options))
    assert cache.get_seq_length() == 21


def test_a_plain_forward_makes_a_cache_of_ours() -> None:
    model, handle = placed("llama", CPU, CPU)
    ids = prompt(6)
    first = model(ids)
    second = model(ids[:, :1], cache=first.cache)
    expected = stock("llama")(torch.cat([ids, ids[:, :1]], 1)).logits
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), expected, **TOLERANCE)
    assert handle.kv_bytes_moved > 0


def test_assisted_generation_crops_the_cache() -> None:
    model, _ = placed("llama")
    assistant = copy.deepcopy(stock("llama"))
    use_hal(assistant)
    torch.nn.init.normal_(assistant.model.norm.weight)  # drafts that are often refused
    options = {"input_ids": prompt(8), "max_new_tokens": 14}
    ours = generated(model, assistant_model=assistant, **options)
    assert torch.equal(ours, generated(stock("llama"), **options))


def test_sinks_reach_the_operator() -> None:
    from hal_serving.transformers.attention import Options, attention

    q, k, v = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    sinks = torch.randn(4)
    module = torch.nn.Identity()
    out, _ = attention(module, q, k, v, None, scaling=0.3, s_aux=sinks)
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3 + torch.full((5, 5), -torch.inf).triu(1)
    weights = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 5, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(out, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2), **TOLERANCE)
    assert Options(None, True, 3, 1.0, sinks).features == {"window_left", "softcap", "sinks"}


# ---------------------------------------------------------------- what the handle tells


def test_the_handle_tells_what_ran() -> None:
    model, handle = placed("llama")
    generated(model, input_ids=prompt(11))
    config = model.config
    per_token = config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * 4
    assert handle.kv_bytes_moved == 11 * per_token
    assert handle.kv_formats == {"prefill": "HND, 64 tokens per page", "decode": "NHD, 16 tokens per page"}
    assert {"attention", "gemm", "kv_write"} <= set(handle.kernels["prefill"])
    assert {"attention", "gemm", "kv_write", "kv_convert"} <= set(handle.kernels["decode"])
    roles = {(role, op, device) for role, op, device, _ in handle.explanations}
    assert ("decode", "kv_convert", CPU) in roles
    assert all(found.chosen for _, _, _, found in handle.explanations)


def test_tied_weights_stay_one_tensor() -> None:
    model = copy.deepcopy(stock("gemma2"))
    embedding = model.get_input_embeddings().weight
    use_hal(model)
    assert isinstance(model.lm_head, HalLinear)
    assert model.lm_head.source.data_ptr() == embedding.data_ptr()
    saved = model.state_dict()  # as stock: two names, one memory
    assert saved["lm_head.weight"].data_ptr() == saved["model.embed_tokens.weight"].data_ptr()


def test_two_threads_do_not_disturb_each_other() -> None:
    results: dict[int, Any] = {}

    def work(index: int, model: Any) -> None:
        results[index] = [
            model.generate(input_ids=prompt(6 + index), max_new_tokens=8, do_sample=False) for _ in range(3)
        ]

    shared = placed("llama")[0]
    models = [shared, shared, placed("qwen2")[0]]
    threads = [threading.Thread(target=work, args=(index, model)) for index, model in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, name in enumerate(["llama", "llama", "qwen2"]):
        expected = generated(stock(name), input_ids=prompt(6 + index), max_new_tokens=8)
        assert all(torch.equal(result, expected) for result in results[index])


def test_use_hal_twice_places_anew() -> None:
    model, first = placed("llama")
    second = use_hal(model, prefill=CPU, decode=CPU).hal_handle
    assert torch.equal(generated(model, input_ids=prompt(5)), generated(stock("llama"), input_ids=prompt(5)))
    assert second.kernels["decode"] and not first.kernels["decode"]


def test_placing_anew_follows_the_policy() -> None:
    model, _ = placed("llama")
    generated(model, input_ids=prompt(3), max_new_tokens=2)
    linear = model.lm_head
    before = linear._packed[CPU]
    use_hal(model)
    assert linear._packed[CPU] is before
    with hal.policy(deny=[before.kernel]), pytest.raises(hal.UnsupportedError, match="cannot pack"):
        use_hal(model)
    assert torch.equal(generated(model, input_ids=prompt(5)), generated(stock("llama"), input_ids=prompt(5)))


# ---------------------------------------------------------------- refusals


def test_an_unknown_device_leaves_the_model_alone() -> None:
    model = copy.deepcopy(stock("llama"))
    with pytest.raises(hal.ContractError, match="nothing:0"):
        use_hal(model, prefill=CPU, decode="nothing:0")
    assert type(model.lm_head) is torch.nn.Linear
    assert model.config._attn_implementation == "eager"
    assert torch.equal(generated(model, input_ids=prompt(5)), generated(stock("llama"), input_ids=prompt(5)))


def test_only_decoder_models() -> None:
    config = transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=20)
    with pytest.raises(hal.UnsupportedError, match="encoder-decoder"):
        use_hal(transformers.T5ForConditionalGeneration(config))
    with pytest.raises(hal.ContractError, match="PreTrainedModel"):
        use_hal(torch.nn.Linear(2, 2))


def test_four_dimensional_masks_are_refused() -> None:
    model, _ = placed("llama")
    with pytest.raises(hal.ContractError, match="2-D padding mask"):
        model(prompt(4), attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
    assert roles.current() is None  # a forward that raises ends like any other


def test_static_caches_are_refused() -> None:
    model, _ = placed("llama")
    with pytest.raises(hal.UnsupportedError, match="static caches"):
        generated(model, input_ids=prompt(4), cache_implementation="static")


def test_dropout_is_refused() -> None:
    from hal_serving.transformers.attention import attention

    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(hal.ContractError, match="dropout"):
        attention(torch.nn.Identity(), q, q, q, None, dropout=0.1)


# ---------------------------------------------------------------- saving and copying


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_placed_model_saves_whole(name: str, tmp_path: Path) -> None:
    model, _ = placed(name)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(generated(again, input_ids=prompt(5)), generated(stock(name), input_ids=prompt(5)))


def test_quantised_blocks_are_not_saved_as_if_they_were_dense() -> None:
    linear = HalLinear(torch.zeros(2 * 18, dtype=torch.uint8), scheme="gguf_q4_0", shape=(2, 32))
    with pytest.raises(hal.UnsupportedError, match="gguf_q4_0"):
        linear.state_dict()


def test_a_placed_model_can_be_copied() -> None:
    model, _ = placed("llama")
    twin = copy.deepcopy(model)
    assert torch.equal(generated(twin, input_ids=prompt(5)), generated(model, input_ids=prompt(5)))
