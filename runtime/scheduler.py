"""Which requests run in a step: admission to slots, prefill chunks, decoding rows. Without a model or an inference
library.

What a request has done so far is read from the slot table alone (`SlotState.start_pos`), so a call that failed or was
never made is simply planned again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.errors import RequestError
from runtime.slots import Prefix, SlotTable, common_prefix

_WORTH_WAITING = 32
"""Prompt ids that another request must be about to prefill for a request to wait for them: a step's worth of time."""


@dataclass(frozen=True)
class Admission:
    """A request has got a slot, whose state already counts the prefix that it shares with another: where that lies in
    another slot, it must be copied from there before anything else of the step runs."""

    request_id: int
    slot: int
    prefix: Prefix


@dataclass(frozen=True)
class PrefillWork:
    """Run prompt ids ``start … start+count-1`` of a request."""

    request_id: int
    slot: int
    start: int
    count: int


@dataclass(frozen=True)
class DecodeWork:
    """Run a draft-and-verify round (or one plain token) of a request whose prompt is in."""

    request_id: int
    slot: int


@dataclass(frozen=True)
class Step:
    """The work of one engine step; no request is both in `prefill` and in `decode`. Rows are in the order of slots, so
    that the same requests make the same rows from step to step."""

    admitted: tuple[Admission, ...]
    prefill: tuple[PrefillWork, ...]
    decode: tuple[DecodeWork, ...]


class Scheduler(Protocol):
    """What the engine asks of a scheduler; `FifoScheduler` is the one it makes. `slots` is the table it works on."""

    slots: SlotTable

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        ...

    @property
    def running(self) -> int:
        """Requests with a slot."""
        ...

    def submit(self, request_id: int, prompt: Sequence[int], *, whole_ring: bool = False) -> None:
        """Queue a request. `whole_ring`: its drafts must not depend on whom it shares a prefix with, so what it takes
        over must be as its own prefill would leave it (see `SlotTable.prefix`)."""
        ...

    def finish(self, request_id: int, *, keep: bool = True) -> None:
        """Forget a request, queued or running; its slot is free for the next step. `keep` False: what the slot holds
        must not serve another."""
        ...

    def schedule(self) -> Step:
        """Admit what fits, and return the work of the next step. Work counts as done once the slot table says so."""
        ...


@dataclass(frozen=True)
class _Waiting:
    prompt: list[int]
    whole_ring: bool


@dataclass(frozen=True)
class _Running:
    slot: int
    prompt: list[int]


class FifoScheduler:
    """First come, first served.

    A step runs at most `prefill_budget` prompt ids, of the oldest requests with prompt left, in chunks of at most
    `prefill_chunk`, so that long prompts don't stall who decodes; and a round of every decoding request. Of more than
    `max_batch` decoding requests those run that have waited longest. A request is admitted when a slot is free and the
    budget reaches its prompt; one whose beginning is just being prefilled for another waits for that.
    """

    def __init__(self, slots: SlotTable, *, prefill_chunk: int, prefill_budget: int, max_batch: int) -> None:
        sizes = (("prefill_chunk", prefill_chunk), ("prefill_budget", prefill_budget), ("max_batch", max_batch))
        for name, value in sizes:
            if value < 1:
                raise RequestError(name, "too small", expected="at least 1", found=value)
        self.slots = slots
        self._prefill_chunk = prefill_chunk
        self._prefill_budget = prefill_budget
        self._max_batch = max_batch
        self._waiting: dict[int, _Waiting] = {}  # in order of arrival
        self._running: dict[int, _Running] = {}  # in order of admission; who decodes moves back when not all can

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def slot(self, request_id: int) -> int:
        """The slot of a request: scratch for one that has none."""
        running = self._running.get(request_id)
        return self.slots.scratch if running is None else running.slot

    def submit(self, request_id: int, prompt: Sequence[int], *, whole_ring: bool = False) -> None:
        """Queue a request.

        Raises:
            RequestError: an id that is queued or running already, or an empty prompt.
        """
        if request_id in self._waiting or request_id in self._running:
            raise RequestError("request_id", "already queued or running", found=request_id)
        if not prompt:
            raise RequestError("prompt", "empty", expected="at least one token", found=0)
        self._waiting[request_id] = _Waiting(list(prompt), whole_ring)

    def finish(self, request_id: int, *, keep: bool = True) -> None:
        """Forget a request that ended, was cancelled or failed, queued or running; its slot is free for the next step.

        Raises:
            RequestError: an unknown request.
        """
        running = self._running.pop(request_id, None)
        if running is not None:
            self.slots.free(running.slot, keep=keep)
        elif self._waiting.pop(request_id, None) is None:
            raise RequestError("request_id", "neither queued nor running", found=request_id)

    def schedule(self) -> Step:
        budget = self._prefill_budget
        prefill: list[PrefillWork] = []
        ready: list[DecodeWork] = []
        for request_id, running in self._running.items():
            start = self.slots.state(running.slot).start_pos
            if start >= len(running.prompt):
                ready.append(DecodeWork(request_id, running.slot))
            else:  # never more than `max_batch`: others are admitted only beyond these, while the budget lasts
                budget -= self._chunk(prefill, request_id, running, start, budget)
        admitted: list[Admission] = []
        while self._waiting and self.slots.free_count and budget > 0 and len(prefill) < self._max_batch:
            admission = self._admit()
            if admission is None:
                break
            admitted.append(admission)
            running = self._running[admission.request_id]
            budget -= self._chunk(prefill, admission.request_id, running, admission.prefix.rows, budget)
        decode = ready[: self._max_batch]
        if len(ready) > len(decode):
            for row in decode:
                self._running[row.request_id] = self._running.pop(row.request_id)
        return Step(tuple(admitted), tuple(sorted(prefill, key=_slot)), tuple(sorted(decode, key=_slot)))

    def _chunk(self, prefill: list[PrefillWork], request_id: int, running: _Running, start: int, budget: int) -> int:
        """Plan the next chunk of a prompt, as far as the budget goes; returns its length."""
        count = min(len(running.prompt) - start, self._prefill_chunk, budget)
        if count > 0:
            prefill.append(PrefillWork(request_id, running.slot, start, count))
        return max(count, 0)

    def _admit(self) -> Admission | None:
        """Give the oldest waiting request a slot, unless what it shares with a prompt in work will soon be there."""
        request_id, waiting = next(iter(self._waiting.items()))
        prompt = waiting.prompt
        prefix = self.slots.prefix(prompt, whole_ring=waiting.whole_ring)
        for other in self._running.values():
            if self.slots.state(other.slot).start_pos < len(other.prompt):
                coming = common_prefix(prompt, other.prompt, len(prompt) - 1)
                if coming >= prefix.rows + _WORTH_WAITING:
                    return None
        del self._waiting[request_id]
        slot = self.slots.allocate(prefix)
        self._running[request_id] = _Running(slot, prompt)
        return Admission(request_id, slot, prefix)


def _slot(work: PrefillWork | DecodeWork) -> int:
    return work.slot
