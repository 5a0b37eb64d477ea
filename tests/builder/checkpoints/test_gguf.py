"""Llama-architecture GGUF targets."""

from __future__ import annotations

import hashlib
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from builder.checkpoints import load_target
from builder.checkpoints.gguf_file import open_gguf
from builder.errors import CheckpointError
from builder.spec import RopeSpec, TargetSpec
from tests.builder.checkpoints.gguf_helpers import (
    DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    METADATA,
    VOCAB,
    converted_rows,
    gguf_name,
    hf_tensors,
    write_gguf,
)
from tests.builder.checkpoints.helpers import REMOVE, changed, refusal


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def with_keys(**changes: Any) -> dict[str, Any]:
    return changed(METADATA, **changes)


def test_spec(file: Path) -> None:
    target = load_target(file)
    assert target.spec == TargetSpec(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        rms_norm_eps=1e-5,
        rope=RopeSpec(50000.0),
        max_positions=256,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        tied=False,
        eos_token_ids=(2,),
    )
    assert (target.source.packaging, target.source.name) == ("gguf", "tiny.gguf")
    assert target.source.files == {"tiny.gguf": hashlib.sha256(file.read_bytes()).hexdigest()}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_tensors_come_back_in_hugging_face_order(tmp_path: Path, kind: str) -> None:
    original = hf_tensors()
    target = load_target(write_gguf(tmp_path / "tiny.gguf", kind=kind))
    assert target.tensors.names() == original.keys()
    qtype = GGMLQuantizationType[kind]
    for name, tensor in original.items():
        # Blocks lie within rows, so quantising the rows in their original order gives the expected values.
        expected = tensor if tensor.ndim == 1 else dequantize(quantize(tensor, qtype), qtype)
        read = target.tensors.read(name)
        assert read.dtype == np.float32
        assert target.tensors.shape(name) == tensor.shape
        assert np.array_equal(read, expected), name


def test_the_order_is_not_the_files(file: Path) -> None:
    """The test above would be void if conversion left rows where they were."""
    rows = hf_tensors()["model.layers.0.self_attn.q_proj.weight"]
    assert not np.array_equal(converted_rows(rows, HEADS), rows)
    assert np.array_equal(open_gguf(file).raw("blk.0.attn_q.weight").view(np.float32), converted_rows(rows, HEADS))


def test_reads_change_no_file(file: Path) -> None:
    tensors = load_target(file).tensors
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        before = tensors.read(name).copy()
        read = tensors.read(name)
        if read.flags.writeable:
            read[...] = 0
        assert np.array_equal(tensors.read(name), before)


def test_tied_and_biased(tmp_path: Path) -> None:
    original = hf_tensors(tied=True, bias=True)
    target = load_target(write_gguf(tmp_path / "tiny.gguf", tensors=original))
    assert (target.spec.tied, target.spec.qkv_bias, target.spec.o_bias) == (True, True, False)
    assert target.tensors.names() == original.keys()
    for name in ("q", "k", "v"):
        key = f"model.layers.1.self_attn.{name}_proj.bias"
        assert np.array_equal(target.tensors.read(key), original[key])


def test_directory_with_one_gguf(file: Path) -> None:
    (file.parent / "README.md").write_text("x")
    assert load_target(file.parent).source.name == "tiny.gguf"


def test_keys_with_defaults(tmp_path: Path) -> None:
    keys = with_keys(
        **{
            "llama.rope.freq_base": REMOVE,
            "llama.rope.dimension_count": REMOVE,
            "llama.attention.key_length": DIM,
            "llama.attention.value_length": DIM,
            "llama.vocab_size": VOCAB,
            "llama.attention.head_count_kv": [KV_HEADS] * LAYERS,
            "llama.feed_forward_length": [INNER] * LAYERS,
            "tokenizer.ggml.eot_token_id": 0,
        }
    )
    spec = load_target(write_gguf(tmp_path / "tiny.gguf", metadata=keys)).spec
    assert (spec.rope.theta, spec.num_kv_heads, spec.eos_token_ids) == (10000.0, KV_HEADS, (2, 0))


ROPE_OK = [
    ({"llama.rope.scaling.type": "none"}, RopeSpec(50000.0)),
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, RopeSpec(50000.0, "linear", 4.0)),
    ({"llama.rope.scale_linear": 2.0}, RopeSpec(50000.0, "linear", 2.0)),
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, RopeSpec(50000.0)),
]


@pytest.mark.parametrize(("changes", "rope"), ROPE_OK)
def test_rope_scaling_keys(tmp_path: Path, changes: dict[str, Any], rope: RopeSpec) -> None:
    assert load_target(write_gguf(tmp_path / "tiny.gguf", metadata=with_keys(**changes))).spec.rope == rope


