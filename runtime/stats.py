"""What an engine has done since it was opened: `Engine.stats`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.policy import BreakEven
from runtime.result import FinishReason


@dataclass(frozen=True)
class StageSeconds:
    """Wall time by stage. `host` is what steps took outside the inference library and the scheduler (`schedule`);
    `copy` is prefix reuse, `seed` what rings took in outside of draft calls."""

    schedule: float
    copy: float
    prefill: float
    seed: float
    draft: float
    verify: float
    host: float


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was opened, and the present load.

    Attributes:
        submitted: requests taken. `refused`: requests that met a full queue.
        waiting, running: requests now without and with a slot. `free_slots`: slots now.
        finished: requests by how they ended (``stop``, ``length``, ``cancelled``, ``deadline``, ``error``).
        steps: engine steps. `rounds`: rows of verify calls, one a request and step; `drafted_rounds` had drafts.
        prompt_tokens: prompt ids run by prefill. `reused_tokens`: prompt ids that a slot held already.
        generated_tokens: tokens emitted. `tokens_per_round`: those of rounds (not of prefills) over rounds.
        proposed, accepted: drafts by position in their block.
        break_even: what the policy makes of the present load, if it estimates.
    """

    submitted: int
    refused: int
    waiting: int
    running: int
    free_slots: int
    finished: Mapping[FinishReason, int]
    steps: int
    rounds: int
    drafted_rounds: int
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    tokens_per_round: float
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    seconds: StageSeconds
    break_even: BreakEven | None

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Of the rounds that proposed a draft j, the share that accepted it; positions never proposed left out."""
        return tuple(a / p for a, p in zip(self.accepted, self.proposed, strict=True) if p)


@dataclass
class Recorder:
    """Collects the counts of `EngineStats`; the engine and its rounds add to the fields."""

    block_size: int
    submitted: int = 0
    refused: int = 0
    steps: int = 0
    rounds: int = 0
    drafted_rounds: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    round_tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(StageSeconds.__dataclass_fields__, 0.0))
    proposed: list[int] = field(init=False)
    accepted: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.proposed = [0] * self.block_size
        self.accepted = [0] * self.block_size

    def spend(self, stage: str, seconds: float) -> None:
        """Note wall time of a stage, a field of `StageSeconds`."""
        self.seconds[stage] += seconds

    def round(self, proposed: int, accepted: int, emitted: int) -> None:
        """Note one row of a verify call: drafts proposed and accepted, tokens emitted."""
        self.rounds += 1
        self.drafted_rounds += proposed > 0
        self.round_tokens += emitted
        self.generated_tokens += emitted
        for j in range(proposed):
            self.proposed[j] += 1
            self.accepted[j] += j < accepted

    def freeze(self, *, waiting: int, running: int, free_slots: int, break_even: BreakEven | None) -> EngineStats:
        return EngineStats(
            submitted=self.submitted,
            refused=self.refused,
            waiting=waiting,
            running=running,
            free_slots=free_slots,
            finished=dict(self.finished),
            steps=self.steps,
            rounds=self.rounds,
            drafted_rounds=self.drafted_rounds,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            generated_tokens=self.generated_tokens,
            tokens_per_round=self.round_tokens / self.rounds if self.rounds else 0.0,
            proposed=tuple(self.proposed),
            accepted=tuple(self.accepted),
            seconds=StageSeconds(**self.seconds),
            break_even=break_even,
        )
