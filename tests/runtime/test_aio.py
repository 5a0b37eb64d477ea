"""`runtime.aio`: many tasks over one engine, what reaches each of them, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from runtime import AsyncEngine, BundleError, Engine, QueueFull, Request, RequestError, Result, ServingError
from runtime.sampling import SamplingParams
from tests.support import tiny_prompts

PROMPTS = [tuple(p["input_ids"]) for p in tiny_prompts("llama")]
GREEDY = [p["greedy_new_tokens"] for p in tiny_prompts("llama")]
LONG = Request(PROMPTS[3], max_new_tokens=10**6, adaptive=False)
"""Runs until the bundle's limit of 128 tokens."""


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Callable[..., Path]) -> Path:
    """Four slots, at most 128 tokens."""
    return tiny_bundle()


def request(i: int) -> Request:
    """One of many that differ in prompt, length and sampling."""
    sampling = SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i)
    return Request(PROMPTS[i % 6], max_new_tokens=8 + 3 * (i % 5), sampling=sampling, draw_stream=i)


def play(bundle: Path, scene: Callable[[AsyncEngine], Coroutine[Any, Any, None]], **options: Any) -> Engine:
    """Run `scene` with an open engine, and close that; the engine behind it."""
    engine = Engine(bundle, check="quick", threads=1, **options)

    async def main() -> None:
        async with AsyncEngine(engine) as face:
            await asyncio.wait_for(scene(face), 60)

    asyncio.run(main())
    with pytest.raises(RequestError, match=r"^engine: is closed"):
        engine.step()
    return engine


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def fails(engine: Engine, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """From now on a call of the session raises."""

    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(engine._session, call, broken)


# --- many at once ----------------------------------------------------------------------------------------------------


def test_many_tasks_get_what_each_would_alone(bundle: Path) -> None:
    with Engine(bundle, check="quick", threads=1) as engine:
        alone = [engine.result(engine.submit(request(i))).token_ids for i in range(24)]

    async def listen(face: AsyncEngine, i: int) -> Result:
        await asyncio.sleep(0.002 * (i % 7))
        if i % 3 == 0:
            return await face.run(request(i))
        stream = face.stream(request(i))
        pieces = [piece async for piece in stream]
        assert len(pieces) > 1
        assert tuple(token for piece in pieces for token in piece.token_ids) == stream.result.token_ids
        return stream.result

    async def scene(face: AsyncEngine) -> None:
        results = await asyncio.gather(*(listen(face, i) for i in range(24)))
        assert [result.token_ids for result in results] == alone
        stats = face.stats()
        assert (stats.submitted, stats.finished, stats.running, stats.free_slots) == (24, {"length": 24}, 0, 4)
        assert stats.steps < sum(len(tokens) for tokens in alone) / 2, "requests run side by side"

    play(bundle, scene)


def test_a_bundle_and_the_engines_keywords(bundle: Path) -> None:
    async def main() -> None:
        async with AsyncEngine(bundle, check="quick", threads=1, max_waiting=7) as face:
            result = await face.run(Request(PROMPTS[0], max_new_tokens=9))
            assert list(result.token_ids) == GREEDY[0][:9]
            assert face.bundle.path == bundle
            assert face.tokenizer is None
        with pytest.raises(BundleError):
            await AsyncEngine(bundle / "nowhere").open()

    asyncio.run(main())
    with Engine(bundle, check="quick") as engine, pytest.raises(RequestError, match=r"takes no options.*threads"):
        AsyncEngine(engine, threads=1)


def test_the_loop_stays_responsive_while_a_step_runs(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stepping, go_on = threading.Event(), threading.Event()

    async def scene(face: AsyncEngine) -> None:
        engine = face._engine
        step = engine.step

        def slow() -> None:
            stepping.set()
            assert go_on.wait(10)
            step()

        monkeypatch.setattr(engine, "step", slow)
        task = asyncio.create_task(face.run(Request(PROMPTS[0], max_new_tokens=3)))
        await until(stepping.is_set)
        assert not task.done()
        go_on.set()
        assert list((await task).token_ids) == GREEDY[0][:3]

    play(bundle, scene)


def test_nothing_happens_while_idle(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(face: AsyncEngine) -> None:
        turns = 0
        turn = face._turn

        def counted(engine: Engine) -> None:
            nonlocal turns
            turns += 1
            turn(engine)

        monkeypatch.setattr(face, "_turn", counted)
        await face.run(Request(PROMPTS[0], max_new_tokens=2))
        await face.drain()
        ran = turns
        await asyncio.sleep(0.1)
        assert turns <= ran + 1  # the one that the listener's leaving brought about
        assert list((await face.run(Request(PROMPTS[1], max_new_tokens=2))).token_ids) == GREEDY[1][:2]

    play(bundle, scene)


def test_no_tokens(bundle: Path) -> None:
    async def scene(face: AsyncEngine) -> None:
        result = await face.run(Request(PROMPTS[0], max_new_tokens=0))
        assert (result.token_ids, result.finish_reason, face.stats().steps) == ((), "length", 0)

    play(bundle, scene)


def test_drain_waits_for_all(bundle: Path) -> None:
    async def scene(face: AsyncEngine) -> None:
        await face.drain()  # nothing to wait for
        tasks = [asyncio.create_task(face.run(request(i))) for i in range(6)]
        await asyncio.sleep(0)
        await face.drain()
        assert face.stats().finished == {"length": 6}
        await asyncio.sleep(0.01)
        assert all(task.done() for task in tasks)

    play(bundle, scene)


# --- leaving early ---------------------------------------------------------------------------------------------------


def test_cancelling_a_task_cancels_its_request_alone(bundle: Path) -> None:
    async def scene(face: AsyncEngine) -> None:
        gone, stays = (asyncio.create_task(face.run(LONG)) for _ in range(2))
        await until(lambda: face.stats().generated_tokens > 4)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        result = await stays
        assert list(result.token_ids[:48]) == GREEDY[3]
        stats = face.stats()
        assert stats.finished == {"cancelled": 1, "length": 1}
        assert stats.free_slots == 4
        assert not face._engine._sequences, "what nobody listens to is forgotten"

    play(bundle, scene)


def test_a_task_cancelled_before_its_request_was_taken(bundle: Path) -> None:
    async def scene(face: AsyncEngine) -> None:
        task = asyncio.create_task(face.run(LONG))
        await asyncio.sleep(0)  # it has asked, but the worker can't have looked
        task.cancel()
        await asyncio.wait([task])
        await face.drain()
        assert task.cancelled()
        assert (face.stats().submitted, face.stats().steps) == (0, 0)

    play(bundle, scene)


def test_leaving_a_stream_cancels(bundle: Path) -> None:
    async def scene(face: AsyncEngine) -> None:
        async for piece in face.stream(LONG):
            assert piece.token_ids
            break
        await until(lambda: face.stats().free_slots == 4)
        assert face.stats().finished == {"cancelled": 1}

        stream = face.stream(LONG)
        async with contextlib.aclosing(stream):
            await anext(stream)
            with pytest.raises(RequestError, match=r"^stream: has no result yet"):
                _ = stream.result
        await face.drain()
        assert face.stats().finished == {"cancelled": 2}

    play(bundle, scene)


def test_deadlines_are_a_way_to_end(bundle: Path) -> None:
    now = [0.0]

    async def scene(face: AsyncEngine) -> None:
        stream = face.stream(Request(PROMPTS[3], max_new_tokens=10**6, deadline=5))
        await anext(stream)
        now[0] = 6
        async for _ in stream:
            pass
        assert stream.result.finish_reason == "deadline"
        assert list(stream.result.token_ids) == GREEDY[3][: len(stream.result.token_ids)]

    play(bundle, scene, clock=lambda: now[0])


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_an_error_at_once(bundle: Path) -> None:
    async def scene(face: AsyncEngine) -> None:
        outcomes = await asyncio.gather(*(face.run(request(i)) for i in range(9)), return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
        # None runs before all have been looked at: one may wait.
        assert len(refused) == face.stats().refused == 8
        assert face.stats().finished == {"length": 1}

    play(bundle, scene, max_waiting=1)


def test_a_bad_request_is_its_tasks_alone(bundle: Path) -> None:
    async def scene(face: AsyncEngine) -> None:
        bad = Request((131,))
        good, error = await asyncio.gather(face.run(request(0)), face.run(bad), return_exceptions=True)
        assert isinstance(good, Result)
        assert isinstance(error, RequestError)
        assert str(error).startswith("prompt: an id outside the vocabulary")

    play(bundle, scene)


def test_a_failing_request_is_its_tasks_alone(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(face: AsyncEngine) -> None:
        bystander = face.stream(LONG)
        await anext(bystander)
        with monkeypatch.context() as patch:
            fails(face._engine, patch, "prefill")
            with pytest.raises(ServingError, match="out of order") as caught:
                await face.run(request(0))
        assert isinstance(caught.value.__cause__, RuntimeError)
        async for _ in bystander:
            pass
        assert list(bystander.result.token_ids[:48]) == GREEDY[3]
        assert face.stats().finished == {"error": 1, "length": 1}

    play(bundle, scene)


def test_a_failing_step_reaches_everyone_and_closes(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(face: AsyncEngine) -> None:
        tasks = [asyncio.create_task(face.run(LONG)) for _ in range(6)]  # two of them wait
        await until(lambda: face.stats().generated_tokens > 4)

        def broken() -> None:
            raise RuntimeError("the scheduler is lost")

        monkeypatch.setattr(face._engine._scheduler, "schedule", broken)
        refused = asyncio.create_task(face.run(Request((131,))))  # looked at in the very turn that fails, maybe
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, ServingError)
            assert "engine: failed in a step; found the scheduler is lost" in str(outcome)
            assert isinstance(outcome.__cause__, RuntimeError)
        with pytest.raises((RequestError, ServingError)):
            await refused
        with pytest.raises(RequestError, match=r"^engine: is closed; .*found the scheduler is lost"):
            face.stream(LONG)
        await face.close()

    play(bundle, scene)


def test_closing_ends_what_runs(bundle: Path) -> None:
    async def scene(face: AsyncEngine) -> None:
        tasks = [asyncio.create_task(face.run(LONG)) for _ in range(6)]
        await until(lambda: face.stats().generated_tokens > 4)
        late = asyncio.create_task(face.run(LONG))
        await asyncio.sleep(0)
        await face.close()
        await face.close()
        for outcome in await asyncio.gather(*tasks, late, return_exceptions=True):
            assert isinstance(outcome, ServingError)
            assert str(outcome).startswith("engine: was closed before the request's end")
        for call in (face.run(LONG), face.drain(), face.open()):
            with pytest.raises(RequestError, match=r"^engine: (is closed|was opened or closed before)"):
                await call
        assert face.stats().submitted in (6, 7)

    play(bundle, scene)


def test_a_loop_that_ends_without_closing_closes(bundle: Path) -> None:
    engine = Engine(bundle, check="quick", threads=1)

    async def main() -> None:
        face = AsyncEngine(engine)
        await face.open()
        await anext(face.stream(LONG))

    asyncio.run(main())
    with pytest.raises(RequestError, match=r"^engine: is closed"):
        engine.step()


def test_an_engine_that_is_not_open(bundle: Path) -> None:
    face = AsyncEngine(bundle)
    for use in (lambda: face.stream(LONG), face.stats, lambda: face.tokenizer):
        with pytest.raises(RequestError, match=r"^engine: is not open yet"):
            use()

    async def close() -> None:
        await face.close()
        with pytest.raises(RequestError, match=r"^engine: was opened or closed before"):
            await face.open()

    asyncio.run(close())


def test_closing_while_it_opens(bundle: Path) -> None:
    engine = Engine(bundle, check="quick", threads=1)

    async def main() -> None:
        face = AsyncEngine(engine)
        opening = asyncio.create_task(face.open())
        await asyncio.sleep(0)
        await face.close()
        await opening
        with pytest.raises(RequestError, match=r"^engine: is closed"):
            await face.run(LONG)
        await face.close()

    asyncio.run(main())
    with pytest.raises(RequestError, match=r"^engine: is closed"):
        engine.step()
