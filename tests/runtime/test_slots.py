"""`runtime.slots` against plain lists: what ring and tap rows really hold, and which slot holds which ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.errors import RequestError
from runtime.slots import NO_PREFIX, DraftWindow, Prefix, SeedWindow, SlotState, SlotTable, common_prefix

WINDOW, TAP_ROWS, SLOTS = 6, 7, 3


def state(ids: int = 0, *, window: int = 8, tap_rows: int = 16) -> SlotState:
    """A slot whose prompt 100, 101 … is in, and seeded."""
    made = SlotState(window, tap_rows)
    for start in range(0, ids, tap_rows):
        made.prefilled(range(100 + start, 100 + min(ids, start + tap_rows)))
        made.seeded()
    return made


def numbers(slot: SlotState) -> tuple[int, int, int, int]:
    return slot.start_pos, slot.first_seeded, slot.seeded_until, slot.pending


# --- one slot --------------------------------------------------------------------------------------------------------


def test_tap_rows_wait_until_the_ring_takes_them_in() -> None:
    slot = SlotState(8, 16)
    slot.prefilled([5, 6, 7])
    assert (slot.ids, slot.tap_row, slot.tap_room, slot.seed_window()) == ([5, 6, 7], 3, 13, SeedWindow(0, 3))
    slot.prefilled([8])
    assert (numbers(slot), slot.seed_window()) == ((4, 0, 0, 4), SeedWindow(0, 4))
    slot.seeded()
    assert (numbers(slot), slot.tap_room, slot.seed_window()) == ((4, 0, 4, 0), 16, SeedWindow(4, 0))


def test_a_round_keeps_the_bonus_and_what_was_accepted() -> None:
    slot = state(4)
    assert slot.draft_window() == DraftWindow(4, 0, 4)
    slot.verified(9, [10, 11, 12], 2)
    assert slot.ids == [100, 101, 102, 103, 9, 10, 11]
    # Three tap rows wait; that of the rejected draft lies behind them, and the next call overwrites it.
    assert (numbers(slot), slot.tap_row, slot.draft_window()) == ((7, 0, 4, 3), 3, DraftWindow(7, 3, 7))
    slot.seeded()
    slot.verified(13, [], 0)
    assert (numbers(slot), slot.draft_window()) == ((8, 0, 7, 1), DraftWindow(8, 1, 8))


def test_rounds_without_drafts_pile_up_and_one_call_catches_up() -> None:
    slot = state(5)
    for n in range(6):
        slot.verified(n, [], 0)
    assert (slot.draft_window(), slot.seed_window()) == (DraftWindow(11, 6, 8), SeedWindow(5, 6))
    slot.seeded()
    assert (numbers(slot), slot.draft_window()) == ((11, 0, 11, 0), DraftWindow(11, 0, 8))


def test_the_window_is_the_most_that_is_visible() -> None:
    slot = state(30)
    assert slot.draft_window() == DraftWindow(30, 0, 8)
    slot.verified(1, [2], 1)
    assert slot.draft_window() == DraftWindow(32, 2, 8)


def test_after_dropped_tap_rows_the_count_restarts() -> None:
    slot = state(5)
    slot.verified(1, [2, 3], 2)
    slot.drop_taps()
    assert (numbers(slot), slot.draft_window()) == ((8, 0, 5, 0), DraftWindow(8, 0, 0))
    slot.verified(4, [], 0)
    assert slot.draft_window() == DraftWindow(9, 1, 1)
    slot.seeded()
    assert numbers(slot) == (9, 8, 9, 0)
    slot.verified(5, [6], 1)
    assert slot.draft_window() == DraftWindow(11, 2, 3)


@pytest.mark.parametrize(
    ("rows", "expected", "window"),
    [
        (12, (12, 4, 10, 2), DraftWindow(12, 2, 6)),
        (11, (11, 4, 10, 1), DraftWindow(11, 1, 6)),
        (10, (10, 4, 10, 0), DraftWindow(10, 0, 6)),
        (7, (7, 4, 7, 0), DraftWindow(7, 0, 3)),
        (4, (4, 4, 4, 0), DraftWindow(4, 0, 0)),
        (2, (2, 2, 2, 0), DraftWindow(2, 0, 0)),
    ],
)
def test_a_prefix_keeps_only_ring_rows_that_are_still_there(
    rows: int, expected: tuple[int, int, int, int], window: DraftWindow
) -> None:
    """Positions 4 … 9 are in a ring of 6 rows, having overwritten 0 … 3; 10 and 11 wait."""
    slot = state(10, window=6)
    slot.verified(1, [2], 1)
    assert numbers(slot) == (12, 0, 10, 2)
    slot.keep(rows)
    assert numbers(slot) == expected
    assert slot.ids == [*range(100, 110), 1, 2][:rows]
    assert slot.draft_window() == window


def test_a_prefix_before_a_gap_keeps_no_ring_rows() -> None:
    slot = state(5)
    slot.verified(1, [2, 3], 2)
    slot.drop_taps()
    slot.verified(4, [], 0)
    slot.seeded()  # 8 alone, after 0 … 4 and the gap
    slot.keep(4)
    assert slot.draft_window() == DraftWindow(4, 0, 0)


def test_a_kept_prefix_goes_on_without_a_gap() -> None:
    slot = state(10)
    slot.keep(6)
    slot.prefilled([1, 2])
    assert slot.draft_window() == DraftWindow(8, 2, 6)  # 2 … 7: of ten seeded rows 2 … 9 were in the ring
    slot.keep(0)
    assert (numbers(slot), slot.ids) == ((0, 0, 0, 0), [])


def test_a_copy_is_another_slot() -> None:
    slot = state(5)
    slot.verified(1, [], 0)
    other = slot.copy()
    assert (numbers(other), other.ids, other.window, other.tap_rows) == (numbers(slot), slot.ids, 8, 16)
    other.verified(2, [3], 1)
    other.seeded()
    assert (numbers(slot), len(slot.ids)) == ((6, 0, 5, 1), 6)


def test_refusals_change_nothing() -> None:
    slot = SlotState(8, 6)
    for call in (slot.draft_window, lambda: slot.verified(1, [2], 1)):
        with pytest.raises(RequestError, match=r"no bonus token yet; expected start_pos > 0; found 0. Prefill"):
            call()
    with pytest.raises(RequestError, match="prefill: an empty chunk; expected at least 1 id; found 0"):
        slot.prefilled([])
    with pytest.raises(RequestError, match="prefill: more ids than there is room for tap rows; expected at most 6; f"):
        slot.prefilled(range(7))
    assert (numbers(slot), slot.ids) == ((0, 0, 0, 0), [])
    slot.prefilled(range(4))
    with pytest.raises(RequestError, match=r"prefill: more ids .* expected at most 2; found 3"):
        slot.prefilled(range(3))
    with pytest.raises(RequestError, match=r"verify: more ids .* expected at most 2; found 3"):
        slot.verified(1, [2, 3], 0)
    for accepted in (-1, 2):
        with pytest.raises(RequestError, match=f"verify: more accepted than .* expected 0 … 1; found {accepted}"):
            slot.verified(1, [2], accepted)
    for rows in (-1, 5):
        with pytest.raises(RequestError, match=f"prefix: longer than .* expected 0 … 4; found {rows}"):
            slot.keep(rows)
    assert (numbers(slot), slot.ids) == ((4, 0, 0, 4), [0, 1, 2, 3])
    slot.verified(1, [2], 0)
    assert numbers(slot) == (5, 0, 0, 5)


# --- the table -------------------------------------------------------------------------------------------------------


def fill(table: SlotTable, ids: list[int], prefix: Prefix = NO_PREFIX) -> int:
    """A slot handed out, with `ids` in it."""
    slot = table.allocate(prefix)
    held = table.state(slot)
    held.prefilled(ids[held.start_pos :])
    return slot


def test_slots_are_handed_out_longest_free_first_and_scratch_never() -> None:
    table = SlotTable(3, 8, 16)
    assert (table.scratch, table.free_count) == (3, 3)
    assert [fill(table, [n]) for n in (1, 2, 3)] == [0, 1, 2]
    assert table.free_count == 0
    for slot in (1, 0, 2):
        table.free(slot)
    assert [table.allocate() for _ in range(3)] == [1, 0, 2]


def test_a_reused_slot_shows_nothing_of_the_last_request() -> None:
    table = SlotTable(1, 8, 16)
    held = table.state(fill(table, [1, 2, 3, 4]))
    held.seeded()
    table.free(0)
    fresh = table.state(table.allocate())
    assert (numbers(fresh), fresh.ids) == ((0, 0, 0, 0), [])
    # A late call for the request that had it changes nothing either.
    held.verified(9, [8], 1)
    assert (numbers(fresh), fresh.ids) == ((0, 0, 0, 0), [])
    fresh.prefilled([5, 6])
    assert fresh.draft_window() == DraftWindow(2, 2, 2)


def test_what_holds_nothing_goes_first() -> None:
    table = SlotTable(3, 8, 16)
    for n in range(3):
        fill(table, [n, 7])
    table.free(0)
    table.free(2)
    table.free(1, keep=False)
    assert table.prefix([1, 7, 8]) == NO_PREFIX
    assert [table.allocate() for _ in range(3)] == [1, 0, 2]


def test_the_longest_prefix_short_of_the_last_id() -> None:
    table = SlotTable(4, 8, 16)
    for ids in ([1, 2], [1, 2, 3, 4], [9]):
        fill(table, ids)
    assert table.prefix([1, 2, 3, 4, 5]) == Prefix(1, 4)
    assert table.prefix([1, 2, 3, 4]) == Prefix(1, 3)
    assert table.prefix([1, 5]) == Prefix(0, 1)  # both hold it; slot 0 holds less
    assert table.prefix([9]) == NO_PREFIX
    assert table.prefix([7, 8]) == NO_PREFIX
    table.free(1)
    assert table.prefix([1, 5]) == Prefix(1, 1)  # free goes before short


def test_a_prefix_stays_where_nothing_is_lost_by_it() -> None:
    table = SlotTable(2, 8, 16)
    a, b = fill(table, [1]), fill(table, [5, 6, 7])
    table.free(a)
    table.free(b)
    assert table.allocate(table.prefix([5, 6, 7, 8])) == b  # it holds no more, though `a` is next
    assert table.state(b).ids == [5, 6, 7]
    table.free(b)
    assert table.allocate(table.prefix([5, 6, 9])) == a  # it holds more: it stays for others
    assert (table.state(a).ids, numbers(table.state(a))) == ([5, 6], (2, 0, 0, 2))
    assert table.allocate(table.prefix([5, 6, 9])) == b  # the last one
    assert (table.state(b).ids, numbers(table.state(b))) == ([5, 6], (2, 0, 0, 2))


def test_a_prefix_of_a_live_slot_is_another_ones_copy() -> None:
    table = SlotTable(2, 8, 16)
    source = fill(table, [5, 6, 7])
    table.state(source).seeded()
    dest = table.allocate(table.prefix([5, 6, 8, 9]))
    assert (source, dest) == (0, 1)
    assert (table.state(dest).ids, numbers(table.state(dest))) == ([5, 6], (2, 0, 2, 0))
    table.state(dest).prefilled([8, 9])
    assert (table.state(source).ids, numbers(table.state(source))) == ([5, 6, 7], (3, 0, 3, 0))


def test_table_refusals() -> None:
    table = SlotTable(2, 8, 16)
    for slot in (-1, 0, 1, 2, 3):
        for call in (table.state, table.free):
            with pytest.raises(
                RequestError, match=f"slot: not in use; expected a slot handed out, of 0 … 1; found {slot}"
            ):
                call(slot)
    assert (table.allocate(), table.allocate()) == (0, 1)
    with pytest.raises(RequestError, match="slots: all are taken; expected a free slot; found 2 in use"):
        table.allocate()
    table.free(0)
    with pytest.raises(RequestError, match="not in use"):
        table.free(0)
    assert table.free_count == 1
    for sizes, name in (((0, 8, 8), "slots"), ((1, 0, 8), "window"), ((1, 8, 0), "tap_rows")):
        with pytest.raises(RequestError, match=f"{name}: too small; expected at least 1; found 0"):
            SlotTable(*sizes)


@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20), st.integers(0, 20))
@settings(max_examples=200, deadline=None)
def test_common_prefix_counts_like_a_loop(a: list[int], b: list[int], most: int) -> None:
    expected = 0
    while expected < min(most, len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(a, b, most) == expected


# --- at random -------------------------------------------------------------------------------------------------------


class Memory:
    """A slot's buffers: ids by position, ring rows as (position, the ids up to it), tap rows alike."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.taps: list[tuple[int, ...]] = []
        self.ring: dict[int, tuple[int, ...]] = {}

    def run(self, ids: list[int], start: int, tap_row: int) -> None:
        self.ids[start:] = ids
        self.taps[tap_row:] = [tuple(self.ids[: start + i + 1]) for i in range(len(ids))]

    def seed(self, start: int, count: int) -> None:
        """The tap rows must be those of these positions, for the ids that the slot now holds."""
        assert self.taps[:count] == [tuple(self.ids[: start + i + 1]) for i in range(count)]
        for i, tap in enumerate(self.taps[:count]):
            self.ring[(start + i) % WINDOW] = tap

    def visible(self, start: int) -> int:
        """Most ring rows that end at ``start-1`` without a gap."""
        rows = 0
        while rows < min(WINDOW, start):
            position = start - 1 - rows
            if self.ring.get(position % WINDOW) != tuple(self.ids[: position + 1]):
                break
            rows += 1
        return rows


