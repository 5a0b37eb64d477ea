"""Policies: what they are shown, what they may do with it, and whether the adaptive one finds what pays, on a simulated
machine."""

from __future__ import annotations

import math

import numpy as np
import pytest

from runtime.acceptance import Acceptance
from runtime.errors import RequestError
from runtime.policy import Load, Round, Row, StaticPolicy
from runtime.verify import proposal_length

BLOCK = 7
NOBODY = Load(0, 0, 0, 0)


def row(cap: int = 4, threshold: float = 0.0) -> Row:
    return Row(cap, threshold, Acceptance(BLOCK))


def logits(*confidences: float) -> np.ndarray:
    return np.array([math.log(c / (1 - c)) for c in confidences], np.float32)


def test_confidences_are_probabilities() -> None:
    shown = row()
    shown.draft(3, logits(0.9, 0.5, 0.25, 0.99))
    assert [shown.confidence(k) for k in range(3)] == pytest.approx([0.9, 0.5, 0.25])
    for k in (-1, 3):
        with pytest.raises(RequestError, match=rf"^confidence: no such draft; expected 0 … 2; found {k}"):
            shown.confidence(k)
    shown.draft(2, None)
    assert shown.confidence(1) == 1.0


@pytest.mark.parametrize(("threshold", "length", "read"), [(0.0, 4, 0), (0.3, 2, 3), (0.05, 4, 4), (0.95, 0, 1)])
def test_confident(threshold: float, length: int, read: int) -> None:
    shown, made = row(threshold=threshold), logits(0.9, 0.5, 0.2, 0.8)
    shown.draft(4, made)
    assert shown.confident() == length == proposal_length(made, threshold, 4)
    assert shown.read == read
    shown.check_causal(length)


@pytest.mark.parametrize("kept", range(5))
def test_a_look_past_the_next_draft_is_refused(kept: int) -> None:
    for looked in range(1, 5):
        shown = row()
        shown.draft(4, logits(0.9, 0.9, 0.9, 0.9))
        shown.confidence(looked - 1)
        if looked > kept + 1:
            with pytest.raises(RequestError, match=rf"^policy: .*a look at {kept + 1} confidences .*; found {looked}"):
                shown.check_causal(kept)
        else:
            shown.check_causal(kept)


def test_static() -> None:
    rows = [row(cap, 0.5) for cap in (1, 4)]
    policy = StaticPolicy()
    assert policy.caps(rows, NOBODY) == [1, 4]
    rows[0].draft(1, logits(0.4))
    rows[1].draft(4, logits(0.9, 0.6, 0.4, 0.9))
    assert policy.lengths(rows, NOBODY) == [0, 2]
    policy.observe(Round(2, 3, 0.1, 2, 4, 0.1, 0, 0.0, [0, 2], [0, 1]))
    assert policy.break_even() is None
