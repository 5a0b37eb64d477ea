"""Lazy tensors from safetensors files: one file, or shards listed in an index.

Files are memory-mapped. Pickle files are never opened: loading one can run any code that its author put there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from builder.checkpoints.config import read_json, show
from builder.checkpoints.layout import TensorInfo, harmless
from builder.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_NUMPY_TYPES = {"F32": "<f4", "F16": "<f2"}

CONVERT = (
    "Convert the weights to safetensors (save_pretrained(..., safe_serialization=True)); pickle files are never opened"
)
AGAIN = "Download the checkpoint again"


class SafetensorsSource:
    """A TensorSource over safetensors files (see `builder.spec.TensorSource`), each mapped when first read from.

    `files` are those whose bytes make up the checkpoint: the weights, and the index where there is one.
    """

    def __init__(self, infos: Mapping[str, TensorInfo], files: Iterable[Path]) -> None:
        self.infos = dict(infos)
        self.files = tuple(files)
        self._mapped: dict[Path, _MappedFile] = {}

    def names(self) -> frozenset[str]:
        return frozenset(self.infos)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.infos[name].shape

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor in float32, where the file has it so a view of the mapped file. Raises CheckpointError when it
        isn't there."""
        info = self.infos.get(name)
        if info is None:
            raise CheckpointError(
                self.files[0].parent, "no such tensor", expected="a tensor of the spec", found=name, remedy=AGAIN
            )
        try:
            if info.file not in self._mapped:
                self._mapped[info.file] = _MappedFile(info.file)
            return self._mapped[info.file].tensor(name, info)
        except (OSError, ValueError, KeyError) as error:  # gone or changed since its header was read, or not mappable
            raise CheckpointError(
                f"{info.file}: {name}",
                "cannot be read",
                expected="a file that can be mapped",
                found=error,
                remedy=AGAIN,
            ) from None

    def only(self, names: Iterable[str]) -> SafetensorsSource:
        """The same files, showing `names` alone."""
        return SafetensorsSource({name: self.infos[name] for name in names}, self.files)


class _MappedFile:
    """One file, whose header the library has checked. numpy has no bfloat16, so data are taken from the map itself.

    Format: 8 bytes, the little-endian length of a JSON header; the header, with ``data_offsets`` of each tensor counted
    from its own end; the data.
    """

    def __init__(self, path: Path) -> None:
        self._data: NDArray[np.uint8] = np.asarray(np.memmap(path, np.uint8, mode="r"))
        self._start = 8 + int.from_bytes(bytes(self._data[:8]), "little")
        self._header = json.loads(bytes(self._data[8 : self._start]))

    def tensor(self, name: str, info: TensorInfo) -> NDArray[np.float32]:
        begin, end = self._header[name]["data_offsets"]
        raw = self._data[self._start + begin : self._start + end]
        if info.dtype == "BF16":
            # The upper half of a float32.
            wide = raw.view("<u2").astype(np.uint32)
            wide <<= 16
            values = wide.view(np.float32)
        else:
            values = raw.view(_NUMPY_TYPES[info.dtype]).astype(np.float32, copy=False)
        return values.reshape(info.shape)


def open_safetensors(directory: Path) -> SafetensorsSource:
    """Open the weights of a checkpoint directory: ``model.safetensors`` or the shards of its index.

    Raises:
        CheckpointError: weights missing or only there as pickles, a shard absent or outside the directory, a file
            truncated or not safetensors, index and shards that disagree.
    """
    index, single = directory / INDEX, directory / SINGLE
    if index.exists():
        return _open_index(directory, index, single)
    if single.exists() or single.is_symlink():
        return SafetensorsSource(_read_header(single), [single])
    others = sorted(entry.name for entry in directory.iterdir() if entry.is_file())
    pickles = [name for name in others if name.endswith(PICKLES)]
    if pickles:
        raise CheckpointError(
            directory / pickles[0], "pickle weights", expected=SINGLE, found=", ".join(pickles[:3]), remedy=CONVERT
        )
    raise CheckpointError(
        directory,
        "weights missing",
        expected=f"{SINGLE} or {INDEX}",
        found=", ".join(others[:5]) or "an empty directory",
        remedy=AGAIN,
    )


