"""`runtime.slots` against a plain oracle: a dictionary from ring row to the position that was really written there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.errors import RequestError
from runtime.slots import DraftWindow, RingState, SlotTable


class Ring:
    """One slot's ring and tap rows as they are in memory: positions by row, tap positions by index."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.rows: dict[int, int] = {}
        self.taps: list[int] = []

    def write(self, positions: list[int]) -> None:
        for position in positions[-self.window :]:
            self.rows[position % self.window] = position

    def visible(self, start: int) -> int:
        """Most rows that end at ``start-1`` without a gap."""
        count = 0
        while count < self.window and start - 1 - count >= 0:
            if self.rows.get((start - 1 - count) % self.window) != start - 1 - count:
                break
            count += 1
        return count


class SlotMachine(RuleBasedStateMachine):
    """Random rounds on a few slots: chunks seeded or not, drafts written or not, rejections, hand-outs in between.

    Memory is the truth here: `rings` is never cleared at a hand-out, as in the engine. A row that belonged to the last
    request would be counted by the oracle only if its position matched, so each hand-out gets a dictionary of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(3, 6)
        self.live: dict[int, Ring] = {}

    def pick(self, data: st.DataObject) -> tuple[RingState, Ring]:
        slot = data.draw(st.sampled_from(sorted(self.live)))
        return self.table.ring(slot), self.live[slot]

    @precondition(lambda self: self.table.free_count)
    @rule()
    def allocate(self) -> None:
        slot = self.table.allocate()
        assert slot == min(set(range(3)) - set(self.live))
        assert slot != self.table.scratch
        self.live[slot] = Ring(6)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.live)))
        self.table.free(slot)
        del self.live[slot]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9), seed=st.booleans())
    def prefill(self, data: st.DataObject, count: int, seed: bool) -> None:
        state, ring = self.pick(data)
        start = state.start_pos
        state.prefilled(start, count)
        ring.taps = []
        if seed:
            state.seeded(start, count)
            ring.write(list(range(start, start + count)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), drafts=st.integers(0, 4), draft=st.booleans(), verify=st.booleans())
    def round(self, data: st.DataObject, drafts: int, draft: bool, verify: bool) -> None:
        state, ring = self.pick(data)
        if state.start_pos == 0:
            with pytest.raises(RequestError, match="no bonus token"):
                state.draft_window()
            return
        if draft:
            window = state.draft_window()
            taps = ring.taps[: window.new_len]
            assert taps == list(range(window.start_pos - window.new_len, window.start_pos))
            ring.write(taps)
            assert window.valid_len == ring.visible(window.start_pos)
            state.drafted()
            # A draft that is made again (its verify failed) has nothing more to write, and sees the same.
            assert state.draft_window() == DraftWindow(window.start_pos, 0, window.valid_len)
        if verify:
            accepted = data.draw(st.integers(0, drafts))
            start = state.start_pos
            state.verified(drafts, accepted)
            ring.taps = list(range(start, start + drafts + 1))  # rejected rows too; new_len leaves them out
            assert state.start_pos == start + accepted + 1

    @invariant()
    def consistent(self) -> None:
        assert self.table.free_count == 3 - len(self.live)
        for slot in self.live:
            s = self.table.ring(slot)
            assert 0 <= s.first_seeded <= s.seeded_until <= s.start_pos - s.pending <= s.start_pos


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(1, 12), st.integers(1, 30), st.lists(st.integers(1, 14), min_size=1, max_size=6), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_window_of_the_notes(window: int, prompt: int, chunks: list[int], skipped: int) -> None:
    """``valid_len = min(W, start_pos - first_seeded)``, whatever the chunks; prompt rows before `skipped` aren't
    seeded."""
    state, start, first = RingState(window), 0, None
    for chunk in chunks * prompt:
        count = min(chunk, prompt - start)
        if count == 0:
            break
        state.prefilled(start, count)
        if start >= skipped:
            state.seeded(start, count)
            first = start if first is None else first
        start += count
    expected = 0 if first is None else min(window, prompt - first)
    assert state.draft_window() == DraftWindow(prompt, 0, expected)


def test_a_gap_restarts_the_count():
    state = RingState(16)
    state.prefilled(0, 5)
    state.seeded(0, 5)
    state.verified(4, 2)
    assert state.draft_window() == DraftWindow(8, 3, 8)
    state.drafted()
    state.verified(4, 1)  # taps 8, 9
    state.verified(0, 0)  # drafting off: taps 8, 9 are overwritten by 10
    assert state.draft_window() == DraftWindow(11, 1, 1)
    state.drafted()
    state.verified(3, 3)
    assert state.draft_window() == DraftWindow(15, 4, 5)


def test_golden_ring_rows():
    """The rounds of drafter traces: visible rows are ``max(first, start-W) … start-1`` (here W = 8)."""
    state = RingState(8)
    state.prefilled(0, 6)
    state.seeded(0, 6)
    for accepted in (2, 0, 4, 4, 1):
        window = state.draft_window()
        assert window.valid_len == min(8, window.start_pos)
        state.drafted()
        state.verified(4, accepted)


def test_refusals_change_nothing():
    state = RingState(8)
    with pytest.raises(RequestError, match="start_pos > 0; found 0"):
        state.draft_window()
    with pytest.raises(RequestError, match="start_pos > 0; found 0"):
        state.drafted()
    with pytest.raises(RequestError, match="start_pos > 0; found 0"):
        state.verified(3, 1)
    state.prefilled(0, 4)
    for start in (0, 3, 5):
        with pytest.raises(RequestError, match="expected start 4"):
            state.prefilled(start, 4)
    with pytest.raises(RequestError, match="empty chunk"):
        state.prefilled(4, 0)
    for start, count in ((0, 3), (1, 4), (4, 1), (4, 0), (-1, 5)):
        with pytest.raises(RequestError, match=r"^seed: "):
            state.seeded(start, count)
    for accepted in (-1, 4):
        with pytest.raises(RequestError, match=r"expected 0 … 3"):
            state.verified(3, accepted)
    assert (state.start_pos, state.first_seeded, state.seeded_until, state.pending) == (4, 0, 0, 0)
    state.verified(3, 1)
    with pytest.raises(RequestError, match=r"^seed: "):
        state.seeded(4, 2)


def test_table_refusals():
    table = SlotTable(2, 8)
    for bad in (-1, 0, 1, 2, 3):
        with pytest.raises(RequestError, match="not in use"):
            table.ring(bad)
    assert (table.allocate(), table.allocate(), table.scratch) == (0, 1, 2)
    with pytest.raises(RequestError, match="all are taken"):
        table.allocate()
    table.free(0)
    with pytest.raises(RequestError, match="not in use"):
        table.free(0)
    with pytest.raises(RequestError, match="not in use"):
        table.free(table.scratch)
    for slots, window in ((0, 8), (1, 0)):
        with pytest.raises(RequestError, match="too small"):
            SlotTable(slots, window)


def test_a_late_call_cannot_touch_the_next_request():
    table = SlotTable(1, 8)
    old = table.ring(table.allocate())
    old.prefilled(0, 5)
    old.seeded(0, 5)
    table.free(0)
    new = table.ring(table.allocate())
    old.verified(2, 2)
    assert (new.start_pos, new.seeded_until, new.pending) == (0, 0, 0)
    new.prefilled(0, 3)
    assert new.draft_window().valid_len == 0
