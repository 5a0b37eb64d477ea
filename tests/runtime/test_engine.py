"""The engine on a tiny real bundle: limits, stops, slots, neighbours, seeds, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime import Engine, Handle, Request, RequestError, Result, ServingError
from runtime.result import StatsRecorder
from runtime.sampling import SamplingParams
from runtime.sessions.base import DraftOut, DraftRows, TargetOut
from runtime.slots import SlotState
from tests.support import target_rows, tiny_prompts

PROMPTS = [tuple(p["input_ids"]) for p in tiny_prompts("llama")]
GREEDY = [p["greedy_new_tokens"] for p in tiny_prompts("llama")]
TOKENS = 40


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Callable[..., Path]) -> Path:
    """Batches 1, 2 and 4, four slots, window 64, at most 128 tokens, prefill in chunks of 4, blocks of 5."""
    return tiny_bundle()


@pytest.fixture
def engine(bundle: Path) -> Iterator[Engine]:
    with Engine(bundle, check="quick", threads=1) as engine:
        yield engine


def request(prompt: int | tuple[int, ...] = 0, **changes: Any) -> Request:
    ids = PROMPTS[prompt] if isinstance(prompt, int) else prompt
    return Request(ids, **({"max_new_tokens": TOKENS, "adaptive": False} | changes))


def sampled(seed: int = 3, temperature: float = 1.0, top_p: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature, top_p, seed)


def run(engine: Engine, *requests: Request) -> list[Result]:
    """The requests side by side."""
    handles = [engine.submit(r) for r in requests]
    return [engine.result(handle) for handle in handles]


def single(bundle: Path, made: Request) -> Result:
    """The request alone, in an engine that has served nothing."""
    with Engine(bundle, check="quick", threads=1) as fresh:
        return run(fresh, made)[0]


# --- lengths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 30])
def test_exactly_as_many_tokens_as_asked(engine: Engine, tokens: int, speculate: bool) -> None:
    (result,) = run(engine, request(2, max_new_tokens=tokens, speculate=speculate))
    assert list(result.token_ids) == GREEDY[2][:tokens]
    assert result.finish_reason == "length"
    stats = result.stats
    # The first token is the prefill's; nothing is proposed that the limit would cut.
    assert sum(stats.accepted) + stats.rounds == max(0, tokens - 1)
    assert all(a <= n <= 5 for a, n in zip(stats.accepted, stats.proposed, strict=True))
    if tokens <= 2:
        assert sum(stats.proposed) == 0


def test_no_tokens_touch_no_slot(engine: Engine) -> None:
    handle = engine.submit(request(max_new_tokens=0))
    assert engine.idle
    assert engine.result(handle) == Result("", (), "length", StatsRecorder().freeze())


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("prompt_length", [125, 126, 127])
def test_the_longest_prompts(engine: Engine, prompt_length: int, speculate: bool) -> None:
    ids = (PROMPTS[5] * 6)[:prompt_length]
    (result,) = run(engine, request(ids, max_new_tokens=1000, speculate=speculate))
    assert len(result.token_ids) == 128 - prompt_length
    assert result.finish_reason == "length"


def test_a_prompt_longer_than_the_engine(engine: Engine) -> None:
    with pytest.raises(
        RequestError, match="prompt: longer than the engine serves; expected at most 127 tokens; found 128"
    ):
        engine.submit(request((PROMPTS[5] * 6)[:128]))


def test_generation_ends_at_max_seq_len(engine: Engine) -> None:
    speculative, plain = run(
        engine, request(3, max_new_tokens=10**6), request(3, max_new_tokens=10**6, speculate=False)
    )
    assert speculative.token_ids == plain.token_ids
    assert speculative.finish_reason == plain.finish_reason == "length"
    assert len(PROMPTS[3]) + len(speculative.token_ids) == 128


def test_a_block_at_the_limit_writes_into_no_neighbour(engine: Engine) -> None:
    """Four requests, all of which run into the limit together: none sees the others' rows."""
    results = run(engine, *(request(i, max_new_tokens=10**6) for i in range(4)))
    for i, result in enumerate(results):
        (alone,) = run(engine, request(i, max_new_tokens=10**6))
        assert result.token_ids == alone.token_ids
        assert len(PROMPTS[i]) + len(result.token_ids) == 128


# --- stops -----------------------------------------------------------------------------------------------------------


