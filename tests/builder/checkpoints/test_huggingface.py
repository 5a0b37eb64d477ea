"""Llama and Qwen3 targets in Hugging Face layout."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from builder.checkpoints import load_target
from builder.spec import RopeSpec, TargetSpec
from tests.builder.checkpoints.helpers import (
    GOLDEN,
    LLAMA,
    QWEN3,
    REMOVE,
    changed,
    edit_json,
    random_tensors,
    refusal,
    shard,
    target_tensors,
    write,
    write_target,
)


@pytest.mark.parametrize(("family", "tied", "qk_norm"), [("llama", False, False), ("qwen3", True, True)])
def test_golden_targets(family: str, tied: bool, qk_norm: bool) -> None:
    directory = GOLDEN / "e2e" / family / "target"
    config = json.loads((directory / "config.json").read_text())
    target = load_target(directory)
    assert target.spec == TargetSpec(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        rope=RopeSpec(config["rope_parameters"]["rope_theta"]),
        max_positions=config["max_position_embeddings"],
        qk_norm=qk_norm,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        tied=tied,
        eos_token_ids=(),
    )
    assert target.tokenizer is None
    stored = load_file(directory / "model.safetensors")
    assert target.tensors.names() == stored.keys()
    assert all(np.array_equal(target.tensors.read(name), tensor.float().numpy()) for name, tensor in stored.items())
    assert (target.source.packaging, target.source.name) == ("huggingface", "target")
    assert target.source.files == {
        name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
        for name in ("config.json", "generation_config.json", "model.safetensors")
    }


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"family": "llama", "head_dim": 4, "tied": False, "eos_token_ids": (2,), "rope": RopeSpec(10000.0)}),
    (QWEN3, {"family": "qwen3", "head_dim": 8, "tied": True, "qk_norm": True}),
    (changed(LLAMA, head_dim=None), {"head_dim": 4}),
    (changed(LLAMA, head_dim=10), {"head_dim": 10}),
    (changed(LLAMA, rope_theta=REMOVE), {"rope": RopeSpec(10000.0)}),
    (changed(LLAMA, attention_bias=True), {"qkv_bias": True, "o_bias": True, "mlp_bias": False}),
    (changed(LLAMA, mlp_bias=True), {"qkv_bias": False, "o_bias": False, "mlp_bias": True}),
    (changed(QWEN3, attention_bias=True, tie_word_embeddings=False), {"qkv_bias": True, "tied": False}),
    (changed(LLAMA, tie_word_embeddings=True), {"tied": True}),
    (changed(LLAMA, tie_word_embeddings=REMOVE), {"tied": False}),
    (changed(LLAMA, eos_token_id=[2, 5, 2]), {"eos_token_ids": (2, 5)}),
    (changed(LLAMA, eos_token_id=None), {"eos_token_ids": ()}),
    (changed(LLAMA, num_attention_heads=2, num_key_value_heads=2), {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8}),
    (changed(LLAMA, sliding_window=None), {"num_layers": 6}),
    (changed(LLAMA, quantization_config=None), {"num_layers": 6}),
    (
        changed(
            LLAMA,
            rope_theta=500000.0,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        {"rope": RopeSpec(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)},
    ),
    (changed(LLAMA, rope_scaling={"type": "linear", "factor": 4}), {"rope": RopeSpec(10000.0, "linear", 4.0)}),
]


@pytest.mark.parametrize(("config", "expected"), OPTIONS)
def test_options(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    target = load_target(write_target(tmp_path / "target", config))
    assert {key: getattr(target.spec, key) for key in expected} == expected
    assert {name: target.tensors.shape(name) for name in target.tensors.names()} == target_tensors(config)


def test_absent_kv_heads_are_all_heads(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "target", changed(LLAMA, num_key_value_heads=4))
    edit_json(directory / "config.json", num_key_value_heads=REMOVE)
    assert load_target(directory).spec.num_kv_heads == 4


def test_shards(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "target", LLAMA)
    stored = load_file(directory / "model.safetensors")
    shard(directory, 4)
    target = load_target(directory)
    assert all(np.array_equal(target.tensors.read(name), tensor.float().numpy()) for name, tensor in stored.items())
    assert len(target.source.files) == 6


@pytest.mark.parametrize(
    ("generation", "expected"),
    [({"eos_token_id": [7, 8]}, (7, 8)), ({"eos_token_id": 9}, (9,)), ({}, (2,)), ({"eos_token_id": None}, (2,))],
)
def test_generation_config_has_the_last_word_on_eos(
    tmp_path: Path, generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    directory = write_target(tmp_path / "target", LLAMA)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    assert load_target(directory).spec.eos_token_ids == expected


def test_tied_model_that_saved_its_head(tmp_path: Path) -> None:
    config = changed(LLAMA, tie_word_embeddings=True)
    tensors = random_tensors(target_tensors(config))
    embedding = tensors["model.embed_tokens.weight"]
    directory = write(tmp_path / "same", config, tensors | {"lm_head.weight": embedding.clone()})
    assert "lm_head.weight" not in load_target(directory).tensors.names()
    directory = write(tmp_path / "other", config, tensors | {"lm_head.weight": embedding + 1})
    refusal(lambda: load_target(directory), "lm_head.weight", "tie_word_embeddings")
    directory = write(tmp_path / "half", config, tensors | {"lm_head.weight": embedding.half()})
    refusal(lambda: load_target(directory), "lm_head.weight", "F16")


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"architectures": ["MistralForCausalLM"]}, ["architectures", "MistralForCausalLM", "Qwen3ForCausalLM"]),
    ({"architectures": ["Qwen3DSparkModel"]}, ["architectures", "Qwen3DSparkModel"]),
    ({"architectures": REMOVE}, ["architectures", "missing"]),
    ({"architectures": None}, ["architectures", "null"]),
    ({"architectures": ["LlamaForCausalLM", "X"]}, ["architectures", "unknown target architecture"]),
    ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "quantised", "awq"]),
    ({"use_sliding_window": True, "sliding_window": 64}, ["use_sliding_window", "true"]),
    ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, ["layer_types", "full_attention everywhere"]),
    ({"layer_types": [1] * 6}, ["layer_types", "list of strings"]),
    ({"sliding_window": "big"}, ["sliding_window", "not an integer"]),
    ({"hidden_act": "relu"}, ["hidden_act", "silu", "relu"]),
    ({"hidden_act": 1}, ["hidden_act", "not a string"]),
    ({"num_attention_heads": 3}, ["num_attention_heads", "multiple of 2", "3"]),
    ({"num_key_value_heads": 0}, ["num_key_value_heads", "≥ 1"]),
    ({"hidden_size": REMOVE}, ["hidden_size", "missing"]),
    ({"vocab_size": False}, ["vocab_size", "not an integer", "false"]),
    ({"rms_norm_eps": REMOVE}, ["rms_norm_eps", "missing"]),
    ({"max_position_embeddings": 12.5}, ["max_position_embeddings", "12.5"]),
    ({"attention_bias": "yes"}, ["attention_bias", "true or false"]),
    ({"mlp_bias": 1}, ["mlp_bias", "true or false"]),
    ({"eos_token_id": 60}, ["eos_token_id", "[0, 59]"]),
    ({"eos_token_id": [2, "x"]}, ["eos_token_id", "list of integers"]),
    ({"eos_token_id": True}, ["eos_token_id", "wrong type", "true"]),
    ({"rope_theta": -1}, ["rope_theta", "> 0", "-1"]),
    ({"rope_theta": "10000"}, ["rope_theta", "not a number"]),
    ({"rope_scaling": 3}, ["rope_scaling", "an object or null"]),
    (
        {"rope_scaling": {"rope_type": "longrope"}},
        ["rope_scaling.rope_type", "longrope", "default or linear or llama3"],
    ),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, ["rope_scaling.type", "dynamic"]),
    ({"rope_scaling": {"factor": 2}}, ["rope_scaling.rope_type", "missing"]),
    ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
    ({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2}}, ["two rope types"]),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ["low_freq_factor", "missing"]),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        ["high_freq_factor", "more than"],
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}},
        ["original_max_position_embeddings", "missing"],
    ),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["full_attention", "each layer type"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ({"tie_word_embeddings": True, "vocab_size": 61}, ["wrong shape", "[61, 16]", "[60, 16]"]),
    ({"attention_bias": True}, ["q_proj.bias", "tensor missing"]),
    ({"num_hidden_layers": 7}, ["model.layers.6.", "tensor missing"]),
    ({"intermediate_size": 25}, ["mlp", "wrong shape", "25"]),
]


@pytest.mark.parametrize(("changes", "parts"), BAD, ids=lambda value: str(value)[:50])
def test_bad_configs(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    directory = write_target(tmp_path / "target", changed(LLAMA, tie_word_embeddings=True))
    edit_json(directory / "config.json", **changes)
    refusal(lambda: load_target(directory), directory, *parts)


def test_qwen3_needs_its_theta(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "target", changed(QWEN3, rope_theta=REMOVE))
    refusal(lambda: load_target(directory), "rope_theta", "missing")


def test_qwen3_weights_under_a_llama_config(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "target", QWEN3)
    edit_json(directory / "config.json", architectures=["LlamaForCausalLM"])
    refusal(lambda: load_target(directory), "k_norm", "unknown tensor")


def test_quantised_dtype(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "target", LLAMA)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, directory / "model.safetensors")
    refusal(lambda: load_target(directory), directory / "model.safetensors", name, "F8_E4M3", "F32, F16 or BF16")


def test_what_the_system_refuses(tmp_path: Path) -> None:
    refusal(lambda: load_target("x" * 300), "cannot be read", "name too long")
    directory = write_target(tmp_path / "target", LLAMA)
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    refusal(lambda: load_target(directory), "config.json", "cannot be read")


def test_paths_that_are_no_target(tmp_path: Path) -> None:
    refusal(lambda: load_target(tmp_path / "nowhere"), "nowhere", "no such file")
    refusal(lambda: load_target(tmp_path), tmp_path, "an empty directory")
    for name, part in (("model.bin", "pickle"), ("model.safetensors", "Hugging Face directory")):
        (tmp_path / name).write_bytes(b"x")
        refusal(lambda name=name: load_target(tmp_path / name), name, part)
    refusal(lambda: load_target(tmp_path), tmp_path, "model.bin, model.safetensors")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"x")
    refusal(lambda: load_target(tmp_path), "several GGUF files", "a.gguf")
