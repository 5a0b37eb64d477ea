"""What a verify call decides: how many drafts to propose, which are accepted, which token follows, what is emitted.

Pure functions without state or model: they serve as their own oracle, and the golden vectors (`verification.json`,
`confidence.json`) are stated in their terms. Acceptance is speculative sampling (Leviathan et al. 2023; Chen et al.
2023) as DeepSpec's evaluator does it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.distribution import draw
from runtime.errors import RequestError

Float = NDArray[np.floating]
Int = NDArray[np.integer]

Q_FLOOR = 1e-8
"""Least q in the ratio p/q: a draft that q gave no probability is judged by p alone."""

RESIDUAL_FLOOR = 1e-8
"""Mass of (p-q)+ up to which the residual counts as rounding noise, and p takes its place."""


@dataclass(frozen=True)
class Emitted:
    """What one round adds to a request.

    `tokens` are committed and shown, a stop token included. `accepted` counts the round's accepted drafts, cut after an
    accepted stop token, but not by the length limit (as in verification.json, whose lists are never truncated).
    `stopped`: the last of `tokens` is a stop token. It was an accepted draft where ``len(tokens) == accepted``, and the
    next token otherwise.
    """

    tokens: tuple[int, ...]
    accepted: int
    stopped: bool


def proposal_length(confidence_logits: Float | None, threshold: float, cap: int) -> int:
    """Return how many drafts of a block are worth verifying, ``0 … cap``.

    The index of the first slot with ``sigmoid(logit) < threshold``, strictly, in float32: a tie stays. Threshold 0
    keeps all. Without a confidence head it is `cap`.

    The rule is causal, as sampled rows need: whether draft k is kept depends on logits 0 … k only, never on a later
    one. (Logit j is computed from drafts before j, so a rule that looked further would let the value of draft k decide
    whether k is verified, and bias the output.) Any rule of the form "first slot where …" has the property; a
    best-of-all-lengths rule has not.

    Args:
        confidence_logits: float32 ``[s]``, before the sigmoid; only the first `cap` are read.
        threshold: in [0, 1].
        cap: most drafts allowed, ≥ 0.
    """
    if confidence_logits is None or cap <= 0 or threshold <= 0:
        return max(cap, 0)
    logits = np.asarray(confidence_logits, dtype=np.float32)[:cap]
    with np.errstate(over="ignore"):  # exp(-logit) = inf is right: the sigmoid is 0
        low = np.float32(1) / (np.float32(1) + np.exp(-logits)) < np.float32(threshold)
    return int(low.argmax()) if low.any() else len(logits)


def accept_greedy(proposed: Sequence[int] | Int, argmax: Sequence[int] | Int) -> tuple[int, int]:
    """Return ``(accepted, next_token)`` at temperature 0: the longest prefix of `proposed` equal to the target's
    argmax.

    Args:
        proposed: the n drafts.
        argmax: the target's best token after the bonus and after each draft, n+1 of them.

    Raises:
        RequestError: `argmax` isn't one longer than `proposed`.
    """
    best = _ints(argmax)
    _require_rows("argmax", len(best), len(proposed) + 1)
    return accept_matching(proposed, best.__getitem__)


def accept_matching(proposed: Sequence[int] | Int, token: Callable[[int], int]) -> tuple[int, int]:
    """Return ``(accepted, next_token)`` where the target's choice needs no test against q: the longest prefix of
    `proposed` equal to what the target itself picks, and its pick after that.

    The tokens are then those of plain decoding, whatever was proposed: greedily, and for draws by Gumbel-max with noise
    that depends on the position alone (Daliri et al. 2024).

    Args:
        proposed: the n drafts.
        token: gives the target's pick after the bonus (0) and after each draft (1 … n), where the drafts before it
            stand. Called once a row, in order, and only for rows that are reached.
    """
    drafts = _ints(proposed)
    for i, draft in enumerate(drafts):
        own = token(i)
        if own != draft:
            return i, own
    return len(drafts), token(len(drafts))


def acceptance_probability(p: Float, q: Float, token: int) -> float:
    """Return ``min(1, p(token) / q(token))``, with q floored at `Q_FLOOR`. `p` and `q` are ``[V]``."""
    return min(1.0, float(p[token]) / max(float(q[token]), Q_FLOOR))


def residual(p: Float, q: Float) -> Float:
    """Return the distribution after a rejection, float ``[V]``: normalised ``max(p-q, 0)``, or p where nothing is left
    of it."""
    rest = np.maximum(p - q, 0)
    mass = float(rest.sum(dtype=np.float64))
    return p if mass <= RESIDUAL_FLOOR else rest / mass


def sampled_outcome(
    proposed: Sequence[int] | Int, q: Float, p_row: Callable[[int], Float], uniforms: Float
) -> tuple[int, Float]:
    """Return ``(accepted, distribution of the next token)``; arguments as for `accept_sampled`."""
    drafts = _ints(proposed)
    _require_rows("q", len(q), len(drafts))
    _require_rows("uniforms", len(uniforms), len(drafts))
    for i, token in enumerate(drafts):
        p = p_row(i)
        if not uniforms[i] < acceptance_probability(p, q[i], token):
            return i, residual(p, q[i])
    return len(drafts), p_row(len(drafts))


def accept_sampled(
    proposed: Sequence[int] | Int,
    q: Float,
    p_row: Callable[[int], Float],
    uniforms: Float,
    final_uniform: float,
) -> tuple[int, int]:
    """Return ``(accepted, next_token)`` such that every emitted token is distributed as the target's own p.

    Draft i is accepted while ``uniforms[i] < min(1, p_i/q_i)``, strictly, so that p = 0 rejects even a uniform of 0.
    The next token comes from the residual of the first rejected row, or from the last row of p when all are accepted.

    Args:
        proposed: the n drafts.
        q: ``[n, V]``, the very probabilities that the drafts were drawn from (never recomputed: DeepSpec 31).
        p_row: gives the target's probabilities ``[V]`` after the bonus (0) and after each draft (1 … n). Called at most
            once a row and only for rows that are reached, because a softmax over a whole vocabulary costs about a
            millisecond.
        uniforms: ``[n]`` in [0, 1).
        final_uniform: in [0, 1), for the draw of the next token.

    Raises:
        RequestError: a length that doesn't fit, or a distribution without mass.
    """
    accepted, distribution = sampled_outcome(proposed, q, p_row, uniforms)
    return accepted, draw(distribution, final_uniform)


def emit(committed: Sequence[int], stop_ids: Collection[int], remaining: int) -> Emitted:
    """Return what is emitted of one round (or of a prefill, whose only token is the next token).

    Args:
        committed: the accepted drafts, then the next token: at least one id.
        stop_ids: ids that end the sequence, wherever they sit; a set or frozenset for speed.
        remaining: how many tokens the request may still emit, ≥ 0.

    Raises:
        RequestError: nothing committed, or `remaining` negative.
    """
    if not committed:
        raise RequestError("committed", "a round commits at least the next token", found="no tokens")
    if remaining < 0:
        raise RequestError(
            "remaining", "a request can't emit a negative number of tokens", expected="≥ 0", found=remaining
        )
    accepted = len(committed) - 1
    end = len(committed)
    stopped = False
    for i, token in enumerate(committed):
        if token in stop_ids:
            end, accepted, stopped = i + 1, min(i + 1, accepted), True
            break
    if remaining < end:  # the stop token itself is beyond the limit
        end, stopped = remaining, False
    return Emitted(tuple(int(token) for token in committed[:end]), accepted, stopped)


def _ints(ids: Sequence[int] | Int) -> list[int]:
    """Plain ints: comparing and indexing numpy scalars costs several times as much."""
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


def _require_rows(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise RequestError(
            name, "wrong number of rows for the drafts that were verified", expected=expected, found=found
        )
