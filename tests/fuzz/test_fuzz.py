"""A short run of the fuzz, and that it finds faults which users of other engines reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime import proposing, rounds, sequence, slots
from runtime.engine import Engine
from runtime.scheduler import FifoScheduler
from runtime.slots import SlotState
from runtime.verify import Emitted
from tests.fuzz.oracle import Mismatch
from tests.fuzz.traffic import CALLS, EVENTS, GEOMETRIES, counted, episode
from tests.fuzz.watched import WatchedSession

BESIDES = (
    "queue full", "chunk", "round", "draft", "tap rows piled up", "turn waited for", "waited for a prompt in work",
    *(f"raised in {call}" for call in CALLS),
)  # fmt: skip


def short_run() -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(2 * len(GEOMETRIES)):
        counts += episode(seed, 1500)
    return counts


def test_traffic_matches_the_oracle() -> None:
    counts = short_run()
    assert counted(counts) >= 18_000
    seldom = {kind: counts[kind] for kind in (*EVENTS, *BESIDES) if counts[kind] < 10}
    assert not seldom


def test_an_episode_follows_from_its_seed() -> None:
    assert episode(1, 300) == episode(1, 300)
    assert episode(1, 300) != episode(7, 300)


Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def old_rows(patch: Patch) -> None:
    """A slot is taken to hold whatever the next request begins with."""
    patch.setattr(slots, "common_prefix", lambda a, b, most: min(most, len(a), len(b)))


def padding_in_slot_0(patch: Patch) -> None:
    made = WatchedSession.__init__

    def init(self: WatchedSession, *arguments: Any) -> None:
        made(self, *arguments)
        self.scratch = 0

    patch.setattr(WatchedSession, "__init__", init)


def chunks_from_position_0(patch: Patch) -> None:
    made = rounds._target_rows

    def restarted(rows: Sequence[Any], ids: Sequence[Sequence[int]]) -> Any:
        whole = made(rows, ids)
        in_prompt = [row.state.start_pos < len(row.sequence.request.prompt_ids) for row in rows]
        return replace(whole, start=np.where(in_prompt, 0, whole.start))

    patch.setattr(rounds, "_target_rows", restarted)


def blocks_over_the_limit(patch: Patch) -> None:
    """A block near the limit is as long as any other."""
    patch.setattr(sequence.Sequence, "draft_cap", lambda self: self._max_draft if self.speculates else 0)


def tokens_after_a_stop(patch: Patch) -> None:
    def emit(committed: Sequence[int], stop_ids: frozenset[int], remaining: int) -> Emitted:
        return Emitted(tuple(committed[:remaining]), len(committed) - 1, not stop_ids.isdisjoint(committed))

    patch.setattr(sequence, "emit", emit)


def cancelled_keeps_its_slot(patch: Patch) -> None:
    ended = Engine._finish

    def finish(self: Engine, request_id: int, reason: Any, error: Any) -> None:
        if reason == "cancelled":
            self._sequences[request_id].finish(reason, error)
        else:
            ended(self, request_id, reason, error)

    patch.setattr(Engine, "_finish", finish)


def block_from_the_token_before(patch: Patch) -> None:
    made = proposing._draft_rows

    def rows_one_off(rows: Sequence[Any], drafts: int) -> Any:
        before = [(row.sequence.request.prompt_ids[-1], *row.sequence.tokens)[-2] for row in rows]
        return replace(made(rows, drafts), bonus=np.array(before))

    patch.setattr(proposing, "_draft_rows", rows_one_off)


def drafts_for_accepted(patch: Patch) -> None:
    """As many tokens are committed as were verified, rejected ones among them."""
    verified = SlotState.verified
    patch.setattr(
        SlotState, "verified", lambda self, bonus, drafts, accepted: verified(self, bonus, drafts, len(drafts))
    )


def dropped_rows_visible(patch: Patch) -> None:
    """Rows that were never seeded count in `valid_len`."""

    def seeded(self: SlotState) -> None:
        self.seeded_until, self.pending = self.start_pos, 0

    patch.setattr(SlotState, "seeded", seeded)


def prefix_rows_visible(patch: Patch) -> None:
    """All of a shared prefix counts as seeded."""
    kept = SlotState.keep

    def keep(self: SlotState, rows: int) -> None:
        kept(self, rows)
        self.first_seeded, self.seeded_until = 0, self.start_pos - self.pending

    patch.setattr(SlotState, "keep", keep)


def failed_slots_serve(patch: Patch) -> None:
    """What a slot holds after an error serves as a prefix."""
    finish = FifoScheduler.finish
    patch.setattr(FifoScheduler, "finish", lambda self, request_id, keep=True: finish(self, request_id))


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        pytest.param(old_rows, "alone it gives", id="reused slot shows the last request's rows, llama.cpp 22105"),
        pytest.param(padding_in_slot_0, "reads cache rows up to", id="padding written to slot 0, TensorRT-LLM 16767"),
        pytest.param(chunks_from_position_0, "tap rows", id="chunks restart at position 0, TensorRT-LLM 15808"),
        pytest.param(blocks_over_the_limit, "beyond the cache", id="block over the sequence limit, sglang 33454"),
        pytest.param(tokens_after_a_stop, "alone it gives", id="tokens after an accepted stop, transformers 47912"),
        pytest.param(cancelled_keeps_its_slot, "keeps its slot", id="cancelled request keeps its slot"),
        pytest.param(block_from_the_token_before, "not the token of position", id="block one off, vllm 56792"),
        pytest.param(drafts_for_accepted, "not the token of position", id="number of drafts confused, sglang 34023"),
        pytest.param(dropped_rows_visible, r"sees 8 rows; \d are there", id="rows before a gap visible"),
        pytest.param(prefix_rows_visible, r"sees 8 rows; \d are there", id="unseeded rows of a prefix visible"),
        pytest.param(failed_slots_serve, r"tap rows .* wait", id="failed slot serves as a prefix"),
    ],
)
def test_planted_fault_is_caught(plant: Plant, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its report, where there is one."""
    plant(monkeypatch)
    with pytest.raises(Mismatch, match=message):
        short_run()
