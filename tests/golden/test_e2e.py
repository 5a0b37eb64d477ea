"""The tiny trained pairs from checkpoint to tokens, through `Engine`: plain, speculative, thresholds, stop tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import runtime
from tests.support import GOLDEN, target_rows

PAIRS = sorted(p.name for p in (GOLDEN / "e2e").iterdir())


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tiny_bundle: Callable[..., Path]) -> Iterator[tuple[Path, runtime.Engine]]:
    """(golden directory of the pair, an engine that serves it); prompts are prefilled in chunks of 4."""
    directory = GOLDEN / "e2e" / request.param
    with runtime.Engine(tiny_bundle(directory)) as engine:
        yield directory, engine


def test_target_logits_and_taps(pair) -> None:
    directory, engine = pair
    reference = load_file(directory / "reference.safetensors")
    prompts = json.loads((directory / "prompts.json").read_text())
    first = prompts["prompts"][0]
    ids = np.array([first["input_ids"] + first["greedy_new_tokens"]])
    slot = np.array([0])
    session = engine._session
    for at in range(0, ids.shape[1], 4):
        chunk = ids[:, at : at + 4]
        out = session.prefill(target_rows(chunk, np.array([at]), slot))
        last = at + chunk.shape[1] - 1
        np.testing.assert_allclose(out.logits[0], reference["logits"][last], rtol=0, atol=1e-4)
        np.testing.assert_allclose(
            session._state["taps"][0, : chunk.shape[1]], reference["taps"][at : last + 1], rtol=0, atol=1e-4
        )


def test_greedy_runs(pair) -> None:
    """Each run on an engine of its own: what a slot keeps of an earlier one would change what is drafted."""
    directory, shared = pair
    golden = json.loads((directory / "prompts.json").read_text())
    limit, block = golden["max_new_tokens"], golden["block_size"]
    for prompt in golden["prompts"]:
        ids = prompt["input_ids"]
        (plain,) = runtime.generate(shared, [ids], max_new_tokens=limit, speculate=False)
        assert list(plain.token_ids) == prompt["greedy_new_tokens"]
        assert plain.stats.proposed == [0] * plain.stats.rounds
        for run in prompt["runs"]:
            with runtime.Engine(shared.bundle.path, check="quick", threads=1) as engine:
                (result,) = runtime.generate(
                    engine,
                    [ids],
                    max_new_tokens=limit,
                    stop_token_ids=run["stop_token_ids"],
                    max_draft=block,
                    confidence_threshold=run["confidence_threshold"],
                    adaptive=False,
                )
            assert list(result.token_ids) == run["output_ids"][len(ids) :]
            check_rounds(result.stats, run, limit)


def check_rounds(stats: runtime.Stats, run: dict, limit: int) -> None:
    """Round by round as the reference, but for what it counts differently: it proposes past the limit, which the
    runtime never does, and of a round that an accepted stop token ended it reports as proposed what was accepted."""
    left = limit - 1
    for r in range(stats.rounds):
        proposed, accepted = run["proposal_lengths"][r], run["accepted_draft_lengths"][r]
        stopped = run["stop_token_ids"] is not None and run["acceptance_lengths"][r] == accepted
        assert stopped or stats.proposed[r] == min(proposed, left - 1), f"round {r}"
        assert stats.accepted[r] == min(accepted, stats.proposed[r]), f"round {r}"
        left -= accepted + 1
    assert stats.rounds == run["verify_count"] or left <= 0
