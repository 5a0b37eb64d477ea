"""What sampling parameters make of the target's logits: adjusted logits, probabilities, draws, log-probabilities.

One row ``[V]`` at a time, in host memory. Rows are those of a session's output and are never written to.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.errors import RequestError
from runtime.sampling import SamplingParams

Float = NDArray[np.floating]
Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


class History:
    """What a request's bias and penalties look at: the tokens so far. See `SamplingParams` for the formulas.

    Args:
        params: of the request, checked against the vocabulary.
        prompt_ids: of the request; the repetition penalty counts them in.
        vocab_size: V; with a penalty the history takes ``4·V`` bytes.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int) -> None:
        self._params = params
        bias = dict(params.logit_bias)
        self._bias_ids = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)
        # Of each id: how often the output has it, 0 if only the prompt does, below 0 if it was never seen.
        self._counts = np.full(vocab_size if params.penalises else 0, -1, np.int32)
        self._seen = array("q")
        if params.repetition_penalty != 1:
            self._seen.extend(dict.fromkeys(prompt_ids))
            self._counts[self._seen] = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Note tokens that the request has emitted."""
        if not self._params.penalises:
            return
        for token in tokens:
            count = int(self._counts[token])
            if count < 0:
                self._seen.append(token)
            self._counts[token] = max(count, 0) + 1

    def adjusted(self, logits: Float32, extra_tokens: Sequence[int] = ()) -> Float32:
        """Return `logits` with bias and penalties, float32 ``[V]``: a new array, or `logits` itself where none applies.

        Bit for bit what `add` of `extra_tokens` would give after it.

        Args:
            logits: float32 ``[V]``.
            extra_tokens: the drafts before this row in its block, as if they were accepted.
        """
        penalises = self._params.penalises and bool(self._seen or extra_tokens)
        if not (penalises or len(self._bias)):
            return logits
        out = logits.copy()
        out[self._bias_ids] += self._bias
        if penalises:
            extra = Counter(extra_tokens)
            extra_ids = np.array(list(extra), np.int64)
            extra_counts = np.maximum(self._counts[extra_ids], 0) + np.array(list(extra.values()), np.int32)
            extra_logits = self._penalised(out[extra_ids], extra_counts)
            seen = np.array(self._seen)
            out[seen] = self._penalised(out[seen], self._counts[seen])
            out[extra_ids] = extra_logits
        return out

    def _penalised(self, logits: Float32, counts: NDArray[np.int32]) -> Float32:
        """`logits` of ids that the output has `counts` times; both ``[n]``."""
        params = self._params
        if params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            logits = np.where(logits > 0, logits / penalty, logits * penalty)
        if params.frequency_penalty or params.presence_penalty:
            taken = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
            logits = logits - taken.astype(np.float32)
        return logits


def probabilities(logits: Float32, params: SamplingParams) -> Float32:
    """Return the probabilities that `params` makes of `logits`: temperature, then min_p, top_k and top_p.

    Args:
        logits: float32 ``[V]``, adjusted by the request's `History`; -inf forbids a token.
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
    best = _best(logits)
    kept = _kept(logits, best, params)
    if kept is None:
        return _softmax(logits, best, params.temperature)
    p = np.zeros(len(logits), np.float32)
    p[kept] = _softmax(logits[kept], best, params.temperature)
    return p


def gumbel_draw(logits: Float32, params: SamplingParams, noise: Float32) -> int:
    """Return the token that `noise` draws from ``probabilities(logits, params)``: the argmax of ``logits + T·noise``
    over the tokens that min_p, top_k and top_p keep; of equal sums the lower id.

    The draft graph adds ``T·noise`` to its logits and takes the argmax, in float32 too: where drafter and target agree
    on the logits, they agree on the token.

    Args:
        logits: float32 ``[V]``, adjusted by the request's `History`; -inf forbids a token.
        params: not greedy.
        noise: float32 ``[V]``, of `runtime.randomness.gumbel` for the position of the token.

    Raises:
        RequestError: logits that aren't numbers (NaN, +inf, or all -inf).
    """
    kept = _kept(logits, _best(logits), params)
    temperature = np.float32(params.temperature)
    if kept is None:
        return int((logits + temperature * noise).argmax())
    return int(kept[(logits[kept] + temperature * noise[kept]).argmax()])


