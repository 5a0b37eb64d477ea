"""NVIDIA GPUs and their driver, asked of the driver's own libraries by ctypes: no package is needed, and no memory of
the GPU is taken."""

from __future__ import annotations

import ctypes
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VERSION_FILE = Path("/proc/driver/nvidia/version")
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
_MAJOR, _MINOR = 75, 76


@dataclass(frozen=True)
class Gpu:
    """`architecture` as ``sm_90``; `memory` in bytes, used or not, and those that are `free`, None where the driver
    doesn't tell."""

    name: str
    architecture: str
    memory: int
    free: int | None = None

    @property
    def compute_capability(self) -> str:
        """As ``9.0``."""
        digits = self.architecture.removeprefix("sm_")
        return f"{digits[:-1]}.{digits[-1]}"


@dataclass(frozen=True)
class Driver:
    """`version` as ``580.159.04``, None where only libcuda is there; `cuda` is the newest CUDA that it runs, as
    (13, 0), which a compatibility package may raise."""

    version: str | None
    cuda: tuple[int, int] | None

    def runs(self, least: int) -> bool:
        """Whether it is as good as a driver ``least.…`` of a CUDA 13: by the CUDA that it runs if it tells, else by its
        own number; unknown counts as good."""
        if self.cuda is not None:
            return self.cuda >= (13, 0)
        return self.version is None or int(self.version.partition(".")[0]) >= least

    def __str__(self) -> str:
        cuda = f"CUDA {self.cuda[0]}.{self.cuda[1]}" if self.cuda else "an unknown CUDA"
        return f"driver {self.version or 'of unknown version'} ({cuda})"


def gpus() -> tuple[Gpu, ...]:
    """NVIDIA GPUs that the driver shows, in the order of CUDA's device ids; none without a driver."""
    cuda = _load("libcuda.so.1")
    count = ctypes.c_int()
    if cuda is None or cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    management = _load("libnvidia-ml.so.1")
    if management is not None and management.nvmlInit_v2() != 0:
        management = None
    try:
        found = [_gpu(cuda, management, index) for index in range(count.value)]
    finally:
        if management is not None:
            management.nvmlShutdown()
    return tuple(gpu for gpu in found if gpu is not None)


def driver(version_file: Path = _VERSION_FILE) -> Driver | None:
    """The driver of this machine, or None. Its version comes from the management library, or the kernel module's
    `version_file`."""
    cuda = _load("libcuda.so.1")
    number = ctypes.c_int()
    known = cuda is not None and cuda.cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value > 0
    version = _managed_version() or _module_version(version_file)
    if not known and version is None:
        return None
    return Driver(version, (number.value // 1000, number.value % 1000 // 10) if known else None)


def _gpu(cuda: Any, management: Any, index: int) -> Gpu | None:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(128), ctypes.c_size_t()
    if (
        cuda.cuDeviceGet(ctypes.byref(device), index) != 0
        or cuda.cuDeviceGetName(name, len(name), device) != 0
        or cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device) != 0
        or cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device) != 0
        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device) != 0
    ):
        return None
    text = name.value.decode(errors="replace")
    free = _free(cuda, management, device)
    return Gpu(text, f"sm_{major.value}{minor.value}", memory.value, free)


def _free(cuda: Any, management: Any, device: ctypes.c_int) -> int | None:
    """Free bytes. The management library is asked, since CUDA itself would take memory to tell; it counts devices in
    another order, so the device is found by its UUID."""
    identity = (ctypes.c_ubyte * 16)()
    if management is None or cuda.cuDeviceGetUuid_v2(ctypes.byref(identity), device) != 0:
        return None
    text = str(uuid.UUID(bytes=bytes(identity)))
    handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
    for kind in ("GPU", "MIG"):
        if management.nvmlDeviceGetHandleByUUID(f"{kind}-{text}".encode(), ctypes.byref(handle)) == 0:
            return memory[1] if management.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 else None
    return None


def _managed_version() -> str | None:
    management = _load("libnvidia-ml.so.1")
    if management is None or management.nvmlInit_v2() != 0:
        return None
    text = ctypes.create_string_buffer(96)
    try:
        return text.value.decode() if management.nvmlSystemGetDriverVersion(text, len(text)) == 0 else None
    finally:
        management.nvmlShutdown()


def _module_version(version_file: Path) -> str | None:
    """``NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  …``"""
    try:
        found = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s", version_file.read_text(errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def _load(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
