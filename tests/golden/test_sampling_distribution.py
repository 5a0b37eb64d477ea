"""Sampling through draft and verify engines: three tokens are distributed as the target's own, to within chance.

10⁵ runs of a tiny pair at a fixed seed against the exact joint distribution (χ²). The same test must fail for wrong
ways of verifying, or it would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.checkpoints import load_drafter, load_target
from runtime.distribution import probabilities
from runtime.manifest import Limits, Manifest
from runtime.sampling import SamplingParams
from runtime.sessions.base import DraftRows
from runtime.sessions.ort import OrtSession
from runtime.verify import accept_sampled
from tests.golden.joint import TOKENS, Array, exact_logits, p_value, softmax
from tests.support import TINY_PAIRS, pair_engines, seed_rows, target_rows, tiny_prompts

PAIR = "llama"
RUNS, FEWER = 100_000, 10_000
TEMPERATURE = 0.9
DRAFTS = 3
ROWS = 32
"""Independent runs in one call, each in a slot of its own."""

THREADS = 2

Accept = Callable[..., tuple[int, int]]


@dataclass(frozen=True)
class Pair:
    """The engines, with debug outputs, and the exact joint distribution of three tokens after `prompt` and `bonus`."""

    path: Path
    manifest: Manifest
    prompt: tuple[int, ...]
    bonus: int
    joint: Array  # [V, V, V], float64


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory, dest = TINY_PAIRS / PAIR, tmp_path_factory.mktemp("sampling")
    target = load_target(directory / "target")
    drafter = load_drafter(directory / "drafter", target)
    prompt = tiny_prompts(PAIR)[2]
    ids, bonus = tuple(prompt["input_ids"]), prompt["greedy_new_tokens"][0]
    limits = Limits((ROWS,), ROWS, 16, 24, drafter.spec.block_size, 16)
    manifest = pair_engines(dest, target, drafter, limits, debug=True)
    logits = exact_logits(directory, [*ids, bonus], tmp_path_factory.mktemp("exact"))
    return Pair(dest, manifest, ids, bonus, logits.joint(lambda logits, _: softmax(logits / TEMPERATURE)))


@dataclass(frozen=True)
class Sampled:
    tokens: Array  # [runs, 3]
    accepted: int
    proposed: int

    @property
    def rate(self) -> float:
        """Of the drafts that verification came to look at, the share it accepted."""
        return self.accepted / self.proposed


def sample(pair: Pair, runs: int, accept: Accept, seed: int) -> Sampled:
    """`runs` runs, shared by `THREADS` sessions."""
    parts = [runs // THREADS] * THREADS
    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(lambda k: _sample(pair, parts[k], accept, seed + k), range(THREADS)))
    return Sampled(
        np.concatenate([r.tokens for r in results]),
        sum(r.accepted for r in results),
        sum(r.proposed for r in results),
    )


def _sample(pair: Pair, runs: int, accept: Accept, seed: int) -> Sampled:
    """Rows draft and verify side by side, each in a run of its own; one that has its tokens starts the next at once."""
    session = OrtSession(pair.path, pair.manifest, threads=1)
    rng, params = np.random.default_rng(seed), SamplingParams(TEMPERATURE)
    slot, n = np.arange(ROWS), len(pair.prompt)
    zero = np.zeros(ROWS, np.int64)
    session.prefill(target_rows(np.tile(np.array(pair.prompt), (ROWS, 1)), zero, slot))
    session.seed(seed_rows(zero, n, slot))
    start, new_len, bonus = np.full(ROWS, n), zero.copy(), np.full(ROWS, pair.bonus)
    temperature = np.full(ROWS, TEMPERATURE, np.float32)
    given: list[list[int]] = [[] for _ in range(ROWS)]
    # Row r takes runs r, r+ROWS, …: were the first to finish taken, short runs would be preferred.
    done: list[list[list[int]]] = [[] for _ in range(ROWS)]
    each = -(-runs // ROWS)
    accepted = looked_at = 0
    while min(map(len, done)) < each:
        uniforms = (rng.integers(0, 2**23, (ROWS, DRAFTS)) / 2**23).astype(np.float32)
        block = session.draft(DraftRows(bonus, start, start, new_len, slot, temperature, uniforms))
        assert block.q is not None
        out = session.verify(target_rows(np.concatenate((bonus[:, None], block.ids), axis=1), start, slot))
        logits = out.logits.reshape(ROWS, 1 + DRAFTS, -1)
        tests, finals = rng.random((ROWS, DRAFTS)), rng.random(ROWS)
        for r in range(ROWS):
            a, token = accept(
                session,
                r,
                block.ids[r],
                block.q[r],
                lambda i, rows=logits[r]: probabilities(rows[i], params),
                tests[r],
                float(finals[r]),
            )
            accepted, looked_at = accepted + a, looked_at + min(a + 1, DRAFTS)
            given[r] += [*block.ids[r, :a].tolist(), token]
            if len(given[r]) < TOKENS:
                start[r], new_len[r], bonus[r] = start[r] + a + 1, a + 1, token
            else:
                done[r].append(given[r][:TOKENS])
                given[r], start[r], new_len[r], bonus[r] = [], n, 0, pair.bonus
    session.close()
    tokens = np.array([run for row in done for run in row[:each]])
    return Sampled(tokens, accepted, looked_at)


def as_served(
    session: OrtSession, row: int, ids: Array, q: Array, p: Any, tests: Array, final: float
) -> tuple[int, int]:
    return accept_sampled(ids, q, p, tests, final)


def always(session: OrtSession, row: int, ids: Array, q: Array, p: Any, tests: Array, final: float) -> tuple[int, int]:
    """Mutant: every draft is accepted."""
    return accept_sampled(ids, q, p, np.full(len(ids), -1.0), final)


def q_without_markov(
    session: OrtSession, row: int, ids: Array, q: Array, p: Any, tests: Array, final: float
) -> tuple[int, int]:
    """Mutant: q recomputed after the chain, from the lm_head alone, as in DeepSpec 31."""
    return accept_sampled(ids, softmax(session.debug["base"][row] / TEMPERATURE), p, tests, final)


def q_of_another_temperature(
    session: OrtSession, row: int, ids: Array, q: Array, p: Any, tests: Array, final: float
) -> tuple[int, int]:
    """Mutant: q recomputed from the right logits, but without the request's temperature."""
    return accept_sampled(ids, softmax(session.debug["corrected"][row] / (1.25 * TEMPERATURE)), p, tests, final)


def test_joint_distribution(pair: Pair, record_property: Any) -> None:
    found = sample(pair, RUNS, as_served, seed=11)
    assert len(found.tokens) >= RUNS
    p = p_value(pair.joint, found.tokens)
    record_property("acceptance", found.rate)
    record_property("p", p)
    print(f"acceptance {found.rate:.3f}, p {p:.3g}")
    assert 0.2 < found.rate < 0.8
    assert p > 1e-3


@pytest.mark.parametrize("mutant", [always, q_without_markov, q_of_another_temperature])
def test_mutants_are_found(pair: Pair, mutant: Accept) -> None:
    found = sample(pair, FEWER, mutant, seed=11)
    p = p_value(pair.joint, found.tokens)
    print(f"acceptance {found.rate:.3f}, p {p:.3g}")
    assert p < 1e-6
