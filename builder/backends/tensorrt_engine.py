"""One network of fixed sizes to one TensorRT engine, and the record of what went in. Runs in a process of its own:
`builder.backends.tensorrt_worker`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from plugins.operators import DOMAIN, OPERATORS
from plugins.tensorrt import register
from runtime.engine_records import EngineRecord, TensorRecord
from runtime.errors import BackendUnavailable
from runtime.manifest import ITEM_BYTES
from runtime.tensorrt_flavours import FLAVOURS

_LOOPS = frozenset({"LOOP_OUTPUT", "TRIP_LIMIT", "RECURRENCE", "ITERATOR", "CONDITION"})
"""Types of layers that a CUDA graph can't hold."""


@dataclass(frozen=True)
class Place:
    """Which engine of a bundle: see `runtime.engine_records.EngineRecord`."""

    file: str
    stage: str
    batch: int
    width: int


@dataclass(frozen=True)
class Job:
    """An engine to build: the back end, the GPU (``sm_89``), the file of its graph, the bundle's directory, and the
    names of inputs that are weights."""

    backend: str
    gpu: str
    graph: str
    directory: str
    place: Place
    weights: tuple[str, ...]


def compile_engine(job: Job) -> EngineRecord:
    """Write the engine to its place, streamed.

    Raises:
        BackendUnavailable: the library can't be loaded or refuses the network; what it said is in the message.
        OSError: the engine can't be written.
    """
    flavour, place = FLAVOURS[job.backend], job.place
    trt = flavour.load()
    register(trt)
    log = _logger(trt)
    builder = trt.Builder(log)
    # Engines are built side by side; and addresses, of which the order of tables depends, are then always the same.
    builder.max_threads = 1
    network = builder.create_network(flavour.network_flags(trt))
    parser = trt.OnnxParser(network, log)
    data = Path(job.graph).read_bytes()
    if not parser.parse(data):
        log.errors[:0] = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise _refused(job, trt, "its parser refuses this graph", log.errors)
    config = builder.create_builder_config()
    flavour.aim(trt, config, job.gpu)
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    # On by default: products of float32 would be rounded to 10 bits.
    config.clear_flag(trt.BuilderFlag.TF32)
    # What the engine inspector can tell is decided here.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    operators = {node.name: node.op_type for node in onnx.load_from_string(data).graph.node if node.domain == DOMAIN}
    record = _record(trt, network, operators, frozenset(job.weights), place)
    with (Path(job.directory) / place.file).open("wb") as file:
        writer = _writer(trt, file)
        built = builder.build_serialized_network_to_stream(network, config, writer)
    if writer.error is not None:
        raise writer.error
    if not built:
        raise _refused(job, trt, "it can't build this network", log.errors)
    return replace(record, engine_bytes=writer.size)


def _refused(job: Job, trt: Any, problem: str, errors: list[str]) -> BackendUnavailable:
    place = job.place
    return BackendUnavailable(
        f"{job.backend} {trt.__version__}",
        f"{problem} ({place.stage}, batch {place.batch}, width {place.width}, {job.gpu})",
        found="; ".join(errors) or "no reason given",
        remedy="Build with --backend ort-cuda, or report it with this line",
    )


def _logger(trt: Any) -> Any:
    """Keeps errors, which the library prints otherwise."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # of whichever library it is
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.errors.append(message)

    return Logger()


def _writer(trt: Any, file: Any) -> Any:
    """A stream into a file that says how much went in, and keeps an error, which must not cross the library."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.size = 0
            self.error: OSError | None = None

        def write(self, data: Any) -> int:
            try:
                written = int(file.write(data))
            except OSError as error:
                self.error = error
                return 0
            self.size += written
            return written

    return Writer()


def _record(
    trt: Any, network: Any, operators: Mapping[str, str], weights: Collection[str], place: Place
) -> EngineRecord:
    """What the parsed network holds, `operators` being those of its ``dspark`` nodes; its file's size is not known
    yet."""
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    types: Mapping[str, int] = Counter(str(layer.type).rpartition(".")[2] for layer in layers)
    plugins: Counter[str] = Counter()
    aliased: dict[str, str] = {}
    for layer in layers:
        if layer.type != trt.LayerType.PLUGIN_V3:
            continue
        operator = OPERATORS[operators[layer.name]]
        plugins[operator.name] += 1
        names = [tensor.name for tensor in operator.inputs]
        for i, output in enumerate(operator.outputs):
            if output.updates is not None:
                aliased[layer.get_output(i).name] = layer.get_input(names.index(output.updates)).name
    dtypes = {
        trt.DataType.FLOAT: "float32",
        trt.DataType.HALF: "float16",
        trt.DataType.BF16: "bfloat16",
        trt.DataType.INT64: "int64",
    }
    inputs = [_tensor(network.get_input(i), dtypes) for i in range(network.num_inputs)]
    outputs = [_tensor(network.get_output(i), dtypes) for i in range(network.num_outputs)]
    states = {t.name: t.name.removesuffix(".new") for t in outputs if t.name.endswith(".new")}
    # A state is in place only if a plugin makes the very output of the very input.
    in_place = {new: old for new, old in states.items() if aliased.get(new) == old}
    copied = {new: old for new, old in states.items() if new not in in_place}
    sizes = {t.name: math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in inputs}
    used = sorted(t.name for t in inputs if t.name in weights)
    return EngineRecord(
        file=place.file,
        stage=place.stage,
        batch=place.batch,
        width=place.width,
        layers=dict(sorted(types.items())),
        plugins=dict(sorted(plugins.items())),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        weights=tuple(used),
        aliased=dict(sorted(in_place.items())),
        copied=dict(sorted(copied.items())),
        weight_bytes=sum(sizes[name] for name in used),
        copied_bytes=sum(sizes[old] for old in copied.values()),
        engine_bytes=0,
        captured=_LOOPS.isdisjoint(types),
    )


def _tensor(tensor: Any, dtypes: Mapping[Any, str]) -> TensorRecord:
    return TensorRecord(tensor.name, dtypes[tensor.dtype], tuple(tensor.shape))
