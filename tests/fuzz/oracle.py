"""What the engine should do, in plain lists: each request alone, and which positions each slot's ring shows."""

from __future__ import annotations

from collections.abc import Sequence

from tests.fuzz.memory import cell_after, token_after


class Mismatch(Exception):
    """The engine did otherwise than the oracle."""


def alone(
    prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int], max_seq_len: int
) -> tuple[list[int], str]:
    """The tokens of a request that has the target to itself, one after the other, and why it ended."""
    cells: list[int] = []
    for token in prompt:
        cells.append(cell_after(cells, token))
    tokens: list[int] = []
    for _ in range(min(max_new_tokens, max_seq_len - len(prompt))):
        tokens.append(token_after(cells[-1]))
        if tokens[-1] in stop_ids:
            return tokens, "stop"
        cells.append(cell_after(cells, tokens[-1]))
    return tokens, "length"


class Rings:
    """Which positions each slot's ring and tap rows hold, kept as lists from the calls alone.

    A call that runs ids from a position on makes all later ones void. A draft must be told of every row that is there
    without a gap, and none must be missing: the rows reach back W, or to the first that the slot held when its request
    came, if that is nearer.

    Attributes:
        wraps: how often a write has gone over a ring's end.
    """

    def __init__(self, slots: int, window: int) -> None:
        self.window = window
        self.wraps = 0
        self._run: list[list[int]] = [[] for _ in range(slots)]  # positions in the ring since the last gap
        self._taps: list[list[int]] = [[] for _ in range(slots)]
        self._first: list[int | None] = [None] * slots  # from here on nothing may be missing; None until the first call

    def admit(self, slot: int, source: int | None, rows: int) -> None:
        """A request gets `slot` and the first `rows` positions of `source`."""
        run, taps = ([], []) if source is None else (self._run[source], self._taps[source])
        self._run[slot] = [position for position in run if position < rows]
        self._taps[slot] = [position for position in taps if position < rows]
        self._first[slot] = None

    def target(self, slot: int, start: int, count: int, tap_row: int) -> None:
        self._void(slot, start)
        taps = self._taps[slot]
        if self._first[slot] is None:
            self._first[slot] = self._reach(slot, start)
        if tap_row == 0:
            taps.clear()
        elif tap_row != len(taps):
            raise Mismatch(f"tap rows of position {start} go to {tap_row}; {taps} wait")
        taps += range(start, start + count)

    def seed(self, slot: int, start: int, count: int) -> None:
        self._void(slot, start + count)
        self._take(slot, start, count)

    def draft(self, slot: int, start: int, new_len: int, valid_len: int) -> None:
        self._void(slot, start)
        self._take(slot, start - new_len, new_len)
        first = self._first[slot]
        held, due = start - self._reach(slot, start), min(self.window, start - (start if first is None else first))
        if not valid_len == held == due:
            raise Mismatch(f"a draft at {start} sees {valid_len} rows; {held} are there, {due} should be")

    def _void(self, slot: int, start: int) -> None:
        for positions in (self._run[slot], self._taps[slot]):
            while positions and positions[-1] >= start:
                positions.pop()

    def _reach(self, slot: int, end: int) -> int:
        """The first of the positions up to ``end-1`` that ring and tap rows hold without a gap; `end` for none."""
        for positions in (self._taps[slot], self._run[slot]):
            if positions and positions[-1] == end - 1:
                end = positions[0]
        return end

    def _take(self, slot: int, start: int, count: int) -> None:
        taps, run = self._taps[slot], self._run[slot]
        if taps != list(range(start, start + count)):
            raise Mismatch(f"tap rows {start} … {start + count - 1} are taken; {taps} wait")
        if not taps:
            return
        if run and run[-1] + 1 != start:
            run.clear()
        self.wraps += (start + count - 1) // self.window - max(start - 1, 0) // self.window
        run += taps
        del run[: -self.window]
        taps.clear()
