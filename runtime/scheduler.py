"""Which requests run in a step: admission to slots, prefill chunks, decoding rows. Without a model or an inference
library.

What a request has done so far is read from the slot table alone (`RingState.start_pos`), so a call that failed or was
never made is simply planned again.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import RequestError
from runtime.slots import SlotTable


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
    """The work of one engine step; no request is in it twice."""

    prefill: tuple[PrefillWork, ...]
    decode: tuple[DecodeWork, ...]


@dataclass(frozen=True)
class _Running:
    slot: int
    prompt_len: int


class Scheduler:
    """First come, first served: requests are admitted while slots are free; a step runs one prefill chunk, for the
    oldest request with prompt left, and a round of every decoding request, oldest first, up to `max_batch` rows.
    """

    def __init__(self, slots: SlotTable, *, prefill_chunk: int, max_batch: int) -> None:
        for name, value in (("prefill_chunk", prefill_chunk), ("max_batch", max_batch)):
            if value < 1:
                raise RequestError(name, "too small", expected="at least 1", found=value)
        self._slots = slots
        self._prefill_chunk = prefill_chunk
        self._max_batch = max_batch
        self._waiting: dict[int, int] = {}  # request -> prompt length, in order of arrival
        self._running: dict[int, _Running] = {}  # in order of admission

    @property
    def idle(self) -> bool:
        """No request is waiting or running."""
        return not self._waiting and not self._running

    def submit(self, request_id: int, prompt_len: int) -> None:
        """Queue a request.

        Raises:
            RequestError: an id that is queued or running already, or an empty prompt.
        """
        if request_id in self._waiting or request_id in self._running:
            raise RequestError("request_id", "already queued or running", found=request_id)
        if prompt_len < 1:
            raise RequestError("prompt", "empty", expected="at least one token", found=prompt_len)
        self._waiting[request_id] = prompt_len

    def finish(self, request_id: int) -> None:
        """Forget a request that ended, was cancelled or failed, queued or running; its slot is free for the next step.

        Raises:
            RequestError: an unknown request.
        """
        running = self._running.pop(request_id, None)
        if running is not None:
            self._slots.free(running.slot)
        elif self._waiting.pop(request_id, None) is None:
            raise RequestError("request_id", "neither queued nor running", found=request_id)

    def schedule(self) -> Step:
        """Admit what fits, and return the work of the next step. Work counts as done once the slot table says so."""
        self._admit()
        prefill: list[PrefillWork] = []
        decode: list[DecodeWork] = []
        for request_id, running in self._running.items():
            start = self._slots.ring(running.slot).start_pos
            left = running.prompt_len - start
            if left > 0:
                if not prefill:
                    prefill.append(PrefillWork(request_id, running.slot, start, min(left, self._prefill_chunk)))
            elif len(decode) < self._max_batch:
                decode.append(DecodeWork(request_id, running.slot))
        return Step(tuple(prefill), tuple(decode))

    def _admit(self) -> None:
        while self._waiting and self._slots.free_count:
            request_id = next(iter(self._waiting))
            self._running[request_id] = _Running(self._slots.allocate(), self._waiting.pop(request_id))
