"""From a graph lowered for CUDA to one of fixed sizes for TensorRT, with plugins or nothing but standard operators.

TensorRT has no use for attributes of Attention or for its own cache updates here: attention and state are the operators
of `builder.passes.cuda_ops`, as plugins, or as bodies of MatMul, Softmax and ScatterND. Types are strict since
`builder.passes.precision`, which puts a Cast wherever two types meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir
import onnxscript.optimizer
from onnx_ir.passes.common import InlinePass

from builder.graphs.ops import DOMAIN
from builder.passes.base import GraphPass, remove_unused
from plugins.operators import OPERATORS, VERSION

_PRODUCTS = frozenset({"Linear", "LinearAdd", "NormLinear", "NormSwiGLU"})
PLUGINS = frozenset(OPERATORS) - _PRODUCTS
"""Operators that are plugins where there are kernels: those with state, the draft, and what reads an lm_head, which
TensorRT would convert to float32 as a whole. Other products are TensorRT's own, with what it fuses around them."""

_FOLDED_ELEMENTS = 1 << 16
"""Most elements of a constant that folding makes: shapes, indices and small masks, never a table."""


class FixSizes(GraphPass):
    """Requires: inputs whose symbolic sizes are among `sizes`. Ensures: every input and output has fixed sizes, and so
    has every value between whose sizes are known."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes

    def run(self, model: ir.Model) -> None:
        graph = model.graph
        for value in (*graph.inputs, *graph.outputs, *(out for node in graph for out in node.outputs)):
            if value.shape is not None:
                value.shape = ir.Shape([self._size(size) for size in value.shape])
        for value in graph.inputs:
            if value.shape is None or not value.shape.is_static():
                raise RuntimeError(f"input {value.name!r} of {graph.name!r} has no fixed size: {value.shape}")

    def _size(self, size: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
        return size if isinstance(size, int) else self.sizes.get(str(size.value), size)


class InlineBodies(GraphPass):
    """Requires: a body for each ``dspark`` operator. Ensures: those not in `kept` are their bodies."""

    def __init__(self, kept: Iterable[str]) -> None:
        self.kept = frozenset(kept)

    def run(self, model: ir.Model) -> None:
        InlinePass(lambda function: function.name not in self.kept)(model)
        left = {node.op_type for node in model.graph if node.domain == DOMAIN} - self.kept
        if left:
            raise RuntimeError(f"operators without a body: {sorted(left)}")


class FoldConstants(GraphPass):
    """Requires: fixed sizes. Ensures: what follows from sizes and small constants alone is a constant."""

    def run(self, model: ir.Model) -> None:
        onnxscript.optimizer.fold_constants(model, onnx_shape_inference=True, output_size_limit=_FOLDED_ELEMENTS)
        remove_unused(model.graph)


class MarkPlugins(GraphPass):
    """Requires: operators of `plugins.operators`. Ensures: they name their plugin, which TensorRT's parser then prefers
    to the body; ONNX Runtime, which knows no such attributes, still runs the body."""

    def run(self, model: ir.Model) -> None:
        for node in model.graph:
            if node.domain == DOMAIN:
                node.attributes["plugin_namespace"] = ir.AttrString("plugin_namespace", DOMAIN)
                node.attributes["plugin_version"] = ir.AttrString("plugin_version", VERSION)
