"""Fusions for CUDA: from the exported operators and what stands around them to one operator a kernel.

Each pass knows how `builder.graphs` exports what it looks for; a pattern that isn't as expected is a mistake of this
program, so it raises RuntimeError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from builder.graphs.ops import DOMAIN
from builder.passes.base import GraphPass, fixed_size, remove_unused, replace_value
from builder.passes.cuda_ops import DRAFT_OPS

_CONTEXT_NORM = "drafter.context.hidden_norm.weight"
_NORM = "RMSNormalization"


def replace_node(
    graph: ir.Graph,
    at: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[ir.Value],
    **attributes: float | int,
) -> None:
    """Put a ``dspark`` operator before `at`, and its results, which inherit name and shape, in the place of
    `outputs`."""
    tape = ir.tape.Tape()
    results = tape.op_multi_out(op_type, list(inputs), attributes, domain=DOMAIN, num_outputs=len(outputs))
    graph.insert_before(at, tape.nodes)
    for new, old in zip(results, outputs, strict=True):
        new.name, new.shape, new.type = old.name, old.shape, old.type
        replace_value(graph, old, new)


def made_by(value: ir.Value | None, op_type: str) -> ir.Node:
    """The node of that type which makes the value."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != op_type:
        raise RuntimeError(f"{'nothing' if value is None else value.name!r} is not made by {op_type}")
    return node


