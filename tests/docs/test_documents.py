"""What the documents say that can be looked up: links lead somewhere, every option and default is described."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import click
import pytest

from builder.commands import build_command
from builder.profile import load_profile
from runtime import Engine, EngineStats, Request, SamplingParams, generate
from runtime.policy import BreakEven
from runtime.request import MAX_LOGPROBS
from runtime.result import FinishReason

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


def test_the_readme_names_every_argument_of_generate() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    arguments = list(inspect.signature(generate).parameters)[2:]  # after bundle and prompts
    assert [name for name in arguments if f"`{name}`" not in text] == []


def rows(section: str) -> dict[str, str]:
    """The tables of a section of docs/serving.md: each name in a first column, and what comes next to it
    where it is named first."""
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    body = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert body is not None
    lines = re.findall(r"^\| (`[^|]*) \|([^|]*)\|", body[1], re.MULTILINE)
    return {name: second.strip() for names, second in reversed(lines) for name in re.findall(r"`(\w+)`", names)}


def test_the_guide_describes_every_parameter_with_its_default() -> None:
    told = rows("Sampling")
    for parameter in fields(SamplingParams):
        default = "none" if parameter.default == () else str(parameter.default).removesuffix(".0")
        assert told[parameter.name].strip('`"') == default, parameter.name


def test_the_guide_describes_every_argument_of_a_request() -> None:
    told = rows("A request")
    assert [f.name for f in fields(Request) if f.name not in told] == []
    assert [reason for reason in get_args(FinishReason) if reason not in told] == []
    defaults = Request(prompt_ids=(1,))
    for name in ("max_new_tokens", "ignore_eos", "speculate", "adaptive", "logprobs", "deadline", "draw_stream"):
        assert told[name] == str(getattr(defaults, name)), name
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert f"likeliest alternatives, 0 … {MAX_LOGPROBS} |" in text


def test_the_guide_describes_the_engine() -> None:
    told = rows("The engine")
    assert [name for name in list(inspect.signature(Engine).parameters)[1:] if name not in told] == []
    calls = [name for name, value in vars(Engine).items() if not name.startswith("_") and value is not None]
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert [name for name in calls if not re.search(rf"^\| .*`{name}[`(]", text, re.MULTILINE)] == []


def test_the_guide_describes_every_statistic() -> None:
    told = rows("Statistics") | rows("Drafting")
    assert [f.name for f in (*fields(EngineStats), *fields(BreakEven)) if f.name not in told] == []
