"""Library, GPU and driver of back ends whose engines run in one place only: each thing that doesn't fit is one line
with its remedy, told before anything is imported or allocated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import libraries, machine
from runtime.bundle import check_machine, open_bundle
from runtime.errors import BackendUnavailable, MemoryShortage
from runtime.libraries import BACKENDS
from runtime.machine import Driver, Gpu
from runtime.manifest import Backend
from tests.examples import tensorrt_example

MakeBundle = Callable[..., Path]
ADA = Gpu("Ada", "sm_89", 24 << 30, 20 << 30)
HOPPER = Gpu("Hopper", "sm_90", 80 << 30, 80 << 30)
AMPERE = Gpu("Ampere", "sm_86", 24 << 30, 20 << 30)
VOLTA = Gpu("Volta", "sm_70", 16 << 30, 16 << 30)
DRIVER = Driver("580.65.06", (13, 0))
RTX = {"tensorrt-rtx-cu13-bindings": "1.7.1.116", "tensorrt-rtx-cu13-libs": "1.7.1.116", "cuda-python": "13.0.1"}
FULL = {"tensorrt": "10.16.1.11", "tensorrt-cu13-libs": "10.16.1.11", "cuda-bindings": "13.0.1"}


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine another: these packages, GPUs and driver."""
    for name in ("tensorrt", "tensorrt-rtx"):
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], supported=True))
    monkeypatch.setattr("runtime.libraries._LIBRARY_FOLDERS", ())
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)

    def be(packages: dict[str, str], cards: tuple[Gpu, ...] = (ADA,), driver: Driver | None = DRIVER) -> None:
        monkeypatch.setattr(libraries, "installed", packages.get)
        monkeypatch.setattr(machine, "gpus", lambda: cards)
        monkeypatch.setattr(machine, "driver", lambda: driver)

    return be


@pytest.fixture
def rtx(make_bundle: MakeBundle) -> Path:
    return make_bundle(**tensorrt_example())


@pytest.fixture
def full(make_bundle: MakeBundle) -> Path:
    return make_bundle(
        "full", **tensorrt_example(backend=Backend("tensorrt", "tensorrt", "10.16.1.11", "sm_90", "f16"))
    )


