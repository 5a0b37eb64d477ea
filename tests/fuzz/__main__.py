"""The long run: ``python -m tests.fuzz``. Episodes of random traffic, numbered by their seeds, on all cores."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from time import perf_counter

from tests.fuzz.traffic import EVENTS, counted, episode

EPISODE = 5000
"""Events of an episode."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first episode (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    options = parser.parse_args()
    began = perf_counter()
    counts: Counter[str] = Counter()
    with ProcessPoolExecutor(options.jobs) as pool:
        seeds = count(options.seed)
        waiting = []
        while (left := options.events - counted(counts)) > 0:
            while len(waiting) < min(options.jobs + 1, -(-left // EPISODE)):
                seed = next(seeds)
                waiting.append((seed, pool.submit(episode, seed, min(EPISODE, left))))
            seed, running = waiting.pop(0)
            try:
                counts += running.result()
            except Exception as error:
                traceback.print_exception(error)
                print(f"seed {seed}: {error}", *getattr(error, "__notes__", ()), sep="\n")
                return 1
            show(f"{counted(counts)} events, seed {seed}")
    print(f"{counted(counts)} events in {perf_counter() - began:.0f} s, 0 mismatches; seeds {options.seed} … {seed}")
    for kind in (*EVENTS, *sorted(counts.keys() - set(EVENTS))):
        print(f"{counts[kind]:>9}  {kind}" + ("" if kind in EVENTS else "  (besides)"))
    return 0


def show(line: str) -> None:
    """A line that the next one takes the place of, where somebody looks on."""
    if sys.stderr.isatty():
        print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
