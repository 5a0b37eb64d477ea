"""Every cap with several confidence thresholds, to choose a profile by."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import mean, median
from typing import Any

from runtime import Engine
from tests.bench.arithmetic import median_ratio, modelled_seconds, table
from tests.bench.decoding import FIXED, PLAIN, Run, run
from tests.bench.host import logged_session
from tests.bench.plan import KINDS, BenchPrompt, Plan

THRESHOLDS = (0.0, 0.3, 0.5, 0.7)
# A plain run this often among the settings, to pair them with.
_SETTINGS_A_PLAIN = 4

Setting = tuple[int, float]
Call = tuple[str, int]


def measure_sweep(engine: Engine, prompts: Sequence[BenchPrompt], plan: Plan) -> dict[str, object]:
    """Speed of every setting against plain, by kind: *measured* against the nearest plain run, and *modelled*, every
    call taking the median of its kind and width over the whole sweep. Rounds and proposals are exact either way, so the
    model is free of the machine's noise.
    """
    settings: list[Setting] = list(product(range(1, engine.bundle.manifest.limits.block_size + 1), THRESHOLDS))
    shuffled = random.Random(0)
    measured: dict[tuple[Setting, str], list[tuple[float, float]]] = {}
    calls: dict[tuple[Setting | None, str], list[list[tuple[Call, float]]]] = {}
    runs: list[tuple[Setting | None, Run]] = []
    with logged_session(engine) as log:

        def one(prompt: BenchPrompt, setting: Setting | None) -> Run | None:
            log.calls.clear()
            made = run(engine, prompt, plan.sweep_tokens, "sweep", **_options(setting))
            if made is not None:
                rounds = [((name, width), s) for name, width, s in log.calls if name in ("draft", "verify")]
                calls.setdefault((setting, prompt.kind), []).append(rounds)
                runs.append((setting, made))
            return made

        for setting in (None, *settings):  # makes every binding
            run(engine, prompts[0], 16, "warm", **_options(setting))
        for prompt in prompts:
            order = shuffled.sample(settings, len(settings))
            for i, setting in enumerate(order):
                if i % _SETTINGS_A_PLAIN == 0:
                    plain = one(prompt, None)
                made = one(prompt, setting)
                if plain is not None and made is not None:
                    pair = (plain.token_seconds, made.token_seconds)
                    measured.setdefault((setting, prompt.kind), []).append(pair)

    every: dict[Call, list[float]] = {}
    for kept in calls.values():
        for call, seconds in (pair for rounds in kept for pair in rounds):
            every.setdefault(call, []).append(seconds)
    medians = {call: median(seconds) for call, seconds in every.items()}
    host = median(item.host_seconds / item.rounds for _, item in runs)

    def modelled(setting: Setting | None, kind: str) -> float:
        """Seconds per token."""
        seconds = sum(modelled_seconds([c for c, _ in rounds], medians, host) for rounds in calls[setting, kind])
        return seconds / sum(item.decode_tokens for s, item in runs if s == setting and item.kind == kind)

    rows = []
    for setting in settings:
        kinds = [kind for kind in KINDS if (setting, kind) in measured]
        mine = [item for s, item in runs if s == setting]
        rows.append(
            {
                "max_draft": setting[0],
                "confidence_threshold": setting[1],
                "measured": {k: median_ratio(*zip(*measured[setting, k], strict=True)) for k in kinds},
                "modelled": {k: modelled(None, k) / modelled(setting, k) for k in kinds},
                "tokens_per_round": sum(r.decode_tokens for r in mine) / sum(r.rounds for r in mine),
                "proposed_per_round": sum(sum(r.proposed) for r in mine) / sum(r.rounds for r in mine),
            }
        )
    return {
        "settings": rows,
        "call_ms": {f"{name} {width}": 1e3 * value for (name, width), value in sorted(medians.items())},
        "host_ms_per_round": 1e3 * host,
    }


def _options(setting: Setting | None) -> dict[str, Any]:
    return PLAIN if setting is None else {**FIXED, "max_draft": setting[0], "confidence_threshold": setting[1]}


def sweep_table(result: Mapping[str, object]) -> str:
    """The settings as a table, the best mean of the modelled speed-ups first."""
    settings = result["settings"]
    calls = result["call_ms"]
    if not isinstance(settings, list) or not isinstance(calls, dict):
        raise ValueError("not the result of a sweep")
    ordered = sorted(settings, key=lambda row: -mean(row["modelled"].values()))
    kinds = list(ordered[0]["modelled"])
    head = ["cap / threshold", "τ", "proposed", *(f"{k} model" for k in kinds), *(f"{k} measured" for k in kinds)]
    rows = [
        [
            f"{row['max_draft']} / {row['confidence_threshold']:.1f}",
            f"{row['tokens_per_round']:.2f}",
            f"{row['proposed_per_round']:.2f}",
            *(f"{row['modelled'][k]:.3f}" for k in kinds),
            *(f"{row['measured'][k]:.3f}" for k in kinds),
        ]
        for row in ordered
    ]
    costs = ", ".join(f"{call}: {ms:.1f}" for call, ms in calls.items())
    return f"{table(head, rows)}\nms a call (kind, width): {costs}; host {result['host_ms_per_round']:.2f} a round"
