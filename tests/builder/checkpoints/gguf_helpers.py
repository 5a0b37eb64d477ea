"""Tiny GGUF files, written with the gguf package's own writer and the converter's row order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 64, 96, 4, 2, 16, 2

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGED = ["he", "ll", "hell", "hello", "Ġ1", "ĊĠ", "12", "ĠĠ", "'s"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ 1", "Ċ Ġ", "1 2", "Ġ Ġ", "' s"]
USER = ["<tool>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *MERGED, *USER]
TYPES = [3] * len(SPECIAL) + [1] * (256 + len(MERGED)) + [4]
VOCAB = len(TOKENS) + 3  # embeddings may have more rows than there are tokens

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 256,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 50000.0,
    "llama.rope.dimension_count": DIM,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ messages }}",
}


def hf_tensors(*, tied: bool = False, bias: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of the model before conversion, by Hugging Face name."""
    rng = np.random.default_rng(5)
    q, kv = HEADS * DIM, KV_HEADS * DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}self_attn.q_proj.weight": (q, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (kv, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (kv, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, q),
            f"{prefix}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER),
        }
        if bias:
            shapes |= {
                f"{prefix}self_attn.{name}_proj.bias": (rows,) for name, rows in (("q", q), ("k", kv), ("v", kv))
            }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def converted_rows(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's order: within each head, row i and row i + dim/2 become neighbours. Row by row: plainly right."""
    dim = rows.shape[0] // heads
    order = [
        head * dim + half * dim // 2 + index for head in range(heads) for index in range(dim // 2) for half in (0, 1)
    ]
    return rows[order]


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, index, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{index}.{LAYER_NAMES[stem]}.{kind}"


def write_gguf(
    path: Path,
    *,
    kind: str = "F32",
    arch: str = "llama",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """A whole GGUF. Matrices get the type `kind`, vectors stay F32; `extra` tensors are added under their own names."""
    writer = GGUFWriter(path, arch)
    for key, value in (METADATA if metadata is None else metadata).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    qtype = GGMLQuantizationType[kind]
    for name, tensor in (hf_tensors() if tensors is None else tensors).items():
        if "q_proj" in name:
            tensor = converted_rows(tensor, HEADS)
        elif "k_proj" in name:
            tensor = converted_rows(tensor, KV_HEADS)
        if tensor.ndim == 1 or kind == "F32":
            writer.add_tensor(gguf_name(name), tensor)
        elif kind == "F16":
            writer.add_tensor(gguf_name(name), tensor.astype(np.float16))
        else:
            writer.add_tensor(gguf_name(name), quantize(tensor, qtype), raw_dtype=qtype)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
