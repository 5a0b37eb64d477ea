"""One file or shards: what is read, and what is refused before anything is read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from builder.checkpoints.safetensors_source import open_safetensors
from tests.builder.checkpoints.helpers import refusal, shard, write_index


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor([1, -2.5, 1, 1], dtype=torch.bfloat16),
        "c": torch.tensor([0.5]).half(),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_headers_and_values(directory: Path) -> None:
    source = open_safetensors(directory)
    assert source.names() == {"a", "b", "c"}
    assert source.shape("a") == (2, 3)
    assert [source.infos[name].dtype for name in "abc"] == ["F32", "BF16", "F16"]
    assert source.read("a").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert all(source.read(name).dtype == np.float32 for name in "abc")
    assert source.read("b").tolist() == [1.0, -2.5, 1.0, 1.0]
    assert source.read("c").tolist() == [0.5]
    assert source.only(["a"]).names() == {"a"}
    refusal(lambda: source.read("nope"), directory, "no such tensor", "nope")


def test_tensors_are_mapped_not_copied(directory: Path) -> None:
    source = open_safetensors(directory)
    assert source.read("a").ctypes.data == source.read("a").ctypes.data
    assert not source.read("a").flags.writeable


def test_shards(directory: Path) -> None:
    weight_map = shard(directory)
    source = open_safetensors(directory)
    assert source.read("a")[1, 2] == 5
    assert source.infos["b"].file.name == weight_map["b"]
    assert [path.name for path in source.files] == ["model.safetensors.index.json", *sorted(set(weight_map.values()))]


def test_hub_cache_links_are_followed(directory: Path, tmp_path: Path) -> None:
    """The Hugging Face cache: snapshots/<revision>/shard → ../../blobs/<hash>."""
    weight_map = shard(directory)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for file in set(weight_map.values()):
        (directory / file).rename(blobs / file)
        (snapshot / file).symlink_to(Path("..", "..", "blobs", file))
    write_index(snapshot, weight_map)
    assert open_safetensors(snapshot).read("a")[0, 1] == 1


def test_shard_missing(directory: Path) -> None:
    weight_map = shard(directory)
    (directory / weight_map["b"]).unlink()
    refusal(lambda: open_safetensors(directory), weight_map["b"], "shard missing")


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/outside.safetensors",
        "x/../../y.safetensors",
        "x/../model-00001-of-00003.safetensors",
        "x\\\\y.safetensors",
        "C:y.safetensors",
        "",
    ],
)
def test_shard_outside(directory: Path, name: str) -> None:
    shard(directory)
    save_file({"a": torch.ones(1)}, directory.parent / "outside.safetensors")
    write_index(directory, {"a": name})
    refusal(lambda: open_safetensors(directory), "weight_map", "outside the directory", json.dumps(name))


def test_absolute_path_into_the_directory(directory: Path) -> None:
    weight_map = shard(directory)
    write_index(directory, {"a": str(directory / weight_map["a"])})
    refusal(lambda: open_safetensors(directory), "weight_map", "outside the directory")


def test_shard_link_leading_outside(directory: Path) -> None:
    weight_map = shard(directory)
    outside = directory.parent / "outside.safetensors"
    (directory / weight_map["a"]).rename(outside)
    (directory / weight_map["a"]).symlink_to(outside)
    refusal(lambda: open_safetensors(directory), "outside the directory", weight_map["a"])


@pytest.mark.parametrize("value", [3, None, ["x"]])
def test_index_of_wrong_types(directory: Path, value: object) -> None:
    shard(directory)
    write_index(directory, {"a": value})
    refusal(lambda: open_safetensors(directory), "weight_map.a", "a string")


def test_index_without_map(directory: Path) -> None:
    shard(directory)
    (directory / "model.safetensors.index.json").write_text("{}")
    refusal(lambda: open_safetensors(directory), "weight_map", "missing")


def test_index_names_a_tensor_twice(directory: Path) -> None:
    weight_map = shard(directory)
    text = "".join(f'"{name}": "{file}", ' for name, file in weight_map.items())
    (directory / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{text} "a": "{weight_map["a"]}"}}}}')
    refusal(lambda: open_safetensors(directory), "index.json", '"a" listed twice')


def test_tensor_listed_but_not_there(directory: Path) -> None:
    weight_map = shard(directory)
    write_index(directory, weight_map | {"d": weight_map["a"]})
    refusal(lambda: open_safetensors(directory), weight_map["a"], ": d:", "in no shard")


def test_tensor_in_another_shard_than_listed(directory: Path) -> None:
    weight_map = shard(directory)
    write_index(directory, weight_map | {"a": weight_map["b"]} | {"extra": weight_map["a"]})
    refusal(lambda: open_safetensors(directory), ": a:", f"found in {weight_map['a']}")


def test_tensor_in_two_shards(directory: Path) -> None:
    weight_map = shard(directory)
    file = directory / weight_map["b"]
    save_file(load_file(file) | {"a": torch.ones(2, 3)}, file)
    refusal(lambda: open_safetensors(directory), ": a:", "two shards", weight_map["a"])


def test_tensor_not_in_the_index(directory: Path) -> None:
    weight_map = shard(directory)
    file = directory / weight_map["b"]
    save_file(load_file(file) | {"z": torch.ones(2)}, file)
    refusal(lambda: open_safetensors(directory), ": z:", "not listed")


def test_index_beside_a_single_file(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    shard(directory)
    save_file(tensors, directory / "model.safetensors")
    refusal(lambda: open_safetensors(directory), "model.safetensors", "both", "stale")


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_truncated(directory: Path, keep: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refusal(lambda: open_safetensors(directory), file, "truncated or not safetensors", "bytes")


@pytest.mark.parametrize("data", [b"hello world, this is text", b"\0" * 64, b"\xff" * 64, b"{}" * 40])
def test_not_safetensors(directory: Path, data: bytes) -> None:
    (directory / "model.safetensors").write_bytes(data)
    refusal(lambda: open_safetensors(directory), "model.safetensors", "not safetensors")


class Trap:
    """Unpickling this raises: no code path may do so."""

    def __reduce__(self) -> tuple[object, ...]:
        return (exec, ("raise RuntimeError('a pickle was opened')",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickles_are_refused_unopened(directory: Path, name: str) -> None:
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(pickle.dumps(Trap()))
    refusal(lambda: open_safetensors(directory), name, "pickle", "Convert the weights to safetensors")


def test_pickle_shard_and_disguised_pickle(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    refusal(lambda: open_safetensors(directory), "a pickle", "Convert")
    torch.save({"a": torch.ones(1)}, directory / "model.safetensors")
    refusal(lambda: open_safetensors(directory), "a pickle", "Convert")
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    write_index(directory, {"a": "pytorch_model.bin"})
    refusal(lambda: open_safetensors(directory), "pytorch_model.bin", "Convert")


def test_no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    refusal(lambda: open_safetensors(directory), directory, "weights missing", "an empty directory")
    (directory / "README.md").write_text("x")
    refusal(lambda: open_safetensors(directory), directory, "weights missing", "README.md")


def test_dangling_link_and_directory(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.unlink()
    file.symlink_to("gone")
    refusal(lambda: open_safetensors(directory), file, "cannot be read")
    file.unlink()
    file.mkdir()
    refusal(lambda: open_safetensors(directory), file, "cannot be read")
