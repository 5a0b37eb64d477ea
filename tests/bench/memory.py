"""Memory: whether it stays flat over many short requests, and what several fixed batches cost over one.

Each reading is of a process that does nothing else: ``python -m tests.bench.memory`` is that process. What is read is
PSS on Linux, which counts a page that is mapped twice once; a file's pages that another process maps too would count by
half, so nobody else may serve the bundle meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from runtime import Engine, Request
from runtime.bundle import open_bundle
from runtime.sessions import open_session
from runtime.sessions.base import DraftRows, SeedRows, TargetRows
from tests.bench.startup import measure_build

PROMPT, TOKENS = 8, 4
"""Ids of a short request's prompt, and most tokens of its answer."""
CONCURRENCY = 8
READINGS = 20
TINY = Path("tests/golden/e2e/llama")
"""The pair that short requests run on: what grows with requests doesn't depend on the size of the models."""
_TINY_OPTIONS = ("--batch", "1,2,4,8", "--window", "64", "--max-seq-len", "128")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def measure_memory(server: Path, tiny: Path, count: int, root: Path) -> dict[str, object]:
    """Bytes: of a process after every `READINGS`-th part of `count` short requests, on a tiny bundle that is built at
    `tiny`; and what loading the batches of the bundle at `server` costs, and running each once, for the first batch
    alone, for all, and for all when each engine packs its own weights (`engine_bytes` reads that).
    """
    measure_build(root / TINY / "target", root / TINY / "drafter", tiny, root, *_TINY_OPTIONS)
    batches = open_bundle(server, check="quick").manifest.limits.batches
    return {
        "requests": {"count": count, "pss": _child(root, "requests", str(tiny), str(count))},
        "load": {
            "batches": batches,
            "one": _child(root, "load", str(server), str(batches[0])),
            "all": _child(root, "load", str(server), *map(str, batches)),
            "all_unshared": _child(root, "load-unshared", str(server), *map(str, batches)),
        },
    }


def _child(root: Path, *arguments: str) -> Any:
    command = [sys.executable, "-m", "tests.bench.memory", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=root)
    if done.returncode != 0:
        raise RuntimeError(f"a measuring process failed with code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _pss() -> int:
    info = psutil.Process().memory_full_info()
    return int(getattr(info, "pss", info.rss))


def _requests(bundle: Path, count: int) -> list[int]:
    """Serve `count` short requests in a closed loop, `CONCURRENCY` at a time; PSS after each part of them."""
    chosen, readings, every = random.Random(0), [], max(1, count // READINGS)
    with Engine(bundle, check="quick") as engine:
        vocab = engine.bundle.manifest.models.vocab_size
        live, sent, done = [], 0, 0
        while done < count:
            while sent < count and len(live) < CONCURRENCY:
                prompt = chosen.choices(range(vocab), k=PROMPT)
                live.append(engine.submit(Request(prompt_ids=tuple(prompt), max_new_tokens=TOKENS)))
                sent += 1
            engine.step()
            for handle in [handle for handle in live if engine.finished(handle)]:
                engine.result(handle)
                live.remove(handle)
                done += 1
                if done % every == 0:
                    readings.append(_pss())
    return readings


def _load(bundle: Path, batches: list[int], shared: bool) -> dict[str, int]:
    """PSS before the engines of these batches are loaded, after it, and after each has run; and how much of the slots'
    state is in memory at both times."""
    import runtime.sessions.ort_engines as ort_engines

    manifest = open_bundle(bundle, check="quick").manifest
    manifest = replace(
        manifest,
        limits=replace(manifest.limits, batches=tuple(batches)),
        engines=tuple(engine for engine in manifest.engines if engine.batch in batches),
    )
    if not shared:
        ort_engines.packed_engines = lambda path, manifest: nullcontext({})
    import onnxruntime  # noqa: F401  # is no engine's

    result = {"before": _pss()}
    session: Any = open_session(bundle, manifest)
    result |= {"load": _pss(), "state_after_load": _resident(session._state.values())}
    for batch in batches:
        _run_each(session, batch)
    return result | {"run": _pss(), "state_after_run": _resident(session._state.values())}


def _run_each(session: Any, batch: int) -> None:
    """Run the engines of a batch: every row prefills one id, then drafts and verifies."""
    one, slots = np.ones(batch, np.int64), np.arange(batch)
    session.prefill(TargetRows(ids=one, count=one, start=0 * one, slot=slots, tap_row=0 * one))
    session.seed(SeedRows(start=0 * one, count=one, slot=slots))
    floats = np.zeros((batch, 1), np.float32)
    session.draft(DraftRows(one, one, one, 0 * one, slots, floats[:, 0], floats))
    session.verify(TargetRows(ids=one, count=one, start=one, slot=slots, tap_row=0 * one))


def _resident(arrays: Iterator[NDArray[Any]]) -> int:
    """Bytes of arrays that are in memory: the others were allocated and never touched. Linux's pagemap tells, 8 bytes a
    page of which the highest bit is set for those; 0 elsewhere."""
    total = 0
    if not Path("/proc/self/pagemap").exists():
        return total
    with open("/proc/self/pagemap", "rb") as pages:
        for array in arrays:
            first, last = array.ctypes.data // _PAGE, (array.ctypes.data + array.nbytes - 1) // _PAGE
            pages.seek(8 * first)
            entries = np.frombuffer(pages.read(8 * (last - first + 1)), np.uint64)
            total += _PAGE * int((entries >> np.uint64(63)).sum())
    return total


if __name__ == "__main__":
    what, path, *numbers = sys.argv[1:]
    counts = [int(number) for number in numbers]
    if what == "requests":
        print(json.dumps(_requests(Path(path), counts[0])))
    else:
        print(json.dumps(_load(Path(path), counts, shared=what == "load")))