def stop_inside(accepted: list[int], tokens: tuple[int, ...]) -> tuple[int, int]:
    """(a token that appears first inside an accepted prefix, with accepted drafts behind it; its index)"""
    at = 1
    for a in accepted:
        for k in range(a - 1):
            if tokens[at + k] not in tokens[: at + k]:
                return tokens[at + k], at + k
        at += a + 1
    raise AssertionError("no such token in the golden run")


@pytest.mark.parametrize("prompt", [0, 2, 4])
def test_stop_token_inside_an_accepted_block(engine: Engine, prompt: int) -> None:
    (whole,) = run(engine, request(prompt))
    stop, at = stop_inside(whole.stats.accepted, whole.token_ids)
    (result,) = run(engine, request(prompt, stop_token_ids=(stop,)))
    assert result.token_ids == whole.token_ids[: at + 1]
    assert result.finish_reason == "stop"
    rounds = result.stats.rounds
    assert result.stats.accepted[:-1] == whole.stats.accepted[: rounds - 1]
    assert 1 + sum(result.stats.accepted) + rounds - 1 == len(result.token_ids)
    assert engine.stats().free_slots == 4


def test_stop_token_of_the_prefill(engine: Engine) -> None:
    (result,) = run(engine, request(stop_token_ids=(GREEDY[0][0],)))
    assert list(result.token_ids) == GREEDY[0][:1]
    assert (result.finish_reason, result.stats.rounds) == ("stop", 0)


def test_end_of_sequence_and_ignoring_it(engine: Engine) -> None:
    eos = GREEDY[1][6]
    first = GREEDY[1].index(eos)
    manifest = engine.bundle.manifest
    models = replace(manifest.models, eos_token_ids=(eos,))
    engine.bundle = replace(engine.bundle, manifest=replace(manifest, models=models))
    stopped, ignored, plain = run(engine, request(1), request(1, ignore_eos=True), request(1, speculate=False))
    assert list(stopped.token_ids) == GREEDY[1][: first + 1]
    assert plain.token_ids == stopped.token_ids
    assert stopped.finish_reason == plain.finish_reason == "stop"
    assert list(ignored.token_ids) == GREEDY[1][:TOKENS]
    assert ignored.finish_reason == "length"
    # Ids of the request's own still stop it.
    (own,) = run(engine, request(1, ignore_eos=True, stop_token_ids=(eos,)))
    assert own.token_ids == stopped.token_ids


# --- proposals -------------------------------------------------------------------------------------------------------


def test_proposal_settings(engine: Engine) -> None:
    whole, none, low, high, two = run(
        engine,
        request(4, confidence_threshold=0.0),
        request(4, max_draft=0),
        request(4, confidence_threshold=0.5),
        request(4, confidence_threshold=1.0),
        request(4, max_draft=2),
    )
    for result in (whole, none, low, high, two):
        assert list(result.token_ids) == GREEDY[4][:TOKENS]
    last = whole.stats.proposed.pop()
    assert last <= 5
    assert set(whole.stats.proposed[:-2]) == {5}
    # No sigmoid of a real model is 1, so a threshold of 1 keeps no draft.
    assert set(none.stats.proposed) == set(high.stats.proposed) == {0}
    assert low.stats.proposed[0] < 5
    assert max(two.stats.proposed) == 2
    assert whole.stats.rounds < two.stats.rounds < none.stats.rounds == TOKENS - 1


def test_drafting_goes_on_after_rounds_without(engine: Engine) -> None:
    """Rounds of no drafts leave rows out of the ring; what is drafted later must not take old rows for theirs."""
    results = run(engine, *(request(3, confidence_threshold=t, max_new_tokens=60) for t in (0.3, 0.6, 0.8)))
    (plain,) = run(engine, request(3, max_new_tokens=60, speculate=False))
    for result in results:
        assert result.token_ids == plain.token_ids
    assert any(0 in r.stats.proposed[:-2] and max(r.stats.proposed) > 0 for r in results)


# --- slots and neighbours --------------------------------------------------------------------------------------------


