"""The demo's pair against the reference evaluator: tokens, acceptance round by round, and the task-accuracy gate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import runtime

GATE = 0.98
"""Least share of the recorded tokens per round."""

Run = tuple[dict[str, Any], runtime.Result]


@pytest.fixture(scope="module")
def runs(golden: Path, real_engine: runtime.Engine) -> list[Run]:
    """Each recorded prompt with what the engine makes of it: the whole block, no threshold."""
    prompts = json.loads((golden / "real_pair.json").read_text())["prompts"]
    results = runtime.generate(real_engine, [p["prompt_ids"] for p in prompts], max_new_tokens=128, adaptive=False)
    return list(zip(prompts, results, strict=True))


def test_token_ids(runs: Sequence[Run]) -> None:
    assert len(runs) >= 16
    for i, (prompt, result) in enumerate(runs):
        assert list(result.token_ids) == prompt["output_ids"], f"prompt {i}"
        stopped = result.token_ids[-1] in prompt.get("stop_token_ids", [2])
        assert result.finish_reason == ("stop" if stopped else "length")


def test_acceptance_round_by_round(runs: Sequence[Run]) -> None:
    """Up to the last round, which the runtime cuts at the limit and the reference doesn't."""
    for i, (prompt, result) in enumerate(runs):
        accepted = result.stats.accepted
        assert len(result.token_ids) > 1
        assert [a + 1 for a in accepted[:-1]] == prompt["rounds"][: len(accepted) - 1], f"prompt {i}"
        # Nothing is lost in the cut round either: all it could accept within the limit.
        left = len(result.token_ids) - 1 - sum(prompt["rounds"][: len(accepted) - 1])
        if result.finish_reason == "length":
            assert accepted[-1] + 1 == min(prompt["rounds"][len(accepted) - 1], left), f"prompt {i}"


def test_tokens_per_round(runs: Sequence[Run], record_property: Any) -> None:
    """The accuracy gate in CI: drafts are accepted as often as the reference's, by kind and over all."""
    kinds = sorted({prompt["kind"] for prompt, _ in runs})
    for kind in [*kinds, None]:
        chosen = [run for run in runs if kind in (None, run[0]["kind"])]
        recorded = fmean(fmean(prompt["rounds"]) for prompt, _ in chosen)
        # Counted as the reference counts, accepted + 1 in every round, whatever of it was emitted.
        found = fmean(fmean(a + 1 for a in result.stats.accepted) for _, result in chosen)
        record_property(f"tau {kind or 'all'}", f"{found:.3f} (recorded {recorded:.3f})")
        print(f"tau {kind or 'all'}: {found:.3f}, recorded {recorded:.3f}")
        assert found >= GATE * recorded, kind or "all"
