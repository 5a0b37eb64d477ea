"""Graph passes: small classes that state what they require of a model and what they ensure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from builder.weights import WeightIndex
from runtime.manifest import WEIGHTS_NAME

MICROSOFT = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""


class GraphPass(ABC):
    """One rewrite of a model in place. The docstring of each pass says what it requires and what it ensures."""

    @abstractmethod
    def run(self, model: ir.Model) -> None: ...


def apply(model: ir.Model, passes: Iterable[GraphPass]) -> ir.Model:
    """A rewritten copy of the model; the original stays as it was."""
    copy = model.clone()
    for graph_pass in passes:
        graph_pass.run(copy)
    # Values made by passes are named by a counter that doesn't know the names already there.
    NameFixPass()(copy)
    return copy


def remove_unused(graph: ir.Graph) -> None:
    """Drop nodes and weights that no output depends on."""
    for node in reversed(list(graph)):
        if not any(out.uses() or out.is_graph_output() for out in node.outputs):
            graph.remove(node, safe=True)
    for name in [n for n, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]


class KeepOutputs(GraphPass):
    """Requires nothing. Ensures: only the named outputs are left, and only what they need."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def run(self, model: ir.Model) -> None:
        kept = [value for value in model.graph.outputs if value.name in self.names]
        model.graph.outputs[:] = kept
        remove_unused(model.graph)


class AttachWeights(GraphPass):
    """Requires: weights named as in the index. Ensures: each refers to its place in ``weights.bin``."""

    def __init__(self, index: WeightIndex) -> None:
        self.index = index

    def run(self, model: ir.Model) -> None:
        for name, value in model.graph.initializers.items():
            if value.const_value is not None:
                continue
            weight = self.index.weights[name]
            shape = ir.Shape(weight.shape)
            value.const_value = ir.ExternalTensor(
                WEIGHTS_NAME,
                weight.offset,
                weight.nbytes,
                ir.DataType.FLOAT,
                shape=shape,
                name=name,
                base_dir=self.index.path.parent,
            )
            value.shape, value.type = shape, ir.TensorType(ir.DataType.FLOAT)


def replace_value(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Every use of `old`, as a node's input or a graph output, becomes `new`."""
    for use in list(old.uses()):
        use.node.replace_input_with(use.idx, new)
    for i, value in enumerate(graph.outputs):
        if value is old:
            graph.outputs[i] = new


def constant(graph: ir.Graph, name: str, values: list[int] | int) -> ir.Value:
    """An int64 initializer of the graph, a vector or a scalar, made once per name."""
    if name not in graph.initializers:
        tensor = ir.tensor(values, dtype=ir.DataType.INT64, name=name)
        value = ir.Value(
            name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        graph.register_initializer(value)
    return graph.initializers[name]


def fixed_size(value: ir.Value, axis: int) -> int:
    """The size of an axis that doesn't depend on the call."""
    size = None if value.shape is None else value.shape[axis]
    if not isinstance(size, int):
        raise RuntimeError(f"axis {axis} of {value.name!r} has no fixed size")
    return size
