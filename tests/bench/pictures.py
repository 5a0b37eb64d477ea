"""The pictures: speed by kind of prompt, engines against bare matmuls, speed by concurrency, where a step's time goes
outside the library, and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.bench.arithmetic import engine_bytes

Results = Mapping[str, Any]


def draw_all(results: Results, out: Path) -> list[Path]:
    """Draw what the results have the numbers for; the files written."""
    import matplotlib

    matplotlib.use("Agg")
    made = []
    for part, (name, draw) in _PICTURES.items():
        if "error" not in results.get(part, {"error": ""}):
            made.append(draw(results, out / name))
    return made


def _speed(results: Results, path: Path) -> Path:
    import matplotlib.pyplot as plt

    kinds = {kind: modes for kind, modes in results["speculative"]["kinds"].items() if modes}
    bars: dict[str, list[float]] = {
        label: [modes[mode]["tokens_per_second"]["median"] for modes in kinds.values()]
        for label, mode in (
            ("plain", "plain"),
            ("speculative", "fixed"),
            ("full block", "full_block"),
            ("adaptive", "adaptive"),
        )
    }
    baseline = results.get("transformers", {}).get("kinds", {})
    if baseline:
        speed = [baseline[k]["tokens_per_second"]["median"] if k in baseline else 0.0 for k in kinds]
        bars = {f"Hugging Face ({results['transformers']['best']})": speed, **bars}
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    width = 0.8 / len(bars)
    for i, (label, values) in enumerate(bars.items()):
        places = [x + (i - (len(bars) - 1) / 2) * width for x in range(len(kinds))]
        axes.bar_label(axes.bar(places, values, width, label=label), fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds])
    axes.set_ylabel("tokens per second in decode")
    axes.set_title("Greedy decoding, batch 1, float32 (medians)")
    figure.legend(loc="outside lower center", ncols=len(bars))
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _matmuls(results: Results, path: Path) -> Path:
    import matplotlib.pyplot as plt

    result = results["matmuls"]
    figure, both = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    titles = (("target", "verify, by rows"), ("draft", "draft, by drafted slots"))
    for axes, (graph, title) in zip(both, titles, strict=True):
        widths = [int(width) for width in result[graph]]
        for key, label in (("engine_ms", "engine"), ("bare_ms", "bare matmuls")):
            axes.plot(widths, [pair[key]["median"] for pair in result[graph].values()], marker="o", label=label)
        axes.set_ylim(bottom=0)
        axes.set_xticks(widths)
        axes.set_title(title)
        axes.set_ylabel("ms a call (median)")
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _concurrency(results: Results, path: Path) -> Path:
    import matplotlib.pyplot as plt

    points = results["concurrency"]["points"]
    places = range(len(points))
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    labels = {
        "adaptive": "adaptive",
        "fixed": "always drafting",
        "plain": "not drafting",
        "alone": "one by one, adaptive",
    }
    for mode, label in labels.items():
        speed = [point["modes"][mode]["tokens_per_second"] for point in points.values()]
        middle = [item["median"] for item in speed]
        # From the slowest to the fastest turn.
        reach = [[item["median"] - item["min"] for item in speed], [item["max"] - item["median"] for item in speed]]
        style = {"linestyle": "--", "color": "grey"} if mode == "alone" else {}
        axes.errorbar(places, middle, yerr=reach, marker="o", capsize=3, label=label, **style)
    axes.set_xticks(places, list(map(str, points)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens per second, prefill included")
    axes.set_title("Greedy, closed loop, float32 (median, slowest and fastest turn)")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _steps(results: Results, path: Path) -> Path:
    import matplotlib.pyplot as plt

    modes = results["steps"]["modes"]
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    left = [0.0] * len(modes)
    for part, label in (
        ("schedule", "schedule"),
        ("host", "rounds, policy, text"),
        ("session", "session's own Python"),
    ):
        values = [parts[part]["median"] for parts in modes.values()]
        axes.barh(list(modes), values, left=left, label=label)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.axvline(1, linestyle=":", color="grey", label="goal")
    axes.set_xlabel("ms a step outside the library (medians)")
    axes.set_title(f"Host time of a step that decodes {results['steps']['batch']} requests")
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _memory(results: Results, path: Path) -> Path:
    import matplotlib.pyplot as plt

    requests, load = results["memory"]["requests"], results["memory"]["load"]
    figure, (over, bars) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    readings = [value / 2**20 for value in requests["pss"]]
    over.plot([requests["count"] * (i + 1) / len(readings) for i in range(len(readings))], readings, marker=".")
    over.set_ylim(0, 1.2 * max(readings))
    over.set_xlabel("short requests served (tiny pair)")
    over.set_ylabel("memory of the process, MiB")
    cases = {"one": "one batch", "all": f"{len(load['batches'])} batches", "all_unshared": "… if nothing\nwere shared"}
    values = [engine_bytes(load[case], "run") / 2**20 for case in cases]
    bars.bar_label(bars.bar(list(cases.values()), values), fmt="%.0f")
    bars.set_ylabel("engines loaded and run, without slot state, MiB")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


_PICTURES: dict[str, tuple[str, Callable[[Results, Path], Path]]] = {
    "speculative": ("speed.png", _speed),
    "matmuls": ("matmuls.png", _matmuls),
    "concurrency": ("concurrency.png", _concurrency),
    "steps": ("steps.png", _steps),
    "memory": ("memory.png", _memory),
}
"""By the part that is drawn."""
