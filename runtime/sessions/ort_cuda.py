"""ONNX Runtime on CUDA: whole slot-indexed state on the GPU, and a CUDA graph for each size of a call.

Slots are indices here. A call writes its small inputs in one copy, replays, and reads ids, counts and confidences in
one; logits and q stay on the GPU, and a row of them is fetched where somebody looks at it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.errors import BundleError, PluginWarning, RequestError
from runtime.manifest import ITEM_BYTES, PLUGINS_FILE, REBUILD, Manifest
from runtime.sessions.base import (
    DraftOut,
    DraftRows,
    Int64,
    SeedRows,
    SlotCopy,
    TargetOut,
    TargetRows,
)
from runtime.sessions.checks import check_draft, smallest_batch
from runtime.sessions.device_rows import DeviceLogits, DeviceProbabilities
from runtime.sessions.memory import CudaMemory, HostMemory, Memory
from runtime.sessions.ort_variants import Placed, Variants

PLUGINS_VARIABLE = "DSPARK_PLUGINS"
"""Environment variable: the library of kernels, or the directory that it was built in."""

_LIBRARY = "libdspark_ort.so"
_SHORT_CHUNK = 32
_PIECE = 64 << 20  # bytes of weights copied at once


class OrtCudaSession:
    """Graphs of one bundle on ONNX Runtime's CUDA provider. See `runtime.sessions.base.Session` for the calls.

    Without the library of kernels (in the bundle, or named by ``DSPARK_PLUGINS``) the graphs' bodies of standard
    operators run, one by one: a `PluginWarning` says so once.

    Args:
        path: the bundle's directory.
        manifest: its manifest, already checked.
        threads: of work that stays on the CPU; None takes one per physical core.
        device: ``cpu`` runs the same graphs in the process, in float32, for tests.
        fixed_width: verify every row at the width of a whole block: plain decoding then runs the very products that
            speculation runs.

    Raises:
        BundleError: a graph that the library refuses.
        BackendUnavailable: no CUDA runtime.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        threads: int | None = None,
        device: Literal["cuda", "cpu"] = "cuda",
        fixed_width: bool = False,
    ) -> None:
        self.limits = manifest.limits
        self._vocab = manifest.models.vocab_size
        self._has_confidence = manifest.models.has_confidence
        library = _plugin_library(path, manifest) if device == "cuda" else None
        block, most = self.limits.block_size, self.limits.batches[-1]
        default = min(manifest.serving.max_draft, block) + 1
        self._widths = (block + 1,) if fixed_width else tuple(sorted({1, default, block + 1}))
        # Few widths: each that runs is captured, for each batch. Padding costs less.
        self._chunks = tuple(sorted({min(_SHORT_CHUNK, self.limits.prefill_chunk), self.limits.prefill_chunk}))
        self._seeds = tuple(sorted({block + 1, self.limits.tap_rows}))
        self._drafts = tuple(sorted({max(default - 1, 1), block}))
        load = _loader(path, device, threads, library)
        sessions = {name: load(file) for name, file in {e.graph: e.file for e in manifest.engines}.items()}
        self._memory: Memory = CudaMemory() if device == "cuda" else HostMemory()
        state = _state(manifest, self._memory)
        self._state = tuple(state.values())
        fixed = {**_weights(path, self._memory), **state}
        captured = library is not None
        self._graphs = {name: Variants(session, self._memory, fixed, captured) for name, session in sessions.items()}
        self._logits = self._memory.allocate(4 * most * (block + 1) * self._vocab)
        self._big: dict[str, int] = {}

    def prefill(self, rows: TargetRows) -> TargetOut:
        width = _smallest(self._chunks, int(rows.count.max()))
        return self._target(rows, width, (rows.count - 1)[:, None])

    def verify(self, rows: TargetRows) -> TargetOut:
        width = _smallest(self._widths, int(rows.count.max()))
        return self._target(rows, width, np.broadcast_to(np.arange(width), (len(rows.slot), width)))

    def seed(self, rows: SeedRows) -> None:
        batch = smallest_batch(self.limits, len(rows.slot))
        inputs = {
            "row": np.arange(_smallest(self._seeds, int(rows.count.max()))),
            "start": _padded(rows.start, batch, 0),
            "count": _padded(rows.count, batch, 0),
            "slot": _padded(rows.slot, batch, self.limits.slots),
        }
        self._graphs["seed"].run(inputs, {}, {})

    def draft(self, rows: DraftRows) -> DraftOut:
        check_draft(self.limits, rows)
        batch, drafts = smallest_batch(self.limits, len(rows.slot)), rows.uniforms.shape[1]
        width = _smallest(self._drafts, drafts)
        inputs = {
            "bonus": _padded(rows.bonus, batch, 0),
            # A padding row drafts from an empty ring on the scratch slot.
            "start": _padded(rows.start, batch, 1),
            "valid_len": _padded(rows.valid_len, batch, 0),
            "new_len": _padded(rows.new_len, batch, 0),
            "slot": _padded(rows.slot, batch, self.limits.slots),
            "temperature": _padded(rows.temperature, batch, 0),
            "uniforms": _padded(_widened(rows.uniforms, width), batch, 0),
        }
        outputs: dict[str, tuple[tuple[int, ...], str]] = {"ids": ((batch, width), "int64")}
        if self._has_confidence:
            outputs["confidence_logits"] = ((batch, width), "float32")
        sampled = bool((rows.temperature > 0).any())
        placed = {}
        if rows.noise is None or rows.noise.shape[2] != self._vocab:
            inputs["noise"] = np.zeros((batch, width, 1), np.float32)
        else:
            placed["noise"] = self._place("noise", batch, width)
            self._memory.write(placed["noise"].address, _widened(rows.noise, width))
        if sampled:
            placed["q"] = self._place("q", batch, width)
        else:
            outputs["q"] = ((batch, width, 1), "float32")
        out = self._graphs["draft_sampled" if sampled else "draft"].run(inputs, outputs, placed)
        count = len(rows.slot)
        confidence = out.get("confidence_logits")
        return DraftOut(
            ids=out["ids"][:count, :drafts].copy(),
            confidence_logits=None if confidence is None else confidence[:count, :drafts].copy(),
            q=DeviceProbabilities(self._memory, placed["q"], count, drafts) if sampled else None,
        )

    def copy(self, work: SlotCopy) -> None:
        """The whole slot: cheaper than finding out which rows."""
        for tensor in self._state:
            size = int(np.prod(tensor.shape[1:])) * ITEM_BYTES[tensor.dtype]
            self._memory.copy(tensor.address + work.dest * size, tensor.address + work.source * size, size)

    def close(self) -> None:
        self._graphs.clear()

    def _target(self, rows: TargetRows, width: int, head_rows: Int64) -> TargetOut:
        count, batch = len(rows.slot), smallest_batch(self.limits, len(rows.slot))
        counts = rows.count.tolist()
        ids = np.zeros((batch, width), np.int64)
        ids[:count][np.arange(width) < rows.count[:, None]] = rows.ids
        heads = head_rows.shape[1]
        inputs = {
            "ids": ids,
            "start": _padded(rows.start, batch, 0),
            "slot": _padded(rows.slot, batch, self.limits.slots),
            "count": _padded(rows.count, batch, 0),
            "tap_row": _padded(rows.tap_row, batch, 0),
            "head_rows": _padded(head_rows, batch, 0),
        }
        logits = Placed(self._logits, (batch, heads, self._vocab), "float32")
        outputs = {"argmax": ((batch, heads), "int64"), "best": ((batch, heads), "float32")}
        out = self._graphs["target"].run(inputs, outputs, {"logits": logits})
        # Of each row as many as it has ids; of a prefill the one there is.
        lengths = [min(n, heads) for n in counts]
        kept = np.concatenate([i * heads + np.arange(n) for i, n in enumerate(lengths)])
        argmax, best = out["argmax"].reshape(-1)[kept], out["best"].reshape(-1)[kept]
        return TargetOut(argmax, DeviceLogits(self._memory, logits, kept, argmax, best))

    def _place(self, name: str, batch: int, width: int) -> Placed:
        """A tensor ``[batch, width, V]`` in the buffer of that name, which holds the largest."""
        if name not in self._big:
            size = 4 * self.limits.batches[-1] * self.limits.block_size * self._vocab
            self._big[name] = self._memory.allocate(size)
        return Placed(self._big[name], (batch, width, self._vocab), "float32")


