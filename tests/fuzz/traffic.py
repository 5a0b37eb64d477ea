"""Random traffic on an engine over a `MemorySession`, checked against the oracle."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from runtime.engine import Engine, Handle
from runtime.errors import QueueFull, ServingError
from runtime.manifest import Limits
from runtime.policy import BreakEven, Load, Round, Row
from runtime.request import Request
from runtime.sampling import SamplingParams
from tests.fuzz.memory import EOS, VOCAB, write_bundle
from tests.fuzz.oracle import Mismatch, Rings, alone
from tests.fuzz.watched import WatchedScheduler, WatchedSession

EVENTS = (
    "submit", "cancel waiting", "cancel running", "deadline", "length", "stop", "error",
    "prefix live", "prefix finished", "prefix in place", "wrap", "drafting on again",
)  # fmt: skip
"""What counts as an event. Refusals, chunks, rounds and the like are counted besides."""

GEOMETRIES = (
    Limits(batches=(1, 2), slots=3, window=8, max_seq_len=64, block_size=4, prefill_chunk=5),
    Limits(batches=(1, 2, 4), slots=4, window=16, max_seq_len=96, block_size=5, prefill_chunk=16),
    Limits(batches=(1,), slots=1, window=4, max_seq_len=20, block_size=4, prefill_chunk=1),
    Limits(batches=(1, 4), slots=6, window=7, max_seq_len=80, block_size=7, prefill_chunk=3),
    Limits(batches=(1, 2, 8), slots=8, window=32, max_seq_len=128, block_size=3, prefill_chunk=32),
    Limits(batches=(2,), slots=5, window=12, max_seq_len=48, block_size=1, prefill_chunk=9),
)


CALLS = ("prefill", "verify", "seed", "draft", "copy")
_GREEDY = SamplingParams()


class Planned(Exception):
    """What a session raises in the middle of a call, because it was told to."""


class MoodyPolicy:
    """Drafts for all, for none, or for some, and verifies any number of what was drafted."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._mood = 0.5

    def caps(self, rows: Sequence[Row], load: Load) -> Sequence[int]:
        draw = self._random.random
        if draw() < 0.1:
            self._mood = self._random.choice((0.0, 0.5, 1.0))
        return [1 + int(draw() * row.cap) if draw() < self._mood else 0 for row in rows]

    def lengths(self, rows: Sequence[Row], load: Load) -> Sequence[int]:
        draw = self._random.random
        return [row.confident() if draw() < 0.5 else int(draw() * (row.drafted + 1)) for row in rows]

    def observe(self, round: Round) -> None:
        pass

    def break_even(self) -> BreakEven | None:
        return None


