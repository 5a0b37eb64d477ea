"""The session on ONNX Runtime: rows that share a call don't see each other, and a call writes its own rows alone.

Both tiny pairs: one has heads whose rotation stands before attention, the other has norms on q and k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from builder.checkpoints import load_drafter, load_target
from runtime.errors import RequestError
from runtime.manifest import Limits, Manifest
from runtime.sessions.base import DraftOut, DraftRows, SeedRows, SlotCopy, TargetOut, TargetRows
from runtime.sessions.ort import OrtSession
from runtime.slots import SlotState
from tests.support import TINY_PAIRS, pair_engines

WINDOW, CHUNK, POSITIONS, SLOTS, LARGEST = 12, 10, 48, 6, 4
TOLERANCE = 1e-4

Rows = TargetRows | SeedRows | DraftRows


@dataclass(frozen=True)
class Pair:
    """Engines of a tiny pair for 1, 2 and 4 rows over six slots, debug outputs included."""

    path: Path
    manifest: Manifest
    w1: NDArray[np.float32]
    w2: NDArray[np.float32]

    def open(self) -> OrtSession:
        return OrtSession(self.path, self.manifest, threads=1)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory, dest = TINY_PAIRS / request.param, tmp_path_factory.mktemp("ort")
    target = load_target(directory / "target")
    drafter = load_drafter(directory / "drafter", target)
    limits = Limits((1, 2, LARGEST), SLOTS, WINDOW, POSITIONS, drafter.spec.block_size, CHUNK)
    weights = load_file(directory / "drafter" / "model.safetensors")
    w1, w2 = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    return Pair(dest, pair_engines(dest, target, drafter, limits, debug=True), w1, w2)


@pytest.fixture
def session(pair: Pair) -> Iterator[OrtSession]:
    session = pair.open()
    yield session
    session.close()


class Requests:
    """What the slots of some sessions hold, as `runtime.slots` counts it: makes calls that an engine could make, the
    same on each of them."""

    def __init__(self, limits: Limits, seed: int) -> None:
        self.limits = limits
        self.rng = np.random.default_rng(seed)
        self.states = [self._new() for _ in range(limits.slots)]

    def _new(self) -> SlotState:
        return SlotState(self.limits.window, self.limits.tap_rows)

    def ids(self, n: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, 131, n)]

    def some(self, fit: Callable[[SlotState], bool]) -> list[int]:
        """Up to as many slots as a call takes, in any order; those that are full start anew."""
        for slot, state in enumerate(self.states):
            if state.start_pos > POSITIONS - CHUNK:
                self.states[slot] = self._new()
        slots = [slot for slot in self.rng.permutation(len(self.states)).tolist() if fit(self.states[slot])]
        return slots[: int(self.rng.integers(1, LARGEST + 1))]

    def target(self, slots: list[int], most: int) -> tuple[TargetRows, list[list[int]]]:
        chunks = [self.ids(int(self.rng.integers(1, min(most, self.states[slot].tap_room) + 1))) for slot in slots]
        rows = TargetRows(
            ids=np.concatenate(chunks),
            count=np.array([len(chunk) for chunk in chunks]),
            start=np.array([self.states[slot].start_pos for slot in slots]),
            slot=np.array(slots),
            tap_row=np.array([self.states[slot].tap_row for slot in slots]),
        )
        return rows, chunks

    def prefill(self) -> TargetRows | None:
        slots = self.some(lambda state: state.tap_room > 0)
        if not slots:
            return None
        rows, chunks = self.target(slots, CHUNK)
        for slot, chunk in zip(slots, chunks, strict=True):
            self.states[slot].prefilled(chunk)
        return rows

    def verify(self) -> TargetRows | None:
        slots = self.some(lambda state: state.start_pos > 0 and state.tap_room > 0)
        if not slots:
            return None
        rows, chunks = self.target(slots, self.limits.block_size + 1)
        for slot, (bonus, *drafts) in zip(slots, chunks, strict=True):
            self.states[slot].verified(bonus, drafts, int(self.rng.integers(0, len(drafts) + 1)))
        return rows

    def seed(self) -> SeedRows | None:
        slots = self.some(lambda state: state.pending > 0)
        windows = [self.states[slot].seed_window() for slot in slots]
        for slot in slots:
            self.states[slot].seeded()
        start, count = np.array([w.start for w in windows]), np.array([w.count for w in windows])
        return SeedRows(start, count, np.array(slots)) if slots else None

    def draft(self) -> DraftRows | None:
        slots = self.some(lambda state: state.start_pos > 0 and state.pending <= self.limits.block_size + 1)
        if not slots:
            return None
        windows = [self.states[slot].draft_window() for slot in slots]
        for slot in slots:
            self.states[slot].seeded()
        b, s = len(slots), int(self.rng.integers(1, self.limits.block_size + 1))
        noisy, sampling = self.rng.random(2) < 0.5
        return DraftRows(
            bonus=np.array(self.ids(b)),
            start=np.array([w.start_pos for w in windows]),
            valid_len=np.array([w.valid_len for w in windows]),
            new_len=np.array([w.new_len for w in windows]),
            slot=np.array(slots),
            temperature=(self.rng.random(b) * sampling).astype(np.float32),
            uniforms=self.rng.random((b, s), np.float32),
            noise=self.rng.gumbel(size=(b, s, 131)).astype(np.float32) if noisy else None,
        )

    def copy(self) -> SlotCopy:
        """A whole slot's holding for another slot."""
        source, dest = self.rng.permutation(len(self.states))[:2].tolist()
        state = self.states[dest] = self.states[source].copy()
        ring = min(state.window, state.seeded_until - state.first_seeded)
        return SlotCopy(source, dest, state.start_pos, state.seeded_until - ring, ring, state.pending)


