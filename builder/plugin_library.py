"""The library of CUDA kernels that a bundle may bring along: checked before a build, copied and named in it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from builder.errors import ProfileError
from builder.fatbin import kernel_code
from runtime.bundle import hash_file
from runtime.manifest import KERNELS_FILE, PLUGINS_FILE, Plugin

_ELF = b"\x7fELF"
_LAUNCHER = b"dspark_markov_chain"  # among the names that a library of launchers exports

_FILES: Mapping[str, str] = {"ort-cuda": PLUGINS_FILE, "tensorrt": KERNELS_FILE, "tensorrt-rtx": KERNELS_FILE}
"""Where a bundle of that back end has its kernels."""


def check_library(library: Path, backend: str, gpu: str | None) -> None:
    """Raise ProfileError unless bundles of that back end take plugins, and the file is a shared library of the kind
    that it takes, with code for the GPU, if one is known."""
    where = f"--plugins {library}"
    if backend not in _FILES:
        raise ProfileError(
            where,
            "this back end takes no plugins",
            expected=" or ".join(f"--backend {name}" for name in _FILES),
            found=f"--backend {backend}",
            remedy="Leave --plugins out",
        )
    name = Path(_FILES[backend]).name
    remedy = f"Pass the {name} built from plugins/, or leave --plugins out"
    try:
        with library.open("rb") as file:
            found = None if file.read(len(_ELF)) == _ELF else "another kind of file"
    except OSError as error:
        found = error.strerror or str(error)
    if found is not None:
        raise ProfileError(where, "is no library of kernels", expected="a shared library", found=found, remedy=remedy)
    if _FILES[backend] == KERNELS_FILE and _LAUNCHER not in library.read_bytes():
        raise ProfileError(where, "is another library", expected=name, found="no dspark kernels", remedy=remedy)
    if gpu is None:
        return
    code = kernel_code(library)
    if not code.runs_on(gpu):
        raise ProfileError(
            where,
            f"has no code for --gpu {gpu}",
            expected=gpu,
            found=str(code),
            remedy=f"Build plugins/ with -DCMAKE_CUDA_ARCHITECTURES={gpu.removeprefix('sm_')}, or leave --plugins out",
        )


def copy_library(directory: Path, library: Path, backend: str) -> Plugin:
    """Copy the library into the bundle; its version is the beginning of its own hash. Raises OSError."""
    path = directory / _FILES[backend]
    path.parent.mkdir()
    shutil.copyfile(library, path)
    return Plugin("dspark", hash_file(path)[:12])
