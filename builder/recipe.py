"""What a bundle depends on, as one hash: a build whose output was made by the same recipe has nothing to do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from builder.profile import Profile, Resolution
from builder.spec import SourceInfo
from runtime.bundle import hash_file, open_bundle
from runtime.errors import DSparkError
from runtime.libraries import BACKENDS, BUILD_PACKAGES, RUN_PACKAGES, installed
from runtime.manifest import FORMAT_VERSION, REPORT_NAME, WEIGHTS_NAME, Manifest, to_plain

KEY = "recipe"
"""Of ``report.json``: the hash."""

_ROOT = Path(__file__).resolve().parent.parent
_CODE = ("builder", "runtime", "plugins")


def recipe(
    profile: Profile,
    gpu: str | None,
    plan: Resolution,
    sources: Mapping[str, SourceInfo],
    plugins: Path | None,
    no_weights: bool,
) -> str:
    """The sha256 (hex) over everything that decides a bundle's bytes: checkpoints, sizes, back end, GPU, kernels, the
    packages' versions, and this program's own code. Raises OSError."""
    packages = (*RUN_PACKAGES, *BUILD_PACKAGES, *BACKENDS[profile.backend].packages)
    facts = {
        "format": FORMAT_VERSION,
        "backend": [profile.backend, profile.precision, gpu],
        "limits": to_plain(plan.limits),
        "serving": to_plain(plan.serving),
        "sources": {name: [s.packaging, s.name, dict(s.files)] for name, s in sources.items()},
        "plugins": None if plugins is None else hash_file(plugins),
        "no_weights": no_weights,
        "packages": {name: installed(name) for name in packages},
        "code": _code(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def made_by(out: Path, wanted: str, no_weights: bool) -> Manifest | None:
    """The manifest of the bundle at `out` if that recipe made it and every file is as it was then; None otherwise."""
    try:
        report = json.loads((out / REPORT_NAME).read_bytes())
        if not isinstance(report, dict) or report.get(KEY) != wanted:
            return None
        if no_weights and (out / WEIGHTS_NAME).exists():
            return None
        return open_bundle(out, "full", weights=not no_weights).manifest
    except (OSError, ValueError, DSparkError):
        return None


def _code() -> str:
    digest = hashlib.sha256()
    for package in _CODE:
        for path in sorted((_ROOT / package).rglob("*.py")):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
