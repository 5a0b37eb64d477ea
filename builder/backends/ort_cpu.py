"""ONNX Runtime on the CPU: lower each graph for each batch, and write it beside the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Self

import onnx_ir as ir

from builder.backends import BackendOptions, EngineBuilt
from builder.export import Graph, state_names
from builder.passes.base import AttachWeights, KeepOutputs, apply
from builder.passes.cpu import FixBatch, SlotsToBindings
from builder.passes.fusion import FuseMatMul, FuseSkipNorm
from builder.spec import DrafterSpec, TargetSpec
from builder.weights import WeightIndex
from runtime.manifest import Backend, EngineFile, Limits, StateTensor

DEBUG_OUTPUTS = frozenset({"hidden", "base", "corrected"})
"""Inner results of the drafter, for people and tests; an engine that serves has no use for them."""


class OrtCpu:
    """See `builder.backends.BackendBuilder`. With `debug`, engines keep `DEBUG_OUTPUTS`."""

    built: tuple[EngineBuilt, ...] = ()

    def __init__(self, debug: bool = False, precision: str = "f32") -> None:
        self.debug = debug
        self.precision = precision

    @classmethod
    def make(cls, options: BackendOptions) -> Self:
        return cls(precision=options.precision)

    def compile(
        self, graphs: Mapping[str, Graph], weights: WeightIndex, limits: Limits, dest: Path
    ) -> tuple[EngineFile, ...]:
        """One model file a graph and batch. Numbers of ids stay symbolic: the CPU gains nothing from fixed ones, and
        one session then serves prefill and verify."""
        engines = []
        for batch in limits.batches:
            for graph in graphs.values():
                engine = EngineFile(graph.name, batch, f"{graph.name}.b{batch}.onnx")
                ir.save(self.lower(graph, weights, batch), dest / engine.file)
                engines.append(engine)
        return tuple(engines)

    def lower(self, graph: Graph, weights: WeightIndex, batch: int) -> ir.Model:
        """The graph for one batch, with weights attached."""
        outputs = {v.name or "" for v in graph.model.graph.outputs}
        return apply(
            graph.model,
            [
                KeepOutputs(outputs if self.debug else outputs - DEBUG_OUTPUTS),
                AttachWeights(weights),
                FuseMatMul(),
                FuseSkipNorm(),
                FixBatch(batch),
                SlotsToBindings(batch),
            ],
        )

    def compile_seconds(self, target: TargetSpec, limits: Limits) -> float:
        return 0.2

    def state(self, target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> tuple[StateTensor, ...]:
        """Every state buffer, without its leading slot axis."""
        names = state_names(target, drafter)
        rows = limits.max_seq_len + limits.block_size
        cache = (target.num_kv_heads, rows, target.head_dim)
        ring = (drafter.num_kv_heads, limits.window, drafter.head_dim)
        taps = (limits.tap_rows, len(drafter.taps) * drafter.hidden_size)
        return (
            *(StateTensor(n, "cache", cache, "float32") for n in names["target"]),
            *(StateTensor(n, "ring", ring, "float32") for n in names["seed"]),
            StateTensor("taps", "taps", taps, "float32"),
        )

    def working_bytes(self, target: TargetSpec, limits: Limits, state: Sequence[StateTensor]) -> int:
        """What ONNX Runtime's arena takes is its own affair."""
        return 0

    def loaded_bytes(self, graphs: Mapping[str, Graph], weights: WeightIndex) -> int:
        """A graph packs its matrices, an lm_head besides the embedding that it equals; the graph's batches share them
        (`runtime.sessions.ort_packed`)."""
        known = weights.weights
        names = [name for graph in graphs.values() for name in graph.model.graph.initializers if name in known]
        return sum(known[name].nbytes for name in names)

    def describe(self) -> Backend:
        return Backend("ort-cpu", "onnxruntime", version("onnxruntime"), "any", self.precision)
