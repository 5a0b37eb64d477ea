"""Shares of accepted drafts: which positions a round tests, the prior, fading, and expected gains."""

from __future__ import annotations

import pytest

from runtime.acceptance import FADE_OF_ALL, FIRST_GUESS, GUESS_WEIGHT, PRIOR_WEIGHT, REST, Acceptance


def test_a_round_tests_what_it_reaches() -> None:
    """Of four proposed and two accepted, drafts 0 and 1 stood, draft 2 fell, and nobody knows of draft 3."""
    seen = Acceptance(5)
    seen.note(4, 2)
    before = seen.shares()
    up = (1 + FIRST_GUESS * GUESS_WEIGHT) / (1 + GUESS_WEIGHT)
    assert before[0] == pytest.approx(up)
    assert before[1] == pytest.approx((1 + up * PRIOR_WEIGHT) / (1 + PRIOR_WEIGHT))
    assert before[2] == pytest.approx(before[1] * PRIOR_WEIGHT / (1 + PRIOR_WEIGHT))
    assert before[3] == before[4] == before[2]


def test_all_accepted_tests_no_further() -> None:
    seen = Acceptance(3)
    seen.note(2, 2)
    assert seen.shares()[2] == seen.shares()[1]


def test_shares_come_near_the_truth_and_follow_it() -> None:
    seen = Acceptance(1, FADE_OF_ALL)
    for i in range(2000):
        seen.note(1, int(i % 4 == 0))
    assert seen.shares()[0] == pytest.approx(0.25, abs=0.06)
    for _ in range(2000):
        seen.note(1, 1)
    assert seen.shares()[0] > 0.95
    for _ in range(2000):
        seen.note(1, 0)
    assert seen.shares()[0] < 0.1


def test_rest_brings_back_the_prior() -> None:
    seen = Acceptance(2)
    for _ in range(100):
        seen.note(2, 0)
    assert seen.gains(2, [0.8, 0.8])[1] < 0.2
    for _ in range(600):
        seen.rest()
    assert REST**600 < 0.01
    assert seen.gains(2, [0.8, 0.8]) == pytest.approx([0, 0.8, 0.8 + 0.64], abs=0.06)


def test_gains_add_up_the_chances_to_be_reached() -> None:
    assert Acceptance(4).gains(3, [0.5, 0.5, 0.2, 0.9]) == pytest.approx([0, 0.5, 0.75, 0.8])
    assert Acceptance(4).gains(0, [0.5] * 4) == [0]
