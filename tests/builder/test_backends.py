"""The registry of back ends that can be built for: complete, importable, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module

import pytest

from builder import backends
from builder.backends.ort_cpu import OrtCpu
from runtime.errors import BackendUnavailable
from runtime.libraries import BACKENDS, SUPPORTED
from runtime.manifest import Limits
from tests.examples import DRAFTER, TARGET


def test_every_supported_back_end_has_its_builder() -> None:
    assert tuple(backends.BUILDERS) == SUPPORTED
    assert set(SUPPORTED) == {name for name, info in BACKENDS.items() if info.supported}
    for path in backends.BUILDERS.values():
        module, name = path.split(":")
        assert hasattr(import_module(module), name)
    assert isinstance(backends.get("ort-cpu", "f32"), OrtCpu)
    assert backends.get("ort-cuda", "bf16").describe().precision == "bf16"


@pytest.mark.parametrize("name", ["tensorrt", "quantum"])
def test_a_back_end_this_version_lacks(name: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        backends.check(name)
    assert str(caught.value).endswith(f"expected ort-cpu or ort-cuda; found {name}. Pass --backend ort-cpu")


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.check("ort-cpu")
    monkeypatch.setattr(backends, "installed", lambda name: None)
    expected = r"not installed; expected onnxruntime or onnxruntime-gpu\. pip install onnxruntime$"
    with pytest.raises(BackendUnavailable, match=expected):
        backends.check("ort-cpu")
    backends.check("ort-cuda")  # its graphs are written without it


def test_state_by_hand() -> None:
    limits = Limits((1, 2), 2, window=100, max_seq_len=50, block_size=7, prefill_chunk=10)
    shapes = {(tensor.kind, tensor.shape, tensor.dtype) for tensor in OrtCpu().state(TARGET, DRAFTER, limits)}
    assert shapes == {
        ("cache", (2, 57, 8), "float32"),
        ("ring", (2, 100, 16), "float32"),
        ("taps", (10, 48), "float32"),
    }
    kinds = [tensor.kind for tensor in OrtCpu().state(TARGET, DRAFTER, limits)]
    assert [kinds.count(kind) for kind in ("cache", "ring", "taps")] == [2 * 4, 2 * 3, 1]


def test_tap_rows_hold_a_chunk_and_a_round() -> None:
    limits = Limits((1,), 1, window=100, max_seq_len=50, block_size=7, prefill_chunk=2)
    (taps,) = (tensor for tensor in OrtCpu().state(TARGET, DRAFTER, limits) if tensor.kind == "taps")
    assert taps.shape == (8, 48)


def test_ring_of_the_published_4b_drafter() -> None:
    # dspark.md: the ring takes about 40 MiB a slot at W 2048 in bf16, so 80 in float32.
    drafter = replace(DRAFTER, num_layers=5, num_kv_heads=8, head_dim=128)
    state = OrtCpu().state(TARGET, drafter, Limits((1,), 1, 2048, 64, 7, 10))
    assert sum(4 * math.prod(tensor.shape) for tensor in state if tensor.kind == "ring") == 80 << 20
