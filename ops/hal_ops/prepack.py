"""Packing a weight once, so that the kernel that will use it reads it at its own best speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.errors import ContractError
from hal.types import DType, OpSpec
from hal_ops import dispatch, validate
from hal_ops.arrays import Meta
from hal_ops.gguf import LAYOUTS, WEIGHTS
from hal_ops.scheme import PackedWeight, Scheme
from hal_ops.spec import spec


def prepack(
    weight: Any,
    *,
    scheme: Scheme | str,
    shape: tuple[int, int] | None = None,
    trans_b: bool = True,
    device: Any = None,
) -> PackedWeight:
    """Pack a weight for ``gemm`` on a device.

    Args:
        weight: ``[N, K]`` with ``trans_b`` (the layout of linear layers), else ``[K, N]``; or the
            raw bytes of GGUF blocks, uint8 of any shape, row by row as they lie in a file; or a
            mapping of arrays for the schemes that have several.
        scheme: how the weight is stored: "dense", "gguf_q4_0", "gguf_q4_1", "gguf_q8_0", ...
        shape: ``(N, K)`` of the logical weight; required where the array does not tell.

    Returns:
        A ``PackedWeight`` that only kernels of the same name can read. It may refer to the memory
        of ``weight``, which must therefore stay unchanged.

    Raises:
        ContractError: unknown scheme, shape that does not fit the array, wrong dtype.
        UnsupportedError: no kernel of the device packs this scheme; the reasons are inside.

    >>> import numpy as np
    >>> packed = prepack(np.eye(3, dtype="float32"), scheme="dense")
    >>> packed.shape, packed.scheme.name
    ((3, 3), 'dense')
    """
    parsed = Scheme.parse(scheme)
    wanted = _contract(weight, parsed, shape, trans_b)
    route = dispatch.route(wanted, weight, device)
    logical = (wanted.fields["n"], wanted.fields["k"])
    packed = route.run(*route.native(weight), scheme=parsed, shape=logical, trans_b=trans_b)
    assert isinstance(packed, PackedWeight)
    return packed


def _contract(weight: Any, scheme: Scheme, shape: Any, trans_b: bool) -> OpSpec:
    """Check the arguments; return the specification."""
    validate.flag("trans_b", trans_b)
    if isinstance(weight, Mapping):
        raise ContractError(
            "weight", "one array: no scheme of contract 1.0 that is served yet takes a mapping", "a mapping"
        )
    blocks = LAYOUTS.get(scheme.name)
    if blocks is not None:
        described = validate.array("weight", weight, dtypes=(DType.uint8,))
        n, k = _block_shape(described, blocks.bytes, shape, trans_b)
    else:
        described = validate.array("weight", weight, rank=2, dtypes=validate.FLOATS, dense_last=False)
        n, k = described.shape if trans_b else described.shape[::-1]
        if shape is not None:
            validate.same("shape", "the logical shape", (n, k), tuple(shape) if isinstance(shape, list) else shape)
    return spec(
        "prepack",
        scheme=scheme.name,
        n=n,
        k=k,
        w_dtype=None if blocks else described.dtype,
        features={"trans_b"} if trans_b else (),
    )


def _checked(
    bound_for: OpSpec, level: str, weight: Any, *, scheme: Scheme, shape: Any = None, trans_b: bool = True
) -> OpSpec:
    return _contract(weight, Scheme.parse(scheme), shape, trans_b)


dispatch.checked("prepack", _checked)


def _block_shape(described: Meta, size: int, shape: Any, trans_b: bool) -> tuple[int, int]:
    if not trans_b:
        raise ContractError("trans_b", "True: blocks run along K, so the weight is [N, K]", "False")
    pair = isinstance(shape, list | tuple) and len(shape) == 2
    if not pair or not all(type(side) is int and side >= 0 for side in shape):
        raise ContractError("shape", "(N, K) of the weight that the blocks hold", repr(shape))
    n, k = shape
    if k % WEIGHTS:
        raise ContractError("shape", f"K as a multiple of {WEIGHTS}", str(k))
    stored = 1
    for side in described.shape:
        stored *= side
    required = n * (k // WEIGHTS) * size
    if stored != required:
        raise ContractError("weight", f"{required} bytes for {n} x {k} weights", f"{stored} bytes")
    return n, k
