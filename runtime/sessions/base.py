"""What an inference back end offers the engine: four calls over slot-indexed state, and nothing else.

Arrays are numpy, C-contiguous. `b` is the number of real rows of the call; the session pads to the smallest fixed-batch
engine that holds it, with padding rows on the scratch slot. Slots are ``0 … slots-1``. Outputs may
be views of persistent buffers: those of `draft` are valid until the next `draft`, those of `prefill` and `verify` until
the next call of either. The engine relies on it: it reads q after verify.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class TargetOut:
    """`argmax` int64 ``[b, w]`` and `logits` float32 ``[b, w, V]``; of prefill w is 1, the last id."""

    argmax: Int64
    logits: Float32


@dataclass(frozen=True)
class DraftOut:
    """One block. `ids` int64 ``[b, s]``; `confidence_logits` float32 ``[b, s]``, or None without a confidence head; `q`
    float32 ``[b, s, V]``, the very probabilities that rows with temperature > 0 were drawn from (None when no row
    sampled).
    """

    ids: Int64
    confidence_logits: Float32 | None
    q: Float32 | None


class Session(Protocol):
    """One loaded set of engines and its state. Not thread-safe: one step at a time."""

    def prefill(self, ids: Int64, start: Int64, slot: Int64) -> TargetOut:
        """Run ``ids[b, c]`` at positions ``start[b] … start[b]+c-1``: target K/V is written, logits of the last id come
        back, and the chunk's tap rows are kept for `seed`."""
        ...

    def seed(self, start: Int64, slot: Int64) -> None:
        """Write the ring rows of the chunk that the latest `prefill` ran (same `start` and `slot`)."""
        ...

    def verify(self, ids: Int64, start: Int64, slot: Int64) -> TargetOut:
        """Run ``ids[b, w]``, w ≤ B+1, at positions from ``start[b]``; a row with fewer ids is padded by the caller, and
        its tail ignored. The tap rows are kept in the slot for the next `draft`."""
        ...

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
        """Write the first ``new_len[b]`` tap rows of the last verify to the ring, at positions
        ``start-new_len … start-1``, then draft ``s = uniforms.shape[1]`` ≤ B tokens for positions ``start+1 …``.
        `valid_len` counts visible ring rows after that write. ``temperature`` 0 takes the argmax."""
        ...

    def close(self) -> None: ...
