"""Does drafting pay on this machine? A short greedy answer with and without drafts, in turn, on one engine.

Both answers are of the same prompt and length, so that they differ in nothing but the drafts. How many of those are
accepted depends on the prompt: of a question in words far more than of the random ids in a bundle's vectors, which have
to do where there is no tokenizer. What a round costs doesn't depend on it, and `Timing.pays_from` is that alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Literal

from runtime.engine import Engine
from runtime.errors import RequestError
from runtime.manifest import Limits
from runtime.request import Request
from runtime.result import Result
from runtime.scheduler import FifoScheduler
from runtime.slots import SlotTable
from runtime.text import Tokenizer

QUESTION = "Why is the sky blue? Answer in a few sentences."
TOKENS = 32
"""Of an answer, where the sequence has room for them."""
LEAST_TOKENS = 8
"""Fewer aren't worth timing."""
PAIRS = 3
SECONDS = 30.0
"""After which no other pair begins."""
EVEN = 0.05
"""Of a speed-up, what differs from one run to the next."""

Verdict = Literal["pays", "even", "costs"]
_WORDS: Mapping[Verdict, str] = {
    "pays": "drafting pays, as it does from {} on",
    "even": "drafting makes no difference; it pays from {} on",
    "costs": "drafting costs more than it saves here; serve with max_draft 0, unless prompts give {} or more",
}


@dataclass(frozen=True)
class Prompt:
    """What is answered, and whether that is `QUESTION`, or else random ids."""

    ids: tuple[int, ...]
    words: bool

    @staticmethod
    def of(tokenizer: Tokenizer | None, limits: Limits, ids: Sequence[int]) -> Prompt:
        """The question through the chat template, or bare without one; `ids` where it can't be asked, or leaves too
        little room for an answer."""
        for asked in () if tokenizer is None else (_chat(tokenizer), _text(tokenizer)):
            prompt = Prompt(asked, True)
            if asked and prompt.room(limits) >= LEAST_TOKENS:
                return prompt
        return Prompt(tuple(ids), False)

    def room(self, limits: Limits) -> int:
        """How many tokens an answer has; fewer than `LEAST_TOKENS` are not to be timed."""
        return min(TOKENS, limits.max_seq_len - len(self.ids))