def singles(rows: Rows) -> list[Any]:
    """The rows of a call as calls of one row."""
    b = len(rows.slot)
    parts = {
        name: [value[i : i + 1] for i in range(b)]
        for name, value in vars(rows).items()
        if name != "ids" and value is not None
    }
    if isinstance(rows, TargetRows):
        parts["ids"] = np.split(rows.ids, np.cumsum(rows.count)[:-1])
    return [replace(rows, **{name: values[i] for name, values in parts.items()}) for i in range(b)]


def close(found: NDArray[Any], expected: NDArray[Any], what: str = "") -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE, err_msg=what)


def same_drafts(found: DraftOut, expected: list[DraftOut]) -> None:
    np.testing.assert_array_equal(found.ids, np.concatenate([out.ids for out in expected]))
    assert found.confidence_logits is not None
    close(found.confidence_logits, np.concatenate([out.confidence_logits for out in expected]))
    for row, out in enumerate(expected):
        if out.q is not None:
            assert found.q is not None
            close(found.q[row], out.q[0])


def same_targets(found: TargetOut, expected: list[TargetOut]) -> None:
    close(found.logits, np.concatenate([out.logits for out in expected]))
    np.testing.assert_array_equal(found.argmax, found.logits.argmax(-1))


def call(session: OrtSession, kind: str, work: Any) -> Any:
    """The call, with what it returns copied: outputs may be views."""
    out = getattr(session, kind)(work)
    if isinstance(out, TargetOut):
        return TargetOut(out.argmax.copy(), out.logits.copy())
    if isinstance(out, DraftOut) and out.q is not None:
        return replace(out, q=[row.copy() for row in out.q])
    return out


def state_of(session: OrtSession) -> dict[str, NDArray[np.float32]]:
    return {name: state.copy() for name, state in session._state.items()}


