"""What tests build: bundles of tiny pairs, through the product's own stages."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from builder.backends.ort_cpu import OrtCpu
from builder.bundle import seal
from builder.export import Graph, export_drafter, export_graphs
from builder.profile import Profile
from builder.spec import DrafterCheckpoint, DrafterSpec, SourceInfo, TargetCheckpoint, TargetSpec
from builder.weights import write_weights
from runtime.bundle import open_bundle
from runtime.manifest import FORMAT_VERSION, PACKED_NAME, Limits, Manifest, Memory, Models, Serving, Source
from runtime.sessions.base import SeedRows, TargetRows

GOLDEN = Path(os.environ.get("DSPARK_GOLDEN", Path(__file__).parent / "golden"))
"""The golden vectors in use."""

TINY_PAIRS = Path(__file__).parent / "golden" / "e2e"
"""The tiny trained pairs of this repository, whose numbers tests outside of tests/golden may rely on."""


@dataclass(frozen=True)
class Tensors:
    """A TensorSource in memory."""

    data: Mapping[str, NDArray[np.float32]]

    def names(self) -> frozenset[str]:
        return frozenset(self.data)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.data[name].shape)

    def read(self, name: str) -> NDArray[np.float32]:
        return self.data[name]


def random_target(drafter: DrafterSpec, embeddings: Path | None = None) -> TargetCheckpoint:
    """A random Llama target that a golden drafter fits, with the embeddings that the case brings, if any."""
    hidden, vocab = drafter.hidden_size, drafter.vocab_size
    spec = TargetSpec(
        "llama", vocab, hidden, 32, drafter.num_target_layers, 2, 1, 8, 1e-6, drafter.rope, 512,
        False, False, False, False, True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> NDArray[np.float32]:
        return (torch.randn(shape, generator=generator) * 0.1).numpy()

    ones = np.ones(hidden, np.float32)
    data = {"model.embed_tokens.weight": random(vocab, hidden), "model.norm.weight": ones}
    if embeddings is not None:
        data |= load_file(embeddings)
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        data |= {
            f"{layer}.input_layernorm.weight": ones,
            f"{layer}.post_attention_layernorm.weight": ones,
            f"{layer}.self_attn.q_proj.weight": random(16, hidden),
            f"{layer}.self_attn.k_proj.weight": random(8, hidden),
            f"{layer}.self_attn.v_proj.weight": random(8, hidden),
            f"{layer}.self_attn.o_proj.weight": random(hidden, 16),
            f"{layer}.mlp.gate_proj.weight": random(32, hidden),
            f"{layer}.mlp.up_proj.weight": random(32, hidden),
            f"{layer}.mlp.down_proj.weight": random(hidden, 32),
        }
    return TargetCheckpoint(Path("random"), spec, Tensors(data), None, SourceInfo("test", "random"))


@cache
def exported_drafter(target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> Mapping[str, Graph]:
    """`export_drafter` once for whoever tests the same drafter: passes work on copies."""
    return export_drafter(target, drafter, limits)


@cache
def exported_pair(target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> Mapping[str, Graph]:
    """`export_graphs` once for whoever tests the same pair."""
    return export_graphs(target, drafter, limits)


def drafter_engines(
    dest: Path, target: TargetCheckpoint, drafter: DrafterCheckpoint, limits: Limits, debug: bool = False
) -> Manifest:
    """Weights and the drafter's engines in `dest`, and a manifest that a session can open."""
    return _engines(dest, target, drafter, limits, debug, exported_drafter(target.spec, drafter.spec, limits))


def pair_engines(
    dest: Path, target: TargetCheckpoint, drafter: DrafterCheckpoint, limits: Limits, debug: bool = False
) -> Manifest:
    """Weights and every engine in `dest`, and a manifest that a session can open."""
    return _engines(dest, target, drafter, limits, debug, export_graphs(target.spec, drafter.spec, limits))


def _engines(
    dest: Path,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    limits: Limits,
    debug: bool,
    graphs: Mapping[str, Graph],
) -> Manifest:
    index = write_weights(dest, target, drafter, limits)
    backend = OrtCpu(debug=debug)
    return Manifest(
        format=FORMAT_VERSION, producer="test", identity="", backend=backend.describe(), limits=limits,
        serving=Serving(limits.block_size, 0.0),
        models=Models(
            target.spec.vocab_size, len(drafter.spec.taps) * drafter.spec.hidden_size,
            drafter.spec.confidence != "none", target.spec.eos_token_ids, {}, {},
        ),
        engines=backend.compile(graphs, index, limits, dest), state=backend.state(target.spec, drafter.spec, limits),
        memory=Memory(0, 0, 0, 0), plugins=(), conventions={},
        target=Source("", "", {}), drafter=Source("", "", {}), files={},
    )  # fmt: skip


TINY = Profile(batches=(1, 2, 4), window=64, max_seq_len=128, prefill_chunk=4, max_draft=5, confidence_threshold=0.0)
"""Of the bundles that `tiny_bundle` (tests/conftest.py) builds."""


def tiny_prompts(pair: str) -> list[dict[str, Any]]:
    """The prompts of a tiny pair (``input_ids``, ``greedy_new_tokens`` …)."""
    prompts: list[dict[str, Any]] = json.loads((TINY_PAIRS / pair / "prompts.json").read_text())["prompts"]
    return prompts


def copy_bundle(bundle: Path, to: Path, files: Mapping[str, bytes | None]) -> Path:
    """A copy of a bundle with `files` replaced, added or removed (None), hashes made good again."""
    shutil.copytree(bundle, to, ignore=shutil.ignore_patterns(PACKED_NAME))
    for name, content in files.items():
        path = to / name
        if content is None:
            path.unlink()
            continue
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    seal(to, open_bundle(bundle).manifest)
    return to


class SilentProgress:
    """For `builder.build.build`: keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def stage(self, event: object) -> None:
        pass

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def target_rows(ids: NDArray[np.int64], start: NDArray[np.int64], slot: NDArray[np.int64]) -> TargetRows:
    """``ids[b, w]`` at positions ``start[b] …`` for a session, tap rows from the slot's first."""
    b, w = ids.shape
    return TargetRows(ids.reshape(-1), np.full(b, w), start, slot, np.zeros(b, np.int64))


def seed_rows(start: NDArray[np.int64], count: int, slot: NDArray[np.int64]) -> SeedRows:
    """`count` tap rows of each slot."""
    return SeedRows(start, np.full(len(slot), count), slot)


def kernel_library(path: Path, elf: Sequence[int] = (86, 89, 120), ptx: Sequence[int] = ()) -> Path:
    """A file that looks like a library of kernels to whoever builds a bundle: with code for those architectures, which
    is none."""
    entries = b"".join(
        struct.pack("<HHIQIIIIQ16x8x", kind, 0x101, 64, 8, 0, 0, 0x10008, number, 0x11) + b"\0" * 8
        for kind, numbers in ((2, elf), (1, ptx))
        for number in numbers
    )
    fat_binary = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    path.write_bytes(b"\x7fELF" + b"\0" * 60 + b"dspark_markov_chain\0" + fat_binary + b"\0" * 64)
    return path
