"""What the bench does to an engine, on a tiny one: counts and tokens, nothing that depends on a clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime import Engine, Request, Result, generate
from tests.bench import concurrency, matmuls
from tests.bench.concurrency import ALONE, MODES, PointRun, compare_points, measure_concurrency
from tests.bench.coupling import measure_coupling
from tests.bench.decoding import measure_speculation
from tests.bench.host import logged_library, logged_session, measure_host, measure_steps
from tests.bench.op_profile import measure_profile
from tests.bench.plan import QUICK, BenchPrompt
from tests.bench.serving import Served, serve

TINY_PLAN = replace(
    QUICK, tokens=8, concurrency=(1, 4), least_requests=4, concurrent_tokens=6, coupling_prompts=4, coupling_tokens=8
)


@pytest.fixture
def engine(tiny_bundle: Callable[..., Path]) -> Iterator[Engine]:
    with Engine(tiny_bundle("llama"), threads=1) as engine:
        yield engine


@pytest.fixture
def prompts(engine: Engine) -> list[BenchPrompt]:
    chosen, vocab = random.Random(3), engine.bundle.manifest.models.vocab_size
    return [BenchPrompt(f"code/{i}", "code", tuple(chosen.choices(range(vocab), k=9))) for i in range(10)]


def test_a_closed_loop(engine: Engine, prompts: list[BenchPrompt], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many at once as asked for, never more; results in the order of the requests; no prompt found from before."""
    requests = [Request(prompt_ids=p.ids, max_new_tokens=2 + i % 3) for i, p in enumerate(prompts)]
    wanted = [generate(engine, [r.prompt_ids], max_new_tokens=r.max_new_tokens)[0].token_ids for r in requests]
    running: list[int] = []
    step = engine.step

    def counted() -> None:
        stats = engine.stats()
        running.append(stats.running + stats.waiting)
        step()

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", counted)
            served = serve(engine, requests, 2)
        assert [result.token_ids for result in served.results] == wanted
        assert [result.stats.reused_tokens for result in served.results] == [0] * len(requests)
        assert len(served.latencies) == len(requests)
    slots = engine.bundle.manifest.limits.slots
    # As many as there are slots only before the clock starts, to make them forget.
    assert slots > 3
    assert {2, slots} <= set(running) <= {1, 2, slots}


