"""What an inference back end offers the engine: five calls over slot-indexed state, and nothing else.

Arrays are numpy, C-contiguous. `b` is the number of real rows of a call, each with its own number of ids; the session
pads to the smallest fixed-batch engine that holds them, with padding rows on the scratch slot. Slots are
``0 … slots-1``, each at most once in a call. Outputs may be views of persistent buffers: those of `draft` are valid
until the next `draft`, those of `prefill` and `verify` until the next call of either. The engine relies on it: it reads
q after verify.

Besides its target cache and its ring, a slot has `Limits.tap_rows` **tap rows**: hidden states of ids that the target
has run and that the ring has not taken in yet. `prefill` and `verify` write them, `seed` and `draft` move the first of
them into the ring; which of them are meant is the caller's bookkeeping (`runtime.slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class TargetRows:
    """Ids for the target, packed row after row: `ids` int64 ``[R]``, of which row i has ``count[i]`` ≥ 1 (R is their
    sum), at positions ``start[i] …`` of slot ``slot[i]``; its tap rows go to the slot's tap rows ``tap_row[i] …``. All
    but `ids` are int64 ``[b]``."""

    ids: Int64
    count: Int64
    start: Int64
    slot: Int64
    tap_row: Int64


class LogitRows(Protocol):
    """Float32 ``[n, V]``: an array, or one like it on a device, of which only what is looked at is fetched. Asked for a
    row, for a row and a token, or for a slice of rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: Any, /) -> Any: ...


@dataclass(frozen=True)
class TargetOut:
    """`argmax` int64 and `logits` float32 ``[…, V]``: of `verify` one for each of the R ids, packed alike; of `prefill`
    one a row, after its last id."""

    argmax: Int64
    logits: LogitRows


@dataclass(frozen=True)
class SeedRows:
    """The first ``count[i]`` ≥ 1 tap rows of slot ``slot[i]`` belong to positions ``start[i] …``; int64
    ``[b]`` each."""

    start: Int64
    count: Int64
    slot: Int64


@dataclass(frozen=True)
class DraftRows:
    """What a draft call needs. int64 ``[b]``: the `bonus` token and its position `start`; `new_len` (0 … B+1), how many
    tap rows are written to the ring first, at positions ``start-new_len … start-1``; `valid_len`, how many ring rows
    are visible after that write; `slot`.

    float32: `temperature` ``[b]`` (0 takes the argmax), `uniforms` ``[b, s]`` with the s ≤ B tokens to draft, and
    `noise` ``[b, s, V]``, added to the logits before anything is picked, or None: temperature 0 with noise T·g, g
    standard Gumbel, draws at temperature T (the Gumbel-max trick).
    """

    bonus: Int64
    start: Int64
    valid_len: Int64
    new_len: Int64
    slot: Int64
    temperature: Float32
    uniforms: Float32
    noise: Float32 | None = None


@dataclass(frozen=True)
class DraftOut:
    """One block. `ids` int64 ``[b, s]``; `confidence_logits` float32 ``[b, s]``, or None without a confidence head; `q`
    float32 ``[s, V]`` for each row, the very probabilities that rows with temperature > 0 were drawn from (None when
    no row sampled).
    """

    ids: Int64
    confidence_logits: Float32 | None
    q: Sequence[Float32] | None


@dataclass(frozen=True)
class SlotCopy:
    """Give slot `dest` what another holds: cache rows ``0 … cache_rows-1``, the ring rows of positions
    ``ring_start … ring_start+ring_rows-1`` (row = position mod W), and the first `tap_rows` tap rows."""

    source: int
    dest: int
    cache_rows: int
    ring_start: int
    ring_rows: int
    tap_rows: int


class Session(Protocol):
    """One loaded set of engines and its state. Not thread-safe: one call at a time."""

    def prefill(self, rows: TargetRows) -> TargetOut:
        """Run chunks of prompts: cache and tap rows are written, logits after each row's last id come back. A row has
        at most `Limits.prefill_chunk` ids."""
        ...

    def verify(self, rows: TargetRows) -> TargetOut:
        """Run each row's bonus and drafts, at most B+1 ids: cache and tap rows are written, logits after every id come
        back."""
        ...

    def seed(self, rows: SeedRows) -> None:
        """Move tap rows into the ring; of more than W only the last W are written."""
        ...

    def draft(self, rows: DraftRows) -> DraftOut:
        """Move the newest tap rows into the ring, then draft ``s`` tokens for positions ``start+1 …`` of each row.

        Raises:
            RequestError: a start ≤ 0, before anything is written.
        """
        ...

    def copy(self, work: SlotCopy) -> None:
        """Copy what two requests share from slot to slot; the source stays as it is."""
        ...

    def close(self) -> None: ...
