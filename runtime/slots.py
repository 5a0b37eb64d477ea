"""Slots and what they hold: the bookkeeping behind `start`, `new_len`, `valid_len` and `tap_row` of every call.

Model-free. A slot is an index into every state buffer (target cache, drafter ring, tap rows); one more,
`SlotTable.scratch`, takes padding rows. The ring keeps K/V of position p in row ``p mod W`` and never says which
positions it really holds: that is `SlotState`, and a wrong count there shows the drafter rows of another request or of
a rejected token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import RequestError


@dataclass(frozen=True)
class DraftWindow:
    """Arguments of one row of a draft call: the bonus token's position, how many tap rows are written to the ring first
    (positions ``start_pos-new_len … start_pos-1``), and how many ring rows are visible after that write."""

    start_pos: int
    new_len: int
    valid_len: int


@dataclass(frozen=True)
class SeedWindow:
    """Arguments of one row of a seed call: `count` tap rows that belong to positions ``start …``."""

    start: int
    count: int


class SlotState:
    """What one slot holds of one request.

    - `ids`: the token of every row of the target's cache; once the prompt is in, all committed tokens but the bonus.
    - `first_seeded … seeded_until-1`: positions seeded into the ring, contiguous; of these the last W are still there.
    - `pending`: tap rows that the ring has not taken in, positions ``start_pos-pending … start_pos-1``.

    Invariant: ``0 ≤ first_seeded ≤ seeded_until ≤ start_pos-pending ≤ start_pos``, ``pending ≤ tap_rows``. Visible to a
    draft are the rows up to start_pos-1 without a gap; where tap rows were dropped the count restarts after them.
    """

    __slots__ = ("first_seeded", "ids", "pending", "seeded_until", "tap_rows", "window")

    def __init__(self, window: int, tap_rows: int) -> None:
        self.window = window
        self.tap_rows = tap_rows
        self.ids: list[int] = []
        self.first_seeded = 0
        self.seeded_until = 0
        self.pending = 0

    @property
    def start_pos(self) -> int:
        """Rows of the target's cache; once the prompt is in, the position of the bonus token."""
        return len(self.ids)

    @property
    def tap_row(self) -> int:
        """Where the tap rows of the next target call go: after those that wait."""
        return self.pending

    @property
    def tap_room(self) -> int:
        """Most ids that the next target call may run without losing a tap row; `drop_taps` or `seeded` make room."""
        return self.tap_rows - self.pending

    def drop_taps(self) -> None:
        """Let the waiting tap rows go: nobody will draft from them. A draft then sees only what comes after them."""
        self.pending = 0

    def prefilled(self, ids: Sequence[int]) -> None:
        """A prefill call has run the next `ids` of the prompt; their tap rows wait."""
        if not ids:
            raise RequestError("prefill", "an empty chunk", expected="at least 1 id", found=0)
        self._ran("prefill", len(ids))
        self.ids += ids
        self.pending += len(ids)

    def verified(self, bonus: int, drafts: Sequence[int], accepted: int) -> None:
        """A verify call has run the bonus and the drafts, of which the first `accepted` stay; their tap rows wait, and
        what came after them is overwritten by the next call."""
        self._require_bonus("verify")
        if not 0 <= accepted <= len(drafts):
            expected = f"0 … {len(drafts)}"
            raise RequestError("verify", "more accepted than was drafted", expected=expected, found=accepted)
        self._ran("verify", 1 + len(drafts))
        self.ids += (bonus, *drafts[:accepted])
        self.pending += 1 + accepted

    def seed_window(self) -> SeedWindow:
        """The arguments of a seed call now, for all tap rows that wait; changes nothing."""
        return SeedWindow(self.start_pos - self.pending, self.pending)

    def draft_window(self) -> DraftWindow:
        """The arguments of a draft call now; changes nothing. `new_len` may exceed the B+1 that a draft takes: seed
        first then.

        Raises:
            RequestError: no bonus token yet (``start_pos ≤ 0``).
        """
        self._require_bonus("draft")
        waiting = self.start_pos - self.pending
        first = self.first_seeded if self.seeded_until == waiting else waiting
        return DraftWindow(self.start_pos, self.pending, min(self.window, self.start_pos - first))

    def seeded(self) -> None:
        """A seed or draft call has moved the waiting tap rows into the ring."""
        start = self.start_pos - self.pending
        if start > self.seeded_until:
            self.first_seeded = start
        self.seeded_until = self.start_pos
        self.pending = 0

    def keep(self, rows: int) -> None:
        """Cut back to the first `rows` positions, which another request shares: later ones, in every buffer, count as
        never written.

        The rows that later positions have overwritten in the ring are gone, so what stays of it begins W before the
        newest that was seeded.
        """
        if not 0 <= rows <= self.start_pos:
            raise RequestError(
                "prefix", "longer than what the slot holds", expected=f"0 … {self.start_pos}", found=rows
            )
        waiting = self.start_pos - self.pending
        first = max(self.first_seeded, self.seeded_until - self.window)
        self.pending = max(0, rows - waiting)
        del self.ids[rows:]
        self.seeded_until = min(self.seeded_until, rows)
        self.first_seeded = min(first, self.seeded_until)

    def visible_from(self, rows: int) -> int:
        """The first position that a draft at `rows` would see after ``keep(rows)``; `rows` when it would see none."""
        waiting = self.start_pos - self.pending
        if rows > waiting and self.seeded_until < waiting:
            return waiting
        if rows > self.seeded_until and rows <= waiting:
            return rows
        return min(max(self.first_seeded, self.seeded_until - self.window), rows)

    def copy(self) -> SlotState:
        other = SlotState(self.window, self.tap_rows)
        other.ids = list(self.ids)
        other.first_seeded, other.seeded_until, other.pending = self.first_seeded, self.seeded_until, self.pending
        return other

    def _ran(self, call: str, ids: int) -> None:
        if ids > self.tap_room:
            raise RequestError(
                call, "more ids than there is room for tap rows", expected=f"at most {self.tap_room}", found=ids
            )

    def _require_bonus(self, call: str) -> None:
        if self.start_pos <= 0:
            raise RequestError(
                call,
                "no bonus token yet",
                expected="start_pos > 0",
                found=self.start_pos,
                remedy="Prefill the prompt first",
            )


