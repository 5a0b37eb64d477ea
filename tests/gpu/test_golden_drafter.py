"""The golden drafter cases on a card, the tokens before each one forced."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.golden.forced import ForcedCase
from tests.golden.test_drafter import CASES
from tests.support import GOLDEN

TOLERANCE = {"f32": 1e-4, "f16": 0.05, "bf16": 0.05}
"""Of probabilities and confidences. Logits, of up to 16, are listed: rounding the weights alone to bfloat16 moves them
by as much as 0.46."""


@pytest.mark.filterwarnings("ignore::runtime.errors.PluginWarning")
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", [name for name in CASES if name != "batch_mix"])
def test_logits_and_confidence(name: str, precision: str, tmp_path: Path) -> None:
    case = ForcedCase(GOLDEN, name, tmp_path, precision, "cuda")
    worst = [case.worst(r) for r in range(case.rounds())]
    line = ", ".join(f"{key} {max(found[key] for found in worst):.3g}" for key in worst[0])
    warnings.warn(f"{name} {precision}: {line}", stacklevel=1)
    asked = ("probabilities", "confidence") if precision != "f32" else tuple(worst[0])
    assert max(found[key] for found in worst for key in asked) <= TOLERANCE[precision], line
