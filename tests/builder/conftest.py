"""Stand-ins for the stages of a build: its order, its bundle and its failures are testable without any model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import builder
from builder import backends
from builder.spec import DrafterCheckpoint, DrafterSpec, SourceInfo, TargetCheckpoint, TargetSpec
from runtime.errors import CheckpointError
from runtime.manifest import Backend, EngineFile, Limits, StateTensor
from tests.examples import DRAFTER, Stages, Tensors


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    """Replaces every stage of `builder.build.build` that another module owns."""
    state = Stages()

    def load_target(path: Path) -> TargetCheckpoint:
        state.enter("load_target")
        if not Path(path).exists():
            raise CheckpointError(path, "no such file or directory", remedy="Check the path")
        source = SourceInfo("huggingface", "tiny", {"config.json": "00"})
        return TargetCheckpoint(Path(path), state.target, Tensors(state.shapes), state.tokenizer, source)

    def load_drafter(path: Path, target: TargetCheckpoint) -> DrafterCheckpoint:
        state.enter("load_drafter")
        source = SourceInfo("deepspec", "tiny-dspark", {"config.json": "11"})
        return DrafterCheckpoint(Path(path), DRAFTER, Tensors({"fc.weight": (24, 48)}), source)

    def write_weights(dest: Path, target: object, drafter: object, limits: Limits, precision: str) -> SimpleNamespace:
        (dest / "weights.bin").write_bytes(b"w" * 100)
        state.enter("write_weights")
        return SimpleNamespace(bytes=100)

    def export_graphs(target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> dict[str, object]:
        state.enter("export_graphs")
        return {"target": None}

    def compile_engines(graphs: object, weights: object, limits: Limits, dest: Path) -> tuple[EngineFile, ...]:
        for batch in limits.batches:
            (dest / f"target.b{batch}.onnx").write_bytes(b"t%d" % batch)
        state.enter("compile")
        names = ("target", "draft", "seed")
        return tuple(EngineFile(name, batch, f"target.b{batch}.onnx") for name in names for batch in limits.batches)

    def state_tensors(target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> tuple[StateTensor, ...]:
        rows = limits.max_seq_len + limits.block_size
        cache = (target.num_kv_heads, rows, target.head_dim)
        ring = (drafter.num_kv_heads, limits.window, drafter.head_dim)
        return (
            *(StateTensor(f"cache.{i}", "cache", cache, "float32") for i in range(2 * target.num_layers)),
            *(StateTensor(f"ring.{i}", "ring", ring, "float32") for i in range(2 * drafter.num_layers)),
            StateTensor("taps", "taps", (limits.block_size + 1, len(drafter.taps) * target.hidden_size), "float32"),
        )

    def record(dest: Path, target: object, drafter: object, weights: object, limits: Limits) -> None:
        state.enter("record")
        (dest / "vectors.npz").write_bytes(b"v")

    backend = SimpleNamespace(
        compile=compile_engines,
        state=state_tensors,
        loaded_bytes=lambda graphs, weights: weights.bytes,
        working_bytes=lambda target, limits, state: 0,
        compile_seconds=lambda target, limits: 0.2,
        built=(),
        describe=lambda: Backend("ort-cpu", "onnxruntime", "1.20.0", "any", ""),
    )
    stand_ins = {
        "checkpoints": SimpleNamespace(load_target=load_target, load_drafter=load_drafter),
        "weights": SimpleNamespace(write_weights=write_weights),
        "export": SimpleNamespace(export_graphs=export_graphs),
        "backends": SimpleNamespace(
            check=backends.check, get=lambda options: backend, BackendOptions=backends.BackendOptions
        ),
        "vectors": SimpleNamespace(record=record),
    }
    for name, module in stand_ins.items():
        monkeypatch.setattr(builder, name, module, raising=False)
    return state
