"""A GGUF file, mapped into memory: metadata as Python values, tensors as views of the file.

The ``gguf`` library's reader builds several objects per metadata item, which takes seconds for a
vocabulary of 49 thousand entries. Only its constants and its dequantisation are used here.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from hal_serving.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PLAIN: dict[GGMLQuantizationType, Any] = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2"}
_MAX_DIMS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file.

    ``data`` is a view of the mapping: F32 and F16 in ``shape``, every other type as uint8 blocks
    [*shape[:-1], bytes of one row].
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray

    def rows(self) -> np.ndarray:
        """The tensor as a matrix of rows, quantised blocks staying quantised."""
        return self.data.reshape(-1, self.data.shape[-1])

    def dense(self) -> np.ndarray:
        """The values as float32 in ``shape`` (a copy, except for F32).

        Raises:
            ModelError: the ``gguf`` library cannot dequantise the type.
        """
        if self.type == GGMLQuantizationType.F32:
            return self.data
        try:
            return np.asarray(dequantize(self.data, self.type), dtype=np.float32).reshape(self.shape)
        except NotImplementedError:
            raise ModelError(f"tensor {self.name}: quantisation type {self.type.name} is not supported") from None


class GGUFFile:
    """A mapped GGUF file. ``metadata`` maps keys to Python values, ``tensors`` names to views.

    The mapping is private copy-on-write and lives as long as a view of it does.
    """

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, GGUFTensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Map ``path`` and read its header.

        Raises:
            ModelError: the file is missing, no GGUF, truncated, corrupt, or of an unknown version
                or quantisation type.
        """
        try:
            with path.open("rb") as file:
                # ACCESS_COPY: torch refuses to make tensors of read-only memory; nobody writes.
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            reason = error.strerror if isinstance(error, OSError) else "the file is empty"
            raise ModelError(f"cannot read {path}: {reason}") from None
        try:
            return cls(path, *_parse(buffer))
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        except (struct.error, ValueError, OverflowError, RecursionError) as error:
            raise ModelError(f"{path}: corrupt GGUF header: {error}") from None

    @property
    def architecture(self) -> str:
        """The model family, "llama" for example.

        Raises:
            ModelError: the file does not say.
        """
        return str(self.require("general.architecture"))

    def require(self, key: str) -> Any:
        """The metadata value of ``key``.

        Raises:
            ModelError: the key is absent.
        """
        try:
            return self.metadata[key]
        except KeyError:
            raise ModelError(f"{self.path}: the metadata lacks {key}") from None


class _Cursor:
    """Reads little-endian values from the buffer; every overrun is a ``ModelError``."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.at = 0

    def take(self, count: int) -> int:
        """Advance by ``count`` bytes; returns where they start."""
        start, self.at = self.at, self.at + count
        if self.at > self.size:
            raise ModelError(f"the file is truncated: the header goes on beyond its {self.size} bytes")
        return start

    def scalar(self, code: str) -> Any:
        """One value of a ``struct`` code."""
        return struct.unpack_from("<" + code, self.buffer, self.take(struct.calcsize("<" + code)))[0]

    def raw(self) -> bytes:
        """One length-prefixed string as bytes."""
        length = self.scalar("Q")
        start = self.take(length)
        return self.buffer[start : start + length]

    def text(self) -> str:
        """One length-prefixed string."""
        return self.raw().decode()

    def array(self) -> list[Any]:
        """One array: element type, count, elements."""
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            code = f"<{count}{_SCALARS[kind]}"
            return list(struct.unpack_from(code, self.buffer, self.take(struct.calcsize(code))))
        if count > self.size - self.at:  # every other element takes at least one byte
            raise ModelError(f"the file is truncated: it announces an array of {count} elements")
        return list(_repeat(self._reader(kind), count))

    def value(self) -> Any:
        """One metadata value with its type in front."""
        return self._reader(self.scalar("I"))()

    def _reader(self, kind: int) -> Callable[[], Any]:
        if kind == _STRING:
            return self.string
        if kind == _ARRAY:
            return self.array
        if kind in _SCALARS:
            return lambda: self.scalar(_SCALARS[kind])
        raise ModelError(f"corrupt GGUF header: unknown metadata type {kind} at byte {self.at}")

    def string(self) -> str:
        """One string value. Vocabularies may hold pieces of characters, which must not fail."""
        return self.raw().decode(errors="surrogateescape")


def _repeat(read: Callable[[], Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        yield read()


def _parse(buffer: mmap.mmap) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    cursor = _Cursor(buffer)
    if buffer[: len(_MAGIC)] != _MAGIC:
        raise ModelError("not a GGUF file")
    cursor.take(len(_MAGIC))
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ModelError(f"GGUF version {version} is not supported (supported: 2 and 3, little-endian)")
    tensor_count, item_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(item_count):
        key = cursor.text()
        metadata[key] = cursor.value()
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ModelError(f"corrupt GGUF header: alignment {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    content = np.frombuffer(buffer, dtype=np.uint8)
    tensors = {name: _view(content, start, name, kind, shape, offset) for name, kind, shape, offset in entries}
    if len(tensors) != len(entries):
        raise ModelError("corrupt GGUF header: a tensor name occurs twice")
    return metadata, tensors


def _tensor_entry(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name, dims = cursor.text(), cursor.scalar("I")
    if not 0 < dims <= _MAX_DIMS:
        raise ModelError(f"corrupt GGUF header: tensor {name} has {dims} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(dims))[::-1]  # stored fastest dimension first
    return name, cursor.scalar("I"), shape, cursor.scalar("Q")


def _view(content: np.ndarray, start: int, name: str, kind: int, shape: tuple[int, ...], offset: int) -> GGUFTensor:
    try:
        type_ = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[type_]
    except (ValueError, KeyError):
        raise ModelError(f"tensor {name}: unknown quantisation type {kind}") from None
    if shape[-1] % block:
        raise ModelError(f"tensor {name}: rows of {shape[-1]} are no multiple of the {type_.name} block of {block}")
    stored = (*shape[:-1], shape[-1] // block * block_bytes)
    size = 1
    for extent in stored:
        size *= extent
    begin, end = start + offset, start + offset + size
    if end > len(content):
        raise ModelError(f"the file is truncated: tensor {name} ends at byte {end}, the file at {len(content)}")
    data = content[begin:end]
    plain = _PLAIN.get(type_)
    return GGUFTensor(name, type_, shape, data.view(plain).reshape(shape) if plain else data.reshape(stored))
