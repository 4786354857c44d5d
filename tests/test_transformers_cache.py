"""The paged cache by itself: pages, sharing, hand-over, and the calls that transformers makes on a cache."""

from __future__ import annotations

from typing import Any

import pytest

import hal

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from hal_serving.transformers import role as roles  # noqa: E402
from hal_serving.transformers.attention import attention  # noqa: E402
from hal_serving.transformers.cache import PagedCache  # noqa: E402
from hal_serving.transformers.format import CacheFormat  # noqa: E402
from hal_serving.transformers.linear import HalEmbedding, HalLinear  # noqa: E402
from hal_serving.transformers.pool import PagePool  # noqa: E402
from hal_serving.transformers.role import Placement, Role  # noqa: E402

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 2
MODULE = torch.nn.Identity()
FORMATS = {
    "pages": (CacheFormat("HND", 8), CacheFormat("NHD", 4)),
    "rows": (CacheFormat("HND", 8, one_column=True), CacheFormat("HND", 8, one_column=True)),
    "rows to pages": (CacheFormat("NHD", 8, one_column=True, slack="finite"), CacheFormat("HND", 4)),
    "pages to rows": (CacheFormat("NHD", 4), CacheFormat("HND", 8, one_column=True)),
}


class Twin:
    """A paged cache, and beside it all K and V per row as plain tensors: attention over both must agree."""

    def __init__(self, kind: str = "pages", **sizes: Any) -> None:
        roles = [Role(name, "cpu:0", form) for name, form in zip(("prefill", "decode"), FORMATS[kind], strict=True)]
        self.placement = Placement(*roles)
        self.cache = PagedCache(self.placement, LAYERS, **sizes)
        self.rows: list[list[tuple[Any, Any]]] = []  # [layer][row] -> k [Hkv, S, D], v

    def forward(self, batch: int, columns: int, mask: Any = None) -> None:
        if not self.rows:
            empty = torch.zeros(KV_HEADS, 0, DIM)
            self.rows = [[(empty, empty) for _ in range(batch)] for _ in range(LAYERS)]
        for layer in range(LAYERS):
            q, k, v = (torch.randn(batch, heads, columns, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            marked, _ = self.cache.update(k, v, layer)
            out, _ = attention(MODULE, q, marked, v, mask)
            for row in range(batch):
                real = torch.ones(columns, dtype=torch.bool) if mask is None else mask[row, -columns:]
                old_k, old_v = self.rows[layer][row]
                held = torch.cat([old_k, k[row][:, real]], 1), torch.cat([old_v, v[row][:, real]], 1)
                self.rows[layer][row] = held
                expected = self._attention(q[row][:, real], *held)
                torch.testing.assert_close(out[row][real], expected, atol=1e-5, rtol=1e-5)
                assert not out[row][~real].any()

    @staticmethod
    def _attention(q: Any, k: Any, v: Any) -> Any:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
        scores = (q @ k.mT / DIM**0.5).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1)

    def select(self, rows: list[int]) -> None:
        self.rows = [[layer[row] for row in rows] for layer in self.rows]

    def crop(self, columns: int) -> None:
        self.rows = [[(k[:, :-columns], v[:, :-columns]) for k, v in layer] for layer in self.rows]


@pytest.mark.parametrize("kind", FORMATS)
def test_prefill_hand_over_decode_and_growth(kind: str) -> None:
    twin = Twin(kind)
    twin.forward(2, 5)
    twin.forward(2, 6)  # a second chunk of the prompt
    assert twin.cache.role.name == "prefill"
    for _ in range(8):
        twin.forward(2, 1)
    assert twin.cache.role.name == "decode"
    twin.forward(2, 9)  # the next turn of a chat stays where the KV is
    assert twin.cache.role.name == "decode"
    assert twin.cache.get_seq_length() == 28
    moved = 0 if kind == "rows" else 2 * 11 * LAYERS * KV_HEADS * 2 * DIM * 4
    assert twin.placement.kv_bytes_moved == moved


@pytest.mark.parametrize("kind", FORMATS)
def test_padding_is_not_stored(kind: str) -> None:
    twin = Twin(kind)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)
    twin.forward(3, 5, mask)
    assert twin.cache.lens.tolist() == [3, 5, 1]
    for step in range(1, 6):
        grown = torch.nn.functional.pad(mask, (0, step), value=True)
        twin.forward(3, 1, grown if step % 2 else None)
    assert twin.cache.lens.tolist() == [8, 10, 6]
    assert twin.cache.get_seq_length() == 10


@pytest.mark.parametrize("kind", FORMATS)
def test_beams_share_pages_until_they_write(kind: str) -> None:
    twin = Twin(kind)
    twin.forward(3, 9)
    twin.forward(3, 1)
    for order in ([2, 0, 0], [1, 1, 2], [0, 0, 0], [2, 1, 0]):
        twin.cache.reorder_cache(torch.tensor(order))
        twin.select(order)
        twin.forward(3, 1)
    pool = twin.cache.require_pool()
    users = [page for table in twin.cache.tables for page in table]
    assert [users.count(page) for page in range(pool.pages)] == pool.refs
    assert sorted(pool.free) == [page for page in range(pool.pages) if not pool.refs[page]]


def test_batch_operations() -> None:
    twin = Twin()
    twin.forward(2, 5, torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool))
    twin.cache.batch_repeat_interleave(2)
    twin.select([0, 0, 1, 1])
    twin.forward(4, 1)
    twin.cache.batch_select_indices(torch.tensor([False, True, True, False]))
    twin.select([1, 2])
    twin.forward(2, 3)
    assert twin.cache.lens.tolist() == [8, 9]


