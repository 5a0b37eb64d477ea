"""The drafter protocol cases, through the exported engines: ring, block, heads, chain, confidence."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.sessions.ort import OrtSession
from tests.golden.drafter_case import Case
from tests.support import GOLDEN, drafter_engines

CASES = sorted(p.name for p in (GOLDEN / "drafter").iterdir())


def case(golden: Path, name: str, dest: Path) -> Case:
    """On the engines that a bundle would have, debug outputs included."""
    return Case(
        golden, name, dest, lambda dest, *pair: OrtSession(dest, drafter_engines(dest, *pair, debug=True), threads=1)
    )


@pytest.mark.parametrize("name", CASES)
def test_rounds_one_by_one(golden: Path, name: str, tmp_path: Path) -> None:
    drafter = case(golden, name, tmp_path)
    for i, sequence in enumerate(drafter.sequences):
        drafter.seed(i)
        for r in range(len(sequence["rounds"])):
            (out,) = drafter.draft([(i, r)])
            drafter.check(i, r, out)


def test_batch_equals_singles(golden: Path, tmp_path: Path) -> None:
    """All sequences of ``batch_mix`` in one batch while they last, then the rest padded with scratch rows."""
    drafter = case(golden, "batch_mix", tmp_path)
    drafter.seed(*range(len(drafter.sequences)))
    rounds = [len(s["rounds"]) for s in drafter.sequences]
    assert len(set(rounds)) > 1, "the case no longer covers batches that shrink"
    for r in range(max(rounds)):
        rows = [(i, r) for i in range(len(rounds)) if r < rounds[i]]
        for (i, _), out in zip(rows, drafter.draft(rows), strict=True):
            drafter.check(i, r, out)
