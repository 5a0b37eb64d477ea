"""``make bench-gpu``: measure a CUDA card; see ``--help``.

Written to the output directory after every part: ``bench.json`` (all raw numbers) and ``summary.txt``; pictures at the
end. A figure that misses its target is said to, and fails nothing; the exit code is 1 only when a part could not be
measured at all.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests.bench.machine import describe
from tests.bench.part import measure_part
from tests.bench_gpu.figures import figures, summary_text
from tests.bench_gpu.shapes import BATCHES

ROOT = Path(__file__).resolve().parents[2]
FORMAT = 1
PARTS = ("drafter", "flatness", "kernels", "pair", "protocol", "device")
"""In the order in which they run: the last tries what the library need not stand."""
ON_DRAFTER = ("drafter", "flatness", "device")
CONCURRENCY = (1, 4, 16, 64)


@dataclass(frozen=True)
class Plan:
    """Counts of everything that is repeated: timed steps, turns over `tokens` a request, least answers a point."""

    repeats: int = 200
    tokens: int = 192
    turns: int = 3
    answers: int = 8


QUICK = Plan(repeats=10, tokens=64, turns=1, answers=2)
"""Exercises every part; its figures say little."""


class Bench:
    """What the parts share. `close` frees the card of it."""

    def __init__(self, options: argparse.Namespace, plan: Plan) -> None:
        self.options, self.plan = options, plan

    @cached_property
    def plugins(self) -> Path:
        """The custom-op library: a CUDA graph can't be captured without it."""
        given: Path = self.options.plugins
        path = given / "libdspark_ort.so" if given.is_dir() else given
        if not path.is_file():
            raise ValueError(f"no plugin library {path}; build plugins/ or pass --plugins")
        return path.absolute()

    @cached_property
    def _drafter(self) -> Any:
        from tests.bench_gpu.drafter import DrafterBench
        from tests.bench_gpu.graphs import FILE, write_graph

        graph: Path = self.options.graphs / FILE
        if not graph.is_file():
            write_graph(self.options.graphs)
        return DrafterBench(graph, self.plugins, BATCHES, self.plan.repeats)

    def drafter(self) -> Mapping[str, object]:
        return {**self._drafter.measure_step(), "memory": self._drafter.memory}

    def flatness(self) -> Mapping[str, object]:
        return self._drafter.measure_flatness()

    def device(self) -> Mapping[str, object]:
        return self._drafter.measure_device()

    def kernels(self) -> Mapping[str, object]:
        from tests.bench_gpu import chain, linear

        return {"Markov chain": chain.measure(), "linear": linear.measure()}

    def pair(self) -> Mapping[str, object]:
        from tests.bench_gpu.serving import measure_pair, warm

        with ExitStack() as stack:
            engines, prompts = self._engines(stack)
            warm(engines, prompts)
            return measure_pair(engines, prompts, self._concurrency(engines), self.plan.tokens, self.plan.turns)

    def protocol(self) -> Mapping[str, object]:
        from tests.bench_gpu.serving import measure_protocol, warm

        with ExitStack() as stack:
            engines, prompts = self._engines(stack)
            warm(engines, prompts)
            return measure_protocol(engines, prompts, self._concurrency(engines), self.plan.answers)

    def _engines(self, stack: ExitStack) -> tuple[dict[str, Any], list[Any]]:
        """An engine for each mode; the adaptive one is alone, so that its policy learns from nothing else."""
        from runtime import Engine
        from tests.bench.plan import many_prompts

        if self.options.bundle is None:
            raise ValueError("no bundle; build one with dspark-build build --backend ort-cuda, and pass --bundle")
        os.environ.setdefault("DSPARK_PLUGINS", str(self.plugins))  # for a bundle that was built without one
        fixed, adapting = (stack.enter_context(Engine(self.options.bundle, check="quick")) for _ in range(2))
        if fixed.tokenizer is None:
            raise ValueError("the bundle has no tokenizer")
        return {"plain": fixed, "full_block": fixed, "adaptive": adapting}, many_prompts(fixed.tokenizer)

    @staticmethod
    def _concurrency(engines: Mapping[str, Any]) -> list[int]:
        most = engines["plain"].bundle.manifest.limits.batches[-1]
        return [c for c in CONCURRENCY if c <= most]

    def close(self) -> None:
        self.__dict__.pop("_drafter", None)
        gc.collect()
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if not torch.cuda.is_available():
        print("error: no CUDA device that torch can use", file=sys.stderr)
        return 1
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    torch.zeros(1, device="cuda")  # loads the CUDA libraries that ONNX Runtime's provider looks for
    plan = QUICK if options.quick else Plan()
    machine, bench = describe_card(), Bench(options, plan)
    results: dict[str, Mapping[str, Any]] = {}
    for name in PARTS:
        if name not in (options.only or PARTS):
            continue
        if name not in ON_DRAFTER:
            bench.close()
        results[name] = measure_part(name, getattr(bench, name))
        _write(out, machine, plan, results)
    print("\n" + summary_text(machine, results))
    try:
        from tests.bench_gpu.pictures import draw_all

        draw_all(results, out, str(machine["card"]))
    except ImportError:
        print(f"no matplotlib here; elsewhere: python -m tests.bench_gpu.pictures {out / 'bench.json'}")
    return int(any("error" in result for result in results.values()))


def describe_card() -> dict[str, object]:
    """The card and the versions, on top of what `tests.bench.machine` tells of the machine."""
    import onnxruntime

    card = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().split("\n")[0]
    except OSError:
        driver = "unknown"
    return {
        **describe(ROOT),
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "card_bytes": card.total_memory,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
    }


def _write(out: Path, machine: Mapping[str, object], plan: Plan, results: Mapping[str, Any]) -> None:
    document = {
        "format": FORMAT,
        "machine": machine,
        "plan": asdict(plan),
        "figures": [figure.plain() for figure in figures(results)],
        "results": results,
    }
    (out / "bench.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / "summary.txt").write_text(summary_text(machine, results), encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-gpu", description="Measure this machine's CUDA card.")
    parser.add_argument("--quick", action="store_true", help="tiny counts: exercises every part, says little")
    parser.add_argument("--only", action="append", choices=PARTS, metavar="NAME", help=f"a part ({', '.join(PARTS)})")
    parser.add_argument("--bundle", type=Path, help="the real pair, built for ort-cuda (parts pair and protocol)")
    parser.add_argument("--plugins", type=Path, default=ROOT / "plugins" / "build", help="plugin library or its folder")
    out = ROOT / "build" / "bench_gpu"
    parser.add_argument(
        "--graphs", type=Path, default=out / "graphs", help="folder of the drafter's graph; made if absent"
    )
    parser.add_argument("--out", type=Path, default=out, help="output directory (build/bench_gpu)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
