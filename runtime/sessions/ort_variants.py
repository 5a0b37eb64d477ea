"""A graph of symbolic sizes as variants of fixed ones: each has its own binding, and on a GPU its own CUDA graph.

A CUDA graph replays with the addresses that it was captured with. So weights and state lie where they are for good,
and a variant's small inputs share one block, written in one copy, as its small outputs share one, read in one.

ONNX Runtime runs a variant's first call twice, once to learn what it needs, once captured. Nothing here minds: a graph
given the same inputs again writes the same rows of its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.manifest import ITEM_BYTES
from runtime.sessions.memory import ALIGNMENT, Memory

ONNX_TYPES = {"float32": 1, "int64": 7, "float16": 10, "bfloat16": 16}
"""ONNX's numbers of element types."""


class Placed:
    """A tensor at an address: `dtype` is a key of `ONNX_TYPES`."""

    __slots__ = ("address", "dtype", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], dtype: str) -> None:
        self.address = address
        self.shape = shape
        self.dtype = dtype


class Variants:
    """One loaded graph.

    Args:
        session: of symbolic sizes.
        memory: where its inputs and outputs lie.
        fixed: weights and states by name; a state's output ``<name>.new`` is bound to the same address.
        captured: whether calls are captured as CUDA graphs.
    """

    def __init__(
        self, session: ort.InferenceSession, memory: Memory, fixed: Mapping[str, Placed], captured: bool
    ) -> None:
        self._session = session
        self._memory = memory
        names = [value.name for value in session.get_inputs()]
        self._fixed = {name: fixed[name] for name in names if name in fixed}
        self._updated = {
            value.name: fixed[old] for value in session.get_outputs() if (old := _old(value.name)) in fixed
        }
        self._captured = captured
        self._variants: dict[tuple[object, ...], _Variant] = {}

    def run(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, tuple[tuple[int, ...], str]],
        placed: Mapping[str, Placed],
    ) -> dict[str, NDArray[Any]]:
        """Call the variant of these sizes.

        Args:
            inputs: arrays, written to the variant's own block.
            outputs: shape and dtype of those to read from its own block.
            placed: inputs and outputs that lie elsewhere, at addresses that are the same in each call.

        Returns:
            The `outputs`, valid until the next call of this variant.
        """
        key = (*(array.shape for array in inputs.values()), *outputs.values(), *(p.shape for p in placed.values()))
        variant = self._variants.get(key)
        if variant is None:
            variant = self._variants[key] = self._make(inputs, outputs, placed)
        return variant.run(inputs)

    def _make(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, tuple[tuple[int, ...], str]],
        placed: Mapping[str, Placed],
    ) -> _Variant:
        own_in = _Block(self._memory, {name: (array.shape, str(array.dtype)) for name, array in inputs.items()})
        own_out = _Block(self._memory, outputs)
        binding = self._session.io_binding()
        wanted = {value.name for value in self._session.get_inputs()}
        results = [value.name for value in self._session.get_outputs()]
        for name, tensor in {**self._fixed, **own_in.parts, **placed}.items():
            if name in wanted:
                binding.bind_input(name, *self._at(tensor))
        for name in results:
            binding.bind_output(name, *self._at({**self._updated, **own_out.parts, **placed}[name]))
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(len(self._variants) + 1 if self._captured else -1))
        return _Variant(self._session, binding, options, own_in, own_out)

    def _at(self, tensor: Placed) -> tuple[str, int, int, tuple[int, ...], int]:
        return self._memory.device, 0, ONNX_TYPES[tensor.dtype], tensor.shape, tensor.address


class _Block:
    """Tensors side by side in one block of memory, with a copy of it in the process."""

    def __init__(self, memory: Memory, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        self._memory = memory
        offsets, size = {}, 0
        for name, (shape, dtype) in tensors.items():
            offsets[name] = size
            size += -(-int(np.prod(shape)) * ITEM_BYTES[dtype] // ALIGNMENT) * ALIGNMENT
        self._host = np.zeros(size, np.uint8)
        self._address = memory.allocate(size) if size else 0
        self.parts: dict[str, Placed] = {}
        self.arrays: dict[str, NDArray[Any]] = {}
        for name, (shape, dtype) in tensors.items():
            begin, length = offsets[name], int(np.prod(shape)) * ITEM_BYTES[dtype]
            self.parts[name] = Placed(self._address + begin, shape, dtype)
            self.arrays[name] = self._host[begin : begin + length].view(dtype).reshape(shape)

    def write(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        for name, array in arrays.items():
            self.arrays[name][...] = array
        if self._address:
            self._memory.write(self._address, self._host)

    def read(self) -> dict[str, NDArray[Any]]:
        if self._address:
            self._memory.read(self._address, self._host)
        return self.arrays


class _Variant:
    def __init__(
        self,
        session: ort.InferenceSession,
        binding: ort.IOBinding,
        options: ort.RunOptions,
        inputs: _Block,
        out: _Block,
    ) -> None:
        self._session = session
        self._binding = binding
        self._options = options
        self._inputs = inputs
        self._out = out

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        self._inputs.write(inputs)
        self._session.run_with_iobinding(self._binding, self._options)
        return self._out.read()


def _old(name: str) -> str:
    """The state that an output updates."""
    return name.removesuffix(".new") if name.endswith(".new") else ""
