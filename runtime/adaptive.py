"""Drafting where it pays, by what it has cost and brought so far.

Speculation pays where a row commits more tokens than its share of the round costs. Both sides change, acceptance with
the text and costs with the load, so `AdaptivePolicy` measures them all the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from runtime.acceptance import FADE_OF_ALL, Acceptance
from runtime.costs import Bounds, CostTable
from runtime.policy import BreakEven, Load, Round, Row

MARGIN = 1.03
"""How much faster the best way to draft must seem to be taken: the best of many estimates flatters."""

CATCHING_UP = 0.25
"""Share of a seed call that a round is charged with: what the ring takes in serves the rounds to come as well."""

PATIENCE = (2, 32)
"""Rounds for which a decision not to draft holds while the rows need the same batch: the first one, and at most. Each
that follows on another holds twice as long, after one round that puts it to the test in the least costly way."""

TEST_SHARE = 0.012
"""What tests may cost: a decision holds no longer than makes the expected loss of one this share of the rounds."""


class _Plan(NamedTuple):
    """A way to draft: at most `drafts` for the first `rows` of those that gain most by them; the tokens that come of
    the round, and how long it takes."""

    drafts: int
    rows: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else math.inf


class AdaptivePolicy:
    """As many drafts as pay.

    The rate of a round is its expected tokens, from how each request's past drafts have fared, over the time of a
    verify call of that many ids and of the draft call, as past rounds took. Compared are at most s drafts for the k
    most promising rows, for every s and k, and none at all: then drafting is off, for some rounds. Times not yet seen
    are taken for the least they can be, and what was seen long ago fades: so each choice is tried, and tried again.

    Args:
        batches: the fixed batches of the engines, ascending: a call costs what its batch costs.
        block_size: B.
    """

    def __init__(self, batches: Sequence[int], block_size: int) -> None:
        self._batches = tuple(batches)
        self._everyone = Acceptance(block_size, FADE_OF_ALL)
        self._costs = CostTable()
        self._break_even: BreakEven | None = None
        self._patience: dict[int, int] = {}  # rounds that the next decision not to draft holds, by batch
        self._tried: set[int] = set()  # batches whose last decision was put to the test since
        self._off = (0, 0, 0)  # rounds that the last one still holds, for which batch, and of how many drafts it was

    def caps(self, rows: Sequence[Row], load: Load) -> Sequence[int]:
        count = len(rows) + load.rows
        batch, most = self._batch(count), max(row.cap for row in rows)
        left, batch_then, most_then = self._off
        # That one draft doesn't pay, near the end of an answer, says nothing of four.
        if left and batch_then == batch and most <= most_then:
            self._off = (left - 1, batch, most_then)
            return [0] * len(rows)
        prior = self._everyone.shares()
        gains = [row.acceptance.gains(row.cap, prior) for row in rows]
        bounds = {kind: self._costs.bounds(kind) for kind in ("verify", "draft", "seed")}
        seconds = bounds["verify"]((batch, _ids(load.ids + len(rows))))
        if load.drafting:
            seconds += bounds["draft"]((self._batch(load.drafting), 1))
        plain = _Plan(0, 0, float(count), seconds)
        best = max(self._plans(rows, gains, load, bounds, batch), key=lambda plan: plan.rate)
        caps = [0] * len(rows)
        pays = best.rate >= MARGIN * plain.rate
        if pays or self._due(batch):
            for i in _most_promising(gains, best.drafts)[: best.rows]:
                caps[i] = min(best.drafts, rows[i].cap)
        if pays:
            self._patience.pop(batch, None)
        elif not any(caps):
            loss = 1 - best.rate / plain.rate if plain.rate < math.inf else 1.0
            rounds = self._patience.get(batch, PATIENCE[0])
            rounds = min(rounds, max(math.ceil(loss / TEST_SHARE), PATIENCE[0]))
            self._patience[batch] = min(2 * rounds, PATIENCE[1])
            self._off = (rounds - 1, batch, most)
        self._break_even = BreakEven(
            rows=len(rows),
            drafts=max(caps),
            expected=1 + (best.tokens - plain.tokens) / best.rows,
            needed=1 + (best.seconds / plain.seconds - 1) * plain.tokens / best.rows if plain.seconds else 0.0,
        )
        return caps

    def _due(self, batch: int) -> bool:
        """Whether a decision not to draft has held long enough for a round of drafts to see if it is still right."""
        if batch not in self._patience or batch in self._tried:
            self._tried.discard(batch)
            return False
        self._tried.add(batch)
        return True

    def lengths(self, rows: Sequence[Row], load: Load) -> Sequence[int]:
        return [row.confident() for row in rows]

    def observe(self, round: Round) -> None:
        self._costs.observe("verify", (self._batch(round.rows), _ids(round.ids)), round.verify)
        if round.seeded:
            self._costs.observe("seed", (_ids(round.seeded),), round.seed)
        if round.drafting:
            self._costs.observe("draft", (self._batch(round.drafting), round.drafts), round.draft)
        for proposed, accepted in zip(round.proposed, round.accepted, strict=True):
            self._everyone.note(proposed, accepted)

    def break_even(self) -> BreakEven | None:
        return self._break_even

    def _plans(
        self,
        rows: Sequence[Row],
        gains: Sequence[Sequence[float]],
        load: Load,
        bounds: Mapping[str, Bounds],
        batch: int,
    ) -> Iterator[_Plan]:
        """At most 1, 2, … drafts, for the most promising row, for the two most promising ones, …; all rows are verified
        at `batch`."""
        verify, draft, seed = (bounds[kind] for kind in ("verify", "draft", "seed"))
        for drafts in range(1, max(map(len, gains))):
            tokens, ids, backlog = float(load.rows + len(gains)), load.ids + len(gains), 0
            for count, i in enumerate(_most_promising(gains, drafts), start=1):
                cap = min(drafts, len(gains[i]) - 1)
                tokens, ids, backlog = tokens + gains[i][cap], ids + cap, backlog + rows[i].backlog
                seconds = CATCHING_UP * seed((_ids(backlog),)) if backlog else 0.0
                seconds += verify((batch, _ids(ids))) + draft((self._batch(load.drafting + count), drafts))
                yield _Plan(drafts, count, tokens, seconds)

    def _batch(self, rows: int) -> int:
        return next((batch for batch in self._batches if batch >= rows), rows)


def _most_promising(gains: Sequence[Sequence[float]], drafts: int) -> list[int]:
    """Indices of the rows, those that gain most by so many drafts first."""
    return sorted(range(len(gains)), key=lambda i: -gains[i][min(drafts, len(gains[i]) - 1)])


def _ids(ids: int) -> int:
    """The size of a call by its ids. Some eighth apart is one size: each is then seen often enough to be known."""
    step = 1 if ids < 16 else 2 ** (ids.bit_length() - 4)
    return -(-ids // step) * step
