"""`runtime.verify` beyond the golden vectors: bounds, laziness, and the distribution that it promises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import RequestError
from runtime.verify import (
    accept_greedy,
    accept_matching,
    accept_sampled,
    acceptance_probability,
    emit,
    proposal_length,
    residual,
)

IDS = st.integers(0, 5)


def test_proposal_length_without_head_or_room():
    assert proposal_length(None, 0.9, 5) == 5
    assert proposal_length(None, 0.9, 0) == 0
    assert proposal_length(np.array([9.0, 9.0], np.float32), 0.5, 0) == 0
    assert proposal_length(np.array([], np.float32), 0.5, 7) == 0


def test_proposal_length_ties_are_float32():
    # sigmoid(0.4) in float32 lies above its float64 value: a comparison in float64 would cut one of the two.
    logits = np.array([0.4, 20.0, 200.0, -200.0], np.float32)
    sigmoid = np.float32(1) / (np.float32(1) + np.exp(-logits[0]))
    assert proposal_length(logits[:1], float(sigmoid), 1) == 1
    assert proposal_length(logits[:1], float(np.nextafter(sigmoid, np.float32(1))), 1) == 0
    assert proposal_length(np.array([0.1], np.float32), 1 / (1 + np.exp(-0.1)), 1) == 1  # equal once in float32
    assert proposal_length(logits[1:], 1.0, 3) == 2, "float32's sigmoid(20) is 1"
    assert proposal_length(logits[3:], 0.0, 1) == 1, "threshold 0 keeps a sigmoid of 0"


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=8), st.floats(0, 1), st.data())
@settings(max_examples=60, deadline=None)
def test_proposal_length_is_causal(logits: list[float], threshold: float, data: st.DataObject) -> None:
    """Whether draft k is kept doesn't change with later confidences."""
    k = data.draw(st.integers(0, len(logits) - 1))
    other = logits[: k + 1] + data.draw(st.lists(st.floats(-8, 8, width=32), max_size=4))
    one = proposal_length(np.array(logits, np.float32), threshold, len(logits))
    two = proposal_length(np.array(other, np.float32), threshold, len(other))
    assert (one > k) == (two > k)


@given(st.lists(IDS, max_size=7), st.data())
@settings(max_examples=60, deadline=None)
def test_accept_greedy(proposed: list[int], data: st.DataObject) -> None:
    argmax = [
        data.draw(st.sampled_from([token, (token + 1) % 6]))
        for token in proposed  # equal or not
    ] + [data.draw(IDS)]
    accepted, next_token = accept_greedy(np.array(proposed, np.int64), argmax)
    assert proposed[:accepted] == argmax[:accepted]
    assert accepted == len(proposed) or proposed[accepted] != argmax[accepted]
    assert next_token == argmax[accepted]
    assert type(next_token) is int


@given(st.lists(IDS, max_size=7), st.data())
@settings(max_examples=60, deadline=None)
def test_accept_matching_is_plain_decoding(proposed: list[int], data: st.DataObject) -> None:
    """What is committed is what the target picks one token after the other, each pick depending on those before it."""
    salt = data.draw(st.integers(0, 99))

    def pick(before: list[int]) -> int:
        return (salt + sum(before) * 7 + len(before)) % 3  # few values: drafts do match

    asked: list[int] = []

    def token(i: int) -> int:
        asked.append(i)
        return pick(proposed[:i])

    accepted, next_token = accept_matching(proposed, token)
    plain: list[int] = []
    while len(plain) <= accepted:
        plain.append(pick(plain))
    assert [*proposed[:accepted], next_token] == plain
    assert accepted == len(proposed) or proposed[accepted] != next_token
    assert asked == list(range(accepted + 1)), "rows beyond the first mismatch are never computed"
    assert accept_matching(np.array(proposed, np.int64), token) == (accepted, next_token)


def test_row_counts_are_checked():
    p = np.full(4, 0.25)
    with pytest.raises(RequestError, match=r"argmax.*expected 3; found 2"):
        accept_greedy([1, 2], [1, 2])
    with pytest.raises(RequestError, match=r"q: .*expected 2; found 1"):
        accept_sampled([1, 2], p[None], lambda i: p, np.zeros(2), 0.0)
    with pytest.raises(RequestError, match=r"uniforms: .*expected 2; found 3"):
        accept_sampled([1, 2], np.stack([p, p]), lambda i: p, np.zeros(3), 0.0)


