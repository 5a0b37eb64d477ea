"""The lowering for CUDA: what it makes of each graph, in every precision, and that its graphs compute what the golden
vectors and the exported graphs say."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from builder.backends.ort_cuda import OrtCuda
from builder.checkpoints import load_drafter, load_target
from builder.export import export_target
from builder.graphs.ops import DOMAIN
from builder.passes.cuda_ops import SIGNATURES
from builder.spec import DrafterCheckpoint, TargetCheckpoint
from builder.weights import write_weights
from runtime.manifest import Limits
from runtime.sessions.base import DraftRows, SeedRows
from tests.builder.passes.cuda_graphs import CudaGraphs
from tests.examples import DRAFTER, TARGET
from tests.golden.drafter_case import TOLERANCE, Case
from tests.golden.neutral import NeutralSession
from tests.support import GOLDEN, exported_drafter, exported_pair

DRAFTERS = sorted(path.name for path in (GOLDEN / "drafter").iterdir())
PAIRS = sorted(path.name for path in (GOLDEN / "e2e").iterdir())
FLOAT, FLOAT16, BFLOAT16 = (int(t) for t in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16))
TYPES = {"f32": FLOAT, "f16": FLOAT16, "bf16": BFLOAT16}


def drafter_case(name: str, dest: Path) -> Case:
    return Case(
        GOLDEN,
        name,
        dest,
        lambda dest, target, drafter, limits: Both(
            *(
                kind(dest, target, drafter, limits, exported_drafter(target.spec, drafter.spec, limits))
                for kind in (CudaGraphs, NeutralSession)
            )
        ),
    )


class Both:
    """The lowered graphs and the exported ones side by side: every call must leave the same rings."""

    def __init__(self, lowered: CudaGraphs, exported: NeutralSession) -> None:
        self.lowered, self.exported = lowered, exported
        self._state = lowered._state
        self.debug: dict[str, NDArray[Any]] = {}

    def seed(self, rows: SeedRows) -> None:
        for session in self._alike():
            session.seed(rows)
        self._same_rings()

    def draft(self, rows: DraftRows) -> Any:
        lowered, exported = (session.draft(rows) for session in self._alike())
        np.testing.assert_array_equal(lowered.ids, exported.ids)
        assert lowered.q[0].shape[-1] == 1  # no probabilities where nobody samples
        self._same_rings()
        return lowered

    def _alike(self) -> tuple[CudaGraphs, NeutralSession]:
        self.exported._state["taps"][:] = self.lowered._state["taps"]
        return self.lowered, self.exported

    def _same_rings(self) -> None:
        for name, state in self.lowered._state.items():
            if name.startswith("ring"):
                expected = self.exported._state[name]
                np.testing.assert_allclose(state[:-1], expected[:-1], rtol=0, atol=1e-5, err_msg=name)
                assert np.isfinite(state).all()


def check(case: Case, i: int, r: int, out: dict[str, np.ndarray]) -> None:
    """Whatever the engine gives of round r of sequence i, against the golden vectors."""
    np.testing.assert_array_equal(out["ids"], case.tensors[i]["draft_tokens"][r])
    assert ("confidence_logits" in out) == ("confidence_logits" in case.tensors[i])
    if "confidence_logits" in out:
        expected = case.tensors[i]["confidence_logits"][r]
        np.testing.assert_allclose(out["confidence_logits"], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", DRAFTERS)
def test_golden_rounds(name: str, tmp_path: Path) -> None:
    case = drafter_case(name, tmp_path)
    for i, sequence in enumerate(case.sequences):
        case.seed(i)
        for r in range(len(sequence["rounds"])):
            (out,) = case.draft([(i, r)])
            check(case, i, r, out)


def test_a_batch_with_padding_rows(tmp_path: Path) -> None:
    case = drafter_case("batch_mix", tmp_path)
    case.seed(*range(len(case.sequences)))
    rounds = [len(s["rounds"]) for s in case.sequences]
    for r in range(max(rounds)):
        rows = [(i, r) for i in reversed(range(len(rounds))) if r < rounds[i]]
        for (i, _), out in zip(rows, case.draft(rows), strict=True):
            check(case, i, r, out)


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("name", ["vanilla_r16", "no_markov", "gated_r16", "rnn_r16"])
def test_sampled_and_short_drafts(name: str, noise: bool, tmp_path: Path) -> None:
    """One row greedy, one drawn, fewer drafts than the block: as the exported graphs have it."""
    both: Both = drafter_case(name, tmp_path).session
    rng = np.random.default_rng(5)
    taps = both._state["taps"]
    taps[:] = rng.standard_normal(taps.shape, dtype=np.float32)
    vocabulary = both.lowered._weights["drafter.embed"].shape[0]
    drafts = 3
    rows = DraftRows(
        bonus=np.array([3, 5]),
        start=np.array([9, 14]),
        valid_len=np.array([2, 4]),
        new_len=np.array([2, 4]),
        slot=np.array([0, both.lowered.limits.slots]),
        temperature=np.array([0, 0.7], np.float32),
        uniforms=rng.random((2, drafts), dtype=np.float32),
        noise=rng.standard_normal((2, drafts, vocabulary), dtype=np.float32) if noise else None,
    )
    both._alike()
    exported, lowered = both.exported.draft(rows), both.lowered.draft(rows, sample=True)
    assert lowered.ids.shape == (2, drafts)
    np.testing.assert_array_equal(lowered.ids[:1], exported.ids[:1])
    np.testing.assert_allclose(lowered.q[0], exported.q[0], rtol=0, atol=1e-6)
    greedy = both.lowered.draft(rows)
    np.testing.assert_array_equal(greedy.ids[:1], lowered.ids[:1])


def pair(name: str) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    target = load_target(GOLDEN / "e2e" / name / "target")
    return target, load_drafter(GOLDEN / "e2e" / name / "drafter", target)


@pytest.mark.parametrize("name", PAIRS)
def test_target(name: str, tmp_path: Path) -> None:
    """Two slots and two padding rows at once, widths padded beyond what is counted: each row gives its own results."""
    target, drafter = pair(name)
    directory = GOLDEN / "e2e" / name
    reference = load_file(directory / "reference.safetensors")
    first = json.loads((directory / "prompts.json").read_text())["prompts"][0]
    ids = np.array(first["input_ids"] + first["greedy_new_tokens"])
    limits = Limits((4,), 2, 16, len(ids), drafter.spec.block_size, 12)
    graph = export_target(target.spec, drafter.spec, limits)
    session = CudaGraphs(tmp_path, target, drafter, limits, {"target": graph})
    width, padded = 5, 8
    rng = np.random.default_rng(0)
    slots, starts = np.array([1, 0, 2, 2]), np.zeros(4, np.int64)
    while starts[0] < len(ids) - 1:
        starts[1] = max(0, starts[0] - 3)  # row 1 repeats what row 0 ran before
        count = np.append(np.minimum(width, len(ids) - starts[:2]), [0, 0])
        chunks = rng.integers(0, target.spec.vocab_size, (4, padded))
        for row in range(2):
            chunks[row, : count[row]] = ids[starts[row] : starts[row] + count[row]]
        tap_row = rng.integers(0, limits.tap_rows - padded + 1, 4)
        before = {key: state.copy() for key, state in session._state.items()}
        out = session.run_target(chunks, starts, slots, count, tap_row, np.tile(np.arange(padded), (4, 1)))
        assert all(np.isfinite(value).all() for value in out.values())
        taps = before["taps"]
        for row in range(2):
            part = slice(starts[row], starts[row] + count[row])
            logits = out["logits"][row, : count[row]]
            np.testing.assert_allclose(logits, reference["logits"][part], rtol=0, atol=TOLERANCE)
            np.testing.assert_array_equal(out["argmax"][row, : count[row]], reference["logits"][part].argmax(-1))
            np.testing.assert_array_equal(out["best"][row], out["logits"][row].max(-1))
            taps[slots[row], tap_row[row] : tap_row[row] + count[row]] = reference["taps"][part]
        np.testing.assert_allclose(session._state["taps"], taps, rtol=0, atol=TOLERANCE)
        for key, state in session._state.items():
            if "cache" in key:
                for row in range(2):  # before the first of a call's rows, nothing changes
                    kept = np.s_[slots[row], :, : starts[row]]
                    np.testing.assert_array_equal(state[kept], before[key][kept])
        starts[0] += count[0]


def test_only_named_rows_go_through_the_head(tmp_path: Path) -> None:
    target, drafter = pair("llama")
    limits = Limits((2,), 2, 16, 32, drafter.spec.block_size, 8)
    graph = export_target(target.spec, drafter.spec, limits)
    session = CudaGraphs(tmp_path, target, drafter, limits, {"target": graph})
    ids = np.random.default_rng(1).integers(0, 131, (2, 6))
    two, none = np.arange(2), np.zeros(2, np.int64)
    every = session.run_target(ids, none, two, none + 6, none, np.tile(np.arange(6), (2, 1)))
    some = session.run_target(ids, none, two, none + 6, none, np.array([[5, 0], [2, 2]]))
    for row, wanted in enumerate(([5, 0], [2, 2])):
        np.testing.assert_allclose(some["logits"][row], every["logits"][row, wanted], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("precision", TYPES)
def test_types_node_by_node(name: str, precision: str, tmp_path: Path) -> None:
    target, drafter = pair(name)
    limits = Limits((1, 2), 2, 16, 32, drafter.spec.block_size, 8)
    index = write_weights(tmp_path, target, drafter, limits, precision)
    graphs = exported_pair(target.spec, drafter.spec, limits)
    backend, own = OrtCuda(precision), TYPES[precision]
    taps = BFLOAT16 if precision == "f16" else own
    for graph, sample in (("target", False), ("draft", False), ("draft", True), ("seed", False)):
        model = ir.serde.serialize_model(backend.lower(graphs[graph], index, limits, sample))
        onnx.checker.check_model(model, full_check=True)
        types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
        types |= {v.name: v.type.tensor_type.elem_type for v in model.graph.value_info}
        for node in model.graph.node:
            results = [types[name] for name in node.output]
            floats = [types[n] for n in node.input if types.get(n, onnx.TensorProto.INT64) != onnx.TensorProto.INT64]
            if node.op_type == "LinearFloat":
                assert (results, floats) == ([FLOAT], [own, own])
            elif node.op_type.startswith("Draft"):
                assert results[1:] == [FLOAT] * (len(results) - 1)
                # base, temperature, uniforms, noise; hidden and the chain's matrices; the confidence head's two.
                assert floats == [FLOAT, own, FLOAT, FLOAT, FLOAT, own, own, FLOAT, FLOAT]
            elif node.op_type in ("SlotRead", "SlotWrite"):
                assert {*floats, *results} == {taps}
            elif node.op_type.endswith("Attention") or node.op_type == "ContextWrite":
                tables = [types[name] for name in node.input if name.endswith((".cos", ".sin"))]
                assert tables == [FLOAT, FLOAT]
                assert sorted([*floats, *results]) == sorted(tables + [own] * (len(floats) + len(results) - 2))
            elif node.op_type == "BestToken":
                assert (results[1:], floats) == ([FLOAT], [FLOAT])
            elif node.op_type == "Cast":
                assert precision == "f16"
                assert {floats[0], results[0]} == {own, taps}
            elif floats and node.op_type != "Shape":
                near_taps = any(name.startswith("drafter.context.") for name in node.input if "layers" not in name)
                assert {*floats, *results} == {taps if near_taps else own}, node.op_type
        assert types.get("logits", FLOAT) == FLOAT


def test_what_is_left_of_each_graph(tmp_path: Path) -> None:
    """One operator a kernel, and little beside: a node more a layer would show here."""
    target, drafter = pair("qwen3")
    limits = Limits((1, 2), 2, 16, 32, drafter.spec.block_size, 8)
    index = write_weights(tmp_path, target, drafter, limits)
    graphs = exported_pair(target.spec, drafter.spec, limits)
    lowered = {name: OrtCuda().lower(graph, index, limits) for name, graph in graphs.items()}
    nodes = {name: [node.op_type for node in model.graph] for name, model in lowered.items()}
    target_layer = ["NormLinear", "NormedCausalAttention", "LinearAdd", "NormSwiGLU", "LinearAdd"]
    head = ["Concat", "Unsqueeze", "Expand", "GatherElements", "RMSNormalization", "LinearFloat", "BestToken"]
    assert nodes["target"] == ["Gather", *target_layer * target.spec.num_layers, *head, "SlotWrite"]
    layers = drafter.spec.num_layers
    context = ["SlotRead", "Linear", "RMSNormalization", *["Linear", "ContextWrite"] * layers]
    assert nodes["seed"] == context
    draft_layer = ["NormLinear", "BlockAttention", "LinearAdd", "NormSwiGLU", "LinearAdd"]
    block = ["Concat", "Expand", "Unsqueeze", "Concat", "Gather"]
    tail = ["RMSNormalization", "Slice", "LinearFloat", "DraftMarkovC"]
    assert [op for op in nodes["draft"] if op not in ("Shape", "Sub")] == [
        *context, *block, *draft_layer * layers, *tail,
    ]  # fmt: skip
    for model in lowered.values():
        used = {node.op_type for node in model.graph if node.domain == DOMAIN}
        assert {name for _, name, _ in model.functions} == used <= SIGNATURES.keys()
        assert not any(name in index.weights for name in model.graph.initializers)
    (chain,) = (node for node in lowered["draft"].graph if node.op_type == "DraftMarkovC")
    assert chain.attributes["sample"].as_int() == 0


def test_biases_stay_beside_the_products(tmp_path: Path) -> None:
    case = drafter_case("attention_bias_true", tmp_path)
    ops = [value.name for value in case.session.lowered._sessions["draft"].get_inputs() if value.name.endswith("bias")]
    assert any(name.endswith("qkv.bias") for name in ops)
    assert any(name.endswith("kv.bias") for name in ops)


@dataclass(frozen=True)
class Shapes:
    """As much of a weights index as lowering reads, for a graph without a checkpoint."""

    weights: dict[str, SimpleNamespace]


def test_a_target_with_every_bias_and_one_tap() -> None:
    spec = replace(TARGET, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, num_layers=2)
    limits = Limits((1,), 2, 16, 32, DRAFTER.block_size, 8)
    graph = export_target(spec, replace(DRAFTER, taps=(0,)), limits)
    named = {name: value for name, value in graph.model.graph.initializers.items() if value.const_value is None}
    index: Any = Shapes({n: SimpleNamespace(shape=tuple(v.shape.numpy()), dtype="float32") for n, v in named.items()})
    model = OrtCuda().lower(graph, index, limits)
    onnx.checker.check_model(ir.serde.serialize_model(model), full_check=True)
    gated = ["NormLinear", "Add", "Split", "Sigmoid", "Mul", "Mul"]
    layer = ["NormLinear", "Add", "NormedCausalAttention", "Linear", "Add", "Add", *gated, "Linear", "Add", "Add"]
    head = ["Unsqueeze", "Expand", "GatherElements", "RMSNormalization", "LinearFloat", "BestToken"]
    assert [node.op_type for node in model.graph] == ["Gather", *layer * 2, *head, "SlotWrite"]
