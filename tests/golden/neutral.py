"""The exported graphs as they are, before any back end lowers them, on ONNX Runtime: whole slot-indexed state goes in
and comes out (copied, which is what a back end is there to avoid), every row of a batch in one call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from builder.backends.ort_cpu import OrtCpu
from builder.export import Graph
from builder.passes.base import AttachWeights, apply
from builder.spec import DrafterCheckpoint, TargetCheckpoint
from builder.weights import write_weights
from runtime.manifest import Limits
from runtime.sessions.base import DraftOut, DraftRows, Int64, SeedRows

PADDING = 2
"""Rows on the scratch slot in every draft: ScatterND then meets duplicate indices there."""


class NeutralSession:
    """As much of a session as the golden cases need, over any of the graphs ``target``, ``draft`` and ``seed``."""

    def __init__(
        self,
        dest: Path,
        target: TargetCheckpoint,
        drafter: DrafterCheckpoint,
        limits: Limits,
        graphs: Mapping[str, Graph],
    ) -> None:
        self.limits = limits
        index = write_weights(dest, target, drafter, limits)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self._sessions = {}
        for name, graph in graphs.items():
            path = dest / f"{name}.neutral.onnx"
            ir.save(apply(graph.model, [AttachWeights(index)]), path)
            self._sessions[name] = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._state = {
            s.name: np.zeros((limits.slots + 1, *s.shape), np.float32)
            for s in OrtCpu().state(target.spec, drafter.spec, limits)
        }
        self.debug: dict[str, NDArray[Any]] = {}

    def target(self, ids: Int64, start: Int64, slot: Int64, head_rows: Int64) -> dict[str, NDArray[Any]]:
        return self._run("target", {"ids": ids, "start": start, "slot": slot, "head_rows": head_rows})

    def seed(self, rows: SeedRows) -> None:
        # The graph takes a chunk of at most W rows, of which each row of the batch has the first `count`.
        first = np.maximum(0, rows.count - self.limits.window)
        count = rows.count - first
        taps = np.full((len(count), count.max(), self._state["taps"].shape[2]), 1e3, np.float32)
        for row, slot in enumerate(rows.slot):
            taps[row, : count[row]] = self._state["taps"][slot, first[row] : rows.count[row]]
        self._run("seed", {"taps": taps, "start": rows.start + first, "count": count, "slot": rows.slot})

    def draft(self, rows: DraftRows) -> DraftOut:
        padding = {"start": 1, "slot": self.limits.slots}
        padded = {}
        noise = np.zeros((*rows.uniforms.shape, 1), np.float32) if rows.noise is None else rows.noise
        for name, value in (vars(rows) | {"noise": noise}).items():
            more = np.full((PADDING, *value.shape[1:]), padding.get(name, 0), value.dtype)
            padded[name] = np.concatenate((value, more))
        if padded["uniforms"].shape[1] == 1:  # blocks of one slot are exported with a fixed width
            padded["uniforms"], padded["noise"] = padded["uniforms"][:, :1], padded["noise"][:, :1]
        out = self._run("draft", padded)
        self.debug = {name: value[:-PADDING] for name, value in out.items()}
        return DraftOut(self.debug["ids"], self.debug.get("confidence_logits"), list(self.debug["q"]))

    def _run(self, graph: str, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        session = self._sessions[graph]
        feed = dict(inputs)
        for value in session.get_inputs():
            if value.name == "taps" and value.name not in feed:
                feed["taps"] = self._state["taps"][:, : self.limits.block_size + 1]
            elif value.name not in feed:
                feed[value.name] = self._state[value.name]
        names = [o.name for o in session.get_outputs()]
        out = dict(zip(names, session.run(None, feed), strict=True))
        for name in names:
            if name.endswith(".new"):
                self._state[name.removesuffix(".new")] = out.pop(name)
        return out
