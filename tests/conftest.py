"""What tests of several folders share: a small bundle that is whole without any model behind it, and tiny real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from builder.bundle import Staging, seal
from builder.profile import Profile
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


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a tiny pair (``llama``, ``qwen3`` or a directory of another), each once a run; keywords replace fields of
    `tests.support.TINY`.

    Bundles are shared by all tests: whoever wants to change one copies it.
    """
    from builder.build import BuildOptions, build
    from tests.support import TINY, TINY_PAIRS, SilentProgress

    built: dict[tuple[Path, Profile], Path] = {}

    def bundle(pair: str | Path = "llama", **changes: object) -> Path:
        directory, profile = TINY_PAIRS / pair, replace(TINY, **changes)  # type: ignore[arg-type]
        if (directory, profile) not in built:
            out = tmp_path_factory.mktemp(directory.name) / "bundle"
            build(BuildOptions(directory / "target", directory / "drafter", out, profile), SilentProgress())
            built[directory, profile] = out
        return built[directory, profile]

    return bundle


@pytest.fixture(scope="session")
def talking_bundle(tiny_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair with a tokenizer (token i is the word ``w<i>``) and a chat template, so that it takes text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from tests.support import copy_bundle

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = {
        "chat_template": "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}",
        "bos_token": None,
        "eos_token": None,
    }
    files = {
        "tokenizer/tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer/tokenizer_config.json": json.dumps(config).encode(),
    }
    return copy_bundle(tiny_bundle("llama"), tmp_path_factory.mktemp("talking") / "bundle", files)
