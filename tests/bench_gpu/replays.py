"""Time of a launch by CUDA events, over replays of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

REPLAYS = 20


def median_ms(launch: Callable[[], object], groups: int = 15) -> float:
    """Median over groups of replays, of the mean of a group, in milliseconds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    times = []
    for _ in range(groups + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / REPLAYS)
    return sorted(times[2:])[groups // 2]
