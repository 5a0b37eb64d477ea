"""How many rows a call is padded to, where engines have fixed sizes: the same answer for whoever builds and serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import RequestError
from runtime.manifest import Limits, Serving

_SHORT_CHUNK = 32


@dataclass(frozen=True)
class Widths:
    """Ascending, by stage: ids a row of `verify` and `prefill`, tap rows of `seed`, tokens of `draft`. Few of each,
    since every one is built or captured for every batch: padding costs less."""

    verify: tuple[int, ...]
    prefill: tuple[int, ...]
    seed: tuple[int, ...]
    draft: tuple[int, ...]

    @staticmethod
    def of(limits: Limits, serving: Serving) -> Widths:
        """Plain decoding, the proposals that are usual, and the whole block."""
        block = limits.block_size
        usual = max(min(serving.max_draft, block), 1)
        return Widths(
            verify=_ascending(1, usual + 1, block + 1),
            prefill=_ascending(min(_SHORT_CHUNK, limits.prefill_chunk), limits.prefill_chunk),
            seed=_ascending(block + 1, limits.tap_rows),
            draft=_ascending(usual, block),
        )

    def of_stage(self, stage: str) -> tuple[int, ...]:
        """Of a stage of `runtime.engine_records.STAGES`."""
        named = {"verify": self.verify, "prefill": self.prefill, "seed": self.seed}
        return named.get(stage, self.draft)


def smallest(sizes: Sequence[int], least: int) -> int:
    """The smallest of ascending sizes that is enough. Raises RequestError when none is."""
    for size in sizes:
        if size >= least:
            return size
    raise RequestError("count", "more rows than a call takes", expected=f"<= {sizes[-1]}", found=least)


def _ascending(*sizes: int) -> tuple[int, ...]:
    return tuple(sorted(set(sizes)))
