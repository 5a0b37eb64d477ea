"""Small examples that tests of several folders share: specs, a manifest, and a record of the stages of a build."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from builder.spec import DrafterSpec, RopeSpec, TargetSpec, TokenizerData
from runtime.engine_records import RECORDS_NAME, STAGES, EngineRecord, EngineRecords, TensorRecord
from runtime.manifest import (
    FORMAT_VERSION,
    KERNELS_FILE,
    Backend,
    EngineFile,
    Limits,
    Manifest,
    Memory,
    Models,
    Plugin,
    Serving,
    Source,
    StateTensor,
    to_plain,
)
from runtime.version import DISTRIBUTION, VERSION
from runtime.widths import Widths

TARGET = TargetSpec(
    family="llama",
    vocab_size=97,
    hidden_size=24,
    intermediate_size=48,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeSpec(1e4),
    max_positions=4096,
    qk_norm=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    tied=True,
    eos_token_ids=(2,),
)
DRAFTER = DrafterSpec(
    block_size=7,
    taps=(0, 2),
    num_target_layers=4,
    mask_token_id=16,
    vocab_size=97,
    hidden_size=24,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeSpec(1e4),
    max_positions=4096,
    attention_bias=False,
    markov="vanilla",
    markov_rank=4,
    confidence="markov",
    own_embeddings=False,
    own_lm_head=False,
)
TOKENIZER = TokenizerData('{"model": "é"}\r\n', "{{ messages }}", None, "</s>", (5, 2))


@dataclass(frozen=True)
class Tensors:
    """A source with shapes only."""

    shapes: Mapping[str, tuple[int, ...]]

    def names(self) -> frozenset[str]:
        return frozenset(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str) -> object:
        raise NotImplementedError


@dataclass
class Stages:
    """What the stand-ins were called with, and the error that one of them raises (`fail` maps its name to it)."""

    calls: list[str] = field(default_factory=list)
    fail: dict[str, BaseException] = field(default_factory=dict)
    tokenizer: TokenizerData | None = TOKENIZER
    target: TargetSpec = TARGET
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"a": (10, 24), "b": (24,)})

    def enter(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise self.fail[name]


FILES = {"weights.bin": b"w" * 5000, "target.b1.onnx": b"target", "tokenizer/tokenizer.json": b"{}"}


def example_manifest() -> Manifest:
    """A manifest as a build leaves it before it is sealed."""
    return Manifest(
        format=FORMAT_VERSION,
        producer=f"{DISTRIBUTION} {VERSION}",
        identity="",
        backend=Backend("ort-cpu", "onnxruntime", "1.20.0", "any", "f32"),
        limits=Limits((1, 2), 2, 16, 64, 4, 8),
        serving=Serving(3, 0.25),
        models=Models(97, 24, True, (2,), {"family": "llama", "num_layers": 4}, {"taps": [0, 2], "markov": "none"}),
        # One file stands for all engines, so that the tests have few files to count.
        engines=tuple(EngineFile(graph, n, "target.b1.onnx") for graph in ("target", "draft", "seed") for n in (1, 2)),
        state=(StateTensor("taps", "taps", (5, 24), "float32"),),
        memory=Memory(5000, 480, 0, 5000 + 3 * 480),
        plugins=(),
        conventions={"ring": "position p lives in row p mod window"},
        target=Source("huggingface", "tiny", {"config.json": "00"}),
        drafter=Source("deepspec", "tiny-dspark", {"config.json": "11"}),
        files={},
    )


def example_records(kernels: bool) -> list[EngineRecord]:
    """Of the engines that a TensorRT bundle of `example_manifest` has: with kernels the taps are updated in place, and
    else copied."""
    manifest = example_manifest()
    limits, widths = manifest.limits, Widths.of(manifest.limits, manifest.serving)
    taps = (limits.slots + 1, *manifest.state[0].shape)
    updated = {"taps.new": "taps"}
    return [
        EngineRecord(
            file=f"engines/{stage}.b{batch}.w{width}.engine",
            stage=stage,
            batch=batch,
            width=width,
            layers={"PLUGIN_V3": 3, "CAST": 1, "SHUFFLE": 2} if kernels else {"SCATTER": 1, "GATHER": 2},
            plugins={"Linear": 2, "SlotWrite": 1} if kernels else {},
            inputs=(TensorRecord("target.fc", "float32", (24, 24)), TensorRecord("taps", "float32", taps)),
            outputs=(TensorRecord("taps.new", "float32", taps),),
            weights=("target.fc",),
            aliased=updated if kernels else {},
            copied={} if kernels else updated,
            weight_bytes=2304,
            copied_bytes=0 if kernels else 1440,
            engine_bytes=100 + width,
            captured=True,
        )
        for stage in STAGES
        for batch in limits.batches
        for width in widths.of_stage(stage)
    ]


RTX = Backend("tensorrt-rtx", "tensorrt-rtx-cu13-bindings", "1.7.1.116", "sm_89", "bf16")


def tensorrt_example(
    *,
    kernels: bool = True,
    alter: Callable[[EngineRecord], EngineRecord] = lambda record: record,
    without: tuple[str, ...] = (),
    backend: Backend = RTX,
) -> dict[str, object]:
    """Keywords for the fixture ``make_bundle`` that make a TensorRT bundle, whole but for the files `without`; the
    records that it holds are changed by `alter`, its engines aren't."""
    records = example_records(kernels)
    library = b"kernels"
    files = {record.file: b"e" * record.engine_bytes for record in records} | {
        "weights.bin": b"w" * 5000,
        "weights.json": b"{}",
        RECORDS_NAME: json.dumps(to_plain(EngineRecords(tuple(map(alter, records))))).encode(),
    }
    if kernels:
        files[KERNELS_FILE] = library
    return {
        "backend": backend,
        "engines": tuple(EngineFile(r.stage, r.batch, r.file, r.width) for r in records),
        "plugins": (Plugin("dspark", hashlib.sha256(library).hexdigest()[:12]),) if kernels else (),
        "files": {name: content for name, content in files.items() if name not in without},
        "memory": Memory(5000, 480, 0, 5000 + 3 * 480 * (1 if kernels else 2) + 700),
    }
