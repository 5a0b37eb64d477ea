"""`runtime.request`: what is refused, and how a request's numbers are counted."""

import dataclasses
import math

import numpy as np
import pytest

from runtime.errors import RequestError
from runtime.manifest import Limits
from runtime.request import Request, stop_strings, token_ids
from runtime.result import Result, Seconds, StatsRecorder
from runtime.sampling import SamplingParams

LIMITS = Limits(batches=(1,), slots=1, window=16, max_seq_len=20, block_size=4, prefill_chunk=16)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt_ids", (), "prompt: empty"),
        ("prompt_ids", [1, True], r"prompt\[1\]: not an integer.*True"),
        ("prompt_ids", [1, 2.0], r"prompt\[1\]: not an integer"),
        ("prompt_ids", np.array([1.0]), r"prompt\[0\]: not an integer"),
        ("prompt_ids", "text", "prompt: not token ids"),
        ("prompt_ids", 5, "prompt: not token ids"),
        ("max_new_tokens", -1, "max_new_tokens: out of range; expected ≥ 0; found -1"),
        ("max_new_tokens", 1.0, "max_new_tokens: not an integer"),
        ("max_new_tokens", True, "max_new_tokens: not an integer"),
        ("max_new_tokens", None, "max_new_tokens: not an integer"),
        (
            "sampling",
            None,
            r"sampling: wrong type; expected SamplingParams; found NoneType\. Pass runtime\.SamplingParams",
        ),
        ("stop", [""], "stop: not a stop string"),
        ("stop", [1], "stop: not a stop string"),
        ("stop", 1, "stop: wrong type"),
        ("stop_token_ids", [1.5], r"stop_token_ids\[0\]: not an integer"),
        ("ignore_eos", 1, "ignore_eos: wrong type"),
        ("speculate", None, "speculate: wrong type"),
        ("max_draft", -1, "max_draft: out of range"),
        ("max_draft", 1.0, "max_draft: not an integer"),
        ("max_draft", False, "max_draft: not an integer"),
        ("confidence_threshold", 1.1, "confidence_threshold: not a "),
        ("confidence_threshold", -0.1, "confidence_threshold: not a "),
        ("confidence_threshold", math.nan, "confidence_threshold: not a "),
        ("confidence_threshold", True, "confidence_threshold: not a "),
        ("confidence_threshold", "0.5", "confidence_threshold: not a "),
        ("adaptive", 1, "adaptive: wrong type; expected True or False; found 1. Pass a bool as adaptive"),
        ("logprobs", -1, "logprobs: out of range"),
        ("logprobs", 65, r"logprobs: out of range; expected 0 … 64; found 65\. Leave it out"),
        ("logprobs", True, "logprobs: not an integer"),
        ("logprobs", 1.0, "logprobs: not an integer"),
        ("deadline", 0, r"deadline: out of range; expected seconds above 0; found 0.0\. Leave it out"),
        ("deadline", -1.5, "deadline: out of range"),
        ("deadline", math.inf, "deadline: not a finite number"),
        ("deadline", math.nan, "deadline: not a finite number"),
        ("deadline", True, "deadline: not a number"),
        ("deadline", "5", "deadline: not a number"),
        ("draw_stream", -1, "draw_stream: out of range"),
        ("draw_stream", 2**64, "draw_stream: out of range; .*Number the requests of a seed from 0"),
    ],
)
def test_values_are_checked(field: str, value: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Request(**{"prompt_ids": (1, 2), field: value})


def test_values_are_plain():
    request = Request(
        np.array([1, 2]),
        np.int64(3),
        stop="x",
        stop_token_ids=[4],
        confidence_threshold=1,
        logprobs=np.int64(2),
        deadline=3,
    )
    assert request == Request(
        (1, 2), 3, stop=("x",), stop_token_ids=(4,), confidence_threshold=1.0, logprobs=2, deadline=3.0
    )
    assert {type(token) for token in request.prompt_ids} == {int}
    assert [type(v) for v in (request.max_new_tokens, request.logprobs, request.deadline)] == [int, int, float]
    same = Request((1, 2), 3, SamplingParams(), ("x",), (4,), confidence_threshold=1.0, logprobs=2, deadline=3.0)
    assert hash(request) == hash(same)
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.max_new_tokens = 5


def test_token_ids():
    assert token_ids("ids", None) == ()
    assert token_ids("ids", iter([3, np.int64(4)])) == (3, 4)
    for value, message in (
        (
            b"ab",
            "^ids: not token ids; expected a sequence of integers; found bytes. Pass ids as the tokenizer gives them",
        ),
        ("ab", "^ids: not token ids"),
        (1, "^ids: not token ids"),
        ([1, True], r"^ids\[1\]: not an integer"),
        ([1.0], r"^ids\[0\]: not an integer"),
    ):
        with pytest.raises(RequestError, match=message):
            token_ids("ids", value)


def test_stop_strings():
    assert stop_strings(None) == ()
    assert stop_strings("ab") == ("ab",)
    assert stop_strings(["ab", "c"]) == ("ab", "c")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            Request((1,) * 20),
            "prompt: longer than the engine serves; expected at most 19 tokens; found 20. Rebuild the",
        ),
        (Request((1, 10)), "prompt: an id outside the vocabulary; expected 0 … 9; found 10"),
        (Request((-1, 1)), "prompt: .*found -1"),
        (Request((1,), stop_token_ids=(11,)), "stop_token_ids: .*found 11"),
        (
            Request((1,), sampling=SamplingParams(logit_bias={10: 1.0})),
            "logit_bias: an id outside the vocabulary; expected 0 … 9; found 10",
        ),
        (Request((1,), max_draft=5), "max_draft: more than a block holds; expected 0 … 4; found 5"),
    ],
)
def test_limits_are_checked(request_: Request, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        request_.check(LIMITS, vocab_size=10)


def test_what_just_fits():
    Request((0, 9) * 9 + (1,), stop_token_ids=(9,), max_draft=4, confidence_threshold=0).check(LIMITS, vocab_size=10)
    Request((1,), max_new_tokens=0, max_draft=0).check(LIMITS, vocab_size=10)
    Request((1,), logprobs=64, deadline=1e-9, draw_stream=2**64 - 1).check(LIMITS, vocab_size=10)
    Request((1,), max_new_tokens=10**6).check(LIMITS, vocab_size=10)  # ends with `length` at max_seq_len


def test_stats():
    recorder = StatsRecorder(prefill=0.5, reused=7)
    for proposed, accepted, emitted in ((4, 4, 5), (2, 0, 1), (0, 0, 1), (3, 2, 2)):
        recorder.round(proposed, accepted, emitted)
    recorder.draft += 0.25
    stats = recorder.freeze()
    assert stats.rounds == 4
    assert stats.proposed == [4, 2, 0, 3]
    assert stats.accepted == [4, 0, 0, 2]
    assert stats.tokens_per_round == 9 / 4
    assert stats.acceptance_by_position == [2 / 3, 2 / 3, 1 / 2, 1]
    assert stats.seconds == Seconds(0.5, 0.25, 0.0, 0.0)
    assert stats.reused_tokens == 7
    recorder.round(1, 1, 2)
    assert stats.rounds == len(stats.proposed) == 4, "a frozen copy"


def test_stats_without_rounds():
    stats = StatsRecorder().freeze()
    assert (stats.rounds, stats.tokens_per_round, stats.acceptance_by_position) == (0, 0.0, [])
    assert Result("", (1,), "length", stats).tokens_per_second == 0


def test_tokens_a_second():
    recorder = StatsRecorder(prefill=9, draft=0.5, verify=1.0, host=0.5)
    recorder.round(3, 2, 3)
    recorder.round(3, 0, 1)
    assert Result("", (1, 2, 3, 4, 5), "length", recorder.freeze()).tokens_per_second == 4 / 2.0


@pytest.mark.parametrize("ids", [np.array([[1, 2]]), np.array(5), {1, 2}, b"ab", bytearray(b"ab"), {"a": 1}])
def test_what_is_no_sequence_of_ids(ids: object) -> None:
    with pytest.raises(RequestError, match=r"^stop_token_ids: not token ids; expected a sequence of integers; found"):
        token_ids("stop_token_ids", ids)


def test_an_array_is_no_integer() -> None:
    with pytest.raises(RequestError, match=r"^max_new_tokens: not an integer; .* found array\(\[3\]\)"):
        Request(prompt_ids=(1,), max_new_tokens=np.array([3]))  # type: ignore[arg-type]


def test_numpy_numbers_are_numbers() -> None:
    request = Request(prompt_ids=(1,), confidence_threshold=np.float32(0.5), max_new_tokens=np.int64(3))  # type: ignore[arg-type]
    assert (request.confidence_threshold, request.max_new_tokens) == (0.5, 3)
