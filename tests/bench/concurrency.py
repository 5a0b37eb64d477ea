"""Tokens per second against concurrency: not drafting, always drafting, and as the engine sees fit."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from runtime import Engine, Request, Result
from tests.bench.arithmetic import median_ratio, summary
from tests.bench.decoding import options_of
from tests.bench.plan import BenchPrompt, Plan
from tests.bench.serving import serve

MODES = ("plain", "fixed", "adaptive")
"""Those of `tests.bench.decoding.MODES` that are compared at each concurrency."""

ALONE = "alone"
"""The same requests one after the other, as the engine sees fit."""


@dataclass(frozen=True)
class PointRun:
    """All requests of a point, served in one of `MODES` or `ALONE`; `turn` numbers the repetition. `latency_seconds` is
    the median from submission to end, `outputs` every answer's token ids.
    """

    turn: int
    concurrency: int
    mode: str
    seconds: float
    tokens: int
    tokens_per_round: float
    proposed_per_round: float
    latency_seconds: float
    reused_tokens: int
    outputs: tuple[tuple[int, ...], ...]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def plain(self) -> dict[str, object]:
        """For JSON: without the tokens."""
        return {key: value for key, value in asdict(self).items() if key != "outputs"}


def measure_concurrency(engines: Mapping[str, Engine], prompts: Sequence[BenchPrompt], plan: Plan) -> dict[str, object]:
    """Every point of ``plan.concurrency`` in every mode, greedily, ``plan.turns`` times.

    A point of concurrency c serves the first 2c prompts (or ``plan.least_requests``), each once, in an order that
    changes from turn to turn; its modes, and its requests alone, run side by side. `engines` maps each mode and `ALONE`
    to its engine. What adapts has one of its own for the whole measurement, as a server would: it must not learn from
    other modes, nor `ALONE` from other loads.
    """
    counts = {c: max(2 * c, plan.least_requests) for c in plan.concurrency}
    if len(prompts) < max(counts.values()):
        raise ValueError(f"{len(prompts)} prompts are too few for {max(counts.values())} requests")
    points = {c: list(prompts[:count]) for c, count in counts.items()}
    for mode, engine in engines.items():  # makes every binding, and a first guess of what calls cost
        for c in points if mode != ALONE else (1,):
            serve(engine, _requests(engine, mode, points[c][: 2 * c], 16), c)
    runs: list[PointRun] = []
    for turn in range(plan.turns):
        alone: dict[str, tuple[Result, float]] = {}
        for i, (c, of_point) in enumerate(points.items()):
            mixed = random.Random(turn).sample(of_point, len(of_point))
            for k in range(len(MODES)):
                mode = MODES[(turn + i + k) % len(MODES)]
                served = serve(engines[mode], _requests(engines[mode], mode, mixed, plan.concurrent_tokens), c)
                runs.append(_run(turn, c, mode, served.seconds, served.results, served.latencies))
            # The requests of smaller points are among these: what ran alone in this turn need not again.
            left = [prompt for prompt in mixed if prompt.name not in alone]
            served = serve(engines[ALONE], _requests(engines[ALONE], ALONE, left, plan.concurrent_tokens), 1)
            pairs = zip(served.results, served.latencies, strict=True)
            alone |= dict(zip((prompt.name for prompt in left), pairs, strict=True))
            results, latencies = zip(*(alone[prompt.name] for prompt in mixed), strict=True)
            runs.append(_run(turn, c, ALONE, sum(latencies), results, latencies))
            rates = ", ".join(f"{run.mode} {run.rate:.1f}" for run in runs[-len(MODES) - 1 :])
            print(f"  turn {turn + 1}, {c} at once, tokens/s: {rates}", flush=True)
    return {"points": compare_points(runs), "runs": [run.plain() for run in runs]}


def compare_points(runs: Sequence[PointRun]) -> dict[int, dict[str, Any]]:
    """By concurrency: every mode's figures; which of not drafting and always drafting is better there (by the median),
    and the adaptive mode against that one; and the adaptive mode against the same requests alone. Ratios are those of
    tokens per second, turn by turn. ``identical`` counts the answers that are those of plain decoding in the same turn.
    """
    result: dict[int, dict[str, Any]] = {}
    for c in dict.fromkeys(run.concurrency for run in runs):
        by_mode = {mode: _by_turn(runs, c, mode) for mode in (*MODES, ALONE)}
        modes = {mode: _figures(of_mode, by_mode["plain"]) for mode, of_mode in by_mode.items()}
        better = max(("plain", "fixed"), key=lambda mode: modes[mode]["tokens_per_second"]["median"])
        rates = {mode: [run.rate for run in of_mode] for mode, of_mode in by_mode.items()}
        result[c] = {
            "requests": len(by_mode["plain"][0].outputs),
            "modes": modes,
            "better": better,
            "adaptive_to_better": median_ratio(rates["adaptive"], rates[better]),
            "adaptive_to_alone": median_ratio(rates["adaptive"], rates[ALONE]),
        }
    return result


def _by_turn(runs: Sequence[PointRun], concurrency: int, mode: str) -> list[PointRun]:
    mine = [run for run in runs if (run.concurrency, run.mode) == (concurrency, mode)]
    return sorted(mine, key=lambda run: run.turn)


def _figures(runs: Sequence[PointRun], plain: Sequence[PointRun]) -> dict[str, Any]:
    answers = [pair for a, b in zip(runs, plain, strict=True) for pair in zip(a.outputs, b.outputs, strict=True)]
    return {
        "tokens_per_second": summary(run.rate for run in runs),
        "latency_seconds": summary(run.latency_seconds for run in runs),
        "tokens_per_round": summary(run.tokens_per_round for run in runs),
        "proposed_per_round": summary(run.proposed_per_round for run in runs),
        "identical": sum(a == b for a, b in answers),
        "answers": len(answers),
    }


def _requests(engine: Engine, mode: str, prompts: Sequence[BenchPrompt], tokens: int) -> list[Request]:
    options = options_of(engine, "adaptive" if mode == ALONE else mode)
    return [Request(prompt_ids=prompt.ids, max_new_tokens=tokens, **options) for prompt in prompts]


def _run(
    turn: int, concurrency: int, mode: str, seconds: float, results: Sequence[Result], latencies: Sequence[float]
) -> PointRun:
    tokens, rounds = sum(len(r.token_ids) for r in results), sum(r.stats.rounds for r in results)
    return PointRun(
        turn,
        concurrency,
        mode,
        seconds,
        tokens,
        # The first token of an answer is its prefill's.
        tokens_per_round=(tokens - len(results)) / rounds if rounds else 0.0,
        proposed_per_round=sum(sum(r.stats.proposed) for r in results) / rounds if rounds else 0.0,
        latency_seconds=median(latencies),
        reused_tokens=sum(r.stats.reused_tokens for r in results),
        outputs=tuple(r.token_ids for r in results),
    )
