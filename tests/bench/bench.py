"""``make bench``: measure the demo pair on this machine; see ``--help``.

Written to the output directory: ``bench.json`` (all raw numbers), ``summary.txt`` and pictures. A figure that misses
its target is said to, and fails nothing; the exit code is 1 only when a part could not be measured at all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(ROOT)  # run as a script: its folder is not where imports start

from engines.demo import DRAFTER, find_target  # noqa: E402
from runtime import BundleError, Engine  # noqa: E402
from runtime.bundle import open_bundle  # noqa: E402
from runtime.text import Tokenizer  # noqa: E402
from tests.bench.figures import Figure, figures, summary_text  # noqa: E402
from tests.bench.machine import cores, describe  # noqa: E402
from tests.bench.part import measure_part  # noqa: E402
from tests.bench.plan import QUICK, BenchPrompt, Plan, many_prompts, read_prompts  # noqa: E402

FORMAT = 1
DEFAULT_OUT = ROOT / "build" / "bench"


class Bench:
    """What the parts share: the plan, the target's file, two bundles and engines over them: `bundle`, after the default
    profile, and `server`, with several batches.
    """

    def __init__(self, plan: Plan, target: Path, out: Path) -> None:
        self.plan, self.target = plan, target
        self.bundle, self.server, self.tiny = out / "bundle", out / "server", out / "tiny"

    def open(self, bundle: Path) -> Engine:
        # The runtime's own choice where that is the number of threads wanted: this is what users get.
        threads = None if cores() == self.plan.threads else self.plan.threads
        return Engine(bundle, check="quick", threads=threads)

    @cached_property
    def engine(self) -> Engine:
        return self.open(self.bundle)

    @cached_property
    def serving(self) -> Engine:
        """For modes that leave the policy nothing to decide."""
        return self.open(self.server)

    @cached_property
    def adapting(self) -> Engine:
        """For adaptive requests alone, so that its policy learns from nothing else."""
        return self.open(self.server)

    @property
    def by_mode(self) -> dict[str, Engine]:
        return {"plain": self.serving, "fixed": self.serving, "adaptive": self.adapting}

    def many_prompts(self) -> list[BenchPrompt]:
        return many_prompts(self._tokenizer(self.serving))

    def prompts(self, each: int) -> list[BenchPrompt]:
        return read_prompts(self._tokenizer(self.engine), each)

    @staticmethod
    def _tokenizer(engine: Engine) -> Tokenizer:
        if engine.tokenizer is None:
            raise ValueError("the bundle has no tokenizer")
        return engine.tokenizer

    # One method a part, imported late: what a part needs costs the others nothing.

    def build(self) -> Mapping[str, object]:
        from tests.bench.startup import measure_build

        return measure_build(self.target, DRAFTER, self.bundle, ROOT)

    def build_server(self) -> Mapping[str, object]:
        from tests.bench.startup import measure_build

        options = ("--batch", ",".join(map(str, SERVER_BATCHES)), "--max-seq-len", str(SERVER_MAX_SEQ_LEN))
        return measure_build(self.target, DRAFTER, self.server, ROOT, *options)

    def startup(self) -> Mapping[str, object]:
        from tests.bench.startup import measure_startup

        return measure_startup(self.bundle, self.plan.startups, ROOT)

    def matmuls(self) -> Mapping[str, object]:
        from tests.bench.matmuls import measure_matmuls

        return measure_matmuls(self.engine, self.plan.call_repeats, self.plan.threads)

    def speculative(self) -> Mapping[str, object]:
        from tests.bench.decoding import measure_speculation

        return measure_speculation(self.engine, self.prompts(self.plan.prompts), self.plan)

    def host(self) -> Mapping[str, object]:
        from tests.bench.host import measure_host

        return measure_host(self.engine, self.prompts(self.plan.hf_prompts), self.plan)

    def transformers(self) -> Mapping[str, object]:
        from tests.bench.transformers_baseline import measure_transformers

        return measure_transformers(self.engine, self.target, self.prompts(self.plan.hf_prompts), self.plan)

    def profile(self) -> Mapping[str, object]:
        from tests.bench.op_profile import measure_profile

        return measure_profile(self.engine, self.plan.profile_calls)

    def memory(self) -> Mapping[str, object]:
        from tests.bench.memory import measure_memory

        return measure_memory(self.server, self.tiny, self.plan.memory_requests, ROOT)

    def concurrency(self) -> Mapping[str, object]:
        from tests.bench.concurrency import ALONE, measure_concurrency

        with self.open(self.server) as alone:
            return measure_concurrency({**self.by_mode, ALONE: alone}, self.many_prompts(), self.plan)

    def steps(self) -> Mapping[str, object]:
        from tests.bench.host import measure_steps

        return measure_steps(self.by_mode, self.many_prompts(), self.plan.step_batch, self.plan.steps)

    def coupling(self) -> Mapping[str, object]:
        from tests.bench.coupling import measure_coupling

        return measure_coupling(self.serving, self.many_prompts()[: self.plan.coupling_prompts], self.plan)

    def sweep(self) -> Mapping[str, object]:
        from tests.bench.sweep import measure_sweep

        return measure_sweep(self.engine, self.prompts(self.plan.sweep_prompts), self.plan)

    def parts(self) -> dict[str, Callable[[], Mapping[str, object]]]:
        """Every part by name, in the order in which they run."""
        return {
            "build": self.build,
            "build_server": self.build_server,
            # Before anything here opens the server's bundle: pages of its files would count by half.
            "memory": self.memory,
            "startup": self.startup,
            "matmuls": self.matmuls,
            "speculative": self.speculative,
            "host": self.host,
            "transformers": self.transformers,
            "profile": self.profile,
            "concurrency": self.concurrency,
            "steps": self.steps,
            "coupling": self.coupling,
            "sweep": self.sweep,
        }


SERVER_BATCHES, SERVER_MAX_SEQ_LEN = (1, 2, 4, 8, 16), 1024
SERVER_PARTS = ("memory", "concurrency", "steps", "coupling")
"""The parts that need the server's bundle; the others need the default one."""

