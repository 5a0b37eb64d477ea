"""The adaptive policy on a simulated machine: does it find what pays?"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from runtime.acceptance import Acceptance
from runtime.adaptive import PATIENCE, AdaptivePolicy
from runtime.policy import BreakEven, Load, Round, Row

BLOCK = 7
NOBODY = Load(0, 0, 0, 0)


def row(cap: int = 4, backlog: int = 0) -> Row:
    return Row(cap, 0.0, Acceptance(BLOCK), backlog)


class Machine:
    """Times as a CPU's: a call costs its weights until its products do; `pace` slows everything down."""

    def __init__(self, pace: Callable[[int], float] = lambda _: 1.0) -> None:
        self.pace = pace
        self.calls = 0

    def verify(self, ids: int) -> float:
        self.calls += 1
        return self.pace(self.calls) * max(0.020 + 0.001 * ids, 0.0025 * ids)

    def draft(self, batch: int, drafts: int) -> float:
        self.calls += 1
        return self.pace(self.calls) * (0.006 + 0.0012 * batch + 0.0004 * batch * drafts)


def rate(policy: AdaptivePolicy | None, fixed: int, shares: list[float], machine: Machine, rounds: int = 500) -> float:
    """Tokens a second of rows whose drafts are each accepted with the row's share, after a hundred rounds."""
    random.seed(1)
    rows = [row() for _ in shares]
    tokens, seconds = 0, 0.0
    for r in range(rounds):
        caps = [fixed] * len(rows) if policy is None else list(policy.caps(rows, NOBODY))
        drafting = sum(cap > 0 for cap in caps)
        batch = next(b for b in (1, 2, 4, 8, 16) if b >= max(drafting, 1))
        draft = machine.draft(batch, max(caps)) if drafting else 0.0
        ids = len(rows) + sum(caps)
        verify = machine.verify(ids)
        accepted = []
        for share, cap in zip(shares, caps, strict=True):
            accepted.append(next((j for j in range(cap) if random.random() >= share), cap))
        for shown, cap, stood in zip(rows, caps, accepted, strict=True):
            if cap:
                shown.acceptance.note(cap, stood)
            else:
                shown.acceptance.rest()
        if policy is not None:
            proposed = [(cap, stood) for cap, stood in zip(caps, accepted, strict=True) if cap]
            policy.observe(
                Round(
                    len(rows),
                    ids,
                    verify,
                    drafting,
                    max(caps),
                    draft,
                    0,
                    0.0,
                    [c for c, _ in proposed],
                    [a for _, a in proposed],
                )
            )
        if r >= 100:
            tokens += len(rows) + sum(accepted)
            seconds += draft + verify
    return tokens / seconds


def drifting(calls: int) -> float:
    """Slower by half and faster again, within some hundred calls, and a hiccup now and then."""
    return (1.25 + 0.25 * math.sin(calls / 60)) * (6.0 if calls % 47 == 0 else 1.0)


@pytest.mark.parametrize("pace", [lambda _: 1.0, drifting], ids=["steady", "drifting"])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.6, 0.75, 0.9])
def test_adaptive_is_as_fast_as_the_better_of_on_and_off(rows: int, share: float, pace: Callable[[int], float]) -> None:
    """All on a clock of its own: nothing here is timed."""
    found = rate(AdaptivePolicy((1, 2, 4, 8, 16), BLOCK), 0, [share] * rows, Machine(pace))
    off, on = (rate(None, fixed, [share] * rows, Machine(pace)) for fixed in (0, 4))
    assert found >= (0.93 if pace is drifting else 0.96) * max(on, off), (
        f"{found / max(on, off):.3f} of {'on' if on > off else 'off'}"
    )


