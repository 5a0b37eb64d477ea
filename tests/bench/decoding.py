"""Runs of the engine, timed from outside: what a round takes as a caller sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from runtime import Engine, Request
from tests.bench.arithmetic import acceptance_by_position, median_ratio, summary
from tests.bench.plan import KINDS, BenchPrompt, Plan

PLAIN = {"speculate": False}
FIXED = {"adaptive": False}
MODES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "fixed": FIXED,
    "full_block": {**FIXED, "max_draft": None, "confidence_threshold": 0.0},
    "adaptive": {},
}
"""How the engine decodes: not drafting, the bundle's default number of drafts in every round, the whole block
(`max_draft` None stands for it here), or as many as the engine's policy finds worth it.
"""


@dataclass(frozen=True)
class Run:
    """One answer. `prefill_seconds` last until the first token came out, each of `step_seconds` is a round after it;
    `host_seconds` is what the engine's own clock says of its rounds.
    """

    prompt: str
    kind: str
    mode: str
    token_ids: tuple[int, ...]
    prefill_seconds: float
    step_seconds: tuple[float, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    host_seconds: float

    @property
    def rounds(self) -> int:
        return len(self.step_seconds)

    @property
    def decode_tokens(self) -> int:
        """Tokens of the rounds: all but the prefill's."""
        return len(self.token_ids) - 1

    @property
    def token_seconds(self) -> float:
        """Wall seconds per token in decode."""
        return sum(self.step_seconds) / self.decode_tokens

    def plain(self) -> dict[str, object]:
        """For JSON: sums instead of each step."""
        return {
            "prompt": self.prompt,
            "mode": self.mode,
            "tokens": len(self.token_ids),
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": sum(self.step_seconds),
            "rounds": self.rounds,
            "proposed": list(self.proposed),
            "accepted": list(self.accepted),
            "host_seconds": self.host_seconds,
        }


def forget_prompts(engine: Engine) -> None:
    """Give every slot a request of one id, so that none holds a prompt that was served before: else the first mode to
    run a prompt would pay for its prefill, and the others would find it there.
    """
    manifest = engine.bundle.manifest
    last = manifest.models.vocab_size - 1
    requests = [Request(prompt_ids=(last - slot,), max_new_tokens=1, **PLAIN) for slot in range(manifest.limits.slots)]
    for handle in [engine.submit(request) for request in requests]:
        engine.result(handle)


def run(engine: Engine, prompt: BenchPrompt, tokens: int, mode: str, **options: Any) -> Run | None:
    """Answer a prompt greedily, up to `tokens` tokens. None for an answer that ends with its first token."""
    forget_prompts(engine)
    handle = engine.submit(Request(prompt_ids=prompt.ids, max_new_tokens=tokens, **options))
    stamps = [perf_counter()]
    for _ in engine.stream(handle):
        stamps.append(perf_counter())
    result = engine.result(handle)
    if len(stamps) < 3:
        return None
    steps = tuple(after - before for before, after in pairwise(stamps[1:]))
    stats = result.stats
    if len(steps) != stats.rounds:
        raise RuntimeError(f"{len(steps)} pieces of {stats.rounds} rounds: steps can't be told apart")
    return Run(
        prompt.name, prompt.kind, mode, result.token_ids, stamps[1] - stamps[0], steps,
        tuple(stats.proposed), tuple(stats.accepted), stats.seconds.host,
    )  # fmt: skip


def options_of(engine: Engine, mode: str) -> dict[str, Any]:
    """The request's options for one of `MODES`."""
    options = dict(MODES[mode])
    if "max_draft" in options:
        options["max_draft"] = engine.bundle.manifest.limits.block_size
    return options


def measure_speculation(engine: Engine, prompts: Sequence[BenchPrompt], plan: Plan) -> dict[str, object]:
    """Every mode on every prompt, one after the other, in an order that turns."""
    for mode in MODES:  # makes every binding
        run(engine, prompts[0], 24, mode, **options_of(engine, mode))
    runs: list[Run] = []
    groups: list[dict[str, Run]] = []
    for turn, prompt in enumerate(p for _ in range(plan.repeats) for p in prompts):
        order = [*MODES][turn % len(MODES) :] + [*MODES][: turn % len(MODES)]
        made = {mode: run(engine, prompt, plan.tokens, mode, **options_of(engine, mode)) for mode in order}
        group = {mode: item for mode, item in made.items() if item is not None}
        runs += group.values()
        if len(group) == len(MODES):
            groups.append(group)
    by_kind = {kind: compare([g for g in groups if g["plain"].kind == kind]) for kind in KINDS}
    return {
        "kinds": by_kind,
        "all": compare(groups),
        "runs": [item.plain() for item in runs],
        "serving": {
            "max_draft": engine.bundle.manifest.serving.max_draft,
            "confidence_threshold": engine.bundle.manifest.serving.confidence_threshold,
        },
    }


def compare(groups: Sequence[dict[str, Run]]) -> dict[str, Any]:
    """Every mode of the groups against the plain run of the same group."""
    if not groups:
        return {}
    result: dict[str, Any] = {}
    for mode in groups[0]:
        runs = [group[mode] for group in groups]
        plain = [group["plain"] for group in groups]
        per_prompt = {
            name: median_ratio(*_token_seconds([(g["plain"], g[mode]) for g in groups if g[mode].prompt == name]))
            for name in dict.fromkeys(item.prompt for item in runs)
        }
        worst = min(per_prompt, key=lambda name: per_prompt[name])
        result[mode] = {
            "tokens_per_second": summary(1 / item.token_seconds for item in runs),
            "speedup": median_ratio(*_token_seconds(list(zip(plain, runs, strict=True)))),
            "speedup_with_prefill": median_ratio(
                [p.prefill_seconds + sum(p.step_seconds) for p in plain],
                [r.prefill_seconds + sum(r.step_seconds) for r in runs],
            ),
            "speedup_by_prompt": per_prompt,
            "worst_prompt": {"name": worst, "speedup": per_prompt[worst]},
            "tokens_per_round": sum(item.decode_tokens for item in runs) / sum(item.rounds for item in runs),
            "proposed_per_round": sum(sum(item.proposed) for item in runs) / sum(item.rounds for item in runs),
            "acceptance_by_position": acceptance_by_position(
                [n for item in runs for n in item.proposed], [n for item in runs for n in item.accepted]
            ),
            "host_ms_per_round": median(1e3 * item.host_seconds / item.rounds for item in runs),
            "identical": sum(a.token_ids == b.token_ids for a, b in zip(plain, runs, strict=True)),
            "pairs": len(runs),
        }
    return result


def _token_seconds(pairs: Sequence[tuple[Run, Run]]) -> tuple[list[float], list[float]]:
    return [a.token_seconds for a, _ in pairs], [b.token_seconds for _, b in pairs]
