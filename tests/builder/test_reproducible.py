"""Two builds of the same checkpoints are the same bytes, in another process with other hash seeds too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from runtime.manifest import outside_identity
from tests.support import TINY, TINY_PAIRS


def test_second_build(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    first, second = tiny_bundle("llama"), tmp_path / "second"
    profile = tmp_path / "tiny.toml"
    profile.write_text(
        "".join(
            f"{name} = {list(value) if isinstance(value, tuple) else value}\n"
            for name in ("batches", "window", "max_seq_len", "prefill_chunk", "max_draft", "confidence_threshold")
            for value in [getattr(TINY, name)]
        )
    )
    pair = TINY_PAIRS / "llama"
    paths = {"--target": pair / "target", "--drafter": pair / "drafter", "--out": second, "--profile": profile}
    options = [str(part) for item in paths.items() for part in item]
    subprocess.run(
        [sys.executable, "-m", "builder.cli", "build", *options],
        check=True,
        capture_output=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "1", "COLUMNS": "200"},
    )
    # Whoever loaded the first has left packed weights there.
    files = [{p.relative_to(b).as_posix() for p in b.rglob("*") if p.is_file()} for b in (first, second)]
    names = [{name for name in found if not outside_identity(name)} for found in files]
    assert names[0] == names[1]
    for name in sorted(names[0]):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
