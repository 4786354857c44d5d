"""Arrays of any kind: what they look like, how to make more of the same kind, how to read indices on the host."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import hal
from hal.errors import ContractError
from hal.types import DType

if TYPE_CHECKING:
    import numpy as np


class Meta(NamedTuple):
    """Shape, dtype, strides in elements, and where the array lies ("host" or the framework's device)."""

    shape: tuple[int, ...]
    dtype: DType
    strides: tuple[int, ...]
    device: Any


def is_torch(x: Any) -> bool:
    """Whether ``x`` is a torch tensor; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_numpy(x: Any) -> bool:
    """Whether ``x`` is a numpy array; numpy is not imported to find out."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray)


def meta(name: str, x: Any) -> Meta:
    """Describe an array.

    Raises:
        ContractError: ``x`` is no array, or of a dtype outside the vocabulary.
    """
    if is_torch(x):
        where = "host" if x.device.type == "cpu" else x.device
        return Meta(tuple(x.shape), DType.parse(x.dtype), x.stride(), where)
    if is_numpy(x):
        return Meta(x.shape, _numpy_dtype(name, x), tuple(s // x.itemsize for s in x.strides), "host")
    if isinstance(x, hal.Array):
        return Meta(x.shape, x.dtype, x.strides, "host" if x.device == "cpu:0" else x.device)
    raise ContractError(name, "a torch tensor, a numpy array or a hal.Array", type(x).__name__)


def _numpy_dtype(name: str, x: Any) -> DType:
    try:
        return DType.parse(x.dtype)
    except ContractError as error:
        raise ContractError(name, error.required, error.actual) from None


def signature(x: Any) -> Any:
    """Return what validation reads of an array, cheaply and hashable; None for None."""
    if x is None:
        return None
    try:  # torch first: engines call with tensors, and every nanosecond here is paid per call
        return x.dtype, x.shape, x.stride(), x.device
    except (AttributeError, TypeError):
        return _plain_signature(x, 0)


def rows(x: Any) -> Any:
    """Return the signature of an array without the size of its first dimension, which changes at every step."""
    return split(x)[1]


def split(x: Any) -> tuple[int, Any]:
    """Return the size of the first dimension and the signature of the rest."""
    try:  # a plain tuple slices four times faster than a torch.Size
        count, *rest = tuple(x.shape)
        return count, (x.dtype, tuple(rest), x.stride(), x.device)
    except (AttributeError, TypeError, ValueError):
        return (x.shape[0] if getattr(x, "shape", ()) else 0), _plain_signature(x, 1)


def _plain_signature(x: Any, first: int) -> Any:
    if is_numpy(x) or isinstance(x, hal.Array):
        return x.dtype, x.shape[first:], x.strides, getattr(x, "device", None)
    return type(x)  # no array: validation will say so


def empty(like: Any, shape: Sequence[int], dtype: DType) -> Any:
    """Allocate an array of the caller's own kind, beside ``like``."""
    if is_torch(like):
        return like.new_empty(shape, dtype=torch_dtype(dtype))
    if is_numpy(like) or (isinstance(like, hal.Array) and like.device == "cpu:0"):
        return host_empty(shape, dtype)
    return hal.empty(shape, dtype, like.device)


def host_empty(shape: Sequence[int], dtype: DType) -> Any:
    """Allocate on the host: numpy, or a ``hal.Array`` where numpy lacks the dtype."""
    import numpy as np

    bits = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e4m3fnuz": "uint8", "float8_e5m2": "uint8"}
    if dtype.value in bits:
        return hal.Array.host(np.empty(tuple(shape), bits[dtype.value]), dtype)
    return np.empty(tuple(shape), dtype.value)


_torch_dtypes: dict[DType, Any] = {}


def torch_dtype(dtype: DType) -> Any:
    """Return torch's object for a dtype. Only reached when the caller holds a torch tensor."""
    found = _torch_dtypes.get(dtype)
    if found is None:
        found = _torch_dtypes[dtype] = getattr(sys.modules["torch"], dtype.value)
    return found


def like_caller(x: Any, caller: Any) -> Any:
    """Turn a kernel's own array into the kind that the caller of the function form uses."""
    if is_torch(caller) and not is_torch(x):
        return sys.modules["torch"].from_dlpack(x)
    return hal.to_host(x) if is_numpy(caller) else x


def index_host(name: str, x: Any, *, rank: int, dtype: str = "int32") -> np.ndarray[Any, Any]:
    """Return an index array on the host, without a copy where it lies there already.

    Lists of integers are accepted; arrays must have the dtype that the contract names.

    Raises:
        ContractError: other dtype or rank.
    """
    import numpy as np

    if isinstance(x, list | tuple):
        x = np.asarray(x, dtype=dtype)
    described = meta(name, x)
    if described.dtype != dtype:
        raise ContractError(name, dtype, described.dtype.value)
    if len(described.shape) != rank:
        raise ContractError(name, f"{rank} dimensions", f"shape {described.shape}")
    if is_numpy(x):
        return x  # type: ignore[no-any-return]
    if is_torch(x) and described.device == "host":
        return x.detach().numpy()  # type: ignore[no-any-return]
    return hal.to_host(x)  # type: ignore[no-any-return]


def span(x: Any) -> tuple[int, int]:
    """Return first and last byte address that a host or torch array can touch; (0, 0) when empty or unknown."""
    try:
        if x.is_contiguous():  # a dense tensor: the common case, on the path of every call
            start = x.data_ptr()
            return start, start + x.nbytes
    except AttributeError:
        pass
    described = meta("x", x)
    if 0 in described.shape:
        return 0, 0
    if is_torch(x):
        start = x.data_ptr()
    elif is_numpy(x):
        start = x.__array_interface__["data"][0]
    elif is_numpy(x.native):
        start = x.native.__array_interface__["data"][0]
    else:
        return 0, 0
    reach = [
        (size - 1) * stride * described.dtype.itemsize
        for size, stride in zip(described.shape, described.strides, strict=True)
    ]
    low = start + sum(step for step in reach if step < 0)
    return low, start + sum(step for step in reach if step > 0) + described.dtype.itemsize
