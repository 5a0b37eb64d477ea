"""The standard-op bodies that travel in the exported graphs, on ONNX Runtime, against the eager operators."""

from __future__ import annotations

import numpy as np
import pytest

from builder.graphs.functions import function
from tests.builder.graphs import cases
from tests.builder.graphs.cases import CHAINS, SEEDS, Case, assert_close, run


def compare(case: Case) -> None:
    found, expected = run(function(case.op_type), case.inputs), case.eager()
    for name, reference in expected.items():
        if name not in found:
            continue
        if name.endswith("_out"):
            # Rows of several padding rows on the scratch slot are duplicates, of which any may win. Elsewhere a row is
            # written or untouched.
            assert_close(found[name][:-1], reference[:-1], name)
        elif name == "ids":
            np.testing.assert_array_equal(found[name], reference)
        else:
            assert_close(found[name][: case.real], reference[: case.real], name)
        assert np.isfinite(found[name]).all(), name


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("head_dim", [8, 16])
def test_cached_attention(seed: int, head_dim: int) -> None:
    compare(cases.cached_attention(seed, head_dim))


@pytest.mark.parametrize("seed", SEEDS)
def test_ring_write(seed: int) -> None:
    case = cases.ring_write(seed)
    compare(case)
    found = run(function("RingWrite"), case.inputs)["ring_out"]
    # Padding rows count nothing, so the scratch slot stays as it was, bit for bit, and so does every row not counted.
    np.testing.assert_array_equal(found, case.eager()["ring_out"])


@pytest.mark.parametrize("seed", SEEDS)
def test_ring_attention(seed: int) -> None:
    compare(cases.ring_attention(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_nan_in_ring_rows_that_no_block_may_see(seed: int) -> None:
    case = cases.ring_attention(seed)
    clean, dirty = (run(function(c.op_type), c.inputs)["out"][: case.real] for c in (case, cases.unseen_nan(case)))
    np.testing.assert_array_equal(dirty, clean)


@pytest.mark.parametrize("temperatures", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("op_type", CHAINS)
def test_chain(op_type: str, seed: int, temperatures: str) -> None:
    compare(cases.chain(op_type, seed, temperatures))
