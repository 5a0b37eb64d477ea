"""Lowering for ONNX Runtime's CPU provider: a slot becomes a binding.

The CPU has no kernel that reads a slot out of whole state for less than a copy of it. So each row of a fixed batch gets
state inputs of its own (``k_cache.3.row1``), which the session binds to a slot's part of the buffers: no row is
gathered, and a step costs what is valid, not what the buffers hold.
"""

from __future__ import annotations

import onnx_ir as ir

from builder.graphs.ops import CHAIN_OPS, DOMAIN, SIGNATURES
from builder.passes.base import MICROSOFT, GraphPass, constant, fixed_size, remove_unused, replace_value
from builder.passes.cpu_functions import CPU_DOMAIN, RING_ATTENTION, RING_WRITE, chain_body, cpu_function


class FixBatch(GraphPass):
    """Requires: a symbolic leading axis ``b`` on every input that isn't state. Ensures: it is `batch`.

    The target's rows are packed: its products run over the ids of all rows one after another, as a single row, and only
    attention tells rows apart. So ``ids``, ``head_rows`` and what comes of them have a leading axis of 1, and an input
    ``count[batch]`` says how many ids each row has. No row then pays for the length of another.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def run(self, model: ir.Model) -> None:
        graph = model.graph
        packed = graph.name == "target"
        for value in (*graph.inputs, *graph.outputs):
            if value.shape is not None:
                rows = 1 if packed and len(value.shape) > 1 else self.batch
                value.shape = ir.Shape([rows if str(d) == "b" else d for d in value.shape])
        if packed:
            start = next(v for v in graph.inputs if v.name == "start")
            graph.inputs.append(ir.Value(name="count", shape=ir.Shape([self.batch]), type=start.type))


class SlotsToBindings(GraphPass):
    """Requires: ``dspark`` operators over state inputs with a leading axis named ``slots``; fixed batch.

    Ensures: no input has a slot axis. Each state input ``x`` became ``x.row<r>`` of shape ``[1, …]`` for each row (the
    taps ``[rows, T·H]``), ``slot`` is gone, and so are the ``dspark`` operators: attention over the cache is
    GroupQueryAttention in place, the others are functions of domain ``dspark.cpu``.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def run(self, model: ir.Model) -> None:
        graph = model.graph
        self._graph = graph
        self._rows: dict[ir.Value, list[ir.Value]] = {}
        self._split: dict[ir.Value, list[ir.Value]] = {}
        self._packed_positions: ir.Value | None = None
        states = [v for v in graph.inputs if v.shape is not None and v.shape and str(v.shape[0]) == "slots"]
        for state in states:
            self._make_rows(state)
        if graph.name == "draft":
            self._gather_taps()
        for node in list(graph):
            if node.domain == DOMAIN:
                self._lower(model, node)
        for state in states:
            graph.inputs.remove(state)
        # All that is left of the slots is their number, which the positions have too.
        slot = next(v for v in graph.inputs if v.name == "slot")
        replace_value(graph, slot, next(v for v in graph.inputs if v.name == "start"))
        graph.inputs.remove(slot)
        for function in [f for f in model.functions if f[0] == DOMAIN]:
            del model.functions[function]
        remove_unused(graph)
        model.opset_imports.pop(DOMAIN, None)
        model.opset_imports.update({CPU_DOMAIN: 1, MICROSOFT: 1})

    def _make_rows(self, state: ir.Value) -> None:
        if state.shape is None:
            raise RuntimeError(f"state {state.name!r} has no shape")
        dims = [*state.shape[1:]] if state.name == "taps" else [1, *state.shape[1:]]
        rows = [ir.Value(name=f"{state.name}.row{r}", shape=ir.Shape(dims), type=state.type) for r in range(self.batch)]
        self._rows[state] = rows
        at = self._graph.inputs.index(state)
        self._graph.inputs[at:at] = rows

    def _gather_taps(self) -> None:
        """taps[slot] is the rows' own taps, stacked, cut to the longest of ``new_len``: the rest takes no product."""
        graph = self._graph
        taps = next(v for v in self._rows if v.name == "taps")
        gather = next(use.node for use in taps.uses() if use.node.op_type == "Gather")
        new_len = next(v for v in graph.inputs if v.name == "new_len")
        tape = ir.tape.Tape()
        zero, one = (constant(graph, f"const_{i}", [i]) for i in (0, 1))
        # At least one, written or not: empty tensors are where kernels crash.
        longest = tape.op("Max", [tape.op("ReduceMax", [new_len], {"keepdims": 1}), one])
        cut = [tape.op("Unsqueeze", [tape.op("Slice", [row, zero, longest, zero]), zero]) for row in self._rows[taps]]
        stacked = cut[0] if len(cut) == 1 else tape.op("Concat", cut, {"axis": 0})
        graph.insert_before(gather, tape.nodes)
        gathered = gather.outputs[0]
        replace_value(graph, gathered, stacked)
        # What was asked of the state's row count is now asked of the stacked rows.
        for use in list(taps.uses()):
            if use.node is not gather:
                use.node.replace_input_with(use.idx, stacked)
        graph.remove(gather, safe=True)
        # The slices must come before anything that asks for their shape.
        first = graph[0]
        for node in reversed(tape.nodes):
            graph.remove(node)
            graph.insert_before(first, [node])
            first = node

    def _lower(self, model: ir.Model, node: ir.Node) -> None:
        if node.op_type == "CachedAttention":
            self._cached_attention(node)
        elif node.op_type in CHAIN_OPS.values():
            self._chain(model, node)
        else:
            self._ring(model, node)

    def _chain(self, model: ir.Model, node: ir.Node) -> None:
        inputs, outputs = SIGNATURES[node.op_type]
        logits = node.outputs[3]
        if not logits.uses() and not logits.is_graph_output():
            outputs = outputs[:3]
            node.resize_outputs(3)
        function = cpu_function(node.op_type, chain_body(node.op_type, outputs), inputs, outputs)
        model.functions[function.identifier()] = function
        node.domain = CPU_DOMAIN
        q = node.outputs[2]
        if q.shape is not None:
            q.shape = ir.Shape([*q.shape[:2], "columns"])  # V, or 1 where every row is greedy

    def _ring(self, model: ir.Model, node: ir.Node) -> None:
        inputs, outputs = SIGNATURES[node.op_type]
        body, states = {"RingWrite": (RING_WRITE, (0,)), "RingAttention": (RING_ATTENTION, (3, 4))}[node.op_type]
        function = cpu_function(node.op_type, body, inputs[:-1], outputs)
        model.functions[function.identifier()] = function
        tape = ir.tape.Tape()
        results = []
        for r in range(self.batch):
            row = [
                self._rows[v][r] if i in states else self._row_parts(v)[r]
                for i, v in enumerate(node.inputs[:-1])
                if v is not None
            ]
            results.append(tape.op(node.op_type, row, domain=CPU_DOMAIN))
        out = node.outputs[0]
        if node.op_type == "RingWrite":
            self._replace_state(out, results)
            self._graph.insert_before(node, tape.nodes)
        else:
            merged = results[0] if self.batch == 1 else tape.op("Concat", results, {"axis": 0})
            self._graph.insert_before(node, tape.nodes)
            replace_value(self._graph, out, merged)
        self._discard(node)

    def _cached_attention(self, node: ir.Node) -> None:
        q, k, v, k_cache, v_cache, start, _, cos, sin = (x for x in node.inputs if x is not None)
        heads, kv_heads, head_dim = fixed_size(q, 2), fixed_size(k, 2), fixed_size(q, 3)
        count = next(v for v in self._graph.inputs if v.name == "count")
        tape = ir.tape.Tape()
        # The operator rotates by itself only heads of a multiple of 16.
        rotates = head_dim % 16 == 0
        if rotates:
            tables: list[ir.Value | None] = [cos, sin]
            packed = _common_split(q, k, v)
        else:
            tables, packed = [None, None], None
            positions = self._positions(start, count)
            q, k = (self._rotated(tape, x, cos, sin, positions) for x in (q, k))
        lengths, totals = self._lengths(start, count)
        outs, new_k, new_v = [], [], []
        whole = [(packed, heads + 2 * kv_heads)] if packed is not None else [(q, heads), (k, kv_heads), (v, kv_heads)]
        parts = [(self._packed_parts(x, count, tape), self._width(n * head_dim)) for x, n in whole]
        for r in range(self.batch):
            qkv: list[ir.Value | None] = [tape.op("Reshape", [rows[r], width]) for rows, width in parts]
            qkv += [None] * (3 - len(qkv))
            out, key, value = tape.op_multi_out(
                "GroupQueryAttention",
                [*qkv, self._rows[k_cache][r], self._rows[v_cache][r], lengths[r], totals[r], *tables],
                {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": int(rotates)},
                domain=MICROSOFT,
                num_outputs=3,
            )
            outs.append(out)
            new_k.append(key)
            new_v.append(value)
        merged = outs[0] if self.batch == 1 else tape.op("Concat", outs, {"axis": 1})
        self._graph.insert_before(node, tape.nodes)
        replace_value(self._graph, node.outputs[0], merged)
        self._replace_state(node.outputs[1], new_k)
        self._replace_state(node.outputs[2], new_v)
        self._discard(node)

    def _rotated(self, tape: ir.tape.Tape, x: ir.Value, cos: ir.Value, sin: ir.Value, positions: ir.Value) -> ir.Value:
        """RoPE of ``[1, R, heads, d]`` at positions ``[R, 1]``: R sequences of one id, since the kernel refuses a
        sequence longer than its tables, which R may be."""
        each = tape.op("Transpose", [x], {"perm": [1, 2, 0, 3]})
        rotated = tape.op("RotaryEmbedding", [each, cos, sin, positions])
        out = tape.op("Transpose", [rotated], {"perm": [2, 0, 1, 3]})
        out.shape, out.type = x.shape, x.type
        return out

    def _positions(self, start: ir.Value, count: ir.Value) -> ir.Value:
        """Positions ``[R, 1]`` of the packed ids: of each row, ``start …`` counted up."""
        if self._packed_positions is None:
            tape = ir.tape.Tape()
            zero, one = (constant(self._graph, f"scalar_{i}", i) for i in (0, 1))
            rows = []
            for first, ids in zip(self._row_parts(start), self._row_parts(count), strict=True):
                rows.append(tape.op("Add", [first, tape.op("Range", [zero, tape.op("Squeeze", [ids]), one])]))
            merged = rows[0] if self.batch == 1 else tape.op("Concat", rows, {"axis": 0})
            self._packed_positions = tape.op("Unsqueeze", [merged, constant(self._graph, "const_1", [1])])
            self._insert_first(tape)
        return self._packed_positions

    def _insert_first(self, tape: ir.tape.Tape) -> None:
        """Put nodes that depend on inputs alone where every other can use them: behind the inputs' own parts."""
        parts = [self._rows[v][0].producer() for v in self._graph.inputs if v in self._rows]
        after = [node for node in self._graph if node in parts]
        if after:
            self._graph.insert_after(after[-1], tape.nodes)
        else:
            self._graph.insert_before(self._graph[0], tape.nodes)

    def _discard(self, node: ir.Node) -> None:
        """Remove a node and let its inputs go; its outputs, named by later operators, are replaced with those."""
        for i in range(len(node.inputs)):
            node.replace_input_with(i, None)
        self._graph.remove(node)

    def _width(self, width: int) -> ir.Value:
        return constant(self._graph, f"row_of_{width}", [1, -1, width])

    def _lengths(self, start: ir.Value, count: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
        """GroupQueryAttention's ``seqlens_k`` (total - 1, ``[1]``) and ``total_sequence_length`` of each row, int32."""
        if start not in self._split:
            tape = ir.tape.Tape()
            one = constant(self._graph, "const_1", [1])
            lengths: list[ir.Value] = []
            for first, ids in zip(self._row_parts(start), self._row_parts(count), strict=True):
                total = tape.op("Add", [first, ids])
                last = tape.op("Cast", [tape.op("Sub", [total, one])], {"to": ir.DataType.INT32})
                scalar = tape.op("Squeeze", [tape.op("Cast", [total], {"to": ir.DataType.INT32})])
                lengths += [last, scalar]
            self._insert_first(tape)
            self._split[start] = lengths
        pairs = self._split[start]
        return pairs[0::2], pairs[1::2]

    def _packed_parts(self, value: ir.Value, count: ir.Value, tape: ir.tape.Tape) -> list[ir.Value]:
        """The packed value, ``[1, R, …]``, as one ``[1, count[r], …]`` a row."""
        if self.batch == 1:
            return [value]
        return list(tape.op_multi_out("Split", [value, count], {"axis": 1}, num_outputs=self.batch))

    def _row_parts(self, value: ir.Value) -> list[ir.Value]:
        """The value, ``[b, …]``, as b values ``[1, …]``."""
        if self.batch == 1:
            return [value]
        cached = self._rows.get(value)
        if cached is None:
            tape = ir.tape.Tape()
            parts = tape.op_multi_out("Split", [value], {"axis": 0, "num_outputs": self.batch}, num_outputs=self.batch)
            producer = value.producer()
            if producer is None:
                self._graph.insert_before(self._graph[0], tape.nodes)
            else:
                self._graph.insert_after(producer, tape.nodes)
            cached = self._rows[value] = list(parts)
        return cached

    def _replace_state(self, out: ir.Value, rows: list[ir.Value]) -> None:
        """The updated state, an output of the graph and an input of later operators, row by row."""
        graph = self._graph
        base = (out.name or "").removesuffix(".new")
        for r, row in enumerate(rows):
            row.name, row.type = f"{base}.row{r}.new", out.type
            if out.shape is not None:
                row.shape = ir.Shape([1, *out.shape[1:]])
        self._rows[out] = rows
        for i, value in enumerate(graph.outputs):
            if value is out:
                graph.outputs[i : i + 1] = rows
                break


def _common_split(q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value | None:
    """The packed projection that q, k and v were split from, if nothing happened to them since."""
    node = q.producer()
    if node is None or node.op_type != "Split" or k.producer() is not node or v.producer() is not node:
        return None
    return node.inputs[0]
