"""`runtime.generate`: its arguments reach the requests, results come in order, a small queue is no limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime import Engine, Request, RequestError, Result
from runtime.api import prompt_ids
from runtime.sampling import SamplingParams
from tests.support import tiny_prompts

PROMPTS = [p["input_ids"] for p in tiny_prompts("llama")]
GREEDY = [p["greedy_new_tokens"] for p in tiny_prompts("llama")]


@pytest.fixture(scope="module")
def engine(tiny_bundle: Callable[..., Path]) -> Iterator[Engine]:
    with Engine(tiny_bundle(), check="quick", threads=1, max_waiting=2) as engine:
        yield engine


def tokens(results: list[Result]) -> list[list[int]]:
    return [list(result.token_ids) for result in results]


def test_more_prompts_than_the_queue_holds(engine: Engine) -> None:
    results = runtime.generate(engine, PROMPTS * 3, max_new_tokens=12)
    assert tokens(results) == [GREEDY[i % 6][:12] for i in range(18)]
    assert engine.stats().refused == 0


def test_every_argument_reaches_its_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is given another value than its default: one that got lost, or took another's place, shows."""
    submitted: list[Request] = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: submitted.append(request) or submit(request))
    sampling: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 5,
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {3: 1.5},
        "coupling": "gumbel",
    }
    others: dict[str, Any] = {
        "max_new_tokens": 2,
        "stop_token_ids": (9,),
        "ignore_eos": True,
        "speculate": False,
        "max_draft": 2,
        "confidence_threshold": 0.4,
        "adaptive": False,
        "logprobs": 1,
    }
    runtime.generate(engine, [PROMPTS[0]], **sampling, **others)
    assert submitted == [Request(tuple(PROMPTS[0]), sampling=SamplingParams(**sampling), **others)]


def test_continuations_come_prompt_by_prompt(engine: Engine) -> None:
    def drawn(prompts: list[list[int]], n: int) -> list[list[int]]:
        return tokens(runtime.generate(engine, prompts, n=n, max_new_tokens=10, temperature=1.0, seed=4))

    found = drawn(PROMPTS[:2], n=3)
    # Each result draws from the stream of its place: that is all they depend on.
    first, second = PROMPTS[:2]
    assert found == drawn([first, first, first, second, second, second], n=1)
    assert len({tuple(ids) for ids in found[:3]}) == 3
    assert tokens(runtime.generate(engine, PROMPTS[:2], n=2, max_new_tokens=5)) == [
        GREEDY[0][:5], GREEDY[0][:5], GREEDY[1][:5], GREEDY[1][:5],
    ]  # fmt: skip


def test_gumbel_coupling_gives_the_tokens_of_plain_decoding(engine: Engine) -> None:
    def drawn(speculate: bool) -> list[Result]:
        return runtime.generate(
            engine,
            PROMPTS[:4],
            max_new_tokens=30,
            temperature=0.8,
            seed=2,
            coupling="gumbel",
            speculate=speculate,
            adaptive=False,
        )

    coupled = drawn(speculate=True)
    assert tokens(coupled) == tokens(drawn(speculate=False))
    assert sum(sum(result.stats.accepted) for result in coupled) > 0


def test_a_bias_forbids_a_token(engine: Engine) -> None:
    token = GREEDY[1][0]
    (result,) = runtime.generate(engine, [PROMPTS[1]], max_new_tokens=20, logit_bias={token: -math.inf})
    assert token in GREEDY[1][:20]
    assert token not in result.token_ids


def test_logprobs(engine: Engine) -> None:
    plain, told = (runtime.generate(engine, [PROMPTS[2]], max_new_tokens=6, logprobs=k)[0] for k in (None, 2))
    assert plain.logprobs is None
    assert told.token_ids == plain.token_ids
    assert told.logprobs is not None
    assert [entry.token_id for entry in told.logprobs] == list(told.token_ids)
    for entry in told.logprobs:
        best = entry.top[0]
        assert best == (entry.token_id, entry.logprob), "greedy: the token is the likeliest"
        assert len(entry.top) == 2
        assert entry.logprob <= 0


@pytest.mark.parametrize("n", [0, -1, 1.0, True, None])
def test_n_is_a_count(engine: Engine, n: Any) -> None:
    with pytest.raises(RequestError, match=r"^n: not a count; expected an integer ≥ 1; found"):
        runtime.generate(engine, [[1]], n=n)


def test_prompts_of_no_known_kind() -> None:
    for prompt in (5, None, {1, 2}, b"ab"):
        with pytest.raises(RequestError, match=r"^prompt: of no known kind; expected text, a list of messages"):
            prompt_ids(prompt, None)  # type: ignore[arg-type]
    assert prompt_ids(iter([3, 4]), None) == (3, 4)  # type: ignore[arg-type]
