"""The numbered examples run, on a tiny bundle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
TOLD = {
    "01_generate.py": "drafts accepted",
    "02_stream.py": "[cancelled after ",
    "03_sample.py": "repeatable: True\nprompts of one call differ: True\nrefused: top_p: out of range",
    "04_many.py": "{'length': 6} after ",
    "05_async.py": "Who wrote Hamlet? It began with 'w64' and ended by length.\ngiven up: 0 running\n",
    "06_policy.py": " drafts accepted, at most 6 in a step\n",
    "07_scheduler.py": "as they came: 40 36 32 28 24 20 16\nas they were done: 16 20 24 28 32 36 40\n",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, talking_bundle: Path) -> None:
    command = [sys.executable, str(example), str(talking_bundle)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert TOLD[example.name] in done.stdout
