"""DeepSpec drafters: the golden ones, every option, the published sizes, and every way of being wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from builder.checkpoints import load_drafter, load_target
from builder.checkpoints.deepspec import load_deepspec
from builder.spec import RopeSpec, TargetCheckpoint
from tests.builder.checkpoints.helpers import (
    DRAFTER,
    GOLDEN,
    LLAMA,
    QWEN3,
    REMOVE,
    changed,
    drafter_tensors,
    edit_json,
    refusal,
    shard,
    target_of,
    target_tensors,
    write_drafter,
    write_index,
    write_sparse,
    write_target,
)

CASES = sorted(path.parent.name for path in GOLDEN.glob("drafter/*/config.json"))

# What each golden case is about; everything else follows from its config, whatever its numbers are.
HEADS = {"gated_r16": "gated", "batch_mix": "gated", "rnn_r16": "rnn", "no_markov": "none"}
CONFIDENCE = {"no_markov": "none", "no_confidence": "none", "confidence_without_markov": "hidden"}


@pytest.fixture
def target(tmp_path: Path) -> TargetCheckpoint:
    return target_of(tmp_path / "target")


@pytest.mark.parametrize("case", CASES)
def test_golden_drafters_normalise(case: str) -> None:
    directory = GOLDEN / "drafter" / case
    config = json.loads((directory / "config.json").read_text())
    drafter = load_deepspec(directory)
    spec = drafter.spec
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta")}
    assert spec.rope == RopeSpec(theta=rope["rope_theta"])
    assert spec.block_size == config["block_size"]
    assert spec.taps == tuple(config["target_layer_ids"])
    assert spec.mask_token_id == config["mask_token_id"]
    assert (spec.num_heads, spec.num_kv_heads) == (config["num_attention_heads"], config["num_key_value_heads"])
    assert spec.head_dim == config["head_dim"]
    assert spec.rms_norm_eps == config["rms_norm_eps"]
    assert spec.max_positions == config["max_position_embeddings"]
    assert spec.attention_bias == (case == "attention_bias_true")
    assert spec.markov == HEADS.get(case, "vanilla")
    assert spec.markov_rank == config["markov_rank"]
    assert spec.confidence == CONFIDENCE.get(case, "markov")
    assert spec.own_embeddings == spec.own_lm_head == (case != "shared_embeddings")

    stored = load_file(directory / "model.safetensors")
    assert drafter.tensors.names() == stored.keys()
    for name, tensor in stored.items():
        assert drafter.tensors.shape(name) == tuple(tensor.shape)
        assert np.array_equal(drafter.tensors.read(name), tensor.float().numpy())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_golden_pairs_fit(family: str) -> None:
    pair = GOLDEN / "e2e" / family
    drafter = load_drafter(pair / "drafter", load_target(pair / "target"))
    assert drafter.spec.taps == tuple(json.loads((pair / "drafter" / "config.json").read_text())["target_layer_ids"])


def test_golden_cases_are_there() -> None:
    assert len(CASES) >= 15


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"markov": "vanilla", "markov_rank": 4, "confidence": "markov", "head_dim": 6, "taps": (-1, 1, 3)}),
    ({"markov_head_type": "gated"}, {"markov": "gated"}),
    ({"markov_head_type": "RNN"}, {"markov": "rnn"}),
    ({"markov_rank": 0, "markov_head_type": REMOVE, "confidence_head_with_markov": False}, {"markov": "none"}),
    ({"markov_rank": 0, "markov_head_type": None, "confidence_head_with_markov": False}, {"confidence": "hidden"}),
    ({"enable_confidence_head": False, "confidence_head_with_markov": REMOVE}, {"confidence": "none"}),
    ({"confidence_head_with_markov": False}, {"confidence": "hidden", "markov": "vanilla"}),
    ({"attention_bias": True}, {"attention_bias": True}),
    ({"head_dim": REMOVE}, {"head_dim": 4}),
    ({"head_dim": None}, {"head_dim": 4}),
    ({"head_dim": 10}, {"head_dim": 10}),
    ({"block_size": 1}, {"block_size": 1}),
    ({"target_layer_ids": [4]}, {"taps": (4,)}),
    ({"layer_types": REMOVE}, {"num_layers": 2}),
    ({"sliding_window": 32}, {"num_layers": 2}),
    ({"sample_from_anchor": True}, {"block_size": 5}),
    ({"rope_parameters": REMOVE, "rope_theta": 77, "rope_scaling": None}, {"rope": RopeSpec(77.0)}),
    (
        {"rope_parameters": REMOVE, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 9.5}},
        {"rope": RopeSpec(9.5, "linear", 2.0)},
    ),
]


@pytest.mark.parametrize(("changes", "expected"), OPTIONS)
def test_options(tmp_path: Path, target: TargetCheckpoint, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = changed(DRAFTER, **changes)
    shapes = drafter_tensors(config | {"markov_head_type": str(config.get("markov_head_type")).lower()})
    directory = tmp_path / "drafter"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, directory / "model.safetensors")
    drafter = load_drafter(directory, target)
    assert {key: getattr(drafter.spec, key) for key in expected} == expected
    assert {name: drafter.tensors.shape(name) for name in drafter.tensors.names()} == shapes


def test_embeddings_may_be_missing(tmp_path: Path, target: TargetCheckpoint) -> None:
    drafter = load_drafter(write_drafter(tmp_path / "drafter", DRAFTER, own=False), target)
    assert (drafter.spec.own_embeddings, drafter.spec.own_lm_head) == (False, False)


def test_shards_read_like_one_file(tmp_path: Path, target: TargetCheckpoint) -> None:
    directory = write_drafter(tmp_path / "drafter", DRAFTER)
    stored = load_file(directory / "model.safetensors")
    weight_map = shard(directory)
    drafter = load_drafter(directory, target)
    assert len(set(weight_map.values())) == 3
    assert drafter.tensors.names() == stored.keys()
    assert all(np.array_equal(drafter.tensors.read(name), tensor.float().numpy()) for name, tensor in stored.items())
    assert set(drafter.source.files) == {"config.json", "model.safetensors.index.json", *weight_map.values()}


def test_a_saved_rotary_buffer_is_ignored(tmp_path: Path, target: TargetCheckpoint) -> None:
    directory = write_drafter(tmp_path / "drafter", DRAFTER)
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"rotary_emb.inv_freq": torch.ones(3)}, directory / "model.safetensors")
    assert load_drafter(directory, target).tensors.names() == tensors.keys()


PUBLISHED = {
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_hidden_layers": 36},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36},
    "14b": {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40, "num_hidden_layers": 40},
}
PUBLISHED_TAPS = {"4b": [1, 9, 17, 25, 33], "8b": [1, 9, 17, 25, 33], "14b": [1, 10, 19, 28, 37]}


@pytest.mark.parametrize("size", PUBLISHED)
@pytest.mark.parametrize("sharded", [False, True])
def test_published_sizes_normalise(tmp_path: Path, size: str, sharded: bool) -> None:
    """The published pairs' configs, names and shapes, over files of holes: no weights are written."""
    common = PUBLISHED[size] | {
        "vocab_size": 151936,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "sliding_window": None,
        "max_window_layers": 36,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    }
    target_config = changed(QWEN3, **common, layer_types=REMOVE, tie_word_embeddings=size == "4b")
    target_dir = tmp_path / "target"
    target_dir.mkdir()
    (target_dir / "config.json").write_text(json.dumps(target_config))
    write_sparse(target_dir / "model.safetensors", target_tensors(target_config))

    drafter_config = target_config | {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": 5,
        "num_target_layers": common["num_hidden_layers"],
        "layer_types": ["full_attention"] * 5,
        "tie_word_embeddings": False,
        "block_size": 7,
        "target_layer_ids": PUBLISHED_TAPS[size],
        "mask_token_id": 151669,
        "num_anchors": 512,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
    }
    directory = tmp_path / "drafter"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(drafter_config))
    shapes = drafter_tensors(drafter_config)
    if sharded:
        weight_map = {}
        for index in range(2):
            part = dict(list(shapes.items())[index::2])
            file = f"model-0000{index + 1}-of-00002.safetensors"
            write_sparse(directory / file, part, mark="norm.weight" if "norm.weight" in part else None)
            weight_map |= dict.fromkeys(part, file)
        write_index(directory, weight_map)
    else:
        write_sparse(directory / "model.safetensors", shapes, mark="norm.weight")

    drafter = load_drafter(directory, load_target(target_dir))
    hidden = common["hidden_size"]
    assert drafter.tensors.shape("fc.weight") == (hidden, 5 * hidden)
    assert drafter.tensors.shape("layers.4.self_attn.q_proj.weight") == (common["num_attention_heads"] * 128, hidden)
    assert drafter.tensors.shape("markov_head.markov_w2.weight") == (151936, 256)
    assert drafter.tensors.shape("confidence_head.proj.weight") == (1, hidden + 256)
    assert drafter.spec.rope == RopeSpec(1e6)
    assert (drafter.spec.block_size, drafter.spec.mask_token_id, drafter.spec.num_layers) == (7, 151669, 5)
    norm = drafter.tensors.read("norm.weight")
    assert norm.dtype == np.float32
    assert norm[:3].tolist() == [1.0, 1.0, 0.0]


