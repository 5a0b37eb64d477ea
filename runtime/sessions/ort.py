"""ONNX Runtime on the CPU: IO binding over persistent state, a slot being a place to bind.

Each engine has one binding, made once. Its rows stay bound to the slots they served last, so a step of the same
requests binds nothing but what changed its length: ids go in, results come out, and nothing else crosses Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.errors import RequestError
from runtime.manifest import Manifest
from runtime.sessions.base import (
    DraftOut,
    DraftRows,
    Float32,
    Int64,
    SeedRows,
    SlotCopy,
    TargetOut,
    TargetRows,
)
from runtime.sessions.checks import check_draft, smallest_batch
from runtime.sessions.ort_engines import load_engines

_DEBUG = ("hidden", "base", "corrected")


class OrtSession:
    """Engines of one bundle on ONNX Runtime's CPU provider. See `runtime.sessions.base.Session` for the calls.

    Args:
        path: the bundle's directory.
        manifest: its manifest, already checked.
        threads: of the inference library; None takes one per physical core.

    Attributes:
        debug: every output of the last draft by name, ``hidden``, ``base`` and ``corrected`` among them where the
            engines were built with debug outputs; rows in the order of the call.
    """

    def __init__(self, path: Path, manifest: Manifest, threads: int | None = None) -> None:
        self.limits = manifest.limits
        self._vocab = manifest.models.vocab_size
        self._tap_width = manifest.models.tap_width
        self._has_confidence = manifest.models.has_confidence
        self._state: dict[str, NDArray[Any]] = {
            s.name: np.zeros((self.limits.slots + 1, *s.shape), dtype=np.dtype(s.dtype)) for s in manifest.state
        }
        self._caches, self._rings = ([s.name for s in manifest.state if s.kind == kind] for kind in ("cache", "ring"))
        caches, rings = ({n: _by_slot(self._state[n]) for n in names} for names in (self._caches, self._rings))
        # A draft reads the tap rows of its slots where they lie.
        taps = [_value(rows[: self.limits.block_size + 1]) for rows in self._state["taps"]]
        reads = {"target": {}, "draft": {"taps": taps}, "seed": {}}
        self._engines = {
            (graph, batch): _Engine(session, batch, caches if graph == "target" else rings, reads[graph])
            for (graph, batch), session in load_engines(path, manifest, threads).items()
        }
        self._debug_outputs = self._engines["draft", self.limits.batches[0]].sizes(_DEBUG)
        self.debug: Mapping[str, NDArray[Any]] = {}
        self._buffers: dict[str, _Buffer] = {}

    def prefill(self, rows: TargetRows) -> TargetOut:
        return self._target(rows, last_only=True)

    def verify(self, rows: TargetRows) -> TargetOut:
        return self._target(rows, last_only=False)

    def seed(self, rows: SeedRows) -> None:
        engine = self._engine("seed", len(rows.slot))
        slots = rows.slot.tolist()
        placed = engine.place(slots)
        # More than the window would wrap onto itself: only its last W rows can be visible.
        first = np.maximum(rows.count - self.limits.window, 0)
        count = rows.count - first
        taps = self._buffer("seed.taps", engine.batch, int(count.max()), self._tap_width)
        taps.fill(0.0)
        starts = _placed(rows.start + first, placed, self._buffer("seed.start", engine.batch, dtype=np.int64), 0)
        counts = _placed(count, placed, self._buffer("seed.count", engine.batch, dtype=np.int64), 0)
        for row, slot, begin, end in zip(placed, slots, first.tolist(), rows.count.tolist(), strict=True):
            taps[row, : end - begin] = self._state["taps"][slot, begin:end]
        engine.run({"taps": taps, "start": starts, "count": counts}, {})

    def draft(self, rows: DraftRows) -> DraftOut:
        check_draft(self.limits, rows)
        engine = self._engine("draft", len(rows.slot))
        placed = engine.place(rows.slot.tolist())
        batch, width = engine.batch, rows.uniforms.shape[1]
        inputs: dict[str, NDArray[Any]] = {}
        # A padding row drafts from an empty ring on the scratch slot.
        integers = (("bonus", rows.bonus, 0), ("start", rows.start, 1), ("valid_len", rows.valid_len, 0))
        for name, values, padding in (*integers, ("new_len", rows.new_len, 0)):
            inputs[name] = _placed(values, placed, self._buffer(f"draft.{name}", batch, dtype=np.int64), padding)
        floats = [("temperature", rows.temperature), ("uniforms", rows.uniforms)]
        floats.append(("noise", np.zeros((len(placed), width, 1), np.float32) if rows.noise is None else rows.noise))
        for name, array in floats:
            inputs[name] = _placed(array, placed, self._buffer(f"draft.{name}", batch, *array.shape[1:]), 0)
        sampled = bool((rows.temperature > 0).any())
        outputs: dict[str, NDArray[Any]] = {
            "ids": self._buffer("draft.ids", batch, width, dtype=np.int64),
            "q": self._buffer("draft.q", batch, width, self._vocab if sampled else 1),
        }
        if self._has_confidence:
            outputs["confidence_logits"] = self._buffer("draft.confidence", batch, width)
        for name, columns in self._debug_outputs.items():
            length = self.limits.block_size if name == "hidden" else width
            outputs[name] = self._buffer(f"draft.{name}", batch, length, columns)
        engine.run(inputs, outputs)
        self.debug = {name: outputs[name][placed] for name in self._debug_outputs}
        confidence = outputs.get("confidence_logits")
        return DraftOut(
            ids=outputs["ids"][placed],
            confidence_logits=None if confidence is None else confidence[placed],
            q=[outputs["q"][row] for row in placed] if sampled else None,
        )

    def copy(self, work: SlotCopy) -> None:
        source, dest = work.source, work.dest
        for name in self._caches:
            state = self._state[name]
            state[dest, :, : work.cache_rows] = state[source, :, : work.cache_rows]
        window = self.limits.window
        first, count = work.ring_start % window, min(work.ring_rows, window)
        # What runs over the window's end goes on at its beginning.
        parts = [(first, min(first + count, window)), (0, max(0, first + count - window))]
        for name in self._rings:
            state = self._state[name]
            for begin, end in parts:
                state[dest, :, begin:end] = state[source, :, begin:end]
        taps = self._state["taps"]
        taps[dest, : work.tap_rows] = taps[source, : work.tap_rows]

    def close(self) -> None:
        self._engines.clear()
        self._state.clear()
        self._buffers.clear()

    def _target(self, rows: TargetRows, last_only: bool) -> TargetOut:
        slots, counts = rows.slot.tolist(), rows.count.tolist()
        engine = self._engine("target", len(slots))
        placed = engine.place(slots)
        # Engine rows in their own order; a padding row runs one id at position 0 of the scratch slot.
        start = _placed(rows.start, placed, self._buffer("start", engine.batch, dtype=np.int64), 0)
        count = _placed(rows.count, placed, self._buffer("count", engine.batch, dtype=np.int64), 1)
        ends = np.cumsum(count)
        total = int(ends[-1])
        first = (ends - count)[placed].tolist()
        ids = self._buffer("ids", 1, total, dtype=np.int64)
        ids.fill(0)
        at = 0
        order: list[int] = []
        for begin, length in zip(first, counts, strict=True):
            ids[0, begin : begin + length] = rows.ids[at : at + length]
            order.extend((begin + length - 1,) if last_only else range(begin, begin + length))
            at += length
        # The lm_head takes its rows in the order of the call, so what comes out needs no sorting.
        head_rows = self._buffer("head_rows", 1, len(order), dtype=np.int64)
        head_rows[0] = order
        inputs = {"ids": ids, "start": start, "head_rows": head_rows, "count": count}
        outputs: dict[str, NDArray[Any]] = {
            "argmax": self._buffer("argmax", 1, len(order), dtype=np.int64),
            "logits": self._buffer("logits", 1, len(order), self._vocab),
            "taps": self._buffer("taps", 1, total, self._tap_width),
        }
        engine.run(inputs, outputs)
        taps, kept = outputs["taps"][0], self._state["taps"]
        for slot, begin, length, row in zip(slots, first, counts, rows.tap_row.tolist(), strict=True):
            kept[slot, row : row + length] = taps[begin : begin + length]
        return TargetOut(outputs["argmax"][0], outputs["logits"][0])

    def _engine(self, graph: str, rows: int) -> _Engine:
        """The smallest engine that holds the rows."""
        return self._engines[graph, smallest_batch(self.limits, rows)]

    def _buffer(self, name: str, *shape: int, dtype: type[np.generic] = np.float32) -> NDArray[Any]:
        """An array of that shape in the buffer of that name; what it held may be lost."""
        if name not in self._buffers:
            self._buffers[name] = _Buffer(dtype)
        return self._buffers[name].view(shape)


class _Buffer:
    """Memory that one input or output is bound to. It grows to the largest shape that was asked for, and a shape asked
    for twice in a row is the same array, so that nobody binds it again."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self._memory = self._view = np.empty(0, dtype)

    def view(self, shape: tuple[int, ...]) -> NDArray[Any]:
        if self._view.shape != shape:
            size = math.prod(shape)
            if self._memory.size < size:
                self._memory = np.empty(size, self._memory.dtype)
            self._view = self._memory[:size].reshape(shape)
        return self._view


