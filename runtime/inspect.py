"""What a bundle is, needs and can do, for people and (``--json``) for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from runtime.bundle import FILL, Bundle, Check, check_machine, memory_of, open_bundle
from runtime.engine_records import EngineRecord, read_records
from runtime.engine_view import EngineView, view_engines
from runtime.errors import DSparkError
from runtime.machine import human_bytes
from runtime.manifest import WEIGHTS_NAME, Backend, to_plain
from runtime.preflight import Preflight
from runtime.tensorrt_flavours import FLAVOURS


def inspect(path: Path, check: Check = "quick", layers: bool = False) -> dict[str, object]:
    """The facts of the bundle at `path`, with stable keys; with `layers`, TensorRT engines are opened for theirs.

    Raises:
        BundleError, BackendUnavailable: no bundle, or engines that can't be opened here for their layers.
    """
    bundle = _open(path, check)
    return _facts(bundle, check, view_engines(bundle) if layers else {})


def _open(path: Path, check: Check) -> Bundle:
    return open_bundle(path, check, weights=(Path(path) / WEIGHTS_NAME).exists())


def _facts(bundle: Bundle, check: Check, views: Mapping[str, EngineView]) -> dict[str, object]:
    manifest = bundle.manifest
    filled = (bundle.path / WEIGHTS_NAME).exists()
    memory = memory_of(bundle)
    records = {record.file: record for record in _records(bundle)}
    try:
        check_machine(bundle)
        problem = None if filled else f"its weights are not there. {FILL}"
    except DSparkError as error:
        problem = str(error)
    return {
        "path": str(bundle.path),
        "check": check,
        "format": manifest.format,
        "producer": manifest.producer,
        "identity": manifest.identity,
        "size": sum(entry.size for entry in manifest.files.values()),
        "filled": filled,
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "backend": to_plain(manifest.backend),
        "limits": to_plain(manifest.limits),
        "serving": to_plain(manifest.serving),
        "memory": to_plain(manifest.memory),
        "memory_needed": {**memory.needed, "total": memory.total},
        "memory_available": memory.free,
        "memory_on": memory.on,
        "target": {**_plain_object(manifest.target), "spec": to_plain(manifest.models.target)},
        "drafter": {**_plain_object(manifest.drafter), "spec": to_plain(manifest.models.drafter)},
        "vocab_size": manifest.models.vocab_size,
        "eos_token_ids": list(manifest.models.eos_token_ids),
        "has_confidence": manifest.models.has_confidence,
        "has_tokenizer": bundle.has_tokenizer,
        "engines": [
            {
                **_plain_object(engine),
                "size": manifest.files[engine.file].size,
                "contents": _contents(records.get(engine.file)),
                "view": to_plain(views.get(engine.file)),
            }
            for engine in manifest.engines
        ],
        "plugins": to_plain(manifest.plugins),
        "conventions": dict(manifest.conventions),
        "runs_here": problem is None,
        "problem": problem,
    }


def describe(path: Path, check: Check = "quick", layers: bool = False) -> list[str]:
    """`inspect` as lines of text."""
    bundle = _open(path, check)
    views = view_engines(bundle) if layers else {}
    facts = _facts(bundle, check, views)
    manifest = bundle.manifest
    limits, serving = manifest.limits, manifest.serving
    size = human_bytes(sum(entry.size for entry in manifest.files.values()))
    drafts = f"at most {serving.max_draft} of {limits.block_size} drafts a round"
    rows = {
        "bundle": f"{facts['path']} ({size}, {len(manifest.files)} files, {check} check passed)",
        "built by": f"{manifest.producer}, format {manifest.format}, identity {manifest.identity[:16]}",
        "target": f"{manifest.target.name} ({manifest.target.packaging}): {_target_shape(manifest.models.target)}",
        "drafter": f"{manifest.drafter.name} ({manifest.drafter.packaging}): {_drafter_shape(manifest.models.drafter)}",
        "back end": _backend(manifest.backend),
        "batches": f"{', '.join(map(str, limits.batches))}; {limits.slots} slot(s)",
        "limits": f"{limits.max_seq_len} tokens a sequence, prefill chunks of {limits.prefill_chunk}",
        "ring": f"window {limits.window}, {human_bytes(manifest.memory.ring_per_slot)} a slot",
        "drafting": f"{drafts}, cut below confidence {serving.confidence_threshold:g}",
        "memory": _memory(memory_of(bundle)),
        "slots": f"{human_bytes(manifest.memory.per_slot)} each ({limits.slots} + 1 for padding)",
        "weights": "in the bundle" if facts["filled"] else "not filled yet",
        "prompts": "text, chat and token ids" if facts["has_tokenizer"] else "token ids (the target has no tokenizer)",
        "here": "runs on this machine" if facts["runs_here"] else f"can't run: {facts['problem']}",
    }
    table = _table(_records(bundle))
    listed = [line for file, view in views.items() for line in _layers(file, view)]
    return [*(f"{name:<9} {text}" for name, text in rows.items()), *table, *listed]


def _records(bundle: Bundle) -> tuple[EngineRecord, ...]:
    return read_records(bundle.path) if bundle.manifest.backend.name in FLAVOURS else ()


def _contents(record: EngineRecord | None) -> dict[str, object] | None:
    """What went into an engine."""
    if record is None:
        return None
    return {
        "layers": dict(record.layers),
        "layer_count": sum(record.layers.values()),
        "plugins": dict(record.plugins),
        "weights": len(record.weights),
        "weight_bytes": record.weight_bytes,
        "aliased": sorted(record.aliased.values()),
        "copied": sorted(record.copied.values()),
        "copied_bytes": record.copied_bytes,
        "captured": record.captured,
    }


def _table(records: Iterable[EngineRecord]) -> list[str]:
    """A line an engine, under a heading."""
    heading = ("engine", "batch", "width", "size", "weights", "state", "layers", "of them", "plugins")
    rows = [heading, *map(_row, records)]
    if len(rows) == 1:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _row(record: EngineRecord) -> tuple[str, ...]:
    state = [f"{len(record.aliased)} in place"] if record.aliased else []
    if record.copied:
        state.append(f"{len(record.copied)} copied, {human_bytes(record.copied_bytes)} a call")
    return (
        record.stage,
        str(record.batch),
        str(record.width),
        human_bytes(record.engine_bytes),
        f"{len(record.weights)} of {human_bytes(record.weight_bytes)}",
        ", ".join(state) or "none",
        f"{sum(record.layers.values())}{'' if record.captured else ', not captured'}",
        _counts(record.layers, 3),
        _counts(record.plugins),
    )


def _counts(counts: Mapping[str, int], most: int | None = None) -> str:
    """``30 Linear, 12 CausalAttention``: the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {name}" for name, count in ordered[:most]) or "none"


