"""The golden runs of the tiny pairs through the engine as it serves: side by side, in chunks of any size, past the
ring's window, and on prefixes that slots still hold. Tokens are those of the singletons; so are rounds, where the ring
shows what it shows one request alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import Engine, Request, Result, SamplingParams
from runtime.sessions.base import TargetRows
from tests.golden.test_e2e import check_rounds
from tests.support import GOLDEN, TINY

PAIRS = sorted(p.name for p in (GOLDEN / "e2e").iterdir())
CHUNKS = (1, 2, 3, 5, 8)

Bundle = Callable[..., Path]


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Path:
    return GOLDEN / "e2e" / request.param


@pytest.fixture
def engine(pair: Path, tiny_bundle: Bundle) -> Iterator[Engine]:
    """Four slots, prefill in chunks of 4."""
    with Engine(tiny_bundle(pair), check="quick", threads=1) as engine:
        yield engine


def read(pair: Path) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((pair / "prompts.json").read_text())
    return golden


def greedy(prompt: dict[str, Any], length: int, **settings: Any) -> Request:
    return Request(tuple(prompt["input_ids"]), max_new_tokens=length, adaptive=False, **settings)


def recorded(golden: dict[str, Any], prompt: dict[str, Any], run: dict[str, Any], length: int) -> Request:
    """A golden run as a request."""
    return greedy(
        prompt,
        length,
        stop_token_ids=tuple(run["stop_token_ids"] or ()),
        max_draft=golden["block_size"],
        confidence_threshold=run["confidence_threshold"],
    )


def serve(engine: Engine, *requests: Request) -> list[Result]:
    """All at once."""
    handles = [engine.submit(request) for request in requests]
    return [engine.result(handle) for handle in handles]


def check_tokens(golden: dict[str, Any], results: list[Result]) -> None:
    for prompt, result in zip(golden["prompts"], results, strict=True):
        assert list(result.token_ids) == prompt["greedy_new_tokens"][: len(result.token_ids)]
        assert len(result.token_ids) == golden["max_new_tokens"]


def test_batch(pair: Path, engine: Engine) -> None:
    """Every golden run at once, each to a limit of its own, with as many plain ones among them as there are prompts."""
    golden = read(pair)
    limits = np.random.default_rng(3).integers(8, golden["max_new_tokens"] + 1, 100).tolist()
    runs = [(prompt, run, limits.pop()) for run in range(3) for prompt in golden["prompts"]]
    requests = [recorded(golden, prompt, prompt["runs"][run], limit) for prompt, run, limit in runs]
    results = serve(engine, *requests)
    assert len({request.max_new_tokens for request in requests}) > 10
    for (prompt, run, limit), result in zip(runs, results, strict=True):
        expected = prompt["runs"][run]
        tokens = expected["output_ids"][len(prompt["input_ids"]) :][:limit]
        assert list(result.token_ids) == tokens
        check_rounds(result.stats, expected, limit)
    stats = engine.stats()
    # Rows did run side by side, a prompt of the second kind and later on what the first had left.
    assert stats.rounds > 2 * stats.steps
    assert stats.reused_tokens > 0


def test_plain_neighbours(pair: Path, engine: Engine) -> None:
    """Requests that draft and requests that don't, sampled ones too, share steps and prefixes."""
    golden = read(pair)
    length = golden["max_new_tokens"]
    plain = [greedy(prompt, length, speculate=False) for prompt in golden["prompts"]]
    drafting = [greedy(prompt, length) for prompt in reversed(golden["prompts"])]
    others = [greedy(prompt, length, sampling=SamplingParams(1.0)) for prompt in golden["prompts"]]
    mixed = [request for row in zip(plain, drafting, others, strict=True) for request in row]
    results = serve(engine, *mixed)
    check_tokens(golden, results[0::3])
    check_tokens(golden, results[1::3][::-1])


@pytest.mark.parametrize("budget", CHUNKS)
def test_prefill_budget(pair: Path, tiny_bundle: Bundle, budget: int) -> None:
    """Chunks as large as the step's budget leaves, while others decode."""
    bundle = tiny_bundle(pair)
    assert check_chunks(pair, bundle, budget) == min(budget, TINY.prefill_chunk)