class SlotMachine(RuleBasedStateMachine):
    """Chunks, rounds, seeding, gaps and hand-outs in any order, on buffers that are never cleared.

    Ids are few, so that prefixes are shared; what a slot then really shows may be more than is counted (the last
    request's rows are right by chance, or lie before a gap), but never less.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(SLOTS, WINDOW, TAP_ROWS)
        self.memory = [Memory() for _ in range(SLOTS)]
        self.live: set[int] = set()

    def pick(self, data: st.DataObject) -> tuple[SlotState, Memory]:
        slot = data.draw(st.sampled_from(sorted(self.live)))
        return self.table.state(slot), self.memory[slot]

    @precondition(lambda self: len(self.live) < SLOTS)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def allocate(self, prompt: list[int]) -> None:
        prefix = self.table.prefix(prompt)
        held = {slot: self.memory[slot].ids for slot in range(SLOTS)}
        slot = self.table.allocate(prefix)
        assert slot not in self.live | {self.table.scratch}
        self.live.add(slot)
        state = self.table.state(slot)
        assert state.ids == prompt[: prefix.rows]
        if prefix.source is not None:
            source, memory = self.memory[prefix.source], self.memory[slot]
            assert held[prefix.source][: prefix.rows] == prompt[: prefix.rows]
            memory.ids = source.ids[: state.start_pos]
            memory.taps = source.taps[: state.pending]
            seeded = range(max(state.first_seeded, state.seeded_until - WINDOW), state.seeded_until)
            memory.ring |= {position % WINDOW: source.ring[position % WINDOW] for position in seeded}

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def free(self, data: st.DataObject, keep: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.live)))
        self.table.free(slot, keep=keep)
        self.live.discard(slot)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), min_size=1, max_size=TAP_ROWS))
    def prefill(self, data: st.DataObject, ids: list[int]) -> None:
        state, memory = self.pick(data)
        ids = ids[: state.tap_room]
        if ids:
            memory.run(ids, state.start_pos, state.tap_row)
            state.prefilled(ids)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def round(self, data: st.DataObject, ids: list[int]) -> None:
        state, memory = self.pick(data)
        if state.start_pos and len(ids) <= state.tap_room:
            memory.run(ids, state.start_pos, state.tap_row)
            state.verified(ids[0], ids[1:], data.draw(st.integers(0, len(ids) - 1)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def seed(self, data: st.DataObject) -> None:
        state, memory = self.pick(data)
        window = state.seed_window()
        memory.seed(window.start, window.count)
        state.seeded()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def draft(self, data: st.DataObject) -> None:
        state, memory = self.pick(data)
        if state.start_pos:
            window = state.draft_window()
            memory.seed(window.start_pos - window.new_len, window.new_len)
            assert window.new_len <= window.start_pos
            assert min(window.new_len, WINDOW) <= window.valid_len <= memory.visible(window.start_pos)
            state.seeded()
            # A draft that is made again has nothing more to write, and sees the same.
            assert state.draft_window() == DraftWindow(window.start_pos, 0, window.valid_len)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.pick(data)[0].drop_taps()

    @invariant()
    def consistent(self) -> None:
        assert self.table.free_count == SLOTS - len(self.live)
        for slot in self.live:
            s = self.table.state(slot)
            assert 0 <= s.first_seeded <= s.seeded_until <= s.start_pos - s.pending <= s.start_pos
            assert s.pending == s.tap_row == TAP_ROWS - s.tap_room <= TAP_ROWS


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@given(st.integers(1, 12), st.integers(1, 40), st.lists(st.integers(1, 14), min_size=1, max_size=6), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_visible_rows_do_not_depend_on_the_chunks(window: int, prompt: int, chunks: list[int], dropped: int) -> None:
    """``min(W, start_pos - first seeded)``, where tap rows before the `dropped`-th id, cut to whole chunks, are let
    go."""
    slot, first, at = SlotState(window, 14), 0, 0
    for chunk in chunks * prompt:
        count = min(chunk, prompt - at)
        if not count:
            break
        slot.prefilled(range(at, at + count))
        at += count
        if at <= dropped:
            slot.drop_taps()
            first = at
        else:
            slot.seeded()
    assert slot.draft_window() == DraftWindow(prompt, 0, min(window, prompt - first))


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from(("wait", "seed", "drop"))), min_size=1, max_size=12),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_what_a_draft_would_see_after_keeping_a_prefix(
    window: int, chunks: list[tuple[int, str]], data: st.DataObject
) -> None:
    slot = SlotState(window, 72)
    for count, then in chunks:
        slot.prefilled(range(count))
        if then == "seed":
            slot.seeded()
        elif then == "drop":
            slot.drop_taps()
    rows = data.draw(st.integers(1, slot.start_pos))
    kept = slot.copy()
    kept.keep(rows)
    seen = kept.draft_window().valid_len
    assert max(slot.visible_from(rows), rows - window) == rows - seen


def test_a_prefix_with_its_whole_ring() -> None:
    """W = 8: slot 0 holds 20 ids whose ring begins at 12, slot 1 the first 10 of them with a ring from 2."""
    table = SlotTable(3, 8, 32)
    ids = list(range(20))
    for slot, count in ((0, 20), (1, 10)):
        assert table.allocate() == slot
        table.state(slot).prefilled(ids[:count])
        table.state(slot).seeded()
    assert table.prefix([*ids, 99]) == table.prefix([*ids, 99], whole_ring=True) == Prefix(0, 20)
    # A draft at 16 sees from 8 on: slot 0 has nothing before 12 any more, slot 1 has all that the rest doesn't bring.
    prompt = [*ids[:14], 98, 99]
    assert table.prefix(prompt) == Prefix(0, 14)
    assert table.prefix(prompt, whole_ring=True) == Prefix(1, 10)
    # Tap rows that nobody drafts from leave no ring at all.
    table.state(1).prefilled([50, 51])
    table.state(1).drop_taps()
    assert table.prefix([*ids[:10], 50, 51, 99]) == Prefix(1, 12)
    assert table.prefix([*ids[:10], 50, 51, 99], whole_ring=True) == NO_PREFIX