class Recording:
    """A session that keeps a copy of all that comes out of another, a line a real row."""

    def __init__(self, session: Any) -> None:
        self._inner = session
        self.rows: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _note(self, *arrays: np.ndarray | None) -> None:
        self.rows += [a[r].tobytes() for a in arrays if a is not None for r in range(len(a))]

    def prefill(self, *args: Any) -> TargetOut:
        out: TargetOut = self._inner.prefill(*args)
        self._note(out.argmax, out.logits)
        return out

    def verify(self, *args: Any) -> TargetOut:
        out: TargetOut = self._inner.verify(*args)
        self._note(out.argmax, out.logits)
        return out

    def draft(self, *args: Any, **inputs: Any) -> DraftOut:
        out: DraftOut = self._inner.draft(*args, **inputs)
        self._note(out.ids, out.confidence_logits, out.q)
        return out


def recorded(engine: Engine, made: Request) -> tuple[Result, list[bytes]]:
    session = engine._calls.session
    engine._calls.session = recording = Recording(session)  # type: ignore[assignment]
    try:
        return run(engine, made)[0], recording.rows
    finally:
        engine._calls.session = session


@pytest.mark.parametrize("sampling", [SamplingParams(), sampled(7)])
def test_a_reused_slot_shows_nothing_of_the_last_request(
    bundle: Path, engine: Engine, sampling: SamplingParams
) -> None:
    """Bit for bit: every logit, confidence and probability is that of a fresh engine."""
    made = request(1, sampling=sampling, max_new_tokens=30)
    with Engine(bundle, check="quick", threads=1) as fresh:
        expected, rows = recorded(fresh, made)
    run(engine, *(request(i, max_new_tokens=10**6) for i in (5, 4, 3, 2)))  # every slot, up to its last row
    found, again = recorded(engine, made)
    assert found.token_ids == expected.token_ids
    assert again == rows


def test_nan_in_unused_slots_and_scratch_changes_nothing(bundle: Path, engine: Engine) -> None:
    made = [
        request(i, max_new_tokens=20, sampling=s)
        for i, s in ((1, SamplingParams()), (2, sampled()), (4, SamplingParams()))
    ]
    expected = [r.token_ids for r in run(engine, *made)]
    with Engine(bundle, check="quick", threads=1) as poisoned:
        for state in poisoned._session._state.values():  # type: ignore[attr-defined]
            state[3:] = np.nan  # three requests take slots 0 to 2, the batch of 4 is padded with scratch
        assert [r.token_ids for r in run(poisoned, *made)] == expected


def test_two_requests_interleaved_equal_singles(bundle: Path, engine: Engine) -> None:
    one, two = engine.submit(request(0)), engine.submit(request(5))
    streams = [engine.stream(one), engine.stream(two)]
    got: list[list[int]] = [[], []]
    live = [0, 1]
    while live:
        for i in list(live):
            piece = next(streams[i], None)
            if piece is None:
                live.remove(i)
            else:
                got[i] += piece.token_ids
    assert got == [GREEDY[0][:TOKENS], GREEDY[5][:TOKENS]]
    assert engine.result(one).token_ids == tuple(got[0])


def test_five_requests_on_four_slots_equal_singles(bundle: Path, engine: Engine) -> None:
    made = [request(i, max_new_tokens=n) for i, n in enumerate((30, 40, 36, 33, 25))]
    handles = [engine.submit(r) for r in made]
    batches: set[int] = set()
    session = engine._session

    class Counting(Recording):
        def verify(self, *args: Any) -> TargetOut:
            batches.add(len(args[0].slot))
            out: TargetOut = session.verify(*args)
            return out

    engine._calls.session = Counting(session)  # type: ignore[assignment]
    results = [engine.result(handle) for handle in handles]
    assert batches == {1, 2, 3, 4}
    for i, (made_one, result) in enumerate(zip(made, results, strict=True)):
        assert list(result.token_ids) == GREEDY[i][: made_one.max_new_tokens], i
        assert result.stats.accepted == single(bundle, made_one).stats.accepted
    assert engine.stats().free_slots == 4


def test_seeds_repeat_and_don_t_depend_on_neighbours(bundle: Path, engine: Engine) -> None:
    made = [request(i % 3, sampling=sampled(seed=9), draw_stream=i, max_new_tokens=24) for i in range(5)]
    together = [r.token_ids for r in run(engine, *made)]
    assert [r.token_ids for r in run(engine, *made)] == together
    assert [r.token_ids for r in reversed(run(engine, *reversed(made)))] == together
    for r, tokens in zip(made, together, strict=True):
        assert single(bundle, r).token_ids == tokens
    assert together[0] != together[3], "streams of one seed draw the same numbers"
    (other,) = run(engine, replace(made[0], sampling=sampled(seed=10)))
    assert other.token_ids != together[0]


