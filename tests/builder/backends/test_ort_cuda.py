"""The back end for CUDA: what it writes beside the graphs, what it says of state and memory, and bundles of it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from builder.backends.ort_cuda import OrtCuda
from builder.build import BuildOptions, build
from builder.checkpoints import load_drafter, load_target
from builder.profile import load_profile, override, resolve
from builder.weights import WeightIndex, write_weights
from runtime.bundle import open_bundle
from runtime.errors import BundleError, ProfileError
from runtime.manifest import PLUGINS_FILE, EngineFile, Limits
from tests.examples import DRAFTER, TARGET
from tests.support import TINY, TINY_PAIRS, SilentProgress, exported_pair

LIMITS = Limits((1, 4), 4, window=16, max_seq_len=32, block_size=7, prefill_chunk=12)
GRAPHS = ("target", "draft", "draft_sampled", "seed")
Bundle = Callable[..., Path]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WeightIndex, tuple[EngineFile, ...]]:
    """The qwen3 pair in bfloat16."""
    dest = tmp_path_factory.mktemp("compiled")
    target = load_target(TINY_PAIRS / "qwen3" / "target")
    drafter = load_drafter(TINY_PAIRS / "qwen3" / "drafter", target)
    limits = replace(LIMITS, block_size=drafter.spec.block_size)
    index = write_weights(dest, target, drafter, limits, "bf16")
    graphs = exported_pair(target.spec, drafter.spec, limits)
    backend = OrtCuda("bf16")
    assert backend.loaded_bytes(graphs, index) == index.bytes == index.path.stat().st_size
    return dest, index, backend.compile(graphs, index, limits, dest)


def test_one_file_a_graph(compiled: tuple[Path, WeightIndex, tuple[EngineFile, ...]]) -> None:
    dest, _, engines = compiled
    wanted = [EngineFile(graph, batch, f"{graph}.onnx") for graph in GRAPHS for batch in LIMITS.batches]
    assert sorted(engines, key=repr) == sorted(wanted, key=repr)
    files = {path.name for path in dest.iterdir()}
    assert files == {*(f"{graph}.onnx" for graph in GRAPHS), "weights.bin", "weights.json"}
    assert not any(dest.joinpath(engine.file).stat().st_size > 1 << 20 for engine in engines)  # no weight in a graph


def test_the_index_says_where_each_input_lies(compiled: tuple[Path, WeightIndex, tuple[EngineFile, ...]]) -> None:
    dest, index, _ = compiled
    entries = json.loads((dest / "weights.json").read_text())["weights"]
    assert [entry["name"] for entry in entries] == sorted(index.weights)
    size = {"float32": 4, "bfloat16": 2}
    by_name = {entry["name"]: entry for entry in entries}
    for entry in entries:
        assert entry["offset"] + size[entry["dtype"]] * math.prod(entry["shape"]) <= index.bytes
    kinds = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.BFLOAT16: "bfloat16"}
    used = set()
    for graph in GRAPHS:
        for value in onnx.load(dest / f"{graph}.onnx").graph.input:
            if value.name in by_name:
                used.add(value.name)
                entry, tensor = by_name[value.name], value.type.tensor_type
                assert kinds[tensor.elem_type] == entry["dtype"]
                assert [dim.dim_value for dim in tensor.shape.dim] == entry["shape"]
    assert used == by_name.keys()
    assert by_name["target.cos"]["dtype"] == by_name["drafter.confidence.weight"]["dtype"] == "float32"
    assert by_name["drafter.context.fc.weight"]["dtype"] == by_name["target.embed"]["dtype"] == "bfloat16"


def test_what_is_neither_weight_nor_state_is_named(
    compiled: tuple[Path, WeightIndex, tuple[EngineFile, ...]],
) -> None:
    dest, index, _ = compiled
    common = {"start", "slot"}
    inputs = {
        "target": {*common, "ids", "count", "tap_row", "head_rows"},
        "draft": {*common, "bonus", "valid_len", "new_len", "temperature", "uniforms", "noise"},
        "seed": {*common, "row", "count"},
    }
    outputs = {"target": {"argmax", "best", "logits"}, "draft": {"ids", "q", "confidence_logits"}}
    inputs["draft_sampled"], outputs["draft_sampled"] = inputs["draft"], outputs["draft"]
    for graph, expected in inputs.items():
        model = onnx.load(dest / f"{graph}.onnx").graph
        names = {value.name for value in model.input} - index.weights.keys()
        states = {value.name.removesuffix(".new") for value in model.output if value.name.endswith(".new")}
        assert names - states - {"taps"} == expected
        assert {value.name for value in model.output if not value.name.endswith(".new")} == outputs.get(graph, set())
        assert ("taps" in states) == (graph == "target")  # the others read them only


@pytest.mark.parametrize(("precision", "own", "taps"), [
    ("f32", "float32", "float32"), ("bf16", "bfloat16", "bfloat16"), ("f16", "float16", "bfloat16"),
])  # fmt: skip
def test_state_by_hand(precision: str, own: str, taps: str) -> None:
    state = OrtCuda(precision).state(TARGET, DRAFTER, LIMITS)
    assert {(tensor.kind, tensor.shape, tensor.dtype) for tensor in state} == {
        ("cache", (2, 32 + 12, 8), own),  # a chunk at the last position may be padded to its full width
        ("ring", (2, 16, 16), own),
        ("taps", (12, 48), taps),
    }
    assert len({tensor.name for tensor in state}) == len(state) == 2 * 4 + 2 * 3 + 1


@pytest.mark.parametrize("precision", ["f32", "bf16", "f16"])
def test_a_bundle(tiny_bundle: Bundle, precision: str) -> None:
    manifest = open_bundle(tiny_bundle("llama", backend="ort-cuda", precision=precision)).manifest
    assert (manifest.backend.name, manifest.backend.precision) == ("ort-cuda", precision)
    assert {"weights.bin", "weights.json", "vectors.npz", "seed.onnx"} <= manifest.files.keys()
    size = {"float32": 4, "float16": 2, "bfloat16": 2}
    slot = sum(size[tensor.dtype] * math.prod(tensor.shape) for tensor in manifest.state)
    assert manifest.memory.per_slot == slot
    assert manifest.memory.weights == manifest.files["weights.bin"].size
    assert manifest.plugins == ()


def test_two_builds_give_the_same_bytes(tiny_bundle: Bundle, tmp_path: Path) -> None:
    first = open_bundle(tiny_bundle("llama", backend="ort-cuda", precision="bf16")).manifest
    profile = replace(TINY, backend="ort-cuda", precision="bf16")
    pair = TINY_PAIRS / "llama"
    again = build(BuildOptions(pair / "target", pair / "drafter", tmp_path / "b", profile), SilentProgress())
    assert again.manifest.identity == first.identity


@pytest.mark.parametrize("name", ["weights.json", "draft_sampled.onnx"])
def test_a_bundle_lacking_its_own_files_is_refused(make_bundle: Bundle, name: str) -> None:
    engines = [EngineFile(graph, batch, f"{graph}.onnx") for graph in GRAPHS for batch in (1, 2)]
    files = dict.fromkeys(("weights.bin", "weights.json", *(engine.file for engine in engines)), b"x")
    backend = OrtCuda("bf16").describe()
    open_bundle(make_bundle("whole", files=files, engines=tuple(engines), backend=backend))
    del files[name]
    kept = tuple(engine for engine in engines if engine.file != name)
    with pytest.raises(BundleError, match=r"key '(engines|files)' is wrong; expected"):
        open_bundle(make_bundle("part", files=files, engines=kept, backend=backend))


def test_a_library_of_kernels_travels_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a GPU will serve takes no memory of the machine that builds.
    monkeypatch.setattr("builder.build.available_memory", lambda: 1)
    library = tmp_path / "libdspark_ort.so"
    library.write_bytes(b"\x7fELF and so on")
    profile = replace(TINY, backend="ort-cuda")
    pair = TINY_PAIRS / "llama"
    options = BuildOptions(pair / "target", pair / "drafter", tmp_path / "b", profile, plugins=library)
    manifest = build(options, SilentProgress()).manifest
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    assert (tmp_path / "b" / PLUGINS_FILE).read_bytes() == library.read_bytes()
    assert manifest.files[PLUGINS_FILE].sha256 == digest
    assert [(plugin.name, plugin.version) for plugin in manifest.plugins] == [("dspark", digest[:12])]


@pytest.mark.parametrize(
    ("content", "backend", "message"),
    [
        (b"\x7fELF", "ort-cpu", "this back end takes no plugins; expected --backend ort-cuda or --backend tensorrt"),
        (b"text", "ort-cuda", "is no library of kernels; expected a shared library; found another kind of file"),
        (None, "ort-cuda", "is no library of kernels; expected a shared library; found No such file or directory"),
    ],
)
def test_what_is_no_library_of_kernels(tmp_path: Path, content: bytes | None, backend: str, message: str) -> None:
    library = tmp_path / "lib.so"
    if content is not None:
        library.write_bytes(content)
    options = BuildOptions(tmp_path, tmp_path, tmp_path / "b", replace(TINY, backend=backend), plugins=library)
    with pytest.raises(ProfileError) as caught:
        build(options, SilentProgress())
    assert str(caught.value).startswith(f"--plugins {library}: {message}")
    assert not (tmp_path / "b").exists()


def test_the_profile_of_a_data_centre_gpu() -> None:
    profile = load_profile("h200")
    assert (profile.backend, profile.precision, profile.batches) == ("ort-cuda", "bf16", (1, 2, 4, 8, 16, 32, 64))
    plan = resolve(profile, TARGET, DRAFTER)
    assert plan.limits.slots == 64
    assert plan.serving.max_draft == DRAFTER.block_size
    with pytest.raises(ProfileError, match="can't be built for ort-cuda; expected f32 or bf16 or f16; found 'int8'"):
        resolve(override(profile, precision="int8"), TARGET, DRAFTER)
