"""What TensorRT's engine inspector sees in a bundle's engines: their layers as built, fused and chosen for the GPU.

Only where an engine can be deserialised, with its library, GPU and driver. What went into it (`runtime.engine_records`)
is known anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bundle import Bundle
from runtime.engine_records import EngineRecord, read_records
from runtime.errors import BundleError
from runtime.manifest import KERNELS_FILE, REBUILD
from runtime.requirements import check_backend
from runtime.tensorrt_flavours import FLAVOURS


@dataclass(frozen=True)
class EngineView:
    """`layers` in the order in which they run, a name or an object for each, as detailed as the engine was built to
    tell. `activation_bytes` of the GPU are taken while the engine runs."""

    layers: tuple[object, ...]
    activation_bytes: int

    def names(self) -> list[str]:
        return [str(layer.get("Name")) if isinstance(layer, Mapping) else str(layer) for layer in self.layers]


def view_engines(bundle: Bundle) -> dict[str, EngineView]:
    """By file. Each engine is opened, looked at and closed, one after the other.

    Raises:
        BackendUnavailable: the library, GPU or driver that the engines run with isn't there.
        BundleError: engines of another library than TensorRT, an engine that it doesn't open, or kernels that can't be
            loaded.
    """
    name = bundle.manifest.backend.name
    if name not in FLAVOURS:
        raise BundleError(
            bundle.path,
            "its engines are graphs, whose layers nothing but their library knows",
            expected=f"a bundle for {' or '.join(FLAVOURS)}",
            found=name,
            remedy="Leave --layers out",
        )
    check_backend(bundle.path, bundle.manifest.backend)
    trt = FLAVOURS[name].load()
    records = read_records(bundle.path)
    register_plugins(trt, bundle, records)
    logger = make_logger(trt)
    runtime = trt.Runtime(logger)
    return {record.file: _view(trt, runtime, bundle.file(record.file), logger) for record in records}


def register_plugins(trt: Any, bundle: Bundle, records: Sequence[EngineRecord]) -> None:
    """Register the operators of `plugins.operators` with the bundle's kernels, if any engine has them.

    Raises:
        BundleError: a file that is no library of kernels for this machine.
    """
    if not any(record.plugins for record in records):
        return
    from plugins.launchers import Kernels
    from plugins.tensorrt import register

    library = bundle.file(KERNELS_FILE)
    try:
        kernels = Kernels(library)
    except (OSError, AttributeError) as error:
        raise BundleError(
            library,
            "is no library of kernels for this machine",
            found=error,
            remedy="Build plugins/ for it, and the bundle with --plugins",
        ) from error
    register(trt, kernels)


def make_logger(trt: Any) -> Any:
    """Keeps the library's errors, in the list `errors`, instead of printing them."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # of whichever library it is
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.errors.append(message)

    return Logger()


def deserialise(runtime: Any, path: Path, logger: Any) -> Any:
    """The engine in a file, by a ``trt.Runtime`` that logs to what `make_logger` makes.

    Raises:
        BundleError: the library refuses it; what it said is in the message.
    """
    try:
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
    except Exception as error:  # whatever the bindings turn the library's errors into
        raise _refused(path, str(error)) from error
    if engine is None:
        raise _refused(path, logger.errors[0] if logger.errors else "nothing, and no reason")
    return engine


def _refused(path: Path, said: str) -> BundleError:
    return BundleError(path, "TensorRT doesn't open this engine", expected="an engine", found=said, remedy=REBUILD)


def _view(trt: Any, runtime: Any, path: Path, logger: Any) -> EngineView:
    engine = deserialise(runtime, path, logger)
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    try:
        layers = tuple(json.loads(text)["Layers"])
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(
            path, "the engine inspector tells nothing of it", expected="its layers", found=text[:80], remedy=REBUILD
        ) from error
    return EngineView(layers, int(engine.device_memory_size_v2))
