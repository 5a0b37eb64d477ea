"""The registry of back ends that can be built for: complete, importable, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module

import pytest

from builder import backends
from builder.backends import BackendOptions
from builder.backends.ort_cpu import OrtCpu
from runtime.errors import BackendUnavailable
from runtime.libraries import BACKENDS, SUPPORTED
from runtime.manifest import Limits, Serving
from tests.examples import DRAFTER, TARGET


def test_every_supported_back_end_has_its_builder() -> None:
    assert tuple(backends.BUILDERS) == SUPPORTED
    assert set(SUPPORTED) == {name for name, info in BACKENDS.items() if info.supported}
    for path in backends.BUILDERS.values():
        module, name = path.split(":")
        assert hasattr(import_module(module), name)
    serving = Serving(4, 0.0)
    assert isinstance(backends.get(BackendOptions("ort-cpu", "f32", serving)), OrtCpu)
    assert backends.get(BackendOptions("ort-cuda", "bf16", serving)).describe().precision == "bf16"


def test_a_back_end_this_version_lacks() -> None:
    with pytest.raises(BackendUnavailable) as caught:
        backends.check("quantum")
    expected = "expected ort-cpu or ort-cuda or tensorrt or tensorrt-rtx; found quantum. Pass --backend ort-cpu"
    assert str(caught.value).endswith(expected)


def test_half_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.libraries._LIBRARY_FOLDERS", ())
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    there: dict[str, str] = {}
    monkeypatch.setattr(backends, "installed", there.get)
    with pytest.raises(BackendUnavailable, match=r"its library is not installed; .* pip install tensorrt$"):
        backends.check("tensorrt")
    there["tensorrt-rtx-cu13-bindings"] = "1.7.1"
    remedy = r"lack the library itself; expected tensorrt-rtx-cu13-libs\. pip install tensorrt-rtx-cu13-libs==1\.7\.1$"
    with pytest.raises(BackendUnavailable, match=remedy):
        backends.check("tensorrt-rtx")
    there["tensorrt-rtx-cu13-libs"] = "1.7.1"
    backends.check("tensorrt-rtx")


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