def is_weight(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer()


def _only_use(value: ir.Value) -> ir.Node | None:
    """The node that alone uses the value, unless it is an output of the graph too."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


@dataclass(frozen=True)
class _Part:
    """One of q, k and v on its way from the stacked projection: which output of which Split, and what it passed."""

    split: ir.Node
    index: int
    norm: ir.Node | None
    rotary: ir.Node | None

    @property
    def projection(self) -> ir.Value:
        value = made_by(self.split.inputs[0], "Reshape").inputs[0]
        if value is None:
            raise RuntimeError("a projection without a value")
        return value


def _part(value: ir.Value | None) -> _Part:
    """Back from `value` to the Split of the projection, through RoPE, norm and changes of shape alone."""
    found: dict[str, ir.Node] = {}
    while True:
        node = None if value is None else value.producer()
        if node is None or value is None or node.op_type not in ("Split", "Reshape", "RotaryEmbedding", _NORM):
            raise RuntimeError(f"{'nothing' if value is None else value.name!r} doesn't come of a stacked projection")
        if node.op_type == "Split":
            return _Part(node, value.index() or 0, found.get(_NORM), found.get("RotaryEmbedding"))
        if node.op_type in found:
            raise RuntimeError(f"{value.name!r} passed {node.op_type} twice")
        if node.op_type != "Reshape":
            found[node.op_type] = node
        value = node.inputs[0]


def _stacked(*values: ir.Value | None) -> tuple[_Part, ...]:
    """The parts, which must be all outputs of one Split, in their order."""
    parts = tuple(map(_part, values))
    if any(part.split is not parts[0].split or part.index != i for i, part in enumerate(parts)):
        raise RuntimeError("q, k and v don't come of one projection")
    if len(parts[0].split.outputs) != len(parts):
        raise RuntimeError("more comes of the projection than is fused")
    return parts


def _size(value: ir.Value | None, axis: int) -> int | ir.SymbolicDim:
    if value is None or value.shape is None:
        raise RuntimeError("a value without a shape")
    return value.shape[axis]


def _epsilon(norm: ir.Node) -> float:
    return norm.attributes["epsilon"].as_float()


class FuseAttention(GraphPass):
    """Requires: CachedAttention and RingAttention over q, k and v split from one projection, those of the ring normed
    and rotated before, those of the cache normed or not.

    Ensures: each is BlockAttention, CausalAttention or NormedCausalAttention over the projection itself.
    """

    def run(self, model: ir.Model) -> None:
        for node in list(model.graph):
            if node.domain == DOMAIN and node.op_type in ("CachedAttention", "RingAttention"):
                self._fuse(model.graph, node)
        remove_unused(model.graph)

    def _fuse(self, graph: ir.Graph, node: ir.Node) -> None:
        q, k, v = _stacked(*node.inputs[:3])
        norms = [part.norm for part in (q, k) if part.norm is not None]
        num_heads = fixed_size(q.split.outputs[0], 2)
        if v.norm is not None or v.rotary is not None or len(norms) == 1:
            raise RuntimeError("v is as projected, and q and k are normed alike")
        gammas = [norm.inputs[1] for norm in norms]
        if len({_epsilon(norm) for norm in norms}) > 1:
            raise RuntimeError("the norms of q and k have one epsilon")
        if node.op_type == "RingAttention":
            if q.rotary is None or k.rotary is None or not norms:
                raise RuntimeError("a block's q and k are normed and rotated")
            inputs = [q.projection, *gammas, *q.rotary.inputs[1:3], *node.inputs[3:]]
            replace_node(
                graph, node, "BlockAttention", inputs, node.outputs, epsilon=_epsilon(norms[0]), num_heads=num_heads
            )
            return
        k_cache, v_cache, start, slot, cos, sin = node.inputs[3:]
        inputs = [q.projection, *gammas, cos, sin, k_cache, v_cache, start, slot]
        if norms:
            replace_node(
                graph,
                node,
                "NormedCausalAttention",
                inputs,
                node.outputs,
                epsilon=_epsilon(norms[0]),
                num_heads=num_heads,
            )
        else:
            replace_node(graph, node, "CausalAttention", inputs, node.outputs, num_heads=num_heads)


class FuseContextWrites(GraphPass):
    """Requires: RingWrites in pairs, of K, normed and rotated, and of V, split from one projection.

    Ensures: each pair is one ContextWrite over the projection.
    """

    def run(self, model: ir.Model) -> None:
        graph = model.graph
        writes = [node for node in graph if node.domain == DOMAIN and node.op_type == "RingWrite"]
        for k_write, v_write in zip(writes[0::2], writes[1::2], strict=True):
            k, v = _stacked(k_write.inputs[1], v_write.inputs[1])
            if k.norm is None or k.rotary is None or v.norm is not None or v.rotary is not None:
                raise RuntimeError("K of the context is normed and rotated, V is as projected")
            if k_write.inputs[2:] != v_write.inputs[2:]:
                raise RuntimeError("K and V go to different rows")
            inputs = [k.projection, k.norm.inputs[1], *k.rotary.inputs[1:3], *k_write.inputs[2:]]
            inputs += [k_write.inputs[0], v_write.inputs[0]]
            outputs = [k_write.outputs[0], v_write.outputs[0]]
            replace_node(graph, v_write, "ContextWrite", inputs, outputs, epsilon=_epsilon(k.norm))
        remove_unused(graph)


class FuseChain(GraphPass):
    """Requires: at most one chain, whose corrected logits nobody reads, and a confidence head, if any, over its hidden
    rows or over those and its W1 rows.

    Ensures: one draft operator gives ids, q and the confidence logits. With `sample` False it takes the best
    everywhere, and q has one column.
    """

    def __init__(self, sample: bool) -> None:
        self.sample = sample

    def run(self, model: ir.Model) -> None:
        graph = model.graph
        for node in list(graph):
            if node.domain == DOMAIN and node.op_type in DRAFT_OPS:
                self._fuse(graph, node)
        remove_unused(graph)

    def _fuse(self, graph: ir.Graph, node: ir.Node) -> None:
        base, hidden, ids, q = node.inputs[0], node.inputs[1], node.outputs[0], node.outputs[2]
        op_type, inputs, outputs, at = DRAFT_OPS[node.op_type], list(node.inputs), [ids, q], node
        confidence = next((v for v in graph.outputs if v.name == "confidence_logits"), None)
        if confidence is not None:
            at = made_by(confidence, "Squeeze")
            shifted = made_by(at.inputs[0], "Add")
            bias, score = sorted(shifted.inputs, key=is_weight, reverse=True)
            product = made_by(score, "FusedMatMul")
            features = product.inputs[0]
            if features is not hidden and list(made_by(features, "Concat").inputs) != [hidden, node.outputs[1]]:
                raise RuntimeError("the confidence head reads something else than the chain's rows")
            op_type, inputs, outputs = f"{op_type}C", [*inputs, product.inputs[1], bias], [*outputs, confidence]
        rows = [_size(node.inputs[4], 0), _size(node.inputs[4], 1)]  # of the uniforms: one a draft
        for value, shape in zip(outputs, (rows, [*rows, _size(base, 2) if self.sample else 1], rows), strict=False):
            value.shape = ir.Shape(shape)
        replace_node(graph, at, op_type, inputs, outputs, sample=int(self.sample))


class FuseLinear(GraphPass):
    """Requires: products as ``FusedMatMul(x, W, transB=1)``; no chain or confidence head any more.

    Ensures: each is LinearFloat (the lm_heads'), NormSwiGLU, NormLinear, LinearAdd or Linear. A norm that others read
    too stays, and so does the context's, whose own precision may differ from that of the products. A bias stays an Add.
    """

    def run(self, model: ir.Model) -> None:
        for node in list(model.graph):
            if node.op_type == "FusedMatMul":
                self._fuse(model.graph, node)
        remove_unused(model.graph)

    def _fuse(self, graph: ir.Graph, node: ir.Node) -> None:
        x, weight = node.inputs
        out = node.outputs[0]
        if x is None or weight is None:
            raise RuntimeError("a product lacks an operand")
        if (weight.name or "").endswith("lm_head.weight"):
            replace_node(graph, node, "LinearFloat", [x, weight], [out])
            return
        norm, use = x.producer(), _only_use(out)
        if norm is not None and norm.op_type == _NORM and _only_use(x) and not _is_context_norm(norm):
            gated = _swiglu(use)
            inputs = [*norm.inputs, weight]
            if gated is None:
                replace_node(graph, node, "NormLinear", inputs, [out], epsilon=_epsilon(norm))
            else:
                replace_node(graph, node, "NormSwiGLU", inputs, [gated], epsilon=_epsilon(norm))
            return
        if use is not None and use.op_type == "Add":
            other = use.inputs[1] if use.inputs[0] is out else use.inputs[0]
            if not is_weight(other):
                replace_node(graph, use, "LinearAdd", [x, weight, other], [use.outputs[0]])
                return
        replace_node(graph, node, "Linear", [x, weight], [out])


def _is_context_norm(norm: ir.Node) -> bool:
    gamma = norm.inputs[1]
    return gamma is not None and gamma.name == _CONTEXT_NORM


def _swiglu(split: ir.Node | None) -> ir.Value | None:
    """``silu(gate) * up`` of the two halves that `split` makes, if that is all that becomes of them."""
    if split is None or split.op_type != "Split" or len(split.outputs) != 2:
        return None
    gate, up = split.outputs
    sigmoid = next((use.node for use in gate.uses() if use.node.op_type == "Sigmoid"), None)
    silu = None if sigmoid is None else _only_use(sigmoid.outputs[0])
    if sigmoid is None or silu is None or set(silu.inputs) != {gate, sigmoid.outputs[0]} or len(list(gate.uses())) != 2:
        return None
    gated = _only_use(silu.outputs[0])
    if gated is None or gated.op_type != "Mul" or set(gated.inputs) != {silu.outputs[0], up} or not _only_use(up):
        return None
    return gated.outputs[0]
