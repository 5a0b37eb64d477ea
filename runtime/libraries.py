"""Back ends and the packages they need, looked up in the installed packages' metadata without importing any of them."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RUN_PACKAGES = ("numpy", "tokenizers", "jinja2")
BUILD_PACKAGES = ("torch", "onnx", "onnxscript", "onnx-ir", "safetensors", "gguf", "click", "rich")
CUDA_PACKAGES = ("cuda-python", "cuda-bindings")
"""Either brings the module ``cuda.bindings``; the first is the one to recommend."""

PLUGINS_VARIABLE = "DSPARK_PLUGINS"
"""The environment variable that names a library of kernels, or the directory that it lies in."""


@dataclass(frozen=True)
class BackendInfo:
    """What a back end takes to run and to build.

    `supported` says whether this version has it. `libraries` are the packages that bring its inference library, the
    first being the one to recommend; one is enough, and `build_needs_library` says whether building needs one too.
    `architectures` lists GPU architectures it runs on (empty: no GPU needed), and `build_gpu` says whether building
    needs the GPU as well.

    Where those packages may be bindings alone, `natives` are those that bring what they bind, the first again being
    the one to recommend, and `soname` is the beginning of its file's name, for a library installed without pip.
    `run_packages` are needed to run, one of each group. `exact`: an engine runs with the version of the library that
    built it and on the architecture it was built for, and no other. `driver` is the least that runs it.
    """

    supported: bool
    libraries: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    build_gpu: bool = False
    build_needs_library: bool = True
    natives: tuple[str, ...] = ()
    soname: str = ""
    run_packages: tuple[tuple[str, ...], ...] = ()
    exact: bool = False
    driver: int = 0

    @property
    def packages(self) -> tuple[str, ...]:
        """All that it may look for."""
        return (*self.libraries, *self.natives, *(name for group in self.run_packages for name in group))


@dataclass(frozen=True)
class Library:
    """What is installed of an inference library: the versions of its bindings and of what they bind, None if absent;
    ``unknown`` where a file doesn't tell."""

    bindings: str | None
    native: str | None


CUDA_DRIVER = 580
"""The first driver of CUDA 13."""

_CUDA = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100")
_RTX = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121")
_TENSORRT = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
BACKENDS = {
    "ort-cpu": BackendInfo(True, ("onnxruntime", "onnxruntime-gpu")),
    "ort-cuda": BackendInfo(True, ("onnxruntime-gpu",), _CUDA, build_needs_library=False),
    # The package of that name is empty, and takes along tensorrt-cu13 and with it bindings and libraries.
    "tensorrt": BackendInfo(
        True,
        ("tensorrt", "tensorrt-cu13", "tensorrt-cu13-bindings"),
        _TENSORRT,
        build_gpu=True,
        natives=("tensorrt-cu13-libs",),
        soname="libnvinfer.so",
        run_packages=(CUDA_PACKAGES,),
        exact=True,
        driver=CUDA_DRIVER,
    ),
    "tensorrt-rtx": BackendInfo(
        True,
        ("tensorrt-rtx-cu13-bindings",),
        _RTX,
        natives=("tensorrt-rtx-cu13-libs",),
        soname="libtensorrt_rtx.so",
        run_packages=(CUDA_PACKAGES,),
        exact=True,
        driver=CUDA_DRIVER,
    ),
}
SUPPORTED = tuple(name for name, info in BACKENDS.items() if info.supported)

_LIBRARY_FOLDERS = tuple(
    Path("/usr", folder)
    for folder in ("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib64", "lib", "local/lib", "local/tensorrt/lib")
)


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def library(info: BackendInfo, packages: Mapping[str, str | None]) -> Library:
    """What `packages`, by name with their versions, and the system's folders have of a back end's library."""
    bindings = _first(info.libraries, packages)
    if not info.natives:
        return Library(bindings, bindings)
    return Library(bindings, _first(info.natives, packages) or system_library(info.soname))


def library_remedies(info: BackendInfo, found: Library, version: str = "") -> list[tuple[str, str]]:
    """The parts of the library that are missing, each with the command that brings it, of a `version` or any."""
    pin = f"=={version}" if version else ""
    missing = []
    if found.bindings is None:
        missing.append((info.libraries[0], f"pip install {info.libraries[0]}{pin}"))
    if found.native is None and (found.bindings is not None or not _comes_along(info)):
        # Bindings without their library are of that very version.
        pin = pin or (f"=={found.bindings}" if found.bindings else "")
        missing.append((info.natives[0], f"pip install {info.natives[0]}{pin}"))
    return missing


def system_library(soname: str, folders: tuple[Path, ...] = _LIBRARY_FOLDERS) -> str | None:
    """The version that the name of a library's file ends with, in ``LD_LIBRARY_PATH`` or the system's `folders`;
    ``unknown`` where it says less than two numbers, None where there is no such file."""
    named = (Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder)
    for folder in (*named, *folders):
        versions = [path.name.removeprefix(f"{soname}.") for path in folder.glob(f"{soname}.*")]
        if versions:
            longest = max(versions, key=len)
            return longest if "." in longest else "unknown"
    return None


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version, for comparison: ``1.32.0+cpu`` is (1, 32), trailing zeros dropped."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _first(names: tuple[str, ...], packages: Mapping[str, str | None]) -> str | None:
    return next((version for name in names if (version := packages.get(name))), None)


def _comes_along(info: BackendInfo) -> bool:
    """Whether the package to recommend brings the native library too: it isn't itself the bindings."""
    return not info.libraries[0].endswith("-bindings")