@pytest.mark.parametrize(("name", "chunk"), list(zip(itertools.cycle(PAIRS), CHUNKS, strict=False)))
def test_prefill_chunk(name: str, tiny_bundle: Bundle, chunk: int) -> None:
    """Bundles of other chunks, and so of other numbers of tap rows."""
    pair = GOLDEN / "e2e" / name
    assert check_chunks(pair, tiny_bundle(pair, prefill_chunk=chunk), None) == chunk


def check_chunks(pair: Path, bundle: Path, budget: int | None) -> int:
    """All prompts at once give the golden tokens in the recorded rounds; the longest chunk that was run."""
    golden, longest = read(pair), 0
    length = golden["max_new_tokens"]
    with Engine(bundle, check="quick", threads=1, prefill_budget=budget) as engine:
        session: Any = engine._session
        prefill = session.prefill

        def noted(rows: TargetRows) -> Any:
            nonlocal longest
            longest = max(longest, int(rows.count.max()))
            return prefill(rows)

        session.prefill = noted
        requests = [recorded(golden, prompt, prompt["runs"][0], length) for prompt in golden["prompts"]]
        results = serve(engine, *requests)
    check_tokens(golden, results)
    for prompt, result in zip(golden["prompts"], results, strict=True):
        check_rounds(result.stats, prompt["runs"][0], length)
    return longest


def test_wrap_around(pair: Path, tiny_bundle: Bundle) -> None:
    """A ring of 8 rows under sequences of up to 72: every request wraps it many times, and so do prefixes copied from
    slots whose ring has gone on. Drafts see less, the tokens are the same."""
    golden = read(pair)
    length = golden["max_new_tokens"]
    with Engine(tiny_bundle(pair, window=8), check="quick", threads=1) as engine:
        for _ in range(2):
            results = serve(engine, *(greedy(prompt, length) for prompt in golden["prompts"]))
            check_tokens(golden, results)
            accepted = sum(sum(result.stats.accepted) for result in results)
            assert accepted > 0.2 * length * len(results)
        assert engine.stats().reused_tokens > 0


def test_after_its_own_prefix(pair: Path, engine: Engine) -> None:
    """A conversation that goes on: the prompt is an earlier one with the answer it got, and only what is new is run."""
    golden = read(pair)
    length = golden["max_new_tokens"]
    for prompt in golden["prompts"]:
        ids, tokens = prompt["input_ids"], prompt["greedy_new_tokens"]
        whole = tuple(ids + tokens)
        for share in (1, length // 3, length // 2):
            before = Request(whole[: len(ids) + share], max_new_tokens=4, adaptive=False)
            after = Request(whole[: len(ids) + share + 3], max_new_tokens=length - share - 3, adaptive=False)
            (first,) = serve(engine, before)
            (second,) = serve(engine, after)
            assert list(first.token_ids) == tokens[share : share + 4]
            assert list(second.token_ids) == tokens[share + 3 :]
            assert second.stats.reused_tokens >= len(before.prompt_ids)
            with Engine(engine.bundle.path, check="quick", threads=1) as fresh:
                (alone,) = serve(fresh, after)
            # What the ring shows is the same too, so the same drafts are accepted.
            assert second.stats.accepted == alone.stats.accepted


def test_beside_its_own_prefix(pair: Path, engine: Engine) -> None:
    """The slot that holds the prefix goes on with its own request meanwhile."""
    golden = read(pair)
    length = golden["max_new_tokens"]
    for prompt in golden["prompts"]:
        owner = engine.submit(greedy(prompt, length))
        for _ in range(12):
            engine.step()
        ids = prompt["input_ids"]
        shares = [prompt["greedy_new_tokens"][:n] for n in (0, 2, 5)]
        prompts = [tuple(ids + share) for share in shares]
        results = serve(engine, *(Request(p, max_new_tokens=length - len(p) + len(ids)) for p in prompts))
        for share, result in zip(shares, results, strict=True):
            assert list(result.token_ids) == prompt["greedy_new_tokens"][len(share) :]
            assert result.stats.reused_tokens > 0
        assert list(engine.result(owner).token_ids) == prompt["greedy_new_tokens"]