def assert_held(session: OrtSession, other: OrtSession, requests: Requests) -> None:
    """Everything that the requests may still see is the same in both sessions."""
    for slot, held in enumerate(requests.states):
        ring = np.arange(max(held.first_seeded, held.seeded_until - WINDOW), held.seeded_until) % WINDOW
        for name, state in session._state.items():
            if name == "taps":
                rows: Any = (slot, slice(held.pending))
            else:
                rows = (slot, slice(None), ring if name.startswith("ring") else slice(held.start_pos))
            close(state[rows], other._state[name][rows], f"{name} of slot {slot}")


@pytest.mark.parametrize("seed", range(3))
def test_any_rows_of_any_slots_equal_single_ones(pair: Pair, session: OrtSession, seed: int) -> None:
    """Slots come and go in any order, rows have lengths of their own, engines of 1, 2 and 4 rows take turns: as if each
    row ran alone. At times a session that was never bound to anything does the same call."""
    alone, requests = pair.open(), Requests(session.limits, seed)
    kinds = ("prefill", "verify", "verify", "seed", "draft", "draft", "copy")
    done = dict.fromkeys(kinds, 0)
    for step in range(120):
        kind = kinds[int(requests.rng.integers(len(kinds)))]
        work = getattr(requests, kind)()
        if work is None:
            continue
        fresh = pair.open() if step % 40 == 39 else None
        if fresh is not None:
            for name, state in session._state.items():
                fresh._state[name][:] = state
        found = call(session, kind, work)
        if kind == "copy":
            call(alone, kind, work)
        else:
            parts = [call(alone, kind, single) for single in singles(work)]
            compare = {"seed": lambda *_: None, "draft": same_drafts}.get(kind, same_targets)
            compare(found, parts)
        if fresh is not None:
            call(fresh, kind, work)
            assert_held(fresh, session, requests)
            fresh.close()
        done[kind] += 1
    assert min(done.values()) >= 5, done
    assert_held(session, alone, requests)
    alone.close()


def filled(session: OrtSession, seed: int) -> dict[str, NDArray[np.float32]]:
    """Fill all state with random numbers, so that any write shows; the state."""
    rng = np.random.default_rng(seed)
    for state in session._state.values():
        state[:] = rng.standard_normal(state.shape, dtype=np.float32)
    return state_of(session)


@pytest.mark.parametrize("kind", ["prefill", "verify", "seed", "draft"])
def test_a_call_writes_its_own_rows_alone(session: OrtSession, kind: str) -> None:
    """By a bit, from the very first call on: padding rows touch scratch only, and so do rows whose slots went."""
    scratch, rng = session.limits.slots, np.random.default_rng(1)
    # Three rows of four, then others, then fewer of an engine that knew more.
    for slots in ([2, 0, 5], [1, 2, 4, 3], [4, 0, 1], [3], [5, 3]):
        before = filled(session, len(slots))
        b = len(slots)
        slot, count, start = np.array(slots), rng.integers(1, 6, b), rng.integers(7, 30, b)
        tap_row = rng.integers(0, 5, b)
        positions = session._state["k_cache.0"].shape[2]
        cache, ring, taps = (np.zeros((scratch + 1, n), bool) for n in (positions, WINDOW, CHUNK))
        for s, n, at, tap in zip(slots, count, start, tap_row, strict=True):
            if kind in ("prefill", "verify"):
                cache[s, at : at + n] = taps[s, tap : tap + n] = True
            else:
                ring[s, np.arange(at, at + n) % WINDOW] = True
        if kind in ("prefill", "verify"):
            getattr(session, kind)(TargetRows(rng.integers(0, 131, count.sum()), count, start, slot, tap_row))
        elif kind == "seed":
            session.seed(SeedRows(start, count, slot))
        else:
            floats = np.zeros(b, np.float32), np.zeros((b, 2), np.float32)
            session.draft(DraftRows(rng.integers(0, 131, b), start + count, count, count, slot, *floats))
        for name, state in session._state.items():
            expected = taps if name == "taps" else ring if name.startswith("ring") else cache
            changed = (state != before[name]).any(axis=2 if name == "taps" else (1, 3))
            np.testing.assert_array_equal(changed[:scratch], expected[:scratch], name)


