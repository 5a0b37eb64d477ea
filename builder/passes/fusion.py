"""Fusions into ONNX Runtime's own operators, which save a pass over memory each."""

from __future__ import annotations

import onnx_ir as ir

from builder.passes.base import MICROSOFT, GraphPass, remove_unused, replace_value


class FuseMatMul(GraphPass):
    """Requires: products with weights as ``MatMul(x, Transpose(W))``, as torch exports linear layers.

    Ensures: each is ``FusedMatMul(x, W, transB=1)``: no transposed copy, and an lm_head that is also the embedding
    stays one tensor.
    """

    def run(self, model: ir.Model) -> None:
        for node in list(model.graph):
            if node.op_type != "MatMul" or node.domain:
                continue
            weight = node.inputs[1]
            transpose = weight.producer() if weight is not None else None
            if transpose is None or transpose.op_type != "Transpose":
                continue
            node.replace_input_with(1, transpose.inputs[0])
            node.op_type, node.domain = "FusedMatMul", MICROSOFT
            node.attributes["transB"] = ir.AttrInt64("transB", 1)
        remove_unused(model.graph)


class FuseSkipNorm(GraphPass):
    """Requires: ``s = Add(x, y)`` read by one RMSNormalization and by others.

    Ensures: one SkipSimplifiedLayerNormalization gives both the sum and its norm.
    """

    def run(self, model: ir.Model) -> None:
        graph = model.graph
        for norm in list(graph):
            if norm.op_type != "RMSNormalization":
                continue
            total, gamma = norm.inputs[0], norm.inputs[1]
            add = total.producer() if total is not None else None
            if total is None or add is None or add.op_type != "Add" or gamma is None:
                continue
            if sum(use.node.op_type == "RMSNormalization" for use in total.uses()) != 1:
                continue
            tape = ir.tape.Tape()
            out, _, _, summed = tape.op_multi_out(
                "SkipSimplifiedLayerNormalization",
                [*add.inputs, gamma],
                {"epsilon": norm.attributes["epsilon"].as_float()},
                domain=MICROSOFT,
                num_outputs=4,
            )
            for new, old in ((out, norm.outputs[0]), (summed, total)):
                new.name, new.shape, new.type = old.name, old.shape, old.type
            graph.insert_before(add, tape.nodes)
            replace_value(graph, norm.outputs[0], out)
            replace_value(graph, total, summed)
            graph.remove(norm, safe=True)
            graph.remove(add, safe=True)
