"""`runtime.distribution` against plain oracles: full sorts and dictionaries in double precision, and χ² of draws."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from runtime.distribution import History, draw, gumbel_draw, logprobs, probabilities
from runtime.errors import RequestError
from runtime.randomness import Purpose, gumbel, uniforms
from runtime.sampling import SamplingParams

LOGITS = st.lists(
    st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, 1.0, -math.inf])), min_size=1, max_size=40
)
NOT_NUMBERS = ([math.nan, 1], [math.inf, 1], [-math.inf, -math.inf])


def some_logits(values: list[float]) -> np.ndarray:
    logits = np.array(values, np.float32)
    if logits.max() == -np.inf:
        logits[0] = 0
    return logits


def oracle(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The filters by their definitions: ids sorted by probability, equals by id, and cut from the end. What is kept is
    decided on float32 probabilities, whose ties count; their values are double."""
    p = probabilities(logits, SamplingParams(params.temperature)).tolist()
    order = sorted(range(len(p)), key=lambda i: (-logits[i], i))
    if params.min_p:
        bar = float(logits.max()) + params.temperature * math.log(params.min_p)
        order = [i for i in order if logits[i] >= np.float32(bar)]
    order = order[: params.top_k or None]
    p = np.float32(p) / np.float32(p)[order].sum() if params.min_p or params.top_k else np.float32(p)
    order.sort(key=lambda i: (-p[i], i))  # where float32 makes one probability of two logits
    kept, total = [], 0.0
    for i in order:
        kept.append(i)
        total += float(p[i])
        if total >= params.top_p and params.top_p < 1:  # 1 is no cut, though float32's rounding may reach it early
            break
    kept = [i for i in kept if p[i] > 0]  # not what is too small for float32
    out = np.zeros(len(p))
    out[kept] = np.exp((logits[kept].astype(np.float64) - float(logits.max())) / params.temperature)
    return out / out.sum()


@given(
    LOGITS, st.floats(0.05, 5), st.one_of(st.floats(1e-6, 1), st.sampled_from([1e-300, 0.25, 0.5, 0.75, 1 - 2**-53]))
)
@example([0.0] * 9 + [13.1875, -4.0], 1.0, 1.0)
@settings(max_examples=200, deadline=None)
def test_probabilities(values: list[float], temperature: float, top_p: float) -> None:
    logits = some_logits(values)
    params = SamplingParams(temperature, top_p)
    before = logits.copy()
    p = probabilities(logits, params)
    assert p.dtype == np.float32
    assert np.array_equal(logits, before), "the logits are the session's"
    expected = oracle(logits, params)
    assert np.array_equal(p > 0, expected > 0)
    assert np.abs(p - expected).max() < 1e-6
    exact = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    assert np.abs(probabilities(logits, SamplingParams(temperature)) - exact / exact.sum()).max() < 1e-6


@given(
    # Steps of a quarter: ties are many, and no probability lies at a bar by accident of rounding.
    st.lists(st.integers(-24, 24), min_size=1, max_size=60),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0.0, 1e-300, 0.01, 0.3, 1.0]),
    st.integers(0, 70),
    st.sampled_from([0.1234, 0.5678, 0.9123, 1.0]),
    st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_filters(quarters: list[int], temperature: float, min_p: float, top_k: int, top_p: float, seed: int) -> None:
    logits = np.array(quarters, np.float32) / 4
    params = SamplingParams(temperature, top_p, min_p=min_p, top_k=top_k)
    expected = oracle(logits, params)
    p = probabilities(logits, params)
    assert np.flatnonzero(p).tolist() == np.flatnonzero(expected).tolist()
    assert np.abs(p - expected).max() < 1e-6
    noise = gumbel(seed, 0, 1, len(logits))
    masked = np.where(expected > 0, logits + np.float32(temperature) * noise, -np.inf)
    assert gumbel_draw(logits, params, noise) == masked.argmax()


