"""ONNX Runtime on the CPU: IO binding over persistent state, a slot being a place to bind.

Every input, output and state buffer is allocated once. A binding is made once for each (engine, slots, width) and then
only run: a step copies ids in and reads results out, and nothing else crosses Python.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.errors import BundleError, RequestError
from runtime.manifest import REBUILD, Manifest
from runtime.sessions.base import DraftOut, Float32, Int64, TargetOut

# Bindings kept for reuse. One costs some 0.2 ms to make for the target; large outputs are views of shared buffers.
_KEPT_BINDINGS = 256


@dataclass(frozen=True)
class _Call:
    """A binding ready to run, with the arrays it reads and writes."""

    binding: ort.IOBinding
    inputs: Mapping[str, NDArray[Any]]
    outputs: Mapping[str, NDArray[Any]]


class OrtSession:
    """Engines of one bundle on ONNX Runtime's CPU provider. See `runtime.sessions.base.Session` for the calls.

    Args:
        path: the bundle's directory.
        manifest: its manifest, already checked.
        threads: of the inference library; None takes one per physical core.

    Attributes:
        debug: every output of the last draft by name, ``hidden``, ``base`` and ``corrected`` among them where the
            engines were built with debug outputs.
    """

    def __init__(self, path: Path, manifest: Manifest, threads: int | None = None) -> None:
        self.limits = manifest.limits
        self._vocab = manifest.models.vocab_size
        self._tap_width = manifest.models.tap_width
        self._has_confidence = manifest.models.has_confidence
        self._scratch = self.limits.slots
        self._state = {
            s.name: np.zeros((self.limits.slots + 1, *s.shape), dtype=np.dtype(s.dtype)) for s in manifest.state
        }
        self._rings = [s.name for s in manifest.state if s.kind == "ring"]
        self._caches = [s.name for s in manifest.state if s.kind == "cache"]
        self._engines = {(e.graph, e.batch): _load(path / e.file, threads) for e in manifest.engines}
        self._calls: OrderedDict[tuple[Any, ...], _Call] = OrderedDict()
        self._debug_outputs = [
            (o.name, o.shape[2])
            for o in self._engines["draft", self.limits.batches[0]].get_outputs()
            if o.name in _DEBUG
        ]
        self.debug: Mapping[str, NDArray[Any]] = {}
        self._buffers: dict[str, Float32] = {}
        self._chunk_taps: Float32 = np.empty(0, np.float32)

    def prefill(self, ids: Int64, start: Int64, slot: Int64) -> TargetOut:
        real, width = ids.shape
        batch = self._batch(real)
        # Chunks come in many lengths, each prompt's last one above all: their bindings are not kept.
        self._chunk_taps = np.empty((batch, width, self._tap_width), np.float32)
        rows = [self._chunk_taps[r : r + 1] for r in range(batch)]
        call = self._target_call(self._slots(slot, batch), width, 1, rows)
        return self._run_target(batch, call, ids, start)

    def verify(self, ids: Int64, start: Int64, slot: Int64) -> TargetOut:
        real, width = ids.shape
        batch = self._batch(real)
        slots = self._slots(slot, batch)

        def make() -> _Call:
            taps = self._state["taps"]
            return self._target_call(slots, width, width, [taps[s : s + 1, :width] for s in slots])

        return self._run_target(batch, self._kept(("verify", width, slots), make), ids, start)

    def seed(self, start: Int64, slot: Int64) -> None:
        batch = self._batch(len(slot))
        slots = self._slots(slot, batch)
        width = self._chunk_taps.shape[1]
        # A chunk longer than the window would wrap onto itself: only its last W rows can be visible.
        first = max(0, width - self.limits.window)
        taps = np.ascontiguousarray(self._chunk_taps[:, first:])
        binding = self._engines["seed", batch].io_binding()
        inputs: dict[str, NDArray[Any]] = {
            "taps": taps,
            "start": _padded(start + first, batch, 0),
            "count": np.full(batch, width - first, np.int64),
        }
        self._bind(binding, inputs, {}, self._rings, slots)
        self._engines["seed", batch].run_with_iobinding(binding)

    def draft(
        self,
        bonus: Int64,
        start: Int64,
        valid_len: Int64,
        new_len: Int64,
        slot: Int64,
        temperature: Float32,
        uniforms: Float32,
    ) -> DraftOut:
        real, width = uniforms.shape
        if (start <= 0).any():
            raise RequestError(
                "start_pos",
                "a draft needs committed tokens before the bonus token",
                expected="> 0",
                found=int(start.min()),
            )
        batch = self._batch(real)
        slots = self._slots(slot, batch)
        sampled = bool((temperature > 0).any())
        call = self._kept(("draft", width, sampled, slots), lambda: self._draft_call(slots, width, sampled))
        values = (bonus, start, valid_len, new_len, temperature, uniforms)
        for name, value, padding in zip(_DRAFT_INPUTS, values, _DRAFT_PADDING, strict=True):
            array = call.inputs[name]
            array[:real] = value
            array[real:] = padding
        self._engines["draft", batch].run_with_iobinding(call.binding)
        out = self.debug = call.outputs
        confidence = out.get("confidence_logits")
        return DraftOut(
            ids=out["ids"][:real],
            confidence_logits=None if confidence is None else confidence[:real],
            q=out["q"][:real] if sampled else None,
        )

    def close(self) -> None:
        self._calls.clear()
        self._engines.clear()
        self._state.clear()

    def _batch(self, rows: int) -> int:
        """The smallest engine that holds the rows."""
        for batch in self.limits.batches:
            if batch >= rows:
                return batch
        raise RequestError(
            "batch", "no engine holds so many rows", expected=f"<= {self.limits.batches[-1]}", found=rows
        )

    def _slots(self, slot: Int64, batch: int) -> tuple[int, ...]:
        return (*slot.tolist(), *[self._scratch] * (batch - len(slot)))

    def _kept(self, key: tuple[Any, ...], make: Callable[[], _Call]) -> _Call:
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = make()
            if len(self._calls) > _KEPT_BINDINGS:
                self._calls.popitem(last=False)
        else:
            self._calls.move_to_end(key)
        return call

    def _buffer(self, name: str, *shape: int) -> Float32:
        """An output array as a view of one buffer a name, as large as any call needs: bindings come by the hundred."""
        if name not in self._buffers:
            largest = self.limits.batches[-1] * (self.limits.block_size + 1) * self._vocab
            self._buffers[name] = np.empty(largest, np.float32)
        return self._buffers[name][: math.prod(shape)].reshape(shape)

    def _run_target(self, batch: int, call: _Call, ids: Int64, start: Int64) -> TargetOut:
        real = len(ids)
        for name, value in (("ids", ids), ("start", start)):
            call.inputs[name][:real] = value
            call.inputs[name][real:] = 0
        self._engines["target", batch].run_with_iobinding(call.binding)
        return TargetOut(call.outputs["argmax"][:real], call.outputs["logits"][:real])

    def _target_call(self, slots: tuple[int, ...], width: int, heads: int, taps: list[NDArray[Any]]) -> _Call:
        batch = len(slots)
        inputs: dict[str, NDArray[Any]] = {
            "ids": np.zeros((batch, width), np.int64),
            "start": np.zeros(batch, np.int64),
            "head_rows": np.tile(np.arange(width - heads, width, dtype=np.int64), (batch, 1)),
        }
        outputs: dict[str, NDArray[Any]] = {
            "argmax": np.empty((batch, heads), np.int64),
            "logits": self._buffer("logits", batch, heads, self._vocab),
        }
        binding = self._engines["target", batch].io_binding()
        tap_rows = {f"taps.row{r}": row for r, row in enumerate(taps)}
        self._bind(binding, inputs, outputs | tap_rows, self._caches, slots)
        return _Call(binding, inputs, outputs)

    def _draft_call(self, slots: tuple[int, ...], width: int, sampled: bool) -> _Call:
        batch = len(slots)
        inputs: dict[str, NDArray[Any]] = {name: np.zeros(batch, np.int64) for name in _DRAFT_INPUTS[:4]}
        inputs |= {"temperature": np.zeros(batch, np.float32), "uniforms": np.zeros((batch, width), np.float32)}
        outputs: dict[str, NDArray[Any]] = {
            "ids": np.empty((batch, width), np.int64),
            "q": self._buffer("q", batch, width, self._vocab if sampled else 1),
        }
        if self._has_confidence:
            outputs["confidence_logits"] = np.empty((batch, width), np.float32)
        for name, columns in self._debug_outputs:
            rows = self.limits.block_size if name == "hidden" else width
            outputs[name] = np.empty((batch, rows, columns), np.float32)
        binding = self._engines["draft", batch].io_binding()
        taps = {f"taps.row{r}": self._state["taps"][s] for r, s in enumerate(slots)}
        self._bind(binding, inputs | taps, outputs, self._rings, slots)
        return _Call(binding, inputs, outputs)

    def _bind(
        self,
        binding: ort.IOBinding,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        states: list[str],
        slots: tuple[int, ...],
    ) -> None:
        """Bind by address: the arrays stay where they are for as long as the binding lives."""
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for state in states:
            for r, slot in enumerate(slots):
                view = self._state[state][slot : slot + 1]
                place = ("cpu", 0, view.dtype, view.shape, view.ctypes.data)
                # Bound to itself: the operator that updates a state then does so in place.
                binding.bind_input(f"{state}.row{r}", *place)
                binding.bind_output(f"{state}.row{r}.new", *place)


_DRAFT_INPUTS = ("bonus", "start", "valid_len", "new_len", "temperature", "uniforms")
_DEBUG = ("hidden", "base", "corrected")
# A padding row drafts from an empty ring on the scratch slot.
_DRAFT_PADDING = (0, 1, 0, 0, 0.0, 0.0)


def _padded(values: Int64, batch: int, padding: int) -> Int64:
    out = np.full(batch, padding, np.int64)
    out[: len(values)] = values
    return out


def _load(path: Path, threads: int | None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    # Target, draft and seed each own a pool: without this, the last one's workers spin on the cores of the next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the library has no narrower class for a model that it refuses
        raise BundleError(path, "ONNX Runtime refuses this engine", found=str(error), remedy=REBUILD) from error
