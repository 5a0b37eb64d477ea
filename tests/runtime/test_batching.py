"""Many requests in one engine: mixed steps, prefixes, policies, coupled draws, penalties, faults, queue, deadlines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import Engine, QueueFull, Request, RequestError, Result, SamplingParams, ServingError, StaticPolicy
from runtime.policy import Load, Row
from tests.support import tiny_prompts

PROMPTS = [tuple(p["input_ids"]) for p in tiny_prompts("llama")]
GREEDY = [p["greedy_new_tokens"] for p in tiny_prompts("llama")]
LONG = tuple(np.random.default_rng(5).integers(0, 131, 90).tolist())


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Callable[..., Path]) -> Path:
    """Batches 1, 2 and 4, four slots, window 64, at most 128 tokens, prefill in chunks of 4, blocks of 5."""
    return tiny_bundle()


@pytest.fixture
def engine(bundle: Path) -> Iterator[Engine]:
    with Engine(bundle, check="quick", threads=1) as engine:
        yield engine


def serve(engine: Engine, *requests: Request) -> list[Result]:
    handles = [engine.submit(request) for request in requests]
    return [engine.result(handle) for handle in handles]


def alone(bundle: Path, request: Request) -> Result:
    with Engine(bundle, check="quick", threads=1) as fresh:
        return serve(fresh, request)[0]


class Log:
    """A session that notes the calls made to another; `fail` names one that raises."""

    def __init__(self, engine: Engine) -> None:
        self._inner = engine._calls.session
        self.calls: list[tuple[str, Any]] = []
        self.fail: dict[str, Exception] = {}
        engine._calls.session = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        def call(work: Any) -> Any:
            self.calls.append((name, work))
            if name in self.fail:
                raise self.fail.pop(name)
            return getattr(self._inner, name)(work)

        return call

    def of(self, name: str) -> list[Any]:
        return [work for called, work in self.calls if called == name]


# --- steps -----------------------------------------------------------------------------------------------------------


def test_a_fresh_engines_first_steps_mix_prefill_and_decode_and_touch_no_other_slot(engine: Engine) -> None:
    state: dict[str, np.ndarray] = engine._session._state  # type: ignore[attr-defined]
    for array in state.values():
        array[2:4] = 7.0  # two slots that nobody has
    handles = [engine.submit(Request(PROMPTS[i], 12)) for i in (0, 1)]
    log = Log(engine)
    results = [engine.result(handle) for handle in handles]
    names = [name for name, _ in log.calls]
    assert "prefill" in names[names.index("verify") :], "no step mixed the two"
    assert [list(r.token_ids) for r in results] == [GREEDY[0][:12], GREEDY[1][:12]]
    for name, array in state.items():
        assert (array[2:4] == 7.0).all(), name


def test_a_long_prompt_does_not_stall_who_decodes(engine: Engine) -> None:
    first = engine.submit(Request(PROMPTS[0], 40, ignore_eos=True))
    while engine.take(first) is None:
        engine.step()
    engine.submit(Request(LONG, 4))
    log = Log(engine)
    while not engine.finished(first):
        engine.step()
    assert all(int(rows.count.sum()) <= 4 for rows in log.of("prefill"))
    # Each step of prefill had a round of the other beside it.
    names = [name for name, _ in log.calls if name in ("prefill", "verify")]
    assert ("prefill", "prefill") not in set(itertools.pairwise(names))


@pytest.mark.parametrize("budget", [1, 3, 64])
def test_the_budget_is_shared_by_prompts(bundle: Path, budget: int) -> None:
    with Engine(bundle, check="quick", threads=1, prefill_budget=budget) as engine:
        log = Log(engine)
        results = serve(engine, *(Request(PROMPTS[i], 10) for i in range(4)))
        counts = [rows.count.tolist() for rows in log.of("prefill")]
    assert max(map(sum, counts)) <= budget
    assert max(map(max, counts)) <= 4
    assert (max(map(len, counts)) > 1) == (budget > 4)
    assert [list(r.token_ids) for r in results] == [GREEDY[i][:10] for i in range(4)]


def test_mixed_lengths_equal_singles(bundle: Path, engine: Engine) -> None:
    made = [
        Request(PROMPTS[i % 6], 7 + 9 * i, SamplingParams(0.8 * (i % 2), seed=i), max_draft=i % 6, adaptive=False)
        for i in range(9)
    ]
    for request, result in zip(made, serve(engine, *made), strict=True):
        single = alone(bundle, request)
        assert result.token_ids == single.token_ids
        assert result.stats.accepted == single.stats.accepted


# --- prefixes --------------------------------------------------------------------------------------------------------


def test_a_live_prefix_is_copied(bundle: Path, engine: Engine) -> None:
    first = engine.submit(Request(LONG[:50], 30, ignore_eos=True))
    while engine.take(first) is None:
        engine.step()
    log = Log(engine)
    longer = Request((*LONG[:40], 5, 6, 7), 30, adaptive=False, ignore_eos=True)
    result = serve(engine, longer)[0]
    (copy,) = log.of("copy")
    assert (copy.source, copy.dest, copy.cache_rows) == (0, 1, 40)
    assert result.stats.reused_tokens == 40
    expected = alone(bundle, longer)
    assert result.token_ids == expected.token_ids
    # It drafts from the copied ring as from one of its own.
    assert (copy.ring_start + copy.ring_rows + copy.tap_rows, copy.ring_start) == (40, 0)
    assert result.stats.accepted == expected.stats.accepted
    assert engine.result(first).token_ids == alone(bundle, Request(LONG[:50], 30, ignore_eos=True)).token_ids
    assert engine.stats().reused_tokens == 40


def test_of_a_wrapped_ring_only_what_is_left_is_copied(bundle: Path, engine: Engine) -> None:
    """W = 64: of a source at position 90 and more, rows before 26 are overwritten, and no draft may see them."""
    first = engine.submit(Request(LONG, 30, ignore_eos=True))
    while len(engine._sequences[first.id].tokens) < 10:
        engine.step()
    log = Log(engine)
    made = Request((*LONG[:60], 5), 30, ignore_eos=True, adaptive=False)
    assert serve(engine, made)[0].token_ids == alone(bundle, made).token_ids
    (copy,) = log.of("copy")
    assert copy.ring_start + copy.ring_rows == 60
    assert 26 < copy.ring_start < 60
    windows = [rows for rows in log.of("draft") if 1 in rows.slot]
    for rows in windows:
        row = rows.slot.tolist().index(1)
        assert rows.valid_len[row] == rows.start[row] - copy.ring_start


def test_a_conversation_goes_on_in_its_slot(bundle: Path, engine: Engine) -> None:
    first = serve(engine, Request(PROMPTS[2], 20, ignore_eos=True))[0]
    log = Log(engine)
    turn = Request((*PROMPTS[2], *first.token_ids, 9, 8), 20, adaptive=False, ignore_eos=True)
    second = serve(engine, turn)[0]
    # The last token was never run, the ones behind it are new; nothing is copied.
    assert second.stats.reused_tokens == len(PROMPTS[2]) + 19
    assert sum(int(rows.count.sum()) for rows in log.of("prefill")) == 3
    assert not log.of("copy")
    assert second.token_ids == alone(bundle, turn).token_ids


def test_the_same_prompt_again_runs_its_last_id_only(bundle: Path, engine: Engine) -> None:
    made = Request(LONG, 12, adaptive=False, ignore_eos=True)
    first = serve(engine, made)[0]
    again = serve(engine, made, made, made)
    for result in again:
        assert result.token_ids == first.token_ids
        assert result.stats.reused_tokens == len(LONG) - 1


def test_who_shares_what_is_being_prefilled_waits_for_it(engine: Engine) -> None:
    results = serve(engine, *(Request((*LONG[:80], i), 6, ignore_eos=True) for i in range(4)))
    assert [r.stats.reused_tokens for r in results] == [0, 80, 80, 80]


def test_a_seed_does_not_depend_on_whose_prefix_is_there(bundle: Path, engine: Engine) -> None:
    """Rejection sampling's tokens depend on the drafts, and those on the ring: a prefix without one is not taken over,
    as it is by a request whose tokens don't."""
    prompt = LONG[:40]
    serve(engine, Request(prompt, 4, speculate=False, ignore_eos=True))
    seeded = [Request(prompt, 24, SamplingParams(1.0, seed=seed), ignore_eos=True) for seed in range(3)]
    for made in seeded[:1]:
        result = serve(engine, made)[0]
        assert result.stats.reused_tokens == 0
        assert (result.token_ids, result.stats.accepted) == ((one := alone(bundle, made)).token_ids, one.stats.accepted)
    # Now there is one with its ring.
    for made in seeded[1:]:
        result = serve(engine, made)[0]
        assert result.stats.reused_tokens == 39
        assert result.token_ids == alone(bundle, made).token_ids
    other = engine.submit(Request((*LONG[50:], 1), 4, speculate=False))
    engine.result(other)
    assert serve(engine, Request((*LONG[50:], 1), 4))[0].stats.reused_tokens == 40