def _open_index(directory: Path, index: Path, single: Path) -> SafetensorsSource:
    config = read_json(index)
    table = config.table("weight_map")
    if table is None or not table.values:
        config.fail("weight_map", "missing", expected="tensor names with the shard of each")
    shards: dict[str, Path] = {}
    for name in table.values:
        shard = table.string(name)
        if shard not in shards:
            shards[shard] = _shard_path(directory, index, shard)
    if single.exists() and single not in shards.values():
        raise CheckpointError(
            single,
            "stands beside an index that doesn't list it",
            expected=f"{SINGLE} or {INDEX}",
            found="both",
            remedy="Remove the one that is stale",
        )
    infos: dict[str, TensorInfo] = {}
    for path in sorted(set(shards.values())):
        for name, info in _read_header(path).items():
            if name in infos:
                raise CheckpointError(
                    f"{path}: {name}",
                    "tensor in two shards",
                    expected="one",
                    found=f"also in {infos[name].file.name}",
                    remedy=AGAIN,
                )
            infos[name] = info
    for name, info in infos.items():
        if name not in table.values and not harmless(name):
            raise CheckpointError(
                f"{info.file}: {name}",
                "tensor not listed in the index",
                expected=f"an entry in {INDEX}",
                found="none",
                remedy=AGAIN,
            )
    for name, shard in table.values.items():
        holder = infos.get(name)
        if holder is None or holder.file != shards[shard]:
            raise CheckpointError(
                f"{shards[shard]}: {name}",
                "tensor listed in the index but not in this shard",
                expected=f"in {shard}",
                found="in no shard" if holder is None else f"in {holder.file.name}",
                remedy=AGAIN,
            )
    return SafetensorsSource(infos, [index, *sorted(set(shards.values()))])


def _shard_path(directory: Path, index: Path, shard: str) -> Path:
    """The path of a shard named in an index, which came with the download and so may only point into the directory."""
    pure = PurePosixPath(shard)
    where = f"{index}: weight_map"
    outside = CheckpointError(
        where,
        "shard outside the directory",
        expected=f"a file inside {directory}",
        found=show(shard),
        remedy="Put the shards beside the index and name them by file name",
    )
    if not shard or pure.is_absolute() or ".." in pure.parts or "\\" in shard or "\0" in shard or ":" in shard:
        raise outside
    if pure.suffix != ".safetensors":
        raise CheckpointError(
            where, "shard is not a safetensors file", expected="*.safetensors", found=show(shard), remedy=CONVERT
        )
    path = directory / pure
    roots = [directory.resolve()]
    if directory.resolve().parent.name == "snapshots":
        # The Hugging Face cache keeps a snapshot's files as links into the blobs folder two levels up.
        roots.append(directory.resolve().parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(root) for root in roots):
        raise outside
    if not path.exists():
        raise CheckpointError(
            path, "shard missing", expected=f"a file, as listed in {INDEX}", found="none", remedy=AGAIN
        )
    return path


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, whose header and size the library checks. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise CheckpointError(
            path, "cannot be read", expected="a safetensors file", found=error.strerror or error, remedy=AGAIN
        ) from None
    if head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise CheckpointError(path, "not safetensors", expected="a safetensors file", found="a pickle", remedy=CONVERT)
    try:
        handle: Any = safe_open(path, framework="numpy")
        infos = {}
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            piece = handle.get_slice(name)
            infos[name] = TensorInfo(tuple(piece.get_shape()), str(piece.get_dtype()), path)
    except Exception as error:  # the library's own error class, OSError, or a panic turned exception: all mean the file
        raise CheckpointError(
            path,
            "truncated or not safetensors",
            expected="a whole safetensors file",
            found=f"{path.stat().st_size} bytes ({error})",
            remedy=AGAIN,
        ) from None
    return infos