def test_logs_see_every_call_and_leave_the_engine_as_it_was(engine: Engine, prompts: list[BenchPrompt]) -> None:
    request = Request(prompt_ids=prompts[0].ids, max_new_tokens=4, max_draft=2, adaptive=False)
    with logged_session(engine) as session, logged_library(engine) as library:
        result = engine.result(engine.submit(request))
    chunk = engine.bundle.manifest.limits.prefill_chunk
    widths = [width for name, width, _ in session.calls if name == "prefill"]
    assert widths == [chunk] * (9 // chunk) + [9 % chunk]
    rounds = [(name, width) for name, width, _ in session.calls if name in ("draft", "verify")]
    proposed = [n for n in result.stats.proposed if n]
    assert [width for name, width in rounds if name == "draft"] == proposed
    assert [width - 1 for name, width in rounds if name == "verify"] == result.stats.proposed
    assert len(library.calls) == len([call for call in session.calls if call[0] != "copy"])
    seen = len(session.calls), len(library.calls)
    engine.result(engine.submit(request))
    assert (len(session.calls), len(library.calls)) == seen


def test_every_part_of_the_default_bundle_runs(
    engine: Engine, prompts: list[BenchPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmuls, "CONTEXT", 30)
    speculation: Any = measure_speculation(engine, prompts[:2], TINY_PLAN)
    assert {mode: item["identical"] for mode, item in speculation["all"].items()} == dict.fromkeys(
        ("plain", "fixed", "full_block", "adaptive"), 2
    )
    host: Any = measure_host(engine, prompts[:1], TINY_PLAN)
    assert set(host) == {"plain", "fixed", "adaptive"}
    profile: Any = measure_profile(engine, 2)
    nodes = [case["operators"]["GroupQueryAttention"]["nodes"] for name, case in profile.items() if "target" in name]
    assert nodes == [engine.bundle.manifest.models.target["num_layers"]] * 2
    assert len(profile) == 3


def test_concurrency(engine: Engine, prompts: list[BenchPrompt]) -> None:
    result: Any = measure_concurrency(dict.fromkeys((*MODES, ALONE), engine), prompts, TINY_PLAN)
    assert {c: point["requests"] for c, point in result["points"].items()} == {1: 4, 4: 8}
    for point in result["points"].values():
        # What is served together, drafted or not, is what plain decoding gives.
        assert {mode: (m["identical"], m["answers"]) for mode, m in point["modes"].items()} == dict.fromkeys(
            (*MODES, ALONE), (point["requests"],) * 2
        )
        assert point["modes"]["plain"]["tokens_per_round"]["median"] == 1.0
        assert point["modes"]["fixed"]["tokens_per_round"]["median"] > 1.0
    assert [(run["turn"], run["concurrency"], run["mode"]) for run in result["runs"]] == [
        *((0, 1, mode) for mode in (*MODES, ALONE)),
        *((0, 4, mode) for mode in (*MODES[1:], MODES[0], ALONE)),
    ]
    with pytest.raises(ValueError, match="too few"):
        measure_concurrency({}, prompts[:7], TINY_PLAN)


def test_alone_counts_each_request_once(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, prompts: list[BenchPrompt]
) -> None:
    """What ran alone for a smaller point counts for a larger one too, as long as it took."""
    served: list[tuple[int, int]] = []

    def fake(engine: Engine, requests: list[Request], at_once: int) -> Served:
        served.append((len(requests), at_once))
        result = Result("", (1, 2), "length", generate(engine, [[1]], max_new_tokens=1)[0].stats)
        return Served(100.0, (result,) * len(requests), (2.0,) * len(requests))

    monkeypatch.setattr(concurrency, "serve", fake)
    result: Any = measure_concurrency(dict.fromkeys((*MODES, ALONE), engine), prompts, TINY_PLAN)
    assert served[-8:] == [(4, 1)] * 3 + [(4, 1)] + [(8, 4)] * 3 + [(4, 1)]
    assert [run["seconds"] for run in result["runs"] if run["mode"] == ALONE] == [8.0, 16.0]
    assert result["points"][4]["adaptive_to_alone"] == 16.0 / 100.0


def test_points_are_compared_turn_by_turn() -> None:
    def run(turn: int, mode: str, seconds: float, answer: int = 1) -> PointRun:
        return PointRun(turn, 8, mode, seconds, 120, 2.0, 4.0, 1.0, 0, ((answer,), (2,)))

    slow = [run(1, "alone", 60), run(1, "adaptive", 20, answer=5), run(1, "plain", 20), run(1, "fixed", 40)]
    quick = [run(0, "plain", 10), run(0, "fixed", 12), run(0, "adaptive", 8), run(0, "alone", 24)]
    usual = [run(2, "fixed", 12), run(2, "plain", 10), run(2, "adaptive", 10), run(2, "alone", 40)]
    point = compare_points([*slow[:1], *quick, *slow[1:], *usual])[8]
    assert (point["better"], point["adaptive_to_better"], point["adaptive_to_alone"]) == ("plain", 1.0, 3.0)
    assert point["modes"]["plain"]["tokens_per_second"] == {"median": 12.0, "min": 6.0, "max": 12.0, "count": 3}
    assert (point["modes"]["adaptive"]["identical"], point["modes"]["adaptive"]["answers"]) == (5, 6)


def test_steps_of_a_full_batch(engine: Engine, prompts: list[BenchPrompt]) -> None:
    batch = engine.bundle.manifest.limits.batches[-1]
    result: Any = measure_steps({"plain": engine, "fixed": engine}, prompts, batch, 12)
    for parts in result["modes"].values():
        # The first steps prefill; every part of the others is something, and together they are no more than the step.
        assert 1 <= parts["step"]["count"] < 12
        assert set(parts) == {"schedule", "host", "session", "library", "outside", "step"}
        assert min(part["min"] for part in parts.values()) > 0
    assert engine.idle
    # No step counts in which a request has ended: of 119 tokens at most, the first is the prefill's.
    result = measure_steps({"plain": engine}, prompts, batch, 160)
    assert engine.bundle.manifest.limits.max_seq_len - len(prompts[0].ids) == 119
    assert 100 < result["modes"]["plain"]["step"]["count"] <= 118
    with pytest.raises(RuntimeError, match="no step"):
        measure_steps({"plain": engine}, prompts, batch, 1)


def test_coupling(engine: Engine, prompts: list[BenchPrompt]) -> None:
    result: Any = measure_coupling(engine, prompts[:4], TINY_PLAN)
    assert set(result) == {"0.7", "1.0"}
    assert any(case["gumbel"] != case["rejection"] for case in result.values())
    for case in result.values():
        for coupling in ("rejection", "gumbel"):
            assert case[coupling]["tokens_per_round"] == pytest.approx(28 / case[coupling]["rounds"])
        assert case["gumbel_to_rejection"] == pytest.approx(case["rejection"]["rounds"] / case["gumbel"]["rounds"])