def test_filters_by_hand():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.2, 0.06, 0.04], np.float32))

    def kept(**given: float) -> dict[int, float]:
        p = probabilities(logits, SamplingParams(1, **given))
        return {int(i): round(float(p[i]), 4) for i in np.flatnonzero(p)}

    assert kept(top_k=1) == {1: 1}
    assert kept(top_k=2) == {1: 0.6667, 2: 0.3333}, "of equals the lower id"
    assert kept(top_k=4) == {0: 0.1111, 1: 0.4444, 2: 0.2222, 3: 0.2222}
    assert len(kept(top_k=6)) == len(kept(top_k=7)) == len(kept()) == 6
    assert kept(min_p=0.3) == {1: 0.5, 2: 0.25, 3: 0.25}
    assert kept(min_p=1) == {1: 1}
    assert kept(top_p=0.5) == {1: 0.6667, 2: 0.3333}
    assert kept(top_p=0.5, top_k=2) == {1: 1}, "top_p looks at what top_k has left: 0.67 of it"
    assert kept(top_k=3, min_p=0.6) == {1: 1}
    hot = probabilities(logits, SamplingParams(2, min_p=0.6))
    assert np.flatnonzero(hot).tolist() == [1, 2, 3], "min_p comes after the temperature: √½ ≥ 0.6"


def test_top_p_ties_take_the_lower_ids_and_at_least_one_token():
    logits = np.array([-np.inf, 1, 1, 1, 1], np.float32)
    assert np.flatnonzero(probabilities(logits, SamplingParams(1, 0.5))).tolist() == [1, 2]
    assert np.flatnonzero(probabilities(logits, SamplingParams(1, 0.51))).tolist() == [1, 2, 3]
    assert np.flatnonzero(probabilities(logits, SamplingParams(1, 1e-9))).tolist() == [1]


def test_forbidden_tokens_are_never_drawn():
    logits = np.array([-np.inf, 1, -np.inf, 0], np.float32)
    assert probabilities(logits, SamplingParams(1, top_k=3)).tolist()[0] == 0
    noise = np.array([20, 0, 20, 0], np.float32)
    assert [gumbel_draw(logits, SamplingParams(1, top_k=k), noise) for k in (0, 1, 3)] == [1, 1, 1]


@pytest.mark.parametrize("given", [{"top_p": p} for p in (0.01, 0.3, 0.9, 0.999, 0.9999999)] + [{"top_k": 700}])
def test_filters_of_a_large_vocabulary(given: dict[str, Any]) -> None:
    logits = np.random.default_rng(3).standard_normal(5000).astype(np.float32)
    logits[::7] = logits[0]  # ties, right through the order
    params = SamplingParams(0.8, **given)
    assert np.array_equal(probabilities(logits, params) > 0, oracle(logits, params) > 0)


def test_extreme_temperatures_and_logits():
    logits = np.array([3e38, -3e38, 1.0, 3e38], np.float32)
    assert probabilities(logits, SamplingParams(1e-5)).tolist() == [0.5, 0, 0, 0.5]
    assert np.allclose(probabilities(np.array([1, 2, 3], np.float32), SamplingParams(1e5)), 1 / 3, atol=1e-4)
    with pytest.raises(RequestError, match="greedy"):
        probabilities(logits, SamplingParams(0))


@pytest.mark.parametrize("bad", NOT_NUMBERS)
def test_logits_that_are_no_numbers_are_refused(bad: list[float]) -> None:
    logits, noise = np.array(bad, np.float32), np.zeros(2, np.float32)
    for call in (
        lambda: probabilities(logits, SamplingParams(1)),
        lambda: gumbel_draw(logits, SamplingParams(1), noise),
        lambda: logprobs(logits, 0, 1),
    ):
        with pytest.raises(RequestError, match=r"^logits: the largest one is not a number; expected a finite value"):
            call()


