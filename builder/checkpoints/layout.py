"""Which tensors a checkpoint must hold, with their shapes, and the check that it does. Only headers are looked at."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from builder.errors import CheckpointError
from builder.spec import DrafterSpec, TargetSpec

FLOAT_DTYPES = frozenset({"F32", "F16", "BF16"})

# Buffers that older versions of transformers saved beside the weights; they follow from the config.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's header: shape, dtype as safetensors spells it (``F32``, ``BF16`` …) and the file that holds it."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


def harmless(name: str) -> bool:
    """Whether an unexpected tensor of this name may be ignored."""
    return _HARMLESS.search(name) is not None


def _decoder_layer(
    prefix: str, spec: TargetSpec | DrafterSpec, *, qk_norm: bool, qkv_bias: bool, o_bias: bool, mlp_bias: bool
) -> Shapes:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: Shapes = {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }
    for name, rows, columns, bias in (
        ("self_attn.q_proj", q, hidden, qkv_bias),
        ("self_attn.k_proj", kv, hidden, qkv_bias),
        ("self_attn.v_proj", kv, hidden, qkv_bias),
        ("self_attn.o_proj", hidden, q, o_bias),
        ("mlp.gate_proj", inner, hidden, mlp_bias),
        ("mlp.up_proj", inner, hidden, mlp_bias),
        ("mlp.down_proj", hidden, inner, mlp_bias),
    ):
        shapes[f"{prefix}{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    if qk_norm:
        shapes[f"{prefix}self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (spec.head_dim,)
    return shapes


def target_shapes(spec: TargetSpec) -> Shapes:
    """Name → shape of every tensor of a target (``lm_head.weight`` only when it isn't tied)."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    for index in range(spec.num_layers):
        shapes |= _decoder_layer(
            f"model.layers.{index}.",
            spec,
            qk_norm=spec.qk_norm,
            qkv_bias=spec.qkv_bias,
            o_bias=spec.o_bias,
            mlp_bias=spec.mlp_bias,
        )
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def drafter_shapes(spec: DrafterSpec) -> Shapes:
    """Name → shape of every tensor of a drafter, its own embeddings and lm_head included where it has them."""
    hidden, rank, vocab = spec.hidden_size, spec.markov_rank, spec.vocab_size
    shapes: Shapes = {
        "fc.weight": (hidden, len(spec.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(spec.num_layers):
        bias = spec.attention_bias
        shapes |= _decoder_layer(f"layers.{index}.", spec, qk_norm=True, qkv_bias=bias, o_bias=bias, mlp_bias=False)
    if spec.markov != "none":
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (vocab, rank)
    for kind, name, rows, columns in (
        ("gated", "markov_head.gate_proj", rank, hidden + rank),
        ("rnn", "markov_head.joint_proj", 3 * rank, 2 * rank + hidden),
    ):
        if spec.markov == kind:
            shapes[f"{name}.weight"] = (rows, columns)
            shapes[f"{name}.bias"] = (rows,)
    if spec.confidence != "none":
        shapes["confidence_head.proj.weight"] = (1, hidden + (rank if spec.confidence == "markov" else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    if spec.own_embeddings:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if spec.own_lm_head:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_tensors(
    path: Path, found: Mapping[str, TensorInfo], expected: Shapes, *, label: Callable[[str], str] = str
) -> None:
    """Check presence, shape and dtype of every tensor of `expected`, and that nothing unknown is there.

    Args:
        label: turns a canonical name into the one on disk, for messages.

    Raises:
        CheckpointError: naming the file and the tensor.
    """
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise CheckpointError(
            f"{path}: {label(missing[0])}",
            "tensor missing",
            expected=f"shape {list(expected[missing[0]])}",
            found=f"{len(found)} tensors without {_some([label(name) for name in missing])}",
            remedy="Download the checkpoint again, or use the config.json that belongs to it",
        )
    unknown = sorted(name for name in found.keys() - expected.keys() if not harmless(name))
    if unknown:
        raise CheckpointError(
            f"{found[unknown[0]].file}: {unknown[0]}",
            "unknown tensor",
            expected="only tensors that the config calls for",
            found=_some(unknown),
            remedy="This is another packaging or model, or another checkpoint's config.json",
        )
    for name, shape in expected.items():
        info = found[name]
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: {label(name)}",
                "wrong shape",
                expected=list(shape),
                found=list(info.shape),
                remedy="Use the config.json that belongs to these weights",
            )
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{info.file}: {label(name)}",
                "unsupported dtype",
                expected="F32, F16 or BF16",
                found=info.dtype,
                remedy="Convert the weights to bfloat16; quantised weights are not supported",
            )
