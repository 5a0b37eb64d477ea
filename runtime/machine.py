"""What this machine has: memory, cores and CPU features, read from the kernel's files with no extra package."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from runtime.nvidia import Driver, Gpu, driver, gpus

__all__ = [
    "Cpu",
    "Driver",
    "Gpu",
    "MachineMemory",
    "available_memory",
    "cpu",
    "driver",
    "gpus",
    "human_bytes",
    "memory",
]

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_X86 = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16")
_FEATURES = (*_X86, "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve")


@dataclass(frozen=True)
class Cpu:
    """`cores` counts logical cores, `usable` those this process may run on; `features` are those that matter to
    kernels.
    """

    model: str
    architecture: str
    cores: int
    usable: int
    features: tuple[str, ...]


@dataclass(frozen=True)
class MachineMemory:
    """Bytes, or None where the system doesn't tell. `available` is what can be allocated now, container limits
    included.
    """

    total: int | None
    available: int | None


def memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> MachineMemory:
    """Memory of this machine, or of the control group (v2 or v1) that confines this process where that is less."""
    facts = _meminfo(proc)
    total, available = facts.get("MemTotal"), facts.get("MemAvailable")
    for limit, used in _group_limits(proc, cgroup):
        total = limit if total is None else min(total, limit)
        left = max(limit - used, 0)
        available = left if available is None else min(available, left)
    return MachineMemory(total, available)


def available_memory() -> int | None:
    """Bytes that can be allocated now, or None where unknown."""
    return memory().available


def _meminfo(proc: Path) -> dict[str, int]:
    facts = {}
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            facts[name] = int(words[0]) * 1024
    return facts


def _group_limits(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """(limit, used) of this process's control groups that have a limit; reclaimable page cache isn't counted."""
    found = []
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            root, limit_name, used_name, cache_name = cgroup, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit_name, used_name = cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_name = "total_inactive_file"
        else:
            continue
        # A limit may sit on any ancestor; inside a container the path can be that of the host and absent here.
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:depth])
            limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
            # v1 writes "no limit" as a number near 2**63.
            if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
                stat = dict(line.partition(" ")[::2] for line in _read(folder / "memory.stat").splitlines())
                cache = int(stat[cache_name]) if stat.get(cache_name, "").isdigit() else 0
                found.append((int(limit), max(int(used) - cache, 0)))
    return found


def cpu(proc: Path = _PROC) -> Cpu:
    """The processor, as far as the system tells."""
    facts: dict[str, str] = {}
    for line in _read(proc / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    model = facts.get("model name") or platform.processor() or "unknown"
    return Cpu(model, platform.machine(), cores, usable, tuple(name for name in _FEATURES if name in flags))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def human_bytes(count: int) -> str:
    """`count` bytes for people, in binary units (``512 B``, ``1.5 MiB``)."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"
