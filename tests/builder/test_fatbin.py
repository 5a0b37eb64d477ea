"""Which GPUs a library of kernels has code for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from builder.fatbin import KernelCode, kernel_code
from tests.support import kernel_library


def test_what_each_fat_binary_has(tmp_path: Path) -> None:
    library = kernel_library(tmp_path / "lib.so", elf=(80, 89), ptx=(120,))
    code = kernel_code(library)
    assert code == KernelCode(frozenset({80, 89}), frozenset({120}))
    assert str(code) == "sm_80, sm_89, PTX 120"
    # Cut anywhere: no error, and nothing that isn't there.
    whole = library.read_bytes()
    for size in range(1, len(whole), 7):
        library.write_bytes(whole[:size])
        assert kernel_code(library).elf <= {80, 89}


@pytest.mark.parametrize(
    ("gpu", "runs"),
    [
        ("sm_75", False),
        ("sm_80", True),
        ("sm_86", True),
        ("sm_90", False),
        ("sm_100", False),
        ("sm_120", True),
        ("sm_121", True),
        ("any", False),
    ],
)
def test_what_runs_where(gpu: str, runs: bool) -> None:
    assert KernelCode(frozenset({80, 89}), frozenset({120})).runs_on(gpu) is runs


def test_no_code_at_all(tmp_path: Path) -> None:
    library = kernel_library(tmp_path / "lib.so", elf=())
    assert str(kernel_code(library)) == "no code for a GPU"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_what_nvcc_writes(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text("__global__ void k(float* x) { x[0] = 1; }\nvoid f() { k<<<1, 1>>>(0); }\n")
    generate = [f"-gencode=arch=compute_{a},code={c}" for a, c in ((80, "sm_80"), (90, "sm_90"), (120, "compute_120"))]
    object_file = tmp_path / "kernel.o"
    subprocess.run(["nvcc", "-c", *generate, str(source), "-o", str(object_file)], check=True)
    assert kernel_code(object_file) == KernelCode(frozenset({80, 90}), frozenset({120}))
