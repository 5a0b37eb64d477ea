"""Clocks on a CUDA card. Cases that are compared take turns, so that what slows the card slows all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

_WARMUPS = 3


@dataclass(frozen=True)
class Case:
    """`run` starts one step (and may wait for it); `prepare`, if any, sets the step's inputs and isn't timed."""

    run: Callable[[], object]
    prepare: Callable[[], object] | None = None


def call_ms(cases: Mapping[str, Case], repeats: int) -> dict[str, list[float]]:
    """Wall milliseconds of single steps, each from an idle card to an idle card, as a caller who needs the result sees
    it: launch and wait are in it. Sample i of every case lies side by side in time.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(-_WARMUPS, repeats):
        for name in _turned(cases, turn):
            _prepare(cases[name])
            torch.cuda.synchronize()
            began = perf_counter()
            cases[name].run()
            torch.cuda.synchronize()
            if turn >= 0:
                times[name].append(1e3 * (perf_counter() - began))
    return times


def device_ms(cases: Mapping[str, Case], repeats: int, each: int = 10) -> dict[str, list[float]]:
    """Milliseconds a step on the device: CUDA events around `each` steps that are launched back to back on the current
    stream, so that launches hide behind the step before. For cases that don't wait.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name in _turned(cases, turn):
            _prepare(cases[name])
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(each):
                cases[name].run()
            end.record()
            end.synchronize()
            if turn:  # the first turn warms up
                times[name].append(begin.elapsed_time(end) / each)
    return times


def captured(step: Callable[[], object], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """`step`, which launches work on the current stream and never waits, as a CUDA graph. What it returned in the
    capture is what a replay fills, so `step` should keep it.
    """
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUPS):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def copy_bandwidth(gib: int = 4, repeats: int = 10) -> float:
    """Bytes a second that a large device-to-device copy reads and writes, both counted."""
    source = torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    source.random_(0, 256)
    dest = torch.empty_like(source)
    times = device_ms({"copy": Case(lambda: dest.copy_(source))}, repeats, each=5)["copy"]
    return 2 * source.numel() / (median(times) / 1e3)


def free_bytes() -> int:
    """Device memory that nobody holds."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def _prepare(case: Case) -> None:
    if case.prepare is not None:
        case.prepare()


def _turned(cases: Mapping[str, Case], turn: int) -> list[str]:
    names = list(cases)
    return names[turn % len(names) :] + names[: turn % len(names)]
