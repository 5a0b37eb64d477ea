"""Targets as Llama-architecture GGUF files, de-quantised one tensor at a time into float32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from builder.checkpoints.config import Config
from builder.checkpoints.decoder import MAX_LAYERS, check_heads
from builder.checkpoints.gguf_file import GGUFFile, open_gguf
from builder.checkpoints.gguf_rope import ROPE_FACTORS, parse_gguf_rope
from builder.checkpoints.gguf_tokenizer import rebuild_tokenizer
from builder.checkpoints.hashing import FileHashes
from builder.checkpoints.layout import TensorInfo, check_tensors, target_shapes
from builder.errors import CheckpointError
from builder.spec import SourceInfo, TargetCheckpoint, TargetSpec

PACKAGING = "gguf"
ARCHITECTURE = "llama"
OTHER_QUANT = "Use a file of another quantisation, such as Q8_0 or F16"

_FIXED = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_BACK = {canonical: raw for raw, canonical in _LAYER.items()}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_CANONICAL = re.compile(r"model\.layers\.(\d+)\.(" + "|".join(map(re.escape, _LAYER_BACK)) + r")\.(weight|bias)")

# What the gguf package can turn into float32.
QUANT_TYPES = frozenset(
    GGMLQuantizationType[name]
    for name in (
        "F32",
        "F16",
        "BF16",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "TQ1_0",
        "TQ2_0",
        "MXFP4",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
        "IQ1_S",
        "IQ1_M",
        "IQ4_NL",
        "IQ4_XS",
    )
)


def canonical_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; unknown names come back as they are, for the check to refuse."""
    match = _BLOCK.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"
    return _FIXED.get(name, name)


def raw_name(name: str) -> str:
    """The inverse of `canonical_name`, for messages about tensors that aren't there."""
    match = _CANONICAL.fullmatch(name)
    if match:
        return f"blk.{match[1]}.{_LAYER_BACK[match[2]]}.{match[3]}"
    return {canonical: raw for raw, canonical in _FIXED.items()}.get(name, name)


class GGUFSource:
    """A TensorSource over a GGUF file (see `builder.spec.TensorSource`). Tensors come as float32.

    `permuted` gives the number of heads of each tensor whose rows llama.cpp's converter has reordered.
    """

    def __init__(self, file: GGUFFile, permuted: Mapping[str, int]) -> None:
        self.file = file
        self._permuted = dict(permuted)
        self._raw_names = {canonical_name(name): name for name in file.tensors if name != ROPE_FACTORS}
        # Whatever the type on disk, what is read is float32.
        self.infos = {
            name: TensorInfo(file.tensors[raw].shape, "F32", file.path) for name, raw in self._raw_names.items()
        }

    def names(self) -> frozenset[str]:
        return frozenset(self.infos)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.infos[name].shape

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor in float32, de-quantised now and kept nowhere. Raises CheckpointError."""
        raw = self._raw_names.get(name)
        if raw is None:
            raise CheckpointError(
                self.file.path,
                "no such tensor",
                expected="a tensor of the spec",
                found=name,
                remedy="Download the file again",
            )
        tensor = self.file.tensors[raw]
        try:
            values = dequantize(self.file.raw(raw), tensor.type)
        except Exception as error:  # NotImplementedError for a type, ValueError for data that don't fit it
            raise CheckpointError(
                f"{self.file.path}: {raw}",
                "cannot be de-quantised",
                expected="a type that the gguf package reads",
                found=f"{tensor.type.name} ({error})",
                remedy=OTHER_QUANT,
            ) from None
        values = values.reshape(tensor.shape)
        if name in self._permuted:
            values = unpermute(values, self._permuted[name])
        return np.asarray(values, np.float32)


def unpermute(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo the row order of q and k in a Llama GGUF.

    RoPE turns pairs of neighbouring rows in llama.cpp, row i with row i + head_dim/2 in Hugging Face's models; the
    converter interleaves each head's halves (``reshape(heads, 2, head_dim/2).swapaxes(1, 2)``), which is undone here.

    Args:
        rows: ``[heads · head_dim, …]``
    """
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def load_gguf(path: Path) -> TargetCheckpoint:
    """Read a GGUF target. Weights aren't touched; the metadata's tokenizer is rebuilt and checked.

    Raises:
        CheckpointError: naming the file and the metadata key or tensor.
    """
    file = open_gguf(path)
    config = Config(path, file.metadata)
    _refuse_others(config)
    spec = _parse_spec(config, file)
    permuted = {
        f"model.layers.{index}.self_attn.{name}_proj.{kind}": heads
        for index in range(spec.num_layers)
        for name, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads))
        for kind in ("weight", "bias")
    }
    source = GGUFSource(file, permuted)
    for name, tensor in file.tensors.items():
        if tensor.type not in QUANT_TYPES:
            raise CheckpointError(
                f"{path}: {name}",
                "unsupported tensor type",
                expected=", ".join(sorted(t.name for t in QUANT_TYPES)),
                found=tensor.type.name,
                remedy=OTHER_QUANT,
            )
    check_tensors(path, source.infos, target_shapes(spec), label=raw_name)
    return TargetCheckpoint(
        path=path,
        spec=spec,
        tensors=source,
        tokenizer=rebuild_tokenizer(config, spec.vocab_size, spec.eos_token_ids),
        source=SourceInfo(PACKAGING, path.name, FileHashes(path.parent, [path])),
    )


