"""The real pair on the card: decoding at a fixed number of requests against torch, and serving as papers report it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch

from builder.spec import RopeSpec, TargetSpec
from runtime import Engine, Handle, Request
from tests.bench.arithmetic import first_difference, median_ratio, summary
from tests.bench.decoding import forget_prompts, options_of
from tests.bench.plan import BenchPrompt
from tests.bench_gpu.target import TorchTarget, read_weights
from tests.bench_gpu.timing import captured

MODES = ("plain", "full_block", "adaptive")
"""Of `tests.bench.decoding.MODES`: one token a step, the whole block in every round, or as the engine's policy sees
fit."""

ANSWER = 1024
"""Most tokens of an answer in the published protocol."""


def warm(engines: Mapping[str, Engine], prompts: Sequence[BenchPrompt]) -> None:
    """Make every engine run each number of requests with each number of drafts, so that what is captured at its first
    use is there before a clock runs, and a policy knows what calls cost.
    """
    for engine in {id(engine): engine for engine in engines.values()}.values():
        limits = engine.bundle.manifest.limits
        for batch in limits.batches:
            for drafts in range(limits.block_size + 1):
                options = {"adaptive": False, "max_draft": drafts, "confidence_threshold": 0.0}
                chosen = islice(cycle(prompts), batch)
                requests = [
                    Request(prompt_ids=p.ids, max_new_tokens=2 * drafts + 8, ignore_eos=True, **options) for p in chosen
                ]
                for handle in [engine.submit(request) for request in requests]:
                    engine.result(handle)


@dataclass(frozen=True)
class Decoded:
    """What a mode did while all of its requests were decoding: tokens of all together a second, tokens a round, and the
    token ids of every answer.
    """

    rate: float
    tokens_per_round: float
    outputs: tuple[tuple[int, ...], ...]


def decode(engine: Engine, prompts: Sequence[BenchPrompt], tokens: int, options: Mapping[str, Any]) -> Decoded:
    """Serve all prompts at once, `tokens` each whatever they are. The clock runs from the step that gave the last
    request its first token to the step that ended one: no prefill, and no request missing.
    """
    forget_prompts(engine)
    requests = [Request(prompt_ids=p.ids, max_new_tokens=tokens, ignore_eos=True, **options) for p in prompts]
    handles = [engine.submit(request) for request in requests]
    counts = [0] * len(handles)
    began = ended = 0.0
    before = 0
    while not ended:
        engine.step()
        for i, handle in enumerate(handles):
            piece = engine.take(handle)
            counts[i] += len(piece.token_ids) if piece else 0
        now, over = perf_counter(), any(engine.finished(handle) for handle in handles)
        if not began and all(counts):
            began, before = now, sum(counts)
        if over and not (began and now > began):
            raise RuntimeError(f"a request of {tokens} tokens was over before all {len(handles)} had begun")
        if over:
            ended = now
    made = sum(counts) - before
    results = [engine.result(handle) for handle in handles]
    rounds = sum(result.stats.rounds for result in results)
    per_round = sum(len(result.token_ids) - 1 for result in results) / rounds if rounds else 0.0
    return Decoded(made / (ended - began), per_round, tuple(result.token_ids for result in results))


class TorchDecoding:
    """Torch's loop over the same weights, for a number of sequences: one CUDA graph a token."""

    @torch.inference_mode()
    def __init__(self, engine: Engine, batch: int, rows: int, device: str = "cuda") -> None:
        spec = target_spec(engine.bundle.manifest.models.target)
        self._target = TorchTarget(spec, read_weights(engine.bundle.path, "target.", device), batch, rows)
        # A capture's warm-up decodes nonsense into the cache's first rows; a prefill writes over them.
        self._graph = captured(self._target.step)

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[BenchPrompt], tokens: int, read: bool) -> Decoded:
        """With `read` every token is handed to the host as it comes, as an engine that streams has to; without, the
        card is never waited for.
        """
        rows = [self._target.prefill([prompt.ids for prompt in prompts]).tolist()]
        torch.cuda.synchronize()
        began = perf_counter()
        for _ in range(tokens - 1):
            self._graph.replay()
            if read:
                rows.append(self._target.ids.tolist())
        torch.cuda.synchronize()
        seconds = perf_counter() - began
        return Decoded(len(prompts) * (tokens - 1) / seconds, 1.0, tuple(zip(*rows, strict=True)))


def target_spec(plain: Mapping[str, Any]) -> TargetSpec:
    """The target's sizes as a manifest has them."""
    values = {**plain, "rope": RopeSpec(**plain["rope"]), "eos_token_ids": tuple(plain["eos_token_ids"])}
    return TargetSpec(**values)


