"""How many drafts each row of a round has drafted and verified: the seam for policies, and the plain one.

Whatever a policy decides, output stays what it is: the engine consults it only for rows where that is so (`Row`).
`runtime.adaptive` has the policy that an engine makes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.acceptance import Acceptance
from runtime.errors import RequestError
from runtime.verify import proposal_length


class Row:
    """What a policy may know of one row of a round.

    Rows of requests that draw with a seed of their own by rejection sampling never reach a policy: their tokens depend
    on the proposal lengths, which must then depend on nothing but the request itself. For other rows drawn by rejection
    sampling, keeping draft k may depend on confidences 0 … k alone (a later one depends on what draft k is, and a
    length chosen from it would bias the output): `read` tells the engine how far a policy looked.

    Attributes:
        cap: most drafts that the request can use now, ≥ 1.
        threshold: drafts are cut before the first confidence below it.
        acceptance: how the request's drafts have fared.
        backlog: tap rows that a seed call must move into the ring before it can draft, after rounds without drafts.
        drafted: how many were drafted this round, ≤ `cap`; 0 until then.
        read: how many confidences were looked at.
    """

    __slots__ = ("_logits", "acceptance", "backlog", "cap", "drafted", "read", "threshold")

    def __init__(self, cap: int, threshold: float, acceptance: Acceptance, backlog: int = 0) -> None:
        self.cap = cap
        self.threshold = threshold
        self.acceptance = acceptance
        self.backlog = backlog
        self.drafted = 0
        self.read = 0
        self._logits: NDArray[np.float32] | None = None

    def draft(self, drafted: int, confidence_logits: NDArray[np.float32] | None) -> None:
        """The draft call has run: `drafted` tokens, with confidence logits ``[≥ drafted]`` if there is a head."""
        self.drafted = drafted
        self._logits = confidence_logits

    def confidence(self, k: int) -> float:
        """The predicted probability that draft k is accepted given all before it were; 1 without a confidence head.

        Raises:
            RequestError: a draft that there isn't.
        """
        if not 0 <= k < self.drafted:
            raise RequestError("confidence", "no such draft", expected=f"0 … {self.drafted - 1}", found=k)
        self.read = max(self.read, k + 1)
        return 1.0 if self._logits is None else float(1 / (1 + np.exp(-np.float32(self._logits[k]))))

    def confident(self) -> int:
        """How many of the drafts come before the first confidence below `threshold`."""
        length = proposal_length(self._logits, self.threshold, self.drafted)
        if self.threshold > 0:
            self.read = max(self.read, min(length + 1, self.drafted))
        return length

    def check_causal(self, length: int) -> None:
        """Refuse a length that was chosen with a look at later confidences.

        Raises:
            RequestError: of which the policy's author should know.
        """
        if self.read > length + 1:
            raise RequestError(
                "policy",
                "a sampled row's length may depend only on the confidences of the drafts kept and of the next",
                expected=f"a look at {length + 1} confidences for length {length}",
                found=self.read,
                remedy="Decide draft by draft",
            )


@dataclass(frozen=True)
class Load:
    """The rest of a round: rows that the policy has no say in, the ids they verify, how many of them draft, and
    requests without a slot."""

    rows: int
    ids: int
    drafting: int
    waiting: int


@dataclass(frozen=True)
class Round:
    """How a round went: `rows`, of `ids` in all, verified in `verify` seconds; `drafting` rows drafted up to `drafts`
    tokens in `draft` seconds (0 rows: none did), after `seeded` tap rows had been moved into their rings in `seed`
    seconds; of each row that drafted, how many drafts were `proposed` to the target and `accepted`."""

    rows: int
    ids: int
    verify: float
    drafting: int
    drafts: int
    draft: float
    seeded: int
    seed: float
    proposed: Sequence[int]
    accepted: Sequence[int]


@dataclass(frozen=True)
class BreakEven:
    """Whether drafting pays at the present load.

    Of the last round: `rows` the policy decided on, and the most `drafts` a row that it chose (0: off). Of the best way
    to draft that it found, `expected` tokens of a row that drafts, and how many were `needed` to be as fast as without
    drafts (0 while times are unknown).
    """

    rows: int
    drafts: int
    expected: float
    needed: float


class DraftPolicy(Protocol):
    """Decides for all rows of a round together, so that it can weigh one against another."""

    def caps(self, rows: Sequence[Row], load: Load) -> Sequence[int]:
        """How many tokens to draft for each row, 0 … `Row.cap`. 0 leaves the row out of the draft call."""
        ...

    def lengths(self, rows: Sequence[Row], load: Load) -> Sequence[int]:
        """How many of its drafts each row that drafted has verified, 0 … `Row.drafted`."""
        ...

    def observe(self, round: Round) -> None:
        """A round has run."""
        ...

    def break_even(self) -> BreakEven | None:
        """What it makes of the present load, for `Engine.stats`; None for a policy that doesn't estimate."""
        ...


class StaticPolicy:
    """What each request allows: its cap, cut before the first confidence below its threshold."""

    def caps(self, rows: Sequence[Row], load: Load) -> Sequence[int]:
        return [row.cap for row in rows]

    def lengths(self, rows: Sequence[Row], load: Load) -> Sequence[int]:
        return [row.confident() for row in rows]

    def observe(self, round: Round) -> None:
        pass

    def break_even(self) -> BreakEven | None:
        return None
