"""The build from end to end: checkpoints in, a bundle out. Each stage is a call into the module that owns it."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from builder import bundle
from builder.gpu import resolve_gpu
from builder.plugin_library import check_library, copy_library
from builder.profile import Profile, Resolution, check_memory, check_profile, resolve
from builder.recipe import made_by, recipe
from builder.report import BuildReport, peak_memory, report_json
from runtime.errors import BundleError
from runtime.libraries import BACKENDS
from runtime.machine import available_memory, human_bytes
from runtime.manifest import (
    FORMAT_VERSION,
    REPORT_NAME,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    WEIGHTS_NAME,
    Manifest,
    Memory,
    Models,
    Source,
    StateTensor,
    state_bytes,
    to_plain,
)
from runtime.version import DISTRIBUTION, VERSION

if TYPE_CHECKING:
    from builder.backends import BackendBuilder, EngineBuilt
    from builder.spec import DrafterCheckpoint, DrafterSpec, SourceInfo, TargetCheckpoint, TargetSpec, TokenizerData

CONVENTIONS = {
    "confidence": "sigmoid of logit j is the probability that draft j is accepted given all before it were",
    "draft": "slot j of a block predicts position start+1+j; start is the bonus token's position",
    "ring": "position p lives in row p mod window; rejected positions are never written",
    "slots": "0 to slots-1 serve requests, index slots is scratch for padding rows",
    "taps": "id L is the output of decoder layer L, -1 the embedding output",
}

# Typical seconds of each stage on two cores: a fixed part, and one for each GiB of float32 weights.
STAGES: Mapping[str, tuple[float, float]] = {
    "read checkpoints": (0.5, 1.0),
    "plan": (3.0, 0.0),  # imports torch and the exporter
    "write weights": (0.3, 5.0),
    "record vectors": (3.0, 8.0),
    "export graphs": (16.0, 0.0),
    "compile engines": (0.2, 0.0),
    "write manifest": (0.1, 1.0),
    "swap in": (0.1, 1.0),
}


_NOT_REPRODUCIBLE = (
    "this system doesn't let a process do without address randomisation (personality): the engines work, but another "
    "build of them may differ in a few bytes, and so in the bundle's identity"
)
_PRECISION_BYTES = {"f32": 4, "f16": 2, "bf16": 2}  # of most weights


@dataclass(frozen=True)
class BuildOptions:
    """What to build from what. `profile` already holds the command line's overrides; `plugins` is a library of kernels
    that the bundle takes along. With `no_weights` the bundle travels without ``weights.bin``, for `builder.fill`."""

    target: Path
    drafter: Path
    out: Path
    profile: Profile = field(default_factory=Profile)
    overwrite: bool = False
    plugins: Path | None = None
    no_weights: bool = False


@dataclass(frozen=True)
class StageEvent:
    """A stage begins: the `index`-th (from 0) of `count`, with seconds `elapsed` so far and an estimate of those
    `left`.
    """

    name: str
    index: int
    count: int
    elapsed: float
    left: float


class Progress(Protocol):
    """Who wants to hear how a build goes."""

    def stage(self, event: StageEvent) -> None: ...

    def warning(self, text: str) -> None: ...


class _Clock:
    """Runs the stages in order, times them, and estimates what is left."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._began = time.perf_counter()
        self.gib = 0.5  # of weights, until the checkpoints are read
        self.compile_seconds = STAGES["compile engines"][0]  # until the back end is known
        self.seconds: dict[str, float] = {}
        self.built: tuple[EngineBuilt, ...] = ()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        names = list(STAGES)
        index = names.index(name)
        began = time.perf_counter()
        # The machine's speed so far, against the typical one, corrects the estimate; early stages say little.
        typical = sum(self._typical(done) for done in names[:index])
        speed = (sum(self.seconds.values()) + 3.0) / (typical + 3.0)
        left = speed * sum(self._typical(todo) for todo in names[index:])
        self._progress.stage(StageEvent(name, index, len(names), began - self._began, left))
        yield
        self.seconds[name] = time.perf_counter() - began

    def _typical(self, name: str) -> float:
        if name == "compile engines":
            return self.compile_seconds
        fixed, per_gib = STAGES[name]
        return fixed + per_gib * self.gib

    @property
    def total(self) -> float:
        return time.perf_counter() - self._began