@dataclass(frozen=True)
class Prefix:
    """The longest prefix of a prompt that a slot holds: its first `rows` ids; `source` None and 0 rows without one."""

    source: int | None
    rows: int


NO_PREFIX = Prefix(None, 0)


class SlotTable:
    """Hands out slots ``0 … slots-1``; slot `scratch` (= `slots`) is never handed out.

    A slot that was freed keeps what it holds until it is handed out again, the longest free first, so that a later
    request with the same beginning need not compute it again. A `SlotState` is made anew at each hand-out, so a late
    call for a finished request can't touch its successor.
    """

    def __init__(self, slots: int, window: int, tap_rows: int) -> None:
        for name, value in (("slots", slots), ("window", window), ("tap_rows", tap_rows)):
            if value < 1:
                raise RequestError(name, "too small", expected="at least 1", found=value)
        self.slots = slots
        self.window = window
        self.tap_rows = tap_rows
        self._states: list[SlotState] = [SlotState(window, tap_rows) for _ in range(slots)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(slots))

    @property
    def scratch(self) -> int:
        """The slot of padding rows and of requests that have none."""
        return self.slots

    @property
    def free_count(self) -> int:
        return len(self._free)

    def prefix(self, prompt: list[int], *, whole_ring: bool = False) -> Prefix:
        """The longest prefix of `prompt` that any slot holds, in use or free; short of its last id, on which the target
        must run for the first token. Of equals one that is free, and whose holding is shortest, comes first.

        With `whole_ring`, only one whose ring rows are all there: a draft after the prompt then sees what it would had
        all of it been prefilled.
        """
        best, order = NO_PREFIX, (0, False, 0)
        for slot, state in enumerate(self._states):
            held = state.ids
            rows = common_prefix(prompt, held, len(prompt) - 1)
            if whole_ring and state.visible_from(rows) > max(0, len(prompt) - self.window):
                continue
            if rows and (rows, slot in self._free, -len(held)) > order:
                best, order = Prefix(slot, rows), (rows, slot in self._free, -len(held))
        return best

    def allocate(self, prefix: Prefix = NO_PREFIX) -> int:
        """Hand out a slot whose state holds `prefix`, and nothing else.

        That is the very slot that holds it where nothing is lost by it (it is free, and holds no more or is next
        anyway), and else another, to which the caller copies what `SlotState` of the source says.

        Raises:
            RequestError: none is free (see `free_count`).
        """
        if not self._free:
            raise RequestError("slots", "all are taken", expected="a free slot", found=f"{self.slots} in use")
        slot = next(iter(self._free))
        state = SlotState(self.window, self.tap_rows)
        if prefix.source is not None:
            source = self._states[prefix.source]
            if prefix.source in self._free and source.start_pos == prefix.rows:
                slot = prefix.source
            state = source.copy()
            state.keep(prefix.rows)
        del self._free[slot]
        self._states[slot] = state
        return slot

    def free(self, slot: int, *, keep: bool = True) -> None:
        """Take `slot` back. What it holds may serve a later prompt, unless `keep` is False: after an error nobody knows
        what it holds.

        Raises:
            RequestError: the slot isn't in use, or is scratch.
        """
        self.state(slot)
        if not keep:
            self._states[slot] = SlotState(self.window, self.tap_rows)
        self._free[slot] = None
        # What holds nothing goes first.
        if not self._states[slot].ids:
            self._free.move_to_end(slot, last=False)

    def state(self, slot: int) -> SlotState:
        """The bookkeeping of a slot in use.

        Raises:
            RequestError: the slot isn't in use, or is scratch.
        """
        if not 0 <= slot < self.slots or slot in self._free:
            raise RequestError("slot", "not in use", expected=f"a slot handed out, of 0 … {self.slots - 1}", found=slot)
        return self._states[slot]


def common_prefix(a: list[int], b: list[int], most: int) -> int:
    """How many first items, at most `most`, two lists have in common. Halving, because comparing slices runs in C."""
    low, high = 0, min(most, len(a), len(b))
    if not high or a[0] != b[0]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
