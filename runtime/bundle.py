"""Opening a bundle: is it whole, unaltered, of this version, and can this machine run it? All of it before any
allocation.
"""

from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from runtime import machine
from runtime.errors import BackendUnavailable, BundleError
from runtime.libraries import BACKENDS, SUPPORTED, installed, release
from runtime.machine import human_bytes
from runtime.manifest import (
    MANIFEST_NAME,
    NOT_A_BUNDLE,
    REBUILD,
    REMOVE,
    TOKENIZER_FILE,
    WEIGHTS_NAME,
    FileEntry,
    Manifest,
    identity_of,
    loads,
    outside_identity,
)

Check = Literal["full", "quick"]

FILL = "Fill it: dspark-build weights DIR --target TARGET --drafter DRAFTER"

_GRAPHS = ("target", "draft", "seed")
_CUDA_GRAPHS = (*_GRAPHS, "draft_sampled")
_COUNTS = ("slots", "window", "max_seq_len", "prefill_chunk", "block_size")
_READ_BYTES = 1 << 20
_THREADED_BYTES = 64 << 20


@dataclass(frozen=True)
class Bundle:
    """A bundle that has been checked. `path` is absolute, so it holds from any working directory."""

    path: Path
    manifest: Manifest

    @property
    def has_tokenizer(self) -> bool:
        """Whether text prompts can be served; without a tokenizer only token ids can."""
        return TOKENIZER_FILE in self.manifest.files

    def file(self, name: str) -> Path:
        """The path of one of the bundle's files. Raises BundleError when the manifest doesn't list it."""
        if name not in self.manifest.files:
            raise BundleError(self.path / MANIFEST_NAME, f"lists no file {name!r}", remedy=REBUILD)
        return self.path / name


def open_bundle(path: str | os.PathLike[str], check: Check = "full", weights: bool = True) -> Bundle:
    """Read a bundle's manifest and check its files.

    ``full`` compares the sha256 of every file, ``quick`` only their sizes. Either way the manifest's own identity hash
    is checked, and no file may lie outside the directory. With `weights` False the weights are
    not looked at: a bundle can travel without. Raises BundleError naming the file or key at fault.
    """
    if check not in ("full", "quick"):
        raise BundleError(
            "check", "is unknown", expected="'full' or 'quick'", found=repr(check), remedy="Pass one of them"
        )
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(name, str):
        raise BundleError(
            "path", "is no path", expected="a str or os.PathLike", found=type(name).__name__, remedy=NOT_A_BUNDLE
        )
    root = Path(os.path.abspath(name))
    manifest = _read_manifest(root)
    _check_consistency(manifest, root / MANIFEST_NAME)
    if weights and not os.path.lexists(root / WEIGHTS_NAME):
        raise BundleError(root, "has no weights yet", expected=WEIGHTS_NAME, found="none", remedy=FILL)
    files = {name: entry for name, entry in manifest.files.items() if weights or name != WEIGHTS_NAME}
    paths = {name: _locate(root, name, entry) for name, entry in files.items()}
    if check == "full":
        _check_hashes(paths, manifest)
    return Bundle(root, manifest)


def _read_manifest(root: Path) -> Manifest:
    where = root / MANIFEST_NAME
    if not os.path.lexists(root):
        raise BundleError(root, "does not exist", expected="a bundle", found="nothing", remedy=NOT_A_BUNDLE)
    if not root.is_dir():
        raise BundleError(root, "is not a bundle", expected="a directory", found="a file", remedy=NOT_A_BUNDLE)
    try:
        text = where.read_bytes().decode("ascii")
    except FileNotFoundError:
        raise BundleError(root, f"is not a bundle: it has no {MANIFEST_NAME}", remedy=NOT_A_BUNDLE) from None
    except UnicodeDecodeError as error:
        raise BundleError(where, f"is damaged: no ASCII text at byte {error.start}", remedy=REMOVE) from None
    except OSError as error:
        raise _unreadable(where, error) from None
    manifest = loads(text, str(where))
    identity = identity_of(manifest)
    if identity != manifest.identity:
        expected, found = f"identity {identity[:12]}…", f"{manifest.identity[:12]}…"
        raise BundleError(where, "was altered after the build", expected=expected, found=found, remedy=REMOVE)
    return manifest


def _check_consistency(manifest: Manifest, where: Path) -> None:
    """Raise BundleError naming the first key whose value no build writes: the runtime relies on all of this."""
    limits, serving = manifest.limits, manifest.serving
    batches, block, threshold = limits.batches, limits.block_size, serving.confidence_threshold
    counts = {f"limits.{name}": getattr(limits, name) for name in _COUNTS} | {
        "models.vocab_size": manifest.models.vocab_size
    }
    ascending = bool(batches) and batches[0] >= 1 and list(batches) == sorted(set(batches))
    engines = {(engine.graph, engine.batch) for engine in manifest.engines}
    cuda = manifest.backend.name == "ort-cuda"
    wanted = [(graph, batch) for graph in (_CUDA_GRAPHS if cuda else _GRAPHS) for batch in batches]
    absent = [f"{graph} for batch {batch}" for graph, batch in wanted if (graph, batch) not in engines]
    needed = (WEIGHTS_NAME, *["weights.json"] * cuda, *(engine.file for engine in manifest.engines))
    unlisted = [name for name in needed if name not in manifest.files]
    rules: tuple[tuple[str, bool, str, object], ...] = (
        ("limits.batches", ascending, "ascending numbers from 1", list(batches)),
        *((key, count >= 1, "1 or more", count) for key, count in counts.items()),
        ("limits.prefill_chunk", limits.prefill_chunk <= limits.window, "at most the window", limits.prefill_chunk),
        ("serving.max_draft", 0 <= serving.max_draft <= block, f"0 to {block}", serving.max_draft),
        ("serving.confidence_threshold", 0 <= threshold <= 1, "0 to 1", threshold),
        ("engines", not absent, "each graph for each batch", f"no {', '.join(absent[:1])}"),
        ("files", not unlisted, "the weights and every engine", f"no {', '.join(map(repr, unlisted[:1]))}"),
        ("state", bool(manifest.state), "a tensor or more", "none"),
    )
    for key, holds, expected, found in rules:
        if not holds:
            raise BundleError(where, f"key {key!r} is wrong", expected=expected, found=found, remedy=REBUILD)


