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
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare

import runtime
from builder.checkpoints import load_drafter, load_target
from builder.spec import DrafterCheckpoint, TargetCheckpoint
from builder.vectors import reference_modules
from builder.weights import write_weights
from runtime.manifest import Limits, Manifest
from runtime.sampling import SamplingParams, probabilities
from runtime.sessions.ort import OrtSession
from runtime.verify import accept_sampled
from tests.support import TINY_PAIRS, pair_engines, tiny_prompts

PAIR = "llama"
RUNS, FEWER, SERVED = 100_000, 10_000, 3_000
TEMPERATURE = 0.9
WARM, TOP_P = 1.4, 0.9  # of the requests served with top_p, which leaves few tokens when it is colder
TOKENS = 3
DRAFTS = 3
ROWS = 32
"""Independent runs in one call, each in a slot of its own."""

THREADS = 2
LEAST = 10.0
"""Expected count of a cell of the χ² test; rarer outcomes are merged with their neighbours."""

Array = NDArray[Any]
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
    limits = Limits((ROWS,), ROWS, 16, 24, drafter.spec.block_size, 8)
    manifest = pair_engines(dest, target, drafter, limits, debug=True)
    joint = exact(dest, target, drafter, [*ids, bonus], lambda logits: softmax(logits / TEMPERATURE))
    return Pair(dest, manifest, ids, bonus, joint)


def softmax(logits: Array) -> Array:
    p = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def nucleus(p: Array) -> Array:
    """p cut to the fewest tokens that reach `TOP_P`, by the full sort of each row."""
    order = np.argsort(-p, axis=-1, kind="stable")
    ranked = np.take_along_axis(p, order, axis=-1)
    ranked[np.cumsum(ranked, axis=-1) - ranked >= TOP_P] = 0
    kept = np.empty_like(p)
    np.put_along_axis(kept, order, ranked, axis=-1)
    return kept / kept.sum(axis=-1, keepdims=True)


def exact(
    dest: Path,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    prompt: list[int],
    distribution: Callable[[Array], Array],
) -> Array:
    """p(t1) p(t2 | t1) p(t3 | t1 t2) for every three tokens, from the float32 torch module."""
    vocab = target.spec.vocab_size
    n = len(prompt)
    limits = Limits((1,), vocab, 16, n + 2, drafter.spec.block_size, 8)
    folder = dest / f"exact-{n}"
    folder.mkdir()
    index = write_weights(folder, target, drafter, limits)
    net = reference_modules(target.spec, drafter.spec, index, limits)["target"]
    slot, rows = torch.arange(vocab), torch.tensor([[n - 1]])

    def caches() -> list[torch.Tensor]:
        shape = (vocab, target.spec.num_kv_heads, n + 2, target.spec.head_dim)
        return [torch.zeros(shape) for _ in range(2 * target.spec.num_layers)]

    with torch.no_grad():
        ids = torch.tensor(prompt).expand(vocab, -1)
        zero = torch.zeros(vocab, dtype=torch.int64)
        _, logits, _, *after = net(ids, zero, slot, rows.expand(vocab, -1), caches())
        p1 = distribution(logits[0, 0].numpy())
        first = torch.zeros(vocab, 1, dtype=torch.int64)
        _, logits, _, *after = net(torch.arange(vocab)[:, None], zero + n, slot, first, after)
        p2 = distribution(logits[:, 0].numpy())
        joint = np.empty((vocab, vocab, vocab))
        for token in range(vocab):
            _, logits, *_ = net(torch.full((vocab, 1), token), zero + n + 1, slot, first, after)
            joint[:, token] = (p1 * p2[:, token])[:, None] * distribution(logits[:, 0].numpy())
    return joint


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
    session.prefill(np.tile(np.array(pair.prompt), (ROWS, 1)), zero, slot)
    session.seed(zero, slot)
    start, new_len, bonus = np.full(ROWS, n), zero.copy(), np.full(ROWS, pair.bonus)
    temperature = np.full(ROWS, TEMPERATURE, np.float32)
    given: list[list[int]] = [[] for _ in range(ROWS)]
    # Row r takes runs r, r+ROWS, …: were the first to finish taken, short runs would be preferred.
    done: list[list[list[int]]] = [[] for _ in range(ROWS)]
    each = -(-runs // ROWS)
    accepted = looked_at = 0
    while min(map(len, done)) < each:
        uniforms = (rng.integers(0, 2**23, (ROWS, DRAFTS)) / 2**23).astype(np.float32)
        block = session.draft(bonus, start, start, new_len, slot, temperature, uniforms)
        assert block.q is not None
        out = session.verify(np.concatenate((bonus[:, None], block.ids), axis=1), start, slot)
        tests, finals = rng.random((ROWS, DRAFTS)), rng.random(ROWS)
        for r in range(ROWS):
            a, token = accept(
                session,
                r,
                block.ids[r],
                block.q[r],
                lambda i, rows=out.logits[r]: probabilities(rows[i], params),
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


def p_value(joint: Array, tokens: Array, cells: int = 100) -> float:
    """χ² of the outcomes against the joint distribution, neighbours merged until each cell is expected `LEAST` times;
    at least `cells` are left."""
    vocab = joint.shape[0]
    expected = joint.reshape(-1) * len(tokens)
    cell = np.empty(expected.size, np.int64)
    index, mass, sums = 0, 0.0, []
    for i, value in enumerate(expected.tolist()):
        cell[i] = index
        mass += value
        if mass >= LEAST:
            sums.append(mass)
            index, mass = index + 1, 0.0
    sums[-1] += mass
    cell = np.minimum(cell, len(sums) - 1)
    outcome = (tokens[:, 0] * vocab + tokens[:, 1]) * vocab + tokens[:, 2]
    observed = np.bincount(cell[outcome], minlength=len(sums))
    assert len(sums) >= cells, "too few cells to tell anything"
    expected_counts = np.array(sums) * (observed.sum() / sum(sums))
    return float(chisquare(observed, expected_counts).pvalue)


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
    np.testing.assert_allclose(pair.joint.sum(), 1, rtol=1e-6)
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


def test_served_with_top_p(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    """The engine itself, one request at a time: the prefill's token, then those of whole rounds, all cut by top_p."""
    directory = TINY_PAIRS / PAIR
    target = load_target(directory / "target")
    prompt = tiny_prompts(PAIR)[2]["input_ids"]
    joint = exact(
        tmp_path,
        target,
        load_drafter(directory / "drafter", target),
        prompt,
        lambda logits: nucleus(softmax(logits / WARM)),
    )
    accepted = looked_at = 0
    tokens = np.empty((SERVED, TOKENS), np.int64)
    with runtime.Engine(tiny_bundle(PAIR), check="quick", threads=1) as engine:
        for i in range(SERVED):
            sampling = SamplingParams(WARM, TOP_P, seed=5)
            request = runtime.Request(tuple(prompt), max_new_tokens=TOKENS + 2, sampling=sampling, draw_stream=i)
            result = engine.result(engine.submit(request))
            tokens[i] = result.token_ids[:TOKENS]
            accepted += sum(result.stats.accepted)
            looked_at += sum(min(a + 1, n) for a, n in zip(result.stats.accepted, result.stats.proposed, strict=True))
    outcome = joint[tuple(tokens.T)]
    assert (outcome > 0).all(), "a token outside the nucleus"
    p = p_value(joint, tokens, cells=20)
    print(f"acceptance {accepted / looked_at:.3f}, p {p:.3g}")
    assert 0.2 < accepted / looked_at < 0.8
    assert p > 1e-3
