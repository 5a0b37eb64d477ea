"""TensorRT and TensorRT-RTX: an engine of fixed sizes for each stage, batch and width, built ahead of time.

The graphs are those of the CUDA lowering, weights as inputs, so that every engine binds the one copy of
``weights.bin``. With kernels, what they are for are plugins, which update state in place; without, everything is
standard operators, and a call copies the state that it changes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import onnx_ir as ir

from builder.backends import BackendOptions, EngineBuilt
from builder.backends.ort_cuda import OrtCuda, write_weights_index
from builder.backends.tensorrt_engine import Job, Place
from builder.backends.tensorrt_worker import Workers
from builder.export import Graph
from builder.passes.base import apply, fixed_size
from builder.passes.tensorrt import PLUGINS, FixSizes, FoldConstants, InlineBodies, MarkPlugins
from builder.spec import DrafterSpec, TargetSpec
from builder.weights import WeightIndex
from runtime import machine
from runtime.engine_records import STAGES, write_records
from runtime.libraries import BACKENDS, installed, library
from runtime.manifest import Backend, EngineFile, Limits, StateTensor, state_bytes
from runtime.tensorrt_flavours import FLAVOURS
from runtime.widths import Widths

ENGINES = "engines"
"""The bundle's directory of engines."""


class TensorRt:
    """See `builder.backends.BackendBuilder`."""

    def __init__(self, options: BackendOptions) -> None:
        if options.gpu is None:
            raise RuntimeError(f"{options.name} without a GPU to build for")
        self._flavour = FLAVOURS[options.name]
        self._gpu = options.gpu
        self._kernels = options.kernels
        self._serving = options.serving
        self._lowering = OrtCuda(precision=options.precision)
        self._flavour.load()  # if it can't be, that's better known before anything is done
        self.built: tuple[EngineBuilt, ...] = ()

    @classmethod
    def make(cls, options: BackendOptions) -> Self:
        return cls(options)

    def compile(
        self, graphs: Mapping[str, Graph], weights: WeightIndex, limits: Limits, dest: Path
    ) -> tuple[EngineFile, ...]:
        """One file an engine in ``engines``, and ``engines.json`` with what went into each."""
        write_weights_index(dest, weights)
        (dest / ENGINES).mkdir()
        places = self.places(graphs, limits)
        workers = Workers()
        with (
            tempfile.TemporaryDirectory(prefix="dspark-graphs-") as scratch,
            ThreadPoolExecutor(machine.cpu().usable) as pool,
        ):
            try:
                files = self._fixed(graphs, weights, limits, places, Path(scratch))
                names = tuple(weights.weights)
                jobs = [
                    Job(self._flavour.name, self._gpu, str(file), str(dest), place, names)
                    for file, (place, _) in zip(files, places, strict=True)
                ]
                results = list(pool.map(workers.run, jobs))
            finally:
                workers.close()
        records = [result.record for result in results]
        self.built = tuple(EngineBuilt(r.record.file, r.seconds, r.peak_memory, r.reproducible) for r in results)
        write_records(dest, records)
        return tuple(EngineFile(r.stage, r.batch, r.file, r.width) for r in records)

    def _fixed(
        self,
        graphs: Mapping[str, Graph],
        weights: WeightIndex,
        limits: Limits,
        places: Sequence[tuple[Place, Mapping[str, int]]],
        scratch: Path,
    ) -> list[Path]:
        """The graph of each place, in a file."""
        lowered: dict[tuple[str, bool], ir.Model] = {}
        files = []
        for place, sizes in places:
            source = _source(place.stage)
            if source not in lowered:
                graph, sample = source
                lowered[source] = self._lowering.lower(graphs[graph], weights, limits, sample)
            files.append(scratch / f"{Path(place.file).stem}.onnx")
            ir.save(self.fix(lowered[source], sizes), files[-1])
        return files

    def places(self, graphs: Mapping[str, Graph], limits: Limits) -> list[tuple[Place, Mapping[str, int]]]:
        """Every engine that these graphs make, with the sizes that its graph is given."""
        widths = Widths.of(limits, self._serving)
        places = []
        for stage in STAGES:
            graph, _ = _source(stage)
            if graph not in graphs:
                continue
            for batch in limits.batches:
                for width in widths.of_stage(stage):
                    place = Place(f"{ENGINES}/{stage}.b{batch}.w{width}.engine", stage, batch, width)
                    places.append((place, _sizes(place, limits, graphs[graph])))
        return places

    def fix(self, model: ir.Model, sizes: Mapping[str, int]) -> ir.Model:
        """A lowered graph as TensorRT gets it."""
        kept = PLUGINS if self._kernels else ()
        return apply(model, [FixSizes(sizes), InlineBodies(kept), FoldConstants(), MarkPlugins()])

    def compile_seconds(self, target: TargetSpec, limits: Limits) -> float:
        """By what TensorRT-RTX takes for a layer: without plugins it has ten times as many operators to go through."""
        widths = Widths.of(limits, self._serving)
        layer, other = (0.05, 1.0) if self._kernels else (0.28, 1.5)
        large, small = len(widths.verify) + len(widths.prefill), len(widths.seed) + 3 * len(widths.draft)
        return len(limits.batches) * (large * (1.0 + target.num_layers * layer) + small * other) / 2

    def state(self, target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> tuple[StateTensor, ...]:
        """Every state buffer, without its leading slot axis."""
        return self._lowering.state(target, drafter, limits)

    def working_bytes(self, target: TargetSpec, limits: Limits, state: Sequence[StateTensor]) -> int:
        """Those of the CUDA lowering and, without kernels, a second buffer of each state, which a call writes."""
        copies = 0 if self._kernels else sum(state_bytes(tensor, limits.slots + 1) for tensor in state)
        return self._lowering.working_bytes(target, limits, state) + copies

    def loaded_bytes(self, graphs: Mapping[str, Graph], weights: WeightIndex) -> int:
        """The weights file once: every engine binds the same buffer."""
        return weights.bytes

    def describe(self) -> Backend:
        name = self._flavour.name
        info = BACKENDS[name]
        version = library(info, {package: installed(package) for package in info.packages}).bindings
        return Backend(name, info.libraries[0], version or "unknown", self._gpu, self._lowering.precision)


def _source(stage: str) -> tuple[str, bool]:
    """The exported graph of a stage, and whether it may draw tokens."""
    if stage.startswith("draft"):
        return "draft", stage != "draft"
    return ("seed" if stage == "seed" else "target"), False


def _sizes(place: Place, limits: Limits, graph: Graph) -> Mapping[str, int]:
    """What the symbolic sizes of a lowered graph are in that engine."""
    rows = {"b": place.batch, "slots": limits.slots + 1}
    if place.stage == "seed":
        return {**rows, "c": place.width}
    if place.stage.startswith("draft"):
        vocabulary = fixed_size(next(value for value in graph.model.graph.outputs if value.name == "base"), 2)
        return {**rows, "s": place.width, "v": vocabulary if place.stage == "draft_noise" else 1}
    return {**rows, "w": place.width, "h": place.width if place.stage == "verify" else 1}
