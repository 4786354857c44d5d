"""torch.kv_*: byte for byte what the reference does."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from hal.array import Array  # noqa: E402
from hal.errors import UnsupportedError  # noqa: E402
from hal.types import Device, DType  # noqa: E402
from hal_ops import reference  # noqa: E402
from hal_ops.kv_format import Component, Factor, KVCacheFormat, Scale  # noqa: E402
from hal_ops.spec import spec  # noqa: E402
from hal_torch import kv, kv_convert, pages  # noqa: E402

DEVICE = Device(id="cpu:0", plugin="cpu", vendor="test", tensor_device="cpu")
KERNELS = {kernel.claim.op: kernel for kernel in kv.kernels(DEVICE)}
write, gather, copy, convert = (KERNELS[op].build(None) for op in ("kv_write", "kv_gather", "kv_copy", "kv_convert"))
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def filled(*shape, dtype=torch.float32, seed=0):
    """Random bytes, NaN patterns included."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8)).view(dtype).view(shape)


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * 8).to(dtype)


def stored(x):
    """Bytes as an integer array, for exact comparison."""
    return pages.bits(x).numpy()


def host(x):
    """The tensor as the reference reads it."""
    unsigned = {1: torch.uint8, 2: torch.uint16}
    if x.dtype in (torch.float32, torch.float16, torch.int8):
        return x.numpy()
    return Array.host(x.view(unsigned[x.element_size()]).numpy(), DType.parse(x.dtype))


def same(got, want):
    np.testing.assert_array_equal(stored(got), want.view(stored(got).dtype))


def factors(text):
    """ "H3 D2 N4 D8" as factors, B first where it is not named."""
    parts = [Factor(part.strip("0123456789"), int(part.lstrip("LHNDKVB") or 0) or None) for part in text.split()]
    return tuple(parts) if any(f.axis == "B" for f in parts) else (Factor("B"), *parts)


def layout(page, heads, dim, dtype, *orders, layers=(0,)):
    """A format with components k and v, or kv when one order is given."""
    names = ("k", "v") if len(orders) == 2 else ("kv",)
    components = tuple(Component(name, dim, dtype, factors(order)) for name, order in zip(names, orders, strict=True))
    return KVCacheFormat(
        page_tokens=page, layer_ids=layers, total_kv_heads=heads, head_count=heads, components=components
    )


def formats(dtype="float16"):
    """Layouts of the field for 2 heads of 8 dims, by name."""
    plain = {"page_tokens": 4, "kv_heads": 2, "head_dim": 8, "dtype": dtype}
    return {
        "nhd": KVCacheFormat.nhd(**plain),
        "hnd": KVCacheFormat.hnd(**plain | {"page_tokens": 3}),
        "x-packed": layout(8, 2, 8, dtype, "H2 D2 N8 D4", "H2 D8 N8"),
        "nz": layout(16, 2, 8, dtype, "D2 N16 H2 D4", "H2 D2 N16 D4"),
        "packed": layout(4, 2, 8, dtype, "H2 N4 KV2 D8"),
        "kv-outside": layout(1, 2, 8, dtype, "KV2 B N1 H2 D8"),
        "split-tokens": layout(6, 2, 8, dtype, "N2 H2 N3 D8", "N3 D8 H2 N2"),
    }


def caches(form, count, dtype, seed):
    return tuple(
        numbers(*form.shape(component, count), dtype=dtype, seed=seed + i)
        for i, component in enumerate(form.components * len(form.layer_ids))
    )


def tables(form, lens, count, seed):
    """Distinct pages for each request, garbage behind them."""
    used = -(-np.array(lens) // form.page_tokens)
    ids = iter(np.random.default_rng(seed).permutation(count))
    table = np.full((len(lens), max(used, default=0) + 1), -1, dtype=np.int32)
    for b, columns in enumerate(used):
        table[b, :columns] = [next(ids) for _ in range(columns)]
    return torch.from_numpy(table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_write_moves_bytes(dtype, order):
    shape = (5, 4, 3, 8) if order == "NHD" else (5, 3, 4, 8)
    k_cache, v_cache = filled(*shape, dtype=dtype, seed=1), filled(*shape[:3], 6, dtype=dtype, seed=2)
    k, v = filled(9, 3, 8, dtype=dtype, seed=3), filled(9, 3, 6, dtype=dtype, seed=4)
    slots = torch.tensor([7, -1, 0, 19, 4, 20, -9])
    wants = reference.kv_write(*map(host, (k, v, k_cache, v_cache)), slots.numpy(), layout=order)
    assert write(k, v, k_cache, v_cache, slots, layout=order) is None
    for got, want in zip((k_cache, v_cache), wants, strict=True):
        same(got, want)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.int8])
