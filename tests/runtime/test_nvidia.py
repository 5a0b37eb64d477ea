"""GPUs and driver, from stand-ins for the driver's libraries and the kernel module's file."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime import nvidia
from runtime.nvidia import Driver, Gpu

ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


class Cuda:
    """Two cards, the second of which doesn't answer."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDriverGetVersion(self, number: Any) -> int:
        number._obj.value = 12080
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return index

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"A card"
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:
        memory._obj.value = 24 << 30
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = {75: 12, 76: 1}[attribute]
        return 0

    def cuDeviceGetUuid_v2(self, identity: Any, device: Any) -> int:
        identity._obj[:] = list(ID.bytes)
        return 0


class Management:
    def __init__(self) -> None:
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"570.86.15"
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        return 0 if name == f"GPU-{ID}".encode() else 1

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj[:] = [24 << 30, 20 << 30, 4 << 30]
        return 0


def use(monkeypatch: pytest.MonkeyPatch, cuda: Any, management: Any) -> None:
    monkeypatch.setattr(nvidia, "_load", lambda name: cuda if name == "libcuda.so.1" else management)


def test_a_card_and_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    management = Management()
    use(monkeypatch, Cuda(), management)
    assert nvidia.gpus() == (Gpu("A card", "sm_121", 24 << 30, 20 << 30),)
    assert nvidia.gpus()[0].compute_capability == "12.1"
    assert nvidia.driver(tmp_path / "absent") == Driver("570.86.15", (12, 8))
    assert management.open == 0


def test_without_the_management_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, Cuda(), None)
    assert nvidia.gpus() == (Gpu("A card", "sm_121", 24 << 30, None),)
    file = tmp_path / "version"
    for text in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Nov 4 2026\nGCC version: gcc 12.2.0\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n",
    ):
        file.write_text(text)
        assert nvidia.driver(file) == Driver("580.159.04", (12, 8))


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, None, None)
    assert nvidia.gpus() == ()
    assert nvidia.driver(tmp_path / "absent") is None


def test_a_driver_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SimpleNamespace(cuInit=lambda flags: 999), None)
    assert nvidia.gpus() == ()


@pytest.mark.parametrize(
    ("found", "runs"),
    [
        (Driver("580.65.06", (13, 0)), True),
        (Driver("570.86.15", (12, 8)), False),
        (Driver("570.86.15", (13, 1)), True),
        (Driver("579.99", None), False),
        (Driver("580.00", None), True),
        (Driver(None, None), True),
    ],
)
def test_what_a_driver_runs(found: Driver, runs: bool) -> None:
    assert found.runs(580) is runs
