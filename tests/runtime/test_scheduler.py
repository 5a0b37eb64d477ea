"""`runtime.scheduler` driven as the engine drives it, without an engine."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import RequestError
from runtime.scheduler import DecodeWork, PrefillWork, Scheduler, Step
from runtime.slots import SlotTable


def run(table: SlotTable, step: Step) -> None:
    """What the engine does with a step, as far as the slot table sees it."""
    for work in step.prefill:
        table.ring(work.slot).prefilled(work.start, work.count)
    for work in step.decode:
        table.ring(work.slot).verified(0, 0)


def test_chunks_then_decoding():
    table = SlotTable(2, 16)
    scheduler = Scheduler(table, prefill_chunk=4, max_batch=2)
    assert scheduler.schedule() == Step((), ())
    scheduler.submit(7, 10)
    for start, count in ((0, 4), (4, 4), (8, 2)):
        step = scheduler.schedule()
        assert step == Step((PrefillWork(7, 0, start, count),), ())
        assert scheduler.schedule() == step, "work that wasn't done is planned again"
        run(table, step)
    assert scheduler.schedule() == Step((), (DecodeWork(7, 0),))
    assert not scheduler.idle
    scheduler.finish(7)
    assert scheduler.idle
    assert scheduler.schedule() == Step((), ())
    assert table.free_count == 2


def test_a_long_prompt_does_not_stop_decoding():
    table = SlotTable(2, 16)
    scheduler = Scheduler(table, prefill_chunk=4, max_batch=2)
    scheduler.submit(1, 2)
    scheduler.submit(2, 9)
    run(table, scheduler.schedule())
    assert scheduler.schedule() == Step((PrefillWork(2, 1, 0, 4),), (DecodeWork(1, 0),))


def test_first_come_first_served():
    table = SlotTable(1, 16)
    scheduler = Scheduler(table, prefill_chunk=8, max_batch=1)
    for request_id in (3, 1, 2):
        scheduler.submit(request_id, 5)
    assert scheduler.schedule().prefill == (PrefillWork(3, 0, 0, 5),)
    scheduler.finish(1)  # cancelled while queued
    scheduler.finish(3)
    assert scheduler.schedule().prefill == (PrefillWork(2, 0, 0, 5),)


def test_more_slots_than_batch_rows():
    table = SlotTable(3, 16)
    scheduler = Scheduler(table, prefill_chunk=8, max_batch=2)
    for request_id in range(3):
        scheduler.submit(request_id, 1)
        run(table, scheduler.schedule())
    assert [work.request_id for work in scheduler.schedule().decode] == [0, 1]
    scheduler.finish(0)
    assert [work.request_id for work in scheduler.schedule().decode] == [1, 2]


def test_refusals():
    table = SlotTable(1, 16)
    scheduler = Scheduler(table, prefill_chunk=8, max_batch=1)
    scheduler.submit(1, 5)
    with pytest.raises(RequestError, match="already queued"):
        scheduler.submit(1, 5)
    scheduler.schedule()
    with pytest.raises(RequestError, match="already queued"):
        scheduler.submit(1, 5)
    with pytest.raises(RequestError, match="neither queued nor running"):
        scheduler.finish(2)
    with pytest.raises(RequestError, match="empty"):
        scheduler.submit(2, 0)
    for chunk, batch in ((0, 1), (1, 0)):
        with pytest.raises(RequestError, match="too small"):
            Scheduler(table, prefill_chunk=chunk, max_batch=batch)


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["submit", "finish", "step", "fail"]), st.integers(1, 12)), max_size=60),
)
@settings(max_examples=100, deadline=None)
def test_random_traffic(slots: int, max_batch: int, chunk: int, events: list[tuple[str, int]]) -> None:
    """Against lists: who waits, who runs, how much of each prompt is in."""
    table = SlotTable(slots, 16)
    scheduler = Scheduler(table, prefill_chunk=chunk, max_batch=max_batch)
    waiting: list[int] = []
    running: list[int] = []
    left: dict[int, int] = {}
    for number, (event, size) in enumerate(events):
        known = waiting + running
        if event == "submit":
            scheduler.submit(number, size)
            waiting.append(number)
            left[number] = size
        elif event == "finish" and known:
            gone = known[size % len(known)]
            scheduler.finish(gone)
            (waiting if gone in waiting else running).remove(gone)
        elif event in ("step", "fail"):
            while waiting and len(running) < slots:
                running.append(waiting.pop(0))
            step = scheduler.schedule()
            prefilling = [r for r in running if left[r] > 0]
            assert [work.request_id for work in step.prefill] == prefilling[:1]
            assert [work.request_id for work in step.decode] == [r for r in running if left[r] == 0][:max_batch]
            used = [work.slot for work in (*step.prefill, *step.decode)]
            assert len(set(used)) == len(used)
            assert table.scratch not in used
            for work in step.prefill:
                assert work.count == min(chunk, left[work.request_id])
                if event == "step":
                    left[work.request_id] -= work.count
            if event == "step":
                run(table, step)
        assert scheduler.idle == (not waiting and not running)