def test_a_failed_copy_fails_its_request_and_no_other(bundle: Path, engine: Engine) -> None:
    first = engine.submit(Request(LONG, 30, ignore_eos=True))
    while engine.take(first) is None:
        engine.step()
    log = Log(engine)
    log.fail["copy"] = MemoryError("no memory")
    made = Request((*LONG[:60], 5), 10, ignore_eos=True)
    hit, other = engine.submit(made), engine.submit(made)
    with pytest.raises(ServingError, match="no memory"):
        engine.result(hit)
    assert engine.result(other).token_ids == alone(bundle, made).token_ids
    assert len(engine.result(first).token_ids) == 30


# --- policies --------------------------------------------------------------------------------------------------------


class Scripted(StaticPolicy):
    """Caps by round, over and over: drafting goes off and on."""

    def __init__(self, *caps: int) -> None:
        self.script = caps
        self.rounds = 0
        self.loads: list[Load] = []

    def caps(self, rows: Sequence[Row], load: Load) -> Sequence[int]:
        self.rounds += 1
        self.loads.append(load)
        return [self.script[self.rounds % len(self.script)]] * len(rows)


def test_drafting_off_and_on_leaves_no_gap_in_the_ring(bundle: Path) -> None:
    """Rounds without drafts let tap rows pile up, past what their room holds; the next draft sees all of them."""
    policy = Scripted(*[0] * 9, 5)
    with Engine(bundle, check="quick", threads=1, policy=policy) as engine:
        log = Log(engine)
        (result,) = serve(engine, Request(PROMPTS[0], 48, ignore_eos=True))
    assert list(result.token_ids) == GREEDY[0][:48]
    drafts = log.of("draft")
    assert len(drafts) >= 3
    for rows in drafts:
        assert rows.valid_len[0] == min(64, rows.start[0])
    assert max(rows.new_len[0] for rows in drafts) <= 6
    # Tap rows wait in chunks of six, the block and the bonus, and are seeded when there is no room for more.
    assert all(rows.count[0] <= 6 for rows in log.of("seed"))