def _padded(values: NDArray[Any], batch: int, padding: int) -> NDArray[Any]:
    """As many rows as the batch, those that are added full of `padding`."""
    if len(values) == batch:
        return values
    rows = np.full((batch, *values.shape[1:]), padding, values.dtype)
    rows[: len(values)] = values
    return rows


def _widened(values: NDArray[Any], width: int) -> NDArray[Any]:
    """``[b, s, …]`` as ``[b, width, …]``, with zeros for what is added."""
    if values.shape[1] == width:
        return values
    rows = np.zeros((values.shape[0], width, *values.shape[2:]), values.dtype)
    rows[:, : values.shape[1]] = values
    return rows


def _smallest(sizes: Sequence[int], least: int) -> int:
    for size in sizes:
        if size >= least:
            return size
    raise RequestError("count", "more rows than a call takes", expected=f"<= {sizes[-1]}", found=least)


def _weights(path: Path, memory: Memory) -> dict[str, Placed]:
    """The weights file on the device, and where each weight lies."""
    data = np.memmap(path / "weights.bin", np.uint8, mode="r")
    base = memory.allocate(len(data))
    for at in range(0, len(data), _PIECE):
        memory.write(base + at, data[at : at + _PIECE])
    entries = json.loads((path / "weights.json").read_text(encoding="ascii"))["weights"]
    return {e["name"]: Placed(base + e["offset"], tuple(e["shape"]), e["dtype"]) for e in entries}


