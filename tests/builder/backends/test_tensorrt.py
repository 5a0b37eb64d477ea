"""TensorRT bundles, built through TensorRT-RTX without a GPU: what is in them, the same bytes each time, and faults.

What the graphs compute is tests/runtime/sessions/test_tensorrt.py's affair: here nothing is executed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from builder.backends import BackendOptions
from builder.backends.tensorrt import TensorRt
from builder.backends.tensorrt_engine import Job, Place
from builder.backends.tensorrt_worker import Workers
from builder.build import BuildOptions, build
from builder.checkpoints.deepspec import load_deepspec
from builder.weights import write_weights
from runtime.engine_records import STAGES, EngineRecord, read_records
from runtime.errors import BackendUnavailable, ProfileError
from runtime.libraries import installed
from runtime.manifest import KERNELS_FILE, Backend, Limits, Manifest, Serving, state_bytes
from runtime.widths import Widths
from tests.support import GOLDEN, TINY, TINY_PAIRS, SilentProgress, exported_drafter, kernel_library, random_target

RTX = installed("tensorrt-rtx-cu13-bindings")
needs_rtx = pytest.mark.skipif(RTX is None, reason="tensorrt-rtx is not installed")

SMALL = replace(
    TINY, backend="tensorrt-rtx", gpu="sm89", batches=(1, 2), window=16, max_seq_len=48, prefill_chunk=8, max_draft=7
)
DRAFT = {
    "no_markov": "DraftPlain",
    "vanilla_r16": "DraftMarkov",
    "gated_r16": "DraftGated",
    "rnn_r16": "DraftRnn",
    "no_confidence": "DraftMarkov",
}


def unknown_operator(name: str = "Unheard", domain: str = "of") -> bytes:
    """A graph of one operator."""
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2]) for n in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node(name, ["x"], ["y"], domain=domain)], "g", [x], [y])
    opsets = [onnx.helper.make_opsetid("", 20), *([onnx.helper.make_opsetid(domain, 1)] if domain else [])]
    return onnx.helper.make_model(graph, opset_imports=opsets).SerializeToString()


def build_pair(out: Path, pair: str = "qwen3", plugins: Path | None = None, **changes: object) -> Manifest:
    profile = replace(SMALL, **changes)  # type: ignore[arg-type]
    options = BuildOptions(TINY_PAIRS / pair / "target", TINY_PAIRS / pair / "drafter", out, profile, plugins=plugins)
    return build(options, SilentProgress()).manifest


@pytest.fixture(scope="module")
def with_kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    out = tmp_path_factory.mktemp("rtx") / "bundle"
    library = kernel_library(out.with_name("lib.so"))
    return out, build_pair(out, plugins=library, precision="bf16")


@needs_rtx
def test_an_engine_for_each_stage_batch_and_width(with_kernels: tuple[Path, Manifest]) -> None:
    out, manifest = with_kernels
    widths = Widths.of(manifest.limits, manifest.serving)
    wanted = {(s, b, w) for s in STAGES for b in manifest.limits.batches for w in widths.of_stage(s)}
    assert {(e.graph, e.batch, e.width) for e in manifest.engines} == wanted
    records = {record.file: record for record in read_records(out)}
    for engine in manifest.engines:
        record = records.pop(engine.file)
        assert (record.stage, record.batch, record.width) == (engine.graph, engine.batch, engine.width)
        assert record.engine_bytes == manifest.files[engine.file].size == (out / engine.file).stat().st_size
    assert records == {}
    assert manifest.backend == Backend("tensorrt-rtx", "tensorrt-rtx-cu13-bindings", str(RTX), "sm_89", "bf16")
    assert manifest.plugins[0].version == manifest.files[KERNELS_FILE].sha256[:12]
    report = json.loads((out / "report.json").read_text())
    assert report["engines"].keys() == {engine.file for engine in manifest.engines}
    assert all(engine["seconds"] > 0 and engine["peak_memory"] > 1 << 20 for engine in report["engines"].values())


@needs_rtx
def test_the_network_has_plugins_and_state_in_place(with_kernels: tuple[Path, Manifest]) -> None:
    out, manifest = with_kernels
    state = {tensor.name: tensor for tensor in manifest.state}
    caches = {name for name in state if "_cache." in name}
    rings = {name for name in state if name.startswith("ring_")}
    layers = len(caches) // 2
    plugins = {
        "target": {"BestToken": 1, "LinearFloat": 1, "NormedCausalAttention": layers, "SlotWrite": 1},
        "seed": {"ContextWrite": len(rings) // 2, "SlotRead": 1},
        "draft": {
            "BlockAttention": len(rings) // 2,
            "ContextWrite": len(rings) // 2,
            "DraftMarkovC": 1,
            "LinearFloat": 1,
            "SlotRead": 1,
        },
    }
    written = {"target": {*caches, "taps"}, "seed": rings, "draft": rings}
    vocab = manifest.models.vocab_size
    for record in read_records(out):
        kind = "target" if record.stage in ("verify", "prefill") else record.stage.partition("_")[0]
        assert record.plugins == plugins[kind]
        assert record.layers["PLUGIN_V3"] == sum(plugins[kind].values())
        assert record.aliased == {f"{name}.new": name for name in written[kind]}
        assert (record.copied, record.copied_bytes, record.captured) == ({}, 0, True)
        inputs = {tensor.name: tensor for tensor in record.inputs}
        outputs = {tensor.name: tensor for tensor in record.outputs}
        for name in written[kind]:
            assert inputs[name].shape == outputs[f"{name}.new"].shape == (manifest.limits.slots + 1, *state[name].shape)
            assert inputs[name].dtype == state[name].dtype
        if kind == "target":
            heads = record.width if record.stage == "verify" else 1
            assert inputs["ids"].shape == (record.batch, record.width)
            assert outputs["logits"].shape == (record.batch, heads, vocab)
            assert (outputs["argmax"].dtype, outputs["best"].dtype) == ("int64", "float32")
        elif kind == "seed":
            assert inputs["row"].shape == (record.width,)
        else:
            wide = vocab if record.stage == "draft_noise" else 1
            assert inputs["noise"].shape == (record.batch, record.width, wide)
            assert outputs["q"].shape[2] == (1 if record.stage == "draft" else vocab)


@needs_rtx
def test_weights_are_inputs_and_not_in_the_engines(with_kernels: tuple[Path, Manifest]) -> None:
    out, manifest = with_kernels
    entries = {e["name"]: e for e in json.loads((out / "weights.json").read_text())["weights"]}
    used: set[str] = set()
    for record in read_records(out):
        used |= set(record.weights)
        inputs = {tensor.name: tensor for tensor in record.inputs}
        for name in record.weights:
            assert (inputs[name].dtype, list(inputs[name].shape)) == (entries[name]["dtype"], entries[name]["shape"])
        assert record.weight_bytes > 0
    assert used == set(entries)
    assert manifest.memory.weights == manifest.files["weights.bin"].size


@needs_rtx
@pytest.mark.parametrize(
    ("name", "gpu", "kernels"),
    [
        ("no_markov", "sm_86", True),
        ("vanilla_r16", "sm_120", True),
        ("gated_r16", "sm_86", True),
        ("rnn_r16", "sm_120", True),
        ("no_confidence", "sm_86", True),
        ("vanilla_r16", "sm_86", False),
        ("rnn_r16", "sm_120", False),
    ],
)
def test_golden_drafters_for_two_architectures(name: str, gpu: str, kernels: bool, tmp_path: Path) -> None:
    drafter = load_deepspec(GOLDEN / "drafter" / name)
    target = random_target(drafter.spec)
    limits = Limits((2,), 2, 32, 96, drafter.spec.block_size, 8)
    graphs = exported_drafter(target.spec, drafter.spec, limits)
    found: list[tuple[EngineRecord, ...]] = []
    for folder in (tmp_path / "a", tmp_path / "another"):
        folder.mkdir()
        index = write_weights(folder, target, drafter, limits)
        options = BackendOptions("tensorrt-rtx", "f32", Serving(drafter.spec.block_size, 0.0), gpu, kernels)
        TensorRt(options).compile(graphs, index, limits, folder)
        found.append(read_records(folder))
    assert found[0] == found[1]
    for record in found[0]:
        assert (tmp_path / "a" / record.file).read_bytes() == (tmp_path / "another" / record.file).read_bytes()
    (draft,) = (record for record in found[0] if record.stage == "draft")
    operator = DRAFT[name] + ("C" if drafter.spec.confidence != "none" else "")
    rings = {f"ring_{kv}.{i}.new": f"ring_{kv}.{i}" for i in range(drafter.spec.num_layers) for kv in "kv"}
    if kernels:
        assert draft.plugins[operator] == 1
        assert (draft.aliased, draft.copied) == (rings, {})
    else:
        assert draft.plugins == {}
        assert "PLUGIN_V3" not in draft.layers
        assert (draft.aliased, draft.copied) == ({}, rings)


@needs_rtx
def test_without_kernels_state_is_copied_and_counted(tmp_path: Path) -> None:
    manifest = build_pair(tmp_path / "out", "llama", gpu="sm86", batches=(1,))
    assert manifest.plugins == ()
    slots = manifest.limits.slots + 1
    size = {tensor.name: state_bytes(tensor, slots) for tensor in manifest.state}
    for record in read_records(tmp_path / "out"):
        assert (record.plugins, record.aliased) == ({}, {})
        assert record.copied_bytes == sum(size[name] for name in record.copied.values()) > 0
    vocab, block = manifest.models.vocab_size, manifest.limits.block_size
    memory = manifest.memory
    buffers = 4 * vocab * (3 * block + 1)
    assert memory.total == memory.weights + 2 * slots * memory.per_slot + buffers


@needs_rtx
@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (b"no graph", "its parser refuses this graph (draft, batch 1, width 4, sm_89); found "),
        (unknown_operator(), "its parser refuses this graph (draft, batch 1, width 4, sm_89); found "),
    ],
    ids=["no graph", "unknown operator"],
)
def test_a_graph_that_the_library_refuses(tmp_path: Path, graph: bytes, message: str) -> None:
    (tmp_path / "graph.onnx").write_bytes(graph)
    place = Place("draft.engine", "draft", 1, 4)
    with pytest.raises(BackendUnavailable) as caught:
        Workers().run(Job("tensorrt-rtx", "sm_89", str(tmp_path / "graph.onnx"), str(tmp_path), place, ()))
    assert str(caught.value).startswith(f"tensorrt-rtx {RTX}: {message}")
    assert "no reason given" not in str(caught.value)


@needs_rtx
def test_an_engine_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "graph.onnx").write_bytes(unknown_operator("Neg", ""))
    place = Place("absent/draft.engine", "draft", 1, 4)
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        Workers().run(Job("tensorrt-rtx", "sm_89", str(tmp_path / "graph.onnx"), str(tmp_path), place, ()))


def test_a_library_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dies = tmp_path / "python"
    dies.write_text("#!/bin/sh\ncat >/dev/null\necho 'malloc(): corrupted' >&2\nkill -ABRT $$\n")
    dies.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dies))
    with pytest.raises(BackendUnavailable) as caught:
        Workers().run({})
    assert "the library's process died (SIGABRT); found malloc(): corrupted" in str(caught.value)


@needs_rtx
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, workers_of: Callable[[int], list[int]]) -> None:
    profile = tmp_path / "small.toml"
    profile.write_text('backend = "tensorrt-rtx"\ngpu = "sm89"\nbatches = [1, 2, 4]\nwindow = 64\nmax_seq_len = 128\n')
    pair, out = TINY_PAIRS / "qwen3", tmp_path / "to" / "out"
    paths = {"--target": pair / "target", "--drafter": pair / "drafter", "--out": out, "--profile": profile}
    options = [str(part) for item in paths.items() for part in item]
    process = subprocess.Popen(
        [sys.executable, "-m", "builder.cli", "build", *options], stderr=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    for _ in range(1200):
        if (workers := workers_of(process.pid)) or process.poll() is not None:
            break
        time.sleep(0.1)
    assert workers
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0
    assert b"Traceback" not in error
    assert list(out.parent.iterdir()) == []
    assert not any(Path(f"/proc/{worker}/stat").exists() for worker in workers)


@pytest.fixture
def workers_of() -> Callable[[int], list[int]]:
    """Process ids of the engines being built by a process."""

    def find(parent: int) -> list[int]:
        found = []
        for entry in os.listdir("/proc"):
            try:
                stat = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split() if entry.isdigit() else []
                line = Path("/proc", entry, "cmdline").read_bytes() if stat else b""
            except OSError:
                continue
            if stat and int(stat[1]) == parent and b"tensorrt_worker" in line:
                found.append(int(entry))
        return found

    return find


def test_a_gpu_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="--gpu: tensorrt-rtx has to be told which GPU will serve"):
        build_pair(tmp_path / "out", gpu=None)
    assert not (tmp_path / "out").exists()