def test_adaptive_drafts_for_those_where_it_pays() -> None:
    """Rows whose drafts never stand are left out, and the others are not."""
    policy = AdaptivePolicy((1, 2, 4, 8), BLOCK)
    rows, machine = [row() for _ in range(6)], Machine()
    drafted = [0] * 6
    for r in range(400):
        caps = list(policy.caps(rows, NOBODY))
        drafting = sum(cap > 0 for cap in caps)
        accepted = [cap if i < 2 else 0 for i, cap in enumerate(caps)]
        for shown, cap, stood in zip(rows, caps, accepted, strict=True):
            if cap:
                shown.acceptance.note(cap, stood)
            else:
                shown.acceptance.rest()
        batch = next(b for b in (1, 2, 4, 8) if b >= max(drafting, 1))
        draft = machine.draft(batch, max(caps)) if drafting else 0.0
        told = [(c, a) for c, a in zip(caps, accepted, strict=True) if c]
        ids, told_of = 6 + sum(caps), ([c for c, _ in told], [a for _, a in told])
        policy.observe(Round(6, ids, machine.verify(ids), drafting, max(caps), draft, 0, 0.0, *told_of))
        if r >= 100:
            drafted = [n + (cap > 0) for n, cap in zip(drafted, caps, strict=True)]
    assert min(drafted[:2]) > 280
    # Now and then they are tried again.
    assert all(0 < n < 60 for n in drafted[2:])
    even = policy.break_even()
    assert even is not None
    assert even.rows == 6
    assert even.expected > even.needed > 1


def test_drafting_that_does_not_pay_is_off_and_tried_again() -> None:
    policy = AdaptivePolicy((1,), BLOCK)
    shown, offs, tries = row(), 0, 0
    for r in range(1000):
        (cap,) = policy.caps([shown], NOBODY)
        if cap:
            shown.acceptance.note(cap, 0)
            policy.observe(Round(1, 1 + cap, 0.03, 1, cap, 0.01, 0, 0.0, [cap], [0]))
        else:
            shown.acceptance.rest()
            policy.observe(Round(1, 1, 0.02, 0, 0, 0.0, 0, 0.0, [], []))
        offs, tries = offs + (cap == 0 and r >= 100), tries + (cap > 0 and r >= 100)
    assert offs > 850
    assert 0 < tries < 50
    assert isinstance(policy.break_even(), BreakEven)


def test_rows_that_others_decide_on_count_as_load() -> None:
    """At a load that others make, drafting doesn't pay any more."""
    caps = {}
    for others in (0, 40):
        policy, machine, shown = AdaptivePolicy((1, 64), BLOCK), Machine(), row()
        load = Load(others, others, 0, 0)
        for _ in range(200):
            (cap,) = policy.caps([shown], load)
            shown.acceptance.note(cap, min(cap, 1)) if cap else shown.acceptance.rest()
            ids = others + 1 + cap
            told = ([cap], [min(cap, 1)]) if cap else ([], [])
            draft = machine.draft(1, cap) if cap else 0.0
            policy.observe(Round(others + 1, ids, machine.verify(ids), int(cap > 0), cap, draft, 0, 0.0, *told))
        caps[others] = cap
    assert caps[0] > 0 == caps[40]


def test_catching_up_is_part_of_the_price() -> None:
    """A row whose ring must take in a thousand tap rows first stays without drafts where a row up to date gets some."""
    drafts = {}
    for backlog in (0, 1000):
        policy = AdaptivePolicy((1,), BLOCK)
        for size in (1, 5):
            policy.observe(Round(1, size, 0.02 + 0.001 * size, int(size > 1), size - 1, 0.005, 1000, 2.0, [], []))
        for drafted in range(1, 5):
            policy.observe(Round(1, 1 + drafted, 0.022, 1, drafted, 0.005, 0, 0.0, [drafted], [drafted]))
        (drafts[backlog],) = policy.caps([row(backlog=backlog)], NOBODY)
    assert drafts[0] > 0 == drafts[1000]


def test_a_decision_not_to_draft_holds_twice_as_long_each_time() -> None:
    """Between holds a round of drafts puts it to the test; another load is decided anew."""
    policy = AdaptivePolicy((1, 2), BLOCK)
    for _ in range(60):
        policy.observe(Round(1, 1, 0.02, 0, 0, 0.0, 0, 0.0, [], []))
        for drafts in range(1, 5):
            policy.observe(Round(1, 1 + drafts, 0.2, 1, drafts, 0.2, 0, 0.0, [drafts], [0]))
    shown, held = [row()], [0]
    for _ in range(300):
        if policy.caps(shown, NOBODY) == [0]:
            held[-1] += 1
        else:
            held.append(0)
    first, most = PATIENCE
    assert held[:4] == [first, 2 * first, 4 * first, 8 * first]
    assert max(held) == most
    before = policy.break_even()
    policy.caps(shown * 2, NOBODY)
    assert policy.break_even() is not before
