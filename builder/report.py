"""What a build tells when it is done, and ``report.json``: what differs from build to build, for people."""

from __future__ import annotations

import datetime
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from builder.backends import EngineBuilt
from runtime.libraries import BACKENDS, BUILD_PACKAGES, RUN_PACKAGES, installed
from runtime.manifest import Manifest


@dataclass(frozen=True)
class BuildReport:
    """What was built. Times in seconds, memory in bytes (`peak_memory` is that of this process; those that built
    `engines` have theirs). Files `left_out` belong to the bundle and aren't there yet. `unchanged`: the output was up
    to date already, and nothing was done."""

    out: Path
    manifest: Manifest
    warnings: tuple[str, ...]
    seconds: Mapping[str, float]
    total_seconds: float
    peak_memory: int
    left_out: tuple[str, ...] = ()
    engines: tuple[EngineBuilt, ...] = ()
    recipe: str = ""
    unchanged: bool = False

    @property
    def bundle_bytes(self) -> int:
        """Of the bundle's files, without those `left_out`."""
        return sum(entry.size for name, entry in self.manifest.files.items() if name not in self.left_out)


def report_json(report: BuildReport) -> dict[str, object]:
    manifest = report.manifest
    packages = dict.fromkeys((*BACKENDS[manifest.backend.name].packages, *RUN_PACKAGES, *BUILD_PACKAGES))
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "identity": manifest.identity,
        "recipe": report.recipe,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed(name) for name in packages},
        "seconds": {name: round(value, 3) for name, value in report.seconds.items()},
        "engines": {
            engine.file: {"seconds": round(engine.seconds, 3), "peak_memory": engine.peak_memory}
            for engine in report.engines
        },
        "total_seconds": round(report.total_seconds, 3),
        "peak_memory": report.peak_memory,
        "bundle_bytes": report.bundle_bytes,
        "warnings": list(report.warnings),
    }


def peak_memory() -> int:
    """Bytes this process had resident at most."""
    try:
        # Unlike getrusage, this leaves out what was resident in the process that started this one.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
