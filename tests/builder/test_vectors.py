"""The bundle's vectors: from the torch modules alone, whole, and the same every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from builder.checkpoints import load_drafter, load_target
from builder.vectors import record, reference_modules
from builder.weights import write_weights
from runtime.manifest import Limits
from runtime.validate import VECTORS_NAME
from tests.support import TINY_PAIRS

Arrays = dict[str, np.ndarray]


def vectors(dest: Path, limits: Limits, pair: str = "llama") -> tuple[Arrays, bytes, torch.nn.Module]:
    target = load_target(TINY_PAIRS / pair / "target")
    drafter = load_drafter(TINY_PAIRS / pair / "drafter", target)
    dest.mkdir()
    index = write_weights(dest, target, drafter, limits)
    record(dest, target.spec, drafter.spec, index, limits)
    with np.load(dest / VECTORS_NAME) as file:
        arrays = {name: file[name] for name in file.files}
    net = reference_modules(target.spec, drafter.spec, index, limits)["target"]
    return arrays, (dest / VECTORS_NAME).read_bytes(), net


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens an engine fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(("window", "max_seq_len"), [(16, 64), (64, 128), (7, 20)])
def test_what_is_recorded(tmp_path: Path, window: int, max_seq_len: int) -> None:
    limits = Limits((1,), 1, window, max_seq_len, 5, 4)
    arrays, data, net = vectors(tmp_path / "a", limits)
    assert vectors(tmp_path / "b", limits)[1] == data
    assert sum(arrays["chunks"]) == len(arrays["prompt"])
    rounds = [name.split(".")[0] for name in arrays if name.endswith(".inputs")]
    assert rounds == ["0", "1", "2"]
    # One round draws by its uniforms, one by noise, the others take the best.
    assert [arrays[f"{r}.temperature"] > 0 for r in rounds] == [True, False, False]
    assert [arrays[f"{r}.noise"] > 0 for r in rounds] == [False, True, False]
    end = len(arrays["prompt"])
    for r in rounds:
        bonus, start, valid_len, _ = arrays[f"{r}.inputs"]
        assert start == end
        assert valid_len == min(window, start)
        assert arrays[f"{r}.verify_ids"].tolist() == [bonus, *arrays[f"{r}.ids"]]
        assert np.isfinite(arrays[f"{r}.logits"]).all()
        following = arrays.get(f"{int(r) + 1}.inputs")
        end = start if following is None else following[1]
        if following is not None:
            assert following[3] == end - start
            assert following[0] == arrays[f"{r}.logits"][end - start - 1].argmax()
    assert end + 6 <= max_seq_len + 5
    if window < 64:
        assert len(arrays["prompt"]) + 8 > window, "the ring doesn't wrap"
    np.testing.assert_allclose(arrays["0.q"].sum(-1), 1, rtol=1e-5)
    assert "1.q" not in arrays

    # The last verify in one pass over everything committed before it, without a cache.
    committed = [*arrays["prompt"]]
    for r in rounds[:-1]:
        count = arrays[f"{int(r) + 1}.inputs"][3]
        committed += arrays[f"{r}.verify_ids"][:count].tolist()
    ids = torch.tensor([[*committed, *arrays["2.verify_ids"]]])
    shape = (1, net.layers[0].kv_heads, ids.shape[1], net.layers[0].head_dim)
    zero = torch.tensor([0])
    with torch.no_grad():
        _, logits, *_ = net(ids, zero, zero, torch.arange(ids.shape[1])[None], [torch.zeros(shape) for _ in range(8)])
    np.testing.assert_allclose(logits[0, len(committed) :].numpy(), arrays["2.logits"], rtol=0, atol=1e-4)
    at = np.cumsum(arrays["chunks"]) - 1
    np.testing.assert_allclose(logits[0, at].numpy(), arrays["prefill.logits"], rtol=0, atol=1e-4)


def test_it_goes_with_the_smallest_engine(tmp_path: Path) -> None:
    arrays, _, _ = vectors(tmp_path / "a", Limits((1,), 1, 7, 16, 5, 1))
    assert len(arrays["prompt"]) >= 1