def measure_pair(
    engines: Mapping[str, Engine], prompts: Sequence[BenchPrompt], concurrency: Sequence[int], tokens: int, turns: int
) -> dict[str, object]:
    """Every mode and torch at each concurrency, side by side in every turn. `engines` has one for each mode."""
    points: dict[str, object] = {}
    for c in concurrency:
        chosen = list(islice(cycle(prompts), c))
        rows = max(len(prompt.ids) for prompt in chosen) + tokens + 8
        baseline = TorchDecoding(engines["plain"], c, rows)
        runs: dict[str, list[Decoded]] = {name: [] for name in (*MODES, "torch", "torch unread")}
        for turn in range(-1, turns):  # the first turn captures what there is to capture, and the policy learns
            for mode in MODES:
                made = decode(engines[mode], chosen, tokens, options_of(engines[mode], mode))
                runs[mode] += [made] * (turn >= 0)
            for name in ("torch", "torch unread"):
                runs[name] += [baseline(chosen, tokens, name == "torch")] * (turn >= 0)
        points[str(c)] = point = _compare(runs)
        print(f"  {c} at once: {', '.join(f'{k} {v:.0f}' for k, v in point['medians'].items())} tokens/s", flush=True)
    return {"tokens": tokens, "points": points}


def _compare(runs: Mapping[str, Sequence[Decoded]]) -> dict[str, Any]:
    rates = {name: [made.rate for made in of_mode] for name, of_mode in runs.items()}
    drafted = {
        mode: {
            "speedup": median_ratio(rates[mode], rates["plain"]),
            "tokens_per_round": fmean(made.tokens_per_round for made in runs[mode]),
        }
        for mode in MODES
        if mode != "plain"
    }
    plain = runs["plain"][0].outputs
    return {
        "medians": {name: median(values) for name, values in rates.items()},
        "tokens_per_second": {name: summary(values) for name, values in rates.items()},
        "plain_to_torch": median_ratio(rates["plain"], rates["torch"]),
        "plain_to_torch_unread": median_ratio(rates["plain"], rates["torch unread"]),
        "drafted": drafted,
        "parts_from_plain_at": {
            name: [first_difference(a, b) for a, b in zip(plain, runs[name][0].outputs, strict=True)]
            for name in ("full_block", "adaptive", "torch")
        },
    }


@dataclass(frozen=True)
class Answer:
    """`rate`: tokens a second of one request from its first token to its last, 0 for an answer of one token."""

    kind: str
    tokens: int
    rounds: int
    rate: float
    reason: str


def serve_answers(engine: Engine, prompts: Sequence[BenchPrompt], c: int, options: Mapping[str, Any]) -> list[Answer]:
    """Whole answers, `c` at a time: as one ends, the next is asked for."""
    forget_prompts(engine)
    limit = engine.bundle.manifest.limits.max_seq_len
    waiting = list(reversed(prompts))
    live: dict[Handle, tuple[BenchPrompt, list[float]]] = {}
    answers = []
    while waiting or live:
        while waiting and len(live) < c:
            prompt = waiting.pop()
            most = min(ANSWER, limit - len(prompt.ids))
            live[engine.submit(Request(prompt_ids=prompt.ids, max_new_tokens=most, **options))] = (prompt, [])
        engine.step()
        now = perf_counter()
        for handle, (prompt, stamps) in tuple(live.items()):
            if engine.take(handle) is not None:
                stamps.append(now)
            reason = engine.finished(handle)
            if reason is not None:
                del live[handle]
                result = engine.result(handle)
                tokens, seconds = len(result.token_ids), stamps[-1] - stamps[0]
                rate = (tokens - 1) / seconds if seconds > 0 else 0.0
                answers.append(Answer(prompt.kind, tokens, result.stats.rounds, rate, reason))
    return answers


def measure_protocol(
    engines: Mapping[str, Engine], prompts: Sequence[BenchPrompt], concurrency: Sequence[int], least: int
) -> dict[str, object]:
    """Greedy answers to their natural end, at most `ANSWER` tokens, 2c of them (or `least`) at each concurrency c; each
    prompt serves as often as it must.
    """
    points: dict[str, object] = {}
    for c in concurrency:
        chosen = list(islice(cycle(prompts), max(2 * c, least)))
        modes: dict[str, dict[str, Any]] = {}
        for mode in MODES:
            began = perf_counter()
            answers = serve_answers(engines[mode], chosen, c, options_of(engines[mode], mode))
            modes[mode] = _rates(answers, perf_counter() - began)
        plain = modes["plain"]["user_rate"]
        points[str(c)] = {mode: {**item, "speedup": item["user_rate"] / plain} for mode, item in modes.items()}
        shown = ", ".join(f"{mode} {item['user_rate']:.0f}" for mode, item in modes.items())
        print(f"  {c} at once, tokens/s a user: {shown}", flush=True)
    return {"answer": ANSWER, "points": points}


def _rates(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    def per_round(of: Sequence[Answer]) -> float:
        rounds = sum(answer.rounds for answer in of)
        return sum(answer.tokens - 1 for answer in of) / rounds if rounds else 0.0

    kinds = dict.fromkeys(answer.kind for answer in answers)
    return {
        "answers": len(answers),
        "user_rate": fmean(answer.rate for answer in answers if answer.tokens > 1),
        "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        "tokens_per_answer": fmean(answer.tokens for answer in answers),
        "ended_by_eos": sum(answer.reason == "stop" for answer in answers),
        "tokens_per_round": per_round(answers),
        "tokens_per_round_by_kind": {kind: per_round([a for a in answers if a.kind == kind]) for kind in kinds},
    }
