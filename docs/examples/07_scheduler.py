"""Decide yourself who runs: the shortest prompt first, where an engine's own scheduler serves in order of arrival.

python docs/examples/07_scheduler.py engines/build/smollm2-135m
"""

import sys
from collections.abc import Sequence

from runtime import Engine, Request, SlotTable
from runtime.bundle import open_bundle
from runtime.manifest import Limits
from runtime.scheduler import Admission, DecodeWork, PrefillWork, Step


class ShortestFirst:
    """Implements `runtime.scheduler.Scheduler`."""

    def __init__(self, limits: Limits) -> None:
        self.slots = SlotTable(limits.slots, limits.window, limits.tap_rows)
        self._chunk, self._batch = limits.prefill_chunk, limits.batches[-1]
        self._waiting: dict[int, tuple[list[int], bool]] = {}  # request: prompt, whether it needs the whole ring
        self._running: dict[int, tuple[int, int]] = {}  # request: slot, length of the prompt

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, request_id: int, prompt: Sequence[int], *, whole_ring: bool = False) -> None:
        self._waiting[request_id] = list(prompt), whole_ring

    def finish(self, request_id: int, *, keep: bool = True) -> None:
        if self._waiting.pop(request_id, None) is None:
            slot, _ = self._running.pop(request_id)
            self.slots.free(slot, keep=keep)

    def schedule(self) -> Step:
        admitted, prefill, decode = [], [], []
        for request_id in sorted(self._waiting, key=lambda r: len(self._waiting[r][0]))[: self.slots.free_count]:
            prompt, whole_ring = self._waiting.pop(request_id)
            prefix = self.slots.prefix(prompt, whole_ring=whole_ring)  # what some slot holds of it already
            slot = self.slots.allocate(prefix)
            admitted.append(Admission(request_id, slot, prefix))
            self._running[request_id] = slot, len(prompt)
        for request_id, (slot, length) in self._running.items():
            start = self.slots.state(slot).start_pos
            if start < length:
                prefill.append(PrefillWork(request_id, slot, start, min(self._chunk, length - start)))
            else:
                decode.append(DecodeWork(request_id, slot))
        return Step(tuple(admitted), tuple(prefill[: self._batch]), tuple(decode[: self._batch]))


limits = open_bundle(sys.argv[1], check="quick").manifest.limits
with Engine(sys.argv[1], scheduler=ShortestFirst(limits)) as engine:
    lengths = {}
    for i in range(limits.slots + 3):
        request = Request(prompt_ids=(5 + i,) * (40 - 4 * i % 40), max_new_tokens=1)
        lengths[engine.submit(request)] = len(request.prompt_ids)
    print("prompts as they came:", *lengths.values())
    done = []
    while lengths:
        engine.step()
        for handle in [handle for handle in lengths if engine.finished(handle)]:
            done.append(lengths.pop(handle))
    print("as they were done:", *done)
