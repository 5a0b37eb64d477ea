"""The hashes of a checkpoint's files: by name below the checkpoint, each read once and only when asked for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from builder.checkpoints.hashing import FileHashes
from builder.errors import CheckpointError


def test_each_file_is_hashed_when_first_asked_for(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    inner, elsewhere = tmp_path / "sub/b", tmp_path / "a"
    hashes = FileHashes(tmp_path / "sub", [inner, elsewhere, inner])
    assert sorted(hashes) == ["a", "b"]
    inner.write_bytes(b"one")
    assert hashes["b"] == hashlib.sha256(b"one").hexdigest()
    inner.write_bytes(b"two")
    assert hashes["b"] == hashlib.sha256(b"one").hexdigest()


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"a: cannot be read; .* found No such file or directory\. Check the path$"
    ):
        FileHashes(tmp_path, [tmp_path / "a"])["a"]
