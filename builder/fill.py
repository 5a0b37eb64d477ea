"""Weights for a bundle that travelled without: written from the checkpoints, on the machine that serves it.

Needs numpy, safetensors and gguf, and neither torch nor anything of ONNX.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from builder import checkpoints
from builder.errors import CheckpointError
from builder.spec import SourceInfo
from builder.weights import write_weights
from runtime.bundle import hash_file, open_bundle
from runtime.errors import BundleError
from runtime.machine import human_bytes
from runtime.manifest import PACKED_NAME, REBUILD, WEIGHTS_NAME, Source


@dataclass(frozen=True)
class Filled:
    """`size` in bytes of the weights; `written` is False where they were there already."""

    path: Path
    size: int
    written: bool


def fill(path: Path, target: Path, drafter: Path) -> Filled:
    """Write ``weights.bin`` of the bundle at `path` from the checkpoints that it was built from.

    It appears whole or not at all, and only with the bytes that the build recorded.

    Raises:
        BundleError: no bundle, no room or no right to write, another process at it, or weights that come out different.
        CheckpointError: not the checkpoints of the build, or damaged ones.
    """
    manifest = open_bundle(path, check="quick", weights=False).manifest
    weights, entry = path / WEIGHTS_NAME, manifest.files[WEIGHTS_NAME]
    if weights.is_file() and weights.stat().st_size == entry.size and hash_file(weights) == entry.sha256:
        return Filled(weights, entry.size, written=False)
    loaded = checkpoints.load_target(target)
    _check_source(target, loaded.source, manifest.target)
    drafting = checkpoints.load_drafter(drafter, loaded)
    _check_source(drafter, drafting.source, manifest.drafter)
    free = shutil.disk_usage(path).free
    if free < entry.size:
        raise BundleError(
            path,
            "not enough disk space for its weights",
            expected=human_bytes(entry.size),
            found=human_bytes(free),
            remedy="Free some space",
        )
    with _workplace(path) as folder:
        index = write_weights(folder, loaded, drafting, manifest.limits, manifest.backend.precision)
        found = hash_file(index.path)
        if found != entry.sha256:
            raise BundleError(
                weights,
                "comes out different from the build's, by another version of this program or its libraries",
                expected=f"sha256 {entry.sha256[:12]}…",
                found=f"{found[:12]}…",
                remedy=REBUILD,
            )
        with index.path.open("rb") as file:
            os.fsync(file.fileno())
        index.path.replace(weights)
    return Filled(weights, entry.size, written=True)


def _check_source(path: Path, found: SourceInfo, wanted: Source) -> None:
    """Raise CheckpointError naming the first file that isn't the build's."""
    for name, sha256 in wanted.files.items():
        if found.files.get(name) != sha256:
            raise CheckpointError(
                path / name if path.is_dir() else path,
                "is not what the bundle was built from",
                expected=f"sha256 {sha256[:12]}…",
                found=f"{found.files[name][:12]}…" if name in found.files else "no such file",
                remedy=f"Name the checkpoint {wanted.name!r} of the build",
            )


@contextmanager
def _workplace(path: Path) -> Iterator[Path]:
    """A folder on the bundle's file system, for one process at a time, gone afterwards."""
    packed = path / PACKED_NAME
    try:
        packed.mkdir(exist_ok=True)
        lock = os.open(packed, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(packed, error) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BundleError(path, "is being filled by another process", remedy="Wait for it") from None
        # What a killed process left.
        for left in packed.glob("weights-*"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            with tempfile.TemporaryDirectory(dir=packed, prefix="weights-") as folder:
                yield Path(folder)
        except OSError as error:
            raise _unwritable(packed, error) from error
    finally:
        os.close(lock)


def _unwritable(where: Path, error: OSError) -> BundleError:
    remedy = "Check the directory's rights and the disk"
    found = error.strerror or str(error)
    return BundleError(where, "can't be written", expected="a writable directory", found=found, remedy=remedy)
