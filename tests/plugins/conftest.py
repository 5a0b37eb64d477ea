"""Tests of kernels need a CUDA device and the built library; without either they are skipped."""

from __future__ import annotations

import pytest
import torch

from tests.plugins.kernels import KERNELS, Kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not KERNELS.exists():
        pytest.skip(f"{KERNELS} is not built (plugins/README.md)")
    return Kernels(KERNELS)


@pytest.fixture
def generator(kernels: Kernels) -> torch.Generator:
    """Random numbers on the device, the same in each run."""
    return torch.Generator("cuda").manual_seed(20)
