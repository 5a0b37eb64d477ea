"""Copies of the target's embeddings and lm_head are dropped, and only copies."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from builder.checkpoints import load_drafter, load_target, share_with_target, sharing
from tests.builder.checkpoints.helpers import DRAFTER, LLAMA, changed, write_drafter, write_target


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("same_embeddings", "same_head"), [(True, True), (True, False), (False, True), (False, False)])
def test_equal_matrices_are_shared(tmp_path: Path, tied: bool, same_embeddings: bool, same_head: bool) -> None:
    target_dir = write_target(tmp_path / "target", changed(LLAMA, tie_word_embeddings=tied))
    theirs = load_file(target_dir / "model.safetensors")
    directory = write_drafter(tmp_path / "drafter", DRAFTER)
    tensors = load_file(directory / "model.safetensors")
    if same_embeddings:
        tensors["embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
    if same_head:
        tensors["lm_head.weight"] = theirs["model.embed_tokens.weight" if tied else "lm_head.weight"].clone()
    save_file(tensors, directory / "model.safetensors")

    target = load_target(target_dir)
    drafter = load_drafter(directory, target)
    assert drafter.spec.own_embeddings
    assert drafter.spec.own_lm_head
    shared = share_with_target(drafter, target)
    assert (shared.spec.own_embeddings, shared.spec.own_lm_head) == (not same_embeddings, not same_head)
    assert ("embed_tokens.weight" in shared.tensors.names()) == (not same_embeddings)
    assert ("lm_head.weight" in shared.tensors.names()) == (not same_head)
    assert shared.tensors.shape("fc.weight") == (16, 48)
    assert shared.tensors.read("fc.weight").equal(tensors["fc.weight"])


@pytest.mark.parametrize("rows", [7, 8192])
def test_last_row_counts_and_dtypes_do_not(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_ROWS", rows)
    target_dir = write_target(tmp_path / "target", LLAMA)
    theirs = load_file(target_dir / "model.safetensors")
    directory = write_drafter(tmp_path / "drafter", DRAFTER)
    tensors = load_file(directory / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in theirs.items()}
    save_file({name: tensor.float() for name, tensor in halves.items()}, target_dir / "model.safetensors")
    tensors["embed_tokens.weight"] = halves["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = halves["lm_head.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, directory / "model.safetensors")
    target = load_target(target_dir)
    shared = share_with_target(load_drafter(directory, target), target)
    assert (shared.spec.own_embeddings, shared.spec.own_lm_head) == (False, True)


def test_nothing_to_share(tmp_path: Path) -> None:
    target = load_target(write_target(tmp_path / "target", LLAMA))
    drafter = load_drafter(write_drafter(tmp_path / "drafter", DRAFTER, own=False), target)
    assert share_with_target(drafter, target).spec == drafter.spec
