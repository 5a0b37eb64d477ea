"""Sampling parameters, the probabilities they make of logits, and counter-based random numbers.

A random number is a pure function of (seed, request, position, purpose): the same whatever the order of calls, the
batch, the slot or the neighbours. That is what makes a seeded request repeatable in a busy engine.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import RequestError

Float = NDArray[np.floating]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

MIN_TEMPERATURE = 1e-5
"""Least temperature above 0. Far below it ``1/T`` leaves float32, and what is meant is the argmax: temperature 0."""

MAX_TEMPERATURE = 1e5
"""Above it the distribution is uniform over the vocabulary for every model."""

_WORD = 2**64
_GREEDY = "Use 0 for the likeliest token"
_NO_CUT = "Use 1 for no cut"
_ANY_SEED = "Use None for a seed that the engine chooses"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen.

    `temperature` 0 takes the argmax (`greedy`), else logits are divided by it. `top_p` keeps the smallest set of tokens
    whose probabilities reach it. `seed` (0 … 2⁶⁴-1) fixes the random numbers; None lets the engine choose a seed.

    Raises:
        RequestError: a value that isn't a number of its range (booleans and NaN included).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        temperature = number("temperature", self.temperature, _GREEDY)
        if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            raise RequestError(
                "temperature",
                "out of range",
                expected=f"0 (greedy) or {MIN_TEMPERATURE:g} … {MAX_TEMPERATURE:g}",
                found=temperature,
                remedy=_GREEDY,
            )
        top_p = number("top_p", self.top_p, _NO_CUT)
        if not 0 < top_p <= 1:
            raise RequestError("top_p", "out of range", expected="above 0, at most 1", found=top_p, remedy=_NO_CUT)
        if self.seed is not None:
            if isinstance(self.seed, bool) or not isinstance(self.seed, int | np.integer):
                raise RequestError(
                    "seed", "not an integer", expected="an integer or None", found=repr(self.seed), remedy=_ANY_SEED
                )
            if not 0 <= self.seed < _WORD:
                raise RequestError("seed", "out of range", expected="0 … 2^64-1", found=self.seed, remedy=_ANY_SEED)
            object.__setattr__(self, "seed", int(self.seed))
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "top_p", top_p)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def probabilities(logits: Float32, params: SamplingParams) -> Float32:
    """Return the probabilities that `params` makes of `logits`: temperature, then top_p.

    Args:
        logits: float32 ``[V]``; -inf forbids a token.
        params: not greedy.

    Returns:
        float32 ``[V]``, sums to 1; a new array.

    Raises:
        RequestError: greedy parameters, or logits that aren't numbers (NaN, +inf, or all -inf).
    """
    if params.greedy:
        raise RequestError(
            "temperature", "a greedy request has no distribution", expected="above 0", found=0, remedy="Take the argmax"
        )
    best = logits.max()
    if not math.isfinite(best):
        raise RequestError(
            "logits",
            "the largest one is not a number",
            expected="a finite value",
            found=best,
            remedy="Check the bundle with python -m runtime validate DIR",
        )
    with np.errstate(over="ignore"):  # a difference beyond float32 is -inf, and its exp 0, as it should be
        p = logits - best  # before the division, so that the largest term is exp(0)
        p /= np.float32(params.temperature)
    np.exp(p, out=p)
    p /= p.sum()
    return p if params.top_p >= 1 else _nucleus(p, params.top_p)


def _nucleus(p: Float32, top_p: float) -> Float32:
    """Return p cut to the smallest set of tokens with cumulative probability ≥ `top_p`, normalised again.

    Of equal probabilities the lower id comes first. Only the values are sorted, and only the probable ones: those above
    a falling bar are the head of the sorted vocabulary, so the result is that of the full sort of ids, which takes
    milliseconds for 50k entries.
    """
    bar = float(p.max())
    while True:
        bar = bar * 2.0**-8 if bar > 2.0**-40 else 0.0
        head = np.sort(p[p > bar])[::-1]
        cumulative = np.cumsum(head, dtype=np.float64)
        if cumulative[-1] >= top_p or bar == 0:
            break
    # Where rounding keeps the whole sum below top_p, everything stays.
    count = min(int(np.searchsorted(cumulative, top_p, side="left")) + 1, len(head))
    least = head[count - 1]
    kept = p > least
    ties = np.flatnonzero(p == least)
    kept[ties[: count - np.count_nonzero(kept)]] = True
    out = np.where(kept, p, np.float32(0))
    out /= out.sum()
    return out


_DRAW_BLOCK = 512


def draw(p: Float, u: float) -> int:
    """Return the token that the uniform `u` picks from `p` by inverse CDF; never one of probability 0.

    The first index whose cumulative sum *exceeds* ``u·total``: there the sum has just grown, so p > 0; and one exists,
    since ``u·total < total`` for every u < 1 that `uniforms` gives. p need not be normalised exactly, the total is its
    own sum. Sums are float64, first over blocks, then within the block found: a tenth of the time of one long running
    sum.

    Args:
        p: float ``[V]``, ≥ 0.
        u: in [0, 1).

    Raises:
        RequestError: p without mass (or with NaN), u outside its range.
    """
    if not 0 <= u < 1:
        raise RequestError(
            "u", "not a uniform number", expected="in [0, 1)", found=u, remedy="Take it from runtime.sampling.uniforms"
        )
    coarse = np.add.reduceat(p, np.arange(0, len(p), _DRAW_BLOCK), dtype=np.float64).cumsum()
    total = float(coarse[-1])
    if not 0 < total < math.inf:
        raise RequestError(
            "p",
            "a distribution without finite mass",
            expected="a positive sum",
            found=total,
            remedy="Take it from runtime.sampling.probabilities",
        )
    point = u * total
    block = int(np.searchsorted(coarse, point, side="right"))
    start = block * _DRAW_BLOCK
    part = p[start : start + _DRAW_BLOCK]
    fine = np.cumsum(part, dtype=np.float64)
    index = int(np.searchsorted(fine, point - (coarse[block - 1] if block else 0.0), side="right"))
    if index == len(part):  # the two ways of summing the block differ in the last bit, and the point lies between
        index = int(np.flatnonzero(part)[-1])
    return start + index


class Purpose(IntEnum):
    """What a random number is for; part of its key, so that the streams are independent. Values are part of a seed's
    meaning: never renumber."""

    DRAFT = 0
    ACCEPT = 1
    FINAL = 2


class _Philox(threading.local):
    """One reusable Philox generator a thread: making one costs ten times as much as setting its state."""

    def __init__(self) -> None:
        self.key = np.zeros(2, np.uint64)
        self.counter = np.zeros(4, np.uint64)
        self.bits = np.random.Philox(key=self.key)
        # buffer_pos 4: the buffer is used up, the next value comes from the counter.
        self.state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": self.counter, "key": self.key},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def raw(self, seed: int, request: int, position: int, purpose: int, n: int) -> NDArray[np.uint64]:
        key, counter = self.key, self.counter
        try:
            key[0], key[1] = seed, request
            # Word 0 counts blocks of four values, upwards from here: n values never run into another key's.
            counter[0], counter[1], counter[2] = 0, position, purpose
        except (OverflowError, TypeError) as error:
            raise RequestError(
                "random numbers",
                "the key is made of words",
                expected="seed, request, position and purpose in 0 … 2^64-1",
                found=(seed, request, position, purpose),
                remedy="Choose a seed and a draw_stream in that range",
            ) from error
        self.bits.state = self.state
        words: NDArray[np.uint64] = self.bits.random_raw(n)
        return words


_philox = _Philox()


def uniforms(seed: int, request: int, position: int, purpose: Purpose, n: int = 1) -> Float64:
    """Return `n` uniforms in [0, 1), float64 ``[n]`` on the grid 2⁻⁵³, for draws on the host.

    Philox4x64-10 (Salmon et al., SC 2011) with key (seed, request) and counter (block, position, purpose, 0). The first
    k of n values are the values for n = k. `position` is any number that a request uses once for a purpose: a round's
    start_pos.

    Raises:
        RequestError: a part of the key outside 0 … 2⁶⁴-1.
    """
    words = _philox.raw(seed, request, position, purpose, n) >> np.uint64(11)
    return words.astype(np.float64) * np.float64(2.0**-53)


def uniforms32(seed: int, request: int, position: int, purpose: Purpose, n: int = 1) -> Float32:
    """Return the same numbers as `uniforms`, cut to float32 ``[n]`` on the grid 2⁻²³, for draws inside a graph.

    2⁻²³ and not 2⁻²⁴, though float32 can hold that: the largest u is then 1 - 2⁻²³, and ``u·total`` lies at least a
    whole unit in the last place below `total`, in every rounding mode and with fused arithmetic. So an inverse CDF in
    float32 finds a token with a cumulative sum above it. On a finer grid (or with float64 numbers rounded to float32,
    where u becomes 1) it may not.
    """
    words = _philox.raw(seed, request, position, purpose, n) >> np.uint64(41)
    return words.astype(np.float32) * np.float32(2.0**-23)


def number(name: str, value: object, remedy: str) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise RequestError(name, "not a number", expected="a finite number", found=repr(value), remedy=remedy)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(name, "not a finite number", expected="a finite number", found=number, remedy=remedy)
    return number
