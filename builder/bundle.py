"""Writing a bundle: in a hidden sibling directory, then swapped in whole. POSIX only.

A build that fails, is killed or finds the disk full leaves the previous bundle, or none. What it leaves beside it
(``.NAME.partial-…``) is removed by the next build to the same output, unless the build that owns it still lives.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from runtime.bundle import hash_file
from runtime.errors import BundleError
from runtime.manifest import MANIFEST_NAME, FileEntry, Manifest, dumps, identity_of, outside_identity, recognised

_OWNER = ".owner"
_NO_BUNDLE = "the output exists and is not a bundle"
_YOUNG_SECONDS = 60.0
_NAME_MAX = 200
"""Bytes of a name from which its hidden siblings' are shortened; most file systems take 255."""
_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2


def check_output(out: Path, *, overwrite: bool) -> None:
    """Raise BundleError unless a bundle can and may be written to `out`: absent, or a bundle and `overwrite` is set.

    A directory counts as a bundle when its manifest says so (of whatever version) and it holds nothing else.
    """
    if not os.path.lexists(out):
        _check_place(out)
        return
    if not out.is_dir():
        found = "a file" if os.path.exists(out) else "a symbolic link that leads nowhere"
        remedy = "Choose another --out"
        raise BundleError(out, _NO_BUNDLE, expected="nothing, or a bundle", found=found, remedy=remedy)
    listed = _listed_files(out)
    if listed is None:
        remedy = "It is never replaced: choose another --out, or remove it yourself"
        found = f"a directory without a bundle's {MANIFEST_NAME}"
        raise BundleError(out, _NO_BUNDLE, expected="nothing, or a bundle", found=found, remedy=remedy)
    if not overwrite:
        remedy = "Pass --overwrite to replace it, or choose another --out"
        raise BundleError(out, "the output exists", expected="nothing", found="a bundle", remedy=remedy)
    known = {MANIFEST_NAME, _OWNER, *listed}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if name not in known and not outside_identity(name) and not (path.is_dir() and not path.is_symlink()):
            problem, remedy = "holds more than its bundle", "Move it away, or choose another --out"
            raise BundleError(out, problem, expected="the bundle's files alone", found=repr(name), remedy=remedy)
    _check_place(out)


