"""``KVCacheFormat``: how the KV cache of some layers and heads lies in memory, and ``KVIdentity``: whose it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from hal.dtype import DType
from hal.errors import ContractError
from hal_ops.kv_component import Component, Factor, Scale, View, require, require_int, typed_tuple

__all__ = ["Component", "Factor", "KVCacheFormat", "KVIdentity", "Scale", "View"]

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class KVCacheFormat:
    """The layout of a paged KV cache. It is never guessed from a shape.

    Args:
        schema: version of this descriptor.
        page_tokens: tokens of one page.
        compress_ratio: tokens that share one stored entry.
        layer_ids: model layers held, in the order of their tensors.
        total_kv_heads: KV heads of the model, over all ranks.
        head_start, head_count: the interval of them held here.
        replica: which copy of that interval this is.
        components: tensors of each layer, in order.

    >>> form = KVCacheFormat.nhd(dtype="float16", page_tokens=16, kv_heads=3, head_dim=64)
    >>> form.name, form.shape("k", pages=10), form.bytes(pages=10)
    ('NHD', (10, 16, 3, 64), 122880)
    >>> KVCacheFormat.from_json(form.to_json()) == form
    True

    Raises:
        ContractError: fields that do not fit together.
    """

    schema: int = SCHEMA
    page_tokens: int
    compress_ratio: int = 1
    layer_ids: tuple[int, ...] = (0,)
    total_kv_heads: int
    head_start: int = 0
    head_count: int
    replica: int = 0
    components: tuple[Component, ...]

    def __post_init__(self) -> None:
        require(self.schema == SCHEMA, "schema", str(SCHEMA), repr(self.schema))
        for name, least in _LEAST.items():
            require_int(name, getattr(self, name), least)
        object.__setattr__(self, "layer_ids", typed_tuple("layer_ids", self.layer_ids, int))
        object.__setattr__(self, "components", typed_tuple("components", self.components, Component))
        distinct = len(set(self.layer_ids)) == len(self.layer_ids) > 0 and min(self.layer_ids) >= 0
        require(distinct, "layer_ids", "distinct non-negative layers, at least one", self.layer_ids)
        held = self.head_start + self.head_count
        require(held <= self.total_kv_heads, "head_count", f"heads within total_kv_heads = {self.total_kv_heads}", held)
        whole = self.page_tokens % self.compress_ratio == 0
        require(whole, "page_tokens", f"a multiple of compress_ratio = {self.compress_ratio}", self.page_tokens)
        names = [component.name for component in self.components]
        require(0 < len(names) == len(set(names)), "components", "distinct names, at least one", names)
        require("kv" not in names or not {"k", "v"} & set(names), "components", "kv, or k and v", names)
        for component in self.components:
            self._check_component(component)

    def _check_component(self, component: Component) -> None:
        where = f"components[{component.name}].order"
        axes = {factor.axis for factor in component.order}
        if component.name != "state":
            entries, tokens = self.page_tokens // self.compress_ratio, component.size_of("N")
            require(tokens == entries, where, f"factors of N whose product is {entries}", tokens)
        if component.name in ("k", "v", "kv") or "H" in axes:
            heads = component.size_of("H")
            require(heads == self.head_count, where, f"factors of H whose product is {self.head_count}", heads)
        if "L" in axes:
            layers = component.size_of("L")
            require(layers == len(self.layer_ids), where, f"a factor L of {len(self.layer_ids)}", layers)

    @classmethod
    def nhd(
        cls,
        *,
        dtype: DType | str,
        page_tokens: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        layer_ids: tuple[int, ...] = (0,),
    ) -> KVCacheFormat:
        """Keys and values apart, each ``[pages, page_tokens, kv_heads, dim]``."""
        return cls._plain(("N", "H", "D"), dtype, page_tokens, kv_heads, head_dim, v_head_dim, layer_ids)

    @classmethod
    def hnd(
        cls,
        *,
        dtype: DType | str,
        page_tokens: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        layer_ids: tuple[int, ...] = (0,),
    ) -> KVCacheFormat:
        """Keys and values apart, each ``[pages, kv_heads, page_tokens, dim]``."""
        return cls._plain(("H", "N", "D"), dtype, page_tokens, kv_heads, head_dim, v_head_dim, layer_ids)

    @classmethod
    def _plain(
        cls,
        axes: tuple[Any, ...],
        dtype: DType | str,
        page_tokens: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None,
        layer_ids: tuple[int, ...],
    ) -> KVCacheFormat:
        def component(name: Any, dim: int) -> Component:
            sizes = {"N": page_tokens, "H": kv_heads, "D": dim}
            order = (Factor("B"), *(Factor(axis, sizes[axis]) for axis in axes))
            return Component(name, dim, DType.parse(dtype), order)

        return cls(
            page_tokens=page_tokens,
            layer_ids=layer_ids,
            total_kv_heads=kv_heads,
            head_count=kv_heads,
            components=(component("k", head_dim), component("v", head_dim if v_head_dim is None else v_head_dim)),
        )

    @property
    def name(self) -> str:
        """ "NHD" or "HND" when keys and values lie that way, dense and without scales; else "format"."""
        if [component.name for component in self.components] != ["k", "v"] or self.compress_ratio != 1:
            return "format"
        for component in self.components:
            if component.strides or component.page_pad or component.scale or component.opaque:
                return "format"
        orders = {"".join(factor.axis for factor in component.order) for component in self.components}
        return {"BNHD": "NHD", "BHND": "HND"}.get(orders.pop(), "format") if len(orders) == 1 else "format"

    def component(self, name: str) -> Component:
        """The component of that name.

        Raises:
            ContractError: there is none.
        """
        for component in self.components:
            if component.name == name:
                return component
        raise ContractError("component", "one of " + ", ".join(c.name for c in self.components), repr(name))

    def shape(self, component: Component | str, pages: int) -> tuple[int, ...]:
        """Sizes of the factors of a component's tensor, in memory order."""
        return self._found(component).sizes(pages)

    def strides(self, component: Component | str, pages: int) -> tuple[int, ...]:
        """Strides of the factors of a component's tensor, in elements."""
        return self._found(component).strides_for(pages)

    def _found(self, component: Component | str) -> Component:
        return component if isinstance(component, Component) else self.component(component)

    def bytes(self, pages: int) -> int:
        """Bytes of all tensors of ``pages`` pages, padding included, external scales left out."""

        def tensors(component: Component) -> int:
            return 1 if any(factor.axis == "L" for factor in component.order) else len(self.layer_ids)

        return sum(tensors(c) * c.elements(pages) * c.storage_dtype.bits // 8 for c in self.components)

    def to_json(self) -> str:
        """The descriptor as one line of JSON, the same for equal descriptors."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> KVCacheFormat:
        """Read what ``to_json`` wrote.

        Raises:
            ContractError: not JSON, another schema, an unknown or a missing field, or a bad value.
        """
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ContractError("format", "JSON", str(error)) from None
        return _read_format(content)


_LEAST = {"page_tokens": 1, "compress_ratio": 1, "total_kv_heads": 1, "head_start": 0, "head_count": 1, "replica": 0}


def _read_format(content: Any) -> KVCacheFormat:
    content = _known_fields(KVCacheFormat, content)
    require("schema" in content, "schema", str(SCHEMA), "none")
    return KVCacheFormat(**content | {"components": [_read_component(c) for c in _items("components", content)]})


def _read_component(content: Any) -> Component:
    content = _known_fields(Component, content)
    if content.get("scale") is not None:
        scale = _known_fields(Scale, content["scale"])
        content["scale"] = Scale(**scale | {"order": _read_factors(scale)})
    return Component(**content | {"order": _read_factors(content)})


def _read_factors(content: Mapping[str, Any]) -> list[Factor]:
    return [Factor(**_known_fields(Factor, factor)) for factor in _items("order", content)]


def _items(name: str, content: Mapping[str, Any]) -> list[Any]:
    items = content.get(name, [])
    require(isinstance(items, list), name, "a list", repr(items))
    return list(items)


def _known_fields(cls: type, content: Any) -> dict[str, Any]:
    """``content`` once it is sure to be a mapping with every field that ``cls`` needs, and no other."""
    require(isinstance(content, Mapping), cls.__name__, "a JSON object", repr(content))
    known = {field.name: field.default is MISSING for field in fields(cls)}
    unknown = sorted(content.keys() - known)
    require(not unknown, cls.__name__, "only the fields " + ", ".join(known), "unknown " + ", ".join(unknown))
    missing = [name for name, needed in known.items() if needed and name not in content]
    require(not missing, cls.__name__, "the fields " + ", ".join(missing), "none")
    return dict(content)


@dataclass(frozen=True, kw_only=True)
class KVIdentity:
    """What must be equal for the cache of one engine to mean the same in another.

    Args:
        model: name of the model.
        weights_digest: digest of its weights.
        weight_epoch: counter of weight updates (reinforcement learning).
        adapter, tokenizer, rope, spec_decode, tenant: what else the stored numbers depend on; "" for none.
        proto: version of the transfer protocol.
    """

    model: str
    weights_digest: str
    weight_epoch: int = 0
    adapter: str = ""
    tokenizer: str = ""
    rope: str = ""
    spec_decode: str = ""
    tenant: str = ""
    proto: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("weight_epoch", "proto"):
                require_int(field.name, value, 0)
            else:
                require(isinstance(value, str), field.name, "a string", repr(value))
