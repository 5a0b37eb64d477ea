"""The engine: requests in, tokens out, over fixed-batch sessions.

A step reads as it runs: schedule → prefill / draft → verify → accept → emit. What is accepted is decided by the pure
functions of `runtime.verify`, which rows run by `runtime.scheduler`, what a ring holds by `runtime.slots`; this module
only carries values between them and the session.
"""

from __future__ import annotations

import os
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
from runtime.scheduler import DecodeWork, PrefillWork, Scheduler
from runtime.sequence import NO_DRAFTS, Piece, Proposal, Sequence
from runtime.sessions import open_session
from runtime.sessions.base import Session
from runtime.slots import RingState, SlotTable
from runtime.text import Tokenizer
from runtime.verify import proposal_length


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
        _check_threads(threads)
        opened = open_bundle(bundle, check=check)
        check_machine(opened)
        self.bundle: Bundle = opened
        self.tokenizer = Tokenizer(opened.path) if opened.has_tokenizer else None
        self._session: Session = open_session(opened.path, opened.manifest, threads)
        limits = opened.manifest.limits
        self._slots = SlotTable(limits.slots, limits.window)
        self._scheduler = Scheduler(self._slots, prefill_chunk=limits.prefill_chunk, max_batch=limits.batches[-1])
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0
        self._closed = False

    def submit(self, request: Request) -> Handle:
        """Queue a request; it runs in the steps to come.

        Raises:
            RequestError: a request that this engine can't serve.
        """
        self._require_open()
        if not isinstance(request, Request):
            raise RequestError("request", "wrong type", expected="a Request", found=type(request).__name__)
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
        self._require_open()
        work = self._scheduler.schedule()
        for prefill in work.prefill:
            self._prefill(prefill)
        if work.decode:
            self._decode(work.decode)

    def stream(self, handle: Handle) -> Iterator[Piece]:
        """Step until the request is done, yielding its tokens and text as they come.

        The request stays known until `result` or `forget` is called; a caller who stops listening early and wants no
        more of it should `cancel` it.
        """
        sequence = self._sequence(handle)
        while True:
            piece = sequence.take()
            if piece is not None:
                yield piece
            elif sequence.finished:
                return
            else:
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

    def forget(self, handle: Handle) -> None:
        """Cancel a request if it still runs, and drop what it produced. Does nothing for one already forgotten."""
        if isinstance(handle, Handle) and handle.id in self._sequences:
            self.cancel(handle)
            del self._sequences[handle.id]

    def close(self) -> None:
        """Release engines and state. The engine serves nothing afterwards."""
        self._closed = True
        self._sequences.clear()
        self._session.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError("engine", "is closed", expected="an open engine", remedy="Open a new one")

    def _sequence(self, handle: Handle) -> Sequence:
        self._require_open()
        if not isinstance(handle, Handle) or handle.id not in self._sequences:
            raise RequestError(
                "handle",
                "no such request, or its result was taken",
                expected="what submit returned",
                found=handle,
                remedy="Submit the request again",
            )
        return self._sequences[handle.id]

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
            _, token = sequence.accept(NO_DRAFTS, out.argmax[0], out.logits[0], end - 1)
            self._commit(work.request_id, sequence, NO_DRAFTS, token, None)
            sequence.recorder.host += perf_counter() - inside

    def _decode(self, rows: tuple[DecodeWork, ...]) -> None:
        began = perf_counter()
        sequences = [self._sequences[row.request_id] for row in rows]
        rings = [self._slots.ring(row.slot) for row in rows]
        proposals, draft_time = self._propose(rows, sequences, rings)

        ids = np.zeros((len(rows), 1 + max(len(p.ids) for p in proposals)), np.int64)
        for i, (sequence, proposal) in enumerate(zip(sequences, proposals, strict=True)):
            ids[i, : 1 + len(proposal.ids)] = [sequence.bonus, *proposal.ids]
        start = np.array([ring.start_pos for ring in rings])
        before = perf_counter()
        out = self._session.verify(ids, start, np.array([row.slot for row in rows]))
        verify_time = perf_counter() - before

        for i, (row, sequence, ring, proposal) in enumerate(zip(rows, sequences, rings, proposals, strict=True)):
            accepted, token = sequence.accept(proposal, out.argmax[i], out.logits[i], ring.start_pos)
            ring.verified(len(proposal.ids), accepted)
            self._commit(row.request_id, sequence, proposal, token, accepted)
        host = perf_counter() - began - draft_time - verify_time
        for sequence in sequences:
            sequence.recorder.draft += draft_time
            sequence.recorder.verify += verify_time
            sequence.recorder.host += host

    def _propose(
        self, rows: tuple[DecodeWork, ...], sequences: list[Sequence], rings: list[RingState]
    ) -> tuple[list[Proposal], float]:
        """What each row has verified this round, and the seconds the draft call took.

        One call drafts for every row that may, as many slots as the most that any of them may propose.
        """
        proposals = [NO_DRAFTS] * len(rows)
        caps = [sequence.draft_cap() for sequence in sequences]
        drafting = [i for i, cap in enumerate(caps) if cap > 0]
        if not drafting:
            return proposals, 0.0
        slots = max(caps)
        windows = [rings[i].draft_window() for i in drafting]
        uniforms = np.zeros((len(drafting), slots), np.float32)
        for k, i in enumerate(drafting):
            if not sequences[i].sampling.greedy:
                uniforms[k] = sequences[i].draft_uniforms(windows[k].start_pos, slots)
        before = perf_counter()
        block = self._session.draft(
            bonus=np.array([sequences[i].bonus for i in drafting]),
            start=np.array([window.start_pos for window in windows]),
            valid_len=np.array([window.valid_len for window in windows]),
            new_len=np.array([window.new_len for window in windows]),
            slot=np.array([rows[i].slot for i in drafting]),
            temperature=np.array([sequences[i].sampling.temperature for i in drafting], np.float32),
            uniforms=uniforms,
        )
        seconds = perf_counter() - before
        for k, i in enumerate(drafting):
            rings[i].drafted()
            confidence = None if block.confidence_logits is None else block.confidence_logits[k]
            n = proposal_length(confidence, sequences[i].threshold, caps[i])
            proposals[i] = Proposal(block.ids[k, :n].tolist(), None if block.q is None else block.q[k, :n])
        return proposals, seconds

    def _commit(
        self, request_id: int, sequence: Sequence, proposal: Proposal, token: int, accepted: int | None
    ) -> None:
        """Emit a round's tokens (a prefill's when `accepted` is None), and end the request where they say so."""
        reason = sequence.emit(proposal, token, accepted)
        if reason is not None:
            self._finish(request_id, sequence, reason)

    def _finish(self, request_id: int, sequence: Sequence, reason: Literal["stop", "length", "cancelled"]) -> None:
        sequence.finish(reason)
        self._scheduler.finish(request_id)


def _check_threads(threads: object) -> None:
    """Refuse what would hang or crash the library: it starts as many threads as it is told, and each of them spins."""
    cores = os.cpu_count() or 1
    if threads is not None and (type(threads) is not int or not 1 <= threads <= cores):
        raise RequestError(
            "threads",
            "not a number of threads for this machine",
            expected=f"1 … {cores}, or None for one per physical core",
            found=repr(threads),
            remedy="Leave it out",
        )
