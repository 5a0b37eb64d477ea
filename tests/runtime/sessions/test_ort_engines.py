"""Engines of several batches share one copy of their packed weights, whatever happens to the files it is kept in."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnx.external_data_helper import convert_model_to_external_data

from runtime import machine
from runtime.bundle import open_bundle
from runtime.errors import BundleError
from runtime.manifest import EngineFile, Limits, dumps
from runtime.sessions import ort_engines, ort_packed
from runtime.sessions.base import DraftRows, TargetRows
from runtime.sessions.ort import OrtSession
from runtime.sessions.ort_engines import load_engines
from tests.examples import example_manifest

ROOT = Path(__file__).parents[3]
NAMES = {f"{graph}.b{n}.onnx" for graph in ("target", "draft", "seed") for n in (1, 2, 4)}
FILES = {"stamp.json", "target.bin", "draft.bin", "seed.bin"} | NAMES


@pytest.fixture
def bundle(tiny_bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """A tiny bundle of batches 1, 2 and 4 that nobody has loaded."""
    return Path(shutil.copytree(tiny_bundle(), tmp_path / "bundle", ignore=shutil.ignore_patterns("packed")))


def load(bundle: Path) -> dict[tuple[str, int], ort.InferenceSession]:
    return load_engines(bundle, open_bundle(bundle).manifest, 1)


def results(bundle: Path) -> list[np.ndarray]:
    """What the engines of each batch compute."""
    session = OrtSession(bundle, open_bundle(bundle).manifest, 1)
    arrays = []
    for b in (1, 2, 4):
        slot, zero = np.arange(b), np.zeros(b, np.int64)
        out = session.verify(TargetRows(np.arange(3 * b), np.full(b, 3), zero, slot, zero))
        arrays += [out.logits.copy(), out.argmax.copy()]
        uniforms = np.full((b, 3), 0.4, np.float32)
        hot = np.ones(b, np.float32)
        draft = session.draft(DraftRows(zero + 5, zero + 3, zero + 3, zero + 3, slot, hot, uniforms))
        assert draft.q is not None
        arrays += [draft.ids.copy(), *(row.copy() for row in draft.q)]
    session.close()
    return arrays


def unshared(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The same with engines that each packed their own."""

    @contextmanager
    def none(path: Path, manifest: object) -> Iterator[Mapping[tuple[str, int], Path]]:
        yield {}

    with monkeypatch.context() as patch:
        patch.setattr(ort_engines, "packed_engines", none)
        return results(bundle)


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def packed(bundle: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (bundle / "packed").iterdir()}


def mapped(file: str) -> set[str]:
    """The files of that name that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if f"/{file}" in line}


def test_shared_engines_compute_the_same_bits(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = unshared(bundle, monkeypatch)
    assert not (bundle / "packed").exists()
    assert same(results(bundle), reference)
    assert set(packed(bundle)) == FILES
    made = packed(bundle)
    assert same(results(bundle), reference)
    assert packed(bundle) == made
    assert open_bundle(bundle).path == bundle


def test_every_batch_maps_the_same_file(bundle: Path) -> None:
    engines = load(bundle)
    assert len(engines) == 9
    for graph in ("target", "draft", "seed"):
        assert mapped(f"{graph}.bin") == {str(bundle / "packed" / f"{graph}.bin")}
    assert not {name for name in mapped("weights.bin") if name.startswith(str(bundle))}


def test_one_batch_keeps_nothing(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    limits, engines = replace(manifest.limits, batches=(2,)), tuple(e for e in manifest.engines if e.batch == 2)
    loaded = load_engines(bundle, replace(manifest, limits=limits, engines=engines), 1)
    assert set(loaded) == {("target", 2), ("draft", 2), ("seed", 2)}
    assert not (bundle / "packed").exists()


LOAD_AND_WEIGH = """
import re, sys
from pathlib import Path
from runtime.manifest import loads
from runtime.sessions.ort_engines import load_engines

def resident():
    return int(re.search(r"^Pss: +(\\d+)", Path("/proc/self/smaps_rollup").read_text(), re.M)[1])

