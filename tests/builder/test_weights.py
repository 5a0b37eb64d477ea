"""One weights file: every tensor in its place, none twice, the same bytes every time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.checkpoints import load_drafter, load_target
from builder.checkpoints.deepspec import load_deepspec
from builder.errors import CheckpointError
from builder.rope_tables import rope_tables
from builder.spec import DrafterCheckpoint, RopeSpec, TargetCheckpoint
from builder.weights import WeightIndex, weight_dtype, weight_plan, write_weights
from runtime.manifest import Limits
from tests.support import GOLDEN, TINY_PAIRS, Tensors, random_target

LIMITS = Limits((1,), 1, 16, 32, 5, 8)


def pair(name: str) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    target = load_target(TINY_PAIRS / name / "target")
    return target, load_drafter(TINY_PAIRS / name / "drafter", target)


def stored(index: WeightIndex) -> int:
    """Bytes of distinct stretches."""
    covered: set[tuple[int, int]] = {(w.offset, w.offset + w.nbytes) for w in index.weights.values()}
    outer = [a for a in covered if not any(b != a and b[0] <= a[0] and a[1] <= b[1] for b in covered)]
    return sum(end - begin for begin, end in outer)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_every_weight_is_what_the_checkpoints_hold(name: str, tmp_path: Path) -> None:
    target, drafter = pair(name)
    index = write_weights(tmp_path, target, drafter, LIMITS)
    sources = {"target": target.tensors, "drafter": drafter.tensors}
    planned = dict(weight_plan(target.spec, drafter.spec))
    for weight, pieces in planned.items():
        whole = np.concatenate([sources[p.source].read(p.tensor) for p in pieces])
        assert np.array_equal(index.array(weight), whole), weight
    cos, sin = rope_tables(drafter.spec.rope, drafter.spec.head_dim, LIMITS.max_seq_len + LIMITS.block_size)
    assert np.array_equal(index.array("drafter.cos"), cos)
    assert np.array_equal(index.array("drafter.sin"), sin)
    assert index.bytes == (tmp_path / "weights.bin").stat().st_size
    # Every checkpoint tensor is in, once.
    used = {(p.source, p.tensor) for pieces in planned.values() for p in pieces}
    assert used == {(source, tensor) for source, tensors in sources.items() for tensor in tensors.names()}


def test_context_k_and_v_lie_inside_qkv(tmp_path: Path) -> None:
    """With biases too: `attention_bias_true`."""
    drafter = load_deepspec(GOLDEN / "drafter" / "attention_bias_true")
    index = write_weights(tmp_path, random_target(drafter.spec), drafter, LIMITS)
    q_rows = drafter.spec.num_heads * drafter.spec.head_dim
    for part, row in (("weight", 4 * drafter.spec.hidden_size), ("bias", 4)):
        for layer in range(drafter.spec.num_layers):
            whole = index.weights[f"drafter.layers.{layer}.qkv.{part}"]
            kv = index.weights[f"drafter.context.layers.{layer}.kv.{part}"]
            assert kv.offset == whole.offset + q_rows * row
            assert kv.offset + kv.nbytes == whole.offset + whole.nbytes


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    target, drafter = pair("qwen3")
    assert target.spec.tied
    weights = write_weights(tmp_path, target, drafter, LIMITS).weights
    assert weights["target.embed"] == weights["target.lm_head.weight"]


def test_copied_embeddings_are_stored_once(tmp_path: Path) -> None:
    """A drafter that brings copies of the target's matrices costs no more than one that shares them."""
    target, drafter = pair("llama")
    assert drafter.spec.own_embeddings
    assert drafter.spec.own_lm_head
    names = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    data = {name: drafter.tensors.read(name) for name in drafter.tensors.names()}
    copies = data | {ours: target.tensors.read(theirs).copy() for ours, theirs in names.items()}
    without = {name: value for name, value in data.items() if name not in names}
    spec = replace(drafter.spec, own_embeddings=False, own_lm_head=False)
    folders = [tmp_path / "copied", tmp_path / "shared", tmp_path / "own"]
    for folder in folders:
        folder.mkdir()
    copied = write_weights(folders[0], target, replace(drafter, tensors=Tensors(copies)), LIMITS)
    shared = write_weights(folders[1], target, replace(drafter, spec=spec, tensors=Tensors(without)), LIMITS)
    others = copies | {name: copies[name] + 1 for name in names}
    own = write_weights(folders[2], target, replace(drafter, tensors=Tensors(others)), LIMITS)
    assert copied.weights == shared.weights
    assert copied.weights["drafter.embed"] == copied.weights["target.embed"]
    assert copied.weights["drafter.lm_head.weight"] == copied.weights["target.lm_head.weight"]
    vocab, hidden = target.spec.vocab_size, target.spec.hidden_size
    assert own.bytes - copied.bytes >= 2 * 4 * vocab * hidden - 2 * 4096


