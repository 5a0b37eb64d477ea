"""The library of kernels that a bundle takes along."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from builder.plugin_library import check_library, copy_library
from runtime.errors import ProfileError
from runtime.manifest import KERNELS_FILE, PLUGINS_FILE, Plugin
from tests.support import kernel_library


@pytest.mark.parametrize(("backend", "file"), [("ort-cuda", PLUGINS_FILE), ("tensorrt-rtx", KERNELS_FILE)])
def test_where_it_lies_and_what_it_is_called(tmp_path: Path, backend: str, file: str) -> None:
    library = kernel_library(tmp_path / "lib.so")
    check_library(library, backend, "sm_89" if backend == "tensorrt-rtx" else None)
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    assert copy_library(tmp_path, library, backend) == Plugin("dspark", digest[:12])
    assert (tmp_path / file).read_bytes() == library.read_bytes()


@pytest.mark.parametrize(
    ("change", "gpu", "message"),
    [
        (b"text", "sm_89", "is no library of kernels; expected a shared library; found another kind of file"),
        (b"\x7fELF and so on", "sm_89", "is another library; expected libdspark_kernels.so; found no dspark kernels"),
        (
            None,
            "sm_80",
            "has no code for --gpu sm_80; expected sm_80; found sm_86, sm_89, sm_120. "
            "Build plugins/ with -DCMAKE_CUDA_ARCHITECTURES=80, or leave --plugins out",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, change: bytes | None, gpu: str, message: str) -> None:
    library = kernel_library(tmp_path / "lib.so")
    if change is not None:
        library.write_bytes(change)
    with pytest.raises(ProfileError) as caught:
        check_library(library, "tensorrt-rtx", gpu)
    assert str(caught.value).startswith(f"--plugins {library}: {message}")
