"""A closed loop of requests against an engine, as its clients would see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from runtime import Engine, Handle, Request, Result
from tests.bench.decoding import forget_prompts


@dataclass(frozen=True)
class Served:
    """Seconds for all of them; in the order of the requests, the `results` and `latencies` (seconds from submission to
    end).
    """

    seconds: float
    results: tuple[Result, ...]
    latencies: tuple[float, ...]


def serve(engine: Engine, requests: Sequence[Request], concurrency: int) -> Served:
    """Serve the requests, `concurrency` at a time: as one ends, the next is submitted. What an earlier run left in the
    slots is gone; what these prompts have in common, a system message, is shared among them.
    """
    forget_prompts(engine)
    done: dict[int, tuple[Result, float]] = {}
    live: dict[int, tuple[Handle, float]] = {}
    began = perf_counter()
    while len(done) < len(requests):
        while len(live) < concurrency and (sent := len(done) + len(live)) < len(requests):
            live[sent] = (engine.submit(requests[sent]), perf_counter())
        engine.step()
        for index, (handle, submitted) in tuple(live.items()):
            if engine.finished(handle):
                done[index] = (engine.result(handle), perf_counter() - submitted)
                del live[index]
    seconds = perf_counter() - began
    made = [done[index] for index in range(len(requests))]
    return Served(seconds, tuple(result for result, _ in made), tuple(latency for _, latency in made))
