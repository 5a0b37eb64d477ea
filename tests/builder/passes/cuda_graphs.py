"""The graphs of the CUDA lowering on ONNX Runtime's CPU, in float32: no kernels there, so their bodies are what
runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from builder.backends.ort_cuda import OrtCuda
from builder.export import Graph
from builder.spec import DrafterCheckpoint, TargetCheckpoint
from builder.weights import WeightIndex, write_weights
from runtime.manifest import Limits
from runtime.sessions.base import DraftOut, DraftRows, Int64, SeedRows
from tests.golden.neutral import NeutralSession


def cpu_session(model: ir.Model) -> Any:
    """A session of a small model, without a file."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    data = ir.serde.serialize_model(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


class CudaGraphs(NeutralSession):
    """As `NeutralSession`, over the lowered graphs: taps are state, weights are inputs."""

    def __init__(
        self,
        dest: Path,
        target: TargetCheckpoint,
        drafter: DrafterCheckpoint,
        limits: Limits,
        graphs: Mapping[str, Graph],
    ) -> None:
        self.limits = limits
        backend = OrtCuda("f32")
        index = write_weights(dest, target, drafter, limits)
        self._weights = {name: _weight(index, name) for name in index.weights}
        self._sessions = {name: cpu_session(backend.lower(graph, index, limits)) for name, graph in graphs.items()}
        if "draft" in graphs:
            self._sessions["draft_sampled"] = cpu_session(backend.lower(graphs["draft"], index, limits, sample=True))
        self._state = {
            state.name: np.zeros((limits.slots + 1, *state.shape), np.float32)
            for state in backend.state(target.spec, drafter.spec, limits)
        }
        self.debug: dict[str, NDArray[Any]] = {}

    def run_target(
        self, ids: Int64, start: Int64, slot: Int64, count: Int64, tap_row: Int64, head_rows: Int64
    ) -> dict[str, NDArray[Any]]:
        inputs = {"ids": ids, "start": start, "slot": slot, "count": count, "tap_row": tap_row, "head_rows": head_rows}
        return self._run("target", inputs)

    def seed(self, rows: SeedRows) -> None:
        window = self.limits.window
        if rows.count.max() <= window:
            row = np.arange(rows.count.max())
            self._run("seed", {"row": row, "start": rows.start, "count": rows.count, "slot": rows.slot})
            return
        # The rows are the same for every sequence of a call, so those of long chunks go one by one.
        for start, count, slot in zip(rows.start, rows.count, rows.slot, strict=True):
            row = np.arange(max(0, count - window), count)
            one = {"start": start + row[:1], "count": np.array([len(row)]), "slot": np.array([slot])}
            self._run("seed", {"row": row, **one})

    def draft(self, rows: DraftRows, sample: bool = False) -> DraftOut:
        self._draft = "draft_sampled" if sample else "draft"
        return super().draft(rows)

    def _run(self, graph: str, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        session = self._sessions[self._draft if graph == "draft" else graph]
        feed = {**self._state, **self._weights, **inputs}
        names = [output.name for output in session.get_outputs()]
        found = session.run(None, {value.name: feed[value.name] for value in session.get_inputs()})
        out = dict(zip(names, found, strict=True))
        for name in [name for name in names if name.endswith(".new")]:
            self._state[name.removesuffix(".new")] = out.pop(name)
        return out


def _weight(index: WeightIndex, name: str) -> NDArray[np.float32]:
    weight = index.weights[name]
    return np.memmap(index.path, np.float32, "r", weight.offset, weight.shape)
