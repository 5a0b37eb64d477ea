"""Pictures of a run: ``python -m tests.bench_gpu.pictures bench.json`` draws beside the file, on any machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Results = Mapping[str, Any]


def draw_all(results: Results, out: Path, card: str) -> list[Path]:
    """Draw what the results have the numbers for; the files written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = []
    for part, (name, draw) in _PICTURES.items():
        if "error" not in results.get(part, {"error": ""}):
            figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
            draw(results[part], axes)
            figure.suptitle(card, fontsize=8)
            figure.savefig(out / name, dpi=120)
            plt.close(figure)
            made.append(out / name)
    return made


def _drafter(result: Results, axes: Any) -> None:
    batches = result["batches"]
    bars = {
        "byte floor": [item["floor_ms"] for item in batches.values()],
        "bare matmuls + ring": [item["call_ms"]["bare"]["median"] + item["ring_ms"] for item in batches.values()],
        "ours": [item["call_ms"]["ours"]["median"] for item in batches.values()],
        "torch, CUDA graph": [item["call_ms"]["torch"]["median"] for item in batches.values()],
        "torch, eager": [item["call_ms"]["eager"]["median"] for item in batches.values()],
    }
    _bars(axes, bars, [f"batch {batch}" for batch in batches], "%.2f")
    axes.set_ylabel("ms a step (median)")
    axes.set_title("8B-shaped drafter, bf16, window full: a draft step")


def _flatness(result: Results, axes: Any) -> None:
    names = [f"{case} ({group.split(', ')[-1]})" for group, item in result.items() for case in item["call_ms"]]
    values = [value["median"] for item in result.values() for value in item["call_ms"].values()]
    axes.barh(names[::-1], values[::-1])
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("ms a step (median)")
    axes.set_title("A step by ring position, slots and idle rows")


def _pair(result: Results, axes: Any) -> None:
    points = result["points"]
    for name in next(iter(points.values()))["medians"]:
        rates = [point["medians"][name] for point in points.values()]
        axes.plot(range(len(points)), rates, marker="o", label=name.replace("_", " "))
    _by_concurrency(axes, list(points))
    axes.set_ylabel("tokens a second, all requests (median)")
    axes.set_title("Real pair, greedy, every request decoding")


def _protocol(result: Results, axes: Any) -> None:
    points = result["points"]
    for mode in next(iter(points.values())):
        rates = [modes[mode]["user_rate"] for modes in points.values()]
        axes.plot(range(len(points)), rates, marker="o", label=mode.replace("_", " "))
    _by_concurrency(axes, list(points))
    axes.set_ylabel("tokens a second and user (mean)")
    axes.set_title(f"Real pair, greedy, natural end, at most {result['answer']} tokens")


def _by_concurrency(axes: Any, points: list[str]) -> None:
    axes.set_xticks(range(len(points)), points)
    axes.set_xlabel("requests at once")
    axes.set_yscale("log")
    axes.legend()


def _bars(axes: Any, bars: Mapping[str, list[float]], groups: list[str], form: str) -> None:
    width = 0.8 / len(bars)
    for i, (label, values) in enumerate(bars.items()):
        places = [x + (i - (len(bars) - 1) / 2) * width for x in range(len(groups))]
        axes.bar_label(axes.bar(places, values, width, label=label), fmt=form, fontsize=7)
    axes.set_xticks(range(len(groups)), groups)
    axes.legend(fontsize=8)


_PICTURES: dict[str, tuple[str, Callable[[Results, Any], None]]] = {
    "drafter": ("drafter.png", _drafter),
    "flatness": ("flatness.png", _flatness),
    "pair": ("pair.png", _pair),
    "protocol": ("protocol.png", _protocol),
}
"""By the part that is drawn."""


if __name__ == "__main__":
    source = Path(sys.argv[1])
    document = json.loads(source.read_text(encoding="utf-8"))
    for picture in draw_all(document["results"], source.parent, document["machine"]["card"]):
        print(f"wrote {picture}")
