"""The demo's pair, built once for all tests that need it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from builder.build import BuildOptions, build
from builder.profile import load_profile
from engines import demo
from runtime import Engine
from tests.support import SilentProgress


def target() -> Path | None:
    """The target's file, if it is on this machine (``make target`` fetches it)."""
    path = Path(os.environ.get("DSPARK_DEMO_TARGET") or demo.CACHE / demo.GGUF)
    return path if path.is_file() else None


def build_real_pair(path: Path, out: Path) -> Path:
    """The pair after the default profile, with the whole block and no threshold as its defaults."""
    profile = replace(load_profile("cpu"), max_draft=None, confidence_threshold=0.0)
    build(BuildOptions(path, demo.DRAFTER, out, profile), SilentProgress())
    return out


@contextmanager
def default_settings(engine: Engine) -> Iterator[None]:
    """Within, the engine proposes what a bundle of the default profile would."""
    bundle, profile = engine.bundle, load_profile("cpu")
    block = bundle.manifest.limits.block_size
    serving = replace(
        bundle.manifest.serving,
        max_draft=block if profile.max_draft is None else profile.max_draft,
        confidence_threshold=profile.confidence_threshold,
    )
    engine.bundle = replace(bundle, manifest=replace(bundle.manifest, serving=serving))
    try:
        yield
    finally:
        engine.bundle = bundle
