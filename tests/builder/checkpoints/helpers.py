"""Small checkpoints made on the spot. Names and shapes are written out a second time here, as an oracle."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from builder.checkpoints import load_target
from builder.errors import CheckpointError
from builder.spec import TargetCheckpoint

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = Path(os.environ.get("DSPARK_GOLDEN", ROOT / "tests" / "golden"))

REMOVE = object()

DRAFTER: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": ["full_attention", "full_attention"],
    "block_size": 5,
    "target_layer_ids": [-1, 1, 3],
    "num_target_layers": 6,
    "mask_token_id": 59,
    "num_anchors": 8,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 4,
    "markov_head_type": "vanilla",
}

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}

QWEN3: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 8,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "layer_types": ["full_attention"] * 6,
}


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`config` with keys replaced, or removed where the value is REMOVE."""
    return {key: value for key, value in (config | changes).items() if value is not REMOVE}


def layer_shapes(
    config: dict[str, Any], prefix: str, *, norms: bool, biases: tuple[str, ...] = ()
) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if norms:
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    for name in biases:
        shapes[f"{name}.bias"] = shapes[f"{name}.weight"][:1]
    return {prefix + name: shape for name, shape in shapes.items()}


ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def target_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    biases = (ATTENTION if config.get("attention_bias") else ()) + (MLP if config.get("mlp_bias") else ())
    norms = config["model_type"] == "qwen3"
    for index in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, f"model.layers.{index}.", norms=norms, biases=biases)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def drafter_tensors(config: dict[str, Any], *, own: bool = True) -> dict[str, tuple[int, ...]]:
    hidden, vocab, rank = config["hidden_size"], config["vocab_size"], config["markov_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        biases = ATTENTION if config.get("attention_bias") else ()
        shapes |= layer_shapes(config, f"layers.{index}.", norms=True, biases=biases)
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (vocab, rank)}
    if config.get("markov_head_type") == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if config.get("markov_head_type") == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
            "markov_head.joint_proj.bias": (3 * rank,),
        }
    if config["enable_confidence_head"]:
        width = hidden + (rank if config["confidence_head_with_markov"] else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    if own:
        shapes |= {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint directory with one weight file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def write_target(directory: Path, config: dict[str, Any]) -> Path:
    return write(directory, config, random_tensors(target_tensors(config)))


def write_drafter(directory: Path, config: dict[str, Any], *, own: bool = True) -> Path:
    return write(directory, config, random_tensors(drafter_tensors(config, own=own), seed=1))


def shard(directory: Path, count: int = 3) -> dict[str, str]:
    """Split a directory's weights into shards with an index; returns the weight map."""
    single = directory / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for index in range(count):
        file = f"model-{index + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in names[index::count]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: dict[str, Any]) -> None:
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(text)


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "BF16", mark: str | None = None) -> None:
    """A safetensors file of the given shapes that takes no disk space: a header, then a hole of zeros.

    The tensor `mark` gets ones (bfloat16) for its first two values.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if mark is not None:
            file.seek(8 + len(text) + header[mark]["data_offsets"][0])
            file.write(b"\x80\x3f\x80\x3f")
        file.truncate(8 + len(text) + end)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(changed(json.loads(path.read_text()), **changes)))


def refusal(action: Any, *parts: object) -> CheckpointError:
    """Run `action`, expect a one-line CheckpointError whose text has all `parts`, expected, found and a remedy."""
    with pytest.raises(CheckpointError) as caught:
        action()
    error = caught.value
    text = str(error)
    assert "\n" not in text
    for part in parts:
        assert str(part) in text, f"{part!r} not in {text!r}"
    assert error.where
    assert error.expected, text
    assert error.found, text
    remedy = text.rsplit(". ", 1)[-1]
    assert remedy, text
    assert remedy[0].isupper(), text
    return error


def target_of(directory: Path, **changes: Any) -> TargetCheckpoint:
    """A tiny Llama target that fits DRAFTER."""
    return load_target(write_target(directory, changed(LLAMA, **changes)))