def test_without_a_seed_runs_differ(engine: Engine) -> None:
    made = request(2, sampling=SamplingParams(1.5), max_new_tokens=24)
    assert len({r.token_ids for r in run(engine, made, made, made)}) > 1


def test_greedy_rows_beside_rows_that_sample(engine: Engine) -> None:
    results = run(
        engine, request(0), request(1, sampling=sampled()), request(2), request(3, sampling=sampled(top_p=0.5))
    )
    assert list(results[0].token_ids) == GREEDY[0][:TOKENS]
    assert list(results[2].token_ids) == GREEDY[2][:TOKENS]


def test_plain_beside_speculative(engine: Engine) -> None:
    results = run(engine, *(request(i, speculate=i % 2 == 0) for i in range(4)))
    for i, result in enumerate(results):
        assert list(result.token_ids) == GREEDY[i][:TOKENS]
        assert (sum(result.stats.proposed) > 0) == (i % 2 == 0)


def test_cancel_frees_the_slot(engine: Engine) -> None:
    handles = [engine.submit(request(i)) for i in range(4)]
    waiting, gone = engine.submit(request(4)), engine.submit(request(5))
    for _ in range(12):
        engine.step()
    assert engine.stats().free_slots == 0
    engine.cancel(handles[1])
    engine.cancel(gone)  # which never ran
    engine.cancel(gone)
    assert engine.stats().free_slots == 1
    engine.step()
    assert engine.stats().free_slots == 0
    assert list(engine.result(waiting).token_ids) == GREEDY[4][:TOKENS]
    cancelled = engine.result(handles[1])
    assert cancelled.finish_reason == "cancelled"
    assert 0 < len(cancelled.token_ids) < TOKENS
    assert list(cancelled.token_ids) == GREEDY[1][: len(cancelled.token_ids)]
    assert engine.result(gone) == Result("", (), "cancelled", StatsRecorder().freeze())
    for i in (0, 2, 3):
        assert list(engine.result(handles[i]).token_ids) == GREEDY[i][:TOKENS]
    assert engine.idle
    with pytest.raises(RequestError, match="handle: no such request"):
        engine.cancel(handles[1])


def test_a_window_smaller_than_the_context(tiny_bundle: Callable[..., Path]) -> None:
    """The smallest ring there is, block + 2 rows, wraps more than ten times; the output stays the target's."""
    small = tiny_bundle(window=7)
    with Engine(small, check="quick", threads=1) as engine:
        results = run(engine, *(request(i, max_new_tokens=10**6) for i in range(5)))
        plain = run(engine, *(request(i, max_new_tokens=10**6, speculate=False) for i in range(5)))
    for i in range(5):
        assert results[i].token_ids == plain[i].token_ids
        assert list(results[i].token_ids[:48]) == GREEDY[i]
    assert sum(sum(r.stats.accepted) for r in results) > 100


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": "text"}, "prompts: not a list"),
        ({"prompts": 5}, "prompts: not a list"),
        ({"prompts": [[]]}, r"prompts\[0\]: prompt: empty; expected at least one token"),
        ({"prompts": [[1], [131]]}, r"prompts\[1\]: prompt: an id outside the vocabulary; expected 0 … 130; found 131"),
        ({"prompts": [[1], [-1]]}, r"prompts\[1\]: prompt: an id outside the vocabulary"),
        ({"prompts": [[1.5]]}, r"prompts\[0\]: prompt\[0\]: not an integer"),
        ({"prompts": [[1] * 128]}, r"prompts\[0\]: prompt: longer than the engine serves; expected at most 127"),
        ({"prompts": ["text"]}, r"prompts\[0\]: prompt: the bundle has no tokenizer"),
        ({"prompts": [[{"role": "user", "content": "hi"}]]}, r"prompts\[0\]: prompt: the bundle has no tokenizer"),
        ({"max_new_tokens": -1}, "max_new_tokens: out of range; expected ≥ 0; found -1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: not an integer"),
        ({"temperature": -0.5}, "temperature: out of range"),
        ({"temperature": float("nan")}, "temperature: not a finite number"),
        ({"top_p": 0}, "top_p: out of range"),
        ({"top_p": 1.5}, "top_p: out of range"),
        ({"seed": -1}, "seed: out of range"),
        ({"max_draft": 6}, "max_draft: more than a block holds; expected 0 … 5; found 6"),
        ({"max_draft": -1}, "max_draft: out of range"),
        ({"confidence_threshold": 1.5}, "confidence_threshold: not a probability"),
        ({"stop": ["x"]}, "stop: the bundle has no tokenizer"),
        ({"stop": [""]}, "stop: not a stop string"),
        ({"stop_token_ids": [131]}, "stop_token_ids: an id outside the vocabulary"),
    ],
)
def test_bad_requests(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    """One line each, and nothing has run: not even the prompts before the bad one."""
    before = {name: state.copy() for name, state in engine._session._state.items()}  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match=f"^{message}") as caught:
        runtime.generate(engine, **({"prompts": [[1, 2]]} | arguments))
    assert "\n" not in str(caught.value)
    for name, state in engine._session._state.items():  # type: ignore[attr-defined]
        np.testing.assert_array_equal(state, before[name])
    assert engine.idle
    assert not engine._sequences


