"""One copy of the packed weights for every batch.

ONNX Runtime packs the matrices of each session anew, so five fixed batches would hold their weights five times. It can
also write an engine together with its packed weights, and a session that loads such an engine maps them from the file:
sessions that load from one file share its pages. The file of a graph comes out the same for every batch, so here each
graph has one: it is made once, by the first load, and kept in the bundle.

What is kept fits one bundle, one version of the library and one kind of processor. `Origin` says which, and anything
else is packed again. ONNX Runtime on its part compares what it maps with what it would have packed, so weights in the
layout of another processor cost memory and not exactness.
"""

from __future__ import annotations

import ctypes
import fcntl
import filecmp
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from runtime import machine
from runtime.bundle import hash_file
from runtime.manifest import PACKED_NAME, FileEntry, Manifest, from_plain, identity_of, to_plain

Key = tuple[str, int]
"""A graph and a batch."""

_STAMP = "stamp.json"
# Smaller ones stay in the engine's own file: there may be constants of the batch among them.
_SHARED_BYTES = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """What packed weights depend on: the bundle's identity, the library's version, and the processor, whose features
    choose the kernels and with them the layout."""

    bundle: str
    library: str
    processor: str


@dataclass(frozen=True)
class Stamp:
    """``stamp.json``, written last: where the packed weights come from, and the size and hash of each file."""

    origin: Origin
    files: Mapping[str, FileEntry]


@contextmanager
def packed_engines(path: Path, manifest: Manifest) -> Iterator[Mapping[Key, Path]]:
    """While the block runs: files of the engines of the bundle at `path` that share packed weights with other batches.

    An engine without one has to load from the bundle and pack its own. The files may be gone after the block; sessions
    loaded in it keep their weights mapped. Where nothing can be written into the bundle, weights are packed for this
    process alone, and where that fails too (a full disk), nothing is shared; a warning is logged either way.
    """
    with ExitStack() as stack:
        try:
            files = stack.enter_context(_kept(path, manifest))
        except OSError as error:
            _log.warning("%s can't be kept (%s): weights are packed anew at each load", path / PACKED_NAME, error)
            temporary = tempfile.TemporaryDirectory(prefix="dspark-packed-", ignore_cleanup_errors=True)
            try:
                files = _pack(path, manifest, Path(stack.enter_context(temporary)))
            except OSError as failure:
                _log.warning("weights can't be packed (%s): each engine holds its own copy of them", failure)
                files = {}
        yield files
    # Packing, and comparing with it, took hundreds of megabytes for a while; a C library that keeps what was freed
    # (glibc) gives it back when told to.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _kept(path: Path, manifest: Manifest) -> Iterator[Mapping[Key, Path]]:
    """The files in the bundle, made or made again if need be. Raises OSError when they can't be.

    Whoever loads holds a lock on the bundle's directory, shared to read and exclusive to replace: nobody's files vanish
    while they are being loaded, of processes that start at once one packs, and a lock never outlives its process.
    """
    directory, origin = path / PACKED_NAME, _origin(manifest)
    with _locked(path, fcntl.LOCK_SH):
        if _problem(directory, origin) is None:
            yield _files(directory, manifest)
            return
    with _locked(path, fcntl.LOCK_EX):
        # Another process may have done it while this one waited.
        if (problem := _problem(directory, origin)) is not None:
            level = logging.WARNING if directory.exists() else logging.INFO
            _log.log(level, "packing the weights of %s: the packed ones %s", path, problem)
            _replace(directory, manifest, origin)
        yield _files(directory, manifest)


def _replace(directory: Path, manifest: Manifest, origin: Origin) -> None:
    """Pack into `directory`, in place of what lies there. The stamp comes last: without it, nothing there counts."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    try:
        _pack(directory.parent, manifest, directory)
        files = {f.name: FileEntry(f.stat().st_size, hash_file(f)) for f in sorted(directory.iterdir())}
        # Not synced: after a power cut the hashes tell.
        text = json.dumps(to_plain(Stamp(origin, files)), indent=2, sort_keys=True) + "\n"
        (directory / _STAMP).write_text(text, encoding="ascii", newline="\n")
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _pack(path: Path, manifest: Manifest, directory: Path) -> Mapping[Key, Path]:
    """Write ``GRAPH.bN.onnx`` for each engine and ``GRAPH.bin``, its weights plain and packed, into `directory`.

    An engine whose weights come out otherwise than those of its graph's first batch is left out. One engine is in
    memory at a time. Raises OSError.
    """
    for engine in manifest.engines:
        shared = directory / f"{engine.graph}.bin"
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch) / _file_name(engine.graph, engine.batch)
            _optimise(path / engine.file, made, shared.name)
            weights = made.with_name(shared.name)
            if not shared.exists():
                weights.rename(shared)
            elif not filecmp.cmp(weights, shared, shallow=False):
                continue
            made.rename(directory / made.name)
    return _files(directory, manifest)


def _optimise(engine: Path, to: Path, weights: str) -> None:
    """Have ONNX Runtime write `engine` to `to` as it would run it, and its weights to the file `weights` beside it."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(to)
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights)
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_min_size_in_bytes", str(_SHARED_BYTES)
    )
    try:
        ort.InferenceSession(str(engine), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the library has no narrower class for a disk that is full
        raise OSError(f"ONNX Runtime: {' '.join(str(error).split())}") from error


def _files(directory: Path, manifest: Manifest) -> Mapping[Key, Path]:
    paths = {(e.graph, e.batch): directory / _file_name(e.graph, e.batch) for e in manifest.engines}
    return {key: file for key, file in paths.items() if file.exists()}


def _file_name(graph: str, batch: int) -> str:
    return f"{graph}.b{batch}.onnx"


def _origin(manifest: Manifest) -> Origin:
    cpu = machine.cpu()
    return Origin(identity_of(manifest), ort.__version__, " ".join((cpu.architecture, cpu.model, *cpu.features)))


def _problem(directory: Path, origin: Origin) -> str | None:
    """Why what lies in `directory` can't be used, or None. Every file is hashed: its plain weights are used unseen."""
    try:
        stamp = from_plain(Stamp, json.loads((directory / _STAMP).read_bytes()), _STAMP)
        if stamp.origin != origin:
            return "are of another bundle, library or processor"
        for name, entry in stamp.files.items():
            if (directory / name).stat().st_size != entry.size:
                return f"are damaged: {name} has another size"
        with ThreadPoolExecutor() as pool:
            found = pool.map(hash_file, (directory / name for name in stamp.files))
            for (name, entry), digest in zip(stamp.files.items(), found, strict=True):
                if digest != entry.sha256:
                    return f"are damaged: {name} was altered"
    except FileNotFoundError as error:
        return f"are incomplete: no {Path(error.filename).name}"
    except ValueError as error:
        return f"are damaged: {error}"
    return None


@contextmanager
def _locked(directory: Path, operation: int) -> Iterator[None]:
    """Hold a lock on a directory, of this process: the kernel drops it when the process dies, however it dies. Raises
    OSError where the file system has no locks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)
