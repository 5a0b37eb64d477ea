"""The bench of the card as far as a machine without one can tell: what is bound, counted, summed up and drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from runtime import Engine, generate
from runtime.bundle import open_bundle
from runtime.manifest import Limits
from tests.bench.decoding import options_of
from tests.bench.plan import BenchPrompt
from tests.bench_gpu import serving
from tests.bench_gpu.bench import main
from tests.bench_gpu.drafter import Place, Step, make_state
from tests.bench_gpu.figures import figures, summary_text
from tests.bench_gpu.graphs import random_weights, weight_shapes, write_graph
from tests.bench_gpu.ort_graph import OrtGraph
from tests.bench_gpu.pictures import draw_all
from tests.bench_gpu.reference import Inputs, TorchDrafter
from tests.bench_gpu.serving import (
    MODES,
    Decoded,
    TorchDecoding,
    decode,
    measure_pair,
    measure_protocol,
    serve_answers,
    target_spec,
    warm,
)
from tests.bench_gpu.shapes import DRAFTER, small

SPEC = small(DRAFTER)
WINDOW = 16
LIMITS = Limits((1, 2), 2, WINDOW, 64, SPEC.block_size, 1)


def test_tensors_are_bound_where_they_lie(tmp_path: Path) -> None:
    state, x = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("state", "x"))
    new, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("state.new", "y"))
    nodes = [helper.make_node("Add", ["state", "x"], ["state.new"]), helper.make_node("Mul", ["x", "x"], ["y"])]
    graph = helper.make_graph(nodes, "g", [state, x], [new, y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "g.onnx")
    session = OrtGraph(tmp_path / "g.onnx", None, device="cpu")
    tensors = {"state": torch.tensor([1.0, 2.0]), "x": torch.tensor([3.0, 4.0]), "y": torch.zeros(2)}
    step = session.bind(tensors, 1)
    step()
    tensors["x"].fill_(1.0)
    step()
    assert tensors["state"].tolist() == [5.0, 7.0]
    assert tensors["y"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="no tensor for 'x'"):
        session.bind({"state": tensors["state"]}, 2)
    with pytest.raises(ValueError, match=r"expected a contiguous torch\.float32, found torch\.float64"):
        session.bind({**tensors, "x": torch.zeros(2, dtype=torch.float64)}, 2)


def test_the_step_and_its_baseline_agree(tmp_path: Path) -> None:
    """The lowered graph in float32 over bound tensors, against torch's step over the same ones."""
    model = write_graph(tmp_path, SPEC, LIMITS, "f32")
    assert model.stat().st_size < 1 << 20, "weights are in the file"
    weights = random_weights(SPEC, LIMITS, "f32", "cpu")
    assert {name: tuple(value.shape) for name, value in weights.items()} == weight_shapes(SPEC, LIMITS)
    state = make_state(SPEC, 3, WINDOW, torch.float32, "cpu")
    baseline = TorchDrafter(SPEC, weights, 2, WINDOW, "folded")
    for i in range(SPEC.num_layers):
        baseline.k[i, :2, :, :WINDOW] = state[f"ring_k.{i}"][:2]
        baseline.v[i, :2, :, :WINDOW] = state[f"ring_v.{i}"][:2]
    untouched = {name: value[2].clone() for name, value in state.items()}
    step = Step(OrtGraph(model, None, device="cpu"), SPEC, weights, state, 3, 1)
    place = Place(37, WINDOW, (0, 1, 3))
    step.place(SPEC, place)
    step.run()
    given = {name: value[:2] for name, value in step.inputs.items() if name != "slot"}
    assert given["new_len"].tolist() == [SPEC.block_size + 1] * 2
    assert step.inputs["valid_len"].tolist() == [WINDOW, WINDOW, 0]
    ids, confidence = baseline(Inputs(**given, taps=state["taps"][:2]))
    torch.testing.assert_close(step.outputs["ids"][:2], ids)
    torch.testing.assert_close(step.outputs["confidence_logits"][:2], confidence, rtol=0, atol=1e-4)
    for i in range(SPEC.num_layers):
        torch.testing.assert_close(state[f"ring_k.{i}"][:2], baseline.k[i, :2, :, :WINDOW], rtol=0, atol=1e-5)
    assert all(torch.equal(value[2], untouched[name]) for name, value in state.items())