class Traffic:
    """An episode: everything in it follows from `seed`.

    Args:
        limits: of the engine.
        directory: empty; its bundle goes there.
        counts: is added to, by kind of event.
    """

    def __init__(self, limits: Limits, seed: int, directory: Path, counts: Counter[str]) -> None:
        self._limits = limits
        self._random = Random(seed)
        self._counts = counts
        self._rings = Rings(limits.slots, limits.window)
        self._session = WatchedSession(limits, self._rings, counts)
        self._session.interrupt = self._interrupt
        budget = self._random.randint(1, 2 * limits.prefill_chunk)
        self._scheduler = WatchedScheduler(limits, budget, self._session, self._rings, counts)
        self._now = 0.0
        self._max_waiting = 2 * limits.slots + 2
        self._engine = Engine(
            write_bundle(directory, limits),
            check="quick",
            threads=1,
            max_waiting=self._max_waiting,
            policy=MoodyPolicy(self._random),
            scheduler=self._scheduler,
            session=self._session,
            clock=lambda: self._now,
        )
        self._live: dict[int, tuple[Handle, Request, list[int]]] = {}  # with the tokens taken so far
        self._deadlines: dict[int, float] = {}
        self._beginnings: list[tuple[int, ...]] = [()]
        self._trouble: tuple[str, int] | None = None  # the call that shall fail, and before which row

    def run(self, events: int) -> None:
        """Go on until so many events have happened, then until all requests are done.

        Raises:
            Mismatch: the engine did otherwise than the oracle.
        """
        busy = self._random.uniform(0.05, 0.3)
        while counted(self._counts) < events:
            draw = self._random.random()
            if draw < busy:
                self._submit()
            elif draw < busy + 0.02:
                self._cancel()
            elif draw < busy + 0.03:
                self._stream()
            elif draw < busy + 0.035:
                call = self._random.choice(CALLS)
                self._trouble = call, self._random.randrange(self._limits.batches[-1])
            else:
                self._step()
        while not self._engine.idle:
            self._step()
        if self._live or self._scheduler.slots.free_count != self._limits.slots:
            raise Mismatch(f"an idle engine with requests {list(self._live)}")

    def _submit(self) -> None:
        """Some requests at once, whose prompts may have much in common."""
        beginning = self._random.choice(self._beginnings)[: self._limits.max_seq_len - 2]
        for _ in range(self._random.randint(1, self._limits.slots)):
            request = self._request(beginning)
            full = self._scheduler.waiting == self._max_waiting
            try:
                handle = self._engine.submit(request)
            except QueueFull:
                if not full:
                    raise Mismatch(f"refused with {self._scheduler.waiting} waiting") from None
                self._counts["queue full"] += 1
                return
            if full:
                raise Mismatch(f"{self._scheduler.waiting} are waiting")
            self._counts["submit"] += 1
            self._live[handle.id] = handle, request, []
            if request.deadline is not None:
                self._deadlines[handle.id] = self._now + request.deadline

    def _request(self, beginning: tuple[int, ...]) -> Request:
        random, limits = self._random, self._limits
        draw = random.random
        if draw() < 0.7:
            beginning = beginning[: random.randint(0, len(beginning))]
        most = limits.max_seq_len - 1 - len(beginning)
        tail = random.randint(1, most if draw() < 0.1 else min(most, 8))
        prompt = (*beginning, *random.choices(range(VOCAB), k=tail))
        self._remember(prompt)
        sampling = _GREEDY
        if draw() < 0.03:
            seed = random.choice((None, random.randrange(100)))
            sampling = SamplingParams(temperature=1.0, seed=seed, coupling=random.choice(("rejection", "gumbel")))
        return Request(
            prompt,
            max_new_tokens=random.randint(1, limits.max_seq_len if draw() < 0.1 else 10),
            sampling=sampling,
            stop_token_ids=(random.randrange(VOCAB),) if draw() < 0.3 else (),
            ignore_eos=draw() < 0.5,
            speculate=draw() < 0.85,
            max_draft=random.choice((None, random.randint(0, limits.block_size))),
            confidence_threshold=random.choice((None, 0.3)),
            adaptive=draw() < 0.8,
            deadline=float(random.randint(1, 60)) if draw() < 0.1 else None,
        )

    def _remember(self, ids: tuple[int, ...]) -> None:
        """Later prompts may begin like this."""
        if len(self._beginnings) < 8:
            self._beginnings.append(ids)
        else:
            self._beginnings[self._random.randrange(8)] = ids

    def _cancel(self) -> None:
        if self._live:
            handle = self._random.choice(list(self._live.values()))[0]
            running = handle.id in self._scheduler.owner.values()
            self._engine.cancel(handle)
            self._counts["cancel running" if running else "cancel waiting"] += 1
            self._settle()

    def _stream(self) -> None:
        if self._live:
            handle, _, tokens = self._random.choice(list(self._live.values()))
            piece = self._engine.take(handle)
            tokens += () if piece is None else piece.token_ids

    def _step(self) -> None:
        self._now += 1.0
        wraps = self._rings.wraps
        self._engine.step()
        self._counts["wrap"] += self._rings.wraps - wraps
        self._settle()
        if any(end <= self._now for end in self._deadlines.values()):
            raise Mismatch(f"at {self._now} requests run of the deadlines {self._deadlines}")

    def _settle(self) -> None:
        """Look at who has ended: they must have left the scheduler, and their slots must be free."""
        for request_id in self._scheduler.ended:
            self._check(*self._live.pop(request_id))
        self._scheduler.ended.clear()
        for handle, _, _ in self._live.values():
            if self._engine.finished(handle) is not None:
                raise Mismatch(f"request {handle.id} has ended, and keeps its slot or its place in the queue")
        self._scheduler.check_slots()

    def _check(self, handle: Handle, request: Request, tokens: list[int]) -> None:
        reason = self._engine.finished(handle)
        if self._deadlines.pop(handle.id, math.inf) > self._now and reason == "deadline":
            raise Mismatch(f"request {handle.id} ended before its deadline")
        piece = self._engine.take(handle)
        tokens += () if piece is None else piece.token_ids
        try:
            result = self._engine.result(handle)
        except ServingError as error:
            if not isinstance(error.__cause__, Planned):
                raise Mismatch(f"request {handle.id} failed: {error.__cause__}") from error
        else:
            if list(result.token_ids) != tokens:
                raise Mismatch(f"request {handle.id} streamed {tokens}; its result is {list(result.token_ids)}")
        whole = reason in ("stop", "length")
        most = request.max_new_tokens if whole else len(tokens)
        stops = request.stop_token_ids if request.ignore_eos else (EOS, *request.stop_token_ids)
        expected, why = alone(request.prompt_ids, most, stops, self._limits.max_seq_len)
        if tokens != expected or (whole and reason != why):
            raise Mismatch(f"request {handle.id} gave {tokens} ({reason}); alone it gives {expected} ({why})")
        if reason != "cancelled":
            self._counts[str(reason)] += 1
        self._remember((*request.prompt_ids, *tokens))

    def _interrupt(self, call: str) -> None:
        if self._trouble is not None and self._trouble[0] == call:
            rows = self._trouble[1]
            self._trouble = (call, rows - 1) if rows else None
            if not rows:
                self._counts[f"raised in {call}"] += 1
                raise Planned(call)


def episode(seed: int, events: int) -> Counter[str]:
    """So many events of traffic, all of which follow from `seed`; how often each kind happened.

    Raises:
        Mismatch: the engine did otherwise than the oracle.
    """
    counts: Counter[str] = Counter()
    try:
        with TemporaryDirectory() as directory:
            Traffic(GEOMETRIES[seed % len(GEOMETRIES)], seed, Path(directory), counts).run(events)
    except Exception as error:
        error.add_note(
            f"Repeat it with: python -m tests.fuzz --seed {seed} --events {min(events, counted(counts) + 1)}"
        )
        raise
    return counts


def counted(counts: Counter[str]) -> int:
    """How many events there are among `counts`."""
    return sum(counts[kind] for kind in EVENTS)
