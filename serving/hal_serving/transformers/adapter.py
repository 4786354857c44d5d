"""``use_hal``: run a transformers model's linear layers, attention and KV cache through HAL."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import hal
from hal.errors import ContractError, UnsupportedError
from hal.types import Explanation
from hal_serving.transformers import attention, role
from hal_serving.transformers.cache import PagedCache
from hal_serving.transformers.format import AttentionNeeds, choose_format
from hal_serving.transformers.linear import HalLinear
from hal_serving.transformers.role import Placement, Role

Model = TypeVar("Model", bound=PreTrainedModel)
_CACHE_NAMES = ("cache", "past_key_values")  # transformers renamed the argument


class Handle:
    """``model.hal_handle`` after ``use_hal``: caches for the model, and the record of what ran where."""

    def __init__(self, model: PreTrainedModel, placement: Placement) -> None:
        self.placement = placement
        self._layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self._undo: list[Callable[[], None]] = []

    def cache(self, batch: int = 1, max_len: int | None = None) -> PagedCache:
        """Return an empty cache to pass as ``past_key_values``.

        Args:
            batch: rows to make room for at once.
            max_len: tokens per row to make room for at once; the cache grows beyond them when it must.
        """
        return PagedCache(self.placement, self._layers, batch=batch, max_len=max_len)

    @property
    def kernels(self) -> dict[str, dict[str, list[str]]]:
        """Role -> operator -> kernels that ran it so far."""
        return {found.name: found.kernels for found in self.placement.roles}

    @property
    def explanations(self) -> list[tuple[str, str, str, Explanation]]:
        """(role, operator, device, explanation) of everything that ran so far."""
        return [entry for found in self.placement.roles for entry in found.explanations]

    @property
    def kv_bytes_moved(self) -> int:
        """Bytes of K and V handed over from prefill to decode so far."""
        return self.placement.kv_bytes_moved

    @property
    def kv_formats(self) -> dict[str, str]:
        """Role -> its KV format, in words."""
        return {found.name: str(found.kv_format) for found in self.placement.roles}

    def install(self, model: PreTrainedModel) -> None:
        """Hook the model: every forward knows its role, and the caches it makes are HAL's."""
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                before = module.register_forward_pre_hook(self._before, with_kwargs=True)
                after = module.register_forward_hook(_after, always_call=True)
                self._undo += [before.remove, after.remove]
        if hasattr(model, "_prepare_cache_for_generation"):
            self._replace_cache_of_generate(model)
        model.hal_handle = self

    def uninstall(self, model: PreTrainedModel) -> None:
        """Take the hooks away again."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        del model.hal_handle

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        cache = _given_cache(args, kwargs)
        follows = cache is not None and cache.get_seq_length() > 0  # a prompt of one token is a prefill too
        role.enter(self.placement.decode if follows and _tokens(args, kwargs) == 1 else self.placement.prefill)
        if cache is None and _uses_cache(module, kwargs):
            kwargs = {**kwargs, _cache_name(module): self.cache()}
        return args, kwargs

    def _replace_cache_of_generate(self, model: PreTrainedModel) -> None:
        prepare = model._prepare_cache_for_generation

        def prepare_cache(
            this: PreTrainedModel, config: Any, model_kwargs: dict[str, Any], mode: Any, batch: int, max_length: int
        ) -> None:
            given = [model_kwargs.get(name) for name in _CACHE_NAMES]
            prepare(config, model_kwargs, mode, batch, max_length)
            for name in _CACHE_NAMES:
                made = model_kwargs.get(name)
                if type(made) is DynamicCache and not any(made is cache for cache in given):
                    rows = batch * max(config.num_beams or 1, config.num_return_sequences or 1)
                    model_kwargs[name] = self.cache(rows, max_length)

        model._prepare_cache_for_generation = MethodType(prepare_cache, model)
        self._undo.append(lambda: delattr(model, "_prepare_cache_for_generation"))


def use_hal(model: Model, *, prefill: str = "cpu:0", decode: str = "cpu:0") -> Model:
    """Run ``model`` through HAL, in place: inference only.

    Every ``nn.Linear`` becomes a ``HalLinear``, attention goes through the ``"hal"`` attention interface and KV
    through a ``PagedCache``. Prompts run on ``prefill``, the single-token steps that follow on ``decode``; the KV is
    handed over before the first step and stays. Called again, it places the model anew.

    Args:
        model: a decoder-only transformers model (Llama, Qwen, Mistral, Gemma 2 and their like).
        prefill, decode: HAL device ids.

    Returns:
        The model itself. ``model.hal_handle`` makes caches and tells what ran where (see ``Handle``).

    Raises:
        ContractError: an unknown device.
        UnsupportedError: a device is not available, or has no kernel for this model. The model is as it was.
    """
    _check_model(model)
    devices = {"prefill": _available(prefill), "decode": _available(decode)}
    needs = AttentionNeeds.of(model.config.get_text_config(decoder=True), model.dtype)
    linears = _linears(model)
    for device in dict.fromkeys(devices.values()):
        _check_linears(linears.values(), device, model.dtype)
    roles = [Role(name, device, choose_format(name, device, needs)) for name, device in devices.items()]
    handle = Handle(model, Placement(*roles))

    model.requires_grad_(False)
    for name, linear in linears.items():
        linear.renew()
        model.set_submodule(name, linear)
    attention.register()
    model.set_attn_implementation(attention.NAME)
    previous: Handle | None = getattr(model, "hal_handle", None)
    if previous is not None:
        previous.uninstall(model)
    handle.install(model)
    return model


def _check_model(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ContractError("model", "a transformers PreTrainedModel", type(model).__name__)
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"{type(model).__name__} is an encoder-decoder model; HAL runs decoder-only models")
    if not model._can_set_attn_implementation():
        raise UnsupportedError(f"{type(model).__name__} does not use transformers' attention interface")


def _available(device: str) -> str:
    found = hal.device(device)
    if not found.available:
        raise UnsupportedError(f"{found.id} is not available: {found.reason}")
    return found.id


def _linears(model: PreTrainedModel) -> dict[str, HalLinear]:
    """Name -> what takes the place of each linear layer, those that are ``HalLinear`` already included."""
    found = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            found[name] = HalLinear(module.weight, scheme="dense", bias=module.bias)
        elif isinstance(module, HalLinear):
            found[name] = module
    return found


def _check_linears(linears: Iterable[HalLinear], device: str, dtype: torch.dtype) -> None:
    """Raise ``UnsupportedError`` for the first linear layer that ``device`` can neither pack nor apply."""
    seen = set()
    for linear in linears:
        kind = (linear.scheme, linear.out_features, linear.in_features, linear.bias is not None)
        if kind in seen:
            continue
        seen.add(kind)
        packing = hal.explain(linear.prepack_spec(), device)
        if packing.chosen is None:
            raise UnsupportedError(f"{device} cannot pack {linear}", packing.refusals)
        applying = hal.explain(linear.gemm_spec(dtype, 1, packing.chosen), device)
        if applying.chosen is None:
            raise UnsupportedError(f"{device} cannot apply {linear}", applying.refusals)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """New tokens per row of a forward with these arguments."""
    ids = args[0] if args else kwargs.get("input_ids")
    if ids is None:
        ids = kwargs.get("inputs_embeds")
    return 0 if ids is None else ids.shape[1]


def _given_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache that a forward with these arguments was given, or None."""
    named = next((kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None), None)
    return args[3] if named is None and len(args) > 3 else named


def _uses_cache(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether the model is about to make a cache of its own when it was given none."""
    use_cache = kwargs.get("use_cache")
    return bool(getattr(module.config, "use_cache", False) if use_cache is None else use_cache)


def _cache_name(module: nn.Module) -> str:
    """What the module's forward calls its cache."""
    parameters = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), _CACHE_NAMES[0])


def _after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    role.leave()