def test_what_the_policy_has_no_say_in(bundle: Path) -> None:
    policy = Scripted(0)
    with Engine(bundle, check="quick", threads=1, policy=policy) as engine:
        seeded, fixed, free, coupled = serve(
            engine,
            Request(PROMPTS[0], 20, SamplingParams(0.7, seed=3)),
            Request(PROMPTS[1], 20, adaptive=False),
            Request(PROMPTS[2], 20, SamplingParams(0.7)),
            Request(PROMPTS[3], 20, SamplingParams(0.7, seed=3, coupling="gumbel")),
        )
    assert max(seeded.stats.proposed) == max(fixed.stats.proposed) == 5
    assert max(free.stats.proposed) == max(coupled.stats.proposed) == 0
    assert max(load.rows for load in policy.loads) == 2
    assert max(load.drafting for load in policy.loads) == 2
    assert seeded.token_ids == alone(bundle, Request(PROMPTS[0], 20, SamplingParams(0.7, seed=3))).token_ids


class Peeking(StaticPolicy):
    def lengths(self, rows: Sequence[Row], load: Load) -> Sequence[int]:
        return [1 if min(row.confidence(k) for k in range(row.drafted)) > 0.99 else 0 for row in rows]


def test_a_policy_may_not_look_ahead_for_sampled_rows(bundle: Path) -> None:
    with Engine(bundle, check="quick", threads=1, policy=Peeking()) as engine:
        sampled = engine.submit(Request(PROMPTS[0], 20, SamplingParams(0.7)))
        greedy = engine.submit(Request(PROMPTS[1], 20))
        with pytest.raises(ServingError, match="policy: a sampled row's length may depend only on"):
            engine.result(sampled)
        assert list(engine.result(greedy).token_ids) == GREEDY[1][:20]


