"""Arithmetic on measurements: pure functions, tested without a clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean, median


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio within each pair. The runs of a pair lie side by side in time, so what slows the machine slows both.

    Raises ValueError for sequences of different length, or none at all.
    """
    if not numerators or len(numerators) != len(denominators):
        raise ValueError(f"not pairs: {len(numerators)} and {len(denominators)} runs")
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the pairs' ratios (not the ratio of the medians)."""
    return median(ratios(numerators, denominators))


def summary(values: Iterable[float]) -> dict[str, float]:
    """Median and extremes of some values; empty without any."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {"median": median(ordered), "min": ordered[0], "max": ordered[-1], "count": len(ordered)}


def acceptance_by_position(proposed: Iterable[int], accepted: Iterable[int]) -> list[float]:
    """Of the rounds that proposed a draft j, the share that accepted it, for each j. What is accepted is a prefix."""
    pairs = list(zip(proposed, accepted, strict=True))
    longest = max((p for p, _ in pairs), default=0)
    return [sum(a > j for _, a in pairs) / sum(p > j for p, _ in pairs) for j in range(longest)]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two sequences part, None where one is the beginning of the other."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None


def modelled_seconds(calls: Iterable[tuple[str, int]], medians: Mapping[tuple[str, int], float], host: float) -> float:
    """Time of a run, if each call took the median of its kind and width, and each verify `host` seconds more."""
    return sum(medians[call] + (host if call[0] == "verify" else 0.0) for call in calls)


def growth(readings: Sequence[float]) -> float:
    """Mean of the last tenth of the readings over that of the first tenth."""
    tenth = max(1, len(readings) // 10)
    return fmean(readings[-tenth:]) / fmean(readings[:tenth])


def engine_bytes(loaded: Mapping[str, int], when: str) -> int:
    """What engines take in memory after they were loaded (`when` is ``load``) or have run (``run``), slot state apart;
    `loaded` holds the bytes ``before``, at both times, and of the state then.
    """
    return loaded[when] - loaded[f"state_after_{when}"] - loaded["before"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Plain-text columns, the first to the left and the others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(cell) for cell in column) for column in zip_longest(*lines, fillvalue="")]

    def line(cells: list[str]) -> str:
        first, *rest = cells
        padded = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=False))]
        return "  ".join(padded).rstrip()

    return "\n".join(line(cells) for cells in lines)
