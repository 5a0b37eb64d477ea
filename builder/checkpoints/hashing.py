"""sha256 of the files that a checkpoint was read from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from builder.errors import CheckpointError
from runtime.bundle import hash_file


class FileHashes(Mapping[str, str]):
    """File name → sha256 in hex. Each file is hashed once, when its entry is first asked for.

    Loading a checkpoint only looks at headers; hashing reads every byte, so it waits until the manifest is written.
    """

    def __init__(self, base: Path, paths: Iterable[Path]) -> None:
        self._paths = {_name(base, path): path for path in sorted(set(paths))}
        self._known: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._known:
            self._known[name] = _hash(self._paths[name])
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _name(base: Path, path: Path) -> str:
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.name


def _hash(path: Path) -> str:
    try:
        return hash_file(path)
    except OSError as error:
        raise CheckpointError(
            path, "cannot be read", expected="a readable file", found=error.strerror or error, remedy="Check the path"
        ) from None
