"""The engine: requests in, tokens out, over fixed-batch sessions.

A step reads as it runs: schedule → prefill / draft → verify → accept → emit. What is accepted is decided by the pure
functions of `runtime.verify`, which rows run by `runtime.scheduler`, what a ring holds by `runtime.slots`; this module
only carries values between them and the session.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike
from time import perf_counter
from typing import Literal

import numpy as np

from runtime.bundle import Bundle, check_machine, open_bundle
from runtime.errors import RequestError
from runtime.request import Request, Result
from runtime.sampling import probabilities
from runtime.scheduler import DecodeWork, PrefillWork, Scheduler
from runtime.sequence import Piece, Sequence
from runtime.sessions import open_session
from runtime.sessions.base import DraftOut, Session, TargetOut
from runtime.slots import SlotTable
from runtime.text import TOKENIZER_FILE, Tokenizer
from runtime.verify import accept_greedy, accept_sampled, proposal_length


@dataclass(frozen=True)
class Handle:
    """A submitted request."""

    id: int


class Engine:
    """Serves a bundle.

    Args:
        bundle: a bundle's directory.
        check: ``full`` checks the hash of every file before loading, ``quick`` only sizes.
        threads: of the inference library; None takes one per physical core.

    Raises:
        BundleError, BackendUnavailable: the bundle can't be served here; nothing has been allocated then.
    """

    def __init__(
        self,
        bundle: str | PathLike[str],
        *,
        check: Literal["full", "quick"] = "full",
        threads: int | None = None,
    ) -> None:
        opened = open_bundle(bundle, check=check)
        check_machine(opened)
        self.bundle: Bundle = opened
        self.tokenizer = Tokenizer(opened.path) if (opened.path / TOKENIZER_FILE).exists() else None
        self._session: Session = open_session(opened.path, opened.manifest, threads)
        limits = opened.manifest.limits
        self._slots = SlotTable(limits.slots, limits.window)
        self._scheduler = Scheduler(self._slots, prefill_chunk=limits.prefill_chunk, max_batch=limits.batches[-1])
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0

    def submit(self, request: Request) -> Handle:
        """Queue a request; it runs in the steps to come.

        Raises:
            RequestError: a request that this engine can't serve.
        """
        manifest = self.bundle.manifest
        request.check(manifest.limits, manifest.models.vocab_size)
        if request.stop and self.tokenizer is None:
            raise RequestError(
                "stop", "the bundle has no tokenizer to find stop strings with", remedy="Use stop_token_ids"
            )
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(64)))
        handle = Handle(self._next_id)
        self._next_id += 1
        self._sequences[handle.id] = Sequence(request, manifest, self.tokenizer)
        if request.max_new_tokens == 0:
            self._sequences[handle.id].finish("length")
        else:
            self._scheduler.submit(handle.id, len(request.prompt_ids))
        return handle

    def step(self) -> None:
        """Run one prefill chunk and one round of every decoding request. Does nothing without work."""
        work = self._scheduler.schedule()
        for prefill in work.prefill:
            self._prefill(prefill)
        if work.decode:
            self._decode(work.decode)

    def stream(self, handle: Handle) -> Iterator[Piece]:
        """Step until the request is done, yielding its tokens and text as they come."""
        sequence = self._sequence(handle)
        while True:
            piece = sequence.take()
            if piece is not None:
                yield piece
            if sequence.finished:
                return
            self.step()

    def result(self, handle: Handle) -> Result:
        """Step until the request is done; its result. The engine then forgets the request."""
        sequence = self._sequence(handle)
        while not sequence.finished:
            self.step()
        del self._sequences[handle.id]
        return sequence.result()

    def cancel(self, handle: Handle) -> None:
        """End a request now; its slot is free for the next step. What it has produced stays its result."""
        sequence = self._sequence(handle)
        if not sequence.finished:
            self._finish(handle.id, sequence, "cancelled")

    def close(self) -> None:
        """Release engines and state. The engine serves nothing afterwards."""
        self._sequences.clear()
        self._session.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sequence(self, handle: Handle) -> Sequence:
        try:
            return self._sequences[handle.id]
        except KeyError:
            raise RequestError("handle", "no such request, or its result was taken", found=handle.id) from None

    def _prefill(self, work: PrefillWork) -> None:
        began = perf_counter()
        sequence, ring = self._sequences[work.request_id], self._slots.ring(work.slot)
        prompt = sequence.request.prompt_ids
        end = work.start + work.count
        start, slot = np.array([work.start]), np.array([work.slot])
        out = self._session.prefill(np.array([prompt[work.start : end]]), start, slot)
        ring.prefilled(work.start, work.count)
        # Chunks that leave the window before the first draft are not worth their seeding.
        if sequence.speculates and end > len(prompt) - self._slots.window:
            self._session.seed(start, slot)
            ring.seeded(work.start, work.count)
        inside = perf_counter()
        sequence.recorder.prefill += inside - began
        if end == len(prompt):
            self._commit(work.request_id, sequence, [], self._next_token(sequence, out, len(prompt) - 1))
            sequence.recorder.host += perf_counter() - inside

    def _next_token(self, sequence: Sequence, out: TargetOut, position: int) -> int:
        """The token after a prefill."""
        if sequence.sampling.greedy:
            return int(out.argmax[0, -1])
        p = probabilities(out.logits[0, -1], sequence.sampling)
        return sequence.draw(p, position)

    def _decode(self, rows: tuple[DecodeWork, ...]) -> None:
        began = perf_counter()
        sequences = [self._sequences[row.request_id] for row in rows]
        caps = [sequence.draft_cap() for sequence in sequences]
        drafting = [i for i, cap in enumerate(caps) if cap > 0]
        drafts: list[list[int]] = [[] for _ in rows]
        q: list[np.ndarray | None] = [None] * len(rows)
        draft_time = 0.0
        if drafting:
            block, draft_time = self._draft(
                [rows[i] for i in drafting], [sequences[i] for i in drafting], caps, drafting
            )
            for k, i in enumerate(drafting):
                confidence = None if block.confidence_logits is None else block.confidence_logits[k]
                n = proposal_length(confidence, sequences[i].threshold, caps[i])
                drafts[i] = block.ids[k, :n].tolist()
                q[i] = None if block.q is None or sequences[i].sampling.greedy else block.q[k, :n]

        width = 1 + max(map(len, drafts))
        ids = np.zeros((len(rows), width), np.int64)
        for i, sequence in enumerate(sequences):
            ids[i, : 1 + len(drafts[i])] = [sequence.bonus, *drafts[i]]
        rings = [self._slots.ring(row.slot) for row in rows]
        start = np.array([ring.start_pos for ring in rings])
        before = perf_counter()
        out = self._session.verify(ids, start, np.array([row.slot for row in rows]))
        verify_time = perf_counter() - before

        for i, (row, sequence, ring) in enumerate(zip(rows, sequences, rings, strict=True)):
            proposed = drafts[i]
            if sequence.sampling.greedy:
                accepted, token = accept_greedy(proposed, out.argmax[i, : len(proposed) + 1])
            else:
                accepted, token = self._accept_sampled(sequence, proposed, q[i], out.logits[i], ring.start_pos)
            ring.verified(len(proposed), accepted)
            self._commit(row.request_id, sequence, proposed, token, accepted)
        host = perf_counter() - began - draft_time - verify_time
        for sequence in sequences:
            sequence.recorder.draft += draft_time
            sequence.recorder.verify += verify_time
            sequence.recorder.host += host

    def _draft(
        self, rows: list[DecodeWork], sequences: list[Sequence], caps: list[int], drafting: list[int]
    ) -> tuple[DraftOut, float]:
        """One block for each row, as many slots as the most that any row may propose, and the seconds it took."""
        slots = max(caps[i] for i in drafting)
        rings = [self._slots.ring(row.slot) for row in rows]
        windows = [ring.draft_window() for ring in rings]
        uniforms = np.zeros((len(rows), slots), np.float32)
        for k, (sequence, window) in enumerate(zip(sequences, windows, strict=True)):
            if not sequence.sampling.greedy:
                uniforms[k] = sequence.draft_uniforms(window.start_pos, slots)
        before = perf_counter()
        block = self._session.draft(
            bonus=np.array([sequence.bonus for sequence in sequences]),
            start=np.array([window.start_pos for window in windows]),
            valid_len=np.array([window.valid_len for window in windows]),
            new_len=np.array([window.new_len for window in windows]),
            slot=np.array([row.slot for row in rows]),
            temperature=np.array([sequence.sampling.temperature for sequence in sequences], np.float32),
            uniforms=uniforms,
        )
        seconds = perf_counter() - before
        for ring in rings:
            ring.drafted()
        return block, seconds

    def _accept_sampled(
        self, sequence: Sequence, proposed: list[int], q: np.ndarray | None, logits: np.ndarray, start: int
    ) -> tuple[int, int]:
        if q is None:
            q = np.empty((0, 0), np.float32)
        uniforms, final = sequence.accept_uniforms(start, len(proposed))
        return accept_sampled(proposed, q, lambda i: probabilities(logits[i], sequence.sampling), uniforms, final)

    def _commit(
        self, request_id: int, sequence: Sequence, proposed: list[int], token: int, accepted: int | None = None
    ) -> None:
        """Emit a round's tokens (a prefill's when `accepted` is None), and end the request where they say so."""
        reason = sequence.emit(proposed, token, accepted)
        if reason is not None:
            self._finish(request_id, sequence, reason)

    def _finish(self, request_id: int, sequence: Sequence, reason: Literal["stop", "length", "cancelled"]) -> None:
        sequence.finish(reason)
        self._scheduler.finish(request_id)
