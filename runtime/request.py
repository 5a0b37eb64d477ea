"""What a caller asks of the engine."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeGuard, cast

from runtime.errors import RequestError
from runtime.manifest import REBUILD, Limits
from runtime.sampling import SamplingParams, number

MAX_LOGPROBS = 64
"""Most alternatives reported a token."""

_DEFAULT = "Leave it out (None) for the bundle's default"


@dataclass(frozen=True)
class Request:
    """One sequence to generate. Values are checked here; `check` adds what depends on the engine.

    Args:
        prompt_ids: token ids, at least one.
        max_new_tokens: most tokens to generate; 0 gives an empty result.
        sampling: how tokens are chosen.
        stop: strings that end the text; they are cut from it.
        stop_token_ids: ids that end the sequence, besides the model's own.
        ignore_eos: don't stop at the model's end-of-sequence ids.
        speculate: False decodes plainly, one token a step; the output is the same.
        max_draft: most drafts a round, 0 … block size; None takes the bundle's default.
        confidence_threshold: drafts are cut before the first confidence below it, in [0, 1]; None takes the bundle's
            default.
        adaptive: False verifies `max_draft` drafts a round, whatever they cost; True lets the engine's policy propose
            fewer where they don't pay. A request that draws with a seed of its own by rejection sampling is never
            adaptive: its tokens depend on the proposal lengths, which must not depend on clock or load.
        logprobs: report each token's log-probability and that of so many likeliest alternatives; None reports none.
        deadline: seconds after its submission at which the request ends, whatever it has by then; None waits for ever.
        draw_stream: tells requests of the same seed apart in the random numbers, 0 … 2⁶⁴-1.

    Raises:
        RequestError: a value of the wrong type or out of its range.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    speculate: bool = True
    max_draft: int | None = None
    confidence_threshold: float | None = None
    adaptive: bool = True
    logprobs: int | None = None
    deadline: float | None = None
    draw_stream: int = 0

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("prompt_ids", token_ids("prompt", self.prompt_ids))
        if not self.prompt_ids:
            raise RequestError(
                "prompt", "empty", expected="at least one token", remedy="Start from a BOS token or some text"
            )
        put("max_new_tokens", _integer("max_new_tokens", self.max_new_tokens, "Pass 0 for an empty result, or more"))
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError(
                "sampling",
                "wrong type",
                expected="SamplingParams",
                found=type(self.sampling).__name__,
                remedy="Pass runtime.SamplingParams(temperature=…, seed=…)",
            )
        put("stop", stop_strings(self.stop))
        put("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "speculate", "adaptive"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    name,
                    "wrong type",
                    expected="True or False",
                    found=repr(getattr(self, name)),
                    remedy=f"Pass a bool as {name}, or leave it out",
                )
        if self.max_draft is not None:
            put("max_draft", _integer("max_draft", self.max_draft, _DEFAULT))
        if self.confidence_threshold is not None:
            threshold = number("confidence_threshold", self.confidence_threshold, _DEFAULT)
            if not 0 <= threshold <= 1:
                raise RequestError(
                    "confidence_threshold",
                    "not a probability",
                    expected="0 … 1",
                    found=repr(threshold),
                    remedy=_DEFAULT,
                )
            put("confidence_threshold", float(threshold))
        if self.logprobs is not None:
            remedy = "Leave it out (None) for no log-probabilities"
            put("logprobs", _integer("logprobs", self.logprobs, remedy))
            if self.logprobs > MAX_LOGPROBS:
                raise RequestError(
                    "logprobs", "out of range", expected=f"0 … {MAX_LOGPROBS}", found=self.logprobs, remedy=remedy
                )
        if self.deadline is not None:
            remedy = "Leave it out (None) to wait for ever"
            deadline = number("deadline", self.deadline, remedy)
            if deadline <= 0:
                raise RequestError(
                    "deadline", "out of range", expected="seconds above 0", found=repr(deadline), remedy=remedy
                )
            put("deadline", deadline)
        remedy = "Number the requests of a seed from 0"
        put("draw_stream", _integer("draw_stream", self.draw_stream, remedy))
        if self.draw_stream >= 2**64:
            raise RequestError(
                "draw_stream", "out of range", expected="0 … 2^64-1", found=self.draw_stream, remedy=remedy
            )

    def check(self, limits: Limits, vocab_size: int) -> None:
        """Refuse what an engine of these limits can't serve.

        Raises:
            RequestError: a prompt that leaves no room for a token, an id outside the vocabulary, `max_draft` above the
                block.
        """
        if len(self.prompt_ids) > limits.max_seq_len - 1:
            raise RequestError(
                "prompt",
                "longer than the engine serves",
                expected=f"at most {limits.max_seq_len - 1} tokens",
                found=len(self.prompt_ids),
                remedy=f"{REBUILD} and a larger --max-seq-len, or shorten it",
            )
        for name, ids in (("prompt", self.prompt_ids), ("stop_token_ids", self.stop_token_ids)):
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                outside = next(token for token in ids if not 0 <= token < vocab_size)
                raise RequestError(
                    name,
                    "an id outside the vocabulary",
                    expected=f"0 … {vocab_size - 1}",
                    found=outside,
                    remedy="Take the ids from the target's own tokenizer",
                )
        self.sampling.check(vocab_size)
        if self.max_draft is not None and self.max_draft > limits.block_size:
            raise RequestError(
                "max_draft",
                "more than a block holds",
                expected=f"0 … {limits.block_size}",
                found=self.max_draft,
                remedy=_DEFAULT,
            )


def stop_strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return stop strings as a tuple, from one string, several or None.

    Raises:
        RequestError: something that isn't a string, or an empty one (it would stop before the first token).
    """
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple):
        raise RequestError(
            "stop",
            "wrong type",
            expected="a string or a list of strings",
            found=type(value).__name__,
            remedy="Pass token ids as stop_token_ids",
        )
    for item in value:
        if not isinstance(item, str) or not item:
            raise RequestError(
                "stop", "not a stop string", expected="non-empty strings", found=repr(item), remedy="Leave it out"
            )
    return tuple(value)


def is_id_sequence(value: object) -> TypeGuard[Iterable[object]]:
    """Whether `value` can be token ids: an ordered collection, or an array of one axis."""
    if isinstance(value, str | bytes | bytearray | memoryview | Set | Mapping):
        return False
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) == 1


def _shown(value: object) -> str:
    return " ".join(repr(value).split())[:80]


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Return token ids as a tuple of plain ints; numpy integers are converted, None gives none. `name` is the argument
    that errors name.

    Raises:
        RequestError: a string, bytes, anything else that can't be iterated, or a token that is no integer (booleans and
            floats included).
    """
    if value is None:
        return ()
    remedy = "Pass ids as the tokenizer gives them, a list of integers"
    if not is_id_sequence(value):
        raise RequestError(
            name, "not token ids", expected="a sequence of integers", found=type(value).__name__, remedy=remedy
        )
    ids = tuple(value)
    if set(map(type, ids)) <= {int}:  # the common case, without a Python loop over a long prompt
        return cast("tuple[int, ...]", ids)
    return tuple(_integer(f"{name}[{i}]", token, remedy) for i, token in enumerate(ids))


def _integer(name: str, value: object, remedy: str) -> int:
    try:
        # An array has __index__ too, and refuses it where it isn't a single integer.
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise RequestError(name, "not an integer", expected="an integer ≥ 0", found=_shown(value), remedy=remedy)
    if number < 0:
        raise RequestError(name, "out of range", expected="≥ 0", found=number, remedy=remedy)
    return number
