"""Arrays of any kind: what they look like, how to make more of the same kind, how to read indices on the host."""

from __future__ import annotations

import math
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
        if x.layout is not sys.modules["torch"].strided:
            raise ContractError(name, "a strided tensor", f"a tensor of layout {x.layout}")
        where = "host" if x.device.type == "cpu" else x.device
        return Meta(tuple(x.shape), _dtype(name, x), x.stride(), where)
    if is_numpy(x):
        dtype = _dtype(name, x)
        if not x.flags.aligned or any(s % x.itemsize for s in x.strides):
            raise ContractError(name, "aligned elements", f"strides of {x.strides} bytes for {dtype}")
        return Meta(x.shape, dtype, tuple(s // x.itemsize for s in x.strides), "host")
    if isinstance(x, hal.Array):
        return Meta(x.shape, x.dtype, x.strides, "host" if x.device == "cpu:0" else x.device)
    raise ContractError(name, "a torch tensor, a numpy array or a hal.Array", type(x).__name__)


def _dtype(name: str, x: Any) -> DType:
    try:
        return DType.parse(x.dtype)
    except ContractError as error:
        raise ContractError(name, error.required, error.actual) from None


def signature(x: Any) -> Any:
    """Return what validation reads of an array, cheaply and hashable; None for None."""
    if x is None:
        return None
    try:  # torch first: engines call with tensors, and every nanosecond here is paid per call
        return x.dtype, x.shape, x.stride(), x.device, x.requires_grad
    except (AttributeError, TypeError, RuntimeError):
        return _plain_signature(x, x.shape) if _is_plain(x) else type(x)  # no array: validation will say so


def rows(x: Any) -> Any:
    """Return the signature of an array without the size of its first dimension, which changes at every step.

    Whether there is more than one row stays, since a single one may have any stride; so does the size of a vector.
    """
    return split(x)[1]


def split(x: Any) -> tuple[int, Any]:
    """Return the size of the first dimension and the signature of the rest."""
    try:  # dense strides follow from the sizes, and asking whether they are dense is cheaper than reading them
        count, *rest = x.shape
        strides = x.is_contiguous() or x.stride()
        return count, (x.dtype, count > 1 if rest else count, *rest, strides, x.device, x.requires_grad)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        if not (_is_plain(x) and x.shape):
            return 0, signature(x)
        return x.shape[0], _plain_signature(x, (x.shape[1:] or x.shape, x.shape[0] > 1))


def growing(x: Any) -> Any:
    """Return the signature of an optional array whose last dimension changes at every step: slots, masks."""
    if x is None:
        return None
    try:
        return x.dtype, x.shape[:-1], x.stride()[-1], x.device
    except (AttributeError, TypeError, RuntimeError, IndexError):
        if not (_is_plain(x) and x.shape):
            return signature(x)
        return x.dtype, x.shape[:-1], x.strides[-1], getattr(x, "device", None)


def _is_plain(x: Any) -> bool:
    return is_numpy(x) or isinstance(x, hal.Array)


def _plain_signature(x: Any, shape: Any) -> Any:
    return x.dtype, shape, x.strides, getattr(x, "device", None), read_only(x)


def read_only(x: Any) -> bool:
    """Whether an array is known to refuse writes."""
    flags = getattr(x.native if isinstance(x, hal.Array) else x, "flags", None)
    return flags is not None and not getattr(flags, "writeable", True)


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
    on_host = is_numpy(caller) or (isinstance(caller, hal.Array) and caller.device == "cpu:0")
    return hal.to_host(x) if on_host else x


def indices(name: str, x: Any, dtype: str) -> Any:
    """Return an index array as it is, and a list of integers as a numpy array.

    Raises:
        ContractError: a list that holds anything but integers of the dtype's range, or rows of unequal length.
    """
    if not isinstance(x, list | tuple):
        return x
    import numpy as np

    try:
        found = np.asarray(x)
    except ValueError:
        raise ContractError(name, f"integers ({dtype})", repr(x)) from None
    limits = np.iinfo(dtype)
    if found.size and (found.dtype.kind not in "iu" or found.min() < limits.min or found.max() > limits.max):
        raise ContractError(name, f"integers ({dtype})", repr(x))
    return found.astype(dtype)


def index_host(name: str, x: Any, *, rank: int, dtype: str = "int32") -> np.ndarray[Any, Any]:
    """Return an index array on the host, without a copy where it lies there already.

    Lists of integers are accepted; arrays must have the dtype that the contract names.

    Raises:
        ContractError: other dtype or rank.
    """
    x = indices(name, x, dtype)
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


def row_bytes(*arrays: Any) -> tuple[int, ...] | None:
    """Return the bytes from row to row of dense tensors; None when one is None, no tensor, or not dense."""
    sizes = []
    for x in arrays:
        if not is_torch(x) or not x.is_contiguous():
            return None
        sizes.append(x.element_size() * math.prod(x.shape[1:]))
    return tuple(sizes)


def span(x: Any) -> tuple[int, int]:
    """Return first and last byte address that a host or torch array can touch; (0, 0) when empty or unknown."""
    try:
        start = x.data_ptr()  # zero when it is empty
        if x.is_contiguous():  # a dense tensor: the common case, on the path of every call
            return start, start + x.nbytes
        reached = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        return (start, start + (reached + 1) * x.element_size()) if x.numel() else (0, 0)
    except AttributeError:
        pass
    described = meta("x", x)
    if 0 in described.shape:
        return 0, 0
    if is_numpy(x):
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