def llama3(factor: float, low: float = 1.0, original: int = 8192) -> np.ndarray[Any, Any]:
    """Llama 3's factors, one frequency at a time, as llama.cpp's converter computes them."""
    factors = []
    for index in range(DIM // 2):
        wavelength = 2 * np.pi * 50000.0 ** (2 * index / DIM)
        if wavelength < original / 4.0:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (4.0 - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_are_recognised(tmp_path: Path, factor: float) -> None:
    target = load_target(write_gguf(tmp_path / "tiny.gguf", extra={"rope_freqs.weight": llama3(factor)}))
    assert target.spec.rope == RopeSpec(50000.0, "llama3", factor, 1.0, 4.0, 8192)
    assert "rope_freqs.weight" not in target.tensors.names()


@pytest.mark.parametrize(
    ("factors", "parts"),
    [
        (llama3(8.0, original=1024), ["rope_freqs.weight", "unknown rope scaling"]),
        (np.full(DIM // 2, np.nan, np.float32), ["rope_freqs.weight", "unknown rope scaling"]),
        (np.ones(DIM, np.float32), ["rope_freqs.weight", "[8] F32", "[16] F32"]),
    ],
)
def test_other_factors_are_refused(tmp_path: Path, factors: np.ndarray[Any, Any], parts: list[str]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", extra={"rope_freqs.weight": factors})
    refusal(lambda: load_target(path), path, *parts)


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"split.count": 3}, ["split.count", "split GGUF", "merge"]),
    ({"llama.expert_count": 8}, ["llama.expert_count", "mixture of experts", "8"]),
    ({"llama.attention.sliding_window": 128}, ["sliding_window", "128"]),
    ({"llama.rope.scaling.type": "yarn"}, ["llama.rope.scaling.type", "yarn", "linear or none"]),
    ({"llama.rope.scaling.type": "linear"}, ["llama.rope.scale_linear", "missing"]),
    ({"llama.rope.scaling.attn_factor": 0.5}, ["attn_factor", "0.5"]),
    ({"llama.rope.dimension_count": 8}, ["llama.rope.dimension_count", "expected 16", "found 8"]),
    ({"llama.attention.value_length": 32}, ["llama.attention.value_length", "expected 16", "found 32"]),
    ({"llama.attention.head_count": REMOVE}, ["llama.attention.head_count", "missing"]),
    ({"llama.attention.head_count": 3}, ["llama.attention.head_count", "multiple of 2", "3"]),
    ({"llama.attention.head_count_kv": [1, 2]}, ["head_count_kv", "not an integer", "[1, 2]"]),
    ({"llama.embedding_length": REMOVE}, ["llama.embedding_length", "missing", "no such key"]),
    ({"llama.embedding_length": "64"}, ["llama.embedding_length", "not an integer"]),
    ({"llama.block_count": 3}, ["blk.2.", "tensor missing"]),
    ({"llama.block_count": 1}, ["unknown tensor", "model.layers.1."]),
    ({"llama.block_count": 0}, ["llama.block_count", "[1, 1024]"]),
    ({"llama.feed_forward_length": 97}, ["ffn_", "wrong shape", "97"]),
    ({"llama.attention.layer_norm_rms_epsilon": REMOVE}, ["layer_norm_rms_epsilon", "missing"]),
    ({"llama.context_length": REMOVE}, ["llama.context_length", "missing"]),
    ({"llama.vocab_size": 1000}, ["token_embd.weight", "wrong shape", "[1000, 64]"]),
    ({"tokenizer.ggml.eos_token_id": 9999}, ["tokenizer.ggml.eos_token_id", "out of range", "9999"]),
]


@pytest.mark.parametrize(("changes", "parts"), BAD, ids=lambda value: str(value)[:50])
def test_bad_metadata(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", metadata=with_keys(**changes))
    refusal(lambda: load_target(path), path, *parts)


def test_other_architectures(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", arch="qwen2")
    refusal(lambda: load_target(path), path, "general.architecture", "llama", "qwen2", "Hugging Face")


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_missing_tensor(tmp_path: Path, name: str) -> None:
    tensors = hf_tensors()
    del tensors[name]
    path = write_gguf(tmp_path / "tiny.gguf", tensors=tensors, metadata=with_keys(**{"llama.vocab_size": VOCAB}))
    refusal(lambda: load_target(path), f"{path}: {gguf_name(name)}", "tensor missing")


def test_unknown_tensor_and_wrong_type(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", extra={"blk.0.attn_q_norm.weight": np.ones(DIM, np.float32)})
    refusal(lambda: load_target(path), path, "blk.0.attn_q_norm.weight", "unknown tensor")
    tensors = hf_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    path = write_gguf(tmp_path / "double.gguf", tensors=tensors)
    refusal(lambda: load_target(path), path, "output_norm.weight", "unsupported tensor type", "F64", "Q8_0")


def test_truncated_anywhere(file: Path) -> None:
    data = file.read_bytes()
    # Every cut within the head of the header, and a spread over the rest: metadata, tensor infos, data.
    for keep in [*range(0, 200), *range(200, len(data), 997), len(data) - 1]:
        file.write_bytes(data[:keep])
        error = refusal(lambda: load_target(file), file)
        assert "truncated" in str(error) or (keep == 0 and "cannot be read" in str(error))


@pytest.mark.parametrize(
    ("offset", "data", "parts"),
    [
        (0, b"GGML", ["not a GGUF file", "GGML"]),
        (4, struct.pack("<I", 1), ["unsupported GGUF version", "found 1"]),
        (4, struct.pack(">I", 3), ["unsupported GGUF version", "little-endian"]),
        (8, struct.pack("<Q", 2**60), [""]),
        (16, struct.pack("<Q", 2**60), [""]),
        (24, struct.pack("<Q", 2**63), ["truncated"]),
    ],
)
def test_corrupt_header(file: Path, offset: int, data: bytes, parts: list[str]) -> None:
    content = bytearray(file.read_bytes())
    content[offset : offset + len(data)] = data
    file.write_bytes(content)
    refusal(lambda: load_target(file), file, *parts)


def test_corrupt_bytes_never_escape(file: Path) -> None:
    """Whatever one byte of the header says, the answer is a target or a CheckpointError."""
    content = file.read_bytes()
    rng = np.random.default_rng(0)
    for position in rng.integers(0, 12000, 150):
        broken = bytearray(content)
        broken[position] ^= 0xFF
        file.write_bytes(broken)
        with suppress(CheckpointError):
            load_target(file)
