"""How often drafts are accepted, position by position, with the past fading."""

from __future__ import annotations

from collections.abc import Sequence

FADE = 0.97
"""What a request's test counts for after another one at its position: about the last thirty matter."""

FADE_OF_ALL = 0.998
"""The same where the tests of all requests are counted together."""

REST = 0.99
"""What all tests count for after a round without drafts: an opinion from long ago is given up, and drafting tried
again."""

PRIOR_WEIGHT = 8.0
"""Tests of its own that a request's prior is worth."""

FIRST_GUESS, GUESS_WEIGHT = 0.75, 24.0
"""Share of accepted drafts before any was tested, and the tests that it is worth: high, so that drafting is tried for
longer than a bad beginning lasts."""


class Acceptance:
    """Draft j is tested in a round that proposes it and accepts all before it; its share is how often it stood."""

    __slots__ = ("_fade", "_hits", "_tests")

    def __init__(self, block_size: int, fade: float = FADE) -> None:
        self._fade = fade
        self._tests = [0.0] * block_size
        self._hits = [0.0] * block_size

    def note(self, proposed: int, accepted: int) -> None:
        """A round has accepted the first `accepted` of `proposed` drafts."""
        for j in range(min(proposed, accepted + 1)):
            self._tests[j] = self._tests[j] * self._fade + 1.0
            self._hits[j] = self._hits[j] * self._fade + (j < accepted)

    def rest(self) -> None:
        """A round went by without drafts."""
        for j in range(len(self._tests)):
            self._tests[j] *= REST
            self._hits[j] *= REST

    def shares(self) -> list[float]:
        """The share at each position, drawn to its neighbour before (the first, to a guess) where tests are few."""
        shares, before, weight = [], FIRST_GUESS, GUESS_WEIGHT
        for hits, tests in zip(self._hits, self._tests, strict=True):
            before = (hits + before * weight) / (tests + weight)
            shares.append(before)
            weight = PRIOR_WEIGHT
        return shares

    def gains(self, cap: int, prior: Sequence[float]) -> list[float]:
        """Expected accepted drafts of 0, 1 … `cap` proposed, ``cap + 1`` values; `prior` is the share at each position
        to which few tests of its own are drawn."""
        gains, reached = [0.0], 1.0
        for hits, tests, before in zip(self._hits[:cap], self._tests, prior, strict=False):
            reached *= (hits + before * PRIOR_WEIGHT) / (tests + PRIOR_WEIGHT)
            gains.append(gains[-1] + reached)
        return gains
