"""The two pictures: speed by kind of prompt, and engines against bare matmuls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Results = Mapping[str, Any]


def draw_all(results: Results, out: Path) -> list[Path]:
    """Draw what the results have the numbers for; the files written."""
    import matplotlib

    matplotlib.use("Agg")
    made = []
    if "error" not in results.get("speculative", {"error": ""}):
        made.append(_speed(results, out / "speed.png"))
    if "error" not in results.get("matmuls", {"error": ""}):
        made.append(_matmuls(results["matmuls"], out / "matmuls.png"))
    return made


def _speed(results: Results, path: Path) -> Path:
    import matplotlib.pyplot as plt

    kinds = {kind: modes for kind, modes in results["speculative"]["kinds"].items() if modes}
    bars: dict[str, list[float]] = {
        label: [modes[mode]["tokens_per_second"]["median"] for modes in kinds.values()]
        for label, mode in (("plain", "plain"), ("speculative", "default"), ("full block", "full_block"))
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


def _matmuls(result: Results, path: Path) -> Path:
    import matplotlib.pyplot as plt

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
