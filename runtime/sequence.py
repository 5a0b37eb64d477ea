"""One request while it runs: what it may still emit, its random numbers, text and statistics. No model, no slot."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.errors import RequestError
from runtime.manifest import Manifest
from runtime.request import FinishReason, Request, Result, StatsRecorder
from runtime.sampling import Purpose, probabilities, uniforms, uniforms32
from runtime.text import TextStream, Tokenizer
from runtime.verify import accept_greedy, accept_sampled, emit


@dataclass(frozen=True)
class Piece:
    """What a stream yields: new `token_ids`, and the `text` that became certain with them (maybe empty)."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Proposal:
    """Drafts to verify: `ids`, and the probabilities `q` ``[≥ n, V]`` that they were drawn from (None if greedy)."""

    ids: list[int]
    q: NDArray[np.float32] | None


NO_DRAFTS = Proposal([], None)


class Sequence:
    """A running request.

    Args:
        request: checked, with a seed.
        manifest: of the bundle that serves it.
        tokenizer: None serves ids only; `text` then stays empty.
    """

    def __init__(self, request: Request, manifest: Manifest, tokenizer: Tokenizer | None) -> None:
        limits, serving = manifest.limits, manifest.serving
        self.request = request
        self.sampling = request.sampling
        self.threshold = (
            serving.confidence_threshold if request.confidence_threshold is None else request.confidence_threshold
        )
        self.recorder = StatsRecorder()
        self.finished: FinishReason | None = None
        self.tokens: list[int] = []
        self._max_draft = serving.max_draft if request.max_draft is None else request.max_draft
        eos = () if request.ignore_eos else manifest.models.eos_token_ids
        self._stop_ids = frozenset((*eos, *request.stop_token_ids))
        self._limit = min(request.max_new_tokens, limits.max_seq_len - len(request.prompt_ids))
        self._text_stream = None if tokenizer is None else TextStream(tokenizer, request.stop)
        self._text: list[str] = []
        self._taken = (0, 0)

    @property
    def bonus(self) -> int:
        """The newest committed token, on which the target has not run yet."""
        return self.tokens[-1]

    @property
    def speculates(self) -> bool:
        """Whether it drafts at all, and so whether its ring is worth seeding."""
        return self.request.speculate and self._max_draft > 0

    def draft_cap(self) -> int:
        """Most drafts worth verifying now: each round commits one token more than it accepts."""
        if not self.speculates:
            return 0
        return min(self._max_draft, self._limit - len(self.tokens) - 1)

    def draft_uniforms(self, start: int, n: int) -> NDArray[np.float32]:
        """The chain's uniforms ``[n]`` of the round that starts at `start`."""
        return uniforms32(self._seed, self.request.draw_stream, start, Purpose.DRAFT, n)

    def accept(
        self, proposal: Proposal, argmax: NDArray[np.int64], logits: NDArray[np.float32], start: int
    ) -> tuple[int, int]:
        """How many drafts stand, and the token after them.

        Args:
            proposal: the n drafts that were verified; none after a prefill.
            argmax, logits: the target's ``[≥ n+1]`` and ``[≥ n+1, V]`` after the bonus and after each draft.
            start: position of the bonus token (of the last prompt token after a prefill): it keys the draws.
        """
        n = len(proposal.ids)
        if self.sampling.greedy:
            accepted, token = accept_greedy(proposal.ids, argmax[: n + 1])
            # The best of NaN is no token. (Sampling looks at the whole row, and refuses it likewise.)
            if not math.isfinite(logits[accepted, token]):
                raise RequestError(
                    "logits",
                    "the largest one is not a number",
                    expected="a finite value",
                    found=logits[accepted, token],
                    remedy="Validate the bundle",
                )
            return accepted, token
        q = np.empty((0, 0), np.float32) if proposal.q is None else proposal.q
        seed, stream = self._seed, self.request.draw_stream
        return accept_sampled(
            proposal.ids,
            q,
            lambda i: probabilities(logits[i], self.sampling),
            uniforms(seed, stream, start, Purpose.ACCEPT, n),
            float(uniforms(seed, stream, start, Purpose.FINAL)[0]),
        )

    def emit(self, proposal: Proposal, token: int, accepted: int | None) -> FinishReason | None:
        """Add the tokens of a round (of a prefill when `accepted` is None); the reason to finish, if they end it."""
        committed = [*proposal.ids[: accepted or 0], token]
        emitted = emit(committed, self._stop_ids, self._limit - len(self.tokens))
        new, stopped = emitted.tokens, emitted.stopped
        if self._text_stream is not None:
            # A stop token is committed, but is no part of the text.
            pushed = self._text_stream.push(new[:-1] if stopped else new)
            self._text.append(pushed.text)
            if pushed.stopped:
                new, stopped = new[: pushed.tokens_used], True
        self.tokens += new
        if accepted is not None:
            self.recorder.round(len(proposal.ids), min(emitted.accepted, len(new)), len(new))
        if stopped:
            return "stop"
        return "length" if len(self.tokens) >= self._limit else None

    def finish(self, reason: FinishReason) -> None:
        """The request ends for `reason`; text held back until now is released."""
        self.finished = reason
        if self._text_stream is not None:
            self._text.append(self._text_stream.finish())

    def take(self) -> Piece | None:
        """What came since the last call, or None."""
        tokens, texts = self._taken
        self._taken = (len(self.tokens), len(self._text))
        piece = Piece("".join(self._text[texts:]), tuple(self.tokens[tokens:]))
        return piece if piece.text or piece.token_ids else None

    def result(self) -> Result:
        if self.finished is None:
            raise RuntimeError("a running sequence has no result yet")
        return Result("".join(self._text), tuple(self.tokens), self.finished, self.recorder.freeze())

    @property
    def _seed(self) -> int:
        return self.sampling.seed or 0
