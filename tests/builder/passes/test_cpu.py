"""The lowering for the CPU: the same results as the neutral operators, state in place, weights in one file only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from builder.graphs.functions import OPSET, function
from builder.graphs.ops import DOMAIN
from builder.passes.base import apply
from builder.passes.cpu import FixBatch, SlotsToBindings
from builder.passes.cpu_functions import CPU_DOMAIN
from builder.passes.fusion import FuseMatMul, FuseSkipNorm
from runtime.sessions.base import DraftRows
from runtime.sessions.ort import OrtSession
from tests.builder.graphs import cases
from tests.builder.graphs.cases import CHAINS, SEEDS, Arrays, Case, assert_close
from tests.support import target_rows

# Operator inputs and outputs that are state, by the names they have in a graph.
STATE = {"k_cache": "k_cache.0", "v_cache": "v_cache.0", "ring": "ring_k.0", "ring_k": "ring_k.0", "ring_v": "ring_v.0"}


def lowered(case: Case) -> ir.Model:
    """A graph of this one operator, lowered for as many rows as the case has."""
    helper, batch = onnx.helper, len(case.inputs.get("slot", case.inputs.get("bonus", ())))
    proto = function(case.op_type)
    names = {name: STATE.get(name, name) for name in case.inputs}
    results = {name: f"{STATE[name[:-4]]}.new" if name.endswith("_out") else name for name in proto.output}
    if case.op_type == "PlainChain":
        results["rows"] = ""
    node = helper.make_node(case.op_type, list(names.values()), list(results.values()), domain=DOMAIN)
    extra: Arrays = {name: np.zeros(batch, np.int64) for name in ("start", "slot") if name not in case.inputs}
    inputs = [
        helper.make_tensor_value_info(
            names.get(name, name),
            helper.np_dtype_to_tensor_dtype(value.dtype),
            _symbolic(name, value, packed=case.op_type == "CachedAttention"),
        )
        for name, value in (case.inputs | extra).items()
    ]
    expected = case.eager()
    outputs = [
        helper.make_tensor_value_info(
            new, helper.np_dtype_to_tensor_dtype(expected[name].dtype), _symbolic(name, expected[name])
        )
        for name, new in results.items()
        if new
    ]
    nodes = [node]
    if "out" in results:
        # As in a whole graph, nothing of the operator but state is an output of the graph.
        nodes.append(helper.make_node("Identity", ["out"], ["attended"]))
        shape = _symbolic("out", expected["out"], packed=case.op_type == "CachedAttention")
        outputs[0] = helper.make_tensor_value_info("attended", onnx.TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "target" if case.op_type == "CachedAttention" else "seed", inputs, outputs)
    domains = {"": OPSET, DOMAIN: 1, "com.microsoft": 1}
    model = helper.make_model(
        graph, functions=[proto], opset_imports=[helper.make_opsetid(*d) for d in domains.items()], ir_version=10
    )
    return apply(ir.serde.deserialize_model(model), [FixBatch(batch), SlotsToBindings(batch)])


def _symbolic(name: str, value: NDArray[Any], packed: bool = False) -> list[int | str]:
    if name.removesuffix("_out") in STATE:
        return ["slots", *value.shape[1:]]
    if packed and name in ("q", "k", "v", "out"):
        return ["b", "w", *value.shape[2:]]
    return list(value.shape) if name in ("cos", "sin", "w1", "w2", "proj_w", "proj_b") else ["b", *value.shape[1:]]


def run_in_place(model: ir.Model, case: Case, counts: NDArray[np.int64] | None = None) -> Arrays:
    """The results by the operator's names, every row's state bound to its slot's part of one buffer, in and out. Of a
    target's rows, the first `counts` are packed (all of them when None), and come back at their places."""
    session = _session(model)
    inputs, outputs = ({v.name for v in values} for values in (session.get_inputs(), session.get_outputs()))
    binding, state = session.io_binding(), {}
    packed = case.op_type == "CachedAttention"
    if packed and counts is None:
        counts = np.full(case.inputs["q"].shape[0], case.inputs["q"].shape[1])
    free = sorted(name for name in outputs if not name.endswith(".new"))
    for name in free:
        binding.bind_output(name, "cpu")
    for name, value in case.inputs.items():
        if name in STATE:
            state[name] = value.copy()
            for r, slot in enumerate(case.inputs["slot"].tolist()):
                view = state[name][slot : slot + 1]
                place = ("cpu", 0, view.dtype, view.shape, view.ctypes.data)
                binding.bind_input(f"{STATE[name]}.row{r}", *place)
                if f"{STATE[name]}.row{r}.new" in outputs:
                    binding.bind_output(f"{STATE[name]}.row{r}.new", *place)
        elif name in inputs:
            if packed and counts is not None and name in ("q", "k", "v"):
                value = np.concatenate([row[:n] for row, n in zip(value, counts, strict=True)])[None]
            binding.bind_cpu_input(name, np.ascontiguousarray(value))
    if packed:
        binding.bind_cpu_input("count", counts)
    session.run_with_iobinding(binding)
    found = dict(zip(free, binding.copy_outputs_to_cpu(), strict=False))
    if packed and counts is not None:
        b, w = case.inputs["q"].shape[:2]
        found["out"] = np.zeros((b, w, found["attended"].shape[2]), np.float32)
        for r, row in enumerate(np.split(found["attended"][0], np.cumsum(counts)[:-1])):
            found["out"][r, : len(row)] = row
    elif "attended" in found:
        found["out"] = found["attended"]
    return found | {f"{name}_out": value for name, value in state.items()}


