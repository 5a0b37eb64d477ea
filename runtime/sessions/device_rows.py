"""Rows of float32 tensors on a device, fetched one by one where they are looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from runtime.sessions.base import Float32, Int64
from runtime.sessions.memory import Memory
from runtime.sessions.ort_variants import Placed


class DeviceLogits:
    """Rows of logits on the GPU, fetched one by one where they are looked at. What the target found greatest in each
    is known without."""

    def __init__(self, memory: Memory, tensor: Placed, rows: NDArray[np.int64], argmax: Int64, best: Float32) -> None:
        self._memory = memory
        self._tensor = tensor
        self._rows = rows
        self._argmax = argmax
        self._best = best

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return DeviceLogits(self._memory, self._tensor, self._rows[at], self._argmax[at], self._best[at])
        if isinstance(at, tuple):
            row, token = at
            return self._best[row] if token == self._argmax[row] else self[row][token]
        return _fetch(self._memory, self._tensor, int(self._rows[at]))


class DeviceProbabilities(Sequence[Float32]):
    """q ``[s, V]`` of each of `count` rows, of a tensor ``[batch, ≥ s, V]``, fetched where it is looked at."""

    def __init__(self, memory: Memory, tensor: Placed, count: int, drafts: int) -> None:
        self._memory = memory
        self._tensor = tensor
        self._count = count
        self._drafts = drafts

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Float32: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Float32]: ...
    def __getitem__(self, at: int | slice) -> Float32 | Sequence[Float32]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(self._count))]
        at = range(self._count)[at]  # from the end too
        width = self._tensor.shape[1]
        return np.stack([_fetch(self._memory, self._tensor, at * width + j) for j in range(self._drafts)])

    def __iter__(self) -> Iterator[Float32]:
        return (self[i] for i in range(self._count))


def _fetch(memory: Memory, tensor: Placed, row: int) -> Float32:
    """Row `row` of a float32 tensor, all but its last axis taken as one."""
    found = np.empty(tensor.shape[-1], np.float32)
    memory.read(tensor.address + row * found.nbytes, found)
    return found
