"""ONNX Runtime on CUDA: one lowered graph a file, weights beside it, and the kernels' library if there is one.

Nothing here needs a GPU or ONNX Runtime: graphs are written with standard-op bodies beside their kernel operators, and
the library that runs them is the user's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import onnx_ir as ir

from builder.backends import BackendOptions, EngineBuilt
from builder.export import Graph, state_names
from builder.passes.base import KeepOutputs, apply
from builder.passes.cuda import DTYPES, AttachBodies, FuseBestToken, SizeState, TapsInSlots, WeightsToInputs, cache_rows
from builder.passes.cuda_fusion import FuseAttention, FuseChain, FuseContextWrites, FuseLinear
from builder.passes.fusion import FuseMatMul
from builder.passes.precision import ACTIVATIONS, SetPrecision, taps_dtype
from builder.spec import DrafterSpec, TargetSpec
from builder.weights import WeightIndex
from runtime.manifest import Backend, EngineFile, Limits, StateTensor

WEIGHTS_INDEX_NAME = "weights.json"
LIBRARY_VERSION = "1.31.0"
"""The oldest onnxruntime-gpu whose CUDA kernels for the operators of `builder.passes` are known to work."""

_DEBUG_OUTPUTS = frozenset({"hidden", "base", "corrected"})


class OrtCuda:
    """See `builder.backends.BackendBuilder`."""

    built: tuple[EngineBuilt, ...] = ()

    def __init__(self, precision: str = "f32") -> None:
        self.precision = precision

    @classmethod
    def make(cls, options: BackendOptions) -> Self:
        return cls(precision=options.precision)

    def compile(
        self, graphs: Mapping[str, Graph], weights: WeightIndex, limits: Limits, dest: Path
    ) -> tuple[EngineFile, ...]:
        """One model file a graph, whatever the batch: a session captures each size that it runs. The draft is there
        twice, since one that samples returns its probabilities.

        ``weights.json`` says of each weight what ``weights.bin`` has for it.
        """
        written = {name: self.lower(graph, weights, limits) for name, graph in graphs.items()}
        if "draft" in graphs:
            written["draft_sampled"] = self.lower(graphs["draft"], weights, limits, sample=True)
        engines = []
        for name, model in written.items():
            ir.save(model, dest / f"{name}.onnx")
            engines += [EngineFile(name, batch, f"{name}.onnx") for batch in limits.batches]
        write_weights_index(dest, weights)
        return tuple(engines)

    def lower(self, graph: Graph, weights: WeightIndex, limits: Limits, sample: bool = False) -> ir.Model:
        """The graph as it runs; `sample` says whether the draft may draw tokens."""
        outputs = {value.name or "" for value in graph.model.graph.outputs}
        return apply(
            graph.model,
            [
                KeepOutputs(outputs - _DEBUG_OUTPUTS),
                SizeState(limits),
                FuseMatMul(),
                FuseAttention(),
                FuseContextWrites(),
                TapsInSlots(limits),
                FuseChain(sample),
                FuseLinear(),
                FuseBestToken(),
                WeightsToInputs(weights),
                SetPrecision(self.precision),
                AttachBodies(),
            ],
        )

    def compile_seconds(self, target: TargetSpec, limits: Limits) -> float:
        return 0.2

    def state(self, target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> tuple[StateTensor, ...]:
        """Every state buffer, without its leading slot axis."""
        names, dtype = state_names(target, drafter), ACTIVATIONS[self.precision]
        cache = (target.num_kv_heads, cache_rows(limits), target.head_dim)
        ring = (drafter.num_kv_heads, limits.window, drafter.head_dim)
        taps = (limits.tap_rows, len(drafter.taps) * drafter.hidden_size)
        return (
            *(StateTensor(name, "cache", cache, dtype) for name in names["target"]),
            *(StateTensor(name, "ring", ring, dtype) for name in names["seed"]),
            StateTensor("taps", "taps", taps, taps_dtype(self.precision)),
        )

    def working_bytes(self, target: TargetSpec, limits: Limits, state: Sequence[StateTensor]) -> int:
        """Buffers for the logits of a verification, and for q and noise of a draft, of the largest batch."""
        return 4 * limits.batches[-1] * target.vocab_size * (3 * limits.block_size + 1)

    def loaded_bytes(self, graphs: Mapping[str, Graph], weights: WeightIndex) -> int:
        """The weights file once: every graph binds the same buffer."""
        return weights.bytes

    def describe(self) -> Backend:
        return Backend("ort-cuda", "onnxruntime-gpu", LIBRARY_VERSION, "any", self.precision)


def write_weights_index(dest: Path, weights: WeightIndex) -> None:
    """``weights.json``: what a session needs to bind weights, whose types numpy may lack."""
    entries = [
        {"name": name, "offset": weight.offset, "shape": list(weight.shape), "dtype": weight.dtype}
        for name, weight in sorted(weights.weights.items())
    ]
    unknown = {entry["dtype"] for entry in entries} - DTYPES.keys()
    if unknown:
        raise RuntimeError(f"weights of types {sorted(map(str, unknown))}")
    path = dest / WEIGHTS_INDEX_NAME
    path.write_text(json.dumps({"weights": entries}, indent=1) + "\n", encoding="ascii", newline="\n")