def refused(path: Path, clause: str) -> None:
    before = set(sys.modules)
    with pytest.raises(BackendUnavailable) as caught:
        check_machine(open_bundle(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert clause in message
    assert not {name for name in set(sys.modules) - before if name.startswith(("tensorrt", "cuda", "onnxruntime"))}


def test_a_box_that_fits(rtx: Path, full: Path, box: Callable[..., None]) -> None:
    box(RTX)
    check_machine(open_bundle(rtx))
    box({**RTX, "cuda-python": None, "cuda-bindings": "13"}, (ADA, HOPPER), None)
    check_machine(open_bundle(rtx))
    box(FULL, (HOPPER,))
    check_machine(open_bundle(full))


@pytest.mark.parametrize(
    ("absent", "clause"),
    [
        (
            "tensorrt-rtx-cu13-bindings",
            "needs tensorrt-rtx-cu13-bindings, which is not installed. "
            "pip install tensorrt-rtx-cu13-bindings==1.7.1.116",
        ),
        (
            "tensorrt-rtx-cu13-libs",
            "needs tensorrt-rtx-cu13-libs, which is not installed. pip install tensorrt-rtx-cu13-libs==1.7.1.116",
        ),
        ("cuda-python", "needs cuda-python, which is not installed. pip install cuda-python"),
    ],
)
def test_a_package_is_missing(rtx: Path, box: Callable[..., None], absent: str, clause: str) -> None:
    box({**RTX, absent: None})
    refused(rtx, clause)


@pytest.mark.parametrize("version", ["1.7.2.5", "1.7.1.115", "1.6"])
@pytest.mark.parametrize("package", ["tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs"])
def test_another_version_newer_ones_too(rtx: Path, box: Callable[..., None], package: str, version: str) -> None:
    box({**RTX, package: version})
    expected = f"run only with the version that built them; expected {package} 1.7.1.116; found {version}."
    refused(rtx, f"{expected} pip install {package}==1.7.1.116, or rebuild the bundle with the version here")


def test_a_library_of_the_system(
    full: Path, box: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {**FULL, "tensorrt-cu13-libs": None}
    box(packages, (HOPPER,))
    # The package `tensorrt` would have brought its library: what is there are bindings alone.
    refused(full, "needs tensorrt-cu13-libs, which is not installed. pip install tensorrt-cu13-libs==10.16.1.11")
    folder = tmp_path / "lib"
    folder.mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    (folder / "libnvinfer.so.10").touch()
    check_machine(open_bundle(full))
    (folder / "libnvinfer.so.10.16.1").touch()
    check_machine(open_bundle(full))
    (folder / "libnvinfer.so.10.16.1").rename(folder / "libnvinfer.so.10.15.1")
    refused(full, "expected tensorrt-cu13-libs 10.16.1.11; found 10.15.1")


def test_no_gpu(rtx: Path, box: Callable[..., None]) -> None:
    expected = "needs a GPU, and the driver shows none; expected an NVIDIA GPU for tensorrt-rtx; found"
    box(RTX, (), None)
    refused(rtx, f"{expected} no driver. Serve it on a machine with a GPU")
    box(RTX, (), Driver("535.1", (12, 2)))
    refused(rtx, f"{expected} driver 535.1 (CUDA 12.2). Serve it")


def test_an_old_driver(rtx: Path, box: Callable[..., None]) -> None:
    box(RTX, (ADA,), Driver("570.86.15", (12, 8)))
    found = "found driver 570.86.15 (CUDA 12.8). Upgrade it"
    refused(rtx, f"the NVIDIA driver is too old; expected driver 580 or later (CUDA 13); {found}")
    box(RTX, (ADA,), Driver("570.86.15", (13, 0)))  # a compatibility package
    check_machine(open_bundle(rtx))


@pytest.mark.parametrize(
    ("cards", "clause"),
    [
        (
            (AMPERE,),
            "its engines run on another GPU; expected sm_89; found Ampere (sm_86). "
            "Rebuild the bundle with dspark-build build --overwrite --gpu sm86",
        ),
        ((HOPPER,), "found Hopper (sm_90). Serve it on a GPU of sm_89, or build with --backend ort-cuda"),
        (
            (AMPERE, ADA),
            "the GPU that its engines run on isn't the first; expected sm_89; found Ampere (sm_86), Ada (sm_89). "
            "Put that GPU first with the environment variable CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_another_gpu(rtx: Path, box: Callable[..., None], cards: tuple[Gpu, ...], clause: str) -> None:
    box(RTX, cards)
    refused(rtx, clause)


def test_full_tensorrt_is_rebuilt_on_the_machine_itself(full: Path, box: Callable[..., None]) -> None:
    box(FULL, (ADA,))
    refused(full, "expected sm_90; found Ada (sm_89). Rebuild the bundle with dspark-build build --overwrite on this")
    box(FULL, (VOLTA,))
    refused(full, "expected sm_90; found Volta (sm_70). Serve it on a GPU of sm_90")


def test_memory_of_the_gpu_comes_last(rtx: Path, box: Callable[..., None]) -> None:
    box(RTX, (replace(ADA, free=9000),))
    with pytest.raises(MemoryShortage) as caught:
        check_machine(open_bundle(rtx))
    kinds = "weights 4.9 KiB, taps 1.4 KiB, other 700 B, engines 2.4 KiB; 2 slots"
    assert f"needs more memory than the GPU has free; expected 9.4 KiB ({kinds}); found 8.8 KiB." in str(caught.value)
    box({**RTX, "cuda-python": None}, (replace(ADA, free=9000),))
    refused(rtx, "needs cuda-python")


def test_a_back_end_of_a_later_version(rtx: Path, box: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    box(RTX)
    monkeypatch.setitem(BACKENDS, "tensorrt-rtx", replace(BACKENDS["tensorrt-rtx"], supported=False))
    refused(rtx, "its back end can't run in this version; expected one of ort-cpu, ort-cuda")
