"""Checkpoints in: every packaging ends in the frozen specs of `builder.spec` and a lazy source of tensors.

`load_target` and `load_drafter` read headers and configurations only, and refuse what they can't serve with a one-line
CheckpointError. Nothing after this package knows what the files looked like.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from builder.checkpoints.config import show
from builder.checkpoints.deepspec import load_deepspec
from builder.checkpoints.huggingface import load_huggingface
from builder.checkpoints.safetensors_source import CONVERT, PICKLES
from builder.errors import CheckpointError
from builder.spec import DrafterCheckpoint, TargetCheckpoint

__all__ = ["load_drafter", "load_target"]

TARGETS = "a Hugging Face directory (config.json, *.safetensors) or a .gguf file"
DRAFTERS = "a DeepSpec directory (config.json, *.safetensors)"


def load_target(path: str | os.PathLike[str]) -> TargetCheckpoint:
    """Read a target: a Hugging Face directory, a GGUF file, or a directory with one GGUF file and no ``config.json``.

    Raises:
        CheckpointError: nothing there, an unknown packaging, or a checkpoint that can't be read as one.
    """
    path = Path(path)
    with _readable(path):
        if path.is_dir() and (path / "config.json").exists():
            return load_huggingface(path)
        return _load_gguf(_only_gguf(path) if path.is_dir() else path)


def _load_gguf(path: Path) -> TargetCheckpoint:
    _check_file(path, TARGETS)
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(
            path, "not a target checkpoint", expected=TARGETS, found="another file", remedy="Check the path"
        )
    from builder.checkpoints.gguf import load_gguf

    return load_gguf(path)


def load_drafter(path: str | os.PathLike[str], target: TargetCheckpoint) -> DrafterCheckpoint:
    """Read a DeepSpec drafter and check that it was made for `target`.

    Raises:
        CheckpointError: an unknown packaging, a checkpoint that can't be read as one, or a drafter for another target.
    """
    path = Path(path)
    with _readable(path):
        if path.is_dir():
            drafter = load_deepspec(path)
            check_fit(drafter, target)
            return drafter
        _check_file(path, DRAFTERS)
        raise CheckpointError(
            path, "not a drafter checkpoint", expected=DRAFTERS, found="a file", remedy="Name its directory"
        )


def check_fit(drafter: DrafterCheckpoint, target: TargetCheckpoint) -> None:
    """Raise CheckpointError unless drafter and target agree in width, vocabulary and number of target layers.

    These also make sure that the taps exist and that the target's embeddings and lm_head can stand in for missing ones.
    """
    for field, key, ours, theirs in (
        ("hidden size", "hidden_size", drafter.spec.hidden_size, target.spec.hidden_size),
        ("vocabulary", "vocab_size", drafter.spec.vocab_size, target.spec.vocab_size),
        ("number of target layers", "num_target_layers", drafter.spec.num_target_layers, target.spec.num_layers),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"{drafter.path / 'config.json'}: {key}",
                f"drafter and target differ in {field}",
                expected=f"{theirs} as in {target.path}",
                found=ours,
                remedy="Use the drafter that was trained for this target",
            )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What the operating system refuses on the way is the user's to mend, too."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            error.filename or path,
            "cannot be read",
            expected="readable files",
            found=error.strerror or error,
            remedy="Check the path and its rights",
        ) from None


def _check_file(path: Path, expected: str) -> None:
    if not path.exists():
        raise CheckpointError(
            path, "no such file or directory", expected=expected, found="nothing", remedy="Check the path"
        )
    if path.suffix.lower() in PICKLES:
        raise CheckpointError(path, "pickle weights", expected=expected, found=path.suffix, remedy=CONVERT)


def _only_gguf(path: Path) -> Path:
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(
            path,
            "several GGUF files",
            expected="one",
            found=show([file.name for file in files], 120),
            remedy="Name the file",
        )
    names = ", ".join(sorted(entry.name for entry in path.iterdir())[:5])
    raise CheckpointError(
        path, "not a target checkpoint", expected=TARGETS, found=names or "an empty directory", remedy="Check the path"
    )