@pytest.fixture
def engine(tiny_bundle: Callable[..., Path]) -> Iterator[Engine]:
    with Engine(tiny_bundle("llama"), threads=1) as engine:
        yield engine


@pytest.fixture
def prompts(engine: Engine) -> list[BenchPrompt]:
    chosen, vocab = random.Random(3), engine.bundle.manifest.models.vocab_size
    return [BenchPrompt(f"p/{i}", ("code", "chat")[i % 2], tuple(chosen.choices(range(vocab), k=9))) for i in range(6)]


def test_requests_that_decode_together(engine: Engine, prompts: list[BenchPrompt]) -> None:
    wanted = [generate(engine, [p.ids], max_new_tokens=24, ignore_eos=True)[0].token_ids for p in prompts[:3]]
    for mode in MODES:
        made = decode(engine, prompts[:3], 24, options_of(engine, mode))
        assert list(made.outputs) == wanted
        assert made.rate > 0
        # How much the adaptive mode drafts depends on the clock.
        assert mode == "adaptive" or (made.tokens_per_round > 1) == (mode == "full_block")
    assert engine.idle
    with pytest.raises(RuntimeError, match="before all 3 had begun"):
        decode(engine, prompts[:3], 1, options_of(engine, "plain"))


def test_the_pair_against_torch(engine: Engine, prompts: list[BenchPrompt], monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        def __init__(self, engine: Engine, batch: int, rows: int) -> None:
            assert rows >= 9 + 24
            self.batch = batch

        def __call__(self, prompts: Sequence[BenchPrompt], tokens: int, read: bool) -> Decoded:
            return Decoded(2.0 if read else 4.0, 1.0, ((0,) * tokens,) * self.batch)

    monkeypatch.setattr(serving, "TorchDecoding", Torch)
    result: Any = measure_pair(dict.fromkeys(MODES, engine), prompts, (1, 4), 24, 2)
    for c, point in result["points"].items():
        assert point["tokens_per_second"]["plain"]["count"] == 2
        assert point["plain_to_torch"] == pytest.approx(2 * point["plain_to_torch_unread"])
        assert point["parts_from_plain_at"]["full_block"] == [None] * int(c)
        assert point["drafted"]["full_block"]["tokens_per_round"] > 1
    spec = target_spec(engine.bundle.manifest.models.target)
    assert (spec.family, spec.rope.kind) == ("llama", "default")


def test_torch_decodes_what_a_bundle_holds(
    engine: Engine, prompts: list[BenchPrompt], tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes from the manifest, weights by their index; without a CUDA graph here, the same launches one by one."""
    monkeypatch.setattr(serving, "captured", lambda step: SimpleNamespace(replay=step))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bundle = open_bundle(tiny_bundle("llama", backend="ort-cuda"))
    torch_decoding = TorchDecoding(SimpleNamespace(bundle=bundle), 3, 64, "cpu")  # type: ignore[arg-type]
    expected = decode(engine, prompts[:3], 24, options_of(engine, "plain"))
    for read in (True, False):
        made = torch_decoding(prompts[:3], 24, read)
        assert made.rate > 0
        assert made.outputs == (expected.outputs if read else tuple((ids[0],) for ids in expected.outputs))


def test_every_size_is_warmed(engine: Engine, prompts: list[BenchPrompt]) -> None:
    warm(dict.fromkeys(MODES, engine), prompts)
    limits, stats = engine.bundle.manifest.limits, engine.stats()
    assert stats.submitted == sum(limits.batches) * (limits.block_size + 1)
    assert stats.proposed[-1] > 0


def test_whole_answers(engine: Engine, prompts: list[BenchPrompt]) -> None:
    answers = serve_answers(engine, prompts, 2, {})
    assert len(answers) == len(prompts)
    assert {answer.reason for answer in answers} <= {"stop", "length"}
    assert max(answer.tokens for answer in answers) <= engine.bundle.manifest.limits.max_seq_len - 9
    result: Any = measure_protocol(dict.fromkeys(MODES, engine), prompts, (1, 3), 2)
    assert {c: point["plain"]["answers"] for c, point in result["points"].items()} == {"1": 2, "3": 6}
    for point in result["points"].values():
        assert point["plain"]["speedup"] == point["plain"]["tokens_per_round"] == 1.0
        assert point["full_block"]["tokens_per_answer"] == point["plain"]["tokens_per_answer"]
        assert set(point["full_block"]["tokens_per_round_by_kind"]) == {"code", "chat"}


def _summary(value: float) -> dict[str, float]:
    return {"median": value, "min": value, "max": value, "count": 1}


RESULTS: dict[str, Any] = {
    "drafter": {
        "copy_bandwidth": 4.2e12,
        "memory": {"session": 1e8, "batch 1": 1.5e8},
        "batches": {
            1: {
                "call_ms": {k: _summary(v) for k, v in {"ours": 1.1, "torch": 1.2, "bare": 1.0, "eager": 5.0}.items()},
                "torch_attention": "folded", "ring_ms": 0.01, "floor_ms": 0.8, "floor_share": 0.72,
                "to_bare_and_ring": 1.09, "to_torch": 0.92, "same_ids": 1.0, "confidence_difference": 0.01,
            }
        },
    },
    "flatness": {"position, batch 1": {"call_ms": {"full": _summary(1.0), "half": _summary(1.1)}, "spread": 0.1}},
    "kernels": {"linear": [{"name": "qkv, 7 rows", "ms": 0.02, "floor_ms": 0.015, "torch_ms": 0.03}]},
    "pair": {
        "points": {
            "1": {
                "medians": {"plain": 900.0, "full_block": 1500.0, "adaptive": 1400.0, "torch": 800.0},
                "plain_to_torch": 1.1, "plain_to_torch_unread": 0.9,
                "drafted": {"full_block": {"speedup": 1.7, "tokens_per_round": 2.5}},
            }
        }
    },
    "protocol": {
        "answer": 1024,
        "points": {
            "1": {m: {"user_rate": 9.0, "speedup": 1.0, "tokens_per_round": 2.0, "answers": 8} for m in MODES}
        },
    },
    "device": {"error": "RuntimeError: no"},
}  # fmt: skip


def test_figures_and_summary() -> None:
    made = {figure.name: figure for figure in figures(RESULTS)}
    assert made["draft step, batch 1 / (bare matmuls + ring)"].reached is True
    assert made["draft step, batch 1: share of the byte floor"].reached is True
    assert made["draft step's memory above weights and rings"].value == 150
    assert made["step time by position, batch 1"].reached is False
    assert made["linear, qkv, 7 rows: share of the byte floor"].value == pytest.approx(0.75)
    assert made["plain / torch, 1 at once"].reached is True
    assert made["plain / torch unread, 1 at once"].reached is None
    assert made["full block / plain / τ, 1 at once"].value == pytest.approx(0.68)
    machine = dict.fromkeys(("card", "driver", "cuda", "torch", "onnxruntime", "date", "commit"), "x")
    text = summary_text(machine, RESULTS)
    assert "device failed: RuntimeError: no" in text
    assert "not reached: 10 instead of 5" in text


def test_pictures(tmp_path: Path) -> None:
    names = [path.name for path in draw_all(RESULTS, tmp_path, "a card")]
    assert names == ["drafter.png", "flatness.png", "pair.png", "protocol.png"]
    assert all((tmp_path / name).stat().st_size > 5000 for name in names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_machine_without_a_card_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