def _refuse_others(config: Config) -> None:
    if config.values.get("general.architecture") != ARCHITECTURE:
        config.fail(
            "general.architecture",
            "unsupported GGUF architecture",
            expected=ARCHITECTURE,
            remedy="Use the model's Hugging Face checkpoint instead",
        )
    if config.integer("split.count", default=1) > 1:
        config.fail(
            "split.count",
            "one part of a split GGUF",
            expected="one whole file",
            remedy="Merge the parts with llama-gguf-split --merge",
        )
    if config.integer("llama.expert_count", default=0) > 0:
        config.fail("llama.expert_count", "mixture of experts", expected="0 or absent", remedy="Not supported")
    if config.has("llama.attention.sliding_window"):
        config.fail(
            "llama.attention.sliding_window", "sliding-window attention", expected="absent", remedy="Not supported"
        )


def _uniform(config: Config, key: str, *, default: int | None = None) -> int:
    """An integer that GGUF may also give a layer at a time; the layers must agree."""
    value = config.values.get(key)
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        config = Config(config.path, {key: value[0]})
    return config.integer(key, minimum=1, default=default) if default else config.integer(key, minimum=1)


def _parse_spec(config: Config, file: GGUFFile) -> TargetSpec:
    hidden = config.integer("llama.embedding_length", minimum=1)
    heads = _uniform(config, "llama.attention.head_count")
    kv_heads = _uniform(config, "llama.attention.head_count_kv", default=heads)
    key_length = "llama.attention.key_length"
    head_dim = check_heads(
        config.where("llama.attention.head_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.integer(key_length, minimum=1) if config.has(key_length) else None,
    )
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if config.integer(key, default=head_dim) != head_dim:
            config.fail(key, "differs from the head dimension", expected=head_dim, remedy="Not supported")
    embedding = file.tensors.get("token_embd.weight")
    tokens = config.values.get("tokenizer.ggml.tokens")
    vocab = embedding.shape[0] if embedding else len(tokens) if isinstance(tokens, list) else 0
    vocab = config.integer("llama.vocab_size", minimum=1, default=vocab)
    return TargetSpec(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=_uniform(config, "llama.feed_forward_length"),
        num_layers=config.integer("llama.block_count", minimum=1, maximum=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("llama.attention.layer_norm_rms_epsilon"),
        rope=parse_gguf_rope(config, file, head_dim),
        max_positions=config.integer("llama.context_length", minimum=1),
        qk_norm=False,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        tied="output.weight" not in file.tensors,
        eos_token_ids=_eos(config, vocab),
    )


def _eos(config: Config, vocab: int) -> tuple[int, ...]:
    """Ids that end a generation: eos, and the end of a chat turn where the file names one."""
    ids = [
        config.integer(key, maximum=vocab - 1)
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        if config.has(key)
    ]
    return tuple(dict.fromkeys(ids))
