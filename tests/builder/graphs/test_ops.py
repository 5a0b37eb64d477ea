"""The eager operators, which exported bodies and every kernel are held to, against naive loops in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from builder.graphs import ops
from tests.builder.graphs import cases
from tests.builder.graphs.cases import CHAINS, SEEDS, Arrays, assert_close


def rotated(x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any]) -> NDArray[Any]:
    """One head: the first half pairs with the second."""
    a, b = np.split(x.astype(np.float64), 2)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin))


def attended(q: NDArray[Any], keys: list[NDArray[Any]], values: list[NDArray[Any]]) -> NDArray[Any]:
    """One query head over the keys that it sees, and no others."""
    scores = np.array([float(q @ key) / math.sqrt(len(q)) for key in keys])
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return sum((w * v for w, v in zip(weights, values, strict=True)), np.zeros(len(q)))


@pytest.mark.parametrize("seed", SEEDS)
def test_cached_attention(seed: int) -> None:
    case = cases.cached_attention(seed)
    found, x = case.eager(), case.inputs
    group = x["q"].shape[2] // x["k"].shape[2]
    k_cache, v_cache = x["k_cache"].copy(), x["v_cache"].copy()
    for b in range(case.real):
        slot, start = x["slot"][b], x["start"][b]
        for i in range(x["q"].shape[1]):
            p = start + i
            for head in range(x["k"].shape[2]):
                k_cache[slot, head, p] = rotated(x["k"][b, i, head], x["cos"][p], x["sin"][p])
                v_cache[slot, head, p] = x["v"][b, i, head]
            expected = []
            for head in range(x["q"].shape[2]):
                q = rotated(x["q"][b, i, head], x["cos"][p], x["sin"][p])
                kv = head // group
                expected.append(attended(q, list(k_cache[slot, kv, : p + 1]), list(v_cache[slot, kv, : p + 1])))
            assert_close(found["out"][b, i], np.concatenate(expected))
    real = slice(0, -1)  # the scratch slot holds what padding rows left there
    assert_close(found["k_cache_out"][real], k_cache[real])
    assert_close(found["v_cache_out"][real], v_cache[real])


@pytest.mark.parametrize("seed", SEEDS)
def test_ring_write(seed: int) -> None:
    case = cases.ring_write(seed)
    x = case.inputs
    ring = x["ring"].copy()
    for b in range(case.real):
        for i in range(x["count"][b]):
            for head in range(ring.shape[1]):
                ring[x["slot"][b], head, (x["start"][b] + i) % ring.shape[2]] = x["rows"][b, i, head]
    np.testing.assert_array_equal(case.eager()["ring_out"], ring)


@pytest.mark.parametrize("seed", SEEDS)
def test_ring_attention(seed: int) -> None:
    case = cases.ring_attention(seed)
    found, x = case.eager()["out"], case.inputs
    group, window = x["q"].shape[2] // x["k"].shape[2], x["ring_k"].shape[2]
    for b in range(case.real):
        slot, start = x["slot"][b], x["start"][b]
        seen = [p % window for p in range(start - x["valid_len"][b], start)]
        for i in range(x["q"].shape[1]):
            expected = []
            for head in range(x["q"].shape[2]):
                kv = head // group
                keys = [*(x["ring_k"][slot, kv, row] for row in seen), *x["k"][b, :, kv]]
                values = [*(x["ring_v"][slot, kv, row] for row in seen), *x["v"][b, :, kv]]
                expected.append(attended(x["q"][b, i, head], keys, values))
            assert_close(found[b, i], np.concatenate(expected))


@pytest.mark.parametrize("seed", SEEDS)
def test_ring_attention_of_rows_that_no_block_may_see(seed: int) -> None:
    """Whatever lies in the ring outside the window of a row, NaN included, changes nothing."""
    case = cases.ring_attention(seed)
    clean = case.eager()["out"][: case.real]
    poisoned = cases.unseen_nan(case).eager()["out"][: case.real]
    np.testing.assert_array_equal(poisoned, clean)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("op_type", CHAINS)
def test_chain(op_type: str, seed: int) -> None:
    case = cases.chain(op_type, seed)
    found, x = case.eager(), case.inputs
    for b in range(case.real):
        for j, expected in enumerate(naive_chain(CHAINS[op_type], x, b)):
            assert found["ids"][b, j] == expected["id"]
            for name in ("rows", "logits", "q"):
                assert_close(found[name][b, j], expected[name], f"{name} of row {b}, slot {j}")


def naive_chain(kind: str, x: Arrays, b: int) -> list[dict[str, Any]]:
    """One row's chain in float64; q where the row is greedy is that of temperature 1."""
    rank = x["w1"].shape[1] if "w1" in x else 0
    prev, state, slots = int(x["bonus"][b]), np.zeros(rank), []
    temperature = float(x["temperature"][b])
    for j in range(x["base"].shape[1]):
        row = x["w1"][prev].astype(np.float64) if rank else np.zeros(0)
        h, logits = x["hidden"][b, j].astype(np.float64), x["base"][b, j].astype(np.float64) + x["noise"][b, j]
        mixed = row
        if kind == "gated":
            mixed = row / (1 + np.exp(-(x["proj_w"] @ np.concatenate((h, row)) + x["proj_b"])))
        elif kind == "rnn":
            g, c, o = np.split(x["proj_w"] @ np.concatenate((state, row, h)) + x["proj_b"], 3)
            gate = 1 / (1 + np.exp(-g))
            state, mixed = gate * state + (1 - gate) * np.tanh(c), np.tanh(o)
        if rank:
            logits = logits + x["w2"] @ mixed
        q = np.exp((logits - logits.max()) / (temperature or 1.0))
        q /= q.sum()
        if temperature == 0:
            prev = int(logits.argmax())
        else:
            total = 0.0
            for token, probability in enumerate(q):  # noqa: B007 - the last one stays chosen
                total += probability
                if total > x["uniforms"][b, j] * q.sum():
                    break
            prev = token
        slots.append({"id": prev, "rows": row, "logits": logits, "q": q})
    return slots


def test_pick_never_takes_a_token_of_no_probability() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    uniform = torch.tensor([0.0, 0.5, 1 - 2.0**-23])
    ids, q = ops.pick(logits, torch.ones(3), uniform)
    assert ids.tolist() == [1, 3, 3]
    assert q[0].tolist() == [0, 0.5, 0, 0.5, 0]