def _session(model: ir.Model) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    data = ir.serde.serialize_model(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def check(case: Case) -> Arrays:
    """Lower, run, compare with the eager operator; of the state, only written rows may have changed by a bit."""
    model = lowered(case)
    assert not any(node.domain == DOMAIN for node in model.graph)
    assert not any(domain == DOMAIN for domain, _, _ in model.functions)
    found, expected = run_in_place(model, case), case.eager()
    for name, reference in expected.items():
        end = -1 if name.endswith("_out") else case.real  # the scratch slot and padding rows may hold anything finite
        assert_close(found[name][:end], reference[:end], name)
        assert np.isfinite(found[name]).all(), name
    for name in STATE:
        if name in case.inputs:
            before, after = case.inputs[name], found[f"{name}_out"]
            reference = expected.get(f"{name}_out", before)
            untouched = (reference == before).all(axis=(1, 3))  # [slots+1, rows]
            untouched[-1] = False
            assert untouched.any()
            for slot, row in zip(*np.nonzero(untouched), strict=True):
                where = f"{name}, slot {slot}, row {row}"
                np.testing.assert_array_equal(after[slot, :, row], before[slot, :, row], where)
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("head_dim", [8, 16])  # the kernel rotates heads of 16 itself
def test_cached_attention(seed: int, head_dim: int) -> None:
    check(cases.cached_attention(seed, head_dim))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("head_dim", [8, 16])
def test_rows_of_different_lengths_are_packed(seed: int, head_dim: int) -> None:
    """Each row's first ids give what they give in a batch of full rows, and write nothing for the others."""
    case = cases.cached_attention(seed, head_dim)
    b, w = case.inputs["q"].shape[:2]
    counts = np.random.default_rng(seed).integers(1, w + 1, b)
    found, expected = run_in_place(lowered(case), case, counts), case.eager()
    for r in range(case.real):
        n, slot, start = counts[r], case.inputs["slot"][r], case.inputs["start"][r]
        assert_close(found["out"][r, :n], expected["out"][r, :n])
        for name in ("k_cache", "v_cache"):
            after, before = found[f"{name}_out"][slot], case.inputs[name][slot]
            assert_close(after[:, start : start + n], expected[f"{name}_out"][slot][:, start : start + n])
            np.testing.assert_array_equal(after[:, start + n :], before[:, start + n :])


@pytest.mark.parametrize("seed", SEEDS)
def test_ring_write(seed: int) -> None:
    case = cases.ring_write(seed)
    found = check(case)
    # Not even a scratch row is written where nothing counts.
    np.testing.assert_array_equal(found["ring_out"], case.eager()["ring_out"])


@pytest.mark.parametrize("seed", SEEDS)
def test_ring_attention(seed: int) -> None:
    check(cases.ring_attention(seed))


@pytest.mark.parametrize("temperatures", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("op_type", CHAINS)
def test_chain(op_type: str, seed: int, temperatures: str) -> None:
    case = cases.chain(op_type, seed, temperatures)
    found, expected = run_in_place(lowered(case), case), case.eager()
    np.testing.assert_array_equal(found["ids"], expected["ids"])
    assert_close(found["logits"], expected["logits"])
    if op_type != "PlainChain":
        assert_close(found["rows"], expected["rows"])
    if temperatures == "greedy":
        # No softmax, no running sum: a column that means nothing.
        assert found["q"].shape == (*expected["ids"].shape, 1)
    else:
        assert_close(found["q"], expected["q"])


def test_a_poisoned_scratch_slot_and_neighbour_change_nothing() -> None:
    """Rows of other slots are not read at all: NaN in them doesn't even become 0·NaN."""
    for make in (cases.cached_attention, cases.ring_attention):
        for seed in SEEDS:
            case = make(seed)
            poisoned = Case(case.op_type, dict(case.inputs), case.real)
            used = set(case.inputs["slot"][: case.real].tolist())
            for name in STATE:
                if name in case.inputs:
                    state = case.inputs[name].copy()
                    for slot in set(range(len(state))) - used:
                        state[slot] = np.nan
                    poisoned.inputs[name] = state
            clean, dirty = (run_in_place(lowered(c), c)["out"][: case.real] for c in (case, poisoned))
            np.testing.assert_array_equal(dirty, clean)


@pytest.mark.parametrize("seed", SEEDS)
def test_nan_in_ring_rows_that_no_block_may_see(seed: int) -> None:
    case = cases.ring_attention(seed)
    clean, dirty = (run_in_place(lowered(c), c)["out"][: case.real] for c in (case, cases.unseen_nan(case)))
    np.testing.assert_array_equal(dirty, clean)


def test_no_cache_row_past_the_last_is_read() -> None:
    """A slot handed on holds the last request's rows behind this one's: NaN there tells whether anything reads them."""
    for seed in SEEDS:
        case = cases.cached_attention(seed)
        width = case.inputs["q"].shape[1]
        poisoned = Case(case.op_type, dict(case.inputs), case.real)
        for name in ("k_cache", "v_cache"):
            poisoned.inputs[name] = case.inputs[name].copy()
            for b in range(case.real):
                end = case.inputs["start"][b] + width
                poisoned.inputs[name][case.inputs["slot"][b], :, end:] = np.nan
        clean, dirty = (run_in_place(lowered(c), c)["out"][: case.real] for c in (case, poisoned))
        np.testing.assert_array_equal(dirty, clean)


def random_graph(rows: int = 3) -> onnx.ModelProto:
    """Residual stream, norms and products as the models export them."""
    helper, rng = onnx.helper, np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((8, 6), dtype=np.float32),
        "w2": rng.standard_normal((6, 8), dtype=np.float32),
        "gamma1": rng.standard_normal(6, dtype=np.float32),
        "gamma2": rng.standard_normal(6, dtype=np.float32),
    }
    norm = {"epsilon": 1e-3, "axis": -1}
    nodes = [
        helper.make_node("Transpose", ["w1"], ["w1t"], perm=[1, 0]),
        helper.make_node("Transpose", ["w2"], ["w2t"], perm=[1, 0]),
        helper.make_node("RMSNormalization", ["x", "gamma1"], ["n0"], **norm),  # no sum before it
        helper.make_node("MatMul", ["n0", "w1t"], ["h"]),
        helper.make_node("MatMul", ["h", "w2t"], ["y"]),
        helper.make_node("Add", ["x", "y"], ["s"]),
        helper.make_node("RMSNormalization", ["s", "gamma1"], ["n1"], **norm),
        helper.make_node("MatMul", ["n1", "w1t"], ["h1"]),
        helper.make_node("MatMul", ["h1", "w2t"], ["y1"]),
        helper.make_node("Add", ["s", "y1"], ["t"]),
        helper.make_node("RMSNormalization", ["t", "gamma2"], ["out"], **norm),
    ]
    value = onnx.helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "stream",
        [value("x", onnx.TensorProto.FLOAT, [rows, 6])],
        [value(name, onnx.TensorProto.FLOAT, [rows, 6]) for name in ("out", "t", "s")],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_fusing_changes_no_result() -> None:
    model = ir.serde.deserialize_model(random_graph())
    x = np.random.default_rng(1).standard_normal((3, 6), dtype=np.float32)
    before = _session(model).run(None, {"x": x})
    fused = apply(model, [FuseMatMul(), FuseSkipNorm()])
    kinds = [node.op_type for node in fused.graph]
    assert sorted(set(kinds)) == ["FusedMatMul", "RMSNormalization", "SkipSimplifiedLayerNormalization"]
    assert (kinds.count("FusedMatMul"), kinds.count("SkipSimplifiedLayerNormalization")) == (4, 2)
    for found, reference in zip(_session(fused).run(None, {"x": x}), before, strict=True):
        assert_close(found, reference)
    # The original stays as it was.
    assert {node.op_type for node in model.graph} >= {"MatMul", "Transpose", "Add"}


def test_engines_hold_no_weights(tiny_bundle: Any) -> None:
    """``weights.bin`` is the only copy of any: no engine repeats one, transposed or not, and none refers elsewhere."""
    bundle: Path = tiny_bundle()
    for path in bundle.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        inside = [t for t in model.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
        assert sum(int(np.prod(t.dims)) for t in inside) < 200, path.name  # axes, shapes, scalars
        outside = [{e.key: e.value for e in t.external_data} for t in model.graph.initializer if t not in inside]
        assert {entry["location"] for entry in outside} == {"weights.bin"}
        assert not any(t.data_type == onnx.TensorProto.FLOAT for t in inside)
        assert not any(node.domain == DOMAIN for node in model.graph.node)
        assert {f.domain for f in model.functions} <= {CPU_DOMAIN}
        # A product reads its weight as it lies.
        constants = {t.name for t in model.graph.initializer}
        assert not [n for n in model.graph.node if n.op_type == "Transpose" and n.input[0] in constants]


def test_calls_write_no_row_but_theirs(tiny_bundle: Any) -> None:
    """The engines on the session's own buffers: a step copies no state and writes nothing beside its rows, by a bit."""
    from runtime.bundle import open_bundle

    bundle = open_bundle(tiny_bundle(), check="quick")
    session = OrtSession(bundle.path, bundle.manifest, threads=1)
    rng = np.random.default_rng(0)
    for state in session._state.values():
        state[:] = rng.standard_normal(state.shape, dtype=np.float32)
    before = {name: state.copy() for name, state in session._state.items()}
    block, scratch = session.limits.block_size, session.limits.slots
    start, slot = np.array([9, 20, 31]), np.array([2, 0, 3])  # a row of scratch makes the batch of 4 whole

    session.verify(target_rows(rng.integers(0, 130, (3, block + 1)), start, slot))
    for name, state in session._state.items():
        changed = (state != before[name]).any(axis=(1, 3) if name != "taps" else 2)
        expected = np.zeros_like(changed)
        for s, at in zip(slot, start, strict=True):
            if name == "taps":
                expected[s, : block + 1] = True
            elif not name.startswith("ring"):
                expected[s, at : at + block + 1] = True
        np.testing.assert_array_equal(changed[:scratch], expected[:scratch], name)

    before = {name: state.copy() for name, state in session._state.items()}
    new_len, window = np.array([3, 0, 6]), session.limits.window
    session.draft(
        DraftRows(
            rng.integers(0, 130, 3),
            start + 60,
            np.array([5, 2, 40]),
            new_len,
            slot,
            np.zeros(3, np.float32),
            np.zeros((3, block), np.float32),
        )
    )
    for name, state in session._state.items():
        changed = (state != before[name]).any(axis=(1, 3) if name != "taps" else 2)
        expected = np.zeros_like(changed)
        for s, at, n in zip(slot, start + 60, new_len, strict=True):
            if name.startswith("ring"):
                expected[s, np.arange(at - n, at) % window] = True
        np.testing.assert_array_equal(changed[:scratch], expected[:scratch], name)
    session.close()
