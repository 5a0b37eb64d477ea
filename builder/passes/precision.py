"""The precision T of a lowered graph: which values have it, and which stay float32 (or bfloat16) whatever it is."""

from __future__ import annotations

import onnx_ir as ir

from builder.graphs.ops import DOMAIN
from builder.passes.base import GraphPass, replace_value
from builder.passes.cuda import DTYPES

ACTIVATIONS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""By precision: the type of activations, caches and rings, as of most weights."""

_FLOATS = frozenset(DTYPES.values())
# What an operator gives where that isn't the type of its first input.
_FLOAT32_RESULTS = ("LinearFloat", "Draft", "BestToken")


def taps_dtype(precision: str) -> str:
    """The type of tap rows: activations of large targets, and what fc makes of them, exceed float16's range."""
    return "bfloat16" if precision == "f16" else ACTIVATIONS[precision]


class SetPrecision(GraphPass):
    """Requires: the operators of the CUDA lowering, weights as inputs of their own types, all else float32.

    Ensures: activations and state have the precision's type, but the taps and what is computed from them up to
    hidden_norm, which are `taps_dtype`; logits, q, confidences, temperatures, uniforms and noise are float32. A Cast
    stands where these meet, and every node's operands of one kind have one type.
    """

    def __init__(self, precision: str) -> None:
        self.activations = DTYPES[ACTIVATIONS[precision]]
        self.taps = DTYPES[taps_dtype(precision)]

    def run(self, model: ir.Model) -> None:
        graph = model.graph
        if any(value.dtype in _FLOATS for value in graph.initializers.values()):
            raise RuntimeError("a constant of floats has no precision")
        for value in graph.inputs:
            if value.name == "taps":
                value.type = ir.TensorType(self.taps)
            elif value.shape is not None and value.shape and str(value.shape[0]) == "slots":
                value.type = ir.TensorType(self.activations)
        for node in list(graph):
            if node.op_type == "SlotWrite":
                self._cast_input(graph, node, 1, self.taps)
            self._type(node)
            if node.op_type == "RMSNormalization" and node.outputs[0].dtype is not self.activations:
                self._cast_output(graph, node)

    def _type(self, node: ir.Node) -> None:
        operands = [value.dtype for value in node.inputs if value is not None and value.dtype in _FLOATS]
        own = node.domain == DOMAIN
        if not own and len(set(operands)) > 1:
            raise RuntimeError(f"{node.op_type} of {sorted(map(str, operands))}")
        results = [value for value in node.outputs if value.dtype in _FLOATS]
        state = {"ContextWrite": 7, "CausalAttention": 3, "NormedCausalAttention": 5}.get(node.op_type) if own else None
        for i, value in enumerate(results):
            dtype = operands[0]
            if own and node.op_type.startswith(_FLOAT32_RESULTS):
                dtype = ir.DataType.FLOAT
            elif state is not None and (i > 0 or node.op_type == "ContextWrite"):
                ring = node.inputs[state]
                dtype = operands[0] if ring is None or ring.dtype is None else ring.dtype
            value.type = ir.TensorType(dtype)

    def _cast_input(self, graph: ir.Graph, node: ir.Node, index: int, dtype: ir.DataType) -> None:
        value = node.inputs[index]
        if value is None or value.dtype is dtype:
            return
        tape = ir.tape.Tape()
        cast = tape.op("Cast", [value], {"to": dtype})
        cast.shape, cast.type = value.shape, ir.TensorType(dtype)
        graph.insert_before(node, tape.nodes)
        node.replace_input_with(index, cast)

    def _cast_output(self, graph: ir.Graph, node: ir.Node) -> None:
        value = node.outputs[0]
        tape = ir.tape.Tape()
        cast = tape.op("Cast", [value], {"to": self.activations})
        cast.shape, cast.type = value.shape, ir.TensorType(self.activations)
        replace_value(graph, value, cast)
        tape.nodes[0].replace_input_with(0, value)
        graph.insert_after(node, tape.nodes)
