"""The ``"hal"`` attention and mask functions that transformers' interfaces call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

import hal_ops
from hal.errors import ContractError, UnsupportedError
from hal_serving.transformers import role as roles
from hal_serving.transformers.cache import PagedLayer, Step
from hal_serving.transformers.format import AttentionNeeds, CacheFormat
from hal_serving.transformers.role import Role

NAME = "hal"


def register() -> None:
    """Make ``attn_implementation="hal"`` known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def padding_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **unused: Any,
) -> torch.Tensor | None:
    """Return the bool padding mask ``[B, kv_length]``, or None when nothing is padded.

    Causality and windows are options of the operator, so no 4-D mask is ever made.

    Raises:
        UnsupportedError: the model asks for another pattern (chunks, packed sequences, custom mask functions), or the
            cache hands out columns beyond the newest token (static caches).
    """
    if not (allow_is_causal_skip or allow_is_bidirectional_skip):
        raise UnsupportedError("custom attention masks and packed sequences are not supported by HAL's attention")
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        raise UnsupportedError("chunked attention is not supported by HAL's attention")
    if isinstance(q_offset, torch.Tensor) or kv_offset + kv_length != q_offset + q_length:
        raise UnsupportedError("static caches are not supported by HAL's attention; leave cache_implementation unset")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask[:, -kv_length:]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer through ``hal_ops``.

    Args:
        module: the attention module.
        query: ``[B, Hq, L, Dk]``, rotated already.
        key, value: ``[B, Hkv, S, D]``; new tokens only when they come from a ``PagedCache``.
        attention_mask: what ``padding_mask`` returned.
        sliding_window: tokens of the window, the query's own included.
        s_aux: raw logits ``[Hq]`` of attention sinks.

    Returns:
        ``[B, L, Hq, Dv]`` with zeros in padding rows, and None for the weights.

    Raises:
        ContractError: dropout, or a mask that is no padding mask.
        UnsupportedError: the device has no kernel for this.
    """
    if dropout:
        raise ContractError("dropout", "0: HAL's attention is for inference", str(dropout))
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ContractError("attention_mask", "a 2-D padding mask [batch, tokens]", f"rank {attention_mask.ndim}")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    options = Options(scaling, causal, sliding_window, softcap, s_aux)
    layer = getattr(key, "hal_layer", None)
    if layer is None:
        return _dense(query, key, value, attention_mask, options), None
    return _paged(layer, query, attention_mask, options), None


@dataclass
class Options:
    """What a layer adds to the plain score."""

    scale: float | None
    causal: bool
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What tells layers of one model apart."""
        return self.causal, self.window, self.softcap, self.sinks is None

    @property
    def features(self) -> frozenset[str]:
        """The flags of the attention specification."""
        flags = {
            "noncausal": not self.causal,
            "window_left": self.window is not None,
            "softcap": bool(self.softcap),
            "sinks": self.sinks is not None,
        }
        return frozenset(flag for flag, used in flags.items() if used)

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``hal_ops.attention``."""
        return {
            "scale": self.scale,
            "causal": self.causal,
            "window": (-1 if self.window is None else self.window - 1, -1),
            "softcap": self.softcap or 0.0,
            "sinks": None if self.sinks is None else self.sinks.float(),
        }


def _paged(layer: PagedLayer, query: torch.Tensor, mask: torch.Tensor | None, options: Options) -> torch.Tensor:
    """Write the layer's new K and V, then attend to all of its history."""
    cache = layer.cache
    key, value = layer.take()
    step = cache.plan(mask, query.device)
    role, pool = cache.role, cache.require_pool()
    q, k, v = (pack(x, step.rows) for x in (query, key, value))
    k_cache, v_cache = pool.caches(layer.index, k, v)
    layout = pool.format.layout
    hal_ops.kv_write(k, v, k_cache, v_cache, step.slots, layout=layout, device=_writer(role, pool.format, k, v))
    if not pool.format.strided:
        q = q.contiguous()
    out = hal_ops.attention(
        q,
        k_cache,
        v_cache,
        plan=step.plan,
        layout=layout,
        kv_slack=pool.format.slack,
        device=role.device,
        **options.arguments,
    )
    kind = (k_cache.shape, *options.kind)
    if kind not in step.noted:
        step.noted.add(kind)
        _note_paged(role, pool.format, step, q, k, v, options)
    return unpack(out, step.rows, query.shape[0], query.shape[2])


