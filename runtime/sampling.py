"""How a request wants its tokens chosen. What the parameters make of logits is in `runtime.distribution`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from runtime.errors import RequestError

MIN_TEMPERATURE = 1e-5
"""Least temperature above 0. Far below it ``1/T`` leaves float32, and what is meant is the argmax: temperature 0."""

MAX_TEMPERATURE = 1e5
"""Above it the distribution is uniform over the vocabulary for every model."""

MAX_REPETITION_PENALTY = 1e3
"""Greatest repetition penalty, and the inverse of the least: logits stay within float32."""

MAX_BIAS = 1e6
"""Most that a bias may add or take: far above it float32 has no digits left for the logit itself."""

Coupling = Literal["rejection", "gumbel"]
COUPLINGS: tuple[Coupling, ...] = ("rejection", "gumbel")

_WORD = 2**64
_GREEDY = "Use 0 for the likeliest token"
_NO_CUT = "Use 1 for no cut"
_NO_PENALTY = "Use 0 for no penalty"
_ANY_SEED = "Use None for a seed that the engine chooses"
_BIAS = "Pass {token id: what is added to its logit}, -inf to forbid the token"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. What is set applies in this order, which is that of vLLM's sampler:

    1. `logit_bias`: added to the logits of these ids; ``-inf`` forbids one. A mapping of id to bias; kept as pairs,
       sorted by id, without biases of 0.
    2. `repetition_penalty` r: logits of tokens of prompt or output are divided by r if positive, else multiplied by it
       (Keskar et al. 2019, as in Hugging Face's processor). 1 for none.
    3. `frequency_penalty` f and `presence_penalty` s, each -2 … 2: ``f·count + s·[count > 0]`` is taken from a token
       that the output has `count` times; the prompt doesn't count (OpenAI's API reference). 0 for none.
    4. `temperature`: 0 takes the argmax (`greedy`), else logits are divided by it.
    5. `min_p`: tokens less probable than `min_p` times the likeliest one are dropped (Nguyen et al. 2024). 0 for none.
    6. `top_k`: the k likeliest of the rest stay (Fan et al. 2018). 0 keeps all.
    7. `top_p`: the smallest set of the rest whose probabilities, normalised again, reach it stays (Holtzman et al.
       2020). 1 keeps all.

    Of equals, `top_k` and `top_p` take the lower ids, as the argmax does.

    `seed` (0 … 2⁶⁴-1) fixes the random numbers; None lets the engine choose a seed. `coupling` says how drafts are
    verified when sampling: by ``"rejection"``, which accepts most, or by ``"gumbel"``, where drafter and target draw
    with the same noise, so that the tokens are those of plain decoding with the same seed.

    Raises:
        RequestError: a value that isn't of its type (booleans and NaN are no numbers) or outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    coupling: Coupling = "rejection"

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("temperature", _temperature(self.temperature))
        tiny = math.nextafter(0, 1)
        put("top_p", _within("top_p", self.top_p, tiny, 1, _NO_CUT, "above 0, at most 1"))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, "0 … 2^64-1", _ANY_SEED, high=_WORD - 1))
        put("top_k", _integer("top_k", self.top_k, "0 or more", "Use 0 for no cut"))
        put("min_p", _within("min_p", self.min_p, 0, 1, "Use 0 for no cut"))
        most = MAX_REPETITION_PENALTY
        penalty = _within("repetition_penalty", self.repetition_penalty, 1 / most, most, "Use 1 for no penalty")
        put("repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, _within(name, getattr(self, name), -2, 2, _NO_PENALTY))
        put("logit_bias", _bias(self.logit_bias))
        if self.coupling not in COUPLINGS:
            raise RequestError(
                "coupling",
                "not a coupling",
                expected=" or ".join(COUPLINGS),
                found=repr(self.coupling),
                remedy="Use rejection, or gumbel for the tokens of plain decoding",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """Whether logits are used as they are: no bias, no penalty."""
        return not (self.logit_bias or self.penalises)

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on the tokens before it beyond the model."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def check(self, vocab_size: int) -> None:
        """Refuse what a vocabulary of this size can't serve.

        Raises:
            RequestError: a bias on an id outside the vocabulary, or on all of it to forbid it.
        """
        bias = dict(self.logit_bias)
        outside = next((token for token in bias if token >= vocab_size), None)
        if outside is not None:
            raise RequestError(
                "logit_bias",
                "an id outside the vocabulary",
                expected=f"0 … {vocab_size - 1}",
                found=outside,
                remedy="Take the ids from the target's own tokenizer",
            )
        if len(bias) == vocab_size and max(bias.values()) == -math.inf:
            raise RequestError("logit_bias", "every token is forbidden", remedy="Leave at least one")


def _temperature(value: object) -> float:
    temperature = number("temperature", value, _GREEDY)
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise RequestError(
            "temperature",
            "out of range",
            expected=f"0 (greedy) or {MIN_TEMPERATURE:g} … {MAX_TEMPERATURE:g}",
            found=temperature,
            remedy=_GREEDY,
        )
    return temperature


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    # Pairs are what a copy of parameters (dataclasses.replace) passes in.
    if not isinstance(value, Mapping | tuple):
        raise RequestError("logit_bias", "wrong type", expected="a mapping", found=type(value).__name__, remedy=_BIAS)
    try:
        entries = dict(value)
    except (TypeError, ValueError):
        raise RequestError(
            "logit_bias", "wrong type", expected="a mapping", found="a tuple of other things than pairs", remedy=_BIAS
        ) from None
    biases = {}
    for key, bias in entries.items():
        token = _integer("logit_bias", key, "ids of 0 or more", _BIAS)
        name = f"logit_bias[{token}]"
        forbidden = isinstance(bias, float | np.floating) and bias == -math.inf
        biases[token] = -math.inf if forbidden else _within(name, bias, -MAX_BIAS, MAX_BIAS, _BIAS)
    return tuple(sorted((token, bias) for token, bias in biases.items() if bias != 0))


def _within(name: str, value: object, low: float, high: float, remedy: str, expected: str | None = None) -> float:
    found = number(name, value, remedy)
    if not low <= found <= high:
        expected = f"{low:g} … {high:g}" if expected is None else expected
        raise RequestError(name, "out of range", expected=expected, found=found, remedy=remedy)
    return found


def _integer(name: str, value: object, expected: str, remedy: str, high: float = math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise RequestError(name, "not an integer", expected="an integer", found=repr(value), remedy=remedy)
    if not 0 <= value <= high:
        raise RequestError(name, "out of range", expected=expected, found=value, remedy=remedy)
    return int(value)


def number(name: str, value: object, remedy: str) -> float:
    """Return `value` as a float; `name` is the argument that errors name.

    Raises:
        RequestError: something that is no finite number, booleans included.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise RequestError(name, "not a number", expected="a finite number", found=repr(value), remedy=remedy)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(name, "not a finite number", expected="a finite number", found=number, remedy=remedy)
    return number
