"""What a fresh process costs: the build, `import runtime`, loading a bundle. Each runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bench.arithmetic import summary

# A small process stands between the bench and the build: the kernel counts the peak memory of a large one's child from
# the parent's size on.
_LAUNCHER = """
import json, resource, subprocess, sys, time
began = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
unit = 1 if sys.platform == "darwin" else 1024
print(json.dumps({"code": code, "seconds": time.perf_counter() - began, "cpu_seconds": used.ru_utime + used.ru_stime,
                  "peak_bytes": used.ru_maxrss * unit}))
"""

_IMPORT = """
import json, sys, time
began = time.perf_counter()
import runtime
imported = time.perf_counter() - began
runtime.generate, runtime.Engine
print(json.dumps({"seconds": imported, "with_engine_seconds": time.perf_counter() - began,
                  "torch": "torch" in sys.modules}))
"""

_LOAD = """
import json, sys, time
import runtime
began = time.perf_counter()
engine = runtime.Engine(sys.argv[1], check=sys.argv[2])
loaded = time.perf_counter()
runtime.generate(engine, [[1, 2, 3]], max_new_tokens=1)
print(json.dumps({"seconds": loaded - began, "first_token_seconds": time.perf_counter() - loaded,
                  "torch": "torch" in sys.modules}))
"""


def measure_build(target: Path, drafter: Path, bundle: Path, root: Path, *options: str) -> dict[str, object]:
    """Build the bundle from local files: seconds, peak memory, the build's own report. Raises RuntimeError."""
    arguments = ["--target", str(target), "--drafter", str(drafter), "--out", str(bundle), "--overwrite", *options]
    result = _python(_LAUNCHER, [sys.executable, "-m", "builder.cli", "build", *arguments], root)
    if result["code"] != 0:
        raise RuntimeError(f"dspark-build failed with code {result['code']}")
    report = json.loads((bundle / "report.json").read_text(encoding="ascii"))
    return {**result, "stages": report["seconds"], "reported_peak_bytes": report["peak_memory"]}


def measure_startup(bundle: Path, repeats: int, root: Path) -> dict[str, object]:
    """Seconds of `import runtime` and of loading the bundle (files in the page cache), and whether torch came along."""
    _python(_IMPORT, [], root)  # compiles bytecode
    imports = [_python(_IMPORT, [], root) for _ in range(max(repeats, 3))]
    loads: dict[str, list[dict[str, object]]] = {"full": [], "quick": []}
    for _ in range(repeats):
        for check, runs in loads.items():
            runs.append(_python(_LOAD, [str(bundle), check], root))
    return {
        "import": {
            "runs": imports,
            "seconds": summary(_seconds(imports)),
            "with_engine_seconds": summary(_seconds(imports, "with_engine_seconds")),
        },
        "load": {check: {"runs": runs, "seconds": summary(_seconds(runs))} for check, runs in loads.items()},
        "torch": any(run["torch"] for run in [*imports, *loads["full"], *loads["quick"]]),
    }


def _seconds(runs: list[dict[str, object]], key: str = "seconds") -> list[float]:
    return [float(str(run[key])) for run in runs]


def _python(code: str, arguments: list[str], root: Path) -> dict[str, object]:
    """Run code in a fresh interpreter; the JSON that it prints. Raises RuntimeError when it fails."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"a measuring process failed with code {done.returncode}")
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result