path = Path(sys.argv[1])
manifest = loads((path / "manifest.json").read_text())
before = resident()
engines = load_engines(path, manifest, 1)
print(resident() - before)
"""


def test_five_batches_weigh_as_much_as_one(make_large: Callable[[tuple[int, ...]], Path]) -> None:
    """In KiB, of weights of 64 MiB: alone, by the load that packs, and by one that finds them packed."""
    one, five = make_large((1,)), make_large((1, 2, 4, 8, 16))
    alone, first, second = (int(run(LOAD_AND_WEIGH, path).stdout) for path in (one, five, five))
    assert alone > 60 << 10
    assert first < 1.3 * alone
    assert second < 1.3 * alone


@pytest.fixture
def make_large(tmp_path: Path) -> Callable[[tuple[int, ...]], Path]:
    """Writes a stand-in for a bundle: an engine a batch, 16 products with a matrix of 4 MiB each."""

    def make(batches: tuple[int, ...]) -> Path:
        path = tmp_path / f"large-{len(batches)}"
        path.mkdir()
        random = np.random.default_rng(0)
        weights = [
            onnx.numpy_helper.from_array(random.standard_normal((1024, 1024), np.float32), f"w{i}") for i in range(16)
        ]
        nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"]) for i in range(16)]
        for batch in batches:
            first, last = (
                helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 1024]) for name in ("x0", "x16")
            )
            graph = helper.make_graph(nodes, "target", [first], [last], weights)
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
            convert_model_to_external_data(model, location=f"weights.b{batch}")
            onnx.save(model, path / f"target.b{batch}.onnx")
        engines = tuple(EngineFile("target", n, f"target.b{n}.onnx") for n in batches)
        manifest = replace(example_manifest(), limits=Limits(batches, 16, 16, 64, 4, 8), engines=engines)
        (path / "manifest.json").write_text(dumps(manifest))
        return path

    return make


def run(code: str, path: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, str(path)], check=check, capture_output=True, text=True, cwd=ROOT
    )


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (lambda d: _flip(d / "target.bin"), "are damaged: target.bin was altered"),
    "an engine": (lambda d: _flip(d / "seed.b4.onnx"), "are damaged: seed.b4.onnx was altered"),
    "truncated": (lambda d: os.truncate(d / "draft.bin", 5000), "are damaged: draft.bin has another size"),
    "a file gone": (lambda d: (d / "draft.b2.onnx").unlink(), "are incomplete: no draft.b2.onnx"),
    "no stamp": (lambda d: (d / "stamp.json").unlink(), "are incomplete: no stamp.json"),
    "half a stamp": (lambda d: os.truncate(d / "stamp.json", 99), "are damaged"),
    "another stamp": (lambda d: (d / "stamp.json").write_text('{"files": {}}'), "are damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_made_again(
    bundle: Path, damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load(bundle)
    made = packed(bundle)
    harm, problem = DAMAGE[damage]
    harm(bundle / "packed")
    assert packed(bundle) != made
    assert same(results(bundle), unshared(bundle, monkeypatch))
    assert packed(bundle) == made
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert problem in record.message
    assert "\n" not in record.message


def test_another_processor_library_or_bundle_packs_again(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "runtime")
    path, manifest = bundle, open_bundle(bundle).manifest
    load_engines(path, manifest, 1)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    cpu = machine.cpu()
    for change in ("nothing", "processor", "library", "bundle"):
        caplog.clear()
        if change == "processor":
            monkeypatch.setattr(machine, "cpu", lambda: replace(cpu, features=(*cpu.features, "new")))
        if change == "library":
            monkeypatch.setattr(ort, "__version__", "99.0")
        if change == "bundle":
            manifest = replace(manifest, producer="another")
        load_engines(path, manifest, 1)
        expected = [] if change == "nothing" else ["are of another bundle, library or processor"]
        assert [record.message.rsplit("packed ones ")[-1] for record in caplog.records] == expected


def test_nowhere_to_keep_them(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    reference = unshared(bundle, monkeypatch)
    (bundle / "packed").write_bytes(b"in the way")
    engines = load(bundle)
    assert {Path(name).parent.parent for name in mapped("target.bin (deleted)")} == {tmp_path / "temporary"}
    assert len(engines) == 9
    assert not list((tmp_path / "temporary").iterdir())
    assert same(results(bundle), reference)
    assert (bundle / "packed").read_bytes() == b"in the way"
    assert all("can't be kept" in record.message for record in caplog.records)
    assert len(caplog.records) == 2


def test_full_disks(bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    reference = unshared(bundle, monkeypatch)

    def full(engine: Path, to: Path, weights: str) -> None:
        to.with_name(weights).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ort_packed, "_optimise", full)
    assert same(results(bundle), reference)
    assert not (bundle / "packed").exists()
    kept, shared = (record.message for record in caplog.records)
    assert "can't be kept ([Errno 28] No space left on device)" in kept
    assert "each engine holds its own copy" in shared


def test_an_engine_whose_weights_differ_packs_its_own(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, optimise = unshared(bundle, monkeypatch), ort_packed._optimise

    def differ(engine: Path, to: Path, weights: str) -> None:
        optimise(engine, to, weights)
        if engine.name == "target.b2.onnx":
            _flip(to.with_name(weights))

    monkeypatch.setattr(ort_packed, "_optimise", differ)
    assert same(results(bundle), reference)
    assert set(packed(bundle)) == FILES - {"target.b2.onnx"}
    assert same(results(bundle), reference)


KILLED = """
import os, signal, sys
from pathlib import Path
from runtime.bundle import open_bundle
from runtime.sessions import ort_packed
from runtime.sessions.ort_engines import load_engines

