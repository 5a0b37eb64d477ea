"""confidence.json against `proposal_length`."""

import json
from pathlib import Path

import numpy as np

from runtime.verify import proposal_length


def test_prefix_length(golden: Path) -> None:
    cases = json.loads((golden / "confidence.json").read_text())["cases"]
    assert cases
    for case in cases:
        logits = np.array(case["confidence_logits"], np.float32)
        length = proposal_length(logits, case["threshold"], len(logits))
        assert length == case["expected_prefix_length"], case["name"]
        for cap in range(len(logits)):
            assert proposal_length(logits, case["threshold"], cap) == min(cap, length), (case["name"], cap)
