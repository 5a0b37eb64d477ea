"""What comes back from the engine: pieces while a request runs, its result at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from runtime.distribution import TokenLogprob

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


@dataclass(frozen=True)
class Piece:
    """What a stream yields: new `token_ids`, the `text` that became certain with them (maybe empty), and `logprobs` of
    the tokens where they were asked for."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Seconds:
    """Wall time of a request by stage. `host` is what its steps took outside the inference library."""

    prefill: float
    draft: float
    verify: float
    host: float


@dataclass(frozen=True)
class Stats:
    """How a request went.

    `rounds` is the number of verify calls; `proposed` and `accepted` hold each round's drafts. `tokens_per_round` is τ:
    tokens emitted by rounds (not by the prefill) over rounds, 0 without rounds. ``acceptance_by_position[j]`` is, of
    the rounds that proposed a draft j, the share that accepted it. `reused_tokens` of the prompt were not run, because
    a slot held them from another request.
    """

    rounds: int
    proposed: list[int]
    accepted: list[int]
    tokens_per_round: float
    acceptance_by_position: list[float]
    seconds: Seconds
    reused_tokens: int = 0


@dataclass(frozen=True)
class Result:
    """What was generated: `text` without the stop, `token_ids` with it, and `logprobs` of each token where they were
    asked for. `text` is empty for an engine without a tokenizer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first (the prefill's) over the seconds their rounds took; 0 without rounds."""
        seconds = self.stats.seconds
        spent = seconds.draft + seconds.verify + seconds.host
        return (len(self.token_ids) - 1) / spent if self.stats.rounds and spent > 0 else 0.0


@dataclass
class StatsRecorder:
    """Collects the `Stats` of a running request; the engine adds seconds to the fields of the stages."""

    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: int = 0
    reused: int = 0
    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    host: float = 0.0

    def round(self, proposed: int, accepted: int, emitted: int) -> None:
        """Note one verify call: drafts proposed and accepted, tokens emitted."""
        self.proposed.append(proposed)
        self.accepted.append(accepted)
        self.emitted += emitted

    def freeze(self) -> Stats:
        rounds = len(self.proposed)
        # Position by position, over the rounds that reached it: both lists are short, and this runs once a request.
        by_position = [
            sum(a > j for a in self.accepted) / sum(n > j for n in self.proposed)
            for j in range(max(self.proposed, default=0))
        ]
        return Stats(
            rounds=rounds,
            proposed=list(self.proposed),
            accepted=list(self.accepted),
            tokens_per_round=self.emitted / rounds if rounds else 0.0,
            acceptance_by_position=by_position,
            seconds=Seconds(self.prefill, self.draft, self.verify, self.host),
            reused_tokens=self.reused,
        )