BAD_CONFIG: list[tuple[dict[str, Any], list[str]]] = [
    ({"mask_token_id": REMOVE}, ["mask_token_id", "missing", "no such key"]),
    ({"mask_token_id": None}, ["mask_token_id", "null"]),
    ({"mask_token_id": -1}, ["mask_token_id", "[0, 59]", "-1"]),
    ({"mask_token_id": 60}, ["mask_token_id", "[0, 59]", "60"]),
    ({"mask_token_id": True}, ["mask_token_id", "not an integer", "true"]),
    ({"mask_token_id": 3.0}, ["mask_token_id", "not an integer", "3.0"]),
    ({"target_layer_ids": REMOVE}, ["target_layer_ids", "missing"]),
    ({"target_layer_ids": None}, ["target_layer_ids", "null"]),
    ({"target_layer_ids": []}, ["target_layer_ids", "empty", "[-1, 4]"]),
    ({"target_layer_ids": [3, 1]}, ["target_layer_ids", "not in order", "[3, 1]"]),
    ({"target_layer_ids": [1, 1]}, ["target_layer_ids", "twice", "[1, 1]"]),
    ({"target_layer_ids": [-2, 1]}, ["target_layer_ids", "out of range", "[-2, 1]"]),
    ({"target_layer_ids": [1, 6]}, ["target_layer_ids", "out of range", "[1, 6]"]),
    ({"target_layer_ids": [1, 5]}, ["target_layer_ids", "final layer", "[1, 5]"]),
    ({"target_layer_ids": [1, True]}, ["target_layer_ids", "list of integers"]),
    ({"target_layer_ids": 3}, ["target_layer_ids", "list of integers", "3"]),
    ({"num_target_layers": REMOVE}, ["num_target_layers", "missing"]),
    ({"block_size": 0}, ["block_size", "≥ 1", "0"]),
    ({"block_size": REMOVE}, ["block_size", "missing"]),
    ({"block_size": "7"}, ["block_size", "not an integer", '"7"']),
    ({"architectures": REMOVE}, ["architectures", "Qwen3DSparkModel", "no such key"]),
    ({"architectures": []}, ["architectures", "Qwen3DSparkModel", "[]"]),
    ({"architectures": ["Gemma4DSparkModel"]}, ["architectures", "Gemma4DSparkModel", "Qwen3DSparkModel"]),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, ["Eagle3", "Qwen3DSparkModel"]),
    ({"architectures": "Qwen3DSparkModel"}, ["architectures", "unknown drafter architecture"]),
    ({"speculators_config": {"algorithm": "dspark"}}, ["speculators", "DeepSpec"]),
    ({"speculators_model_type": "dspark"}, ["speculators", "DeepSpec"]),
    ({"dflash_config": {"mask_token_id": 1}}, ["DFlash", "DeepSpec"]),
    ({"draft_vocab_size": 30}, ["draft_vocab_size", "reduced draft vocabulary"]),
    ({"sample_from_anchor": False}, ["sample_from_anchor", "block layout", "false"]),
    ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "quantised", "fp8"]),
    ({"markov_rank": REMOVE}, ["markov_rank", "missing"]),
    ({"markov_rank": -1}, ["markov_rank", "-1"]),
    ({"markov_rank": 0, "confidence_head_with_markov": False}, ["markov_head_type", "markov_rank is 0", "vanilla"]),
    ({"markov_head_type": "lstm"}, ["markov_head_type", "vanilla or gated or rnn", "lstm"]),
    ({"markov_head_type": REMOVE}, ["markov_head_type", "missing"]),
    ({"enable_confidence_head": REMOVE}, ["enable_confidence_head", "missing"]),
    ({"enable_confidence_head": 1}, ["enable_confidence_head", "not a boolean", "1"]),
    ({"enable_confidence_head": False}, ["confidence_head_with_markov", "enable_confidence_head is false"]),
    ({"confidence_head_with_markov": REMOVE}, ["confidence_head_with_markov", "missing"]),
    ({"markov_rank": 0, "markov_head_type": REMOVE}, ["confidence_head_with_markov", "markov_rank is 0"]),
    ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
    ({"layer_types": ["full_attention"]}, ["layer_types", "2 entries"]),
    ({"use_sliding_window": True, "sliding_window": 64}, ["use_sliding_window", "sliding-window"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "silu", "gelu"]),
    ({"rope_parameters": REMOVE}, ["rope_theta", "missing"]),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0}}, ["rope type", "yarn", "llama3"]),
    ({"rope_theta": 3.0}, ["rope_theta", "contradicts", "5000.0", "3.0"]),
    ({"num_attention_heads": 5}, ["num_attention_heads", "multiple of 2", "5"]),
    ({"head_dim": 7}, ["odd head_dim", "7"]),
    ({"head_dim": REMOVE, "hidden_size": 18}, ["head_dim absent", "18"]),
    ({"hidden_size": 16.0}, ["hidden_size", "not an integer", "16.0"]),
    ({"hidden_size": 0}, ["hidden_size", "≥ 1"]),
    ({"rms_norm_eps": 0}, ["rms_norm_eps", "> 0", "0"]),
    ({"rms_norm_eps": "1e-6"}, ["rms_norm_eps", "not a number"]),
    ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "[1, 1024]", "1000000000"]),
    ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "not a boolean"]),
    ({"num_hidden_layers": 3, "layer_types": REMOVE}, ["layers.2.", "tensor missing"]),
    ({"num_hidden_layers": 1, "layer_types": REMOVE}, ["layers.1.", "unknown tensor"]),
    ({"attention_bias": True}, ["bias", "tensor missing"]),
    ({"markov_head_type": "gated"}, ["markov_head.gate_proj", "tensor missing"]),
    ({"target_layer_ids": [1]}, ["fc.weight", "wrong shape", "[16, 16]", "[16, 48]"]),
    ({"head_dim": 8}, ["wrong shape", "self_attn"]),
    ({"vocab_size": 61}, ["wrong shape", "[61, "]),
]