def test_write_saturates(dtype):
    cache = filled(2, 2, 1, 16, dtype=dtype)
    k = numbers(2, 1, 16) * 20
    k[0, 0, :4] = torch.tensor([1e6, -1e6, float("inf"), float("-inf")])
    k[1, 0, :2] = torch.tensor([float("nan"), 2.5])
    slots = torch.tensor([3, 0])
    want, _ = reference.kv_write(host(k), host(k), host(cache), host(cache), slots.numpy())
    write(k, k, cache, cache.clone(), slots)
    numeric = cache.float().numpy()
    if dtype.is_floating_point:
        np.testing.assert_array_equal(numeric, torch.from_numpy(want).view(dtype).float().numpy())
    else:
        same(cache, want)


def test_write_skips_without_asking_the_host():
    cache = pages.Pages.of(numbers(2, 2, 1, 4), "NHD", "k")
    before = cache.read(torch.arange(4))
    rows = numbers(4, 1, 4, seed=5)
    cache.write(*kv._place(cache, torch.tensor([-1, 2, 99, 0]), rows))
    after = cache.read(torch.arange(4))
    assert torch.equal(after[[2, 0]], rows[[1, 3]])
    assert torch.equal(after[[1, 3]], before[[1, 3]])
    cache.write(*kv._place(cache, torch.tensor([-1, 4]), rows[:2]))
    assert torch.equal(cache.read(torch.arange(4)), after)


def test_write_into_views_of_one_tensor():
    both = torch.zeros(3, 2, 4, 2, 8)
    k, v = numbers(2, 2, 8), numbers(2, 2, 8, seed=1)
    write(k, v, both[:, 0], both[:, 1], torch.tensor([5, 11]))
    assert torch.equal(both[1, 0, 1], k[0])
    assert torch.equal(both[2, 1, 3], v[1])
    assert both.count_nonzero() == k.count_nonzero() + v.count_nonzero()


def test_write_of_nothing():
    cache = numbers(0, 4, 2, 8)
    write(numbers(3, 2, 8), numbers(3, 2, 8), cache, cache.clone(), torch.tensor([-1, -1, -1]))
    cache = numbers(1, 4, 2, 8)
    write(numbers(3, 2, 8), numbers(3, 2, 8), cache, cache.clone(), torch.empty(0, dtype=torch.int64))
    assert torch.equal(cache, numbers(1, 4, 2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nhd", "hnd", "x-packed", "nz", "split-tokens"])
def test_gather(dtype, name):
    form = formats(str(dtype).removeprefix("torch."))[name]
    order = form if form.name == "format" else form.name
    k, v = (filled(*form.shape(c, 12), dtype=dtype, seed=i) for i, c in enumerate(form.components))
    lens = torch.tensor([5, 0, 9, 1], dtype=torch.int32)
    table = tables(form, lens.tolist(), 12, seed=3)
    wants = reference.kv_gather(host(k), host(v), table.numpy(), lens.numpy(), layout=order)
    got = gather(k, v, table, lens, layout=order)
    for x, want in zip(got[:2], wants[:2], strict=True):
        same(x, want)
    assert got[2].dtype == torch.int32
    assert got[2].tolist() == wants[2].tolist()


def test_gather_of_strided_caches_and_of_nothing():
    both = numbers(3, 4, 2, 16)
    k, v, indptr = gather(both[..., :8], both[..., 8:], torch.tensor([[2, 1]]), torch.tensor([6]))
    assert torch.equal(torch.cat([k, v], -1), torch.cat([both[2], both[1, :2]]))
    k, v, indptr = gather(both, both, torch.empty(0, 3, dtype=torch.int32), torch.empty(0, dtype=torch.int32))
    assert k.shape == (0, 2, 16)
    assert indptr.tolist() == [0]


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(7)), st.lists(st.integers(0, 6), max_size=7), st.sampled_from(DTYPES), st.booleans())
def test_copy_is_a_snapshot(targets, sources, dtype, small):
    mapping = np.array(list(zip(sources, targets, strict=False)), dtype=np.int64).reshape(-1, 2)
    tensors = filled(7, 2, 3, dtype=dtype), filled(7, 4, 2, dtype=dtype, seed=1)[:, ::2]
    wants = reference.kv_copy([stored(x) for x in tensors], mapping)
    before, kv.CHUNK = kv.CHUNK, 1 if small else kv.CHUNK
    try:
        copy(tensors, mapping)
    finally:
        kv.CHUNK = before
    for got, want in zip(tensors, wants, strict=True):
        same(got, want)


