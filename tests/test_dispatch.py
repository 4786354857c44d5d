"""The call path of function forms: signatures, hits and misses, kinds of arrays, results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fake_backend import Fake, installed, kernel, silu_mul

import hal
import hal_ops
from hal import DType, generation
from hal_ops import activation, dispatch, plan_attention, reference

rng = np.random.default_rng(1)
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def make(kind: str, dtype: str, *shape: int) -> Any:
    """An array of some kind and dtype; "host" is numpy, or ``hal.Array`` where numpy lacks the dtype."""
    values = rng.standard_normal(shape)
    stored = reference.encode(values, DType(dtype))
    host = hal.Array.host(stored, dtype) if dtype == "bfloat16" else stored
    return hal.to_device(host, "cpu:0") if kind == "torch" else host


def twin(x: Any) -> Any:
    """The torch tensor with the contents of a host array."""
    return hal.to_device(x, "cpu:0") if isinstance(x, np.ndarray | hal.Array) else x


def value(x: Any) -> Any:
    return reference.as_float64(hal.to_host(x))


def index(*values: int) -> Any:
    return np.array(values, "int32")


def tokens(
    t: int, kind: str, dtype: str = "float32"
) -> dict[str, tuple[Callable[..., Any], list[Any], dict[str, Any]]]:
    """A call of each operator on ``t`` tokens."""

    def x(*shape: int) -> Any:
        return make(kind, dtype, *shape)

    def same(array: Any) -> Any:
        return twin(array) if kind == "torch" else array

    paged = {
        "q_indptr": same(index(0, t)),
        "kv_lens": same(index(12)),
        "block_table": same(np.array([[2, 0, 3]], "int32")),
    }
    f32 = rng.standard_normal((2, t, 4)).astype("float32")
    angles = rng.standard_normal((2, 64, 4)).astype("float32")
    return {
        "attention": (hal_ops.attention, [x(t, 4, 8), x(4, 4, 2, 8), x(4, 4, 2, 8)], paged),
        "merge": (hal_ops.merge_attention_states, [x(t, 4, 8), same(f32[0]), x(t, 4, 8), same(f32[1])], {}),
        "gemm": (hal_ops.gemm, [x(t, 8), x(6, 8)], {"trans_b": True, "bias": x(6)}),
        "kv_write": (
            hal_ops.kv_write, [x(t, 2, 8), x(t, 2, 8), x(16, 4, 2, 8), x(16, 4, 2, 8), same(np.arange(t))], {}),
        "rms_norm": (hal_ops.rms_norm, [x(t, 8), x(8), 1e-5], {}),
        "rope": (hal_ops.rope, [x(t, 4, 8), x(t, 2, 8), same(np.arange(t)), same(angles[0]), same(angles[1])], {}),
        "silu_mul": (hal_ops.silu_mul, [x(t, 8)], {}),
    }  # fmt: skip


MODULES = {
    "attention": "attention", "merge": "merge", "gemm": "gemm", "kv_write": "kv", "rms_norm": "norm", "rope": "rope",
    "silu_mul": "activation",
}  # fmt: skip
OPERATORS = list(MODULES)


def table(op: str) -> dispatch.Table:
    module = sys.modules[f"hal_ops.{MODULES[op]}"]  # the functions of the same names hide some of them
    return module._write_table if op == "kv_write" else module._table  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["host", "torch"])
@pytest.mark.parametrize("op", OPERATORS)
def test_token_counts_do_not_grow_the_route_table(op: str, kind: str) -> None:
    def run(t: int) -> None:
        function, arguments, options = tokens(t, kind)[op]
        function(*arguments, **options)

    run(12)
    run(12)  # the first call of a process may find the plugins, which changes the world
    before = len(table(op)._routes)
    for t in (9, 10, 11, 12):  # one bucket of lengths
        run(t)
    assert len(table(op)._routes) == before
    for t in range(1, 13):
        run(t)
    assert len(table(op)._routes) <= before + 4, "one per power of two at most"


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("op", OPERATORS)
def test_hit_and_miss_and_every_kind_of_array_agree(op: str, dtype: str) -> None:
    function, arguments, options = tokens(5, "host", dtype)[op]
    results: list[list[Any]] = []
    for convert in (lambda x: x, twin):
        for _ in range(2):  # a miss, then a hit
            copies = [convert(copied(x)) for x in arguments]
            given = {name: convert(copied(x)) for name, x in options.items()}
            result = function(*copies, **given)
            found = result if isinstance(result, tuple) else (result,)
            results.append([value(x) for x in (*found, *copies) if hasattr(x, "shape")])
            kinds = {type(x) for x in found if x is not None}
            assert kinds <= ({torch.Tensor} if convert is twin else {np.ndarray, hal.Array})
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert np.array_equal(x, y)


def copied(x: Any) -> Any:
    if isinstance(x, hal.Array):
        return hal.Array.host(x.native.copy(), x.dtype)
    return x.copy() if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", ["host", "torch"])
def test_results_are_those_of_the_reference(kind: str, dtype: str) -> None:
    for op, (function, arguments, options) in tokens(5, kind, dtype).items():
        oracle = getattr(reference, {"merge": "merge_attention_states"}.get(op, op))
        hosts = [hal.to_host(x) if hasattr(x, "shape") else x for x in arguments]
        given = {name: hal.to_host(x) if hasattr(x, "shape") else x for name, x in options.items()}
        wanted = oracle(*map(copied, hosts), **given)
        result = function(*arguments, **options)
        if op == "attention":
            wanted = wanted[0]  # and the LSE
        results = {"kv_write": arguments[2:4], "rope": arguments[:2]}.get(op, result)  # those work in place
        if op == "kv_write":
            wanted = [reference.decode(stored, DType(dtype)) for stored in wanted]
        pairs = [*zip(results, wanted, strict=True)] if isinstance(results, tuple | list) else [(results, wanted)]
        for got, want in pairs:
            assert np.allclose(value(got), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]), op


@pytest.mark.parametrize("kind", ["host", "torch"])
def test_out_and_lse(kind: str) -> None:
    function, (q, k, v), options = tokens(5, kind)["attention"]
    plain = function(q, k, v, **options)
    out, lse = function(q, k, v, return_lse=True, **options)
    assert np.array_equal(value(out), value(plain)) and lse.shape == (5, 4) and DType.parse(lse.dtype) == "float32"
    _, sums = reference.attention(*map(hal.to_host, (q, k, v)), **{n: hal.to_host(x) for n, x in options.items()})
    assert np.allclose(value(lse), sums, atol=1e-5)
    target = make(kind, "float32", 5, 4, 8)
    assert function(q, k, v, out=target, **options) is target and np.array_equal(value(target), value(plain))
    wide = function(q, k, v, out_dtype="bfloat16", **options)
    assert DType.parse(wide.dtype) == "bfloat16" and np.allclose(value(wide), value(plain), atol=3e-2)
    steps = plan_attention(**options)
    for layer in range(3):
        assert np.array_equal(value(function(q, k, v, plan=steps)), value(plain)), layer
    for op in ("gemm", "rms_norm", "silu_mul"):
        function, arguments, options = tokens(5, kind)[op]
        plain = function(*arguments, **options)
        target = make(kind, "float32", *plain.shape)
        assert function(*arguments, out=target, **options) is target
        assert np.array_equal(value(target), value(plain))


def test_kinds_may_be_mixed_in_one_call() -> None:
    x = make("torch", "float32", 3, 8)
    plain, out = hal_ops.silu_mul(x), np.zeros((3, 4), "float32")
    for _ in range(2):
        assert hal_ops.silu_mul(x, out=out) is out and np.array_equal(out, plain.numpy())
    a, bias = make("host", "float32", 3, 8), make("torch", "float32", 6)
    b = make("torch", "float32", 8, 6)
    wanted = hal_ops.gemm(twin(a), b, bias=bias)
    for _ in range(2):
        assert isinstance(hal_ops.gemm(a, b, bias=bias), np.ndarray)
        assert np.array_equal(hal_ops.gemm(a, b, bias=bias), wanted.numpy())
    function, (q, k, v), options = tokens(5, "torch")["attention"]
    assert np.array_equal(value(function(q, k, v, **{n: hal.to_host(x) for n, x in options.items()})),
                          value(function(q, k, v, **options)))  # fmt: skip


def test_vectors_are_told_apart_by_their_size() -> None:
    for n in (4, 8, 6):
        for make_one in (lambda n: np.ones(n, "float32"), torch.ones):
            assert hal_ops.silu_mul(make_one(n)).shape == (n // 2,)
            assert hal_ops.rms_norm(make_one(n), make_one(n), 0.0).shape == (n,)


def test_a_single_row_may_have_any_stride_but_several_may_not() -> None:
    """One token of a fused projection is dense; several are not, and a kernel may refuse those."""
    seen: list[frozenset[str]] = []

    def build(request: Any) -> Any:
        seen.append(request.fields.get("features", frozenset()))
        return lambda *args, **kwargs: None

    with installed(Fake(kernels=[kernel("fake.write", "kv_write", build=build)])) as fake:
        fused = np.zeros((3, 6, 8), "float32")
        cache = np.zeros((4, 2, 2, 8), "float32")
        for t in (1, 3):
            k, v = fused[:t, 2:4], fused[:t, 4:]
            hal_ops.kv_write(k, v, cache, cache.copy(), np.arange(t), device=fake.id)
    assert [("strided" in features) for features in seen] == [False, True]


@pytest.mark.parametrize("device", ["cpu:0", "CPU:0", "object", "use"])
def test_ways_to_name_a_device(device: str) -> None:
    x = make("torch", "float32", 3, 8)
    wanted = hal_ops.silu_mul(x)
    for _ in range(2):
        if device == "use":
            with hal.use("cpu:0"):
                got = hal_ops.silu_mul(x)
        else:
            got = hal_ops.silu_mul(x, device=hal.device("cpu:0") if device == "object" else device)
        assert torch.equal(got, wanted)


def test_onnxruntime_takes_host_arrays_when_asked() -> None:
    function, arguments, options = tokens(5, "host")["gemm"]
    assert np.allclose(
        function(*arguments, device="onnxruntime:cpu", **options), function(*arguments, **options), atol=1e-5
    )
    tensors = [twin(x) for x in arguments]
    got = function(
        *tensors, device="onnxruntime:cpu", **{n: twin(x) if hasattr(x, "shape") else x for n, x in options.items()}
    )
    assert isinstance(got, torch.Tensor) and np.allclose(got.numpy(), function(*arguments, **options), atol=1e-5)


def test_the_fallback_gets_its_own_kind_of_arrays() -> None:
    """onnxruntime:cpu works on numpy arrays, cpu:0 on tensors; the caller notices nothing."""
    with pytest.raises(hal.UnsupportedError):
        hal_ops.silu_mul(make("host", "float32", 3, 8), device="onnxruntime:cpu")
    for op, (function, arguments, options) in tokens(5, "host").items():
        plain = [copied(x) for x in arguments]
        wanted = function(*plain, **options)
        with hal.policy(allow_cpu_fallback=True):
            got = function(*arguments, device="onnxruntime:cpu", **options)
        pairs = [*zip(arguments, plain, strict=True)]
        pairs += zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
        for x, y in pairs:
            assert x is y or x == y if not hasattr(x, "shape") else np.allclose(value(x), value(y), atol=1e-5), op
    caches = [np.arange(4.0, dtype="float32").reshape(4, 1)]
    with hal.policy(allow_cpu_fallback=True, deny=["ort.*"]):
        hal_ops.kv_copy(caches, [[0, 1]], device="onnxruntime:cpu")
    assert caches[0].ravel().tolist() == [0, 0, 2, 3]


def test_a_route_made_in_a_world_that_changed_is_not_kept() -> None:
    with installed(Fake(kernels=[kernel("fake.silu", run=silu_mul, build=lambda request: silu_mul)])) as fake:
        x = np.ones((2, 8), "float32")
        memory = fake.memory.wrap

        def wrap(array: Any) -> Any:
            generation.bump()
            return memory(array)

        fake.memory.wrap = wrap
        hal_ops.silu_mul(x, device=fake.id)
        assert not activation._table._routes
        fake.memory.wrap = memory
        hal_ops.silu_mul(x, device=fake.id)
        assert len(activation._table._routes) == 1


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LIMIT", 4)
    for n in range(2, 30, 2):
        hal_ops.silu_mul(np.ones((1, n), "float32"))
        assert len(activation._table._routes) <= 4


def test_a_plan_caches_and_may_cache_within() -> None:
    plan = plan_attention(q_indptr=[0, 1], kv_indptr=[0, 4])
    made: list[str] = []

    def outer() -> int:
        made.append("outer")
        return plan.cached("inner", lambda: 20) + 1

    assert plan.cached("outer", outer) == plan.cached("outer", outer) == 21 and made == ["outer"]


def test_lists_serve_as_indices() -> None:
    function, (q, k, v), options = tokens(5, "torch")["attention"]
    lists = {name: x.tolist() for name, x in options.items()}
    assert torch.equal(function(q, k, v, **lists), function(q, k, v, **options))
    cache = make("torch", "float32", 4, 2, 1, 3)
    k_dense, v_dense, indptr = hal_ops.kv_gather(cache, cache, [[3, 0]], [3])
    assert torch.equal(k_dense[:, 0], cache.view(-1, 3)[[6, 7, 0]]) and indptr.tolist() == [0, 3]
    assert torch.equal(k_dense, v_dense)


def test_gathered_arrays_are_of_the_caller_kind() -> None:
    for kind, dtype, wanted in (
        ("host", "float32", np.ndarray),
        ("host", "bfloat16", hal.Array),
        ("torch", "bfloat16", torch.Tensor),
    ):
        cache = make(kind, dtype, 4, 2, 1, 3)
        k, _, indptr = hal_ops.kv_gather(cache, cache, index(3, 0)[None], index(3))
        assert type(k) is wanted and np.array_equal(value(k).ravel(), value(cache).reshape(8, 3)[[6, 7, 0]].ravel())
        assert isinstance(indptr, torch.Tensor if kind == "torch" else np.ndarray)


def test_a_parameter_after_a_plain_tensor_of_the_same_shape() -> None:
    a, weight = torch.randn(2, 8), torch.randn(4, 8)
    plain = hal_ops.gemm(a, weight, trans_b=True)
    trained = hal_ops.gemm(a, torch.nn.Parameter(weight), trans_b=True)
    assert not trained.requires_grad
    assert torch.equal(plain, trained)


@pytest.mark.parametrize("device", ["cpu:0", "onnxruntime:cpu"])
@pytest.mark.parametrize("options", [{}, {"causal": False, "window": (0, -1)}])
def test_a_cache_without_pages_serves_requests_without_keys(device: str, options: dict[str, Any]) -> None:
    cache = np.zeros((0, 2, 2, 8), np.float32)  # numpy gives it strides of 0
    indices = {"q_indptr": np.int32([0, 2]), "kv_lens": np.int32([0]), "block_table": np.zeros((1, 1), np.int32)}
    q = np.ones((2, 4, 8), np.float32)
    out = hal_ops.attention(q, cache, cache, layout="HND", device=device, **indices, **options)
    assert not out.any()


def test_queries_of_any_strides_decode() -> None:
    q, k = torch.randn(4, 2, 8).transpose(0, 1), torch.randn(2, 4, 8)
    indptr = torch.arange(3, dtype=torch.int32)
    out = hal_ops.attention(q, k, k, q_indptr=indptr, kv_indptr=indptr)
    torch.testing.assert_close(out, k)  # one key each: its value comes back


@pytest.mark.parametrize(
    "indices",
    [
        {"kv_lens": [9], "block_table": [[0]]},
        {"kv_lens": [3], "block_table": [[-1]]},
        {"kv_lens": [3], "block_table": [[4]]},
    ],
)
def test_lengths_and_tables_are_checked_whatever_check_says(indices: dict[str, Any]) -> None:
    cache = torch.zeros(4, 4, 2, 8)
    with pytest.raises(hal.ContractError):
        hal_ops.attention(torch.zeros(1, 4, 8), cache, cache, q_indptr=[0, 1], check="none", **indices)


def test_empty_numpy_arrays_are_legal() -> None:
    nothing = np.zeros((0, 8), np.float32)
    assert hal_ops.rms_norm(nothing, np.ones(8, np.float32), 1e-6).shape == (0, 8)
    assert hal_ops.silu_mul(nothing).shape == (0, 4)
    k = np.zeros((7, 2, 8), np.float32)
    q = np.zeros((0, 4, 8), np.float32)
    assert hal_ops.attention(q, k, k, q_indptr=[0, 0], kv_indptr=[0, 7]).shape == (0, 4, 8)