@pytest.mark.parametrize("kind", FORMATS)
def test_crop_forgets_the_last_columns(kind: str) -> None:
    twin = Twin(kind)
    twin.forward(2, 9)
    twin.forward(2, 1)
    twin.cache.reorder_cache(torch.tensor([0, 0]))
    twin.select([0, 0])
    twin.cache.crop(-6)  # into a page that both rows share
    twin.crop(6)
    twin.forward(2, 3)
    assert twin.cache.get_seq_length() == 7
    with pytest.raises(ValueError, match="negative"):
        twin.cache.crop(3)


def test_crop_knows_where_padding_is() -> None:
    twin = Twin()
    twin.forward(2, 4, torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool))  # padded on the right
    twin.cache.crop(-2)
    assert twin.cache.lens.tolist() == [2, 2]


def test_reset_starts_again_in_prefill() -> None:
    twin = Twin()
    twin.forward(2, 5)
    twin.forward(2, 1)
    twin.cache.reset()
    twin.rows = []
    assert twin.cache.get_seq_length() == 0
    twin.forward(3, 4)
    assert twin.cache.role.name == "prefill"


def test_sizes_given_are_allocated_once() -> None:
    twin = Twin(batch=2, max_len=40)
    twin.forward(2, 5)
    first = twin.cache.require_pool().layers[0][0]
    twin.forward(2, 30)
    assert twin.cache.require_pool().layers[0][0] is first
    assert first.shape == (16, KV_HEADS, 8, DIM)


def test_a_copy_of_a_cache_goes_its_own_way() -> None:
    import copy

    twin = Twin()
    twin.forward(1, 6)
    other = copy.deepcopy(twin)
    twin.forward(1, 1)
    other.forward(1, 3)
    assert (twin.cache.get_seq_length(), other.cache.get_seq_length()) == (7, 9)
    assert other.cache.placement is twin.placement


def test_another_mask_over_the_past_is_refused() -> None:
    twin = Twin()
    twin.forward(1, 3, torch.tensor([[False, True, True]]))
    with pytest.raises(hal.ContractError, match="masked as before"):
        twin.forward(1, 1, torch.ones(1, 4, dtype=torch.bool))
    twin = Twin()
    twin.forward(1, 3)
    with pytest.raises(hal.ContractError, match="every column"):
        twin.forward(1, 1, torch.ones(1, 1, dtype=torch.bool))


def test_misuse_is_told() -> None:
    twin = Twin()
    k = torch.randn(1, KV_HEADS, 3, DIM)
    twin.cache.update(k, k, 0)
    with pytest.raises(RuntimeError, match="never attended"):
        twin.cache.update(k, k, 0)
    twin = Twin()
    twin.forward(2, 3)
    with pytest.raises(hal.ContractError, match="batch of 2"):
        twin.forward(1, 1)
    twin = Twin()
    twin.forward(1, 3)
    marked, _ = twin.cache.update(k, k, 0)
    attention(MODULE, torch.randn(1, HEADS, 3, DIM), marked, k, None)
    with pytest.raises(RuntimeError, match="half way"):
        twin.forward(1, 1)


def test_freed_pages_are_clean_where_slack_must_be_finite() -> None:
    pool = PagePool(CacheFormat("NHD", 4, slack="finite"))
    page = pool.take()
    tokens = torch.full((1, KV_HEADS, DIM), torch.nan)
    k_cache, v_cache = pool.caches(0, tokens, tokens)
    k_cache[page] = torch.nan
    v_cache[page] = torch.inf
    pool.release(page)
    assert pool.take() == page
    assert not k_cache.any() and not v_cache.any()


# ---------------------------------------------------------------- layers on GGUF blocks


@pytest.mark.parametrize("scheme", ["gguf_q4_0", "gguf_q4_1", "gguf_q8_0"])
def test_layers_read_gguf_blocks(scheme: str) -> None:
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, scheme.removeprefix("gguf_").upper())
    blocks = gguf.quants.quantize(torch.randn(24, 64).numpy(), kind)
    dense = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    raw = torch.from_numpy(blocks).reshape(-1)
    linear = HalLinear(raw, scheme=scheme, shape=(24, 64), bias=torch.arange(24.0))
    x = torch.randn(2, 3, 64)
    torch.testing.assert_close(linear(x), x @ dense.T + torch.arange(24.0), atol=1e-4, rtol=1e-4)
    assert (linear.in_features, linear.out_features) == (64, 24)
    embedding = HalEmbedding(raw, scheme, (24, 64), torch.bfloat16)
    ids = torch.tensor([[3, 0], [23, 3]])
    assert torch.equal(embedding(ids), dense[ids].bfloat16())


def test_a_weight_is_packed_anew_when_another_kernel_would_pack_it() -> None:
    for scheme, block in (("gguf_q8_0", 34), ("gguf_q4_1", 20)):
        linear = HalLinear(torch.zeros(32 * 2 * block, dtype=torch.uint8), scheme=scheme, shape=(32, 64))
        found = hal.explain(linear.prepack_spec(), "cpu:0")
        roles.enter(Role("decode", "cpu:0", FORMATS["pages"][1]))
        try:
            linear(torch.ones(1, 64))
            assert linear._packed["cpu:0"].kernel == found.chosen
            others = {refusal.kernel for refusal in found.refusals if refusal.field == "rank"}
            for other in others:
                with hal.policy(pin={"prepack": other}):
                    linear.renew()
                    linear(torch.ones(1, 64))
                    assert linear._packed["cpu:0"].kernel == other
                linear.renew()
                assert not linear._packed
        finally:
            roles.leave()