def test_rows_of_p_are_computed_lazily_and_once():
    calls = []
    p = np.array([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5]])
    q = np.full((3, 2), 0.5)

    def row(i: int) -> np.ndarray:
        calls.append(i)
        return p[i]

    assert accept_sampled([1, 1, 0], q, row, np.array([0.5, 0.5, 0.5]), 0.9) == (1, 0)
    assert calls == [0, 1]
    calls.clear()
    assert accept_sampled([1, 0, 0], q, row, np.array([0.5, 0.5, 0.5]), 0.9) == (3, 1)
    assert calls == [0, 1, 2, 3]
    calls.clear()
    assert accept_sampled([], q[:0], row, np.array([]), 0.0) == (0, 1)
    assert calls == [0]


def test_strictness_and_floors():
    p, q = np.array([0.25, 0.75]), np.array([0.5, 0.5])
    assert acceptance_probability(p, q, 0) == 0.5
    assert acceptance_probability(p, q, 1) == 1.0
    assert acceptance_probability(np.array([5e-9, 1.0]), np.array([0.0, 1.0]), 0) == 0.5, "q floored at 1e-8"
    assert accept_sampled([0], q[None], lambda i: p, np.array([0.5]), 0.0) == (0, 1), "u = ratio rejects"
    assert accept_sampled([0], q[None], lambda i: p, np.array([np.nextafter(0.5, 0)]), 0.0)[0] == 1
    assert np.array_equal(residual(p, q), [0, 1])
    near = p + np.array([-4e-9, 4e-9])
    assert residual(p, near) is p, "a mass of 4e-9 is noise"
    assert np.array_equal(residual(p, p + np.array([-4e-8, 4e-8])), [1, 0]), "a mass of 4e-8 is not"


def test_distribution_of_three_tokens():
    """Rounds of two drafts over a 4-token Markov target: the joint distribution of what is emitted is the target's
    (χ²)."""
    from scipy.stats import chisquare

    rng = np.random.default_rng(7)
    p, q = (
        rng.dirichlet(np.full(4, 3), 5),
        rng.dirichlet(np.full(4, 3), 5),
    )  # row 4: after the bonus; row t: after token t
    runs = 20_000
    counts = np.zeros((4, 4))
    for _ in range(runs):
        d1 = int(rng.choice(4, p=q[4]))
        d2 = int(rng.choice(4, p=q[d1]))
        rows = [p[4], p[d1], p[d2]]
        accepted, token = accept_sampled(
            [d1, d2], np.stack([q[4], q[d1]]), rows.__getitem__, rng.random(2), rng.random()
        )
        out = [*[d1, d2][:accepted], token]
        if len(out) == 1:
            out.append(int(rng.choice(4, p=p[out[0]])))
        counts[out[0], out[1]] += 1
    expected = p[4][:, None] * p[:4] * runs
    assert expected.min() > 5
    assert chisquare(counts.ravel(), expected.ravel()).pvalue > 0.01


@given(st.lists(IDS, min_size=1, max_size=8), st.frozensets(IDS, max_size=3), st.integers(0, 10))
@settings(max_examples=150, deadline=None)
def test_emit(committed: list[int], stop: frozenset[int], remaining: int) -> None:
    out = emit(committed, stop, remaining)
    first = next((i for i, token in enumerate(committed) if token in stop), None)
    whole = committed if first is None else committed[: first + 1]
    assert list(out.tokens) == whole[:remaining]
    assert out.accepted == min(len(whole), len(committed) - 1)
    assert out.stopped == (first is not None and first < remaining)


def test_emit_refuses_nonsense():
    with pytest.raises(RequestError, match="committed"):
        emit([], frozenset(), 3)
    with pytest.raises(RequestError, match="remaining"):
        emit([1], frozenset(), -1)
    assert emit(np.array([1, 2]).tolist(), {2}, 5).tokens == (1, 2)