def build(options: BuildOptions, progress: Progress) -> BuildReport:
    """Build the bundle `options.out`. Nothing is written there unless all of it succeeds.

    With `overwrite`, an output that was made from the same files, options and versions, and is whole, is left as it is.

    Raises CheckpointError, ProfileError, BundleError or BackendUnavailable for what the user can mend, OSError from the
    system.
    """
    from builder import backends

    profile = options.profile
    check_profile(profile)
    bundle.check_output(options.out, overwrite=options.overwrite)
    backends.check(profile.backend)
    gpu = resolve_gpu(profile)
    if options.plugins is not None:
        check_library(options.plugins, profile.backend, gpu)
    clock = _Clock(progress)
    with clock.stage("read checkpoints"):
        from builder import checkpoints

        target = checkpoints.load_target(options.target)
        drafter = checkpoints.load_drafter(options.drafter, target)
        elements = sum(
            math.prod(tensors.shape(name)) for tensors in (target.tensors, drafter.tensors) for name in tensors.names()
        )
        # Until duplicates are dropped, so at most this much.
        weight_bytes = _PRECISION_BYTES[profile.precision] * elements
        clock.gib = 4 * elements / 2**30
    with clock.stage("plan"):
        plan = resolve(profile, target.spec, drafter.spec)
        for warning in plan.warnings:
            progress.warning(warning)
        sources = {"target": target.source, "drafter": drafter.source}
        made = recipe(profile, gpu, plan, sources, options.plugins, options.no_weights)
        if options.overwrite and (manifest := made_by(options.out, made, options.no_weights)):
            return replace(_report(options, manifest, plan.warnings, clock, made), unchanged=True)
        kernels = options.plugins is not None
        backend = backends.get(backends.BackendOptions(profile.backend, profile.precision, plan.serving, gpu, kernels))
        clock.compile_seconds = backend.compile_seconds(target.spec, plan.limits)
        state = tuple(backend.state(target.spec, drafter.spec, plan.limits))
        working = backend.working_bytes(target.spec, plan.limits, state)
        memory = _memory(state, plan.limits.slots, weight_bytes, working)
        # What a GPU will serve needs no memory here.
        check_memory(memory, plan.limits, None if BACKENDS[profile.backend].architectures else available_memory())
        _check_disk(options.out, weight_bytes)
    with bundle.Staging(options.out, overwrite=options.overwrite) as staging:
        manifest = _fill(staging.directory, target, drafter, options, plan, backend, state, clock)
        if not all(engine.reproducible for engine in clock.built):
            progress.warning(_NOT_REPRODUCIBLE)
        report = _report(options, manifest, plan.warnings, clock, made)
        _write_json(staging.directory / REPORT_NAME, report_json(report))
        if options.no_weights:
            (staging.directory / WEIGHTS_NAME).unlink()
        with clock.stage("swap in"):
            staging.commit()
    return _report(options, manifest, plan.warnings, clock, made)


