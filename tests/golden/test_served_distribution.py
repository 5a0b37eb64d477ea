"""Sampling through the engine itself: many short requests of one seed in full batches, three tokens of each against
the exact joint distribution (χ²), for every way in which requests shape it. Each case must fail for a wrong engine, or
it would prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime import distribution, randomness, sequence
from runtime.sampling import SamplingParams
from tests.golden.joint import TOKENS, Array, Distribution, Logits, exact_logits, nucleus, p_value, penalised, softmax
from tests.support import TINY_PAIRS, tiny_prompts

PAIR = "llama"
PROMPT = tuple(tiny_prompts(PAIR)[2]["input_ids"])
RUNS, FEWER = 8_000, 4_000
ROWS = 32
TEMPERATURE, TOP_P = 1.4, 0.9
REPETITION, PRESENCE, FREQUENCY = 0.5, -2.0, -2.0
"""Of the requests with penalties: they call for repetition, rare otherwise, so that missing them shows."""


def free(logits: Array, tokens: Array) -> Array:
    return softmax(logits / TEMPERATURE)


def cut(logits: Array, tokens: Array) -> Array:
    return nucleus(softmax(logits / TEMPERATURE), TOP_P)


def with_penalties(logits: Array, tokens: Array) -> Array:
    return softmax(penalised(logits, tokens, PROMPT, REPETITION, PRESENCE, FREQUENCY) / TEMPERATURE)


TOP = SamplingParams(TEMPERATURE, TOP_P, seed=5)
PENALTIES = SamplingParams(
    TEMPERATURE, seed=5, repetition_penalty=REPETITION, presence_penalty=PRESENCE, frequency_penalty=FREQUENCY
)
GUMBEL = SamplingParams(TEMPERATURE, seed=5, coupling="gumbel")


@dataclass(frozen=True)
class Served:
    tokens: Array  # [runs, 3]
    rate: float
    """Of the drafts that verification came to look at, the share it accepted; 0 without drafts."""


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> Logits:
    return exact_logits(TINY_PAIRS / PAIR, PROMPT, tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def engine(tiny_bundle: Callable[..., Path]) -> Iterator[runtime.Engine]:
    bundle = tiny_bundle(PAIR, batches=(ROWS,), window=16, max_seq_len=24, prefill_chunk=16)
    with runtime.Engine(bundle, check="quick", threads=1, max_waiting=ROWS) as engine:
        yield engine


def serve(engine: runtime.Engine, sampling: SamplingParams, runs: int, speculate: bool = True) -> Served:
    """One token more than is looked at: so the third may be a draft, behind another of its block."""
    handles = []
    for stream in range(runs):
        while not engine.accepts:
            engine.step()
        request = runtime.Request(
            PROMPT,
            max_new_tokens=TOKENS + 1,
            sampling=sampling,
            ignore_eos=True,
            speculate=speculate,
            adaptive=False,
            draw_stream=stream,
        )
        handles.append(engine.submit(request))
    results = [engine.result(handle) for handle in handles]
    rounds = [pair for r in results for pair in zip(r.stats.accepted, r.stats.proposed, strict=True)]
    looked_at = sum(min(a + 1, n) for a, n in rounds)
    accepted = sum(a for a, _ in rounds)
    return Served(np.array([r.token_ids[:TOKENS] for r in results]), accepted / max(looked_at, 1))


def check(logits: Logits, distribution: Distribution, found: Served, record_property: Any) -> None:
    joint = logits.joint(distribution)
    assert (joint[tuple(found.tokens.T)] > 0).all(), "a token that has no probability"
    p = p_value(joint, found.tokens, cells=50)
    record_property("acceptance", found.rate)
    record_property("p", p)
    print(f"acceptance {found.rate:.3f}, p {p:.3g}")
    assert p > 1e-3


@pytest.mark.parametrize(
    ("sampling", "distribution", "speculate"),
    [
        pytest.param(TOP, cut, True, id="top_p"),
        pytest.param(TOP, cut, False, id="top_p-plain"),
        pytest.param(PENALTIES, with_penalties, True, id="penalties"),
        pytest.param(PENALTIES, with_penalties, False, id="penalties-plain"),
        pytest.param(GUMBEL, free, True, id="gumbel"),
    ],
)
def test_joint_distribution(
    engine: runtime.Engine,
    logits: Logits,
    sampling: SamplingParams,
    distribution: Distribution,
    speculate: bool,
    record_property: Any,
) -> None:
    found = serve(engine, sampling, RUNS, speculate)
    assert found.rate == 0 if not speculate else 0.1 < found.rate < 0.9
    check(logits, distribution, found, record_property)


def test_coupled_draws_are_those_of_plain_decoding(engine: runtime.Engine) -> None:
    coupled, plain = (serve(engine, GUMBEL, 1_000, speculate).tokens for speculate in (True, False))
    np.testing.assert_array_equal(coupled, plain)


def uncut(logits: Any, params: SamplingParams) -> Any:
    """Mutant: top_p is forgotten."""
    return distribution.probabilities(logits, replace(params, top_p=1.0))


def forgets_the_block(history: distribution.History, logits: Any, extra_tokens: Any = ()) -> Any:
    """Mutant: penalties know nothing of the drafts before a row in its block."""
    return _adjusted(history, logits)


_adjusted = distribution.History.adjusted


def one_noise(seed: int, stream: int, position: int, vocab_size: int) -> Any:
    """Mutant: every position draws with the same noise."""
    return randomness.gumbel(seed, stream, 0, vocab_size)


@pytest.mark.parametrize(
    ("sampling", "exact", "where", "mutant"),
    [
        pytest.param(TOP, cut, (sequence, "probabilities"), uncut, id="top_p"),
        pytest.param(PENALTIES, with_penalties, (distribution.History, "adjusted"), forgets_the_block, id="penalties"),
        pytest.param(GUMBEL, free, (sequence, "gumbel"), one_noise, id="gumbel"),
    ],
)
def test_mutants_are_found(
    engine: runtime.Engine,
    logits: Logits,
    sampling: SamplingParams,
    exact: Distribution,
    where: tuple[Any, str],
    mutant: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(*where, mutant)
    found = serve(engine, sampling, FEWER)
    p = p_value(logits.joint(exact), found.tokens, cells=20)
    print(f"acceptance {found.rate:.3f}, p {p:.3g}")
    assert p < 1e-6
