"""Seconds that calls take by their size, learnt from the calls that run."""

from __future__ import annotations

from bisect import bisect_left

PACE = 0.1
"""Weight of the newest call in the machine's pace."""

SMOOTHING = 0.03
"""Least weight of the newest time at its size; the first few weigh alike."""

OUTLIER = 1.3
"""A time counts for at most this many times what was expected: the machine may have been elsewhere."""

FADE = 0.999
"""What a time seen once is taken for after each call of another size: what looked dear long ago is tried again."""

BELIEF = 30
"""A time seen n times fades n times slower, up to this many."""

NEAR = 2
"""How many times a size its neighbour may be, for those between to be taken as on the line."""

RENEWED, FEW = 16, 4
"""Calls for which estimates are used again, unless a size was seen for one of its first few times."""

Size = tuple[int, ...]


class CostTable:
    """Times of calls of several kinds, by size: a tuple of positive numbers, as many for all sizes of a kind.

    A time is the product of its size's cost and the machine's pace, which drifts: neighbours come and go, clocks
    change. What is compared are costs, so that a size that was last seen in bad times isn't held against it.

    Of costs two things are taken for granted: more takes no less, and takes no more in proportion. So those that are
    known bound one that isn't from below, and that bound is the estimate: optimistic, so that what might pay is tried,
    and is known from then on. Between two known sizes that differ little, and in the last number alone, the estimate is
    on the line that joins them.
    """

    def __init__(self) -> None:
        self._costs: dict[str, dict[Size, float]] = {}
        self._times: dict[tuple[str, Size], int] = {}
        self._seen: dict[tuple[str, Size], int] = {}
        self._bounds: dict[str, tuple[Bounds, int]] = {}
        self._calls = 0
        self._pace = 1.0

    def observe(self, kind: str, size: Size, seconds: float) -> None:
        self._calls += 1
        costs = self._costs.setdefault(kind, {})
        known = costs.get(size)
        times = self._times.get((kind, size), 0)
        if known is None:
            costs[size] = seconds / self._pace
        elif times == 1:
            # The first call of a size may have found everything cold, which says nothing of those to come.
            costs[size] = min(known, seconds / self._pace)
        else:
            seconds = min(seconds, OUTLIER * known * self._pace)
            self._pace += PACE * (seconds / known - self._pace)
            weight = max(SMOOTHING, 1 / (1 + times))
            costs[size] = known + weight * (seconds / self._pace - known)
        if times < FEW:
            self._bounds.pop(kind, None)
        self._times[kind, size] = times + 1
        self._seen[kind, size] = self._calls

    def bounds(self, kind: str) -> Bounds:
        """What calls of this kind may cost at least, now or some calls ago."""
        made, calls = self._bounds.get(kind, (None, 0))
        if made is None or self._calls - calls >= RENEWED:
            made = self._estimate(kind)
            self._bounds[kind] = made, self._calls
        return made

    def _estimate(self, kind: str) -> Bounds:
        faded = {}
        for size, cost in self._costs.get(kind, {}).items():
            age = (self._calls - self._seen[kind, size]) / min(self._times[kind, size], BELIEF)
            faded[size] = cost * FADE**age
        return Bounds(faded)


class Bounds:
    """Estimates from known costs, each made once."""

    def __init__(self, costs: dict[Size, float]) -> None:
        self._known = sorted(costs.items())
        self._estimates = costs

    def __call__(self, size: Size) -> float:
        """Least cost of a call of this size, in seconds at the pace of the first calls; 0 when nothing is known."""
        estimate = self._estimates.get(size)
        if estimate is None:
            bound = max((cost * _part(size, other) for other, cost in self._known), default=0.0)
            estimate = self._estimates[size] = max(bound, self._between(size))
        return estimate

    def _between(self, size: Size) -> float:
        """On the line between the nearest known sizes below and above; 0 where there aren't both near enough."""
        line = [(other[-1], cost) for other, cost in self._known if other[:-1] == size[:-1]]
        at = bisect_left(line, (size[-1], 0.0))
        if not 0 < at < len(line):
            return 0.0
        (low, below), (high, above) = line[at - 1], line[at]
        if high > NEAR * low:
            return 0.0
        return below + (above - below) * (size[-1] - low) / (high - low)


def _part(size: Size, other: Size) -> float:
    """Share of the cost of `other` that `size` has at least."""
    part = 1.0
    for mine, its in zip(size, other, strict=True):
        if mine < its:
            part *= mine / its
    return part
