"""Lowering for CUDA: whole slot-indexed state bound in place, weights as inputs, one kernel operator a step of the
model.

A slot stays an index, so that addresses are fixed and a CUDA graph can be captured; batch and width stay symbolic,
since each size is captured for itself from one file.
"""

from __future__ import annotations

import onnx_ir as ir

from builder.graphs.ops import DOMAIN
from builder.passes.base import GraphPass, constant, remove_unused, replace_value
from builder.passes.cuda_functions import cuda_function
from builder.passes.cuda_fusion import made_by, replace_node
from builder.weights import WeightIndex
from runtime.manifest import Limits

DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
"""Names of element types, as the weights and the manifest have them, to ONNX's."""


def cache_rows(limits: Limits) -> int:
    """Rows of a slot's target cache: a call at the last position may be padded to a whole block or chunk."""
    return limits.max_seq_len + max(limits.block_size, limits.prefill_chunk)


class SizeState(GraphPass):
    """Requires: the target's caches as state inputs and outputs, if at all. Ensures: they have `cache_rows` rows."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def run(self, model: ir.Model) -> None:
        for value in (*model.graph.inputs, *model.graph.outputs):
            if value.name is not None and value.name[1:].startswith("_cache.") and value.shape is not None:
                value.shape = ir.Shape([*value.shape[:2], cache_rows(self.limits), value.shape[3]])


class TapsInSlots(GraphPass):
    """Requires: the taps are an output of ``target``, an input ``[b, c, T·H]`` of ``seed``, and in ``draft`` state of
    which nothing is asked but the slots' rows.

    Ensures: they are state ``taps [slots, n, T·H]`` everywhere. ``target`` writes the first ``count[b]`` rows behind
    ``tap_row[b]`` (inputs), ``draft`` reads the first B+1 rows and ``seed`` those named by its input ``row[c]``.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def run(self, model: ir.Model) -> None:
        graph = model.graph
        {"target": self._write, "draft": self._read_block, "seed": self._read_rows}[graph.name or ""](graph)
        remove_unused(graph)

    def _write(self, graph: ir.Graph) -> None:
        position = next(i for i, value in enumerate(graph.outputs) if value.name == "taps")
        rows = graph.outputs[position]
        rows.name = "tap_rows"
        start, slot = _input(graph, "start"), _input(graph, "slot")
        count, tap_row = (ir.Value(name=n, shape=start.shape, type=start.type) for n in ("count", "tap_row"))
        state = self._state(rows)
        graph.inputs.extend([count, tap_row, state])
        tape = ir.tape.Tape()
        updated = tape.op("SlotWrite", [state, rows, tap_row, count, slot], domain=DOMAIN)
        updated.name, updated.shape, updated.type = "taps.new", state.shape, state.type
        graph.extend(tape.nodes)
        graph.outputs[position] = updated

    def _read_block(self, graph: ir.Graph) -> None:
        taps = _input(graph, "taps")
        gather = next(use.node for use in taps.uses() if use.node.op_type == "Gather")
        rows, read = gather.outputs[0], self.limits.block_size + 1
        row = constant(graph, "block_tap_rows", list(range(read)))
        if rows.shape is not None:
            rows.shape = ir.Shape([rows.shape[0], read, rows.shape[2]])
        replace_node(graph, gather, "SlotRead", [taps, _input(graph, "slot"), row], [rows])
        remove_unused(graph)
        if len(list(taps.uses())) != 1:
            raise RuntimeError("draft asks more of the taps than their rows")
        taps.shape = self._state(taps).shape

    def _read_rows(self, graph: ir.Graph) -> None:
        rows = _input(graph, "taps")
        state, slot = self._state(rows), _input(graph, "slot")
        row = ir.Value(name="row", shape=ir.Shape([None if rows.shape is None else rows.shape[1]]), type=slot.type)
        tape = ir.tape.Tape()
        read = tape.op("SlotRead", [state, slot, row], domain=DOMAIN)
        read.shape, read.type = rows.shape, rows.type
        graph.insert_before(graph[0], tape.nodes)
        replace_value(graph, rows, read)
        graph.inputs[graph.inputs.index(rows)] = row
        graph.inputs.append(state)

    def _state(self, rows: ir.Value) -> ir.Value:
        width = None if rows.shape is None else rows.shape[2]
        return ir.Value(name="taps", shape=ir.Shape(["slots", self.limits.tap_rows, width]), type=rows.type)


class FuseBestToken(GraphPass):
    """Requires: outputs ``argmax`` and ``logits``, if at all, the one made of the other by ArgMax.

    Ensures: BestToken gives ``argmax`` and an output ``best``, each row's greatest logit, so that a row can be seen to
    be finite without its logits leaving the device.
    """

    def run(self, model: ir.Model) -> None:
        graph = model.graph
        argmax = next((value for value in graph.outputs if value.name == "argmax"), None)
        if argmax is None:
            return
        node = made_by(argmax, "ArgMax")
        best = ir.Value(name="best", shape=argmax.shape, type=ir.TensorType(ir.DataType.FLOAT))
        graph.outputs.insert(1, best)
        replace_node(graph, node, "BestToken", [node.inputs[0]], [argmax, best])
        remove_unused(graph)


class WeightsToInputs(GraphPass):
    """Requires: weights named as in the index, without data. Ensures: each is an input, of the index's shape and type:
    the session puts them on the device once and binds them to every graph."""

    def __init__(self, index: WeightIndex) -> None:
        self.index = index

    def run(self, model: ir.Model) -> None:
        graph = model.graph
        for name in [name for name, value in graph.initializers.items() if value.const_value is None]:
            value, weight = graph.initializers.pop(name), self.index.weights[name]
            value.shape, value.type = ir.Shape(weight.shape), ir.TensorType(DTYPES[weight.dtype])
            graph.inputs.append(value)


class AttachBodies(GraphPass):
    """Requires: all operators of domain ``dspark`` are those of `builder.passes.cuda_ops`, the draft's with one value
    of ``sample``. Ensures: the model has a body for each that it uses, and no other function."""

    def run(self, model: ir.Model) -> None:
        model.functions.clear()
        for node in model.graph:
            if node.domain != DOMAIN:
                continue
            sample = node.attributes.get("sample")
            rows = sample is not None and _reads_w1_rows(node)
            body = cuda_function(node.op_type, sample is not None and bool(sample.as_int()), rows)
            model.functions[body.identifier()] = body.clone()
        model.opset_imports[DOMAIN] = 1


def _reads_w1_rows(draft: ir.Node) -> bool:
    """Whether the confidence head of a draft operator is wider than its hidden rows."""
    hidden, weight = draft.inputs[1], draft.inputs[-2]
    if hidden is None or weight is None or hidden.shape is None or weight.shape is None:
        raise RuntimeError("a draft operator without shapes")
    return draft.op_type.endswith("C") and weight.shape[1] != hidden.shape[2]


def _input(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for value in graph.inputs if value.name == name)
