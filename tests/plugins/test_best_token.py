"""BestToken against torch's argmax and max, ties and NaN included."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.plugins.kernels import KERNELS, Kernels


def run(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    library = ctypes.CDLL(str(KERNELS))
    rows, vocab = logits.shape
    ids = torch.full((rows,), -1, dtype=torch.int64, device="cuda")
    best = torch.full((rows,), -1.0, device="cuda")
    at = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (logits, ids, best)]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert library.dspark_best_token(*at, ctypes.c_int64(rows), ctypes.c_int64(vocab), stream) == 0
    return ids, best


@pytest.mark.parametrize("vocab", [1, 31, 1024, 1025, 4097, 49152, 151936])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_as_torch(kernels: Kernels, generator: torch.Generator, rows: int, vocab: int) -> None:
    logits = torch.randn(rows, vocab, device="cuda", generator=generator) - 3
    ids, best = run(logits)
    value, where = logits.max(-1)
    assert torch.equal(ids, where)
    assert torch.equal(best, value)


def test_ties_take_the_first_and_nan_comes_before_all(kernels: Kernels) -> None:
    logits = torch.full((4, 3000), -2.0, device="cuda")
    logits[0, [5, 2900]] = 1.0
    logits[1, 7], logits[1, 1500] = float("inf"), float("nan")
    logits[2] = float("-inf")
    logits[3, 9], logits[3, 8] = 0.0, -0.5
    ids, best = run(logits)
    assert ids.tolist() == [5, 1500, 0, 9]
    assert best[[0, 2, 3]].tolist() == [1.0, float("-inf"), 0.0]
    assert best[1].isnan()
