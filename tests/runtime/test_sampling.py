"""`runtime.sampling`: what parameters are refused, and how they are kept."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime.errors import RequestError
from runtime.sampling import MAX_BIAS, MAX_REPETITION_PENALTY, SamplingParams, number

NO_NUMBERS = (math.nan, math.inf, -math.inf, True, np.True_, "1", None, 10**400)


@pytest.mark.parametrize("value", [-1, -1e-9, *NO_NUMBERS, 1e-6, 1e6])
def test_temperature_is_validated(value: object) -> None:
    with pytest.raises(RequestError, match=r"^temperature: .*\. Use 0 for the likeliest token$"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize(
    ("name", "outside", "remedy"),
    [
        ("top_p", (0, -0.1, 1.0001), "Use 1 for no cut"),
        ("min_p", (-1e-9, 1.0001), "Use 0 for no cut"),
        (
            "repetition_penalty",
            (0, -1, 0.9 / MAX_REPETITION_PENALTY, 1.1 * MAX_REPETITION_PENALTY),
            "Use 1 for no penalty",
        ),
        ("presence_penalty", (-2.001, 2.001), "Use 0 for no penalty"),
        ("frequency_penalty", (-2.001, 2.001), "Use 0 for no penalty"),
    ],
)
def test_ranges(name: str, outside: tuple[float, ...], remedy: str) -> None:
    for value in (*outside, *NO_NUMBERS):
        with pytest.raises(RequestError, match=rf"^{name}: .*\. {remedy}$"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("top_p", (math.nextafter(0, 1), 1)),
        ("min_p", (0, 1)),
        ("repetition_penalty", (1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY)),
        ("presence_penalty", (-2, 2)),
        ("frequency_penalty", (-2, 2)),
        ("top_k", (0, 10**30)),
        ("seed", (0, 2**64 - 1)),
    ],
)
def test_bounds_belong_to_the_ranges(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("value", [-1, 2**64, 1.0, True, "1"])
def test_seed_is_validated(value: object) -> None:
    with pytest.raises(RequestError, match=r"^seed: .*\. Use None for a seed that the engine chooses$"):
        SamplingParams(seed=value)


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "1"])
def test_top_k_is_validated(value: object) -> None:
    with pytest.raises(RequestError, match=r"^top_k: .*\. Use 0 for no cut$"):
        SamplingParams(top_k=value)


@pytest.mark.parametrize("value", ["Gumbel", None, True, 0, ["gumbel"]])
def test_coupling_is_validated(value: object) -> None:
    with pytest.raises(RequestError, match=r"^coupling: not a coupling; expected rejection or gumbel; found .*"):
        SamplingParams(coupling=value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"logit_bias: wrong type; expected a mapping; found NoneType"),
        ([(1, 2.0)], r"logit_bias: wrong type; expected a mapping; found list"),
        ((1, 2), r"logit_bias: wrong type; expected a mapping; found a tuple of other things than pairs"),
        (((1, 2, 3),), r"logit_bias: wrong type; expected a mapping"),
        ((([], 2),), r"logit_bias: wrong type; expected a mapping"),
        ({"1": 2}, r"logit_bias: not an integer; expected an integer; found '1'"),
        ({True: 2}, r"logit_bias: not an integer; expected an integer; found True"),
        ({1.0: 2}, r"logit_bias: not an integer"),
        ({-1: 2}, r"logit_bias: out of range; expected ids of 0 or more; found -1"),
        ({3: math.inf}, r"logit_bias\[3\]: not a finite number"),
        ({3: math.nan}, r"logit_bias\[3\]: not a finite number"),
        ({3: True}, r"logit_bias\[3\]: not a number"),
        ({3: "-inf"}, r"logit_bias\[3\]: not a number"),
        ({3: 1.1 * MAX_BIAS}, r"logit_bias\[3\]: out of range; expected -1e\+06 … 1e\+06"),
        ({3: -1.1 * MAX_BIAS}, r"logit_bias\[3\]: out of range"),
    ],
)
def test_logit_bias_is_validated(value: object, message: str) -> None:
    with pytest.raises(RequestError, match=rf"^{message}.*-inf to forbid the token$"):
        SamplingParams(logit_bias=value)


def test_parameters_are_plain_numbers():
    params = SamplingParams(np.float32(0.5), np.float64(0.9), np.int64(3), np.int32(4), np.float16(0.25))
    assert params == SamplingParams(0.5, 0.9, 3, 4, 0.25)
    assert [type(v) for v in (params.temperature, params.seed, params.top_k, params.min_p)] == [float, int, int, float]


def test_logit_bias_is_kept_as_sorted_pairs():
    params = SamplingParams(logit_bias={np.int64(9): np.float32(1.5), 2: -math.inf, 5: 0, 3: -np.float64(math.inf)})
    assert params.logit_bias == ((2, -math.inf), (3, -math.inf), (9, 1.5))
    assert all(type(token) is int and type(bias) is float for token, bias in params.logit_bias)
    assert hash(params) == hash(SamplingParams(logit_bias={9: 1.5, 3: -math.inf, 2: -math.inf}))
    assert replace(params, seed=4).logit_bias == params.logit_bias, "a copy goes through the same checks"


def test_greedy():
    assert SamplingParams().greedy
    assert SamplingParams(0, 1, 2**64 - 1, coupling="gumbel").greedy
    assert not SamplingParams(1e-5).greedy


@pytest.mark.parametrize(
    ("given", "plain", "penalises"),
    [
        ({}, True, False),
        ({"temperature": 1, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "coupling": "gumbel"}, True, False),
        ({"logit_bias": {3: 0.0}}, True, False),
        ({"logit_bias": {3: 1.0}}, False, False),
        ({"repetition_penalty": 1.1}, False, True),
        ({"presence_penalty": -0.1}, False, True),
        ({"frequency_penalty": 0.1}, False, True),
    ],
)
def test_whether_logits_are_used_as_they_are(given: dict[str, Any], plain: bool, penalises: bool) -> None:
    params = SamplingParams(**given)
    assert (params.plain, params.penalises) == (plain, penalises)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({0: 1, 5: 1}, None),
        ({0: 1, 6: 1}, r"^logit_bias: an id outside the vocabulary; expected 0 … 5; found 6\. "),
        (dict.fromkeys(range(6), -math.inf), r"^logit_bias: every token is forbidden\. Leave at least one$"),
        (dict.fromkeys(range(5), -math.inf), None),
        (dict.fromkeys(range(5), -math.inf) | {5: 1}, None),
    ],
)
def test_check_against_a_vocabulary(bias: Mapping[int, float], message: str | None) -> None:
    params = SamplingParams(logit_bias=bias)
    if message is None:
        params.check(6)
    else:
        with pytest.raises(RequestError, match=message):
            params.check(6)


def test_number():
    assert (number("x", 3, ""), type(number("x", np.int8(3), ""))) == (3.0, float)
    for value in NO_NUMBERS:
        with pytest.raises(RequestError, match=r"^x: not a .*number; .*\. Do it$"):
            number("x", value, "Do it")