def _locate(root: Path, name: str, entry: FileEntry) -> Path:
    """The path of file `name` after checking that it lies in the bundle, is a regular file, and has its size."""
    parts = PurePosixPath(name).parts
    foreign = not parts or name.startswith("/") or ".." in parts or any(character in name for character in "\\\0")
    if foreign or name == MANIFEST_NAME or outside_identity(name):
        where, problem = root / MANIFEST_NAME, f"file name {name!r} is not allowed"
        raise BundleError(where, problem, expected="a path inside the bundle", found=repr(name), remedy=REBUILD)
    path = root.joinpath(*parts)
    try:
        if not path.resolve(strict=True).is_relative_to(root.resolve()):
            raise BundleError(path, "leads outside the bundle", expected="a file in it, not a link", remedy=REBUILD)
        found = path.stat()
    except FileNotFoundError:
        raise BundleError(path, "is missing from the bundle", remedy=REBUILD) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(found.st_mode):
        raise BundleError(path, "is no regular file", remedy=REBUILD)
    if found.st_size != entry.size:
        problem = "is truncated" if found.st_size < entry.size else "is longer than when it was built"
        raise BundleError(path, problem, expected=f"{entry.size} bytes", found=f"{found.st_size}", remedy=REBUILD)
    return path


def _check_hashes(paths: dict[str, Path], manifest: Manifest) -> None:
    # hashlib releases the GIL, so large files are hashed side by side; small ones aren't worth a thread.
    large = {name: path for name, path in paths.items() if manifest.files[name].size >= _THREADED_BYTES}
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        pending = {name: pool.submit(hash_file, path) for name, path in large.items()}
        for name, path in paths.items():
            try:
                found = pending[name].result() if name in pending else hash_file(path)
            except OSError as error:
                raise _unreadable(path, error) from None
            wanted = manifest.files[name].sha256
            if found != wanted:
                expected, problem = f"sha256 {wanted[:12]}…", "was altered after the build"
                raise BundleError(path, problem, expected=expected, found=f"{found[:12]}…", remedy=REBUILD)


def _unreadable(path: Path, error: OSError) -> BundleError:
    remedy = "Check the file's rights and the disk"
    return BundleError(path, "can't be read", expected="a readable file", found=error.strerror or error, remedy=remedy)


def hash_file(path: Path) -> str:
    """The sha256 (hex) of a file, read in large pieces. Raises OSError."""
    digest = hashlib.sha256()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def check_machine(bundle: Bundle, available: int | None = None) -> None:
    """Can this machine run `bundle`? Nothing is imported or allocated.

    `available` is the memory to count on in bytes (default: what the machine tells; unknown memory isn't checked).
    Raises BackendUnavailable (library missing or too old, back end unknown here) or BundleError (not enough memory).
    """
    backend = bundle.manifest.backend
    where = bundle.path
    if backend.name not in SUPPORTED:
        raise BackendUnavailable(
            where,
            "its back end can't run in this version",
            expected=" or ".join(SUPPORTED),
            found=backend.name,
            remedy=f"{REBUILD} --backend {SUPPORTED[0]}",
        )
    packages = BACKENDS[backend.name].libraries
    found = next((version for version in map(installed, packages) if version), None)
    remedy = f"pip install '{packages[0]}>={backend.version}'"
    if found is None:
        raise BackendUnavailable(where, f"needs {backend.library}, which is not installed", remedy=remedy)
    if release(found) < release(backend.version):
        wanted = f"{backend.library} >= {backend.version}"
        raise BackendUnavailable(
            where, f"{backend.library} is older than the build's", expected=wanted, found=found, remedy=remedy
        )
    memory = bundle.manifest.memory
    where_memory = "is free"
    if BACKENDS[backend.name].architectures:
        gpus = machine.gpus()
        if not gpus:
            raise BackendUnavailable(
                where,
                "needs a GPU, and the driver shows none",
                expected=f"an NVIDIA GPU for {backend.name}",
                found="none",
                remedy="Serve it on a machine with a GPU and its driver, or build with --backend ort-cpu",
            )
        available, where_memory = gpus[0].memory if available is None else available, "the GPU has"
    elif available is None:
        available = machine.available_memory()
    if available is not None and memory.total > available:
        limits = bundle.manifest.limits
        raise BundleError(
            where,
            f"needs more memory than {where_memory}",
            expected=f"{human_bytes(memory.total)} ({limits.slots} slots of {human_bytes(memory.per_slot)})",
            found=human_bytes(available),
            remedy=f"{REBUILD} and a smaller --batch, --max-seq-len or --window, or free some memory",
        )
