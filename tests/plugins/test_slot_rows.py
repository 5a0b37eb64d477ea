"""SlotRead and SlotWrite."""

from __future__ import annotations

import pytest
import torch

from tests.plugins.kernels import DTYPES, Kernels, ints

SLOTS, ROWS = 4, 9


def state(width: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(SLOTS + 1, ROWS, width, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 6, 64, 1000, 20480])
def test_reads_rows_of_each_slot(kernels: Kernels, generator: torch.Generator, width: int, dtype: torch.dtype) -> None:
    taps, slot, row = state(width, dtype, generator), ints(3, 0, SLOTS, SLOTS), ints(0, 1, 8)
    out = torch.empty(4, 3, width, dtype=dtype, device="cuda")
    kernels.slot_read(taps, slot, row, out, 4, 3, ROWS, width, dtype=dtype)
    assert torch.equal(out, taps[slot[:, None], row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 6, 64, 1000, 20480])
def test_writes_what_counts_and_nothing_else(
    kernels: Kernels, generator: torch.Generator, width: int, dtype: torch.dtype
) -> None:
    taps = state(width, dtype, generator)
    rows = torch.randn(5, 4, width, generator=generator, device="cuda").to(dtype)
    # Row 2 writes nothing, row 3 past the end of the state, row 4 to scratch.
    start, count, slot = ints(5, 0, 3, 7, 0), ints(4, 1, 0, 4, 4), ints(3, 0, 1, 2, SLOTS)
    want = taps.clone()
    want[3, 5:9], want[0, 0], want[2, 7:9], want[SLOTS, :4] = rows[0], rows[1, 0], rows[3, :2], rows[4]
    kernels.slot_write(taps, rows, start, count, slot, 5, 4, ROWS, width, dtype=dtype)
    assert torch.equal(taps, want)


def test_refuses_sizes_without_meaning(kernels: Kernels, generator: torch.Generator) -> None:
    taps = state(8, torch.float32, generator)
    with pytest.raises(RuntimeError, match="slot_read: CUDA error 1"):
        kernels.slot_read(taps, ints(0), ints(0), taps, 1, 1, ROWS, 0, dtype=torch.float32)