def test_a_copy_gives_what_was_asked_and_nothing_else(session: OrtSession) -> None:
    rng, wrapped = np.random.default_rng(2), 0
    for _ in range(20):
        before = filled(session, 3)
        source, dest = rng.permutation(SLOTS)[:2].tolist()
        work = SlotCopy(
            source,
            dest,
            cache_rows=int(rng.integers(0, 40)),
            ring_start=int(rng.integers(0, 40)),
            ring_rows=int(rng.integers(0, WINDOW + 1)),
            tap_rows=int(rng.integers(0, CHUNK + 1)),
        )
        session.copy(work)
        ring = np.arange(work.ring_start, work.ring_start + work.ring_rows) % WINDOW
        wrapped += bool((np.diff(ring) < 0).any())
        for name, state in session._state.items():
            expected = before[name]
            if name == "taps":
                expected[dest, : work.tap_rows] = expected[source, : work.tap_rows]
            elif name.startswith("ring"):
                expected[dest, :, ring] = expected[source, :, ring]
            else:
                expected[dest, :, : work.cache_rows] = expected[source, :, : work.cache_rows]
            np.testing.assert_array_equal(state, expected, name)
    assert wrapped > 3


def begun(session: OrtSession, slot: int, tokens: int = 2 * WINDOW + 3) -> SlotState:
    """A slot with a random prompt, the ring wrapped twice."""
    state, rng = SlotState(WINDOW, session.limits.tap_rows), np.random.default_rng(4)
    while state.start_pos < tokens:
        chunk = rng.integers(0, 131, min(CHUNK, tokens - state.start_pos))
        at = (np.array([n]) for n in (len(chunk), state.start_pos, slot, 0))
        session.prefill(TargetRows(chunk, *at))
        state.prefilled(chunk.tolist())
        seed = state.seed_window()
        session.seed(SeedRows(np.array([seed.start]), np.array([seed.count]), np.array([slot])))
        state.seeded()
    return state


def block(state: SlotState, slot: int, s: int, noise: NDArray[np.float32] | None = None) -> DraftRows:
    """A greedy draft of s tokens after token 7."""
    window = state.draft_window()
    at = (np.array([n]) for n in (7, window.start_pos, window.valid_len, window.new_len, slot))
    return DraftRows(*at, np.zeros(1, np.float32), np.zeros((1, s), np.float32), noise)


def test_a_copied_slot_goes_on_as_its_source(session: OrtSession) -> None:
    state = begun(session, 3)
    ring = SlotCopy(3, 5, state.start_pos, state.seeded_until - WINDOW, WINDOW, 0)
    for name in session._state:
        session._state[name][5] = np.nan
    session.copy(ring)
    results = []
    for slot in (3, 5):
        out = call(session, "draft", block(state, slot, 4))
        ids, at = np.array([7, *out.ids[0]]), (np.array([n]) for n in (5, state.start_pos, slot, 0))
        results.append((out, call(session, "verify", TargetRows(ids, *at))))
    (drafted, verified), (copied, copied_verified) = results
    np.testing.assert_array_equal(copied.ids, drafted.ids)
    np.testing.assert_array_equal(copied.confidence_logits, drafted.confidence_logits)
    np.testing.assert_array_equal(copied_verified.logits, verified.logits)


def test_tap_rows_pile_up_until_they_are_seeded(session: OrtSession) -> None:
    """Rounds without drafts leave one tap row each; one seed call then gives the ring that a seed after each gave."""
    tokens = np.random.default_rng(5).integers(0, 131, 8)
    for slot, each in ((1, True), (4, False)):
        for i, token in enumerate(tokens):
            row = 0 if each else i
            session.verify(TargetRows(np.array([token]), *(np.array([n]) for n in (1, i, slot, row))))
            if each:
                session.seed(SeedRows(np.array([i]), np.array([1]), np.array([slot])))
    session.seed(SeedRows(np.array([0]), np.array([len(tokens)]), np.array([4])))
    for name in session._rings:
        ring = session._state[name]
        assert (ring[1, :, : len(tokens)] != 0).all()
        close(ring[4], ring[1], name)


