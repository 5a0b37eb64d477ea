"""Memory by address, on a GPU or in the process: what engines with fixed addresses are bound to."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.errors import BackendUnavailable

ALIGNMENT = 256
"""Bytes that blocks, and parts of a block, are aligned to: the widest access of any kernel."""


_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3
"""The CUDA runtime's kinds of copies."""


class Memory(Protocol):
    """Blocks that live as long as this object. Copies are done when a call returns."""

    device: str
    """As ONNX Runtime names it."""

    def allocate(self, size: int) -> int:
        """The address of `size` bytes of zeros."""
        ...

    def write(self, address: int, array: NDArray[Any]) -> None: ...

    def read(self, address: int, array: NDArray[Any]) -> None:
        """Fill the array."""
        ...

    def copy(self, dest: int, source: int, size: int) -> None: ...


class HostMemory:
    """In the process: for tests of what otherwise runs on a GPU."""

    device = "cpu"

    def __init__(self) -> None:
        self._blocks: list[NDArray[np.uint8]] = []

    def allocate(self, size: int) -> int:
        block = np.zeros(size + ALIGNMENT, np.uint8)
        self._blocks.append(block)
        return int(-(-block.ctypes.data // ALIGNMENT) * ALIGNMENT)

    def write(self, address: int, array: NDArray[Any]) -> None:
        ctypes.memmove(address, np.ascontiguousarray(array).ctypes.data, array.nbytes)

    def read(self, address: int, array: NDArray[Any]) -> None:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def copy(self, dest: int, source: int, size: int) -> None:
        ctypes.memmove(dest, source, size)


class CudaMemory:
    """On the first GPU. ONNX Runtime's CUDA provider brings the CUDA runtime that does the copies.

    Raises:
        BackendUnavailable: no CUDA runtime is loaded or it has no GPU.
    """

    device = "cuda"

    def __init__(self) -> None:
        self._runtime = _cuda_runtime()
        self._blocks: list[Any] = []

    def allocate(self, size: int) -> int:
        block = ort.OrtValue.ortvalue_from_shape_and_type([max(size, 1)], np.uint8, "cuda", 0)
        self._blocks.append(block)
        address = int(block.data_ptr())
        self._check(self._runtime.cudaMemset(ctypes.c_void_p(address), 0, ctypes.c_size_t(size)))
        self._wait()
        return address

    def write(self, address: int, array: NDArray[Any]) -> None:
        source = np.ascontiguousarray(array)
        self._transfer(address, source.ctypes.data, source.nbytes, _TO_DEVICE)
        # From memory that isn't pinned, a copy may return once the driver has the bytes, before the GPU does.
        self._wait()

    def read(self, address: int, array: NDArray[Any]) -> None:
        self._transfer(array.ctypes.data, address, array.nbytes, _TO_HOST)

    def copy(self, dest: int, source: int, size: int) -> None:
        self._transfer(dest, source, size, _ON_DEVICE)
        self._wait()

    def _transfer(self, dest: int, source: int, size: int, kind: int) -> None:
        arguments = ctypes.c_void_p(dest), ctypes.c_void_p(source), ctypes.c_size_t(size), ctypes.c_int(kind)
        self._check(self._runtime.cudaMemcpy(*arguments))

    def _wait(self) -> None:
        self._check(self._runtime.cudaStreamSynchronize(None))

    def _check(self, error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error}")


def _cuda_runtime() -> Any:
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise BackendUnavailable(
        "ort-cuda",
        "finds no CUDA runtime",
        expected="libcudart.so.13",
        remedy="pip install 'onnxruntime-gpu[cuda,cudnn]'",
    )
