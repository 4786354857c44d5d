"""Matrix products: MatMul on arrays, constant weights that ONNX Runtime packs, and GGUF blocks through MatMulNBits.

``D = act(alpha * (A @ B) + beta * C + bias)``. All products and sums are float32; float16 operands
are widened before and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from hal.constraint import Constraint, Flags, MultipleOf, OneOf, Range
from hal.types import Claim, Kernel
from hal_onnxruntime import device, gguf, session
from hal_onnxruntime.device import FLOATS
from hal_onnxruntime.session import FLOAT, node
from hal_ops.scheme import PackedWeight, Scheme

ANY = Range(1, None)
EPILOGUE = frozenset({"bias", "relu", "gelu", "gelu_tanh", "silu", "alpha", "beta"})
DENSE, CONST, NBITS = "ort.gemm", "ort.matmul_const", "ort.matmul_nbits"


def kernels() -> list[Kernel]:
    """gemm on arrays, and prepack with its gemm for dense and for GGUF weights."""
    arrays: dict[str, Constraint] = {"b_dtype": FLOATS, "scheme": OneOf({"dense"}), "k": Range(0, None)}
    return [
        _gemm(DENSE, arrays, {"trans_b", "batched_b"}, dense),
        *_packing(CONST, {"dense"}, ANY, prepack_dense, w_dtype=FLOATS),
        *_packing(NBITS, set(gguf.BLOCK_BYTES), MultipleOf(gguf.GROUP), prepack_gguf),
    ]


def _packing(
    name: str, schemes: set[str], k: Constraint, pack: Callable[..., PackedWeight], **more: Constraint
) -> list[Kernel]:
    """The kernel that packs a weight, and the one that multiplies with it."""
    needs: dict[str, Constraint] = {"scheme": OneOf(schemes), "k": k}
    pack_needs = {**needs, "n": ANY, "features": Flags({"trans_b"}), **more}
    return [
        Kernel(Claim(op="prepack", kernel=name, needs=pack_needs), lambda spec: pack),
        _gemm(name, {**needs, "packed": OneOf({name})}, set(), packed),
    ]


def _gemm(name: str, operand: Mapping[str, Constraint], features: set[str], run: Callable[..., None]) -> Kernel:
    needs: dict[str, Constraint] = {
        **operand,
        "a_dtype": FLOATS,
        "out_dtype": FLOATS,
        "m": ANY,
        "n": Range(0, None),
        "features": Flags(EPILOGUE | features | {"trans_a", "batched_a", "strided"}),
    }
    # Work is split by shape and thread count, not by timing: the same call gives the same bits.
    return Kernel(Claim(op="gemm", kernel=name, needs=needs, determinism="run"), lambda spec: run)


def dense(
    a: np.ndarray,
    b: np.ndarray,
    *,
    out: np.ndarray,
    trans_a: bool = False,
    trans_b: bool = False,
    beta: float = 0.0,
    c: np.ndarray | None = None,
    **options: Any,
) -> None:
    """``a [..., M, K] @ b [..., K, N]`` into ``out``; leading dimensions broadcast as in ``numpy.matmul``."""
    if out.size == 0:
        return
    c = c if beta else None  # beta = 0 never reads C
    flat = b.ndim == 2 and (a.ndim == 2 or not trans_a)
    if flat:  # one 2-D product, which takes transposed operands as they lie
        rows = out.size // out.shape[-1]
        a = a if a.ndim == 2 else a.reshape(rows, a.shape[-1])
        c = None if c is None else np.broadcast_to(c, out.shape).reshape(rows, -1)
        product = (("transA", trans_a), ("transB", trans_b))
    else:
        a, b = (x.swapaxes(-1, -2) if flip else x for x, flip in ((a, trans_a), (b, trans_b)))
        product = None
    inputs = {"a": a, "b": b}
    _finish(DENSE, product, inputs, out=out, beta=beta, c=c, **options)


def packed(
    a: np.ndarray,
    b: PackedWeight,
    *,
    out: np.ndarray,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    activation: str = "none",
    **quantised: Any,
) -> None:
    """``a [..., M, K] @ w.T`` with the weight inside a session; everything else in a second, shared session."""
    if out.size == 0:
        return
    a = a.swapaxes(-1, -2) if trans_a else a
    (weights,) = b.parts
    product = session.run(b.kernel, weights, {"a": _wide(a.reshape(-1, a.shape[-1]))}).reshape(*a.shape[:-1], -1)
    if alpha == 1.0 and not beta and bias is None and activation == "none":
        _store(out, product)
        return
    c = c if beta else None
    _finish(b.kernel, (), {"y": product}, out=out, alpha=alpha, beta=beta, c=c, bias=bias, activation=activation)


def prepack_dense(weight: np.ndarray, *, scheme: Scheme, shape: tuple[int, int], trans_b: bool = True) -> PackedWeight:
    """A weight ``[N, K]`` (``[K, N]`` without trans_b) as float32 constant of a session, packed by ONNX Runtime.

    The session owns the only copy that stays.
    """
    matrix = {"w": _wide(weight.T if trans_b else weight)}
    proto = session.model([node("MatMul", ["a", "w"], "y")], {"a": FLOAT}, {"y": FLOAT}, matrix)
    built = session.create(CONST, proto, threads=device.threads(), weights=matrix)
    return PackedWeight(CONST, scheme, shape, (built,))


def prepack_gguf(weight: np.ndarray, *, scheme: Scheme, shape: tuple[int, int], trans_b: bool = True) -> PackedWeight:
    """GGUF blocks of the ``[N, K]`` matrix as 4-bit planes of a session, which owns the only copy that stays."""
    n, k = shape
    weights = gguf.planes(weight, scheme, shape)
    proto = _nbits_model(n, k, tuple(weights), tuple((x.shape, str(x.dtype)) for x in weights.values()))
    built = session.create(NBITS, proto, threads=device.threads(), weights=weights)
    return PackedWeight(NBITS, scheme, shape, (built,))


@lru_cache(maxsize=64)
def _nbits_model(n: int, k: int, names: tuple[str, ...], arrays: tuple[tuple[Any, str], ...]) -> bytes:
    """The sum of one MatMulNBits per plane and, for ``offsets``, of (sums of A per block) @ offsets."""
    declared = zip(names, arrays, strict=True)
    weights = {name: np.broadcast_to(np.zeros((), dtype), shape) for name, (shape, dtype) in declared}
    planes = sum(name.startswith("codes") for name in names)
    # accuracy_level 0: activations stay float32. Level 4 would quantise them to int8.
    sizes: dict[str, Any] = {"K": k, "N": n, "bits": 4, "block_size": gguf.GROUP, "accuracy_level": 0}
    nodes = [
        node("MatMulNBits", ["a", f"codes{i}", f"scales{i}"], f"y{i}", domain="com.microsoft", **sizes)
        for i in range(planes)
    ]
    terms = [f"y{i}" for i in range(planes)]
    if "offsets" in weights:
        nodes += [
            node("Constant", [], "blocks", value_ints=[0, k // gguf.GROUP, gguf.GROUP]),
            node("Constant", [], "axis", value_ints=[2]),
            node("Reshape", ["a", "blocks"], "a3"),
            node("ReduceSum", ["a3", "axis"], "sums", keepdims=0),
            node("MatMul", ["sums", "offsets"], "yo"),
        ]
        terms.append("yo")
    return session.model([*nodes, node("Sum", terms, "y")], {"a": FLOAT}, {"y": FLOAT}, weights)


def _finish(
    kernel: str,
    product: tuple[tuple[str, bool], ...] | None,
    inputs: Mapping[str, np.ndarray],
    *,
    out: np.ndarray,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    activation: str = "none",
    **quantised: Any,
) -> None:
    """Run product and epilogue as one graph, and store the result."""
    extras = {
        "alpha": None if alpha == 1.0 else np.float32(alpha),
        "beta": None if c is None else np.float32(beta),
        "c": c,
        "bias": bias,
    }
    feed = {**inputs, **{name: x for name, x in extras.items() if x is not None}}
    proto = _graph(product, tuple(feed), activation)
    result = session.run(kernel, session.cached(kernel, proto), {name: _wide(x) for name, x in feed.items()})
    _store(out, result.reshape(out.shape))


@lru_cache(maxsize=256)
def _graph(product: tuple[tuple[str, bool], ...] | None, inputs: tuple[str, ...], activation: str) -> bytes:
    """Graph of a product (None: batched; () with an input ``y``: made already) and its epilogue."""
    nodes = []
    if product is None:
        nodes.append(node("MatMul", ["a", "b"], "y"))
    elif product:
        transposed: dict[str, Any] = {name: int(flag) for name, flag in product}
        nodes.append(node("Gemm", ["a", "b"], "y", **transposed))
    last = "y"
    if "alpha" in inputs:
        nodes.append(node("Mul", [last, "alpha"], "scaled"))
        last = "scaled"
    if "c" in inputs:
        nodes += [node("Mul", ["c", "beta"], "bc"), node("Add", [last, "bc"], "added")]
        last = "added"
    if "bias" in inputs:
        nodes.append(node("Add", [last, "bias"], "biased"))
        last = "biased"
    nodes += _activation(activation, last)
    return session.model(nodes, dict.fromkeys(inputs, FLOAT), {"out": FLOAT})


def _activation(name: str, x: str) -> list[Any]:
    if name == "silu":  # ONNX Runtime's Sigmoid flushes its tail to 0, Exp does not
        steps = [node("Constant", [], "one", value_float=1.0), node("Neg", [x], "n"), node("Exp", ["n"], "e")]
        return [*steps, node("Add", ["e", "one"], "d"), node("Div", [x, "d"], "out")]
    if name in ("gelu", "gelu_tanh"):
        return [node("Gelu", [x], "out", approximate="tanh" if name == "gelu_tanh" else "none")]
    return [node("Relu" if name == "relu" else "Identity", [x], "out")]


def _wide(x: Any) -> np.ndarray:
    # ascontiguousarray would make a vector of a scalar
    return np.asarray(x, dtype=np.float32, order="C")


def _store(out: np.ndarray, result: np.ndarray) -> None:
    with np.errstate(over="ignore"):  # float16 overflows to infinity, as everywhere
        out[...] = result
