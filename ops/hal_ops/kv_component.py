"""``Component``: how one tensor of a KV cache lies in memory, as a product of factors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hal.dtype import DType
from hal.errors import ContractError

Axis = Literal["L", "B", "H", "N", "D", "KV"]
Granularity = Literal["tensor", "head", "token", "channel", "block"]
Placement = Literal["external", "inline", "page_tail"]
ComponentName = Literal["k", "v", "kv", "latent", "rope", "indexer", "state"]


def require(condition: bool, argument: str, required: str, actual: Any) -> None:
    """Raise ``ContractError`` unless the condition holds."""
    if not condition:
        raise ContractError(argument, required, str(actual))


def require_int(argument: str, value: Any, least: int) -> None:
    """Raise ``ContractError`` unless ``value`` is an integer of at least ``least``."""
    require(type(value) is int and value >= least, argument, f"an integer >= {least}", repr(value))


def require_one_of(argument: str, value: Any, literal: Any) -> None:
    """Raise ``ContractError`` unless ``value`` is one of the values of a ``Literal``."""
    require(value in get_args(literal), argument, "one of " + ", ".join(get_args(literal)), repr(value))


def typed_tuple(argument: str, values: Any, kind: type) -> tuple[Any, ...]:
    """``values`` as a tuple whose elements are all of ``kind``."""
    well = isinstance(values, Iterable) and all(type(value) is kind for value in values)
    require(well, argument, f"a tuple of {kind.__name__}", repr(values))
    return tuple(values)


@dataclass(frozen=True)
class Factor:
    """One dimension of a tensor: (part of) an axis.

    Axes: L layer, B block (page), H head, N token in the block, D head dimension, KV keys or values.
    B has no size. An axis may be split into several factors; the first in memory order is the major one.
    """

    axis: Axis
    size: int | None = None

    def __post_init__(self) -> None:
        require_one_of("axis", self.axis, Axis)
        if self.axis == "B":
            require(self.size is None, "size", "none for axis B", self.size)
        else:
            require_int("size", self.size, 1)


@dataclass(frozen=True)
class Scale:
    """The scales of a quantised component; ``order`` is the memory order of the scale tensor.

    ``convention`` "mul": value = stored * scale; "div": value = stored / scale.
    """

    granularity: Granularity
    dtype: DType
    placement: Placement = "external"
    order: tuple[Factor, ...] = ()
    zero_point: bool = False
    convention: Literal["mul", "div"] = "mul"

    def __post_init__(self) -> None:
        require_one_of("granularity", self.granularity, Granularity)
        require_one_of("placement", self.placement, Placement)
        require_one_of("convention", self.convention, Literal["mul", "div"])
        require(type(self.zero_point) is bool, "zero_point", "a bool", repr(self.zero_point))
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        object.__setattr__(self, "order", typed_tuple("order", self.order, Factor))


@dataclass(frozen=True)
class View:
    """How to see a flat buffer as ``[pages, N, H, D]``.

    ``as_strided(buffer, sizes, strides, offset)`` has one dimension per factor; its permutation by
    ``permutation`` brings the factors of an axis together, and ``reshape(shape)`` merges them. All
    strides count elements. ``axes`` names the axis of each factor.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    axes: tuple[Axis, ...]
    offset: int

    @property
    def permutation(self) -> tuple[int, ...]:
        """Dimensions in the order B, N, H, D, those of one axis from major to minor."""
        return tuple(i for axis in "BNHD" for i, name in enumerate(self.axes) if name == axis)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(pages, N, H, D)``; an axis without factors has size 1."""
        pages, tokens, heads, dim = (
            math.prod(size for size, name in zip(self.sizes, self.axes, strict=True) if name == axis) for axis in "BNHD"
        )
        return pages, tokens, heads, dim


@dataclass(frozen=True)
class Component:
    """One tensor per layer of a KV cache (one for all layers when L stands in ``order``).

    Args:
        name: what it holds; "kv" is keys and values in one tensor, told apart by its KV factor.
        head_dim: elements of one head of one token (of keys alone when name is "kv").
        storage_dtype: dtype of the stored elements.
        order: factors in memory order, outermost first.
        strides: elements, one per factor; None means dense.
        base_align: alignment of the buffer in bytes.
        page_pad: bytes after each page, for dense strides.
        scale: how stored elements become values; None means as they are.
        opaque: "vendor:tiling@version" when the order is a vendor's secret; None otherwise.

    Keys packed by ``x = 8``, in pages of 16 tokens and 2 heads:

    >>> order = Factor("B"), Factor("H", 2), Factor("D", 8), Factor("N", 16), Factor("D", 8)
    >>> keys = Component("k", 64, DType.float16, order)
    >>> keys.offset(block=1, token=3, head=0, dim=9)
    2201
    >>> keys.logical_view(pages=4).permutation, keys.logical_view(pages=4).shape
    ((0, 3, 1, 2, 4), (4, 16, 2, 64))
    """

    name: ComponentName
    head_dim: int
    storage_dtype: DType
    order: tuple[Factor, ...]
    strides: tuple[int, ...] | None = None
    base_align: int = 1
    page_pad: int = 0
    scale: Scale | None = None
    opaque: str | None = None

    def __post_init__(self) -> None:
        require_one_of("name", self.name, ComponentName)
        require_int("head_dim", self.head_dim, 1)
        object.__setattr__(self, "storage_dtype", DType.parse(self.storage_dtype))
        object.__setattr__(self, "order", typed_tuple("order", self.order, Factor))
        require_int("base_align", self.base_align, 1)
        require(self.base_align & (self.base_align - 1) == 0, "base_align", "a power of two", self.base_align)
        require_int("page_pad", self.page_pad, 0)
        whole = self.page_pad % self.storage_dtype.itemsize == 0
        require(whole, "page_pad", f"whole elements of {self.storage_dtype}", self.page_pad)
        require(isinstance(self.scale, Scale | None), "scale", "a Scale or None", repr(self.scale))
        if self.opaque is not None:
            tiling = isinstance(self.opaque, str) and re.fullmatch(r"[^:@]+:[^:@]+@[^:@]+", self.opaque)
            require(bool(tiling), "opaque", "vendor:tiling@version", repr(self.opaque))
        self._check_order()
        self._check_strides()

    def _check_order(self) -> None:
        axes = [factor.axis for factor in self.order]
        require(axes.count("B") == 1, "order", "axis B once", axes)
        require(axes.count("L") <= 1, "order", "axis L at most once", axes)
        dims = self.size_of("D")
        require(dims == self.head_dim, "order", f"factors of D whose product is {self.head_dim}", dims)
        pairs = [factor.size for factor in self.order if factor.axis == "KV"]
        require(pairs == ([2] if self.name == "kv" else []), "order", "one KV factor of size 2 in kv, else none", pairs)

    def _check_strides(self) -> None:
        inline = self.scale is not None and self.scale.placement == "inline"
        if self.strides is None:
            require(not inline, "strides", "given, with room for the inline scales", None)
            return
        object.__setattr__(self, "strides", typed_tuple("strides", self.strides, int))
        require(len(self.strides) == len(self.order), "strides", f"one per factor ({len(self.order)})", self.strides)
        require(self.page_pad == 0, "page_pad", "0 with explicit strides", self.page_pad)
        extent = 1  # of the factors seen so far, from the smallest stride on
        by_stride = sorted(zip(self.strides, self.order, strict=True), key=lambda pair: (pair[0], pair[1].axis == "B"))
        for stride, factor in by_stride:
            if factor.size == 1:
                continue
            require(stride >= extent, "strides", "no two elements at one place", self.strides)
            if factor.size is None:  # beyond the block axis overlap depends on the number of pages
                break
            extent += (factor.size - 1) * stride

    def size_of(self, axis: Axis) -> int:
        """Product of the factors of an axis other than B; 1 when there is none."""
        return math.prod(factor.size or 1 for factor in self.order if factor.axis == axis)

    def sizes(self, pages: int) -> tuple[int, ...]:
        """Size of each factor, B having ``pages``."""
        return tuple(pages if factor.size is None else factor.size for factor in self.order)

    def strides_for(self, pages: int) -> tuple[int, ...]:
        """Elements between neighbours along each factor."""
        if self.strides is not None:
            return self.strides
        strides, step = [], 1
        for factor, size in zip(reversed(self.order), reversed(self.sizes(pages)), strict=True):
            if factor.axis == "B":
                step += self.page_pad * 8 // self.storage_dtype.bits
            strides.append(step)
            step *= size
        return tuple(reversed(strides))

    def elements(self, pages: int) -> int:
        """Elements of the buffer, padding included."""
        sizes = self.sizes(pages)
        if 0 in sizes:
            return 0
        return max(size * stride for size, stride in zip(sizes, self.strides_for(pages), strict=True))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one layer, padding and scales left out."""
        heads_and_dims = math.prod(self.size_of(axis) for axis in ("H", "D", "KV"))
        return heads_and_dims * self.storage_dtype.bits // 8

    def offset(
        self,
        block: int,
        token: int = 0,
        head: int = 0,
        dim: int = 0,
        *,
        kv: int = 0,
        layer: int = 0,
        pages: int | None = None,
    ) -> int:
        """Elements from the start of the buffer to one element.

        ``kv`` is 0 for keys and 1 for values of a "kv" component. ``pages`` is needed when a factor
        stands before B, for then its stride depends on it.

        Raises:
            ContractError: an index lies outside its axis, ``pages`` is missing, or the component is opaque.
        """
        self._require_transparent()
        fixed = pages is not None or self.strides is not None or self.order[0].axis == "B"
        require(fixed, "pages", "given, B not being outermost", pages)
        require(block >= 0 and (pages is None or block < pages), "block", "an index of a page", block)
        rest: dict[Axis, int] = {"N": token, "H": head, "D": dim, "KV": kv, "L": layer}
        total = 0
        for factor, stride in zip(reversed(self.order), reversed(self.strides_for(pages or 1)), strict=True):
            if factor.size is None:
                total += block * stride
            else:
                rest[factor.axis], digit = divmod(rest[factor.axis], factor.size)
                total += digit * stride
        for axis, excess in rest.items():
            require(excess == 0, axis, f"an index in [0, {self.size_of(axis)})", "one outside")
        return total

    def logical_view(self, pages: int, *, kv: int = 0, layer: int = 0) -> View:
        """The keys (``kv=0``) or values (``kv=1``) of one layer; see ``View``.

        Raises:
            ContractError: the component is opaque, or ``kv`` or ``layer`` lies outside the tensor.
        """
        start = self.offset(0, kv=kv, layer=layer, pages=pages) if pages else 0
        self._require_transparent()
        kept = [
            (size, stride, factor.axis)
            for factor, size, stride in zip(self.order, self.sizes(pages), self.strides_for(pages), strict=True)
            if factor.axis not in ("KV", "L")
        ]
        sizes, strides, axes = zip(*kept, strict=True)
        return View(sizes, strides, axes, start)

    def _require_transparent(self) -> None:
        require(self.opaque is None, "component", "a layout that is not opaque", self.opaque)