def test_of_more_tap_rows_than_the_window_the_last_are_seeded(pair: Pair, tmp_path: Path) -> None:
    """With tap rows for twice the window: rows have different excess."""
    limits = replace(pair.manifest.limits, prefill_chunk=2 * WINDOW)
    state = tuple(
        replace(tensor, shape=(limits.tap_rows, *tensor.shape[1:])) if tensor.name == "taps" else tensor
        for tensor in pair.manifest.state
    )
    session = OrtSession(pair.path, replace(pair.manifest, limits=limits, state=state), threads=1)
    taps = session._state["taps"]
    taps[:] = np.random.default_rng(6).standard_normal(taps.shape, dtype=np.float32)
    counts = [2 * WINDOW, 3, WINDOW + 5]
    session.seed(SeedRows(np.array([1, 2, 3]), np.array(counts), np.array([0, 1, 2])))
    for slot, count in enumerate(counts):
        # One after the other into a slot of its own: later ones overwrite.
        for i in range(count):
            taps[4, 0] = taps[slot, i]
            session.seed(SeedRows(np.array([1 + slot + i]), np.array([1]), np.array([4])))
        seen = np.arange(1 + slot, 1 + slot + count)[-WINDOW:] % WINDOW
        for name in session._rings:
            ring = session._state[name]
            close(ring[slot][:, seen], ring[4][:, seen], name)
    session.close()


def test_noise_is_added_to_what_is_picked_from(pair: Pair, session: OrtSession) -> None:
    """Token j is the best of base + noise + the bias of the token before it. Neither base nor another row's draft sees
    the noise."""
    state, s = begun(session, 2), 4
    rng = np.random.default_rng(7)
    noise = 3 * rng.gumbel(size=(1, s, 131)).astype(np.float32)
    quiet = call(session, "draft", block(state, 2, s))
    base = session.debug["base"]
    out = call(session, "draft", block(state, 2, s, noise))
    np.testing.assert_array_equal(session.debug["base"], base)
    assert (out.ids != quiet.ids).any()
    previous = np.concatenate([[7], out.ids[0, :-1]])
    logits = base[0] + noise[0] + pair.w1[previous] @ pair.w2.T
    close(session.debug["corrected"][0], logits)
    np.testing.assert_array_equal(out.ids[0], logits.argmax(-1))

    zeros = call(session, "draft", block(state, 2, s, np.zeros_like(noise)))
    np.testing.assert_array_equal(zeros.ids, quiet.ids)
    session.copy(SlotCopy(2, 0, state.start_pos, state.start_pos - WINDOW, WINDOW, 0))
    one, other = block(state, 2, s, noise), block(state, 0, s)
    both = DraftRows(
        **{name: np.concatenate([value, getattr(other, name)]) for name, value in vars(one).items() if name != "noise"},
        noise=np.concatenate([noise, np.zeros_like(noise)]),
    )
    same_drafts(call(session, "draft", both), [out, quiet])


def test_nobody_sees_rows_that_are_not_theirs(session: OrtSession) -> None:
    """NaN in other slots, on scratch, and in all rows of the slots in use that don't count changes nothing by a bit."""
    states = {slot: begun(session, slot, tokens) for slot, tokens in ((1, 9), (4, 20), (2, 27))}
    slot = np.array(list(states))
    clean, results = state_of(session), []
    for poisoned in (False, True):
        for name, state in session._state.items():
            state[:] = np.nan if poisoned else clean[name]
            for s, held in states.items():
                if name.startswith("ring"):
                    rows = np.arange(max(0, held.start_pos - WINDOW), held.start_pos) % WINDOW
                    state[s][:, rows] = clean[name][s][:, rows]
                elif name != "taps":
                    state[s][:, : held.start_pos] = clean[name][s][:, : held.start_pos]
        b, start = len(slot), np.array([held.start_pos for held in states.values()])
        count, ids = np.array([3, 1, 5]), np.arange(9)
        verified = call(session, "verify", TargetRows(ids, count, start, slot, np.zeros(b, np.int64)))
        new = np.array([2, 1, 3])
        valid, floats = np.minimum(start + new, WINDOW), (np.zeros(b, np.float32), np.zeros((b, 4), np.float32))
        drafted = call(session, "draft", DraftRows(np.array([5, 6, 7]), start + new, valid, new, slot, *floats))
        results.append((verified.logits, drafted.ids, drafted.confidence_logits))
    for found, expected in zip(results[1], results[0], strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, expected)


