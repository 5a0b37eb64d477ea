"""Memory and CPU facts from made-up kernel files."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.machine import cpu, human_bytes, memory

MIB = 1 << 20


@pytest.fixture
def system(tmp_path: Path) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 4096000 kB\nMemFree: 1 kB\nMemAvailable: 2048000 kB\nHugePages_Total: 0\n")
    return proc, cgroup


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_groups(system: tuple[Path, Path]) -> None:
    found = memory(*system)
    assert (found.total, found.available) == (4096000 * 1024, 2048000 * 1024)


def test_group_v2_limit_on_an_ancestor_counts_and_cache_does_not(system: tuple[Path, Path]) -> None:
    proc, cgroup = system
    (proc / "self/cgroup").write_text("0::/pod/box\n")
    write(cgroup / "pod", memory__max=500 * MIB, memory__current=300 * MIB, memory__stat=f"inactive_file {100 * MIB}")
    write(cgroup / "pod/box", memory__max="max", memory__current=1)
    assert memory(proc, cgroup).total == 500 * MIB
    assert memory(proc, cgroup).available == 300 * MIB


def test_group_v1_and_its_unlimited(system: tuple[Path, Path]) -> None:
    proc, cgroup = system
    (proc / "self/cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/host/path/not/here\n")
    limit = {"memory__limit_in_bytes": 9223372036854771712, "memory__usage_in_bytes": 5}
    write(cgroup / "memory", **limit)
    assert memory(proc, cgroup).available == 2048000 * 1024
    write(cgroup / "memory", memory__limit_in_bytes=64 * MIB, memory__usage_in_bytes=80 * MIB)
    assert memory(proc, cgroup).available == 0


def test_unknown(tmp_path: Path) -> None:
    found = memory(tmp_path, tmp_path)
    assert (found.total, found.available) == (None, None)


def test_cpu_features_in_a_fixed_order(system: tuple[Path, Path]) -> None:
    proc, _ = system
    (proc / "cpuinfo").write_text("model name\t: Some CPU\nflags\t\t: fpu fma avx2 avx sse\n\nmodel name\t: Other\n")
    found = cpu(proc)
    assert found.model == "Some CPU"
    assert found.features == ("avx", "avx2", "fma")
    assert 1 <= found.usable <= found.cores


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (40 * MIB, "40.0 MiB"), (1536 * MIB, "1.5 GiB")],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_human_bytes_of_huge() -> None:
    assert human_bytes(3 << 40) == "3.0 TiB"
