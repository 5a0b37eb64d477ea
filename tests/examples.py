"""Small examples that tests of several folders share: specs, a manifest, and a record of the stages of a build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from builder.spec import DrafterSpec, RopeSpec, TargetSpec, TokenizerData
from runtime.manifest import (
    FORMAT_VERSION,
    Backend,
    EngineFile,
    Limits,
    Manifest,
    Memory,
    Models,
    Serving,
    Source,
    StateTensor,
)
from runtime.version import DISTRIBUTION, VERSION

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
