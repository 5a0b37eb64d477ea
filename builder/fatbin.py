"""Which GPUs a shared library of CUDA kernels has code for, read from the file: neither CUDA nor a GPU is needed.

nvcc puts a fat binary for each source into the library: a header of 16 bytes (magic, version, header size, size of the
rest) and an entry for each piece of code, whose own header says kind, sizes and architecture, before the code itself,
which may be compressed. The layout isn't documented; it has been the same since CUDA 4.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"\x50\xed\x55\xba"
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIII")  # kind, version, header size, size, compressed size and two others, architecture
_PTX, _ELF = 1, 2
_ARCHITECTURE = re.compile(r"sm_(\d+)(\d)")


@dataclass(frozen=True)
class KernelCode:
    """Architectures as numbers (89): of machine code (`elf`), and of PTX, which the driver compiles for that one and
    later ones."""

    elf: frozenset[int]
    ptx: frozenset[int]

    def runs_on(self, gpu: str) -> bool:
        """Whether a GPU such as ``sm_89`` can run it: machine code of its own generation, not newer than itself, or
        PTX."""
        match = _ARCHITECTURE.fullmatch(gpu)
        if match is None:
            return False
        number = int(match[1] + match[2])
        own = any(code // 10 == number // 10 and code <= number for code in self.elf)
        return own or any(code <= number for code in self.ptx)

    def __str__(self) -> str:
        names = [*(f"sm_{number}" for number in sorted(self.elf)), *(f"PTX {number}" for number in sorted(self.ptx))]
        return ", ".join(names) or "no code for a GPU"


def kernel_code(library: Path) -> KernelCode:
    """What a library has. Raises OSError."""
    found: dict[int, set[int]] = {_PTX: set(), _ELF: set()}
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(_MAGIC)
        while at >= 0:
            kinds = _entries(data, at)
            for kind, number in kinds:
                found[kind].add(number)
            at = data.find(_MAGIC, at + len(_MAGIC))
    return KernelCode(frozenset(found[_ELF]), frozenset(found[_PTX]))


def _entries(data: mmap.mmap, at: int) -> list[tuple[int, int]]:
    """Kind and architecture of each entry of the fat binary there; none where something else has its magic."""
    if at + _HEADER.size > len(data):
        return []
    _, _, own, rest = _HEADER.unpack_from(data, at)
    at, end = at + own, at + own + rest
    entries = []
    while at + _ENTRY.size <= min(end, len(data)):
        kind, _, header, code, *_, number = _ENTRY.unpack_from(data, at)
        if kind in (_PTX, _ELF):
            entries.append((kind, number))
        if header < _ENTRY.size:
            return []
        at += header + code
    return entries
