"""KV cache descriptors: offset algebra against numpy transposes, validation, JSON."""

import json
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from hal.dtype import DType
from hal.errors import ContractError
from hal_ops.kv_format import Component, Factor, KVCacheFormat, KVIdentity, Scale

B, N, H, D, X = 3, 4, 2, 16, 8
BLOCK = Factor("B")


def component(*order, name="k", **kwargs):
    return Component(name, D, DType.float16, order, **kwargs)


def logical_ids(*leading):
    """One distinct number per logical element ``[..., B, N, H, D]``."""
    shape = (*leading, B, N, H, D)
    return np.arange(np.prod(shape)).reshape(shape)


# Each layout with the numpy expression that stores [B, N, H, D] that way.
PLAIN = {
    "nhd": (component(BLOCK, Factor("N", N), Factor("H", H), Factor("D", D)), lambda x: x),
    "hnd": (component(BLOCK, Factor("H", H), Factor("N", N), Factor("D", D)), lambda x: x.transpose(0, 2, 1, 3)),
    "dim before token": (
        component(BLOCK, Factor("H", H), Factor("D", D), Factor("N", N)),
        lambda x: x.transpose(0, 2, 3, 1),
    ),
    "x-packed": (
        component(BLOCK, Factor("H", H), Factor("D", D // X), Factor("N", N), Factor("D", X)),
        lambda x: x.reshape(B, N, H, D // X, X).transpose(0, 2, 3, 1, 4),
    ),
    "fractal nz": (  # [B, H*D/n, N, n]
        component(BLOCK, Factor("H", H), Factor("D", D // X), Factor("N", N), Factor("D", X)),
        lambda x: x.reshape(B, N, H * D // X, X).transpose(0, 2, 1, 3),
    ),
    "tokens split twice": (
        component(BLOCK, Factor("N", 2), Factor("H", H), Factor("D", D), Factor("N", 2)),
        lambda x: x.reshape(B, 2, 2, H, D).transpose(0, 1, 3, 4, 2),
    ),
    "blocks inside heads": (
        component(Factor("H", H), BLOCK, Factor("N", N), Factor("D", D)),
        lambda x: x.transpose(2, 0, 1, 3),
    ),
}
PACKED = {  # from [KV, B, N, H, D]
    "packed [B,H,N,2D]": (
        component(BLOCK, Factor("H", H), Factor("N", N), Factor("KV", 2), Factor("D", D), name="kv"),
        lambda x: np.concatenate([x[0], x[1]], axis=-1).transpose(0, 2, 1, 3),
    ),
    "kv first [2,B,H,N,D]": (
        component(Factor("KV", 2), BLOCK, Factor("H", H), Factor("N", N), Factor("D", D), name="kv"),
        lambda x: x.transpose(0, 1, 3, 2, 4),
    ),
}


def strided_rows(buffer, view):
    factors = np.lib.stride_tricks.as_strided(
        buffer[view.offset :], view.sizes, [stride * buffer.itemsize for stride in view.strides]
    )
    return factors.transpose(view.permutation).reshape(view.shape)


@pytest.mark.parametrize("name", PLAIN)
def test_offsets_and_view_equal_the_numpy_transpose(name):
    layout, store = PLAIN[name]
    buffer = np.ascontiguousarray(store(logical_ids())).reshape(-1)
    ids = logical_ids()
    for at in np.ndindex(B, N, H, D):
        assert buffer[layout.offset(*at, pages=B)] == ids[at]
    np.testing.assert_array_equal(strided_rows(buffer, layout.logical_view(B)), ids)
    assert layout.elements(B) == buffer.size


@pytest.mark.parametrize("name", PACKED)
def test_keys_and_values_of_a_packed_component(name):
    layout, store = PACKED[name]
    ids = logical_ids(2)
    buffer = np.ascontiguousarray(store(ids)).reshape(-1)
    for kv, *at in np.ndindex(2, B, N, H, D):
        assert buffer[layout.offset(*at, kv=kv, pages=B)] == ids[(kv, *at)]
    for kv in (0, 1):
        np.testing.assert_array_equal(strided_rows(buffer, layout.logical_view(B, kv=kv)), ids[kv])


def test_layers_in_one_tensor():
    layout = component(Factor("L", 5), BLOCK, Factor("N", N), Factor("H", H), Factor("D", D))
    assert layout.offset(1, 2, 1, 3, layer=4, pages=B) == np.ravel_multi_index((4, 1, 2, 1, 3), (5, B, N, H, D))
    assert layout.logical_view(B, layer=4).offset == 4 * B * N * H * D


def test_page_padding_and_explicit_strides():
    order = BLOCK, Factor("N", N), Factor("H", H), Factor("D", D)
    padded = component(*order, page_pad=64)  # bytes: 32 elements
    assert padded.strides_for(B) == (N * H * D + 32, H * D, D, 1)
    assert padded.elements(B) == B * (N * H * D + 32)
    strided = component(*order, strides=padded.strides_for(B))
    assert strided.offset(2, 3, 1, 5) == padded.offset(2, 3, 1, 5) == 2 * (N * H * D + 32) + 3 * H * D + D + 5


def test_offsets_do_not_wrap_at_32_bits():
    layout = PLAIN["nhd"][0]
    assert layout.offset(2**40, 1) == 2**40 * N * H * D + H * D


def test_offset_refuses_what_it_cannot_answer():
    layout = PLAIN["nhd"][0]
    for bad in ({"token": N}, {"token": -1}, {"head": H}, {"dim": D}, {"kv": 1}, {"layer": 1}, {"block": -1}):
        with pytest.raises(ContractError):
            layout.offset(**{"block": 0} | bad)
    with pytest.raises(ContractError, match="block"):
        layout.offset(B, pages=B)
    with pytest.raises(ContractError, match="pages"):
        PACKED["kv first [2,B,H,N,D]"][0].offset(0)
    with pytest.raises(ContractError, match="opaque"):
        replace(layout, opaque="acme:tiles@1").logical_view(B)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"name": "keys"}, "name"),
        ({"head_dim": D + 1}, "order"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": True}, "head_dim"),
        ({"storage_dtype": "float7"}, "dtype"),
        ({"order": (Factor("N", N), Factor("D", D))}, "order"),
        ({"order": (BLOCK, BLOCK, Factor("D", D))}, "order"),
        ({"order": (BLOCK, Factor("KV", 2), Factor("D", D))}, "order"),
        ({"name": "kv"}, "order"),
        ({"order": ("B", "N")}, "order"),
        ({"strides": (1, 2)}, "strides"),
        ({"strides": (N * H * D, H * D, D, 0)}, "strides"),
        ({"strides": (N * H * D, H * D, D - 1, 1)}, "strides"),
        ({"strides": (1, H * D, D, 1)}, "strides"),
        ({"page_pad": 3}, "page_pad"),
        ({"page_pad": 2, "strides": (N * H * D, H * D, D, 1)}, "page_pad"),
        ({"base_align": 3}, "base_align"),
        ({"opaque": "tiles"}, "opaque"),
        ({"scale": 1.0}, "scale"),
        ({"scale": Scale("token", DType.float32, "inline")}, "strides"),
    ],
)
def test_component_validation(change, argument):
    with pytest.raises(ContractError) as caught:
        replace(PLAIN["nhd"][0], **change)
    assert caught.value.argument == argument


@pytest.mark.parametrize("axis, size", [("Q", 2), ("B", 2), ("N", None), ("N", 0), ("N", 2.0), ("N", True)])
def test_factor_validation(axis, size):
    with pytest.raises(ContractError):
        Factor(axis, size)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"schema": 2}, "schema"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"page_tokens": 8}, "components[k].order"),
        ({"compress_ratio": 3}, "page_tokens"),
        ({"layer_ids": ()}, "layer_ids"),
        ({"layer_ids": (1, 1)}, "layer_ids"),
        ({"layer_ids": (-1,)}, "layer_ids"),
        ({"head_start": 1}, "head_count"),
        ({"head_count": 1}, "components[k].order"),
        ({"replica": -1}, "replica"),
        ({"components": ()}, "components"),
    ],
)
def test_format_validation(change, argument):
    form = KVCacheFormat.nhd(dtype="float16", page_tokens=N, kv_heads=H, head_dim=D)
    with pytest.raises(ContractError) as caught:
        replace(form, **change)
    assert caught.value.argument == argument


