"""`validate` passes a whole bundle and names the stage at which an altered one first differs."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from runtime import validate
from runtime.errors import BundleError
from tests.support import TINY_PAIRS, copy_bundle


@pytest.mark.parametrize("pair", ["llama", "qwen3"])
def test_a_whole_bundle_passes(tiny_bundle: Callable[..., Path], pair: str) -> None:
    report = validate.run(tiny_bundle(pair), threads=1)
    assert report.passed
    assert report.lines()[-1] == "validation passed"
    names = [stage.name for stage in report.stages]
    for batch in ("", "batch 2: ", "batch 4: "):
        for part in ("prefill 0", "draft 0 q", "draft 1 ids", "draft 2 confidence", "verify 2"):
            assert f"{batch}{part}" in names
    # Not only within the tolerance: as near as float32 comes.
    assert max(stage.worst for stage in report.stages) < 1e-4


def altered(bundle: Path, to: Path, model: str, tensor: str) -> Path:
    """A copy with one checkpoint tensor changed where it lies in ``weights.bin``, hashes made good."""
    values = load_file(TINY_PAIRS / "llama" / model / "model.safetensors")[tensor]
    data = (bundle / "weights.bin").read_bytes()
    at = data.index(values.tobytes())
    # Not scaled: a norm behind it would take that out again.
    changed = np.ascontiguousarray(np.flip(values)).tobytes()
    return copy_bundle(bundle, to, {"weights.bin": data[:at] + changed + data[at + len(changed) :]})


@pytest.mark.parametrize(
    ("model", "tensor", "first"),
    [
        ("target", "model.layers.1.mlp.down_proj.weight", "prefill 0"),
        ("target", "lm_head.weight", "prefill 0"),
        ("drafter", "fc.weight", "draft 0"),
        ("drafter", "layers.1.self_attn.v_proj.weight", "draft 0"),
        ("drafter", "markov_head.markov_w2.weight", "draft 0"),
        ("drafter", "confidence_head.proj.weight", "draft 0 confidence"),
    ],
)
def test_an_altered_weight_is_found_at_its_stage(
    tiny_bundle: Callable[..., Path], tmp_path: Path, model: str, tensor: str, first: str
) -> None:
    report = validate.run(altered(tiny_bundle(), tmp_path / "bundle", model, tensor), threads=1)
    failed = [stage.name for stage in report.stages if not stage.passed]
    assert failed
    assert failed[0].startswith(first)
    assert report.lines()[-1].startswith(f"validation failed at {failed[0]} ({len(failed)} of {len(report.stages)}")
    # A drafter never shows in what the target computes.
    assert model == "target" or not [name for name in failed if "prefill" in name or "verify" in name]


def test_a_wrong_engine_of_a_larger_batch_is_found(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    """Engines of a batch that reads other weights: a copy of ``weights.bin`` with one changed, under another name."""
    bundle = tiny_bundle()
    wrong = altered(bundle, tmp_path / "wrong", "drafter", "fc.weight")
    engine = (bundle / "draft.b2.onnx").read_bytes().replace(b"weights.bin", b"another.bin")
    files = {"draft.b2.onnx": engine, "another.bin": (wrong / "weights.bin").read_bytes()}
    report = validate.run(copy_bundle(bundle, tmp_path / "bundle", files), threads=1)
    failed = [stage.name for stage in report.stages if not stage.passed]
    assert failed
    assert all(name.startswith("batch 2: draft") for name in failed)


def test_a_wrong_last_row_is_found(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    """Attention of the second row alone takes its keys for values."""
    model = onnx.load(tiny_bundle() / "target.b2.onnx", load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention" and node.input[3].endswith(".row1"):
            node.input[2] = node.input[1]
    copy = copy_bundle(tiny_bundle(), tmp_path / "bundle", {"target.b2.onnx": model.SerializeToString()})
    report = validate.run(copy, threads=1)
    failed = [stage.name for stage in report.stages if not stage.passed]
    assert failed[0] == "batch 2: prefill 0"
    assert all(name.startswith("batch 2: ") for name in failed)


@pytest.mark.parametrize("pair", ["llama", "qwen3"])
def test_draft_engines_take_the_noise(tiny_bundle: Callable[..., Path], tmp_path: Path, pair: str) -> None:
    """Vectors that claim there was none in the round that had some: the ids are others without it."""
    arrays = vectors_of(tiny_bundle(pair))
    assert arrays["1.noise"] > 0
    arrays["1.noise"] = np.zeros_like(arrays["1.noise"])
    copy = copy_bundle(tiny_bundle(pair), tmp_path / "bundle", {validate.VECTORS_NAME: packed(arrays)})
    report = validate.run(copy, threads=1)
    failed = {stage.name for stage in report.stages if not stage.passed}
    assert failed >= {f"{batch}draft 1 ids" for batch in ("", "batch 2: ", "batch 4: ")}
    assert not [name for name in failed if "draft 1" not in name]


def vectors_of(bundle: Path) -> dict[str, np.ndarray]:
    with np.load(bundle / validate.VECTORS_NAME) as file:
        return {name: file[name] for name in file.files}


def packed(arrays: dict[str, np.ndarray]) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


@pytest.mark.parametrize("damage", ["cut", "no zip", "empty", "an array missing", "absent"])
def test_damaged_vectors(tiny_bundle: Callable[..., Path], tmp_path: Path, damage: str) -> None:
    bundle = tiny_bundle()
    whole = (bundle / validate.VECTORS_NAME).read_bytes()
    arrays = vectors_of(bundle)
    del arrays["1.logits"]
    content = {"cut": whole[: len(whole) // 2], "no zip": b"vectors", "empty": b"", "an array missing": packed(arrays)}
    copy = copy_bundle(bundle, tmp_path / "bundle", {validate.VECTORS_NAME: content.get(damage)})
    with pytest.raises(BundleError, match=r"vectors\.npz.*Rebuild the bundle") as caught:
        validate.run(copy, threads=1)
    assert "\n" not in str(caught.value)


def test_vectors_of_another_shape_fail(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    arrays = vectors_of(tiny_bundle())
    arrays["0.logits"] = arrays["0.logits"][:, :-1]
    copy = copy_bundle(tiny_bundle(), tmp_path / "bundle", {validate.VECTORS_NAME: packed(arrays)})
    report = validate.run(copy, threads=1)
    failed = [stage.name for stage in report.stages if not stage.passed]
    assert failed == [f"{batch}verify 0 (shape)" for batch in ("", "batch 2: ", "batch 4: ")]


def test_nan_fails() -> None:
    assert not validate.Stage("x", float("nan"), 1e-3).passed
