"""Which paged KV format a device's attention kernels accept for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import hal
import hal_ops
from hal.errors import UnsupportedError
from hal.types import OpSpec, Refusal
from hal_ops.spec import bucket

_LEAST_ROW = 256  # tokens that a one-column cache starts with, and the length that is asked for when formats are tried


@dataclass(frozen=True)
class AttentionNeeds:
    """The attention of a model as far as a kernel must know it. ``features`` has one set per kind of layer."""

    dtype: Any
    head_dim: int
    v_head_dim: int
    kv_heads: int
    gqa_ratio: int
    features: tuple[frozenset[str], ...]

    @classmethod
    def of(cls, config: Any, dtype: Any) -> AttentionNeeds:
        """Read them from the configuration of a transformers text model."""
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        plain = frozenset({"softcap"} if getattr(config, "attn_logit_softcapping", None) else ())
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        slides = getattr(config, "sliding_window", None) is not None
        features = {plain | {"window_left"} if slides and kind == "sliding_attention" else plain for kind in kinds}
        return cls(dtype, head_dim, head_dim, kv_heads, heads // kv_heads, tuple(sorted(features, key=sorted)))

    def spec(self, features: frozenset[str], *, batch: int, max_q: int, max_kv: int, **paged: Any) -> OpSpec:
        """The attention specification of a step whose longest rows are ``max_q`` and ``max_kv``, bucketed here."""
        return hal_ops.spec(
            "attention",
            q_dtype=self.dtype,
            kv_dtype=self.dtype,
            out_dtype=self.dtype,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            kv_heads=self.kv_heads,
            gqa_ratio=self.gqa_ratio,
            max_q=bucket(max_q),
            max_kv=bucket(max_kv),
            batch=bucket(batch),
            features=features,
            **{"paged": False, "kv_slack": "any", **paged},
        )


@dataclass(frozen=True)
class CacheFormat:
    """A paged format: NHD ``[pages, page, Hkv, D]`` or HND ``[pages, Hkv, page, D]``.

    ``one_column``: a request is one page, as long as the longest request (the contiguous caches of some libraries).
    ``slack``: what unused places may hold, see the attention contract. ``strided``: whether queries may be a view.
    """

    layout: Literal["NHD", "HND"]
    page: int
    one_column: bool = False
    slack: Literal["any", "finite"] = "any"
    strided: bool = False

    def __str__(self) -> str:
        return (
            f"{self.layout}, one page per request" if self.one_column else f"{self.layout}, {self.page} tokens per page"
        )

    def fitting(self, tokens: int) -> CacheFormat:
        """The same format with a page that holds ``tokens`` tokens, if a request must fit in one page."""
        if not self.one_column or tokens <= self.page:
            return self
        return replace(self, page=bucket(tokens))

    def serves(self, other: CacheFormat) -> bool:
        """Whether a cache in ``other`` is one in this format too; one-column pages may have any length."""
        same_page = self.page == other.page or self.one_column
        return (self.layout, self.one_column, self.slack) == (other.layout, other.one_column, other.slack) and same_page

    def columns(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens take."""
        return -(-tokens // self.page)

    def shape(self, pages: int, heads: int, dim: int) -> tuple[int, int, int, int]:
        """Shape of one cache tensor."""
        return (pages, self.page, heads, dim) if self.layout == "NHD" else (pages, heads, self.page, dim)

    def spec(self, needs: AttentionNeeds, features: frozenset[str], *, batch: int, max_q: int, max_kv: int) -> OpSpec:
        """The attention specification of a step on this format."""
        table: Literal["one", "many"] = "one" if self.one_column else "many"
        paged = {"layout": self.layout, "page": self.page, "table": table, "kv_slack": self.slack}
        return needs.spec(features, batch=batch, max_q=max_q, max_kv=max_kv, paged=True, **paged)


# In order of preference. They differ on purpose: long pages with the tokens of a head side by side suit the long
# reads of prefill, short pages waste less of the last one in decode.
_PAGES = {
    "prefill": (CacheFormat("HND", 64), CacheFormat("NHD", 16)),
    "decode": (CacheFormat("NHD", 16), CacheFormat("HND", 64)),
}
_ROWS = (CacheFormat("HND", _LEAST_ROW, one_column=True), CacheFormat("NHD", _LEAST_ROW, one_column=True))


def candidates(role: str) -> Sequence[CacheFormat]:
    """Formats to try for ``role``, the best first."""
    return [replace(f, slack=slack) for f in (*_PAGES[role], *_ROWS) for slack in ("any", "finite")]


def choose_format(role: str, device: str, needs: AttentionNeeds) -> CacheFormat:
    """Return the first format that ``device`` accepts for every kind of layer of the model.

    Raises:
        UnsupportedError: it accepts none; the reasons of every candidate are inside.
    """
    refusals: dict[Any, None] = {}
    for candidate in candidates(role):
        reasons = _refusals(candidate, role, device, needs)
        if not reasons:
            strided = replace(needs, features=tuple(features | {"strided"} for features in needs.features))
            return replace(candidate, strided=not _refusals(candidate, role, device, strided))
        refusals.update(dict.fromkeys(reasons))
    raise UnsupportedError(f"{device} has no attention kernel for {role} of this model", tuple(refusals))


def _refusals(candidate: CacheFormat, role: str, device: str, needs: AttentionNeeds) -> list[Refusal]:
    max_q = _LEAST_ROW if role == "prefill" else 1
    specs = [candidate.spec(needs, features, batch=1, max_q=max_q, max_kv=_LEAST_ROW) for features in needs.features]
    found = [hal.explain(spec, device) for spec in specs]
    return [refusal for explanation in found if explanation.chosen is None for refusal in explanation.refusals]