def zoo():
    yield KVCacheFormat.nhd(dtype="bf16", page_tokens=N, kv_heads=H, head_dim=D, v_head_dim=8, layer_ids=[3, 1])
    yield KVCacheFormat.hnd(dtype="float8_e4m3fnuz", page_tokens=N, kv_heads=H, head_dim=D)
    scale = Scale("token", DType.float32, order=(BLOCK, Factor("N", N), Factor("H", H)), zero_point=True)
    keys = replace(PLAIN["x-packed"][0], scale=scale, base_align=64, page_pad=64)
    shared = {"page_tokens": N, "total_kv_heads": 8, "head_start": 2, "head_count": H, "replica": 1}
    yield KVCacheFormat(components=(keys, replace(PLAIN["hnd"][0], name="v")), **shared)
    yield KVCacheFormat(components=(PACKED["packed [B,H,N,2D]"][0],), **shared)
    yield KVCacheFormat(components=(replace(PLAIN["nhd"][0], opaque="acme:tiles@1"),), **shared)


@pytest.mark.parametrize("form", list(zoo()), ids=lambda form: "+".join(c.name for c in form.components))
def test_json_round_trip(form):
    again = KVCacheFormat.from_json(form.to_json())
    assert again == form and hash(again) == hash(form) and again.to_json() == form.to_json()
    with pytest.raises(FrozenInstanceError):
        again.replica = 5


