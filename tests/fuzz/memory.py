"""A session without a model, whose buffers say what was written into them: a wrong row changes the output, or raises.

A **cell** stands for all that the target computes at a position: a hash of the token there and of every cell before it,
so that it is right only where all of them are. The cache holds a slot's cells, a tap row is the cell it was taken from,
a ring row is a cell and the position it was rotated to. The token after a position is a function of its cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from builder.bundle import seal
from runtime.errors import RequestError
from runtime.manifest import EngineFile, Limits, Memory, Models, Serving
from runtime.sessions.base import DraftOut, DraftRows, Int64, SeedRows, SlotCopy, TargetOut, TargetRows
from tests.examples import example_manifest

VOCAB = 64
EOS = 0
SURE = 100.0
"""The likeliest token's lead in the logits: a draw takes it as the argmax does, at any temperature near 1."""


class Violation(Exception):
    """A call that breaks the protocol, or that would read what nobody wrote."""


def cell_after(cells: Sequence[int], token: int) -> int:
    """What the target computes for `token` at position ``len(cells)``, behind the positions of `cells`."""
    return hash((*cells, token))


def token_after(cell: int) -> int:
    """The target's token after a position."""
    return (cell >> 7) % VOCAB


def draft_after(cell: int) -> int:
    """The drafter's token after a position: three times in four the target's."""
    return (token_after(cell) + ((cell >> 17) % 4 == 0)) % VOCAB


@dataclass
class _Slot:
    cells: list[int]
    taps: list[int]
    ring: list[tuple[int, int] | None]  # by row: position, cell

    def clear(self) -> None:
        self.cells.clear()
        self.taps.clear()
        self.ring[:] = [None] * len(self.ring)


