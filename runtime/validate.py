"""Does this bundle compute on this machine what it was built to compute, and does drafting pay? Replays the vectors
stored in it, then times a short answer.

The vectors come from the float32 torch modules at build time, never from an engine; `builder.vectors` says what they
hold.
"""

from __future__ import annotations

import zipfile
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime import timing
from runtime.bundle import Bundle, Check, check_machine, open_bundle
from runtime.engine import Engine
from runtime.errors import BundleError
from runtime.manifest import REBUILD, Limits
from runtime.randomness import gumbel
from runtime.sessions import open_session
from runtime.sessions.base import DraftRows, SeedRows, Session, TargetRows
from runtime.timing import Prompt, Timing

VECTORS_NAME = "vectors.npz"


@dataclass(frozen=True)
class Tolerance:
    """Most that logits and probabilities may differ, absolute; logits are of order 1 to 30.

    Where the best two logits are nearer than `margin` (when sampling: the running sum and the uniform, than
    `sampling_margin`), another rounding may pick another token: ids are then not compared.
    """

    logits: float
    probabilities: float
    margin: float
    sampling_margin: float


TOLERANCE = {
    "f32": Tolerance(5e-4, 5e-5, 1e-3, 1e-4),
    "bf16": Tolerance(0.5, 0.1, 1.0, 0.1),
    "f16": Tolerance(0.1, 0.02, 0.2, 0.02),
}
"""By precision."""

Array = NDArray[Any]
Float32 = NDArray[np.float32]


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
    """`timing` is None where nothing was timed; `untimed` then says why, unless nobody asked for it."""

    stages: tuple[Stage, ...]
    timing: Timing | None = None
    untimed: str = ""

    @property
    def passed(self) -> bool:
        return all(stage.passed for stage in self.stages)

    def lines(self) -> list[str]:
        """The report for people: a line a stage, the speed, then the verdict."""
        lines = [
            f"{'pass' if s.passed else 'FAIL'}  {s.name:<24} differs by {s.worst:.2g} at most (allowed {s.allowed:.2g})"
            for s in self.stages
        ]
        if self.timing is not None:
            lines.append(f"speed     {self.timing.line()}")
        elif self.untimed:
            lines.append(f"speed     not timed: {self.untimed}")
        if self.timing is not None and self.timing.parted is not None:
            lines.append(f"note      {self.timing.parted}")
        failed = [s.name for s in self.stages if not s.passed]
        verdict = f"failed at {failed[0]} ({len(failed)} of {len(self.stages)} comparisons)" if failed else "passed"
        return [*lines, f"validation {verdict}"]

    def facts(self) -> dict[str, object]:
        """With stable keys, for programs."""
        return {
            "passed": self.passed,
            "stages": [{"passed": stage.passed, **asdict(stage)} for stage in self.stages],
            "timing": None if self.timing is None else self.timing.facts(),
            "untimed": self.untimed or None,
        }


def run(path: str | PathLike[str], check: Check = "full", threads: int | None = None, *, timed: bool = True) -> Report:
    """Replay the vectors of the bundle at `path`, and unless a stage differs or `timed` is False, time an answer.

    In float32 the answers with and without drafts must be the same, which is then a stage of the report; 16 bits round
    differently at different shapes, and where the best two logits are nearly tied, so does float32.

    Raises:
        BundleError, BackendUnavailable: the bundle can't be loaded here. What the machine lacks, be it memory
            (MemoryShortage), is told before an inference library is imported or anything allocated.
        ServingError: a call that failed while it was timed.
    """
    bundle = open_bundle(path, check=check)
    check_machine(bundle)
    manifest = bundle.manifest
    precision = manifest.backend.precision
    if precision not in TOLERANCE:
        raise BundleError(
            bundle.path,
            "no tolerance is known for its precision",
            expected=", ".join(TOLERANCE),
            found=precision,
            remedy="Upgrade the runtime",
        )
    vectors = _read(bundle.file(VECTORS_NAME), manifest.models.has_confidence)
    session = open_session(bundle.path, manifest, threads)
    try:
        report = Report(tuple(_replay(session, manifest.limits, vectors, TOLERANCE[precision])))
        if not timed:
            return report
        if not report.passed:
            return replace(report, untimed="a stage differs")
        return _timed(report, bundle, session, vectors["prompt"].tolist())
    finally:
        session.close()


def _timed(report: Report, bundle: Bundle, session: Session, ids: list[int]) -> Report:
    """The report with a timing, of which float32 makes another stage. `ids` are asked where words can't be."""
    limits = bundle.manifest.limits
    engine = Engine(bundle.path, check="quick", session=session, scheduler=timing.scheduler(limits))
    prompt = Prompt.of(engine.tokenizer, limits, ids)
    if prompt.room(limits) < timing.LEAST_TOKENS:
        return replace(report, untimed=f"after the prompt there is room for {prompt.room(limits)} tokens only")
    found = timing.measure(engine, prompt)
    precision = bundle.manifest.backend.precision
    tied = found.parted is not None and found.parted.gap <= TOLERANCE[precision].margin
    if precision != "f32" or tied:
        return replace(report, timing=found)
    # What comes after the first token that differs is another answer altogether.
    differing = 0 if found.parted is None else found.tokens - found.parted.token
    return replace(report, stages=(*report.stages, Stage("answer with drafts", float(differing), 0.0)), timing=found)


