"""What a bundle is, needs and can do, for people and (``--json``) for programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runtime import machine
from runtime.bundle import FILL, Check, check_machine, open_bundle
from runtime.errors import DSparkError
from runtime.machine import human_bytes
from runtime.manifest import WEIGHTS_NAME, to_plain


def inspect(path: Path, check: Check = "quick") -> dict[str, object]:
    """The facts of the bundle at `path`, with stable keys. Raises BundleError."""
    filled = (Path(path) / WEIGHTS_NAME).exists()
    bundle = open_bundle(path, check, weights=filled)
    manifest = bundle.manifest
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
        "memory_available": machine.available_memory(),
        "target": {**_plain_object(manifest.target), "spec": to_plain(manifest.models.target)},
        "drafter": {**_plain_object(manifest.drafter), "spec": to_plain(manifest.models.drafter)},
        "vocab_size": manifest.models.vocab_size,
        "eos_token_ids": list(manifest.models.eos_token_ids),
        "has_confidence": manifest.models.has_confidence,
        "has_tokenizer": bundle.has_tokenizer,
        "engines": to_plain(manifest.engines),
        "plugins": to_plain(manifest.plugins),
        "conventions": dict(manifest.conventions),
        "runs_here": problem is None,
        "problem": problem,
    }


def describe(path: Path, check: Check = "quick") -> list[str]:
    """`inspect` as lines of text."""
    facts = inspect(path, check)
    manifest = open_bundle(path, "quick", weights=bool(facts["filled"])).manifest
    backend, limits, memory, serving = manifest.backend, manifest.limits, manifest.memory, manifest.serving
    size = human_bytes(sum(entry.size for entry in manifest.files.values()))
    weights, slot = human_bytes(memory.weights), human_bytes(memory.per_slot)
    drafts = f"at most {serving.max_draft} of {limits.block_size} drafts a round"
    rows = {
        "bundle": f"{facts['path']} ({size}, {len(manifest.files)} files, {check} check passed)",
        "built by": f"{manifest.producer}, format {manifest.format}, identity {manifest.identity[:16]}",
        "target": f"{manifest.target.name} ({manifest.target.packaging}): {_target_shape(manifest.models.target)}",
        "drafter": f"{manifest.drafter.name} ({manifest.drafter.packaging}): {_drafter_shape(manifest.models.drafter)}",
        "back end": f"{backend.name}, {backend.library} >= {backend.version}, {backend.precision}",
        "batches": f"{', '.join(map(str, limits.batches))}; {limits.slots} slot(s)",
        "limits": f"{limits.max_seq_len} tokens a sequence, prefill chunks of {limits.prefill_chunk}",
        "ring": f"window {limits.window}, {human_bytes(memory.ring_per_slot)} a slot",
        "drafting": f"{drafts}, cut below confidence {serving.confidence_threshold:g}",
        "memory": f"{human_bytes(memory.total)}: weights {weights}, {slot} a slot ({limits.slots} + 1 for padding)",
        "weights": "in the bundle" if facts["filled"] else "not filled yet",
        "prompts": "text, chat and token ids" if facts["has_tokenizer"] else "token ids (the target has no tokenizer)",
        "here": "runs on this machine" if facts["runs_here"] else f"can't run: {facts['problem']}",
    }
    return [f"{name:<9} {text}" for name, text in rows.items()]


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