PARTS = (
    "build", "build_server", "memory", "startup", "matmuls", "speculative", "host", "transformers", "profile",
    "concurrency", "steps", "coupling",
)  # fmt: skip
"""The parts of a whole run; the sweep is asked for."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    plan = QUICK if options.quick else Plan()
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(plan, (options.target or find_target()).absolute(), out)
    wanted = ("sweep",) if options.sweep and not options.only else (*(options.only or PARTS),)
    wanted = (*_missing_bundles(bench, wanted), *wanted)
    before = describe(ROOT)
    results: dict[str, Mapping[str, Any]] = {}
    for name, part in bench.parts().items():
        if name in wanted:
            results[name] = measure_part(name, part)
    made = figures(results)
    document = bench_document(plan, before, results, made)
    document["load_after"] = describe(ROOT)["load"]
    (out / "bench.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = summary_text(before, results, made)
    if "sweep" in results and "error" not in results["sweep"]:
        from tests.bench.sweep import sweep_table

        text += "\n" + sweep_table(results["sweep"]) + "\n"
    (out / "summary.txt").write_text(text, encoding="utf-8")
    print("\n" + text)
    from tests.bench.pictures import draw_all

    for path in [out / "bench.json", out / "summary.txt", *draw_all(results, out)]:
        print(f"wrote {path}")
    return int(any("error" in result for result in results.values()))


def bench_document(
    plan: Plan, machine: Mapping[str, object], results: Mapping[str, Mapping[str, Any]], made: Sequence[Figure]
) -> dict[str, object]:
    """``bench.json``: the machine, what was measured how often, every raw number, and the verdicts."""
    return {
        "format": FORMAT,
        "machine": machine,
        "plan": asdict(plan),
        "figures": [figure.plain() for figure in made],
        "results": results,
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the demo pair on this machine.")
    parser.add_argument("--quick", action="store_true", help="tiny counts: exercises every part, says little")
    parser.add_argument("--sweep", action="store_true", help="measure every cap with several thresholds instead")
    names = (*PARTS, "sweep")
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"a part ({', '.join(names)})")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="output directory (build/bench)")
    parser.add_argument("--target", type=Path, help="the target's GGUF file (default: as make demo finds it)")
    return parser.parse_args(arguments)


def _missing_bundles(bench: Bench, wanted: Sequence[str]) -> Iterator[str]:
    """The builds of bundles that are needed and not there, or not whole; else say which one is measured."""
    on_server = {part in SERVER_PARTS for part in wanted if part not in ("build", "build_server")}
    for build, bundle, needed in (
        ("build", bench.bundle, False in on_server),
        ("build_server", bench.server, True in on_server),
    ):
        if needed and build not in wanted:
            try:
                identity = open_bundle(bundle, check="quick").manifest.identity[:16]
            except BundleError:
                yield build
            else:
                print(f"measuring the bundle {bundle} as it was built before, identity {identity}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
