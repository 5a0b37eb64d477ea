"""Scheduler and session of the engine under test, which tell the oracle what goes on and check each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from runtime.manifest import Limits
from runtime.scheduler import Admission, FifoScheduler, Step
from runtime.sessions.base import DraftOut, DraftRows, SeedRows, TargetOut, TargetRows
from runtime.slots import SlotTable
from tests.fuzz.memory import MemorySession
from tests.fuzz.oracle import Mismatch, Rings


class WatchedSession(MemorySession):
    """Tells `rings` of every call, and counts in `counts`."""

    def __init__(self, limits: Limits, rings: Rings, counts: Counter[str]) -> None:
        super().__init__(limits)
        self._rings = rings
        self._counts = counts
        self._blocks: dict[int, list[int]] = {}  # what this step has drafted, by slot
        self._paused: set[int] = set()  # slots whose last round had no drafts

    def admit(self, slot: int) -> None:
        """A request gets `slot`."""
        self._paused.discard(slot)

    def prefill(self, rows: TargetRows) -> TargetOut:
        self._counts["chunk"] += len(rows.slot)
        self._tell(rows)
        return super().prefill(rows)

    def verify(self, rows: TargetRows) -> TargetOut:
        slots, drafted = rows.slot.tolist(), self._blocks.keys()
        self._counts["round"] += len(slots)
        self._counts["drafting on again"] += len(self._paused & drafted)
        self._paused = (self._paused - drafted) | (set(slots) - drafted)
        self._check_drafts(rows)
        self._blocks.clear()
        self._tell(rows)
        return super().verify(rows)

    def seed(self, rows: SeedRows) -> None:
        for slot, start, count in zip(rows.slot.tolist(), rows.start.tolist(), rows.count.tolist(), strict=True):
            self._rings.seed(slot, start, count)
            self._counts["tap rows piled up"] += count > self.limits.block_size + 1
        super().seed(rows)

    def draft(self, rows: DraftRows) -> DraftOut:
        slots = rows.slot.tolist()
        for row in zip(slots, rows.start.tolist(), rows.new_len.tolist(), rows.valid_len.tolist(), strict=True):
            self._rings.draft(*row)
        self._counts["draft"] += len(slots)
        out = super().draft(rows)
        self._blocks = dict(zip(slots, out.ids.tolist(), strict=True))
        return out

    def _check_drafts(self, rows: TargetRows) -> None:
        """Each row verifies the beginning of its own block. (The output would be the same with another's.)"""
        ids, at = rows.ids.tolist(), 0
        for slot, count in zip(rows.slot.tolist(), rows.count.tolist(), strict=True):
            drafts, block = ids[at + 1 : at + count], self._blocks.get(slot, [])
            if drafts != block[: len(drafts)]:
                raise Mismatch(f"slot {slot} verifies {drafts}; {block} was drafted")
            at += count

    def _tell(self, rows: TargetRows) -> None:
        columns = (rows.slot, rows.start, rows.count, rows.tap_row)
        for row in zip(*(column.tolist() for column in columns), strict=True):
            self._rings.target(*row)


class WatchedScheduler:
    """A `FifoScheduler`. Checks every step against who waits and who runs, kept as lists.

    Attributes:
        owner: requests with a slot, by slot.
        ended: requests that have left since it was last cleared.
    """

    def __init__(
        self, limits: Limits, budget: int, session: WatchedSession, rings: Rings, counts: Counter[str]
    ) -> None:
        self.slots = SlotTable(limits.slots, limits.window, limits.tap_rows)
        self._inner = FifoScheduler(
            self.slots,
            prefill_chunk=limits.prefill_chunk,
            prefill_budget=budget,
            max_batch=limits.batches[-1],
        )
        self.owner: dict[int, int] = {}
        self.ended: list[int] = []
        self._limits = limits
        self._budget = budget
        self._session = session
        self._rings = rings
        self._counts = counts
        self._prompts: dict[int, list[int]] = {}
        self._queue: list[int] = []
        self._rest: dict[int, int] = {}  # steps since a request with a slot had work
        # All older prompts, chunk by chunk; or a turn of each other request.
        turns = -(-limits.max_seq_len // min(budget, limits.prefill_chunk))
        self._patience = limits.slots * turns + limits.slots

    @property
    def waiting(self) -> int:
        return self._inner.waiting

    @property
    def running(self) -> int:
        return self._inner.running

    def submit(self, request_id: int, prompt: Sequence[int], *, whole_ring: bool = False) -> None:
        self._inner.submit(request_id, prompt, whole_ring=whole_ring)
        self._prompts[request_id] = list(prompt)
        self._queue.append(request_id)

    def finish(self, request_id: int, *, keep: bool = True) -> None:
        self._inner.finish(request_id, keep=keep)
        self.ended.append(request_id)
        del self._prompts[request_id]
        if request_id in self._queue:
            self._queue.remove(request_id)
        else:
            del self._rest[request_id]
            del self.owner[next(slot for slot, owner in self.owner.items() if owner == request_id)]

    def schedule(self) -> Step:
        step = self._inner.schedule()
        for admission in step.admitted:
            self._admit(admission)
        self._check_rows(step)
        for work in (*step.prefill, *step.decode):
            self._rest[work.request_id] = -1
        for request_id in self._rest:
            self._rest[request_id] += 1
            if self._rest[request_id] > self._patience:
                raise Mismatch(f"request {request_id} had no work for {self._rest[request_id]} steps")
        return step

    def check_slots(self) -> None:
        """Every slot is free, or belongs to one request that has not ended."""
        free, used = self.slots.free_count, len(self.owner)
        if free + used != self.slots.slots:
            raise Mismatch(f"{free} slots are free and {used} in use, of {self.slots.slots}")

    def _admit(self, admission: Admission) -> None:
        slot, (source, rows) = admission.slot, (admission.prefix.source, admission.prefix.rows)
        if not self._queue or self._queue.pop(0) != admission.request_id:
            raise Mismatch(f"request {admission.request_id} came out of its turn")
        if slot in self.owner or not 0 <= slot < self.slots.slots:
            raise Mismatch(f"slot {slot} is handed out; {self.owner} are in use")
        if not 0 <= rows < len(self._prompts[admission.request_id]) or (source is None) != (rows == 0):
            raise Mismatch(f"a prefix of {rows} from slot {source}")
        if source is not None:
            found = "in place" if source == slot else "live" if source in self.owner else "finished"
            self._counts[f"prefix {found}"] += 1
        self.owner[slot] = admission.request_id
        self._rest[admission.request_id] = 0
        self._rings.admit(slot, source, rows)
        self._session.admit(slot)

    def _check_rows(self, step: Step) -> None:
        most = self._limits.batches[-1]
        for rows in (step.prefill, step.decode):
            if len(rows) > most or [work.slot for work in rows] != sorted({work.slot for work in rows}):
                raise Mismatch(f"rows {rows}")
            for work in rows:
                if self.owner.get(work.slot) != work.request_id:
                    raise Mismatch(f"{work}, but the slot is {self.owner.get(work.slot)}'s")
        if (self.owner or self._queue) and not step.prefill and not step.decode:
            raise Mismatch("a step without work")
        spent = 0
        for chunk in step.prefill:
            left = len(self._prompts[chunk.request_id]) - chunk.start
            if chunk.start != self.slots.state(chunk.slot).start_pos:
                raise Mismatch(f"{chunk} starts elsewhere")
            if not 1 <= chunk.count <= min(self._limits.prefill_chunk, left):
                raise Mismatch(f"{chunk} of {left} ids left")
            spent += chunk.count
        if spent > self._budget:
            raise Mismatch(f"chunks of {spent} ids in a step, of {self._budget}")
        for work in step.decode:
            if self.slots.state(work.slot).start_pos < len(self._prompts[work.request_id]):
                raise Mismatch(f"{work} before its prompt is in")
        resting = len(self.owner) - len(step.prefill) - len(step.decode)
        self._counts["turn waited for"] += resting
        room = self.slots.free_count and spent < self._budget and len(step.prefill) < most
        self._counts["waited for a prompt in work"] += bool(self._queue and room)
