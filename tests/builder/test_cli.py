"""`dspark-build`: what it prints, where, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from builder.cli import main
from runtime.bundle import open_bundle
from runtime.errors import CheckpointError
from tests.examples import Stages

ROOT = Path(__file__).resolve().parents[2]


def build_arguments(folder: Path, *more: str) -> list[str]:
    return ["build", "--target", str(folder), "--drafter", str(folder), "--out", str(folder / "out"), *more]


def one_line(capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    """The last line on stderr is the error; nothing is on stdout, and there is no traceback."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith(("[", "warning: "))]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]


def test_build_with_every_flag(stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--profile cpu --batch 1,2,4 --window 64 --max-seq-len 4096 --precision f32 --backend ort-cpu --overwrite"
    assert main(build_arguments(tmp_path, *flags.split())) == 0
    captured = capsys.readouterr()
    limits = open_bundle(tmp_path / "out").manifest.limits
    assert (limits.batches, limits.slots, limits.window, limits.max_seq_len) == ((1, 2, 4), 4, 64, 4096)
    lines = captured.err.splitlines()
    assert [line.partition("]")[0] for line in lines if line.startswith("[")] == [f"[{i}/8" for i in range(1, 9)]
    assert "[3/8] write weights (about " in captured.err
    assert sum(line.startswith("warning: --max-seq-len 4096 + block size 7") for line in lines) == 1
    out = tmp_path / "out"
    for part in (
        "a slot (4 + 1 for padding)",
        "window 64",
        "batches 1, 2, 4",
        f"python -m runtime validate {out}\n",
        f"python -m runtime chat {out}\n",
    ):
        assert part in captured.out


def test_progress_on_a_terminal(stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from builder import progress
    from builder.build import StageEvent

    shown = Console(force_terminal=True, width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "Console", lambda stderr: shown)
    with progress.reporter() as reporter:
        reporter.stage(StageEvent("write weights", 2, 8, 1.0, 30.0))
        reporter.warning("look [here]")
    text = shown.export_text()
    assert "[3/8] write weights" in text
    assert "s left" in text
    assert "warning: look [here]" in text


def test_existing_bundle(stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(build_arguments(tmp_path)) == 0
    capsys.readouterr()
    assert main(build_arguments(tmp_path)) == 1
    one_line(capsys, "the output exists; expected nothing; found a bundle. Pass --overwrite")
    assert main(build_arguments(tmp_path, "--overwrite")) == 0


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--window", "8"], "--window: is out of bounds; expected 9 to 4096 (from block size + 2 to"),
        (["--batch", "0"], "--batch: is out of bounds; expected batches from 1 to 1024; found 0"),
        (["--batch", "a"], "--batch: is no list of batches; expected numbers such as 1,2,4; found 'a'"),
        (["--max-seq-len", "1"], "--max-seq-len: is out of bounds"),
        (["--profile", "fast"], "--profile fast: no such profile"),
        (["--precision", "int3"], "--precision: can't be built for ort-cpu; expected f32; found 'int3'"),
        (["--backend", "quantum"], "--backend quantum: this version can't build for it; expected ort-cpu"),
        (["--backend", "ort-cuda", "--gpu", "sm89"], "--gpu: engines of ort-cuda are for no GPU in particular"),
        (["--target", "/absent/target"], "/absent/target: no such file or directory. Check the path"),
    ],
)
def test_bad_values(
    stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], expected: str
) -> None:
    assert main(build_arguments(tmp_path, *more)) == 1
    one_line(capsys, expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option",
    [
        "--batch=0",
        "--batch=1,1",
        "--batch=4,2,1",
        "--batch=-1",
        "--precision=f16",
        "--window=0",
        "--max-seq-len=1",
        "--out=/dev/full/x",
    ],
)
def test_mistakes_in_options_are_told_before_the_first_stage(
    stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main(build_arguments(tmp_path, option)) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option.partition('=')[0 if '/' not in option else 2]}: ")
    assert error.count("\n") == 1
    assert stages.calls == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            CheckpointError("model.safetensors", "is truncated", expected=5, found=4, remedy="Download it again"),
            "expected 5",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "weights.bin"), "weights.bin: the disk is full"),
        (OSError(errno.EACCES, "Permission denied", "weights.bin"), "weights.bin: Permission denied"),
        (MemoryError(), "out of memory. Free some memory, or choose a smaller --batch"),
        (
            ModuleNotFoundError("No module named 'gguf'", name="gguf"),
            "gguf is not installed. In the project's folder: pip install '.[build]'",
        ),
    ],
)
def test_errors_in_a_stage(
    stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException, expected: str
) -> None:
    stages.fail["compile"] = error
    assert main(build_arguments(tmp_path)) == 1
    one_line(capsys, expected)
    assert list(tmp_path.iterdir()) == []


def test_interrupted(stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages.fail["record"] = KeyboardInterrupt()
    assert main(build_arguments(tmp_path)) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert list(tmp_path.iterdir()) == []


def test_terminated(
    stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    enter = Stages.enter

    def terminate(self: Stages, name: str) -> None:
        enter(self, name)
        if name == "record":
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Stages, "enter", terminate)
    assert main(build_arguments(tmp_path)) == 143
    assert capsys.readouterr().err.splitlines()[-1] == "terminated"
    assert stages.calls[-1] == "record"
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_debug_and_faults_of_the_program(stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages.fail["compile"] = ModuleNotFoundError("No module named 'builder.nothing'", name="builder.nothing")
    with pytest.raises(ModuleNotFoundError):
        main(build_arguments(tmp_path))
    monkeypatch.setenv("DSPARK_DEBUG", "1")
    stages.fail["compile"] = CheckpointError("x", "is wrong")
    with pytest.raises(CheckpointError):
        main(build_arguments(tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [
        ["build"],
        ["build", "--target", "a", "--drafter", "b"],
        ["build", "--nothing"],
        ["build", "--target", "a", "--drafter", "b", "--out", "c", "--window", "many"],
        ["inspect"],
        ["inspect", "a", "--check", "some"],
        ["fly"],
    ],
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "Usage: dspark-build" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["build", "--help"], ["inspect", "-h"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Usage: dspark-build" in capsys.readouterr().out


def test_inspect_and_doctor(stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(build_arguments(tmp_path, "--window", "64"))
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limits"]["window"] == 64
    assert main(["inspect", str(tmp_path / "absent")]) == 1
    one_line(capsys, "absent: does not exist")
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backends"]["ort-cpu"]["can_build"] is True


def test_without_the_build_packages() -> None:
    hide = "import sys; sys.modules['click'] = None; from builder.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", hide], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "error: click is not installed. In the project's folder: pip install '.[build]'\n"


def test_a_closed_pipe_is_no_traceback(stages: Stages, tmp_path: Path) -> None:
    command = f"{sys.executable} -m builder.cli doctor | true"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_importing_the_command_line_is_light() -> None:
    code = "import sys, builder.commands; print('torch' in sys.modules, 'onnx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
