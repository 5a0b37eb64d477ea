"""Tests of the ort-cuda back end on a card: skipped without one, and without ONNX Runtime's CUDA provider."""

from __future__ import annotations

import pytest

from runtime.machine import gpus


@pytest.fixture(scope="session", autouse=True)
def card() -> None:
    if not gpus():
        pytest.skip("no NVIDIA GPU, or no driver for it")
    # Brings the CUDA libraries into the process where no package of their own does.
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    torch.zeros(1, device="cuda")
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime has no CUDA provider: install onnxruntime-gpu")
