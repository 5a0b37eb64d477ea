"""What is timed of a short answer, and the verdict: with a clock of its own, since speeds are never asserted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.distribution import TokenLogprob
from runtime.engine import Engine
from runtime.errors import RequestError
from runtime.manifest import Limits, Manifest
from runtime.request import Request
from runtime.result import Piece, Result, StatsRecorder
from runtime.text import Tokenizer
from runtime.timing import QUESTION, Parting, Prompt, Timing, measure, scheduler
from tests.support import tiny_prompts

PROMPT = tuple(range(10))


class Answers:
    """An engine that answers with 0, 1, 2 …, in rounds of `drafted` tokens with drafts and of 1 without, each of which
    takes so many seconds. `parts` replaces the tokens of answers with drafts."""

    def __init__(self, manifest: Manifest, drafted: int, seconds: dict[bool, Sequence[float]]) -> None:
        self.bundle = SimpleNamespace(manifest=manifest)
        self.drafted = drafted
        self.seconds = {speculate: iter(values) for speculate, values in seconds.items()}
        self.now = 100.0
        self.asked: list[Request] = []
        self.parts: dict[int, int] = {}

    def submit(self, request: Request) -> Request:
        self.asked.append(request)
        return request

    def stream(self, request: Request) -> Iterator[Piece]:
        self.now += 1.0  # the prompt
        yield Piece("", (0,))
        round_seconds = next(self.seconds[request.speculate])
        step = self.drafted if request.speculate else 1
        for at in range(1, request.max_new_tokens, step):
            self.now += round_seconds
            yield Piece("", tuple(range(at, min(at + step, request.max_new_tokens))))

    def result(self, request: Request) -> Result:
        tokens = [self.parts.get(i, i) if request.speculate else i for i in range(request.max_new_tokens)]
        stats = StatsRecorder()
        step = self.drafted if request.speculate else 1
        for at in range(1, request.max_new_tokens, step):
            stats.round(step, step - 1, min(step, request.max_new_tokens - at))
        top = ((tokens[-1], -0.5), (1, -0.75)) if request.logprobs == 2 else ()
        logprobs = tuple(TokenLogprob(token, -0.5, top) for token in tokens)
        return Result("", tuple(tokens), "length", stats.freeze(), logprobs)

    def clock(self) -> float:
        return self.now


def run(engine: Answers) -> Timing:
    return measure(engine, Prompt(PROMPT, True), engine.clock)  # type: ignore[arg-type]


def seconds(drafting: float, plain: float) -> dict[bool, Sequence[float]]:
    """Of a round: the first answer of each kind, which warms up, takes a hundred times as long."""
    return {True: (drafting * 100, drafting * 2, drafting, drafting), False: (plain * 100, plain, plain, plain * 2)}


def test_medians_of_answers_in_turn(manifest: Manifest) -> None:
    """31 tokens after the first: 11 rounds of 3 with drafts, the last cut, 31 of 1 without."""
    engine = Answers(manifest, 3, seconds(0.025, 0.05))
    found = run(engine)
    assert found == Timing(True, 32, 3, 3, 31 / 11, pytest.approx(31 / 11 / 0.025), pytest.approx(20.0), None)
    assert found.speedup == pytest.approx(31 / 11 / 0.025 * 0.05)
    assert found.pays_from == pytest.approx(0.5)  # a round costs as much as half a plain token
    order = [request.speculate for request in engine.asked]
    assert order == [True, False, True, False, False, True, True, False]
    assert {replace(request, speculate=True) for request in engine.asked} == {engine.asked[0]}
    first = engine.asked[0]
    assert (first.prompt_ids, first.max_new_tokens, first.max_draft) == (PROMPT, 32, 3)
    assert (first.ignore_eos, first.adaptive, first.sampling.temperature) == (True, False, 0)


@pytest.mark.parametrize(
    ("drafting", "verdict", "text"),
    [
        (
            2.0,
            "pays",
            "2.8 tokens a round, 1.41x of plain decoding (140.9 against 100.0 tokens/s): "
            "drafting pays, as it does from 2.0 tokens a round on",
        ),
        (
            2.75,
            "even",
            "2.8 tokens a round, 1.02x of plain decoding (102.5 against 100.0 tokens/s): "
            "drafting makes no difference; it pays from 2.8 tokens a round on",
        ),
        (
            4.0,
            "costs",
            "2.8 tokens a round, 0.70x of plain decoding (70.5 against 100.0 tokens/s): drafting costs more than it "
            "saves here; serve with max_draft 0, unless prompts give 4.0 tokens a round or more",
        ),
    ],
)
def test_verdict(manifest: Manifest, drafting: float, verdict: str, text: str) -> None:
    found = run(Answers(manifest, 3, seconds(drafting / 100, 0.01)))
    assert found.verdict == verdict
    assert found.line() == text
    facts = found.facts()
    assert facts["verdict"] == verdict
    keys = "max_draft pairs parted pays_from plain_tokens_per_second prompt speculative_tokens_per_second speedup"
    assert " ".join(sorted(facts)) == f"{keys} tokens tokens_per_round verdict"


def test_slow_machines_time_one_pair(manifest: Manifest) -> None:
    """The second pair would begin after the 30 seconds that are given to all."""
    engine = Answers(manifest, 3, seconds(1.0, 1.0))
    assert run(engine).pairs == 1
    assert len(engine.asked) == 4


def test_answers_that_part(manifest: Manifest) -> None:
    engine = Answers(manifest, 3, seconds(0.001, 0.001))
    engine.parts = {17: 5, 20: 6}
    found = run(engine)
    assert found.parted == Parting(17, 0.25)
    assert str(found.parted) == "the answer with drafts parts from the plain one at token 17 (best logits 0.25 apart)"
    assert found.facts()["parted"] == {"token": 17, "gap": 0.25}
    last = engine.asked[-1]
    assert (last.max_new_tokens, last.logprobs, last.speculate) == (18, 2, False)


def test_a_bundle_that_drafts_nothing_is_timed_with_its_block(manifest: Manifest) -> None:
    engine = Answers(replace(manifest, serving=replace(manifest.serving, max_draft=0)), 3, seconds(1e-3, 1e-3))
    assert run(engine).max_draft == 4


def test_random_ids_are_said_to_be_some(manifest: Manifest) -> None:
    engine = Answers(manifest, 3, seconds(0.02, 0.01))
    found = measure(engine, Prompt(PROMPT, False), engine.clock)  # type: ignore[arg-type]
    assert found.line().startswith("2.8 tokens a round on random ids, 1.41x of plain decoding (")
    assert found.facts()["prompt"] == "random ids"
    assert replace(found, words=True).facts()["prompt"] == "question"


def test_room() -> None:
    limits = Limits((1,), 1, 16, 64, 4, 8)
    assert [Prompt((0,) * length, False).room(limits) for length in (8, 32, 33, 60)] == [32, 32, 31, 4]


def test_a_question_is_asked_where_there_are_words(talking_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(talking_bundle)
    limits = Limits((1,), 1, 64, 128, 7, 4)
    chat = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    assert Prompt.of(tokenizer, limits, [5]) == Prompt(tuple(chat), True)

    def no_template(messages: object) -> list[int]:
        raise RequestError("messages", "no chat template")

    monkeypatch.setattr(tokenizer, "encode_chat", no_template)
    bare = tokenizer.encode_text(QUESTION)
    assert len(bare) < len(chat)
    assert Prompt.of(tokenizer, limits, [5]) == Prompt(tuple(bare), True)
    assert Prompt.of(tokenizer, replace(limits, max_seq_len=len(bare) + 7), [5]) == Prompt((5,), False)
    assert Prompt.of(None, limits, [5]) == Prompt((5,), False)


def test_a_real_engine(tiny_bundle: Callable[..., Path]) -> None:
    path = tiny_bundle("llama")
    prompt = tiny_prompts("llama")[0]["input_ids"]
    with Engine(path, check="quick", threads=1) as probe:
        limits = probe.bundle.manifest.limits
    with Engine(path, check="quick", threads=1, scheduler=scheduler(limits)) as engine:
        found = measure(engine, Prompt(tuple(prompt), False))
    assert (found.tokens, found.pairs, found.max_draft, found.parted) == (32, 3, 5, None)
    assert 1 <= found.tokens_per_round <= 6
    assert found.speculative > 0 < found.plain


def test_answers_share_nothing(tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts, the tokens a round are those of a new engine, whatever was answered before."""
    prompt = tiny_prompts("llama")[0]["input_ids"]
    request = Request(prompt_ids=tuple(prompt), max_new_tokens=24, ignore_eos=True, adaptive=False)
    plain = replace(request, speculate=False)
    path = tiny_bundle("llama", batches=(1,))
    taken: list[Any] = []
    for make in (lambda limits: None, scheduler):
        with Engine(path, check="quick", threads=1) as probe:
            limits = probe.bundle.manifest.limits
        with Engine(path, check="quick", threads=1, scheduler=make(limits)) as engine:
            results = [engine.result(engine.submit(r)) for r in (request, plain, request)]
        taken.append([result.stats.reused_tokens for result in results])
        if make is scheduler:
            assert results[0].stats.accepted == results[2].stats.accepted
    assert taken[0][1] > 0  # as engines do otherwise
    assert taken[1] == [0, 0, 0]
