"""The engine: requests in, tokens out, over fixed-batch sessions.

A step reads as it runs: schedule → prefill / draft → verify → accept → emit. `runtime.scheduler` says which requests
run, `runtime.rounds` runs them, and this module is the door: it takes requests, and hands out what came of them.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from time import perf_counter
from typing import Literal

from runtime.adaptive import AdaptivePolicy
from runtime.bundle import Bundle, check_machine, open_bundle
from runtime.calls import Calls
from runtime.errors import DSparkError, QueueFull, RequestError
from runtime.policy import DraftPolicy
from runtime.request import Request
from runtime.result import FinishReason, Piece, Result
from runtime.rounds import Rounds
from runtime.scheduler import FifoScheduler, Scheduler
from runtime.sequence import Sequence
from runtime.sessions import open_session
from runtime.sessions.base import Session
from runtime.slots import SlotTable
from runtime.stats import EngineStats, Recorder
from runtime.text import Tokenizer

MAX_WAITING = 1024
"""Requests that wait for a slot before `Engine.submit` refuses more."""


@dataclass(frozen=True)
class Handle:
    """A submitted request."""

    id: int


class Engine:
    """Serves a bundle to many requests at once. Not thread-safe; `runtime.AsyncEngine` is, for asyncio.

    Args:
        bundle: a bundle's directory.
        check: ``full`` checks the hash of every file before loading, ``quick`` only sizes.
        threads: of the inference library; None takes one per physical core.
        max_waiting: requests that may wait for a slot.
        prefill_budget: most prompt ids a step runs, so that long prompts don't stall who decodes; None takes the
            bundle's prefill chunk.
        policy: how much is drafted; None drafts as much as pays (`AdaptivePolicy`).
        scheduler: which requests run; None makes a `FifoScheduler` over a new `SlotTable`. One that is given brings
            its own table, as large as the bundle's limits say.
        session: engines and state that are open already, and that the engine then closes; None opens the bundle's.
        clock: seconds that deadlines are measured by.

    Raises:
        BundleError, BackendUnavailable: the bundle can't be served here; nothing has been allocated then.
        RequestError: another argument out of its range.
    """

    def __init__(
        self,
        bundle: str | PathLike[str],
        *,
        check: Literal["full", "quick"] = "full",
        threads: int | None = None,
        max_waiting: int = MAX_WAITING,
        prefill_budget: int | None = None,
        policy: DraftPolicy | None = None,
        scheduler: Scheduler | None = None,
        session: Session | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_threads(threads)
        _check_count("max_waiting", max_waiting)
        if prefill_budget is not None:
            _check_count("prefill_budget", prefill_budget)
        opened = open_bundle(bundle, check=check)
        limits = opened.manifest.limits
        if scheduler is None:
            scheduler = FifoScheduler(
                SlotTable(limits.slots, limits.window, limits.tap_rows),
                prefill_chunk=limits.prefill_chunk,
                prefill_budget=prefill_budget or limits.prefill_chunk,
                max_batch=limits.batches[-1],
            )
        table = scheduler.slots
        found, expected = (table.slots, table.window, table.tap_rows), (limits.slots, limits.window, limits.tap_rows)
        if found != expected:
            raise RequestError(
                "scheduler",
                "its slot table doesn't fit the bundle (slots, window, tap rows)",
                expected=expected,
                found=found,
            )
        if session is None:
            check_machine(opened)
        self.bundle: Bundle = opened
        self.tokenizer = Tokenizer(opened.path) if opened.has_tokenizer else None
        self._session = open_session(opened.path, opened.manifest, threads) if session is None else session
        self._scheduler = scheduler
        self._policy = policy or AdaptivePolicy(limits.batches, limits.block_size)
        self._recorder = Recorder(limits.block_size)
        self._sequences: dict[int, Sequence] = {}
        self._calls = Calls(self._session, self._recorder, self._finish)
        self._rounds = Rounds(self._calls, table, self._policy, limits.block_size, self._sequences)
        self._deadlines: dict[int, float] = {}
        self._max_waiting = max_waiting
        self._clock = clock
        self._next_id = 0
        self._closed = False

    def submit(self, request: Request) -> Handle:
        """Queue a request; it runs in the steps to come.

        Raises:
            RequestError: a request that this engine can't serve.
            QueueFull: as many as may are waiting already.
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
        if request.max_new_tokens and not self.accepts:
            self._recorder.refused += 1
            raise QueueFull(
                "request",
                "the queue is full",
                expected=f"at most {self._max_waiting} waiting",
                found=self._scheduler.waiting,
                remedy="Submit it again when others have finished, or raise max_waiting",
            )
        seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
        handle = Handle(self._next_id)
        self._next_id += 1
        sequence = self._sequences[handle.id] = Sequence(request, seed, manifest, self.tokenizer)
        self._recorder.submitted += 1
        if request.max_new_tokens == 0:
            sequence.finish("length")
            self._recorder.finished["length"] += 1
            return handle
        self._scheduler.submit(handle.id, request.prompt_ids, whole_ring=sequence.repeatable)
        if request.deadline is not None:
            self._deadlines[handle.id] = self._clock() + request.deadline
        return handle

    @property
    def accepts(self) -> bool:
        """Whether `submit` would take a request now, or find the queue full."""
        return self._scheduler.waiting < self._max_waiting

    @property
    def idle(self) -> bool:
        """No request is waiting or running."""
        return not self._scheduler.waiting and not self._scheduler.running

    def step(self) -> None:
        """Run one step: prefill chunks within the budget, and a round of every decoding request. Does nothing without
        work.

        What a request's own work raises ends that request with an error, and no other.
        """
        self._require_open()
        self._expire()
        if self.idle:
            return
        began = perf_counter()
        work = self._scheduler.schedule()
        self._recorder.spend("schedule", perf_counter() - began)
        self._recorder.steps += 1
        self._rounds.admit(work.admitted)
        self._rounds.prefill(work.prefill)
        self._rounds.decode(work.decode, self._scheduler.waiting)

    def stream(self, handle: Handle) -> Iterator[Piece]:
        """Step until the request is done, yielding its tokens and text as they come.

        The request stays known until `result` or `forget` is called; a caller who stops listening early and wants no
        more of it should `cancel` it.

        Raises:
            ServingError: the request failed.
        """
        sequence = self._sequence(handle)
        while True:
            piece = sequence.take()
            if piece is not None:
                yield piece
            elif sequence.error is not None:
                raise sequence.error
            elif sequence.finished:
                return
            else:
                self.step()

    def take(self, handle: Handle) -> Piece | None:
        """What came of a request since the last `take`, without a step; None if nothing did."""
        return self._sequence(handle).take()

    def finished(self, handle: Handle) -> FinishReason | None:
        """How the request ended; None while it waits or runs."""
        return self._sequence(handle).finished

    def result(self, handle: Handle) -> Result:
        """Step until the request is done; its result. The engine then forgets the request.

        Raises:
            ServingError: the request failed.
        """
        sequence = self._sequence(handle)
        while not sequence.finished:
            self.step()
        del self._sequences[handle.id]
        if sequence.error is not None:
            raise sequence.error
        return sequence.result()

    def cancel(self, handle: Handle) -> None:
        """End a request now; its slot is free for the next step. What it has produced stays its result."""
        if not self._sequence(handle).finished:
            self._finish(handle.id, "cancelled", None)

    def forget(self, handle: Handle) -> None:
        """Cancel a request if it still runs, and drop what it produced. Does nothing for one already forgotten."""
        if isinstance(handle, Handle) and handle.id in self._sequences:
            self.cancel(handle)
            del self._sequences[handle.id]

    def drain(self) -> None:
        """Step until no request is waiting or running."""
        self._require_open()
        while not self.idle:
            self.step()

    def stats(self) -> EngineStats:
        """What the engine has done since it was opened, and its present load."""
        return self._recorder.freeze(
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            free_slots=self._scheduler.slots.free_count,
            break_even=self._policy.break_even(),
        )

    def close(self) -> None:
        """Release engines and state. The engine serves nothing afterwards."""
        self._closed = True
        self._sequences.clear()
        self._deadlines.clear()
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

    def _expire(self) -> None:
        if self._deadlines:
            now = self._clock()
            for request_id in [request_id for request_id, end in self._deadlines.items() if end <= now]:
                self._finish(request_id, "deadline", None)

    def _finish(self, request_id: int, reason: FinishReason, error: DSparkError | None) -> None:
        self._sequences[request_id].finish(reason, error)
        # After an error nobody knows what the slot holds.
        self._scheduler.finish(request_id, keep=error is None)
        self._deadlines.pop(request_id, None)
        self._recorder.finished[reason] += 1


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


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise RequestError(name, "not a count", expected="an integer ≥ 1", found=repr(value), remedy="Leave it out")
