"""Does this bundle compute on this machine what it was built to compute? Replays the vectors stored in it.

The vectors come from the float32 torch modules at build time, never from an engine; `builder.vectors` says what they
hold.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bundle import Check, check_machine, open_bundle
from runtime.errors import BundleError
from runtime.manifest import REBUILD
from runtime.sessions import open_session
from runtime.sessions.base import Session

VECTORS_NAME = "vectors.npz"

TOLERANCE = {"f32": 5e-4}
"""By precision: most that a logit may differ, absolute, where they are of order 1 to 30; probabilities get a tenth."""

MARGIN, SAMPLING_MARGIN = 1e-3, 1e-4
"""Where the best two logits (when sampling: the running sum and the uniform) are nearer than this, another rounding may
pick another token: ids are then not compared."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Stage:
    """One comparison: the largest absolute difference found, and the most allowed. Ids count the places that differ."""

    name: str
    worst: float
    allowed: float

    @property
    def passed(self) -> bool:
        # Not `worst > allowed`: NaN must fail.
        return self.worst <= self.allowed


@dataclass(frozen=True)
class Report:
    stages: tuple[Stage, ...]

    @property
    def passed(self) -> bool:
        return all(stage.passed for stage in self.stages)

    def lines(self) -> list[str]:
        """The report for people: a line a stage, then the verdict."""
        lines = [
            f"{'pass' if s.passed else 'FAIL'}  {s.name:<24} differs by {s.worst:.2g} at most (allowed {s.allowed:.2g})"
            for s in self.stages
        ]
        failed = [s.name for s in self.stages if not s.passed]
        verdict = f"failed at {failed[0]} ({len(failed)} of {len(self.stages)} comparisons)" if failed else "passed"
        return [*lines, f"validation {verdict}"]


def run(path: str | PathLike[str], check: Check = "full", threads: int | None = None) -> Report:
    """Replay the vectors of the bundle at `path`.

    Raises:
        BundleError, BackendUnavailable: the bundle can't be loaded here.
    """
    bundle = open_bundle(path, check=check)
    check_machine(bundle)
    manifest = bundle.manifest
    if manifest.backend.precision not in TOLERANCE:
        raise BundleError(
            bundle.path,
            "no tolerance is known for its precision",
            expected=", ".join(TOLERANCE),
            found=manifest.backend.precision,
            remedy="Upgrade the runtime",
        )
    vectors = _read(bundle.file(VECTORS_NAME), manifest.models.has_confidence)
    session = open_session(bundle.path, manifest, threads)
    try:
        return Report(tuple(_replay(session, vectors, TOLERANCE[manifest.backend.precision])))
    finally:
        session.close()


def _read(where: Path, confidence: bool) -> dict[str, Array]:
    try:
        with np.load(where, allow_pickle=False) as file:
            vectors: dict[str, Array] = {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise BundleError(where, "not readable as vectors", found=str(error), remedy=REBUILD) from error
    each = ["temperature", "uniforms", "ids", "margin", "verify_ids", "logits"] + ["confidence"] * confidence
    names = {"prompt", "chunks", "prefill.logits"}
    names |= {f"{r}.{name}" for r in range(_rounds(vectors)) for name in each}
    if missing := sorted(names - vectors.keys()):
        raise BundleError(where, "vectors are missing", expected=", ".join(missing), remedy=REBUILD)
    return vectors


def _rounds(vectors: dict[str, Array]) -> int:
    return sum(name.endswith(".inputs") for name in vectors)


def _replay(session: Session, vectors: dict[str, Array], tolerance: float) -> list[Stage]:
    stages = []
    slot, at = np.array([0]), 0
    for i, chunk in enumerate(vectors["chunks"].tolist()):
        ids, start = vectors["prompt"][None, at : at + chunk], np.array([at])
        out = session.prefill(np.ascontiguousarray(ids), start, slot)
        stages.append(_close(f"prefill {i}", out.logits[0, -1], vectors["prefill.logits"][i], tolerance))
        session.seed(start, slot)
        at += chunk
    for r in range(_rounds(vectors)):
        bonus, start, valid_len, new_len = (np.array([v]) for v in vectors[f"{r}.inputs"].tolist())
        temperature = np.array([vectors[f"{r}.temperature"]], np.float32)
        draft = session.draft(bonus, start, valid_len, new_len, slot, temperature, vectors[f"{r}.uniforms"][None])
        sampled = temperature[0] > 0
        settled = vectors[f"{r}.margin"] > (SAMPLING_MARGIN if sampled else MARGIN)
        if settled:
            differing = int((draft.ids[0] != vectors[f"{r}.ids"]).sum())
            stages.append(Stage(f"draft {r} ids", float(differing), 0.0))
        # Without settled ids, only the first slot is known to have had the same tokens before it.
        known = slice(None) if settled else slice(1)
        if draft.confidence_logits is not None:
            reference = vectors[f"{r}.confidence"]
            stages.append(
                _close(f"draft {r} confidence", draft.confidence_logits[0][known], reference[known], tolerance)
            )
        if draft.q is not None:
            stages.append(_close(f"draft {r} q", draft.q[0][known], vectors[f"{r}.q"][known], tolerance / 10))
        out = session.verify(vectors[f"{r}.verify_ids"][None], start, slot)
        stages.append(_close(f"verify {r}", out.logits[0], vectors[f"{r}.logits"], tolerance))
    return stages


def _close(name: str, found: Array, reference: Array, allowed: float) -> Stage:
    if found.shape != reference.shape:
        return Stage(f"{name} (shape)", float("inf"), allowed)
    return Stage(name, float(np.abs(found - reference).max(initial=0.0)), allowed)