class MemorySession:
    """See `runtime.sessions.base.Session`, to the letter and stricter: tap rows are gone once the ring has taken them
    in, a slot is emptied by a call at position 0 and before a copy into it, and the cache ends at max_seq_len, without
    the block of headroom that a bundle has.

    Attributes:
        interrupt: called with the name of the call before each of its rows; what it raises leaves the call half done.
        scratch: the slot of padding rows.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.interrupt: Callable[[str], None] = lambda call: None
        self.scratch = limits.slots
        self._slots = [_Slot([], [], [None] * limits.window) for _ in range(limits.slots + 1)]
        most = limits.batches[-1] * max(limits.prefill_chunk, limits.block_size + 1)
        self._logits = np.zeros((most, VOCAB), np.float32)

    def prefill(self, rows: TargetRows) -> TargetOut:
        return self._target("prefill", rows, self.limits.prefill_chunk)

    def verify(self, rows: TargetRows) -> TargetOut:
        return self._target("verify", rows, self.limits.block_size + 1)

    def seed(self, rows: SeedRows) -> None:
        slots, starts, counts = _lists(rows.slot, rows.start, rows.count)
        self._check_rows(slots, starts, counts)
        for slot, start, count in zip(slots, starts, counts, strict=True):
            self.interrupt("seed")
            if count < 1:
                raise Violation(f"seed: {count} tap rows")
            self._take(self._slots[slot], start, count)

    def draft(self, rows: DraftRows) -> DraftOut:
        slots, bonus, starts = _lists(rows.slot, rows.bonus, rows.start)
        new, visible = _lists(rows.new_len, rows.valid_len)
        if min(starts) <= 0:
            raise RequestError("start_pos", "no bonus token yet", expected="> 0", found=min(starts))
        self._check_rows(slots, bonus, starts, new, visible, rows.temperature)
        width = rows.uniforms.shape[1]
        block = self.limits.block_size
        if rows.uniforms.shape != (len(slots), width) or not 1 <= width <= block:
            raise Violation(f"draft: {width} tokens")
        if rows.noise is not None and rows.noise.shape != (len(slots), width, VOCAB):
            raise Violation(f"draft: noise {rows.noise.shape}")
        ids = np.empty((len(slots), width), np.int64)
        confidence = np.empty((len(slots), width), np.float32)
        for i, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            self.interrupt("draft")
            memory = self._slots[slot]
            if not 0 <= new[i] <= block + 1:
                raise Violation(f"draft: {new[i]} tap rows")
            self._take(memory, start - new[i], new[i])
            self._check_ring(memory, start, visible[i])
            cells = memory.cells[:start]
            if bonus[i] != token_after(cells[-1]):
                raise Violation(f"draft: {bonus[i]} is not the token of position {start}")
            token = bonus[i]
            for j in range(width):
                cells.append(cell_after(cells, token))
                token = ids[i, j] = draft_after(cells[-1])
                confidence[i, j] = (cells[-1] >> 23) % 9 - 4
        sampled = bool((rows.temperature > 0).any())
        return DraftOut(ids, confidence, np.eye(VOCAB, dtype=np.float32)[ids] if sampled else None)

    def copy(self, work: SlotCopy) -> None:
        self.interrupt("copy")
        if work.source == work.dest or not all(0 <= slot < self.limits.slots for slot in (work.source, work.dest)):
            raise Violation(f"copy: from slot {work.source} to {work.dest}")
        source, dest = self._slots[work.source], self._slots[work.dest]
        dest.clear()
        if work.cache_rows > len(source.cells):
            raise Violation("copy: more cache rows than the source holds")
        if work.tap_rows > len(source.taps):
            raise Violation("copy: more tap rows than the source holds")
        dest.cells += source.cells[: work.cache_rows]
        dest.taps += source.taps[: work.tap_rows]
        for position in range(work.ring_start, work.ring_start + work.ring_rows):
            row = position % self.limits.window
            dest.ring[row] = source.ring[row]

    def close(self) -> None:
        self._slots.clear()

    def _target(self, call: str, rows: TargetRows, most: int) -> TargetOut:
        slots, counts, starts, tap_rows = _lists(rows.slot, rows.count, rows.start, rows.tap_row)
        ids = rows.ids.tolist()
        self._check_rows(slots, counts, starts, tap_rows)
        if min(counts) < 1 or max(counts) > most:
            raise Violation(f"{call}: {counts} ids, of at most {most}")
        if len(ids) != sum(counts):
            raise Violation(f"{call}: {len(ids)} ids for rows of {counts}")
        batch = next(batch for batch in self.limits.batches if batch >= len(slots))
        for _ in range(batch - len(slots)):
            self._run(call, self._slots[self.scratch], [0], 0, 0)
        cells: list[int] = []
        at = 0
        for slot, count, start, tap_row in zip(slots, counts, starts, tap_rows, strict=True):
            self.interrupt(call)
            new = self._run(call, self._slots[slot], ids[at : at + count], start, tap_row)
            cells += new[-1:] if call == "prefill" else new
            at += count
        argmax = np.array([token_after(cell) for cell in cells])
        # A view of one buffer, as of a real session: the next call overwrites it.
        logits = self._logits[: len(cells)]
        logits.fill(0)
        logits[np.arange(len(cells)), argmax] = SURE
        return TargetOut(argmax, logits)

    def _run(self, call: str, memory: _Slot, ids: list[int], start: int, tap_row: int) -> list[int]:
        if start == 0:
            memory.clear()
        cells, taps = memory.cells, memory.taps
        if not 0 <= start <= len(cells):
            raise Violation(f"{call}: reads cache rows up to {start}, of {len(cells)} written")
        if start + len(ids) > self.limits.max_seq_len:
            raise Violation(f"{call}: row {start + len(ids) - 1} is beyond the cache")
        if not 0 <= tap_row <= len(taps):
            raise Violation(f"{call}: tap row {tap_row}, of {len(taps)} written")
        if tap_row + len(ids) > self.limits.tap_rows:
            raise Violation(f"{call}: tap row {tap_row + len(ids)}")
        del cells[start:], taps[tap_row:]
        for token in ids:
            cells.append(cell_after(cells, token))
        taps += cells[start:]
        return cells[start:]

    def _take(self, memory: _Slot, start: int, count: int) -> None:
        """Move the first `count` tap rows into the ring."""
        taken = memory.taps[:count]
        if start < 0 or len(taken) < count or taken != memory.cells[start : start + count]:
            raise Violation(f"{count} tap rows are not those of positions {start} …")
        for position, cell in zip(range(start, start + count), taken, strict=True):
            memory.ring[position % self.limits.window] = (position, cell)
        if count:
            memory.taps.clear()

    def _check_ring(self, memory: _Slot, start: int, visible: int) -> None:
        if not 0 <= visible <= min(start, self.limits.window):
            raise Violation(f"draft: {visible} visible rows at {start}")
        for position in range(start - visible, start):
            row = memory.ring[position % self.limits.window]
            if row != (position, memory.cells[position]):
                raise Violation(f"draft: row {position} shows {row}")

    def _check_rows(self, slots: list[int], *columns: Sequence[object] | Int64) -> None:
        if not 1 <= len(slots) <= self.limits.batches[-1] or any(len(column) != len(slots) for column in columns):
            raise Violation(f"a batch of {[len(column) for column in (slots, *columns)]} rows")
        if len(set(slots)) < len(slots) or not 0 <= min(slots) <= max(slots) < self.limits.slots:
            raise Violation(f"slots {slots}")


def write_bundle(directory: Path, limits: Limits) -> Path:
    """A bundle that opens, for an engine over a `MemorySession`: a manifest, and files with nothing in them."""
    for name in ("weights.bin", "engine.onnx"):
        (directory / name).write_bytes(b"-")
    seal(
        directory,
        replace(
            example_manifest(),
            limits=limits,
            serving=Serving(limits.block_size, 0.0),
            models=Models(VOCAB, 1, True, (EOS,), {}, {}),
            engines=tuple(
                EngineFile(graph, batch, "engine.onnx")
                for graph in ("target", "draft", "seed")
                for batch in limits.batches
            ),
            memory=Memory(0, 0, 0, 0),
        ),
    )
    return directory


def _lists(*columns: Int64) -> list[list[int]]:
    return [column.tolist() for column in columns]
