"""What went into each TensorRT engine: recorded from the network before it was serialised, since an engine can be
opened only on a machine with its GPU.

``engines.json`` in a bundle is the JSON of these records, nothing more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import BundleError
from runtime.manifest import REBUILD, from_plain, to_plain

RECORDS_NAME = "engines.json"

STAGES = ("verify", "prefill", "seed", "draft", "draft_sampled", "draft_noise")
"""What an engine does. The target's call with as many logits as ids is ``verify``, with one a row ``prefill``. A draft
takes the best tokens; ``draft_sampled`` may draw from q, and ``draft_noise`` takes noise for the whole vocabulary
too."""


@dataclass(frozen=True)
class TensorRecord:
    """An input or output of an engine; `dtype` is a key of `runtime.manifest.ITEM_BYTES`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class EngineRecord:
    """One engine: what `runtime.manifest.EngineFile` says, and what is inside.

    `layers` counts TensorRT's layers by type, `plugins` those of type PLUGIN_V3 by operator. `weights` are inputs that
    lie in ``weights.bin``, of `weight_bytes` together. State outputs, named ``<state>.new``, are either `aliased` with
    the input that they update, by a plugin, or `copied`: then a call writes them elsewhere, and the session brings
    `copied_bytes` back. An engine that loops can't be `captured` as a CUDA graph. `engine_bytes` is its file's size.
    """

    file: str
    stage: str
    batch: int
    width: int
    layers: Mapping[str, int]
    plugins: Mapping[str, int]
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    weights: tuple[str, ...]
    aliased: Mapping[str, str]
    copied: Mapping[str, str]
    weight_bytes: int
    copied_bytes: int
    engine_bytes: int
    captured: bool


@dataclass(frozen=True)
class EngineRecords:
    engines: tuple[EngineRecord, ...]


def write_records(directory: Path, records: Sequence[EngineRecord]) -> None:
    """Raises OSError."""
    text = json.dumps(to_plain(EngineRecords(tuple(records))), indent=1, sort_keys=True) + "\n"
    (directory / RECORDS_NAME).write_text(text, encoding="ascii", newline="\n")


def read_records(directory: Path) -> tuple[EngineRecord, ...]:
    """Of the bundle in that directory. Raises BundleError."""
    where = directory / RECORDS_NAME
    try:
        data = json.loads(where.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise BundleError(where, "can't be read as records of engines", found=str(error), remedy=REBUILD) from error
    return from_plain(EngineRecords, data, str(where)).engines