def _best(logits: Float32) -> float:
    best = float(logits.max())
    if not math.isfinite(best):
        raise RequestError(
            "logits",
            "the largest one is not a number",
            expected="a finite value",
            found=best,
            remedy="Check the bundle with python -m runtime validate DIR",
        )
    return best


def _exp(logits: Float32, best: float, temperature: float = 1.0) -> Float32:
    """Return ``exp((logits - best) / temperature)``: no term is above exp(0), since `best` is the largest logit."""
    with np.errstate(over="ignore"):  # a difference beyond float32 is -inf, and its exp 0, as it should be
        p = logits - np.float32(best)
        p /= np.float32(temperature)
    np.exp(p, out=p)
    return p


def _softmax(logits: Float32, best: float, temperature: float) -> Float32:
    p = _exp(logits, best, temperature)
    p /= p.sum()
    return p


def _kept(logits: Float32, best: float, params: SamplingParams) -> Int64 | None:
    """Return the ids, ascending, that min_p, then top_k, then top_p keep; None where none of them is set.

    Each looks only at what the one before it has left. min_p is a bar for logits, so that only top_p takes a softmax.
    """
    kept, rest = None, logits
    if params.min_p > 0:
        kept = np.flatnonzero(logits >= best + params.temperature * math.log(params.min_p))
        rest = logits[kept]
    if 0 < params.top_k < len(rest):
        largest = _largest(rest, params.top_k)
        kept = largest if kept is None else kept[largest]
        rest = rest[largest]
    if params.top_p < 1:
        nucleus = _nucleus(_softmax(rest, best, params.temperature), params.top_p)
        kept = nucleus if kept is None else kept[nucleus]
    return kept


def _nucleus(p: Float32, top_p: float) -> Int64:
    """Return the indices, ascending, of the smallest set of p with cumulative probability ≥ `top_p`.

    Of equal probabilities the lower index comes first. Only the values are sorted, and only the probable ones: those
    above a falling bar are the head of the sorted vocabulary, so the result is that of the full sort of ids, which
    takes milliseconds for 50k entries.
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
    return _down_to(p, head[count - 1], count)


def _largest(values: Float32, count: int) -> Int64:
    """Return the indices, ascending, of the `count` largest values, 1 … all; of equals the lower come first."""
    at = len(values) - count
    return _down_to(values, np.partition(values, at)[at], count)


def _down_to(values: Float32, least: np.float32, count: int) -> Int64:
    """`_largest`, where the `count`-th largest value is known to be `least`."""
    indices = np.flatnonzero(values >= least)
    surplus = len(indices) - count
    if surplus:
        indices = np.delete(indices, np.flatnonzero(values[indices] == least)[-surplus:])
    return indices


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
            "u",
            "not a uniform number",
            expected="in [0, 1)",
            found=u,
            remedy="Take it from runtime.randomness.uniforms",
        )
    coarse = np.add.reduceat(p, np.arange(0, len(p), _DRAW_BLOCK), dtype=np.float64).cumsum()
    total = float(coarse[-1])
    if not 0 < total < math.inf:
        raise RequestError(
            "p",
            "a distribution without finite mass",
            expected="a positive sum",
            found=total,
            remedy="Take it from runtime.distribution.probabilities",
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


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token, and the likeliest `top` ones as (id, log-probability), the likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs(logits: Float32, token: int, top: int) -> TokenLogprob:
    """Return what is reported of `token`: natural logarithms of ``softmax(logits)``, as vLLM and OpenAI's API do.

    The logits are the model's own, without temperature, bias or penalties. Sums are float64. Of equal probabilities the
    lower id comes first.

    Args:
        logits: float32 ``[V]``.
        token: an id.
        top: how many of the likeliest tokens to report, ≥ 0; `token` may or may not be one of them.

    Raises:
        RequestError: logits that aren't numbers (NaN, +inf, or all -inf).
    """
    best = _best(logits)
    total = best + math.log(_exp(logits, best).sum(dtype=np.float64))
    ids = _largest(logits, min(top, len(logits))) if top else np.empty(0, np.int64)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    return TokenLogprob(token, float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in ids))