@pytest.mark.parametrize(("changes", "parts"), BAD_CONFIG, ids=lambda value: str(value)[:50])
def test_bad_configs(tmp_path: Path, target: TargetCheckpoint, changes: dict[str, Any], parts: list[str]) -> None:
    directory = write_drafter(tmp_path / "drafter", DRAFTER)
    edit_json(directory / "config.json", **changes)
    refusal(lambda: load_drafter(directory, target), directory, *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda tensors: tensors.pop("fc.weight"), ["fc.weight", "tensor missing", "[16, 48]"]),
        (lambda tensors: tensors.update(d2t=torch.ones(4)), ["d2t", "speculators"]),
        (lambda tensors: tensors.update({"layers.0.self_attn.sinks": torch.ones(4)}), ["sinks", "unknown tensor"]),
        (lambda tensors: tensors.update({"fc.weight": torch.ones(16, 47)}), ["fc.weight", "[16, 48]", "[16, 47]"]),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(16, 1)}), ["norm.weight", "[16]", "[16, 1]"]),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(16).double()}), ["norm.weight", "dtype", "F64"]),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(16).to(torch.int8)}), ["norm.weight", "I8"]),
    ],
)
def test_bad_tensors(tmp_path: Path, target: TargetCheckpoint, change: Any, parts: list[str]) -> None:
    directory = write_drafter(tmp_path / "drafter", DRAFTER)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    refusal(lambda: load_drafter(directory, target), directory, *parts)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hidden_size": 32}, ["hidden_size", "expected 32", "found 16"]),
        ({"vocab_size": 64}, ["vocab_size", "expected 64", "found 60"]),
        ({"num_hidden_layers": 7}, ["num_target_layers", "expected 7", "found 6"]),
    ],
)
def test_a_drafter_for_another_target(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    target = load_target(write_target(tmp_path / "target", changed(LLAMA, **changes)))
    directory = write_drafter(tmp_path / "drafter", DRAFTER)
    refusal(lambda: load_drafter(directory, target), tmp_path / "target", "trained for this target", *parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{", ["config.json", "not valid JSON"]),
        ("[1]", ["config.json", "an object", "[1]"]),
        ('{"a": 1, "a": 2}', ["config.json", '"a" listed twice']),
        ('{"a": NaN}', ["config.json", "NaN"]),
        ("[" * 100000, ["config.json", "not valid JSON"]),
    ],
    ids=range(5),
)
def test_config_that_is_not_json(tmp_path: Path, target: TargetCheckpoint, text: str, parts: list[str]) -> None:
    directory = write_drafter(tmp_path / "drafter", DRAFTER)
    (directory / "config.json").write_text(text)
    refusal(lambda: load_drafter(directory, target), *parts)


def test_config_missing_or_binary(tmp_path: Path, target: TargetCheckpoint) -> None:
    directory = write_drafter(tmp_path / "drafter", DRAFTER)
    (directory / "config.json").write_bytes(b"\xff\xfe{}")
    refusal(lambda: load_drafter(directory, target), "config.json", "UTF-8")
    (directory / "config.json").unlink()
    refusal(lambda: load_drafter(directory, target), "config.json", "missing")


def test_paths_that_are_no_drafter(tmp_path: Path, target: TargetCheckpoint) -> None:
    refusal(lambda: load_drafter(tmp_path / "nowhere", target), "nowhere", "no such file")
    file = write_drafter(tmp_path / "drafter", DRAFTER) / "model.safetensors"
    refusal(lambda: load_drafter(file, target), file, "Name its directory")
    (tmp_path / "drafter.bin").write_bytes(b"x")
    refusal(lambda: load_drafter(tmp_path / "drafter.bin", target), "pickle", "Convert")
