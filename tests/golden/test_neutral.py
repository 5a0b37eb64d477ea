"""The graphs that every back end starts from, with their standard-op bodies, against the golden vectors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from builder.checkpoints import load_drafter, load_target
from builder.export import export_target
from runtime.manifest import Limits
from tests.golden.drafter_case import TOLERANCE, Case
from tests.golden.neutral import NeutralSession
from tests.support import GOLDEN, exported_drafter

PAIRS = sorted(p.name for p in (GOLDEN / "e2e").iterdir())
# Every head and confidence, both ring borders, one slot a block; each is exported for test_drafter.py anyway.
CASES = (
    "block1",
    "gated_r16",
    "no_confidence",
    "no_markov",
    "prefix_reuse",
    "ring_exact_boundary",
    "ring_wrap",
    "rnn_r16",
)


def case(golden: Path, name: str, dest: Path) -> Case:
    return Case(
        golden,
        name,
        dest,
        lambda dest, target, drafter, limits: NeutralSession(
            dest, target, drafter, limits, exported_drafter(target.spec, drafter.spec, limits)
        ),
    )


@pytest.mark.parametrize("name", CASES)
def test_rounds_one_by_one(golden: Path, name: str, tmp_path: Path) -> None:
    drafter = case(golden, name, tmp_path)
    for i, sequence in enumerate(drafter.sequences):
        drafter.seed(i)
        for r in range(len(sequence["rounds"])):
            (out,) = drafter.draft([(i, r)])
            drafter.check(i, r, out)


def test_batch_with_padding_rows(golden: Path, tmp_path: Path) -> None:
    drafter = case(golden, "batch_mix", tmp_path)
    drafter.seed(*range(len(drafter.sequences)))
    rounds = [len(s["rounds"]) for s in drafter.sequences]
    for r in range(max(rounds)):
        rows = [(i, r) for i in reversed(range(len(rounds))) if r < rounds[i]]
        for (i, _), out in zip(rows, drafter.draft(rows), strict=True):
            drafter.check(i, r, out)


@pytest.mark.parametrize("pair", PAIRS)
def test_target(golden: Path, pair: str, tmp_path: Path) -> None:
    """Two slots at once, in chunks of different positions: each sees its own rows only."""
    directory = golden / "e2e" / pair
    target = load_target(directory / "target")
    drafter = load_drafter(directory / "drafter", target)
    reference = load_file(directory / "reference.safetensors")
    first = json.loads((directory / "prompts.json").read_text())["prompts"][0]
    ids = np.array(first["input_ids"] + first["greedy_new_tokens"])
    limits = Limits((1,), 2, 16, 96, drafter.spec.block_size, 16)
    graph = export_target(target.spec, drafter.spec, limits)
    session = NeutralSession(tmp_path, target, drafter, limits, {"target": graph})
    width, lag = 5, 3
    for at in range(0, len(ids) - width - lag, width):
        # Row 0 runs `lag` positions behind row 1, which repeats what it ran before.
        starts = np.array([max(0, at - lag), at])
        chunks = np.stack([ids[s : s + width] for s in starts])
        rows = np.tile(np.arange(width), (2, 1))
        out = session.target(chunks, starts, np.array([1, 0]), rows)
        for row, start in enumerate(starts):
            part = slice(start, start + width)
            np.testing.assert_allclose(out["logits"][row], reference["logits"][part], rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(out["taps"][row], reference["taps"][part], rtol=0, atol=TOLERANCE)
            np.testing.assert_array_equal(out["argmax"][row], reference["logits"][part].argmax(-1))
