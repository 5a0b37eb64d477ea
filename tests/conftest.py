"""What tests of several folders share: a small bundle that is whole, without any model behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from builder.bundle import Staging, seal
from runtime.manifest import Manifest
from tests.examples import FILES, example_manifest


@pytest.fixture
def manifest() -> Manifest:
    return example_manifest()


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[..., Path]:
    """Writes a bundle and returns its path; keywords replace fields of its manifest, `files` its files."""

    def make(
        name: str = "bundle", *, files: dict[str, bytes] = FILES, overwrite: bool = False, **changes: object
    ) -> Path:
        with Staging(tmp_path / name, overwrite=overwrite) as staging:
            for relative, content in files.items():
                path = staging.directory / relative
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
            seal(staging.directory, replace(example_manifest(), **changes))  # type: ignore[arg-type]
            staging.commit()
        return tmp_path / name

    return make
