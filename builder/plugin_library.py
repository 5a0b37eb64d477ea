"""The library of CUDA kernels that a bundle may bring along: checked before a build, copied and named in it."""

from __future__ import annotations

import shutil
from pathlib import Path

from builder.errors import ProfileError
from runtime.bundle import hash_file
from runtime.manifest import PLUGINS_FILE, Plugin

_ELF = b"\x7fELF"


def check_library(library: Path, backend: str) -> None:
    """Raise ProfileError unless bundles of that back end take plugins, and the file is a shared library."""
    where, remedy = f"--plugins {library}", "Pass the libdspark_ort.so built from plugins/, or leave --plugins out"
    if backend != "ort-cuda":
        problem = "this back end takes no plugins"
        raise ProfileError(where, problem, expected="--backend ort-cuda", found=f"--backend {backend}", remedy=remedy)
    try:
        with library.open("rb") as file:
            found = None if file.read(len(_ELF)) == _ELF else "another kind of file"
    except OSError as error:
        found = error.strerror or str(error)
    if found is not None:
        raise ProfileError(where, "is no library of kernels", expected="a shared library", found=found, remedy=remedy)


def copy_library(directory: Path, library: Path) -> Plugin:
    """Copy the library into the bundle; its version is the beginning of its own hash. Raises OSError."""
    path = directory / PLUGINS_FILE
    path.parent.mkdir()
    shutil.copyfile(library, path)
    return Plugin("dspark", hash_file(path)[:12])
