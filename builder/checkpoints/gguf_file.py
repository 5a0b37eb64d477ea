"""The header of a GGUF file: metadata and tensor infos, over a memory map.

The `gguf` package has a reader too, but it keeps an array object for every token and merge (seconds and hundreds of MB
for a large vocabulary) and reports a truncated file as whatever numpy happens to raise. Format: GGUF specification,
versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from builder.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
AGAIN = "Download the file again"

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True)
class GGUFTensor:
    """`shape` is row-major (slowest first, as in PyTorch); the data are at ``[offset, offset + nbytes)``."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header over `data`, the whole file as mapped uint8."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: npt.NDArray[np.uint8]

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes as rows, ``[*shape[:-1], bytes of a row]``: the form that ``gguf.dequantize`` takes."""
        tensor = self.tensors[name]
        return self.data[tensor.offset : tensor.offset + tensor.nbytes].reshape(*tensor.shape[:-1], -1)


class _Cursor:
    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path = path
        self.view = memoryview(data)  # type: ignore[arg-type]  # numpy's arrays are buffers; its stubs don't say so
        self.at = 0

    def fail(self, problem: str, *, expected: object = None, found: object = None, remedy: str = AGAIN) -> NoReturn:
        raise CheckpointError(self.path, problem, expected=expected, found=found, remedy=remedy)

    def take(self, count: int) -> memoryview:
        if count > len(self.view) - self.at:
            self.fail("truncated", expected=f"at least {self.at + count} bytes", found=f"{len(self.view)} bytes")
        piece = self.view[self.at : self.at + count]
        self.at += count
        return piece

    def unsigned(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def string(self) -> str:
        piece = self.take(self.unsigned(8))
        try:
            return str(piece, "utf-8")
        except UnicodeDecodeError:
            self.fail("text that isn't UTF-8", expected="UTF-8", found=bytes(piece[:20]))

    def value(self) -> Any:
        return self._value(self._kind())

    def _kind(self) -> GGUFValueType:
        kind = self.unsigned(4)
        try:
            return GGUFValueType(kind)
        except ValueError:
            self.fail("unknown metadata type", expected="0 … 12", found=kind)

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.BOOL:
            return self.unsigned(1) != 0
        if kind == GGUFValueType.ARRAY:
            return self._array(self._kind(), self.unsigned(8))
        return self._scalars(kind, 1)[0]

    def _array(self, kind: GGUFValueType, count: int) -> list[Any]:
        if kind in _SCALARS:
            return self._scalars(kind, count)
        if kind == GGUFValueType.ARRAY:
            self.fail("nested arrays in the metadata", expected="flat arrays", found="an array of arrays")
        if count > len(self.view) - self.at:  # each item takes a byte at least
            self.fail("truncated", expected=f"{count} array items", found=f"{len(self.view) - self.at} bytes left")
        read: Callable[[], Any] = self.string if kind == GGUFValueType.STRING else lambda: self.unsigned(1) != 0
        return [read() for _ in range(count)]

    def _scalars(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype)
        if kind == GGUFValueType.FLOAT32:
            # The shortest decimal for the float32, 1e-05 rather than 9.999999747378752e-06: what config.json would say.
            return [float(str(value)) for value in values]
        return list(values.tolist())

    def tensor(self, data_start: int = 0) -> tuple[str, GGUFTensor]:
        name = self.string()
        rank = self.unsigned(4)
        if not 1 <= rank <= 4:
            self.fail(f"tensor {name}: bad number of dimensions", expected="1 … 4", found=rank)
        shape = tuple(reversed(struct.unpack(f"<{rank}Q", self.take(8 * rank))))
        number = self.unsigned(4)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            self.fail(
                f"tensor {name}: unknown quantisation type",
                expected="a type of the gguf package",
                found=number,
                remedy="Use a file of another quantisation, such as Q8_0 or F16",
            )
        block, size = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            self.fail(
                f"tensor {name}: rows don't fill whole blocks", expected=f"a multiple of {block}", found=shape[-1]
            )
        elements = 1
        for length in shape:
            elements *= length
        return name, GGUFTensor(shape, kind, self.unsigned(8), elements // block * size)


def open_gguf(path: Path) -> GGUFFile:
    """Map a GGUF file and parse its header.

    Raises:
        CheckpointError: not a GGUF file, another version or byte order, truncated, or a corrupt header.
    """
    try:
        data: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
        raise CheckpointError(
            path,
            "cannot be read",
            expected="a GGUF file",
            found=getattr(error, "strerror", None) or error,
            remedy=AGAIN,
        ) from None
    cursor = _Cursor(path, data)
    magic = bytes(cursor.take(4))
    if magic != MAGIC:
        cursor.fail(
            "not a GGUF file", expected=MAGIC, found=magic, remedy="Name a .gguf file or a Hugging Face directory"
        )
    version = cursor.unsigned(4)
    if version not in VERSIONS:
        cursor.fail(
            "unsupported GGUF version",
            expected="2 or 3, little-endian",
            found=version,
            remedy="Convert the model again with a current llama.cpp",
        )
    tensor_count, key_count = cursor.unsigned(8), cursor.unsigned(8)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        if key in metadata:
            cursor.fail("metadata key listed twice", expected="unique keys", found=key)
        metadata[key] = cursor.value()
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(tensor_count):
        name, tensor = cursor.tensor()
        if name in tensors:
            cursor.fail("tensor listed twice", expected="unique names", found=name)
        tensors[name] = tensor
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        cursor.fail("bad general.alignment", expected="a power of two", found=alignment)
    start = -(-cursor.at // alignment) * alignment
    return GGUFFile(path, metadata, _placed(cursor, tensors, start), data)


def _placed(cursor: _Cursor, tensors: dict[str, GGUFTensor], start: int) -> dict[str, GGUFTensor]:
    """The tensors with offsets from the start of the file, each of them checked to lie within it."""
    placed = {}
    for name, tensor in tensors.items():
        offset = start + tensor.offset
        if offset + tensor.nbytes > len(cursor.view):
            cursor.fail(
                f"truncated in tensor {name}",
                expected=f"at least {offset + tensor.nbytes} bytes",
                found=f"{len(cursor.view)} bytes",
            )
        placed[name] = GGUFTensor(tensor.shape, tensor.type, offset, tensor.nbytes)
    return placed
