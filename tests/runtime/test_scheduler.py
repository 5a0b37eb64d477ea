"""`runtime.scheduler` driven as the engine drives it, without an engine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import RequestError
from runtime.scheduler import Admission, DecodeWork, FifoScheduler, PrefillWork, Scheduler, Step
from runtime.slots import NO_PREFIX, Prefix, SlotTable

NOTHING = Step((), (), ())


class Driver:
    """A scheduler, and what the engine does with its steps as far as the slot table sees it."""

    def __init__(
        self, slots: int = 2, *, chunk: int = 4, budget: int | None = None, max_batch: int | None = None
    ) -> None:
        self.table = SlotTable(slots, 16, 64)
        self.scheduler = FifoScheduler(
            self.table, prefill_chunk=chunk, prefill_budget=budget or chunk, max_batch=max_batch or slots
        )
        self.prompts: dict[int, list[int]] = {}

    def submit(self, request_id: int, prompt: int | list[int]) -> None:
        """Queue a request; a prompt of so many ids shares none with another."""
        self.prompts[request_id] = [1000 + request_id] * prompt if isinstance(prompt, int) else prompt
        self.scheduler.submit(request_id, self.prompts[request_id])

    def run(self, step: Step) -> None:
        for work in step.prefill:
            state = self.table.state(work.slot)
            assert state.start_pos == work.start
            state.prefilled(self.prompts[work.request_id][work.start : work.start + work.count])
            state.seeded()
        for work in step.decode:
            self.table.state(work.slot).verified(7, [], 0)
            self.table.state(work.slot).seeded()

    def step(self) -> Step:
        step = self.scheduler.schedule()
        self.run(step)
        return step


def admitted(request_id: int, slot: int) -> Admission:
    return Admission(request_id, slot, NO_PREFIX)


def test_chunks_then_decoding() -> None:
    driver = Driver()
    scheduler: Scheduler = driver.scheduler
    assert scheduler.schedule() == NOTHING
    driver.submit(7, 10)
    assert (scheduler.waiting, scheduler.running) == (1, 0)
    assert driver.step() == Step((admitted(7, 0),), (PrefillWork(7, 0, 0, 4),), ())
    assert (scheduler.waiting, scheduler.running) == (0, 1)
    for start, count in ((4, 4), (8, 2)):
        step = scheduler.schedule()
        assert step == Step((), (PrefillWork(7, 0, start, count),), ())
        assert scheduler.schedule() == step, "work that wasn't done is planned again"
        driver.run(step)
    assert driver.step() == driver.step() == Step((), (), (DecodeWork(7, 0),))
    scheduler.finish(7)
    assert (scheduler.waiting, scheduler.running, driver.table.free_count) == (0, 0, 2)
    assert scheduler.schedule() == NOTHING


def test_a_fresh_step_mixes_chunks_and_rounds() -> None:
    driver = Driver(3)
    driver.submit(1, 2)
    driver.submit(2, 9)
    assert driver.step().prefill == (PrefillWork(1, 0, 0, 2), PrefillWork(2, 1, 0, 2))
    driver.submit(3, 1)
    # The older prompt takes the whole budget, so the third request is not admitted yet.
    assert driver.step() == Step((), (PrefillWork(2, 1, 2, 4),), (DecodeWork(1, 0),))
    assert driver.step() == Step(
        (admitted(3, 2),), (PrefillWork(2, 1, 6, 3), PrefillWork(3, 2, 0, 1)), (DecodeWork(1, 0),)
    )
    assert driver.step().decode == (DecodeWork(1, 0), DecodeWork(2, 1), DecodeWork(3, 2))


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1, [(1, 1)]),
        (5, [(1, 4), (2, 1)]),
        (10, [(1, 4), (2, 4), (3, 2)]),
        (100, [(1, 4), (2, 4), (3, 4)]),
    ],
)
def test_the_budget_bounds_a_step(budget: int, expected: list[tuple[int, int]]) -> None:
    driver = Driver(3, budget=budget)
    for request_id in (1, 2, 3):
        driver.submit(request_id, 6)
    assert [(work.request_id, work.count) for work in driver.step().prefill] == expected


def test_first_come_first_served() -> None:
    driver = Driver(1, chunk=8)
    for request_id in (3, 1, 2):
        driver.submit(request_id, 5)
    assert driver.step().prefill == (PrefillWork(3, 0, 0, 5),)
    driver.scheduler.finish(1)  # cancelled while queued
    assert driver.scheduler.waiting == 1
    driver.scheduler.finish(3)
    assert driver.step() == Step((admitted(2, 0),), (PrefillWork(2, 0, 0, 5),), ())


def test_a_cancelled_request_frees_its_slot_for_the_next_step() -> None:
    driver = Driver(1)
    driver.submit(1, 9)
    driver.step()
    driver.submit(2, 1)
    assert driver.step().admitted == ()
    driver.scheduler.finish(1)
    assert (driver.table.free_count, driver.scheduler.slot(1)) == (1, driver.table.scratch)
    assert driver.step() == Step((admitted(2, 0),), (PrefillWork(2, 0, 0, 1),), ())


def test_a_request_without_a_slot_has_scratch() -> None:
    driver = Driver(1)
    driver.submit(1, 2)
    driver.submit(2, 2)
    assert [driver.scheduler.slot(n) for n in (1, 2, 3)] == [1, 1, 1]
    driver.step()
    assert [driver.scheduler.slot(n) for n in (1, 2, 3)] == [0, 1, 1]


def test_those_that_waited_longest_decode_when_not_all_can() -> None:
    driver = Driver(5, chunk=9, max_batch=2)
    for request_id in range(5):
        driver.submit(request_id, 1)
    seen = [[work.request_id for work in driver.step().decode] for _ in range(8)]
    # Two prompts a step, as many as the engines hold rows. In the second step all had work, so nobody has waited yet.
    assert seen == [[], [0, 1], [0, 1], [2, 3], [0, 4], [1, 2], [3, 4], [0, 1]]
    driver.scheduler.finish(4)
    assert [work.request_id for work in driver.step().decode] == [2, 3]
    assert [work.request_id for work in driver.step().decode] == [0, 1]


def test_rows_are_in_the_order_of_slots() -> None:
    driver = Driver(3, chunk=9)
    for request_id in (1, 2, 3):
        driver.submit(request_id, 2)
    driver.step()
    driver.scheduler.finish(1)
    driver.submit(4, 2)
    driver.step()
    assert driver.step().decode == (DecodeWork(4, 0), DecodeWork(2, 1), DecodeWork(3, 2))


def test_the_oldest_prompt_comes_first_whatever_its_slot() -> None:
    driver = Driver(2)
    driver.submit(1, 1)
    driver.submit(2, 12)
    driver.step()
    driver.scheduler.finish(1)
    driver.submit(3, 9)
    assert driver.step() == Step((), (PrefillWork(2, 1, 3, 4),), ())
    assert driver.step() == Step((), (PrefillWork(2, 1, 7, 4),), ())
    # One id of it is left, so the budget reaches the next; rows are in the order of slots nevertheless.
    assert driver.step() == Step((admitted(3, 0),), (PrefillWork(3, 0, 0, 3), PrefillWork(2, 1, 11, 1)), ())


def test_a_shared_prefix_is_not_run_again() -> None:
    driver = Driver(3, chunk=9)
    driver.submit(1, [1, 2, 3, 4])
    driver.step()
    driver.submit(2, [1, 2, 3, 9, 9])  # live
    assert driver.step() == Step((Admission(2, 1, Prefix(0, 3)),), (PrefillWork(2, 1, 3, 2),), (DecodeWork(1, 0),))
    driver.scheduler.finish(1)
    driver.submit(3, [1, 2, 3, 4, 7, 5])  # finished, and no more in it: in place
    assert driver.step().admitted == (Admission(3, 0, Prefix(0, 5)),)
    driver.submit(4, [1, 2, 3, 9, 9])  # all of it; the target must run on the last id
    step = driver.step()
    assert (step.admitted, step.prefill) == ((Admission(4, 2, Prefix(1, 4)),), (PrefillWork(4, 2, 4, 1),))


def test_what_a_failed_request_leaves_serves_nobody() -> None:
    for keep, prefix in ((True, Prefix(0, 3)), (False, NO_PREFIX)):
        driver = Driver(1, chunk=9)
        driver.submit(1, [1, 2, 3])
        driver.step()
        driver.scheduler.finish(1, keep=keep)
        driver.submit(2, [1, 2, 3, 4])
        assert driver.step().admitted == (Admission(2, 0, prefix),)


def test_who_shares_enough_with_a_prompt_in_work_waits_for_it() -> None:
    """And who comes later waits with him: first come, first served."""
    driver = Driver(3, chunk=30, budget=60)
    common = list(range(40))
    driver.submit(1, common)
    driver.submit(2, [*common, 99])
    driver.submit(3, 1)
    assert driver.step() == Step((admitted(1, 0),), (PrefillWork(1, 0, 0, 30),), ())
    # 10 more would not be worth waiting for.
    assert driver.step() == Step(
        (Admission(2, 1, Prefix(0, 30)), admitted(3, 2)),
        (PrefillWork(1, 0, 30, 10), PrefillWork(2, 1, 30, 11), PrefillWork(3, 2, 0, 1)),
        (),
    )


@pytest.mark.parametrize(("shared", "waits"), [(31, False), (32, True)])
def test_what_is_worth_waiting_for(shared: int, waits: bool) -> None:
    driver = Driver(2, chunk=8, budget=16)
    driver.submit(1, list(range(40)))
    driver.submit(2, [*range(shared), 99, 98])
    assert len(driver.step().admitted) == (1 if waits else 2)


def test_whoever_is_waited_for_may_leave() -> None:
    driver = Driver(2, chunk=8, budget=16)
    driver.submit(1, list(range(40)))
    driver.submit(2, [*range(40), 99])
    driver.step()
    driver.scheduler.finish(1, keep=False)
    assert driver.step() == Step((admitted(2, 0),), (PrefillWork(2, 0, 0, 8),), ())


def test_refusals() -> None:
    driver = Driver(1, chunk=8)
    scheduler = driver.scheduler
    driver.submit(1, 5)
    for _ in range(2):  # queued, then running
        with pytest.raises(RequestError, match="request_id: already queued or running; found 1"):
            scheduler.submit(1, [5])
        scheduler.schedule()
    with pytest.raises(RequestError, match="request_id: neither queued nor running; found 2"):
        scheduler.finish(2)
    with pytest.raises(RequestError, match="prompt: empty; expected at least one token; found 0"):
        scheduler.submit(2, [])
    assert (scheduler.waiting, scheduler.running) == (0, 1)
    for name in ("prefill_chunk", "prefill_budget", "max_batch"):
        sizes = {"prefill_chunk": 1, "prefill_budget": 1, "max_batch": 1} | {name: 0}
        with pytest.raises(RequestError, match=f"{name}: too small; expected at least 1; found 0"):
            FifoScheduler(driver.table, **sizes)


def test_the_callers_prompt_may_change() -> None:
    driver, prompt = Driver(), [1, 2, 3]
    driver.submit(1, prompt)
    prompt.clear()
    assert driver.scheduler.schedule().prefill == (PrefillWork(1, 0, 0, 3),)


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from(["submit", "finish", "step", "step", "fail"]), st.integers(1, 12)), max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_random_traffic(slots: int, max_batch: int, chunk: int, budget: int, events: list[tuple[str, int]]) -> None:
    """Against lists: who waits, who runs, how much of each prompt is in, who decoded last. Prompts share nothing."""
    driver = Driver(slots, chunk=chunk, budget=budget, max_batch=max_batch)
    scheduler, table = driver.scheduler, driver.table
    waiting: list[int] = []
    running: list[int] = []  # as they were admitted; who decodes goes to the end when not all could
    left: dict[int, int] = {}
    for number, (event, size) in enumerate(events):
        known = waiting + running
        if event == "submit":
            driver.submit(number, size)
            waiting.append(number)
            left[number] = size
        elif event == "finish" and known:
            gone = known[size % len(known)]
            scheduler.finish(gone)
            (waiting if gone in waiting else running).remove(gone)
        elif event in ("step", "fail"):
            step = scheduler.schedule()
            chunks: dict[int, int] = {}
            decoding = [r for r in running if not left[r]]
            for r in [*running, *waiting[: slots - len(running)]]:
                room = budget - sum(chunks.values())
                if left[r] and room and len(chunks) < max_batch:
                    chunks[r] = min(chunk, left[r], room)
            new = [r for r in waiting if r in chunks]
            assert [a.request_id for a in step.admitted] == new
            running += new
            waiting = [r for r in waiting if r not in new]
            assert {w.request_id: w.count for w in step.prefill} == chunks
            assert {w.request_id for w in step.decode} == set(decoding[:max_batch])
            if len(decoding) > max_batch:
                running = [r for r in running if r not in decoding[:max_batch]] + decoding[:max_batch]
            used = [work.slot for work in (*step.prefill, *step.decode)]
            assert len(set(used)) == len(used)
            assert table.scratch not in used
            if event == "step":
                driver.run(step)
                for r, count in chunks.items():
                    left[r] -= count
        assert (scheduler.waiting, scheduler.running) == (len(waiting), len(running))
        assert table.free_count == slots - len(running)
