"""Building ONNX Runtime sessions from a few nodes, running them, and wording their failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state as state

from hal.errors import CompileError, HalError, OutOfMemory, UnsupportedError
from hal.types import Refusal, RefusalCode
from hal_onnxruntime import device

FLOAT, BOOL, INT32 = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL, onnx.TensorProto.INT32
Arrays = Mapping[str, np.ndarray]
# Attention came with opset 23, whose IR is 11; newer numbers would shut out older runtimes.
OPSET, IR = 23, 11
# What ONNX Runtime says, in several places, when an allocation fails.
_NO_MEMORY = ("bad_alloc", "failed to allocate", "out of memory", "available memory of")


def node(op: str, inputs: Sequence[str], output: str | Sequence[str], *, domain: str = "", **attributes: Any) -> Any:
    """One node of a graph."""
    outputs = [output] if isinstance(output, str) else list(output)
    return helper.make_node(op, inputs, outputs, domain=domain, **attributes)


def element_type(dtype: Any) -> int:
    """ONNX's number of a numpy dtype."""
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def model(
    nodes: Sequence[Any],
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    weights: Arrays | None = None,
) -> bytes:
    """Serialise a graph. ``inputs`` and ``outputs`` map names to element types; weights are declared, not included."""

    def declare(values: Mapping[str, int]) -> list[Any]:
        return [helper.make_tensor_value_info(name, kind, None) for name, kind in values.items()]

    graph = helper.make_graph(
        nodes,
        "hal",
        declare(inputs),
        declare(outputs),
        [_external(name, array) for name, array in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=IR)
    return bytes(proto.SerializeToString())


def _external(name: str, array: np.ndarray) -> Any:
    tensor = onnx.TensorProto(name=name, data_type=element_type(array.dtype), dims=array.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="memory")  # never opened: the session gets the values
    return tensor


def create(kernel: str, proto: bytes, *, threads: int, weights: Arrays | None = None) -> Any:
    """Make a session. Weights are copied, and laid out by ONNX Runtime as its kernels like them.

    Raises:
        CompileError: ONNX Runtime rejects the graph.
        UnsupportedError: it has no implementation for a node.
        OutOfMemory: no room for the weights.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # failures reach the caller as exceptions
    # Spinning threads of many sessions, and of other libraries, would fight for the cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with translated(kernel, building=True):
        if weights:
            values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
            options.add_external_initializers(list(weights), values)
        return ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


def run(kernel: str, session: Any, inputs: Arrays) -> np.ndarray:
    """Run a session with one output, which is returned. Inputs are contiguous. Thread safe."""
    with translated(kernel):
        result: np.ndarray = session.run(None, inputs)[0]
        return result


def run_in_place(kernel: str, session: Any, inputs: Arrays, outputs: Arrays) -> None:
    """Run a session that writes into ``outputs``, which may be memory of inputs. Thread safe: a binding per call."""
    with translated(kernel):
        binding = session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)  # views the array, and costs half of bind_input
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        session.run_with_iobinding(binding)


@contextmanager
def translated(kernel: str, *, building: bool = False) -> Iterator[None]:
    """Turn ONNX Runtime's exceptions into the runtime's classes, with the original text."""
    try:
        yield
    except (HalError, KeyboardInterrupt):
        raise
    except MemoryError as error:
        raise OutOfMemory(f"{kernel}: {error}") from error
    except Exception as error:
        text = f"{kernel}: {error}"
        if any(phrase in text.lower() for phrase in _NO_MEMORY):
            raise OutOfMemory(text) from error
        if isinstance(error, state.NotImplemented):
            refusal = Refusal(kernel, RefusalCode.feature, "node", "a node that ONNX Runtime implements", str(error))
            raise UnsupportedError(f"{kernel}: not in onnxruntime {ort.__version__}", [refusal]) from error
        raise (CompileError if building else HalError)(text) from error


@lru_cache(maxsize=256)
def cached(kernel: str, proto: bytes) -> Any:
    """The session of a graph without weights; one per graph and process."""
    return create(kernel, proto, threads=device.threads())
