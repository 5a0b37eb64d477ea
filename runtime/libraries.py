"""Back ends and the packages they need, looked up in the installed packages' metadata without importing any of them."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

RUN_PACKAGES = ("numpy", "tokenizers", "jinja2")
BUILD_PACKAGES = ("torch", "onnx", "onnxscript", "onnx-ir", "safetensors", "gguf", "click", "rich")


@dataclass(frozen=True)
class BackendInfo:
    """What a back end takes to run and to build.

    `supported` says whether this version has it. `libraries` are the packages that bring its inference library, the
    first being the one to recommend; one is enough, and `build_needs_library` says whether building needs one too.
    `architectures` lists GPU architectures it runs on (empty: no GPU needed), and `build_gpu` says whether building
    needs the GPU as well.
    """

    supported: bool
    libraries: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    build_gpu: bool = False
    build_needs_library: bool = True


_CUDA = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100")
BACKENDS = {
    "ort-cpu": BackendInfo(True, ("onnxruntime", "onnxruntime-gpu")),
    "ort-cuda": BackendInfo(True, ("onnxruntime-gpu",), _CUDA, build_needs_library=False),
    "tensorrt": BackendInfo(
        False, ("tensorrt", "tensorrt-cu13"), ("sm_80", "sm_90", "sm_100", "sm_103"), build_gpu=True
    ),
    "tensorrt-rtx": BackendInfo(
        False, ("tensorrt-rtx-cu13-bindings",), ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121")
    ),
}
SUPPORTED = tuple(name for name, info in BACKENDS.items() if info.supported)


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version, for comparison: ``1.32.0+cpu`` is (1, 32), trailing zeros dropped."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
