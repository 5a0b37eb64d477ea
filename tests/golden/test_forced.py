"""The golden drafter cases with tokens forced, in float32 in the process: what `tests/gpu` then asks of 16 bits."""

from pathlib import Path

import pytest

from tests.golden.forced import ForcedCase


@pytest.mark.parametrize("name", ["ring_wrap", "gated_r16", "rnn_r16", "no_markov"])
def test_float32(golden: Path, name: str, tmp_path: Path) -> None:
    case = ForcedCase(golden, name, tmp_path, "f32", "cpu")
    for r in range(case.rounds()):
        assert max(case.worst(r).values()) < 1e-4