# --- draws -----------------------------------------------------------------------------------------------------------

EXTRAS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"logit_bias": {7: 3.0, 20: float("-inf")}},
]


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda e: "-".join(e) or "plain")
def test_coupled_draws_equal_plain_decoding(engine: Engine, extra: dict[str, Any]) -> None:
    """Gumbel coupling: token for token what plain decoding draws with the same seed; and drafts are accepted."""
    accepted = 0
    for i in range(4):
        params = SamplingParams(0.6, seed=11 + i, coupling="gumbel", **extra)
        plain, drafted = serve(
            engine,
            Request(PROMPTS[i], 40, params, speculate=False, ignore_eos=True),
            Request(PROMPTS[i], 40, params, adaptive=False, ignore_eos=True),
        )
        assert drafted.token_ids == plain.token_ids
        accepted += sum(drafted.stats.accepted)
    assert accepted > 20


@pytest.mark.parametrize("extra", EXTRAS[4:], ids=lambda e: "-".join(e))
def test_greedy_with_penalties_equals_plain_decoding(engine: Engine, extra: dict[str, Any]) -> None:
    changed = 0
    for i in range(4):
        params = SamplingParams(**extra)
        plain, drafted = serve(
            engine,
            Request(PROMPTS[i], 40, params, speculate=False, ignore_eos=True),
            Request(PROMPTS[i], 40, params, adaptive=False, ignore_eos=True),
        )
        assert drafted.token_ids == plain.token_ids
        changed += list(plain.token_ids) != GREEDY[i][:40]
        if "logit_bias" in extra:
            assert 20 not in plain.token_ids
    assert changed


def test_logprobs(engine: Engine) -> None:
    plain, drafted, none = serve(
        engine,
        Request(PROMPTS[0], 20, logprobs=3, speculate=False),
        Request(PROMPTS[0], 20, logprobs=3, adaptive=False),
        Request(PROMPTS[0], 20),
    )
    assert none.logprobs is None
    assert plain.logprobs is not None
    assert drafted.logprobs is not None
    assert [entry.token_id for entry in drafted.logprobs] == list(drafted.token_ids)
    for one, other in zip(plain.logprobs, drafted.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top[0] == (one.token_id, one.logprob)  # greedy: the likeliest
        assert [value for _, value in one.top] == sorted((value for _, value in one.top), reverse=True)
        assert len(one.top) == 3
    pieces = []
    handle = engine.submit(Request(PROMPTS[0], 20, logprobs=3, adaptive=False))
    for piece in engine.stream(handle):
        assert len(piece.logprobs) == len(piece.token_ids)
        pieces += piece.logprobs
    assert [entry.token_id for entry in pieces] == list(drafted.token_ids)


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["prefill", "seed", "draft", "verify"])
def test_a_session_that_raises_fails_the_rows_of_that_call(bundle: Path, engine: Engine, stage: str) -> None:
    """Whatever call it is: its requests get the error, their slots come back empty, others and later ones go on."""
    log = Log(engine)
    first = engine.submit(Request(PROMPTS[0], 30, ignore_eos=True, adaptive=False))
    while engine.take(first) is None:
        engine.step()
    log.fail[stage] = RuntimeError("the library\nbroke")
    second = engine.submit(Request(PROMPTS[5], 30, ignore_eos=True, adaptive=False))
    hit = "second" if stage in ("prefill", "seed") else "first"
    for name, handle, index in (("first", first, 0), ("second", second, 5)):
        if name == hit:
            with pytest.raises(ServingError, match=r"failed while it was served; found the library broke$") as caught:
                engine.result(handle)
            assert isinstance(caught.value.__cause__, RuntimeError)
        else:
            assert list(engine.result(handle).token_ids) == GREEDY[index][:30]
    stats = engine.stats()
    assert stats.free_slots == 4
    assert stats.finished["error"] == 1
    again = serve(engine, Request(PROMPTS[0], 30, ignore_eos=True), Request(PROMPTS[5], 30, ignore_eos=True))
    assert [list(r.token_ids) for r in again] == [GREEDY[0][:30], GREEDY[5][:30]]
    # What the failed slot held is not given to anybody.
    assert again[0 if hit == "first" else 1].stats.reused_tokens == 0