@pytest.mark.parametrize("source", list(formats()))
@pytest.mark.parametrize("target", list(formats()))
def test_convert_between_layouts(monkeypatch, source, target):
    monkeypatch.setattr(kv_convert, "CHUNK", 200)
    check_convert(formats()[source], formats()[target], torch.float16, torch.float16)


@pytest.mark.parametrize("after", DTYPES)
@pytest.mark.parametrize("before", DTYPES)
def test_convert_between_dtypes(before, after):
    old, new = (formats(str(dtype).removeprefix("torch.")) for dtype in (before, after))
    check_convert(old["nhd"], new["x-packed"], before, after)


def check_convert(old, new, before, after):
    lens = torch.tensor([7, 0, 1, 12], dtype=torch.int32)
    src, dst = caches(old, 24, before, seed=0), caches(new, 24, after, seed=50)
    options = {
        "src_table": tables(old, lens.tolist(), 24, seed=1),
        "dst_table": tables(new, lens.tolist(), 24, seed=2),
        "kv_lens": lens,
    }
    numpy = {name: x.numpy() for name, x in options.items()}
    wants = reference.kv_convert([host(x) for x in src], old, [host(x) for x in dst], new, **numpy)
    assert convert(src, old, dst, new, **options, lossy=True) is None
    for got, want in zip(dst, wants, strict=True):
        same(got, want)


def test_convert_of_layers_and_latents():
    latent = Component("latent", 8, DType.float32, factors("N4 D8"))
    rope = Component("rope", 4, DType.float32, factors("N4 D4"))
    fields = {"page_tokens": 4, "layer_ids": (3, 5), "total_kv_heads": 1, "head_count": 1}
    old = KVCacheFormat(components=(latent, rope), **fields)
    new = KVCacheFormat(components=(rope, Component("latent", 8, DType.float32, factors("D4 N4 D2"))), **fields)
    check_convert(old, new, torch.float32, torch.float32)


def test_convert_events():
    form = formats("float32")["nhd"]
    src, dst = caches(form, 2, torch.float32, 0), caches(form, 2, torch.float32, 9)
    table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    first = convert(src, form, dst, form, src_table=table, dst_table=table, kv_lens=lens, record=True)
    assert first.query()
    assert convert(src, form, dst, form, src_table=table, dst_table=table, kv_lens=lens, wait=(first,)) is None
    assert torch.equal(src[0][1], dst[0][1])
    assert not torch.equal(src[0][0], dst[0][0])


def test_convert_refuses_scales():
    scale = Scale("tensor", DType.float32)
    parts = tuple(Component(name, 8, DType.int8, factors("N4 H2 D8"), scale=scale) for name in "kv")
    scaled = KVCacheFormat(page_tokens=4, total_kv_heads=2, head_count=2, components=parts)
    cache = caches(scaled, 2, torch.int8, 0)
    table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="scales"):
        convert(cache, scaled, cache, scaled, src_table=table, dst_table=table, kv_lens=lens)


def test_claims():
    convert_claim, write_claim = KERNELS["kv_convert"].claim, KERNELS["kv_write"].claim
    assert write_claim.kernel == "torch.kv_write"
    assert not write_claim.needs["features"].admits({"k_scale_head"})
    assert not convert_claim.needs["features"].admits({"opaque"})
    layouts = {"src_layout": "NHD", "dst_layout": "HND"}
    mixed = spec("kv_convert", src_dtype="uint8", dst_dtype="float16", **layouts)
    assert [refusal.kernel for refusal in convert_claim.refuse(mixed)] == ["torch.kv_convert"]
    assert convert_claim.refuse(spec("kv_convert", src_dtype="uint8", dst_dtype="uint8", **layouts)) == []