@pytest.mark.parametrize("start", [0, -1])
def test_a_draft_without_committed_tokens_is_refused_before_any_write(engine: Engine, start: int) -> None:
    session: Any = engine._session
    run(engine, request(0))
    before = {name: state.copy() for name, state in session._state.items()}
    rows = np.zeros(2, np.int64)
    with pytest.raises(ValueError, match=f"start_pos: .*expected > 0; found {start}"):
        session.draft(
            DraftRows(
                rows,
                np.array([9, start]),
                rows,
                rows + 3,
                np.array([0, 1]),
                np.zeros(2, np.float32),
                np.zeros((2, 5), np.float32),
            )
        )
    for name, state in session._state.items():
        np.testing.assert_array_equal(state, before[name])
    with pytest.raises(RequestError, match="start_pos > 0"):
        SlotState(64, 6).draft_window()


def test_more_rows_than_any_engine_holds(engine: Engine) -> None:
    with pytest.raises(RequestError, match="batch: no engine holds so many rows"):
        engine._session.prefill(target_rows(np.zeros((5, 1), np.int64), np.zeros(5, np.int64), np.arange(5)))


@pytest.mark.parametrize("threads", [0, -1, 100_000, "a", True, 1.5])
def test_threads_out_of_bounds(bundle: Path, threads: Any) -> None:
    with pytest.raises(RequestError, match=r"^threads: not a number of threads for this machine; expected 1 … "):
        Engine(bundle, threads=threads)


@pytest.mark.parametrize("call", ["result", "cancel"])
@pytest.mark.parametrize("handle", [5, None, Handle(10**6)])
def test_what_is_no_handle(engine: Engine, call: str, handle: Any) -> None:
    with pytest.raises(RequestError, match=r"^handle: no such request, or its result was taken; expected what submit"):
        getattr(engine, call)(handle)
    engine.forget(handle)


def test_only_requests_are_submitted(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"^request: wrong type; expected a Request; found list"):
        engine.submit([1, 2])  # type: ignore[arg-type]


def test_a_closed_engine_serves_nothing(bundle: Path) -> None:
    engine = Engine(bundle, check="quick")
    handle = engine.submit(Request(prompt_ids=(1, 2)))
    engine.close()
    for call in (lambda: engine.submit(Request(prompt_ids=(1,))), engine.step, lambda: engine.result(handle)):
        with pytest.raises(RequestError, match=r"^engine: is closed"):
            call()


def test_an_interrupted_generate_leaves_nothing_running(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._session, "verify", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runtime.generate(engine, [[1, 2], [3, 4], [5]])
    assert engine.idle
    assert not engine._sequences
    assert len(runtime.generate(engine, [[1, 2]], max_new_tokens=3)[0].token_ids) == 3


def test_logits_that_are_no_numbers_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = engine._session
    verify = session.verify

    def broken(*arguments: Any) -> Any:
        out = verify(*arguments)
        out.logits[:] = np.nan
        return out

    monkeypatch.setattr(session, "verify", broken)
    problem = r"^request \d+: failed while it was served; found logits: the largest one is not a number; .* found nan"
    with pytest.raises(ServingError, match=problem):
        runtime.generate(engine, [[1, 2]])