def _chat(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The question as its ids; none where there is no chat template."""
    with suppress(RequestError):
        return tuple(tokenizer.encode_chat([{"role": "user", "content": QUESTION}]))
    return ()


def _text(tokenizer: Tokenizer) -> tuple[int, ...]:
    with suppress(RequestError):
        return tuple(tokenizer.encode_text(QUESTION))
    return ()


@dataclass(frozen=True)
class Parting:
    """The first token that two answers don't share, the first being 0, and how far the best two logits of plain
    decoding are apart there."""

    token: int
    gap: float

    def __str__(self) -> str:
        return (
            f"the answer with drafts parts from the plain one at token {self.token} (best logits {self.gap:.2g} apart)"
        )


@dataclass(frozen=True)
class Timing:
    """`words`: the prompt was a question, not random ids. `tokens` is the length of each answer, of which `pairs` were
    timed, and `max_draft` the most drafts a round.
    `tokens_per_round` is τ. `speculative` and `plain` are tokens a second after the first token, medians.
    `parted` is None where both answers are the same."""

    words: bool
    tokens: int
    pairs: int
    max_draft: int
    tokens_per_round: float
    speculative: float
    plain: float
    parted: Parting | None

    @property
    def speedup(self) -> float:
        return self.speculative / self.plain

    @property
    def pays_from(self) -> float:
        """What a round with drafts costs, in plain tokens: drafting pays where a round gives more."""
        return self.tokens_per_round / self.speedup

    @property
    def verdict(self) -> Verdict:
        """Nearer to plain decoding than `EVEN`, it is chance."""
        if abs(self.speedup - 1) <= EVEN:
            return "even"
        return "pays" if self.speedup > 1 else "costs"

    def line(self) -> str:
        on = "" if self.words else " on random ids"
        return (
            f"{self.tokens_per_round:.1f} tokens a round{on}, {self.speedup:.2f}x of plain decoding "
            f"({self.speculative:.1f} against {self.plain:.1f} tokens/s): "
            f"{_WORDS[self.verdict].format(f'{self.pays_from:.1f} tokens a round')}"
        )

    def facts(self) -> dict[str, object]:
        """With stable keys, for programs."""
        return {
            "prompt": "question" if self.words else "random ids",
            "tokens": self.tokens,
            "pairs": self.pairs,
            "max_draft": self.max_draft,
            "tokens_per_round": self.tokens_per_round,
            "speculative_tokens_per_second": self.speculative,
            "plain_tokens_per_second": self.plain,
            "speedup": self.speedup,
            "pays_from": self.pays_from,
            "verdict": self.verdict,
            "parted": None if self.parted is None else asdict(self.parted),
        }


class Unshared(FifoScheduler):
    """Nothing that a request leaves in its slot serves the next. A plain answer leaves a prompt without its ring rows,
    and one that drafted with them: whoever took them over would accept fewer drafts than on its own."""

    def finish(self, request_id: int, *, keep: bool = True) -> None:
        super().finish(request_id, keep=False)


def scheduler(limits: Limits) -> Unshared:
    """For the engine that `measure` is given."""
    table = SlotTable(limits.slots, limits.window, limits.tap_rows)
    chunk = limits.prefill_chunk
    return Unshared(table, prefill_chunk=chunk, prefill_budget=chunk, max_batch=limits.batches[-1])


def measure(engine: Engine, prompt: Prompt, clock: Callable[[], float] = time.perf_counter) -> Timing:
    """Time answers to `prompt` on an engine that serves nobody else, its scheduler being of `scheduler`.

    Drafts are those of the bundle's defaults, of the whole block where it drafts none, and never adapted: the question
    is what they cost.

    Raises:
        ServingError: a call that failed.
    """
    manifest = engine.bundle.manifest
    tokens = prompt.room(manifest.limits)
    drafts = manifest.serving.max_draft or manifest.limits.block_size

    drafting = Request(prompt_ids=prompt.ids, max_new_tokens=tokens, ignore_eos=True, max_draft=drafts, adaptive=False)
    plainly = replace(drafting, speculate=False)
    # Sizes that run for the first time are loaded, captured or packed then.
    speculative, _ = _timed(engine, drafting, clock)
    plain, _ = _timed(engine, plainly, clock)
    rates: dict[bool, list[float]] = {True: [], False: []}
    began = clock()
    for pair in range(PAIRS):
        if pair and clock() - began > SECONDS:
            break
        for request in (drafting, plainly) if pair % 2 == 0 else (plainly, drafting):
            rates[request.speculate].append(_timed(engine, request, clock)[1])
    return Timing(
        words=prompt.words,
        tokens=tokens,
        pairs=len(rates[True]),
        max_draft=drafts,
        tokens_per_round=speculative.stats.tokens_per_round,
        speculative=median(rates[True]),
        plain=median(rates[False]),
        parted=_parting(engine, plainly, speculative.token_ids, plain.token_ids),
    )


def _timed(engine: Engine, request: Request, clock: Callable[[], float]) -> tuple[Result, float]:
    """The result, and its tokens a second after the first piece, with which the prompt is done."""
    handle = engine.submit(request)
    pieces = engine.stream(handle)
    first = len(next(pieces).token_ids)
    began = clock()
    for _ in pieces:
        pass
    seconds = clock() - began
    result = engine.result(handle)
    return result, (len(result.token_ids) - first) / seconds


def _parting(engine: Engine, plainly: Request, one: Sequence[int], other: Sequence[int]) -> Parting | None:
    token = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
    if token is None:
        return None
    again = engine.result(engine.submit(replace(plainly, max_new_tokens=token + 1, logprobs=2)))
    (_, best), (_, second) = again.logprobs[-1].top if again.logprobs else ((0, 0.0), (0, 0.0))
    return Parting(token, best - second)
