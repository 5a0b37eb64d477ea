"""What a checkpoint is, once its packaging has been normalised away: frozen facts and a lazy source of tensors.

Everything after `builder.checkpoints` sees only these types. Model families differ in data here (a flag, a count),
never in branches further down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding. `kind` is ``default``, ``linear`` or ``llama3``; the factors are unused by ``default``."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclass(frozen=True)
class TargetSpec:
    """A decoder-only target (Llama or Qwen3 shape: pre-norm, GQA, SwiGLU).

    `qk_norm` is Qwen3's RMSNorm over each head of q and k. `qkv_bias` and `o_bias` are the attention's biases,
    `mlp_bias` the MLP's. `tied` means that lm_head is the embedding matrix, and that no ``lm_head.weight`` exists in
    the source.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_positions: int
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class DrafterSpec:
    """A DSpark drafter (Qwen3-shaped layers over taps of the target).

    `taps` are target layer ids in order (``-1`` is the embedding output, ``L`` the output of layer ``L``). `markov` is
    ``none``, ``vanilla``, ``gated`` or ``rnn`` with rank `markov_rank`. `confidence` is ``none``, ``hidden`` (from the
    hidden state alone) or ``markov`` (hidden state and W1 row of the previous token). `own_embeddings` / `own_lm_head`
    say whether the checkpoint brings its own, otherwise the target's are used.
    """

    block_size: int
    taps: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_positions: int
    attention_bias: bool
    markov: str
    markov_rank: int
    confidence: str
    own_embeddings: bool
    own_lm_head: bool


class TensorSource(Protocol):
    """Tensors by canonical name, read one at a time. Shapes and dtypes are known without reading any data.

    Names are those of the Hugging Face / DeepSpec state dicts (``model.layers.0.self_attn.q_proj.weight``,
    ``fc.weight`` …) whatever the packaging on disk.
    """

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor in float32: where the file has it so, a read-only view of the mapped file. Raises
        CheckpointError."""
        ...


@dataclass(frozen=True)
class TokenizerData:
    """A tokenizer as the runtime needs it.

    `tokenizer_json` is the text of a Hugging Face ``tokenizer.json``; `chat_template` is jinja2 source or None;
    `bos_token` / `eos_token` are their texts, which templates refer to; `eos_token_ids` end a generation by default.
    """

    tokenizer_json: str
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SourceInfo:
    """Where a checkpoint came from: packaging name (``deepspec``, ``huggingface``, ``gguf``), its directory's or file's
    base name, and the sha256 of each file read."""

    packaging: str
    name: str
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetCheckpoint:
    path: Path
    spec: TargetSpec
    tensors: TensorSource
    tokenizer: TokenizerData | None
    source: SourceInfo


@dataclass(frozen=True)
class DrafterCheckpoint:
    path: Path
    spec: DrafterSpec
    tensors: TensorSource
    source: SourceInfo
