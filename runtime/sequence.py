"""One request while it runs: what it may still emit, its random numbers, text and statistics. No model, no slot."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.acceptance import Acceptance
from runtime.distribution import History, TokenLogprob, gumbel_draw, logprobs, probabilities
from runtime.errors import DSparkError, RequestError
from runtime.manifest import Manifest
from runtime.policy import Row
from runtime.randomness import Purpose, gumbel, uniforms, uniforms32
from runtime.request import Request
from runtime.result import FinishReason, Piece, Result, StatsRecorder
from runtime.sessions.base import LogitRows
from runtime.text import TextStream, Tokenizer
from runtime.verify import accept_greedy, accept_matching, accept_sampled, emit

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Proposal:
    """Drafts to verify: `ids`, and the probabilities `q` ``[≥ n, V]`` that they were drawn from (None unless drawn for
    rejection sampling)."""

    ids: list[int]
    q: Float32 | None


NO_DRAFTS = Proposal([], None)


class Sequence:
    """A running request.

    Args:
        request: checked.
        seed: of its random numbers: the request's own, or one that the engine chose.
        manifest: of the bundle that serves it.
        tokenizer: None serves ids only; `text` then stays empty.
    """

    def __init__(
        self,
        request: Request,
        seed: int,
        manifest: Manifest,
        tokenizer: Tokenizer | None,
    ) -> None:
        limits, serving = manifest.limits, manifest.serving
        self.request = request
        self.sampling = request.sampling
        threshold = request.confidence_threshold
        self.threshold = serving.confidence_threshold if threshold is None else threshold
        self.recorder = StatsRecorder()
        self.acceptance = Acceptance(limits.block_size)
        self.finished: FinishReason | None = None
        self.error: DSparkError | None = None
        self.tokens: list[int] = []
        self._seed = seed
        self._vocab = manifest.models.vocab_size
        self._max_draft = serving.max_draft if request.max_draft is None else request.max_draft
        eos = () if request.ignore_eos else manifest.models.eos_token_ids
        self._stop_ids = frozenset((*eos, *request.stop_token_ids))
        self._limit = min(request.max_new_tokens, limits.max_seq_len - len(request.prompt_ids))
        self._history: History | None = None
        self._noise: dict[int, Float32] = {}
        self._logprobs: list[TokenLogprob] = []
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

    @property
    def rejection(self) -> bool:
        """Whether its tokens are drawn by rejection sampling, so that its drafts need their q."""
        return not self.sampling.greedy and self.sampling.coupling == "rejection"

    @property
    def repeatable(self) -> bool:
        """Whether its tokens must be the same in every run although they depend on its drafts: nothing of the engine's
        load or past may then change what is drafted."""
        return self.rejection and self.speculates and self.sampling.seed is not None

    @property
    def adaptive(self) -> bool:
        """Whether the engine's policy may decide its proposal lengths."""
        return self.request.adaptive and not self.repeatable

    def draft_cap(self) -> int:
        """Most drafts worth verifying now: each round commits one token more than it accepts."""
        if not self.speculates:
            return 0
        return max(0, min(self._max_draft, self._limit - len(self.tokens) - 1))

    def policy_row(self, cap: int, backlog: int) -> Row:
        return Row(cap, self.threshold, self.acceptance, backlog)

    @property
    def draft_temperature(self) -> float:
        """The chain's temperature; 0 where its noise does the drawing."""
        return self.sampling.temperature if self.rejection else 0.0

    def draft_uniforms(self, start: int, n: int) -> Float32 | None:
        """The chain's uniforms ``[n]`` of the round that starts at `start`, for rejection sampling."""
        if not self.rejection:
            return None
        return uniforms32(self._seed, self.request.draw_stream, start, Purpose.DRAFT, n)

    def draft_noise(self, start: int, n: int) -> Float32 | None:
        """What is added to the chain's logits ``[n, V]`` of the round that starts at `start`, for Gumbel coupling."""
        if self.sampling.greedy or self.rejection:
            return None
        rows = [self._gumbel(start + 1 + j) for j in range(n)]
        return np.stack(rows) * np.float32(self.sampling.temperature)

    def accept(self, proposal: Proposal, argmax: NDArray[np.int64], logits: LogitRows, start: int) -> tuple[int, int]:
        """How many drafts stand, and the token after them.

        Args:
            proposal: the n drafts that were verified; none after a prefill.
            argmax, logits: the target's ``[n+1]`` and ``[n+1, V]`` after the bonus and after each draft.
            start: position of the bonus token (of the last prompt token after a prefill): it keys the draws.
        """
        drafts = proposal.ids
        if self._history is None and not self.sampling.plain:
            # Not earlier: it is as large as the vocabulary, and a thousand requests may be waiting.
            self._history = History(self.sampling, self.request.prompt_ids, self._vocab)
        if self.rejection:
            q = np.empty((0, 0), np.float32) if proposal.q is None else proposal.q
            seed, stream = self._seed, self.request.draw_stream
            return accept_sampled(
                drafts,
                q,
                lambda i: probabilities(self._adjusted(logits[i], drafts[:i]), self.sampling),
                uniforms(seed, stream, start, Purpose.ACCEPT, len(drafts)),
                float(uniforms(seed, stream, start, Purpose.FINAL)[0]),
            )
        if not self.sampling.greedy:
            accepted, token = accept_matching(
                drafts,
                lambda i: gumbel_draw(
                    self._adjusted(logits[i], drafts[:i]), self.sampling, self._gumbel(start + 1 + i)
                ),
            )
            self._noise = {at: noise for at, noise in self._noise.items() if at > start + 1 + accepted}
        elif self._history is not None:
            accepted, token = accept_matching(drafts, lambda i: int(self._adjusted(logits[i], drafts[:i]).argmax()))
        else:
            accepted, token = accept_greedy(drafts, argmax)
        # The best of NaN is no token. (Probabilities look at the whole row, and refuse it likewise.)
        if not math.isfinite(logits[accepted, token]):
            raise RequestError(
                "logits",
                "the largest one is not a number",
                expected="a finite value",
                found=logits[accepted, token],
                remedy="Validate the bundle",
            )
        return accepted, token

    def emit(self, proposal: Proposal, token: int, accepted: int | None, logits: LogitRows) -> FinishReason | None:
        """Add the tokens of a round (of a prefill when `accepted` is None); the reason to finish, if they end it.

        `logits` are those that `accept` decided by.
        """
        committed = [*proposal.ids[: accepted or 0], token]
        emitted = emit(committed, self._stop_ids, self._limit - len(self.tokens))
        new, stopped = emitted.tokens, emitted.stopped
        if self._text_stream is not None:
            # A stop token is committed, but is no part of the text.
            pushed = self._text_stream.push(new[:-1] if stopped else new)
            self._text.append(pushed.text)
            if pushed.stopped:
                new, stopped = new[: pushed.tokens_used], True
        if self.request.logprobs is not None:
            self._logprobs += [logprobs(logits[i], token, self.request.logprobs) for i, token in enumerate(new)]
        self.tokens += new
        if self._history is not None:
            self._history.add(new)
        if accepted is not None:
            proposed = len(proposal.ids)
            self.recorder.round(proposed, min(emitted.accepted, len(new)), len(new))
            if proposed:
                self.acceptance.note(proposed, accepted)
            else:
                self.acceptance.rest()
        if stopped:
            return "stop"
        return "length" if len(self.tokens) >= self._limit else None

    def finish(self, reason: FinishReason, error: DSparkError | None = None) -> None:
        """The request ends for `reason`; text held back until now is released."""
        self.finished, self.error = reason, error
        self._noise.clear()
        if self._text_stream is not None:
            self._text.append(self._text_stream.finish())

    def take(self) -> Piece | None:
        """What came since the last call, or None."""
        tokens, texts = self._taken
        self._taken = (len(self.tokens), len(self._text))
        piece = Piece("".join(self._text[texts:]), tuple(self.tokens[tokens:]), tuple(self._logprobs[tokens:]))
        return piece if piece.text or piece.token_ids else None

    def result(self) -> Result:
        if self.finished is None:
            raise RuntimeError("a running sequence has no result yet")
        shown = None if self.request.logprobs is None else tuple(self._logprobs)
        return Result("".join(self._text), tuple(self.tokens), self.finished, self.recorder.freeze(), shown)

    def _adjusted(self, logits: Float32, drafts: list[int]) -> Float32:
        return logits if self._history is None else self._history.adjusted(logits, drafts)

    def _gumbel(self, position: int) -> Float32:
        """The noise ``[V]`` of a position: drafter and target draw with the same."""
        noise = self._noise.get(position)
        if noise is None:
            noise = self._noise[position] = gumbel(self._seed, self.request.draw_stream, position, self._vocab)
        return noise