def _read(where: Path, confidence: bool) -> dict[str, Array]:
    try:
        with np.load(where, allow_pickle=False) as file:
            vectors: dict[str, Array] = {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise BundleError(where, "not readable as vectors", found=str(error), remedy=REBUILD) from error
    each = ["temperature", "uniforms", "noise", "ids", "margin", "verify_ids", "logits"] + ["confidence"] * confidence
    names = {"prompt", "chunks", "prefill.logits"}
    names |= {f"{r}.{name}" for r in range(_rounds(vectors)) for name in each}
    if missing := sorted(names - vectors.keys()):
        raise BundleError(where, "vectors are missing", expected=", ".join(missing), remedy=REBUILD)
    return vectors


def _rounds(vectors: dict[str, Array]) -> int:
    return sum(name.endswith(".inputs") for name in vectors)


def draft_noise(factor: float, start: int, slots: int, vocab_size: int) -> Float32:
    """The noise ``[1, slots, V]`` of a round at `start`: standard Gumbel times `factor`, or ``[1, slots, 1]`` zeros."""
    if factor == 0:
        return np.zeros((1, slots, 1), np.float32)
    rows = [gumbel(0, 0, start + 1 + j, vocab_size) for j in range(slots)]
    return (np.stack(rows) * np.float32(factor))[None]


def _replay(session: Session, limits: Limits, vectors: dict[str, Array], tolerance: Tolerance) -> list[Stage]:
    """Every batch's engines replay the vectors in their last row, while the other rows run something else."""
    return [stage for batch in limits.batches for stage in _replay_batch(session, batch, vectors, tolerance)]


def _replay_batch(session: Session, batch: int, vectors: dict[str, Array], tolerance: Tolerance) -> list[Stage]:
    """Replay with as many rows as the batch's engines hold: slot 0 replays, the others get one id a call."""
    others = np.arange(1, batch)
    at_batch = f"batch {batch}: " if batch > 1 else ""
    stages = []
    at = 0
    for i, chunk in enumerate(vectors["chunks"].tolist()):
        rows = _rows(vectors["prompt"][at : at + chunk], at, others)
        out = session.prefill(rows)
        stages.append(_close(f"{at_batch}prefill {i}", out.logits[-1], vectors["prefill.logits"][i], tolerance.logits))
        session.seed(SeedRows(rows.start, rows.count, rows.slot))
        at += chunk
    for r in range(_rounds(vectors)):
        bonus, start, valid_len, new_len = vectors[f"{r}.inputs"].tolist()
        noise = draft_noise(
            float(vectors[f"{r}.noise"]), start, len(vectors[f"{r}.ids"]), vectors["prefill.logits"].shape[1]
        )
        temperature = vectors[f"{r}.temperature"]
        uniforms = vectors[f"{r}.uniforms"][None]
        draft = session.draft(
            DraftRows(
                bonus=_behind(others, 0, bonus),
                start=_behind(others, 1, start),
                valid_len=_behind(others, 0, valid_len),
                new_len=_behind(others, 0, new_len),
                slot=_behind(others, others, 0),
                temperature=np.array([*[0.0] * len(others), temperature], np.float32),
                uniforms=np.repeat(uniforms, batch, axis=0),
                noise=np.concatenate([np.zeros((len(others), *noise.shape[1:]), np.float32), noise]),
            )
        )
        sampled = temperature > 0
        settled = vectors[f"{r}.margin"] > (tolerance.sampling_margin if sampled else tolerance.margin)
        if settled:
            differing = int((draft.ids[-1] != vectors[f"{r}.ids"]).sum())
            stages.append(Stage(f"{at_batch}draft {r} ids", float(differing), 0.0))
        # Without settled ids, only the first slot is known to have had the same tokens before it.
        known = slice(None) if settled else slice(1)
        if draft.confidence_logits is not None:
            reference = vectors[f"{r}.confidence"]
            name = f"{at_batch}draft {r} confidence"
            stages.append(_close(name, draft.confidence_logits[-1][known], reference[known], tolerance.logits))
        if draft.q is not None:
            reference = vectors[f"{r}.q"]
            stages.append(
                _close(f"{at_batch}draft {r} q", draft.q[-1][known], reference[known], tolerance.probabilities)
            )
        ids = vectors[f"{r}.verify_ids"]
        out = session.verify(_rows(ids, start, others))
        logits = np.stack([out.logits[i] for i in range(len(out.logits) - len(ids), len(out.logits))])
        stages.append(_close(f"{at_batch}verify {r}", logits, vectors[f"{r}.logits"], tolerance.logits))
    return stages


def _rows(ids: Array, start: int, others: Array) -> TargetRows:
    """The ids in slot 0, and before them id 0 at the same position of the other slots."""
    return TargetRows(
        ids=_behind(others, 0, ids),
        count=_behind(others, 1, len(ids)),
        start=_behind(others, start, start),
        slot=_behind(others, others, 0),
        tap_row=np.zeros(len(others) + 1, np.int64),
    )


def _behind(others: Array, value: int | Array, last: int | Array) -> Array:
    """Int64: `value` for each of the other rows, then `last`."""
    return np.concatenate([np.broadcast_to(value, len(others)), np.atleast_1d(last)]).astype(np.int64)


def _close(name: str, found: Array, reference: Array, allowed: float) -> Stage:
    if found.shape != reference.shape:
        return Stage(f"{name} (shape)", float("inf"), allowed)
    return Stage(name, float(np.abs(found - reference).max(initial=0.0)), allowed)
