"""The figures of the CUDA card, each against its target, and the summary that says which are reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.bench.arithmetic import table
from tests.bench.figures import Figure

Results = Mapping[str, Any]
"""Results by part; a part that failed holds only ``error``."""

STEP, FLOOR, FLAT, MEMORY_MB, PLAIN, SPECULATIVE = 1.15, 0.65, 5.0, 300, 1.0, 0.65


def figures(results: Results) -> list[Figure]:
    """Every figure that the results hold."""
    made: list[Figure] = []
    for part, of in _PARTS.items():
        if part in results and "error" not in results[part]:
            made += of(results[part])
    return made


def _drafter(result: Results) -> Iterator[Figure]:
    for batch, item in result["batches"].items():
        ms = {name: value["median"] for name, value in item["call_ms"].items()}
        name, note = f"draft step, batch {batch}", f"{ms['ours']:.3f} ms"
        bare = f"{note} against bare {ms['bare']:.3f} + ring {item['ring_ms']:.3f} ms"
        yield Figure(f"{name} / (bare matmuls + ring)", item["to_bare_and_ring"], "×", STEP, most=True, note=bare)
        versus = f"{note} against {ms['torch']:.3f} ms (SDPA {item['torch_attention']}); eager {ms['eager']:.3f} ms"
        yield Figure(f"{name} / torch under a CUDA graph", item["to_torch"], "×", 1.0, most=True, note=versus)
        least = FLOOR if str(batch) == "1" else None
        same = f"{item['same_ids']:.0%} of torch's ids, confidence logits within {item['confidence_difference']:.2g}"
        floor = f"floor {item['floor_ms']:.3f} ms at {result['copy_bandwidth'] / 1e12:.2f} TB/s; {same}"
        yield Figure(f"{name}: share of the byte floor", item["floor_share"], "", least, note=floor)
    used = max(value for value in result["memory"].values()) / 1e6
    note = ", ".join(f"{name} {value / 1e6:.0f}" for name, value in result["memory"].items())
    yield Figure("draft step's memory above weights and rings", used, "MB", MEMORY_MB, most=True, note=note)


def _device(result: Results) -> Iterator[Figure]:
    for batch, item in result["batches"].items():
        note = (
            f"{item['ours']['median']:.3f} against {item['bare']['median']:.3f} ms, by events, without launch and wait"
        )
        yield Figure(f"draft step on the device, batch {batch} / bare matmuls", item["to_bare"], "×", note=note)


def _flatness(result: Results) -> Iterator[Figure]:
    for name, item in result.items():
        note = ", ".join(f"{case} {value['median']:.3f}" for case, value in item["call_ms"].items()) + " ms"
        # Rows that aren't visible or in use aren't read: of larger batches, that is more than the tolerance.
        most = FLAT if name.startswith("slots") or name == "position, batch 1" else None
        yield Figure(f"step time by {name}", 100 * item["spread"], "%", most, most=True, note=note)


def _kernels(result: Results) -> Iterator[Figure]:
    for name, rows in result.items():
        for row in rows:
            shown = {key: value for key, value in row.items() if key not in ("name", "ms", "floor_ms")}
            note = f"{row['ms'] * 1e3:.1f} µs; " + ", ".join(f"{key} {_short(value)}" for key, value in shown.items())
            yield Figure(f"{name}, {row['name']}: share of the byte floor", row["floor_ms"] / row["ms"], note=note)


def _pair(result: Results) -> Iterator[Figure]:
    for c, point in result["points"].items():
        rates = point["medians"]
        note = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()) + " tokens/s"
        yield Figure(f"plain / torch, {c} at once", point["plain_to_torch"], "×", PLAIN, note=note)
        unread = "torch never hands a token to the host"
        yield Figure(f"plain / torch unread, {c} at once", point["plain_to_torch_unread"], "×", note=unread)
        for mode, item in point["drafted"].items():
            least = SPECULATIVE if str(c) == "1" and mode == "full_block" else None
            per_tau = item["speedup"] / item["tokens_per_round"]
            note = f"{item['speedup']:.2f}× plain at τ {item['tokens_per_round']:.2f}"
            yield Figure(f"{mode.replace('_', ' ')} / plain / τ, {c} at once", per_tau, "", least, note=note)


def _protocol(result: Results) -> Iterator[Figure]:
    for c, modes in result["points"].items():
        for mode, item in modes.items():
            note = f"{item['speedup']:.2f}× plain, τ {item['tokens_per_round']:.2f}, {item['answers']} answers"
            yield Figure(f"tokens/s a user, {c} at once, {mode.replace('_', ' ')}", item["user_rate"], note=note)


_PARTS = {
    "drafter": _drafter,
    "device": _device,
    "flatness": _flatness,
    "kernels": _kernels,
    "pair": _pair,
    "protocol": _protocol,
}


def summary_text(machine: Results, results: Results) -> str:
    """The figures as a table, with what stands behind each below it."""
    made = figures(results)
    card = f"{machine['card']}, driver {machine['driver']}, CUDA {machine['cuda']}, torch {machine['torch']}"
    rows = [[f.name, f"{f.value:.3g} {f.unit}".strip(), _target(f), f.verdict] for f in made]
    parts = [
        f"{card}, ONNX Runtime {machine['onnxruntime']}; {machine['date']}; commit {machine['commit']}",
        table(["figure", "value", "target", "verdict"], rows) if rows else "",
        "\n".join(f"{f.name}: {f.note}" for f in made if f.note),
        "\n".join(f"{name} failed: {result['error']}" for name, result in results.items() if "error" in result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _target(figure: Figure) -> str:
    if figure.target is None:
        return ""
    return f"{'≤' if figure.most else '≥'} {figure.target:g}"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