def _layers(file: str, view: EngineView) -> list[str]:
    head = f"{file}: {len(view.layers)} layers as built, {human_bytes(view.activation_bytes)} while it runs"
    return [head, *(f"  {name}" for name in view.names())]


def _backend(backend: Backend) -> str:
    exact = backend.name in FLAVOURS
    gpu = "" if backend.arch == "any" else f", for {backend.arch}"
    return f"{backend.name}, {backend.library} {'' if exact else '>= '}{backend.version}{gpu}, {backend.precision}"


def _memory(memory: Preflight) -> str:
    free = "unknown" if memory.free is None else human_bytes(memory.free)
    where = "the GPU" if memory.on == "gpu" else "this machine"
    return f"{human_bytes(memory.total)} of {free} free on {where}: {memory.kinds()}"


def _target_shape(spec: Mapping[str, object]) -> str:
    layers, width, vocabulary = (spec.get(key) for key in ("num_layers", "hidden_size", "vocab_size"))
    return f"{spec.get('family')}, {layers} layers of {width}, vocabulary {vocabulary}"


def _drafter_shape(spec: Mapping[str, object]) -> str:
    layers, block, taps, markov, rank, confidence = (
        spec.get(key) for key in ("num_layers", "block_size", "taps", "markov", "markov_rank", "confidence")
    )
    head = "no Markov head" if markov == "none" else f"{markov} Markov head of rank {rank}"
    return f"{layers} layers, block {block}, taps {taps}, {head}, confidence head: {confidence}"


def _plain_object(value: object) -> dict[str, object]:
    plain = to_plain(value)
    return plain if isinstance(plain, dict) else {}