class _Engine:
    """A loaded engine of `batch` rows and its binding, over `states`, each updated in place, and `reads`, which are not
    written: a value a slot of each. Every row starts on the scratch slot, the last."""

    def __init__(
        self,
        session: ort.InferenceSession,
        batch: int,
        states: Mapping[str, Sequence[ort.OrtValue]],
        reads: Mapping[str, Sequence[ort.OrtValue]],
    ) -> None:
        self.batch = batch
        self._session = session
        self._states = states
        self._reads = reads
        self._scratch = len(next(iter(states.values()))) - 1
        self._binding = session.io_binding()
        self._slots: list[int | None] = [None] * batch
        self._bound: dict[str, NDArray[Any]] = {}

    def sizes(self, names: tuple[str, ...]) -> dict[str, int]:
        """The last axis of those outputs that the engine has."""
        return {o.name: o.shape[2] for o in self._session.get_outputs() if o.name in names}

    def place(self, slots: list[int]) -> list[int]:
        """See that each slot has a row, and say which: the one it had in the last call, or one that is let go. The
        others go to scratch."""
        wanted = set(slots)
        if len(wanted) < len(slots):
            raise RequestError("slot", "twice in one call", expected="each slot at most once", found=slots)
        row_of = {slot: row for row, slot in enumerate(self._slots) if slot in wanted}
        if len(row_of) < len(slots) or any(s != self._scratch and s not in wanted for s in self._slots):
            spare = [row for row, slot in enumerate(self._slots) if slot not in wanted]
            # Rows that would have to be bound anew anyway come first.
            spare.sort(key=lambda row: self._slots[row] == self._scratch)
            for slot in slots:
                if slot not in row_of:
                    row_of[slot] = spare.pop(0)
                    self._bind_row(row_of[slot], slot)
            for row in spare:
                if self._slots[row] != self._scratch:
                    self._bind_row(row, self._scratch)
        return [row_of[slot] for slot in slots]

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> None:
        """Run once; arrays are bound where they lie, if they are not yet."""
        for arrays, bind in ((inputs, self._binding.bind_input), (outputs, self._binding.bind_output)):
            for name, array in arrays.items():
                if self._bound.get(name) is not array:
                    # Forgotten first: an interrupt must not leave it counted as what it no longer is.
                    self._bound.pop(name, None)
                    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
                    self._bound[name] = array
        self._session.run_with_iobinding(self._binding)

    def _bind_row(self, row: int, slot: int) -> None:
        self._slots[row] = None  # until all of it is bound
        for name, values in self._states.items():
            # Bound to itself: the operator that updates a state then does so in place.
            self._binding.bind_ortvalue_input(f"{name}.row{row}", values[slot])
            self._binding.bind_ortvalue_output(f"{name}.row{row}.new", values[slot])
        for name, values in self._reads.items():
            self._binding.bind_ortvalue_input(f"{name}.row{row}", values[slot])
        self._slots[row] = slot


def _by_slot(state: NDArray[Any]) -> list[ort.OrtValue]:
    """A state ``[slots+1, …]`` as a value ``[1, …]`` a slot, in the same memory."""
    return [_value(state[slot : slot + 1]) for slot in range(len(state))]


def _value(array: NDArray[Any]) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array)


def _placed(values: Int64 | Float32, rows: list[int], into: NDArray[Any], padding: int) -> NDArray[Any]:
    """`values` in the engine's rows, and `padding` in the others."""
    if len(rows) < len(into):
        into.fill(padding)
    into[rows] = values
    return into
