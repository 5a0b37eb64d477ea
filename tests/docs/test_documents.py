"""What the documents say that can be looked up: links lead somewhere, every option of a build is described."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from builder.commands import build_command
from builder.profile import load_profile

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8"))
    lost = [link for link in links if "://" not in link and not (document.parent / link.partition("#")[0]).exists()]
    assert lost == []


def test_the_readme_describes_every_option_of_a_build() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    options = [name for option in build_command.params if isinstance(option, click.Option) for name in option.opts]
    assert [name for name in options if name.startswith("--") and name not in text] == []


def test_the_readme_has_the_defaults_of_the_profile() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    profile = load_profile("cpu")
    assert f"| `--window W` | {profile.window} |" in text
    assert f"| `--max-seq-len N` | {profile.max_seq_len} |" in text
    assert f"| `--batch 1,2,4` | `{','.join(map(str, profile.batches))}` |" in text
    assert f"`prefill_chunk` ({profile.prefill_chunk})" in text
    assert f"`max_draft` ({profile.max_draft};" in text
    assert f"`confidence_threshold` ({profile.confidence_threshold:g};" in text
