"""Slots and what their rings hold: the bookkeeping behind `start`, `new_len` and `valid_len` of every call.

Model-free. A slot is an index into every state buffer (target K/V, drafter ring, taps); one more, `SlotTable.scratch`,
takes padding rows. The ring keeps K/V of position p in row ``p mod W`` and never says which positions it really holds:
that is `RingState`, and a wrong count there shows the drafter rows of another request or of a rejected token.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from runtime.errors import RequestError


@dataclass(frozen=True)
class DraftWindow:
    """Arguments of one row of a draft call: the bonus token's position, how many tap rows of the last verify are
    written to the ring first (positions ``start_pos-new_len … start_pos-1``), and how many ring rows are visible after
    that write."""

    start_pos: int
    new_len: int
    valid_len: int


class RingState:
    """Which positions of one request are in the target's cache, in its tap rows and in its ring.

    - `start_pos`: committed tokens in the target's cache; once the prompt is in, the position of the bonus token.
    - `first_seeded … seeded_until-1`: positions seeded into the ring, contiguous; of these the last W are still there.
    - `pending`: tap rows of the last verify, positions ``start_pos-pending … start_pos-1``, not yet in the ring.

    Invariant: ``0 ≤ first_seeded ≤ seeded_until ≤ start_pos-pending ≤ start_pos``. Visible to a draft are the rows up
    to start_pos-1 without a gap; where rows are missing (drafting was off, or a chunk wasn't seeded) the count restarts
    after them.
    """

    __slots__ = ("first_seeded", "pending", "seeded_until", "start_pos", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.start_pos = 0
        self.first_seeded = 0
        self.seeded_until = 0
        self.pending = 0

    def prefilled(self, start: int, count: int) -> None:
        """A prefill call has run `count` prompt ids at ``start …``; their taps are in the session, for `seeded`."""
        if start != self.start_pos:
            raise RequestError(
                "prefill",
                "a chunk goes on where the last one ended",
                expected=f"start {self.start_pos}",
                found=f"start {start}",
            )
        if count < 1:
            raise RequestError("prefill", "an empty chunk", expected="at least 1 id", found=count)
        self.start_pos = start + count
        self.pending = 0

    def seeded(self, start: int, count: int) -> None:
        """A seed call has written the ring rows of the chunk ``start … start+count-1`` that was prefilled last (of a
        chunk longer than W, the last W rows). Not calling it for a chunk is allowed: the ring then begins after that
        chunk."""
        if count < 1 or start < 0 or start + count != self.start_pos or self.pending:
            raise RequestError(
                "seed",
                "not the chunk that was prefilled last",
                expected=f"positions that end before {self.start_pos}",
                found=f"{start} … {start + count - 1}",
            )
        self._write(start, self.start_pos)

    def verified(self, drafts: int, accepted: int) -> None:
        """A verify call has run the bonus and `drafts` drafts, of which `accepted` stay: positions up to
        start_pos+accepted are committed, and their tap rows are pending. Rows that were pending before are overwritten,
        and lost unless drafted."""
        self._require_bonus("verify")
        if not 0 <= accepted <= drafts:
            raise RequestError("verify", "more accepted than was drafted", expected=f"0 … {drafts}", found=accepted)
        self.pending = accepted + 1
        self.start_pos += self.pending

    def draft_window(self) -> DraftWindow:
        """Return the arguments of a draft call now; changes nothing.

        Raises:
            RequestError: no bonus token yet (``start_pos ≤ 0``).
        """
        self._require_bonus("draft")
        first = (
            self.first_seeded if self.seeded_until == self.start_pos - self.pending else self.start_pos - self.pending
        )
        return DraftWindow(self.start_pos, self.pending, min(self.window, self.start_pos - first))

    def drafted(self) -> None:
        """The draft call of `draft_window` has run: the pending tap rows are in the ring."""
        self._require_bonus("draft")
        self._write(self.start_pos - self.pending, self.start_pos)
        self.pending = 0

    def _write(self, start: int, end: int) -> None:
        """Positions ``start … end-1`` are in the ring from now on; older ones count only if they join on."""
        if start > self.seeded_until:
            self.first_seeded = start
        self.seeded_until = end

    def _require_bonus(self, call: str) -> None:
        if self.start_pos <= 0:
            raise RequestError(
                call,
                "no bonus token yet",
                expected="start_pos > 0",
                found=self.start_pos,
                remedy="Prefill the prompt first",
            )


class SlotTable:
    """Hands out slots ``0 … slots-1``, each with a fresh `RingState`; slot `scratch` (= `slots`) is never handed out.

    The lowest free slot goes first. A `RingState` is made anew at each hand-out, so a late call for a finished request
    can't touch its successor.
    """

    def __init__(self, slots: int, window: int) -> None:
        for name, value in (("slots", slots), ("window", window)):
            if value < 1:
                raise RequestError(name, "too small", expected="at least 1", found=value)
        self.slots = slots
        self.window = window
        self._free = list(range(slots))
        self._states: list[RingState | None] = [None] * slots

    @property
    def scratch(self) -> int:
        """The slot of padding rows and of requests that have none."""
        return self.slots

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Hand out a slot with nothing in it.

        Raises:
            RequestError: none is free (see `free_count`).
        """
        if not self._free:
            raise RequestError("slots", "all are taken", expected="a free slot", found=f"{self.slots} in use")
        slot = heapq.heappop(self._free)
        self._states[slot] = RingState(self.window)
        return slot

    def free(self, slot: int) -> None:
        """Take `slot` back. Nothing is cleared: the next request starts with ``valid_len`` 0, which hides every row.

        Raises:
            RequestError: the slot isn't in use, or is scratch.
        """
        self.ring(slot)
        self._states[slot] = None
        heapq.heappush(self._free, slot)

    def ring(self, slot: int) -> RingState:
        """Return the bookkeeping of a slot in use.

        Raises:
            RequestError: the slot isn't in use, or is scratch.
        """
        state = self._states[slot] if 0 <= slot < self.slots else None
        if state is None:
            raise RequestError("slot", "not in use", expected=f"a slot handed out, of 0 … {self.slots - 1}", found=slot)
        return state