def test_json_refuses_what_it_does_not_know():
    text = next(zoo()).to_json()

    def changed(edit):
        content = json.loads(text)
        edit(content)
        return json.dumps(content)

    bad = {
        "unknown colour": changed(lambda c: c.update(colour=1)),
        "unknown y": changed(lambda c: c["components"][0].update(y=1)),
        "unknown z": changed(lambda c: c["components"][0]["order"][0].update(z=1)),
        "schema: required 1, got none": changed(lambda c: c.pop("schema")),
        "schema: required 1, got 9": changed(lambda c: c.update(schema=9)),
        "page_tokens": changed(lambda c: c.pop("page_tokens")),
        "head_count": changed(lambda c: c.update(head_count="2")),
        "layer_ids": changed(lambda c: c.update(layer_ids=1)),
        "components": changed(lambda c: c.update(components={})),
        "JSON": text[:-1],
        "JSON object": "[]",
    }
    for message, content in bad.items():
        with pytest.raises(ContractError, match=message):
            KVCacheFormat.from_json(content)


def test_names_shapes_and_bytes():
    nhd = KVCacheFormat.nhd(dtype="float16", page_tokens=N, kv_heads=H, head_dim=D, v_head_dim=8, layer_ids=(0, 1))
    hnd = KVCacheFormat.hnd(dtype="float16", page_tokens=N, kv_heads=H, head_dim=D)
    assert [form.name for form in (nhd, hnd)] == ["NHD", "HND"]
    assert nhd.shape("k", 7) == (7, N, H, D) and nhd.shape("v", 7) == (7, N, H, 8)
    assert hnd.shape(hnd.components[0], 7) == (7, H, N, D) and hnd.strides("k", 7) == (H * N * D, N * D, D, 1)
    assert nhd.bytes(7) == 2 * 7 * N * H * (D + 8) * 2 and nhd.bytes(0) == 0
    assert nhd.component("k").bytes_per_token == H * D * 2
    assert [form.name for form in list(zoo())[2:]] == ["format"] * 3
    mixed = (hnd.components[0], nhd.components[1])
    assert replace(hnd, components=mixed).name == "format"
    with pytest.raises(ContractError, match="one of k, v"):
        nhd.component("latent")


def test_latent_component_without_heads():
    latent = Component("latent", 576, "bfloat16", (BLOCK, Factor("N", N), Factor("D", 576)))
    form = KVCacheFormat(page_tokens=N, total_kv_heads=1, head_count=1, components=(latent,))
    assert form.shape("latent", 2) == (2, N, 576)
    assert latent.logical_view(2).shape == (2, N, 1, 576)


def test_identity_is_hashable_and_checked():
    identity = KVIdentity(model="m", weights_digest="d", tenant="t")
    assert identity == replace(identity) and len({identity, replace(identity, weight_epoch=1)}) == 2
    with pytest.raises(ContractError, match="weight_epoch"):
        replace(identity, weight_epoch=-1)
    with pytest.raises(ContractError, match="tenant"):
        replace(identity, tenant=None)