def _fill(
    directory: Path,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
    plan: Resolution,
    backend: BackendBuilder,
    state: tuple[StateTensor, ...],
    clock: _Clock,
) -> Manifest:
    """Write everything but the report into `directory`."""
    from builder import export, vectors, weights

    limits, plugins = plan.limits, options.plugins
    with clock.stage("write weights"):
        index = weights.write_weights(directory, target, drafter, limits, options.profile.precision)
    # Before the export: the weights are mapped then, and the exporter's own memory would come on top.
    with clock.stage("record vectors"):
        vectors.record(directory, target.spec, drafter.spec, index, limits)
    with clock.stage("export graphs"):
        graphs = export.export_graphs(target.spec, drafter.spec, limits)
    with clock.stage("compile engines"):
        engines = backend.compile(graphs, index, limits, directory)
        clock.built = backend.built
    with clock.stage("write manifest"):
        if target.tokenizer is not None:
            _write_tokenizer(directory, target.tokenizer)
        manifest = Manifest(
            format=FORMAT_VERSION,
            producer=f"{DISTRIBUTION} {VERSION}",
            identity="",
            backend=replace(backend.describe(), precision=options.profile.precision),
            limits=limits,
            serving=plan.serving,
            models=_models(target.spec, drafter.spec, target.tokenizer),
            engines=tuple(engines),
            state=state,
            memory=_memory(
                state,
                limits.slots,
                backend.loaded_bytes(graphs, index),
                backend.working_bytes(target.spec, limits, state),
            ),
            plugins=() if plugins is None else (copy_library(directory, plugins, options.profile.backend),),
            conventions=CONVENTIONS,
            target=_source(target.source),
            drafter=_source(drafter.source),
            files={},
        )
        return bundle.seal(directory, manifest)


def _check_disk(out: Path, weight_bytes: int) -> None:
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    # The graphs, vectors and tokenizer come to a few tens of MiB.
    needed = weight_bytes + (32 << 20)
    if free < needed:
        remedy = "Free some space, or choose another --out"
        raise BundleError(
            out, "not enough disk space", expected=human_bytes(needed), found=human_bytes(free), remedy=remedy
        )


def _models(target: TargetSpec, drafter: DrafterSpec, tokenizer: TokenizerData | None) -> Models:
    stops = set(target.eos_token_ids) | set(tokenizer.eos_token_ids if tokenizer else ())
    return Models(
        vocab_size=target.vocab_size,
        tap_width=len(drafter.taps) * target.hidden_size,
        has_confidence=drafter.confidence != "none",
        eos_token_ids=tuple(sorted(stops)),
        target=_object(target),
        drafter=_object(drafter),
    )


def _object(spec: TargetSpec | DrafterSpec) -> dict[str, object]:
    plain = to_plain(spec)
    return plain if isinstance(plain, dict) else {}


def _memory(state: tuple[StateTensor, ...], slots: int, weights: int, working: int) -> Memory:
    """Bytes that serving takes: the `weights`, the back end's `state` for every slot and the scratch slot, and what it
    works in."""
    per_tensor = [(tensor.kind, state_bytes(tensor, 1)) for tensor in state]
    per_slot = sum(size for _, size in per_tensor)
    ring = sum(size for kind, size in per_tensor if kind == "ring")
    return Memory(weights, per_slot, ring, weights + (slots + 1) * per_slot + working)


def _source(source: SourceInfo) -> Source:
    return Source(source.packaging, source.name, dict(source.files))


def _write_tokenizer(directory: Path, tokenizer: TokenizerData) -> None:
    path = directory / TOKENIZER_FILE
    path.parent.mkdir()
    path.write_text(tokenizer.tokenizer_json, encoding="utf-8", newline="")
    config = {
        "chat_template": tokenizer.chat_template,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
    }
    _write_json(directory / TOKENIZER_CONFIG_FILE, config)


def _write_json(path: Path, data: Mapping[str, object]) -> None:
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=True) + "\n"
    path.write_text(text, encoding="ascii", newline="\n")


def _report(
    options: BuildOptions, manifest: Manifest, warnings: tuple[str, ...], clock: _Clock, recipe: str
) -> BuildReport:
    return BuildReport(
        out=options.out.absolute(),
        manifest=manifest,
        warnings=warnings,
        seconds=dict(clock.seconds),
        total_seconds=clock.total,
        peak_memory=peak_memory(),
        left_out=(WEIGHTS_NAME,) if options.no_weights else (),
        engines=clock.built,
        recipe=recipe,
    )