def penalised(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """Bias and penalties by their definitions, token by token, in double precision."""
    bias, counts = dict(params.logit_bias), Counter(output)
    adjusted = []
    for token, value in enumerate(logits):
        value += bias.get(token, 0.0)
        if token in prompt or token in counts:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * counts[token]
        value -= params.presence_penalty if counts[token] else 0.0
        adjusted.append(value)
    return adjusted


TOKENS = st.lists(st.integers(0, 7), max_size=9)


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=8, max_size=8),
    TOKENS,
    st.lists(TOKENS, max_size=4),
    TOKENS,
    st.sampled_from([1.0, 0.5, 1.3]),
    st.sampled_from([0.0, -1.5, 0.75]),
    st.sampled_from([0.0, 2.0, -0.25]),
    st.dictionaries(st.integers(0, 7), st.sampled_from([-math.inf, 3.5, -8.0]), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_adjusted(
    values: list[float],
    prompt: list[int],
    rounds: list[list[int]],
    drafts: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
    )
    logits, history, output = np.array(values, np.float32), History(params, prompt, 8), []
    before = logits.copy()
    for tokens in rounds:
        tentative = history.adjusted(logits, tokens)
        history.add(tokens)
        output += tokens
        assert np.array_equal(history.adjusted(logits), tentative), "drafts count as if they had been accepted"
    adjusted = history.adjusted(logits, drafts)
    assert adjusted.dtype == np.float32
    assert np.array_equal(logits, before), "the logits are the session's"
    expected = penalised(logits.tolist(), prompt, output + drafts, params)
    np.testing.assert_allclose(adjusted, expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(history.adjusted(logits), history.adjusted(logits)), "asking changes nothing"
    np.testing.assert_allclose(
        history.adjusted(logits), penalised(logits.tolist(), prompt, output, params), rtol=1e-5, atol=1e-5
    )


def test_penalties_by_hand():
    logits = np.array([2, -2, 1, 1], np.float32)
    repetition = History(SamplingParams(repetition_penalty=2), [0, 1], 4)
    assert repetition.adjusted(logits).tolist() == [1, -4, 1, 1]
    assert repetition.adjusted(logits, [2]).tolist() == [1, -4, 0.5, 1]
    output = History(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [0, 1], 4)
    output.add([2, 0, 2])
    assert output.adjusted(logits).tolist() == [1.25, -2, 0, 1], "the prompt doesn't count"
    assert output.adjusted(logits, [2, 3]).tolist() == [1.25, -2, -0.25, 0.25]
    biased = History(SamplingParams(repetition_penalty=2, logit_bias={1: 5, 3: -math.inf}), [1, 3], 4)
    assert biased.adjusted(logits).tolist() == [2, 1.5, 1, -math.inf], "the bias comes first: 3, halved"


def test_logits_are_not_copied_where_nothing_applies():
    logits = np.zeros(4, np.float32)
    assert History(SamplingParams(), [1], 4).adjusted(logits, [2]) is logits
    history = History(SamplingParams(presence_penalty=1), [1], 4)
    assert history.adjusted(logits) is logits, "nothing has been emitted yet"
    history.add([2])
    assert history.adjusted(logits) is not logits


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(0, 1, width=32)), min_size=1, max_size=30),
    st.integers(0, 2**53 - 1),
    st.integers(1, 60),
)
@settings(max_examples=200, deadline=None)
def test_draw(values: list[float], grid: int, repeat: int) -> None:
    p = np.array(values * repeat, np.float32)  # up to 1800 entries: several blocks
    if p.sum(dtype=np.float64) == 0:
        with pytest.raises(RequestError, match="mass"):
            draw(p, 0.5)
        return
    for u in (grid * 2.0**-53, 0.0, 1 - 2.0**-53):
        token = draw(p, u)
        assert p[token] > 0
        exact = np.cumsum(p.astype(np.float64))
        assert exact[token] > u * exact[-1] * (1 - 1e-12)
        assert token == 0 or exact[token - 1] <= u * exact[-1] * (1 + 1e-12)


def test_draw_edges_and_refusals():
    assert draw(np.array([0.0, 1.0, 0.0]), 0.0) == 1
    assert draw(np.array([0.0, 1.0, 0.0], np.float32), 1 - 2**-53) == 1
    assert draw(np.array([0.25, 0.75]), 0.25) == 1, "an interval begins with its lower end"
    p = np.zeros(2000, np.float32)
    p[[511, 512, 1999]] = 0.25, 0.5, 0.25
    assert [draw(p, u) for u in (0, 0.2499, 0.25, 0.7499, 0.75, 0.99)] == [511, 511, 512, 512, 1999, 1999]
    for u in (1.0, -0.1, math.nan):
        with pytest.raises(RequestError, match=r"^u: "):
            draw(p, u)
    with pytest.raises(RequestError, match="mass"):
        draw(np.array([math.nan, 1.0]), 0.5)


