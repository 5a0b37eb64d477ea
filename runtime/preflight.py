"""What serving a bundle takes of memory, by kind, and what is free: told before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from runtime import machine
from runtime.engine_records import EngineRecord
from runtime.libraries import BACKENDS
from runtime.machine import human_bytes
from runtime.manifest import ITEM_BYTES, Manifest, state_bytes

KINDS = ("weights", "cache", "ring", "taps", "copies", "other", "engines")
"""Of memory: weights once loaded; state of all slots and the scratch slot, by `runtime.manifest.StateTensor.kind`;
second buffers of state that some engine can't update in place; what else the build counted (on a GPU logits and
probabilities); and engines once opened, taken for as large as their files. What a library needs while an engine runs it
tells only once that is open: it isn't counted."""

Place = Literal["host", "gpu"]


@dataclass(frozen=True)
class Preflight:
    """Bytes `needed` by kind (`KINDS`), and the bytes that are `free` for them where they will be, `on` the host or the
    (first) GPU; None if nobody tells."""

    needed: Mapping[str, int]
    free: int | None
    on: Place

    @property
    def total(self) -> int:
        return sum(self.needed.values())

    @property
    def fits(self) -> bool:
        return self.free is None or self.total <= self.free

    def kinds(self) -> str:
        """``weights 1.0 GiB, cache 12.0 MiB``: those of which any is needed."""
        return ", ".join(f"{kind} {human_bytes(size)}" for kind, size in self.needed.items() if size)


def preflight(manifest: Manifest, records: Sequence[EngineRecord] = (), available: int | None = None) -> Preflight:
    """Of a bundle and the records of its engines; `available` is the memory to count on, None asks the machine."""
    info = BACKENDS.get(manifest.backend.name)
    on: Place = "gpu" if info is not None and info.architectures else "host"
    return Preflight(needed(manifest, records), _free(on) if available is None else available, on)


def needed(manifest: Manifest, records: Sequence[EngineRecord] = ()) -> dict[str, int]:
    """Bytes by kind, in the order of `KINDS`."""
    found = dict.fromkeys(KINDS, 0)
    found["weights"] = manifest.memory.weights
    for tensor in manifest.state:
        found[tensor.kind] += state_bytes(tensor, manifest.limits.slots + 1)
    # By name: whichever engines copy a state, they take turns with one second buffer.
    copies = {
        tensor.name: math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        for record in records
        for tensor in record.outputs
        if tensor.name in record.copied
    }
    found["copies"] = sum(copies.values())
    found["other"] = max(manifest.memory.total - sum(found.values()), 0)
    found["engines"] = sum(record.engine_bytes for record in records)
    return found


def _free(on: Place) -> int | None:
    if on == "host":
        return machine.available_memory()
    cards = machine.gpus()
    if not cards:
        return None
    return cards[0].memory if cards[0].free is None else cards[0].free