def test_a_row_with_bad_logits_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = engine._session
    verify = session.verify

    def broken(rows: Any) -> Any:
        out = verify(rows)
        if rows.slot[0] == 0:
            out.logits[: rows.count[0]] = np.nan
        return out

    monkeypatch.setattr(session, "verify", broken)
    bad, good = engine.submit(Request(PROMPTS[0], 30)), engine.submit(Request(PROMPTS[1], 30))
    assert list(engine.result(good).token_ids) == GREEDY[1][:30]
    with pytest.raises(ServingError, match="the largest one is not a number"):
        list(engine.stream(bad))


# --- queue, deadlines, counts ----------------------------------------------------------------------------------------


def test_a_full_queue(bundle: Path) -> None:
    with Engine(bundle, check="quick", threads=1, max_waiting=2) as engine:
        handles = [engine.submit(Request(PROMPTS[i], 8)) for i in range(2)]
        assert not engine.accepts
        with pytest.raises(
            QueueFull, match=r"^request: the queue is full; expected at most 2 waiting; found 2\. Submit"
        ):
            engine.submit(Request(PROMPTS[2], 8))
        while not engine.accepts:
            engine.step()
        handles.append(engine.submit(Request(PROMPTS[2], 8)))
        assert [list(engine.result(h).token_ids) for h in handles] == [GREEDY[i][:8] for i in range(3)]
        assert engine.stats().refused == 1
        assert engine.stats().submitted == 3


@pytest.mark.parametrize("name", ["max_waiting", "prefill_budget"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_bad_sizes(bundle: Path, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}: not a count; expected an integer ≥ 1"):
        Engine(bundle, check="quick", **{name: value})


def test_deadlines(bundle: Path) -> None:
    now = 100.0
    with Engine(bundle, check="quick", threads=1, clock=lambda: now) as engine:
        runs = [engine.submit(Request(PROMPTS[i], 40, deadline=5.0, ignore_eos=True)) for i in range(4)]
        waits = engine.submit(Request(PROMPTS[4], 40, deadline=5.0))
        free = engine.submit(Request(PROMPTS[5], 10))
        for _ in range(12):
            engine.step()
        now = 105.0
        for i, handle in enumerate(runs):
            result = engine.result(handle)
            assert result.finish_reason == "deadline"
            assert 0 < len(result.token_ids) < 40
            assert list(result.token_ids) == GREEDY[i][: len(result.token_ids)]
        assert engine.result(waits).token_ids == ()
        assert list(engine.result(free).token_ids) == GREEDY[5][:10]
        assert engine.stats().finished == {"deadline": 5, "length": 1}


def test_drain_and_stats(engine: Engine) -> None:
    handles = [engine.submit(Request(PROMPTS[i], 25, ignore_eos=True, adaptive=i < 3)) for i in range(6)]
    assert (engine.stats().waiting, engine.idle) == (6, False)
    engine.drain()
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.free_slots, engine.idle) == (0, 0, 4, True)
    results = [engine.result(handle) for handle in handles]
    assert stats.finished == {"length": 6}
    assert stats.generated_tokens == sum(len(r.token_ids) for r in results) == 150
    assert stats.prompt_tokens + stats.reused_tokens == sum(len(PROMPTS[i]) for i in range(6))
    assert stats.rounds == sum(r.stats.rounds for r in results)
    assert stats.tokens_per_round == pytest.approx(144 / stats.rounds)
    for j in range(5):
        assert stats.proposed[j] == sum(n > j for r in results for n in r.stats.proposed)
        assert stats.accepted[j] == sum(a > j for r in results for a in r.stats.accepted)
    assert stats.break_even is not None
    assert stats.seconds.verify > 0 < stats.seconds.schedule
    engine.drain()
