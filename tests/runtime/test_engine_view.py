"""The engine inspector's view, over a stand-in for the library's bindings that notes what is called and in which
order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plugins import launchers
from runtime import engine_view
from runtime.bundle import open_bundle
from runtime.engine_view import EngineView, view_engines
from runtime.errors import BackendUnavailable, BundleError
from runtime.manifest import KERNELS_FILE
from tests.examples import example_records, tensorrt_example

MakeBundle = Callable[..., Path]
LAYERS = ["norm + product", {"Name": "attention", "LayerType": "PluginV3"}]


class Bindings:
    """As much of TensorRT's module as an inspector takes. `text` is what it tells; None refuses every engine."""

    LayerInformationFormat = SimpleNamespace(JSON="json", ONELINE="oneline")

    class ILogger:
        INTERNAL_ERROR, ERROR, WARNING = "internal error", "error", "warning"

    def __init__(self, text: str | None) -> None:
        self.calls: list[object] = []
        self.text = text

    def Runtime(self, logger: Any) -> Any:
        self.calls.append("runtime")
        assert isinstance(logger, self.ILogger)

        def deserialise(data: bytes) -> Any:
            self.calls.append(len(data))
            if self.text is None:
                logger.log("warning", "it is slow")
                logger.log("error", "no GPU")
                logger.log("internal error", "later")
                return None
            return SimpleNamespace(create_engine_inspector=lambda: inspector, device_memory_size_v2=4096)

        def tell(form: str) -> str | None:
            assert form == "json"
            return self.text

        inspector = SimpleNamespace(get_engine_information=tell)
        return SimpleNamespace(deserialize_cuda_engine=deserialise)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bindings]:
    """Lets the machine pass, and gives these bindings for the library; kernels are noted, not loaded."""
    kernels = launchers.Kernels

    def give(text: str | None, load_kernels: bool = False) -> Bindings:
        trt = Bindings(text)

        def load(flavour: object) -> Bindings:
            trt.calls.append("load")
            return trt

        monkeypatch.setattr(engine_view, "check_backend", lambda where, backend: trt.calls.append("check"))
        monkeypatch.setattr("runtime.tensorrt_flavours.Flavour.load", load)
        noted = kernels if load_kernels else lambda path: ("kernels", path.name)
        monkeypatch.setattr(launchers, "Kernels", noted)
        monkeypatch.setattr("plugins.tensorrt.register", lambda module, kernels: trt.calls.append(kernels))
        return trt

    return give


def test_layers_of_every_engine(make_bundle: MakeBundle, opened: Callable[..., Bindings]) -> None:
    trt = opened(json.dumps({"Layers": LAYERS, "Bindings": ["ids"]}))
    views = view_engines(open_bundle(make_bundle(**tensorrt_example())))
    assert views == {record.file: EngineView(tuple(LAYERS), 4096) for record in example_records(True)}
    assert views["engines/verify.b1.w1.engine"].names() == ["norm + product", "attention"]
    # Nothing of the library before the machine is known to fit, and no engine before its plugins are registered.
    kernels = ("kernels", "libdspark_kernels.so")
    assert trt.calls[:5] == ["check", "load", kernels, "runtime", 101]
    assert trt.calls[5:] == [record.engine_bytes for record in example_records(True)][1:]


def test_engines_without_plugins_need_no_kernels(make_bundle: MakeBundle, opened: Callable[..., Bindings]) -> None:
    trt = opened('{"Layers": []}')
    view_engines(open_bundle(make_bundle(**tensorrt_example(kernels=False))))
    assert trt.calls[:4] == ["check", "load", "runtime", 101]


def refused(path: Path, *clauses: str) -> None:
    with pytest.raises(BundleError) as caught:
        view_engines(open_bundle(path))
    message = str(caught.value)
    assert "\n" not in message
    for clause in clauses:
        assert clause in message


def test_an_engine_that_is_not_opened(make_bundle: MakeBundle, opened: Callable[..., Bindings]) -> None:
    opened(None)
    path = make_bundle(**tensorrt_example())
    refused(path, "verify.b1.w1.engine: TensorRT doesn't open this engine; expected an engine; found no GPU. Rebuild")


def test_an_engine_that_raises(make_bundle: MakeBundle, opened: Callable[..., Bindings]) -> None:
    trt = opened("")

    def fail(data: bytes) -> None:
        raise RuntimeError("two\nlines")

    trt.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=fail)  # type: ignore[method-assign]
    refused(make_bundle(**tensorrt_example()), "TensorRT doesn't open this engine; expected an engine; found two lines")


@pytest.mark.parametrize("text", ["", "{}", "[]", "no JSON"])
def test_an_inspector_that_tells_nothing(make_bundle: MakeBundle, opened: Callable[..., Bindings], text: str) -> None:
    opened(text)
    path = make_bundle(**tensorrt_example())
    refused(path, f"the engine inspector tells nothing of it; expected its layers; found {text}")


def test_kernels_for_another_machine(make_bundle: MakeBundle, opened: Callable[..., Bindings]) -> None:
    opened("{}", load_kernels=True)
    path = make_bundle(**tensorrt_example())
    refused(path, f"{KERNELS_FILE}: is no library of kernels for this machine; found", "Build plugins/ for it")


def test_the_machine_is_looked_at_first(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.tensorrt_flavours.Flavour.load", lambda flavour: pytest.fail("the library is loaded"))
    monkeypatch.setattr("runtime.machine.gpus", lambda: ())
    with pytest.raises(BackendUnavailable):
        view_engines(open_bundle(make_bundle(**tensorrt_example())))


def test_bindings_have_what_is_called() -> None:
    """The stand-in's shape is that of the real bindings, where they are installed."""
    trt: Any = pytest.importorskip("tensorrt_rtx_bindings")
    logger = engine_view.make_logger(trt)
    logger.log(trt.ILogger.WARNING, "it is slow")
    logger.log(trt.ILogger.ERROR, "no GPU")
    assert logger.errors == ["no GPU"]
    assert hasattr(trt.ICudaEngine, "create_engine_inspector")
    assert hasattr(trt.ICudaEngine, "device_memory_size_v2")
    assert "serialized_engine" in trt.Runtime.deserialize_cuda_engine.__doc__
    assert trt.LayerInformationFormat.JSON is not None
    assert hasattr(trt.EngineInspector, "get_engine_information")


def test_the_library_itself_refuses_what_is_no_engine(tmp_path: Path) -> None:
    trt: Any = pytest.importorskip("tensorrt_rtx_bindings")
    logger = engine_view.make_logger(trt)
    runtime = trt.Runtime(logger)
    (tmp_path / "engine").write_bytes(b"no engine")
    with pytest.raises(BundleError, match="TensorRT doesn't open this engine"):
        engine_view.deserialise(runtime, tmp_path / "engine", logger)