optimise = ort_packed._optimise

def kill(engine, to, weights):
    optimise(engine, to, weights)
    if engine.name == "draft.b2.onnx":
        os.kill(os.getpid(), signal.SIGKILL)

ort_packed._optimise = kill
path = Path(sys.argv[1])
load_engines(path, open_bundle(path).manifest, 1)
"""


def test_killed_in_the_middle(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(KILLED, bundle, check=False).returncode == -signal.SIGKILL
    left = {path.name for path in (bundle / "packed").iterdir()}
    assert "target.b1.onnx" in left
    assert "stamp.json" not in left
    assert same(results(bundle), unshared(bundle, monkeypatch))
    assert set(packed(bundle)) == FILES


AT_ONCE = """
import logging, sys
from pathlib import Path
from runtime.bundle import open_bundle
from runtime.sessions.ort_engines import load_engines

logging.basicConfig(level=logging.INFO)
path = Path(sys.argv[1])
manifest = open_bundle(path).manifest
print("ready", flush=True)
sys.stdin.readline()
print(len(load_engines(path, manifest, 1)))
"""


def test_of_two_processes_at_once_one_packs(bundle: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", AT_ONCE, str(bundle)]
    both = [subprocess.Popen(command, text=True, cwd=ROOT, **pipes) for _ in range(2)]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ends = [process.communicate() for process in both]
    assert [out for out, _ in ends] == ["9\n", "9\n"]
    assert sum(err.count("packing the weights") for _, err in ends) == 1
    assert set(packed(bundle)) == FILES


def test_a_refused_engine_is_named(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = open_bundle(bundle).manifest
    (bundle / "seed.b2.onnx").write_bytes(b"no model")
    with pytest.raises(BundleError, match=r"bundle/seed\.b2\.onnx: ONNX Runtime refuses this engine.*dspark-build"):
        load_engines(bundle, manifest, 1)
    assert not (bundle / "packed").exists()


def test_a_refused_packed_engine_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(bundle)
    (bundle / "packed" / "seed.b2.onnx").write_bytes(b"no model")
    monkeypatch.setattr(ort_packed, "_problem", lambda directory, origin: None)
    with pytest.raises(BundleError, match=r"packed/seed\.b2\.onnx.*Remove the directory packed"):
        load(bundle)
