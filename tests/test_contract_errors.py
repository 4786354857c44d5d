"""Bad input to every operator: ``ContractError`` naming the argument, and no array has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from contract_cases import (
    CALLS,
    CASES,
    Arguments,
    Case,
    f32,
    gemm,
    kv_convert,
    kv_copy,
    kv_gather,
    kv_write,
    merge,
    prepack,
    ragged,
    rms_norm,
    rng,
    rope,
    silu_mul,
)

import hal
import hal_ops
from hal import ContractError
from hal_ops import arrays, plan_attention, reference


def changed(case: Case) -> Arguments:
    good, change, _ = case
    arguments = good()
    return arguments | (change(arguments) if callable(change) else copy.deepcopy(change))


def to_torch(x: Any) -> Any:
    """The same array as a tensor; what torch cannot hold stays."""
    if isinstance(x, list):
        return [to_torch(one) for one in x]
    if not isinstance(x, np.ndarray) or not x.flags.writeable or not x.dtype.isnative or x.dtype.kind == "V":
        return x
    return torch.from_numpy(x)


def buffers(arguments: Arguments) -> list[tuple[Any, bytes]]:
    flat = [x for value in arguments.values() for x in (value if isinstance(value, list) else [value])]
    return [(x, bytes_of(x)) for x in flat if isinstance(x, np.ndarray | torch.Tensor)]


def bytes_of(x: Any) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def identity(case: Case) -> str:
    good, change, blame = case
    if callable(change):
        return f"{good.__name__}-{blame}-made"
    plain = (str, int, float, tuple)
    what = [f"{name}={x if isinstance(x, plain) else type(x).__name__}" for name, x in change.items()]
    return "-".join((good.__name__, blame, *what))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("case", CASES, ids=identity)
def test_refused_by_name_and_nothing_written(case: Case, kind: str) -> None:
    good, _, blame = case
    arguments = changed(case)
    if kind == "torch":
        arguments = {name: to_torch(x) for name, x in arguments.items()}
    before = buffers(arguments)
    with pytest.raises(ContractError) as caught:
        CALLS[good](**arguments)
    assert caught.value.argument == blame, str(caught.value)
    assert caught.value.required and caught.value.actual
    assert all(bytes_of(x) == content for x, content in before)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("good", CALLS, ids=lambda good: good.__name__)
def test_the_good_call_is_good(good: Callable[[], Arguments], kind: str) -> None:
    arguments = good()
    if kind == "torch":
        arguments = {name: to_torch(x) for name, x in arguments.items()}
    for _ in range(2):
        CALLS[good](**arguments)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_checks_are_made_on_a_cache_hit_too(kind: str) -> None:
    """After a good call the same bad ones are refused: what changes from call to call is no part of a signature."""
    for case in CASES:
        good, change, blame = case
        if not callable(change):
            continue
        arguments, fine = changed(case), good()
        if kind == "torch":
            arguments, fine = ({n: to_torch(x) for n, x in one.items()} for one in (arguments, fine))
        CALLS[good](**fine)
        with pytest.raises(ContractError) as caught:
            CALLS[good](**arguments)
        assert caught.value.argument == blame


def test_columns_of_one_buffer_are_apart() -> None:
    """q, k and v of one fused projection, and caches that lie in one tensor: spans meet, elements do not."""
    fused = torch.randn(5, 8 * 8)
    q, k, _ = fused.view(5, 8, 8).split([4, 2, 2], dim=1)
    wanted = reference.rope(q.numpy(), k.numpy(), range(5), np.ones((5, 4)), np.ones((5, 4)))
    hal_ops.rope(q, k, torch.arange(5), torch.ones(5, 4), torch.ones(5, 4))
    assert np.allclose(q.numpy(), wanted[0], atol=1e-6) and np.allclose(k.numpy(), wanted[1], atol=1e-6)
    both = torch.zeros(4, 2, 2, 2, 8)  # pages, K or V, tokens, heads, dims
    hal_ops.kv_write(torch.ones(1, 2, 8), 2 * torch.ones(1, 2, 8), both[:, 0], both[:, 1], torch.tensor([3]))
    assert both[1, 0, 1].eq(1).all() and both[1, 1, 1].eq(2).all() and both.sum() == 3 * 16
    packed = torch.zeros(4, 2, 2, 16)  # keys and values of a token side by side
    hal_ops.kv_write(torch.ones(1, 2, 8), 2 * torch.ones(1, 2, 8), packed[..., :8], packed[..., 8:], torch.tensor([3]))
    assert packed.sum() == 3 * 16
    with pytest.raises(ContractError):
        hal_ops.kv_write(
            torch.ones(1, 2, 8), torch.ones(1, 2, 8), packed[..., :8], packed[..., 4:12], torch.tensor([3])
        )


def test_empty_views_share_nothing() -> None:
    cache = f32(4, 2, 2, 8)
    empty = cache.reshape(-1, 2, 8)[3:3]
    hal_ops.kv_write(empty, empty, cache, f32(4, 2, 2, 8), np.zeros(0, "int64"))


def test_in_place_where_the_contract_allows_it() -> None:
    x, weight = f32(3, 8), f32(8)
    wanted = reference.rms_norm(x, weight, 1e-6)
    assert hal_ops.rms_norm(x, weight, 1e-6, out=x) is x and np.allclose(x, wanted, atol=1e-6)
    a = merge()
    out, lse = reference.merge_attention_states(a["o_a"], a["lse_a"], a["o_b"], a["lse_b"])
    hal_ops.merge_attention_states(a["o_a"], a["lse_a"], a["o_b"], a["lse_b"], out=a["o_a"], lse_out=a["lse_a"])
    assert np.allclose(a["o_a"], out, atol=1e-6) and np.allclose(a["lse_a"], lse, atol=1e-6)


BOUND: dict[str, tuple[Callable[[], Arguments], tuple[str, ...], Arguments]] = {
    "merge_attention_states": (merge, ("o_a", "lse_a", "o_b", "lse_b"), {"dtype": "fp32", "heads": 2, "head_dim": 4}),
    "gemm": (gemm, ("a", "b"), {"a_dtype": "fp32", "b_dtype": "fp32", "out_dtype": "fp32", "m": 4, "n": 5, "k": 4,
                                "scheme": "dense", "features": {"bias", "beta"}}),
    "kv_write": (kv_write, ("k", "v", "k_cache", "v_cache", "slots"),
                 {"k_dtype": "fp32", "kv_dtype": "fp32", "head_dim": 8, "v_head_dim": 8, "kv_heads": 2,
                  "layout": "NHD", "page": 2}),
    "kv_gather": (kv_gather, ("k_cache", "v_cache", "block_table", "kv_lens"),
                  {"kv_dtype": "fp32", "head_dim": 8, "v_head_dim": 8, "kv_heads": 2, "layout": "NHD", "page": 2}),
    "rms_norm": (rms_norm, ("x", "weight", "eps"),
                 {"dtype": "fp32", "weight_dtype": "fp32", "dim": 8, "features": {"residual"}}),
    "rope": (rope, ("q", "k", "positions", "cos", "sin"),
             {"dtype": "fp32", "cos_dtype": "fp32", "head_dim": 8, "rot_dim": 8}),
    "silu_mul": (silu_mul, ("x",), {"dtype": "fp32", "dim": 4}),
    "kv_convert": (kv_convert, ("src", "src_format", "dst", "dst_format"),
                   {"src_dtype": "fp32", "dst_dtype": "fp32", "src_layout": "NHD", "dst_layout": "HND"}),
    "prepack": (prepack, ("weight",), {"scheme": "dense", "n": 5, "k": 4, "w_dtype": "fp32", "features": {"trans_b"}}),
}  # fmt: skip


@pytest.mark.parametrize("level", ["meta", "full"])
@pytest.mark.parametrize("op", [*BOUND, "attention", "kv_copy"])
def test_bound_calls_are_checked_where_asked(op: str, level: Any) -> None:
    if op == "attention":
        good: Any = ragged
        a = {name: to_torch(x) for name, x in ragged().items()}
        step = plan_attention(q_indptr=a.pop("q_indptr"), kv_indptr=a.pop("kv_indptr"))
        wanted = hal_ops.spec(
            "attention", q_dtype="fp32", kv_dtype="fp32", out_dtype="fp32", head_dim=8, v_head_dim=8, kv_heads=2,
            gqa_ratio=2, paged=False, layout="NHD", kv_slack="any", max_q=2, max_kv=4, batch=2,
        )  # fmt: skip
        positional: list[Any] = [a["q"], a["k"], a["v"], step]
        options: Arguments = {"out": torch.zeros(3, 4, 8), "scale": 0.5}
    elif op == "kv_copy":
        good, wanted = kv_copy, hal_ops.spec("kv_copy", kv_dtype="fp32")
        a = kv_copy()
        positional, options = [tuple(map(to_torch, a["caches"])), a["mapping"]], {}
    else:
        good, names, fields = BOUND[op]
        wanted = hal_ops.spec(op, **fields)
        a = {name: to_torch(x) for name, x in good().items()}
        positional = [a.pop(name) for name in names]
        positional = [tuple(x) if isinstance(x, list) else x for x in positional]
        options = a
        if op == "prepack":
            options |= {"scheme": hal_ops.Scheme.parse("dense"), "shape": (5, 4)}
    bound = hal.bind(wanted, "cpu:0", check=level)
    bound.fn(*positional, **options)
    for place in range(len(positional)):
        worse = [*positional]
        worse[place] = "text"
        with pytest.raises(ContractError):
            bound.fn(*worse, **options)


@pytest.mark.parametrize("op", ["silu_mul", "rms_norm", "rope", "merge_attention_states", "kv_gather", "kv_copy"])
def test_a_bound_call_has_the_dtype_that_was_bound(op: str) -> None:
    good, names, fields = BOUND.get(op, (kv_copy, ("caches", "mapping"), {"kv_dtype": "fp32"}))
    field = next(iter(fields))
    half_fields = fields | {name: "fp16" for name in fields if name.endswith("dtype")}
    bound = hal.bind(hal_ops.spec(op, **half_fields), "cpu:0", check="meta")
    a = {name: to_torch(x) for name, x in good().items()}
    before = buffers(a)
    positional = [a.pop(name) for name in names]
    with pytest.raises(ContractError, match="as bound") as caught:
        bound.fn(*positional, **a)
    assert caught.value.argument == field and all(bytes_of(x) == content for x, content in before)


def test_a_bound_call_may_not_ask_for_more_than_was_bound() -> None:
    wanted = hal_ops.spec("gemm", a_dtype="fp32", b_dtype="fp32", out_dtype="fp32", m=4, n=5, k=4, scheme="dense")
    bound = hal.bind(wanted, "cpu:0", check="meta")
    a = {name: to_torch(x) for name, x in gemm().items()}
    bound.fn(a["a"], a["b"], out=a["out"])
    with pytest.raises(ContractError, match="bias") as caught:
        bound.fn(a["a"], a["b"], out=a["out"], bias=a["bias"])
    assert caught.value.argument == "features"


def test_interleaving_is_judged_exactly() -> None:
    from hal_ops.validate import apart

    for _ in range(300):
        buffer = np.zeros((4, 6, 8), "float32")
        views = []
        for _ in range(2):
            cut = tuple(slice(low := int(rng.integers(0, n)), int(rng.integers(low + 1, n + 1))) for n in buffer.shape)
            views.append(buffer[cut])
        shared = np.shares_memory(*views)
        try:
            apart("out", views[0], x=views[1])
            assert not shared
        except ContractError:
            # Blocks that are neither the same rows nor columns may be refused without need, never accepted in error.
            pass
    assert arrays.span(np.zeros((0, 3))) == (0, 0)
