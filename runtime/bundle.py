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

from runtime.consistency import check_consistency, check_records
from runtime.engine_records import read_records
from runtime.errors import BundleError, MemoryShortage
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
from runtime.preflight import Preflight, preflight
from runtime.requirements import check_backend
from runtime.tensorrt_flavours import FLAVOURS

Check = Literal["full", "quick"]

FILL = "Fill it: dspark-build weights DIR --target TARGET --drafter DRAFTER"

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
    check_consistency(manifest, root / MANIFEST_NAME)
    if weights and not os.path.lexists(root / WEIGHTS_NAME):
        raise BundleError(root, "has no weights yet", expected=WEIGHTS_NAME, found="none", remedy=FILL)
    files = {name: entry for name, entry in manifest.files.items() if weights or name != WEIGHTS_NAME}
    paths = {name: _locate(root, name, entry) for name, entry in files.items()}
    if check == "full":
        _check_hashes(paths, manifest)
    if manifest.backend.name in FLAVOURS:
        check_records(manifest, root)
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


def memory_of(bundle: Bundle, available: int | None = None) -> Preflight:
    """What `bundle` needs of memory, and what is free; `available` is the memory to count on instead."""
    records = read_records(bundle.path) if bundle.manifest.backend.name in FLAVOURS else ()
    return preflight(bundle.manifest, records, available)


def check_machine(bundle: Bundle, available: int | None = None) -> None:
    """Can this machine run `bundle`? No inference library is imported, and nothing allocated.

    `available` is the memory to count on in bytes (default: what the machine tells; unknown memory isn't checked).

    Raises:
        BackendUnavailable: a library that is missing, too old or of another version, no GPU or driver that runs the
            engines, or a back end that this version doesn't have.
        MemoryShortage: a BundleError.
    """
    check_backend(bundle.path, bundle.manifest.backend)
    memory = memory_of(bundle, available)
    if not memory.fits:
        raise MemoryShortage(
            bundle.path,
            f"needs more memory than {'the GPU has' if memory.on == 'gpu' else 'is'} free",
            expected=f"{human_bytes(memory.total)} ({memory.kinds()}; {bundle.manifest.limits.slots} slots)",
            found=human_bytes(memory.free or 0),
            remedy=f"{REBUILD} and a smaller --batch, --max-seq-len or --window, or free some memory",
        )