def test_draw_where_two_sums_of_a_block_differ():
    """The point may lie between the block's running sum and its (pairwise) sum: the last token with a probability."""
    rng, met = np.random.default_rng(0), 0
    for _ in range(50):
        p = rng.random(400)
        p[390:] = 0
        point = (1 - 2**-53) * np.add.reduceat(p, [0])[0]
        met += point >= p.cumsum()[-1]
        assert p[draw(p, 1 - 2**-53)] > 0
    assert met > 5


CUTS: list[dict[str, Any]] = [
    {},
    {"top_k": 6},
    {"min_p": 0.2},
    {"top_p": 0.8},
    {"top_k": 9, "min_p": 0.05, "top_p": 0.9},
    {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.3,
        "logit_bias": {2: 1.5, 7: -math.inf},
    },
    {"repetition_penalty": 0.8, "frequency_penalty": -0.4, "top_p": 0.85},
]


@pytest.mark.parametrize("given", CUTS)
@pytest.mark.parametrize("way", ["gumbel", "inverse CDF"])
def test_draws_follow_the_distribution(given: dict[str, Any], way: str) -> None:
    """χ² over 20,000 positions against probabilities computed in double precision from a full sort."""
    runs, vocab, params = 20_000, 12, SamplingParams(0.9, **given)
    logits = np.random.default_rng(1).normal(0, 1.2, vocab).astype(np.float32)
    history = History(params, [0, 3, 3], vocab)
    history.add([4, 4, 1])
    row = history.adjusted(logits, [1, 5])
    expected = oracle(np.float32(penalised(logits.tolist(), [0, 3, 3], [4, 4, 1, 1, 5], params)), params)
    if way == "gumbel":
        drawn = [gumbel_draw(row, params, gumbel(3, 0, position, vocab)) for position in range(runs)]
    else:
        p = probabilities(row, params)
        drawn = [draw(p, float(uniforms(3, 0, position, Purpose.FINAL)[0])) for position in range(runs)]
    counts = np.bincount(drawn, minlength=vocab)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert (expected[kept] * runs).min() > 20
    assert chisquare(counts[kept], expected[kept] * runs).pvalue > 1e-3


def test_gumbel_draw_is_the_argmax_of_the_draft_graph():
    """With the same logits, drafter and target draw the same token: both are the float32 argmax of logits + T·noise."""
    rng = np.random.default_rng(2)
    for position in range(50):
        logits, noise = rng.normal(0, 3, 500).astype(np.float32), gumbel(1, 0, position, 500)
        scaled = noise * np.float32(0.7)
        assert gumbel_draw(logits, SamplingParams(0.7), noise) == (logits + scaled).argmax()
    assert gumbel_draw(np.array([1, 2, 2], np.float32), SamplingParams(1), np.zeros(3, np.float32)) == 1


@given(LOGITS, st.integers(0, 45), st.data())
@settings(max_examples=150, deadline=None)
def test_logprobs(values: list[float], top: int, data: st.DataObject) -> None:
    logits = some_logits(values)
    token = data.draw(st.integers(0, len(logits) - 1))
    shifted = [float(v) - float(logits.max()) for v in logits]
    log_total = math.log(math.fsum(map(math.exp, shifted)))
    found = logprobs(logits, token, top)
    assert (found.token_id, type(found.logprob)) == (token, float)
    assert found.logprob == pytest.approx(shifted[token] - log_total, abs=1e-5)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top]
    assert [i for i, _ in found.top] == order
    assert [p for _, p in found.top] == pytest.approx([shifted[i] - log_total for i in order], abs=1e-5)


def test_logprobs_are_the_models_own_in_natural_logarithms():
    found = logprobs(np.log(np.array([1, 5, 2, 2], np.float32)), 0, 3)
    assert found.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [i for i, _ in found.top] == [1, 2, 3]
    assert [p for _, p in found.top] == pytest.approx([math.log(0.5), math.log(0.2), math.log(0.2)], abs=1e-6)
    assert logprobs(np.zeros(3, np.float32), 1, 0).top == ()
    # Terms too small for a running sum in float32 still count.
    many = np.full(2**20, -17, np.float32)
    many[0] = 0
    assert logprobs(many, 0, 0).logprob == pytest.approx(-math.log1p((2**20 - 1) * math.exp(-17)), rel=1e-6)