def _listed_files(directory: Path) -> set[str] | None:
    """The files that a directory's manifest lists, or None when it is no bundle's. Other versions count too."""
    try:
        data = json.loads((directory / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return set(data["files"]) if recognised(data) else None


def _check_place(out: Path) -> None:
    """Raise BundleError unless a directory of that name can be made: a parent to write to, and no name too long."""
    out = Path(os.path.realpath(out))
    parent = out.parent
    while not os.path.lexists(parent):
        parent = parent.parent
    problem, remedy = "can't be written", "Choose another --out"
    if not parent.is_dir():
        found = f"{parent}, which is none"
        raise BundleError(out, problem, expected="a directory to write into", found=found, remedy=remedy)
    longest = os.pathconf(parent, "PC_NAME_MAX")
    size = max(len(os.fsencode(part)) for part in (*out.relative_to(parent).parts, ""))
    if size > longest:
        raise BundleError(
            out,
            "the name is too long",
            expected=f"at most {longest} bytes",
            found=size,
            remedy="Choose a shorter --out",
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        found, remedy = f"no right to write to {parent}", "Change its rights, or choose another --out"
        raise BundleError(out, problem, expected="a directory to write into", found=found, remedy=remedy)


def _hidden(out: Path, kind: str) -> str:
    """What the names of the hidden siblings of `out` begin with; a long name is shortened, so that theirs fit too."""
    name, encoded = out.name, os.fsencode(out.name)
    if len(encoded) > _NAME_MAX:
        name = f"{name[:40]}~{hashlib.sha256(encoded).hexdigest()[:16]}"
    return f".{name}.{kind}-"


class Staging:
    """A directory to write a bundle into, as a context: `commit` makes it the output, leaving without that removes it.

    Entering cleans up after builds that died and checks the output; so does `commit`. Both raise BundleError and
    OSError.
    """

    def __init__(self, out: Path, *, overwrite: bool) -> None:
        self._out = Path(os.path.realpath(out))
        self._overwrite = overwrite
        self._owner = -1
        self.directory = self._out.with_name(_hidden(self._out, "partial") + secrets.token_hex(6))

    def __enter__(self) -> Self:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        clean_stale(self._out)
        check_output(self._out, overwrite=self._overwrite)
        self.directory.mkdir()
        try:
            self._owner = _take_ownership(self.directory)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def commit(self) -> None:
        """Bring everything to the disk, then swap it in: readers see the old bundle or the new one, whole."""
        _sync_tree(self.directory)
        check_output(self._out, overwrite=self._overwrite)
        (self.directory / _OWNER).unlink()
        _swap(self.directory, self._out)
        _sync(self._out.parent)

    def _remove(self) -> None:
        # After a failure this is whatever was written; after an exchange it is the old bundle.
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1


def seal(directory: Path, manifest: Manifest) -> Manifest:
    """Hash every file in `directory`, fill in `files` and `identity`, and write ``manifest.json``. Raises OSError."""
    files = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in (MANIFEST_NAME, _OWNER) and not outside_identity(name):
            files[name] = FileEntry(path.stat().st_size, hash_file(path))
    manifest = replace(manifest, files=files)
    manifest = replace(manifest, identity=identity_of(manifest))
    (directory / MANIFEST_NAME).write_text(dumps(manifest), encoding="ascii", newline="\n")
    return manifest


def clean_stale(out: Path) -> None:
    """Undo what dead builds to `out` left: remove their partial directories, and finish a swap that was cut short."""
    out = Path(os.path.realpath(out))
    if not out.parent.is_dir():
        return
    prefixes = "|".join(f"(?P<{kind}>{re.escape(_hidden(out, kind))})" for kind in ("partial", "old"))
    left = re.compile(f"(?:{prefixes})[0-9a-f]{{12}}")
    for name in sorted(os.listdir(out.parent)):
        match = left.fullmatch(name)
        if match is None:
            continue
        path = out.with_name(name)
        if match["old"] and not os.path.lexists(out):
            os.rename(path, out)
        elif match["old"] or not _is_living(path):
            shutil.rmtree(path, ignore_errors=True)


def _take_ownership(directory: Path) -> int:
    """Lock the owner file for the life of this process (the kernel drops the lock when it dies, however it dies)."""
    descriptor = os.open(directory / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    # Some network file systems have no locks: the process id, written after the lock, has to do there.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _is_living(directory: Path) -> bool:
    """Whether the build that owns a partial directory may still be running."""
    try:
        descriptor = os.open(directory / _OWNER, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return _is_young(directory)
    try:
        text = os.read(descriptor, 32).strip()
        if not text.isdigit():
            return _is_young(directory)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return _process_lives(int(text))
    finally:
        os.close(descriptor)
    return False


def _is_young(directory: Path) -> bool:
    """A directory without an owner is being made or swapped in at this moment, or was left by a kill in that moment."""
    try:
        return time.time() - directory.stat().st_mtime < _YOUNG_SECONDS
    except OSError:
        return False


def _process_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _swap(directory: Path, out: Path) -> None:
    """Put `directory` in the place of `out`; what was there ends up at `directory`, or is removed."""
    if not os.path.lexists(out):
        if not _renameat2(directory, out, _RENAME_NOREPLACE):
            os.rename(directory, out)
        return
    if _renameat2(directory, out, _RENAME_EXCHANGE):
        return
    aside = out.with_name(_hidden(out, "old") + secrets.token_hex(6))
    os.rename(out, aside)
    try:
        os.rename(directory, out)
    except BaseException:
        os.rename(aside, out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _renameat2(source: Path, destination: Path, flags: int) -> bool:
    """Linux's renameat2(2). False where the C library, the kernel or the file system lacks it. Raises OSError."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    paths = [os.fsencode(path) for path in (source, destination)]
    if function(_AT_FDCWD, ctypes.c_char_p(paths[0]), _AT_FDCWD, ctypes.c_char_p(paths[1]), ctypes.c_uint(flags)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(destination))


def _sync_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