def _state(manifest: Manifest, memory: Memory) -> dict[str, Placed]:
    """State of every slot and the scratch slot, zero: what is masked must still be finite."""
    placed = {}
    for tensor in manifest.state:
        shape = (manifest.limits.slots + 1, *tensor.shape)
        address = memory.allocate(int(np.prod(shape)) * ITEM_BYTES[tensor.dtype])
        placed[tensor.name] = Placed(address, shape, tensor.dtype)
    return placed


def _plugin_library(path: Path, manifest: Manifest) -> Path | None:
    """The bundle's library of kernels, or the one that the environment names; None, with a warning, if neither is."""
    if PLUGINS_FILE in manifest.files:
        return path / PLUGINS_FILE
    named = os.environ.get(PLUGINS_VARIABLE)
    if named:
        library = Path(named)
        library = library / _LIBRARY if library.is_dir() else library
        if library.is_file():
            return library.absolute()
    warnings.warn(
        f"{path}: no library of kernels; standard operators give the same results, slower. Build plugins/ and set "
        f"{PLUGINS_VARIABLE} to its build directory",
        PluginWarning,
        stacklevel=4,
    )
    return None


def _loader(
    path: Path, device: str, threads: int | None, library: Path | None
) -> Callable[[str], ort.InferenceSession]:
    """What loads a graph of the bundle by its file name."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    if library is not None:
        try:
            options.register_custom_ops_library(str(library))
        except Exception as error:  # the library has no narrower class for a file that it can't load
            raise BundleError(
                library, "is no library of kernels for this machine", found=str(error), remedy="Build plugins/ anew"
            ) from error
    providers: list[Any] = ["CPUExecutionProvider"]
    if device == "cuda":
        # The wheels of CUDA's libraries are found through the packages that brought them.
        ort.preload_dlls()
        settings: Mapping[str, str] = {
            "device_id": "0",
            "use_tf32": "0",
            "enable_cuda_graph": "0" if library is None else "1",
            "arena_extend_strategy": "kSameAsRequested",
        }
        providers.insert(0, ("CUDAExecutionProvider", settings))

    def load(file: str) -> ort.InferenceSession:
        try:
            session = ort.InferenceSession(str(path / file), options, providers=providers, enable_fallback=0)
        except Exception as error:
            raise BundleError(
                path / file, "ONNX Runtime refuses this graph", found=str(error), remedy=REBUILD
            ) from error
        return session

    return load