def calls(b: int, **changes: Any) -> dict[str, Rows]:
    """A call of each kind with slots 0 … b-1."""
    one, slot = np.ones(b, np.int64), np.arange(b)
    floats = np.zeros(b, np.float32), np.zeros((b, 2), np.float32)
    rows: dict[str, Rows] = {
        "prefill": TargetRows(np.zeros(b, np.int64), one, 9 * one, slot, 0 * one),
        "verify": TargetRows(np.zeros(b, np.int64), one, 9 * one, slot, 0 * one),
        "seed": SeedRows(9 * one, one, slot),
        "draft": DraftRows(one, 9 * one, one, one, slot, *floats),
    }
    return {name: replace(value, **changes) for name, value in rows.items()}


REFUSED = {
    "a slot twice": (3, {"slot": np.array([1, 0, 1])}, "slot", ("prefill", "verify", "seed", "draft")),
    "too many rows": (5, {}, "batch", ("prefill", "verify", "seed", "draft")),
    "no token before": (2, {"start": np.array([9, 0])}, "start_pos", ("draft",)),
    "a negative start": (2, {"start": np.array([-1, 9])}, "start_pos", ("draft",)),
    "more tap rows than a round's": (2, {"new_len": np.array([1, 99])}, "new_len", ("draft",)),
}


@pytest.mark.parametrize(("why", "kind"), [(why, kind) for why, (_, _, _, kinds) in REFUSED.items() for kind in kinds])
def test_refused_before_anything_is_written(session: OrtSession, why: str, kind: str) -> None:
    b, changes, where, _ = REFUSED[why]
    if why.startswith("more"):
        changes = {"new_len": np.array([1, session.limits.block_size + 2])}
    before = filled(session, 8)
    refused = replace(calls(b)[kind], **changes)
    with pytest.raises(RequestError) as caught:
        getattr(session, kind)(refused)
    assert caught.value.where == where
    for name, state in session._state.items():
        np.testing.assert_array_equal(state, before[name], name)
    # As if it had never been asked: a call that fits runs, and touches its own slots alone.
    getattr(session, kind)(calls(2)[kind])
    for name, state in session._state.items():
        np.testing.assert_array_equal(state[2:-1], before[name][2:-1], name)


def test_memory_stays_flat(session: OrtSession) -> None:
    """The same thousand calls, again and again."""

    def run() -> tuple[int, int, int]:
        requests = Requests(session.limits, 9)
        for step in range(1000):
            kind = ("prefill", "verify", "seed", "draft", "verify")[step % 5]
            if (work := getattr(requests, kind)()) is not None:
                getattr(session, kind)(work)
        buffers = sum(buffer._memory.nbytes for buffer in session._buffers.values())
        bound = sum(len(engine._bound) for engine in session._engines.values())
        # Not what is mapped from files: that comes and goes with the rest of the machine.
        facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return buffers, bound, 1024 * int(facts["RssAnon"].split()[0])

    first, *others = (run() for _ in range(4))
    assert {other[:2] for other in others} == {first[:2]}
    # A binding that is kept for each call would take more each time; the allocator's own pages come once.
    resident = [first[2], *(other[2] for other in others)]
    assert min(after - before for before, after in pairwise(resident)) < 1 << 18
