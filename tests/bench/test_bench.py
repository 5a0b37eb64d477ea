"""The bench's own arithmetic, verdicts and JSON: nothing here reads a clock."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.bench.arithmetic import (
    acceptance_by_position,
    engine_bytes,
    first_difference,
    growth,
    median_ratio,
    modelled_seconds,
    ratios,
    summary,
    table,
)
from tests.bench.bench import PARTS, Bench, bench_document
from tests.bench.concurrency import PointRun, compare_points
from tests.bench.decoding import Run, compare
from tests.bench.figures import Figure, figures, summary_text
from tests.bench.matmuls import Bare, Matmul, drafter_matmuls, target_matmuls
from tests.bench.op_profile import OUTSIDE, by_operator
from tests.bench.pictures import draw_all
from tests.bench.plan import KINDS, QUICK, Plan, read_messages
from tests.bench.sweep import sweep_table
from tests.examples import DRAFTER, TARGET
from tests.support import GOLDEN


def run(mode: str, step: float, rounds: int, kind: str = "code", accepted: int = 0) -> Run:
    """A run of `rounds` rounds, each `step` seconds long and accepting as many drafts of two."""
    tokens = tuple(range(1 + rounds * (accepted + 1)))
    proposed = (0 if mode == "plain" else 2,) * rounds
    return Run(f"{kind}/0", kind, mode, tokens, 0.5, (step,) * rounds, proposed, (accepted,) * rounds, 0.001 * rounds)


def group(kind: str = "code") -> dict[str, Run]:
    return {
        "plain": run("plain", 0.02, 12, kind),
        "fixed": run("fixed", 0.03, 6, kind, accepted=1),
        "full_block": run("full_block", 0.06, 6, kind, accepted=1),
        "adaptive": run("adaptive", 0.03, 6, kind, accepted=1),
    }


def pair(engine: float, bare: float) -> dict[str, object]:
    return {"engine_ms": {"median": engine}, "bare_ms": {"median": bare}, "ratio": engine / bare}


def loaded(load: int, run: int) -> dict[str, int]:
    """A process of 40 bytes whose engines take so many when loaded and after their first runs."""
    return {"before": 40, "load": 41 + load, "state_after_load": 1, "run": 240 + run, "state_after_run": 200}


def point(concurrency: int, **rates: float) -> list[PointRun]:
    """Two turns of a point, the second at half the speed; alone, 45 tokens a second at first."""
    return [
        PointRun(turn, concurrency, mode, 90 * (turn + 1) / rate, 90, 2.0, 3.0, 1.0, 0, ((1, 2), (3,)))
        for turn in (1, 0)
        for mode, rate in {**rates, "alone": 45.0}.items()
    ]


@pytest.fixture
def results() -> dict[str, Any]:
    """Results of every part, as the parts return them."""
    host = {"engine_clock_ms": {"median": 0.2}, "outside_session_ms": {"median": 0.2}}
    return {
        "build": {"seconds": 61.0, "peak_bytes": 1.4e9},
        "startup": {
            "import": {"seconds": {"median": 0.1}, "with_engine_seconds": {"median": 0.2}},
            "load": {"full": {"seconds": {"median": 2.0}}, "quick": {"seconds": {"median": 1.0}}},
            "torch": False,
        },
        "matmuls": {
            "target": {1: pair(22.0, 20.0), 8: pair(30.0, 28.0)},
            "draft": {3: pair(8.0, 7.0)},
            "chain_product_ms": {"median": 0.5},
        },
        "speculative": {
            "kinds": {kind: compare([group(kind)]) for kind in KINDS},
            "serving": {"max_draft": 3, "confidence_threshold": 0.0},
        },
        "host": {
            "fixed": {**host, "outside_library_ms": {"median": 0.25}},
            "adaptive": {**host, "outside_library_ms": {"median": 0.35}},
            "plain": {**host, "outside_library_ms": {"median": 0.2}},
        },
        "transformers": {
            "best": "sdpa",
            "speedup": 1.5,
            "speedups": {"eager": 1.6, "sdpa": 1.5},
            "token_ms": {name: {"median": 20.0} for name in ("ours", "eager", "sdpa")},
            "parted": {},
            "prompts": 8,
            "kinds": {"code": {"tokens_per_second": {"median": 30.0}}},
        },
        "profile": {
            "target, 1 row": {"call_ms": 20.0, "operators": {"MatMul": {"ms": 18.0, "share": 0.9, "nodes": 4}}}
        },
        "build_server": {"seconds": 80.0, "peak_bytes": 1.4e9},
        "memory": {
            "requests": {"count": 10_000, "pss": [100 << 20, *[105 << 20] * 8, 110 << 20]},
            "load": {"batches": [1, 2, 4, 8, 16], "one": loaded(600, 600), "all": loaded(720, 840)}
            | {"all_unshared": loaded(3000, 3100)},
        },
        "concurrency": {
            "points": compare_points(
                [*point(1, plain=40.0, fixed=50.0, adaptive=48.0), *point(16, plain=200.0, fixed=150.0, adaptive=200.0)]
            ),
        },
        "steps": {
            "batch": 8,
            "modes": {
                mode: {
                    part: {"median": ms}
                    for part, ms in {
                        "schedule": 0.1, "host": 0.8, "session": 0.3, "library": 60.0, "outside": 1.2, "step": 61.2,
                    }.items()
                }
                for mode in ("plain", "fixed", "adaptive")
            },
        },
        "coupling": {
            "0.7": {
                "rejection": {"tokens_per_round": 2.0, "rounds": 100},
                "gumbel": {"tokens_per_round": 1.8, "rounds": 110},
                "gumbel_to_rejection": 0.9,
            },
        },
    }  # fmt: skip


MACHINE = {"cpu": "x", "cores": 2, "load": [0.0, 0.0, 0.0], "date": "today", "commit": "abc"}


def test_the_ratio_is_taken_within_pairs() -> None:
    # The machine ran at half its speed during the second pair: neither its ratio nor the median moves.
    assert ratios([3.0, 6.0], [2.0, 4.0]) == [1.5, 1.5]
    assert median_ratio([3.0, 6.0, 9.0], [2.0, 4.0, 1.0]) == 1.5


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0])])
def test_unequal_runs_are_no_pairs(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="not pairs"):
        ratios(a, b)


def test_small_arithmetic() -> None:
    assert summary([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "count": 3}
    assert summary([]) == {}
    assert acceptance_by_position([2, 2, 1, 0], [2, 1, 0, 0]) == [2 / 3, 0.5]
    assert acceptance_by_position([], []) == []
    assert first_difference([1, 2, 3], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    medians = {("draft", 2): 1.0, ("verify", 3): 4.0}
    assert modelled_seconds([("draft", 2), ("verify", 3), ("verify", 3)], medians, 0.5) == 10.0
    assert growth([2.0, 4.0, *[9.0] * 16, 5.0, 4.0]) == 1.5
    assert engine_bytes(loaded(600, 700), "load") == 600
    assert engine_bytes(loaded(600, 700), "run") == 700
    assert table(["a", "b"], [["long", "1"]]) == "a     b\nlong  1"


def test_runs_are_compared_per_token() -> None:
    compared = compare([group(), group()])
    assert compared["plain"]["speedup"] == 1.0
    assert compared["fixed"]["speedup"] == pytest.approx(0.02 / 0.015)
    assert compared["full_block"]["speedup"] == pytest.approx(0.02 / 0.03)
    assert compared["fixed"]["tokens_per_round"] == 2.0
    assert compared["fixed"]["acceptance_by_position"] == [1.0, 0.0]
    assert compared["fixed"]["tokens_per_second"]["median"] == pytest.approx(1 / 0.015)
    assert (compared["fixed"]["identical"], compared["fixed"]["pairs"]) == (2, 2)
    assert compare([]) == {}


@pytest.mark.parametrize(
    ("figure", "reached", "verdict"),
    [
        (Figure("a", 1.5, "×", 1.4), True, "reached"),
        (Figure("a", 1.25, "×", 1.4), False, "not reached: 1.25 instead of 1.4"),
        (Figure("a", 61, "s", 60, most=True), False, "not reached: 61 instead of 60"),
        (Figure("a", 0, "", 0, most=True), True, "reached"),
        (Figure("a", 7), None, ""),
    ],
)
def test_verdicts(figure: Figure, reached: bool | None, verdict: str) -> None:
    assert (figure.reached, figure.verdict) == (reached, verdict)


def test_figures_of_a_whole_run(results: dict[str, Any]) -> None:
    by_name = {figure.name: figure for figure in figures(results)}
    assert by_name["build"].reached is False
    assert by_name["build, peak memory"].reached is True
    assert by_name["torch in the runtime's process"].reached is True
    assert by_name["plain / Hugging Face"].reached is True
    assert by_name["host, a round"].reached is True
    assert by_name["host, an adaptive round"].reached is False
    assert by_name["adaptive / plain, code"].value == pytest.approx(0.02 / 0.015)
    assert by_name["memory of 5 batches / one, loaded"].value == pytest.approx(1.2)
    assert by_name["memory of 5 batches / one, each run once"].value == pytest.approx(1.4)
    assert by_name["memory of 5 batches / one, each run once"].reached is False
    assert by_name["memory over 10000 requests, last / first tenth"].value == pytest.approx(1.1)
    assert by_name["adaptive / fixed, 1 at once"].value == pytest.approx(0.96)
    assert by_name["adaptive / fixed, 1 at once"].reached is False
    assert by_name["adaptive / plain, 16 at once"].reached is True
    assert by_name["16 at once / one by one"].value == pytest.approx(200 / 45)
    assert by_name["a step of 8, fixed: host and schedule"].value == pytest.approx(0.9)
    assert by_name["a step of 8, fixed: schedule"].reached is True
    assert by_name["a step of 8, fixed: outside the library"].reached is False
    assert by_name["gumbel / rejection, tokens a round at temperature 0.7"].value == 0.9
    assert all(by_name[f"speculative / plain, {kind}"].reached for kind in KINDS)
    assert {kind: by_name[f"speculative / plain, {kind}"].target for kind in KINDS} == {
        "school_maths": 1.3, "code": 1.3, "chat": 0.98, "maths": 1.3,
    }  # fmt: skip
    assert by_name["verify, rows 1"].value == pytest.approx(1.1)


def test_summary_names_every_figure_and_what_failed(results: dict[str, Any]) -> None:
    results["host"] = {"error": "MemoryError: no"}
    made = figures(results)
    text = summary_text(MACHINE, results, made)
    assert "host failed: MemoryError: no" in text
    assert "not reached: 61 instead of 60" in text
    assert all(figure.name in text for figure in made)
    row = next(line for line in text.splitlines() if line.startswith("16 at once, adaptive"))
    assert row.split()[4:] == ["150.0", "100.0", "200.0", "1.00", "2.00", "3.00", "4/4"]
    assert not any(figure.name.startswith("host") for figure in made)


def test_json_and_pictures(results: dict[str, Any], tmp_path: Any) -> None:
    document = bench_document(QUICK, MACHINE, results, figures(results))
    read = json.loads(json.dumps(document))
    assert set(read) == {"format", "machine", "plan", "figures", "results"}
    assert set(read["figures"][0]) == {"name", "value", "unit", "target", "most", "note", "reached", "verdict"}
    assert set(read["results"]) == set(PARTS)
    pytest.importorskip("matplotlib")
    assert [path.name for path in draw_all(results, tmp_path)] == [
        "speed.png", "matmuls.png", "concurrency.png", "steps.png", "memory.png",
    ]  # fmt: skip
    # Whole kinds may be missing (answers of one token), and whole parts.
    results["speculative"]["kinds"]["chat"] = {}
    assert figures(results)
    assert draw_all({"build": {"error": "x"}, "matmuls": {"error": "x"}}, tmp_path) == []


def test_every_part_can_be_run(tmp_path: Any) -> None:
    assert {*PARTS, "sweep"} == set(Bench(QUICK, tmp_path, tmp_path).parts())


def test_prompts() -> None:
    chats = read_messages()
    assert tuple(chats) == KINDS
    assert all(len(of_kind) >= 3 for of_kind in chats.values())
    assert all(chat[-1]["role"] == "user" for of_kind in chats.values() for chat in of_kind)
    # Of the largest point, each prompt is served once.
    plan, recorded = Plan(), json.loads((GOLDEN / "real_pair.json").read_text())["prompts"]
    assert len(recorded) + sum(map(len, chats.values())) >= max(2 * max(plan.concurrency), plan.coupling_prompts)


def test_profile_counts_nested_operators_once() -> None:
    def node(ts: int, dur: int, operator: str) -> dict[str, Any]:
        return {"cat": "Node", "name": "n_kernel_time", "ts": ts, "dur": dur, "args": {"op_name": operator}}

    def call(ts: int) -> list[dict[str, Any]]:
        scan = [node(ts + 50, 40, "Scan"), node(ts + 55, 30, "Gemm")]
        return [{"name": "model_run", "ts": ts, "dur": 100}, node(ts + 1, 40, "MatMul"), *scan]

    warm = [{"name": "model_run", "ts": 0, "dur": 500}, node(10, 400, "Slow")]
    result = by_operator([*warm, *call(1000), *call(2000)], runs=2)
    operators: Any = result["operators"]
    assert {name: item["share"] for name, item in operators.items()} == {
        "MatMul": 0.4, "Gemm": 0.3, OUTSIDE: 0.2, "Scan": 0.1,
    }  # fmt: skip
    assert operators["Gemm"]["nodes"] == 1
    with pytest.raises(ValueError, match="expected 4"):
        by_operator(call(0), runs=4)


def test_bare_matmuls_run() -> None:
    bare = Bare([Matmul(4, 6, "width"), Matmul(4, 8, "block"), Matmul(6, 4, "width")], threads=1)
    bare(width=1, block=3)
    bare(width=2, block=3)
    (binding, _) = bare._bindings[("block", 3), ("width", 2)]
    assert [np.shape(y) for y in binding.copy_outputs_to_cpu()] == [(2, 6), (3, 8), (2, 4)]


def test_the_models_products() -> None:
    target = target_matmuls(vars(TARGET))
    assert len(target) == 4 * TARGET.num_layers + 1
    assert target[-1] == Matmul(24, 97, "width")
    drafter = drafter_matmuls(vars(DRAFTER))
    assert drafter[0] == Matmul(48, 24, "context")
    assert sum(m.rows == "block" for m in drafter) == 4 * DRAFTER.num_layers


def test_sweep_table_puts_the_best_first() -> None:
    def row(cap: int, speed: float) -> dict[str, object]:
        by_kind = {"code": speed, "chat": speed}
        return {
            "max_draft": cap, "confidence_threshold": 0.0, "measured": by_kind, "modelled": by_kind,
            "tokens_per_round": 2.0, "proposed_per_round": 3.0,
        }  # fmt: skip

    result = {"settings": [row(1, 1.1), row(2, 1.3)], "call_ms": {"draft 2": 7.0}, "host_ms_per_round": 0.2}
    lines = sweep_table(result).splitlines()
    assert lines[1].startswith("2 / 0.0")
    assert "draft 2: 7.0" in lines[-1]