def test_nothing_is_stored_twice_and_bytes_repeat(tmp_path: Path) -> None:
    target, drafter = pair("llama")
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    one, two = (write_weights(folder, target, drafter, LIMITS) for folder in folders)
    assert one.weights == two.weights
    data = (folders[0] / "weights.bin").read_bytes()
    assert data == (folders[1] / "weights.bin").read_bytes()
    stretches = {(w.offset, w.shape) for w in one.weights.values() if w.offset % 4096 == 0 and w.nbytes > 256}
    contents = [data[offset : offset + 4 * int(np.prod(shape))] for offset, shape in stretches]
    assert len(set(contents)) == len(contents)
    # Between the stretches lies padding to the next page alone.
    assert one.bytes - stored(one) < 4096 * len({w.offset for w in one.weights.values()})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    target, drafter = pair("llama")
    data = {name: target.tensors.read(name).copy() for name in target.tensors.names()}
    data["model.layers.1.self_attn.k_proj.weight"][0, 3] = value
    with pytest.raises(CheckpointError) as caught:
        write_weights(tmp_path, replace(target, tensors=Tensors(data)), drafter, LIMITS)
    assert "target tensor model.layers.1.self_attn.k_proj.weight" in str(caught.value)
    assert "found 1 of " in str(caught.value)


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_each_weight_has_the_type_of_its_precision(precision: str, tmp_path: Path) -> None:
    target, drafter = pair("llama")
    index = write_weights(tmp_path, target, drafter, LIMITS, precision)
    (tmp_path / "f32").mkdir()
    whole = write_weights(tmp_path / "f32", target, drafter, LIMITS)
    types = {name: weight.dtype for name, weight in index.weights.items()}
    for name, dtype in types.items():
        assert dtype == weight_dtype(name, precision)
        rounded = torch.from_numpy(whole.array(name)).to(getattr(torch, dtype)).float()
        assert np.array_equal(index.array(name), rounded.numpy()), name
    assert {types[n] for n in ("drafter.cos", "target.sin", "drafter.confidence.weight")} == {"float32"}
    assert {types[n] for n in ("drafter.context.fc.weight", "drafter.context.hidden_norm.weight")} == {"bfloat16"}
    assert types["target.layers.0.qkv.weight"] == {"bf16": "bfloat16", "f16": "float16"}[precision]
    assert 0.5 <= index.bytes / whole.bytes < 0.7


def test_values_too_large_for_the_type_are_refused(tmp_path: Path) -> None:
    target, drafter = pair("llama")
    tensors = {name: target.tensors.read(name) for name in target.tensors.names()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].copy()
    tensors["model.norm.weight"][2] = -7e4
    target = replace(target, tensors=Tensors(tensors))
    with pytest.raises(CheckpointError, match=r"model.norm.weight.*float16.*expected at most 65504; found 70000.*bf16"):
        write_weights(tmp_path, target, drafter, LIMITS, "f16")
    write_weights(tmp_path, target, drafter, LIMITS, "bf16")


def test_rounding_is_torchs(tmp_path: Path) -> None:
    """Ties to even, subnormals, the greatest values."""
    target, drafter = pair("llama")
    edge = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1e-40, -6e-8, 3e-8, 65519.0, -0.0, 2**-126]
    data = {name: target.tensors.read(name) for name in target.tensors.names()}
    norm = data["model.norm.weight"].copy()
    norm[: len(edge)] = edge
    target = replace(target, tensors=Tensors(data | {"model.norm.weight": norm}))
    for precision, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        index = write_weights(tmp_path, target, drafter, LIMITS, precision)
        expected = torch.from_numpy(norm).to(dtype).float().numpy()
        assert index.array("target.norm.weight").tobytes() == expected.tobytes()


def test_rotary_tables_are_those_of_float32_steps() -> None:
    """Against torch, whose float32 functions may be one unit off in the last place."""
    rope, head_dim, positions = RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192), 64, 3000
    inv = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    turns = rope.original_max_positions * inv / (2 * torch.pi)
    inv = torch.lerp(inv / rope.factor, inv, ((turns - 1) / 3).clamp(0, 1))
    phases = torch.arange(positions).float()[:, None] * inv
    for ours, theirs in zip(rope_tables(rope, head_dim, positions), (phases.cos(), phases.sin()), strict=True):
        # An inverse frequency one unit off turns the last position by 2.4e-4 at most.
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=3e-4)
        assert ours.dtype == np.float32
    plain = rope_tables(RopeSpec(1e4), 8, 3)
    np.testing.assert_array_equal(plain[0][0], np.ones(4, np.float32))
    np.testing.assert_allclose(plain[1][2], np.sin(2 * np.array([1, 0.1, 0.01, 0.001])), rtol=2e-7)
