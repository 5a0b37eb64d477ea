"""Where an engine's call spends its time, by ONNX Runtime's own profiler."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime as ort

from runtime import Engine
from tests.bench.matmuls import Calls

OUTSIDE = "(between operators)"


def measure_profile(engine: Engine, repeats: int) -> dict[str, object]:
    """Milliseconds a call by operator type: the target at 1 and 4 rows, and the draft of the bundle's default.

    The profiler itself costs some, so the sums exceed the unprofiled calls.
    """
    serving, block = engine.bundle.manifest.serving, engine.bundle.manifest.limits.block_size
    slots = max(1, serving.max_draft)
    cases: list[tuple[str, str, Callable[[Calls], None]]] = [
        ("target, 1 row", "target", lambda calls: calls.verify(1)),
        (f"target, {min(4, block + 1)} rows", "target", lambda calls: calls.verify(min(4, block + 1))),
        (f"draft, {slots} of {block} slots", "draft", lambda calls: calls.draft(slots)),
    ]
    result: dict[str, object] = {}
    for name, graph, call in cases:
        with tempfile.TemporaryDirectory() as folder:
            with _profiled(engine, graph, Path(folder)) as session:
                calls = Calls(engine)
                calls.verify(3)
                for _ in range(repeats + 2):
                    call(calls)
                file = Path(session.end_profiling())
            events = json.loads(file.read_text(encoding="utf-8"))
        result[name] = by_operator(events, repeats)
    return result


@contextmanager
def _profiled(engine: Engine, graph: str, folder: Path) -> Iterator[ort.InferenceSession]:
    """Put a profiling session over the same file in the place of the engine's own."""
    manifest, session = engine.bundle.manifest, engine._session
    batch = manifest.limits.batches[0]
    file = next(e.file for e in manifest.engines if (e.graph, e.batch) == (graph, batch))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    inner: Any = session
    kept = inner._engines
    profiling = ort.InferenceSession(str(engine.bundle.path / file), options, providers=["CPUExecutionProvider"])
    own = kept[graph, batch]
    inner._engines = {**kept, (graph, batch): type(own)(profiling, batch, own._states, own._reads)}
    try:
        yield profiling
    finally:
        inner._engines = kept


def by_operator(events: Sequence[dict[str, Any]], runs: int) -> dict[str, object]:
    """The last `runs` calls of a profile: milliseconds a call in all, and ms, share and nodes a call of each operator
    type, most first. What lies between the operators is listed as `OUTSIDE`; what If and Scan hold counts as its own.

    Raises ValueError for a profile with fewer calls.
    """
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == "model_run")[-runs:]
    if len(spans) < runs or not spans:
        raise ValueError(f"a profile of {len(spans)} calls, expected {runs}")
    total = sum(end - start for start, end in spans)
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    open_nodes: list[tuple[float, str]] = []  # end and operator: If and Scan hold nodes of their own
    nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    for event in sorted(nodes, key=lambda e: (e["ts"], -e["dur"])):
        began, seconds, operator = event["ts"], event["dur"], event["args"]["op_name"]
        if not any(start <= began < end for start, end in spans):
            continue
        while open_nodes and open_nodes[-1][0] <= began:
            open_nodes.pop()
        if open_nodes:
            spent[open_nodes[-1][1]] -= seconds
        open_nodes.append((began + seconds, operator))
        spent[operator] += seconds
        count[operator] += 1
    spent[OUTSIDE] = total - sum(spent.values())
    return {
        "call_ms": total / runs / 1e3,
        "operators": {
            name: {"ms": spent[name] / runs / 1e3, "share": spent[name] / total, "nodes": count[name] / runs}
            for name in sorted(spent, key=lambda name: -spent[name])
        },
    }