def _note_paged(
    role: Role,
    kv_format: CacheFormat,
    step: Step,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
) -> None:
    features = options.features if q.is_contiguous() else options.features | {"strided"}
    needs = AttentionNeeds(q.dtype, q.shape[2], v.shape[2], k.shape[1], q.shape[1] // k.shape[1], ())
    if role.first((step.sizes, needs, features, kv_format)):
        batch, max_q, max_kv = step.sizes
        role.note(kv_format.spec(needs, features, batch=batch, max_q=max_q, max_kv=max_kv))


def _writer(role: Role, kv_format: CacheFormat, k: torch.Tensor, v: torch.Tensor) -> str:
    """The device that writes these K and V ``[T, Hkv, D]`` into pages of ``kv_format``."""
    strided = not (k.is_contiguous() and v.is_contiguous())
    key = (kv_format, k.dtype, k.shape[1:], v.shape[2], strided)
    found = role.writers.get(key)
    if found is None:
        spec = hal_ops.spec(
            "kv_write",
            k_dtype=k.dtype,
            kv_dtype=k.dtype,
            head_dim=k.shape[2],
            v_head_dim=v.shape[2],
            kv_heads=k.shape[1],
            layout=kv_format.layout,
            page=kv_format.page,
            features={"strided"} if strided else (),
        )
        found = role.writers[key] = role.kv_device(spec, str(k.device))
    return found


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """Attention over K and V as given: no cache, or one of transformers' own."""
    batch, _, columns, _ = query.shape
    forward = roles.current()
    memo = {} if forward is None else forward.memo
    name = (columns, key.shape[2], id(mask))
    if name not in memo:
        memo[name] = (*_ragged_plan(batch, columns, key.shape[2], mask, query.device), mask)  # keeps the id alive
    plan, q_rows, k_rows, _ = memo[name]
    q, k, v = (pack(x, rows).contiguous() for x, rows in ((query, q_rows), (key, k_rows), (value, k_rows)))
    out = hal_ops.attention(q, k, v, plan=plan, device=forward and forward.role.device, **options.arguments)
    if forward is not None:
        sizes = (batch, columns, key.shape[2])
        _note_dense(forward.role, sizes, q, k, v, options)
    return unpack(out, q_rows, batch, columns)


def _note_dense(
    role: Role, sizes: tuple[int, int, int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> None:
    needs = AttentionNeeds(q.dtype, q.shape[2], v.shape[2], k.shape[1], q.shape[1] // k.shape[1], ())
    if role.first((sizes, needs, options.features)):
        batch, max_q, max_kv = sizes
        role.note(needs.spec(options.features, batch=batch, max_q=max_q, max_kv=max_kv))


def _ragged_plan(
    batch: int, columns: int, keys: int, mask: torch.Tensor | None, device: torch.device
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
    """Plan of unpaged attention, and which rows of ``[B*L]`` queries and ``[B*S]`` keys are real (None: all)."""
    if mask is None:
        lens, q_rows, k_rows = [np.full(batch, n, np.int64) for n in (columns, keys)], None, None
    else:
        sides = (mask[:, -columns:], mask)
        lens = [side.sum(1).cpu().numpy().astype(np.int64) for side in sides]
        q_rows, k_rows = (side.reshape(-1).nonzero()[:, 0] for side in sides)
    q_indptr, kv_indptr = (
        torch.from_numpy(np.concatenate([[0], np.cumsum(n)]).astype(np.int32)).to(device) for n in lens
    )
    plan = hal_ops.plan_attention(q_indptr=q_indptr, kv_indptr=kv_indptr, q_lens_host=lens[0], kv_lens_host=lens[1])
    return plan, q_rows, k_rows


def pack(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """``[B, H, L, D]`` -> ``[T, H, D]``: tokens one after the other, only ``rows`` of them. A view where possible."""
    batch, heads, columns, dim = x.shape
    tokens = x.transpose(1, 2).reshape(batch * columns, heads, dim)
    return tokens if rows is None else tokens[rows]


def unpack(x: torch.Tensor, rows: torch.Tensor | None, batch: int, columns: int) -> torch.Tensor:
    """``[T, H, D]`` -> ``[B, L, H, D]``, zeros where ``pack`` left tokens out."""
    if rows is not None:
        x = x.new_zeros((batch * columns, *x.shape[1:])).index_copy_(0, rows, x)
    return x.view(batch, columns, *x.shape[1:])
