"""Bundles that travel without weights: filled on another machine, with the build's bytes or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from builder import fill as fill_module
from builder.build import BuildOptions, build
from builder.cli import main
from builder.errors import BundleError, CheckpointError
from builder.fill import fill
from runtime import generate
from runtime.bundle import open_bundle
from runtime.inspect import describe, inspect
from runtime.manifest import PACKED_NAME, WEIGHTS_NAME
from tests.support import TINY, TINY_PAIRS, SilentProgress, tiny_prompts

PAIR = TINY_PAIRS / "llama"
TARGET, DRAFTER = PAIR / "target", PAIR / "drafter"


@pytest.fixture(scope="module")
def travelling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("travelling") / "bundle"
    profile = replace(TINY, batches=(1,))
    report = build(BuildOptions(TARGET, DRAFTER, out, profile, no_weights=True), SilentProgress())
    assert report.left_out == (WEIGHTS_NAME,)
    assert report.bundle_bytes < sum(entry.size for entry in report.manifest.files.values())
    return out


@pytest.fixture
def bundle(travelling: Path, tmp_path: Path) -> Path:
    shutil.copytree(travelling, tmp_path / "bundle")
    return tmp_path / "bundle"


def files(path: Path) -> dict[str, str]:
    return {
        p.relative_to(path).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in path.rglob("*")
        if p.is_file() and p.name != "report.json"
    }


def test_filled_it_is_the_bundle_that_was_built(bundle: Path, tiny_bundle: Callable[..., Path]) -> None:
    assert not (bundle / WEIGHTS_NAME).exists()
    filled = fill(bundle, TARGET, DRAFTER)
    assert filled.written
    assert files(bundle) == files(tiny_bundle("llama", batches=(1,)))
    assert open_bundle(bundle).manifest.identity == open_bundle(tiny_bundle("llama", batches=(1,))).manifest.identity
    prompt = tiny_prompts("llama")[0]
    (result,) = generate(bundle, [prompt["input_ids"]], max_new_tokens=8, ignore_eos=True)
    assert list(result.token_ids) == prompt["greedy_new_tokens"][:8]
    assert not fill(bundle, TARGET, DRAFTER).written


def test_without_weights_nothing_serves_and_all_say_how_to_fill(bundle: Path) -> None:
    line = f"{bundle}: has no weights yet; expected weights.bin; found none. Fill it: dspark-build weights"
    for opens in (open_bundle, lambda path: generate(path, [[1]])):
        with pytest.raises(BundleError, match=line):
            opens(bundle)
    facts = inspect(bundle)
    assert (facts["filled"], facts["runs_here"]) == (False, False)
    assert "weights   not filled yet" in describe(bundle)


def test_damaged_weights_are_written_anew(bundle: Path) -> None:
    fill(bundle, TARGET, DRAFTER)
    whole = (bundle / WEIGHTS_NAME).read_bytes()
    for damaged in (whole[:-1], whole[:99] + b"x" + whole[100:]):
        (bundle / WEIGHTS_NAME).write_bytes(damaged)
        assert fill(bundle, TARGET, DRAFTER).written
        assert (bundle / WEIGHTS_NAME).read_bytes() == whole


def test_other_checkpoints_are_refused(bundle: Path, tmp_path: Path) -> None:
    other = TINY_PAIRS / "qwen3"
    with pytest.raises(CheckpointError, match=r"config.json: is not what the bundle was built from; expected sha256"):
        fill(bundle, other / "target", other / "drafter")
    drafter = shutil.copytree(DRAFTER, tmp_path / "drafter")
    data = bytearray((drafter / "model.safetensors").read_bytes())
    data[-2] ^= 1
    (drafter / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model.safetensors: is not what the bundle was built from"):
        fill(bundle, TARGET, drafter)
    assert not (bundle / WEIGHTS_NAME).exists()


def test_other_bytes_leave_nothing(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def altered(folder: Path, *rest: object) -> object:
        index = original(folder, *rest)
        with index.path.open("r+b") as file:
            file.write(b"x")
        return index

    original = fill_module.write_weights
    monkeypatch.setattr(fill_module, "write_weights", altered)
    with pytest.raises(BundleError, match=r"weights.bin: comes out different .* expected sha256 .* found"):
        fill(bundle, TARGET, DRAFTER)
    assert not (bundle / WEIGHTS_NAME).exists()
    assert list((bundle / PACKED_NAME).iterdir()) == []


def test_a_full_disk_and_a_second_process(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
        with pytest.raises(BundleError, match=r"not enough disk space for its weights; expected .*; found 1 B"):
            fill(bundle, TARGET, DRAFTER)
    (bundle / PACKED_NAME).mkdir()
    left = bundle / PACKED_NAME / "weights-left"
    left.mkdir()
    lock = os.open(bundle / PACKED_NAME, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(BundleError, match="is being filled by another process"):
        fill(bundle, TARGET, DRAFTER)
    os.close(lock)
    fill(bundle, TARGET, DRAFTER)
    assert not left.exists()


def test_nothing_but_numpy_and_the_formats(bundle: Path) -> None:
    """In a process where torch and all of ONNX can't be imported."""
    script = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnxscript', 'onnx_ir', 'onnxruntime', 'transformers', 'ml_dtypes'):\n"
        "    sys.modules[name] = None\n"
        "from builder.cli import main\n"
        f"sys.exit(main(['weights', {str(bundle)!r}, '--target', {str(TARGET)!r}, '--drafter', {str(DRAFTER)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "weights.bin: " in done.stdout
    assert done.stdout.endswith(", written\n")
    open_bundle(bundle)


def test_the_command_line(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", str(bundle), "--target", str(TARGET), "--drafter", str(bundle)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "not a drafter checkpoint" in error or "config.json" in error
    assert main(["validate", str(bundle)]) == 1
    assert "has no weights yet" in capsys.readouterr().err
    assert main(["weights", str(bundle), "--target", str(TARGET), "--drafter", str(DRAFTER)]) == 0
    assert main(["weights", str(bundle), "--target", str(TARGET), "--drafter", str(DRAFTER)]) == 0
    assert capsys.readouterr().out.endswith("there already\n")
