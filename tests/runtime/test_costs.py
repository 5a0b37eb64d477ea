"""What calls cost: known sizes, bounds for unknown ones, outliers, a drifting pace, and forgetting."""

from __future__ import annotations

import pytest

from runtime.costs import BELIEF, FADE, OUTLIER, RENEWED, CostTable


def learnt(*times: tuple[tuple[int, ...], float]) -> CostTable:
    table = CostTable()
    for size, seconds in times:
        table.observe("verify", size, seconds)
    return table


def test_nothing_is_known_at_first() -> None:
    table = CostTable()
    assert table.bounds("verify")((3,)) == 0
    table.observe("verify", (3,), 0.5)
    assert table.bounds("verify")((3,)) == 0.5
    assert table.bounds("draft")((3,)) == 0


def test_unknown_sizes_are_bounded_from_below() -> None:
    """More takes no less, and no more in proportion."""
    table = learnt(((10,), 1.0), ((30,), 1.2))
    assert table.bounds("verify")((40,)) == pytest.approx(1.2)
    assert table.bounds("verify")((15,)) == pytest.approx(1.0, rel=2e-3)  # not 1.2 * 15 / 30
    assert table.bounds("verify")((29,)) == pytest.approx(1.2 * 29 / 30)
    assert table.bounds("verify")((5,)) == pytest.approx(0.5, rel=2e-3)  # not 1.2 * 5 / 30


def test_sizes_between_near_ones_are_on_a_line() -> None:
    table = learnt(((10, 4), 1.0), ((10, 8), 3.0), ((12, 6), 9.0))
    assert table.bounds("verify")((10, 7)) == pytest.approx(max(2.5, 9.0 * 10 / 12), rel=3e-3)
    table = learnt(((10,), 1.0), ((20,), 3.0))
    assert table.bounds("verify")((15,)) == pytest.approx(max(2.0, 3.0 * 15 / 20), rel=3e-3)
    assert table.bounds("verify")((12,)) == pytest.approx(1.8)
    assert table.bounds("verify")((21,)) == pytest.approx(3.0)


def test_the_first_call_of_a_size_may_be_cold() -> None:
    table = learnt(((3,), 9.0), ((3,), 1.0))
    assert table.bounds("verify")((3,)) == 1.0
    table = learnt(((3,), 1.0), ((3,), 9.0))
    assert table.bounds("verify")((3,)) == 1.0


def test_sizes_of_several_numbers() -> None:
    table = learnt(((4, 2), 1.0))
    assert table.bounds("verify")((8, 2)) == 1.0
    assert table.bounds("verify")((4, 4)) == 1.0
    assert table.bounds("verify")((2, 4)) == 0.5
    assert table.bounds("verify")((2, 1)) == 0.25


def test_an_outlier_counts_for_little() -> None:
    table = learnt(*[((1,), 1.0)] * 50, ((1,), 1000.0), *[((1,), 1.0)] * 10)
    assert table.bounds("verify")((1,)) == pytest.approx(1.0, rel=0.2)
    # At most that once in its own cost, and a tenth of it in the pace.
    few = learnt(((1,), 1.0), ((1,), 50.0))
    assert few.bounds("verify")((1,)) < OUTLIER


def test_a_slow_machine_is_not_held_against_a_size() -> None:
    """Size 2 is seen while everything takes twice as long, size 1 before and after: their ratio stays what it is."""
    table = learnt(*[((1,), 1.0)] * 20, *[((1,), 2.0)] * 40, *[((2,), 3.0)] * 5, *[((1,), 1.0)] * 40)
    assert table.bounds("verify")((2,)) / table.bounds("verify")((1,)) == pytest.approx(1.5, rel=0.2)


def test_what_was_seen_long_ago_fades() -> None:
    table = learnt(((2,), 1.5), *[((1,), 1.0)] * 500)
    assert table.bounds("verify")((2,)) == pytest.approx(1.5 * FADE**500)
    # What was seen often is believed longer.
    often = learnt(*[((2,), 1.5)] * 100, *[((1,), 1.0)] * 500)
    assert often.bounds("verify")((2,)) == pytest.approx(1.5 * FADE ** (500 / BELIEF), rel=0.02)
    table.observe("verify", (2,), 1.5)
    assert table.bounds("verify")((2,)) == pytest.approx(1.5, rel=0.01)


def test_estimates_are_renewed() -> None:
    table = learnt(*[((1,), 1.0)] * 10)
    assert table.bounds("verify")((1,)) == pytest.approx(1.0)
    table.observe("verify", (2,), 1.9)  # a new size shows at once
    assert table.bounds("verify")((2,)) == 1.9
    for _ in range(RENEWED):
        table.observe("draft", (1,), 1.0)
    assert table.bounds("verify")((2,)) == pytest.approx(1.9 * FADE**RENEWED)
