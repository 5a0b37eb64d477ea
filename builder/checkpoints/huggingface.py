"""Targets in Hugging Face layout: ``config.json``, safetensors, and the tokenizer's files where there are any."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from builder.checkpoints.config import Config, read_json, show
from builder.checkpoints.decoder import parse_sizes
from builder.checkpoints.hashing import FileHashes
from builder.checkpoints.layout import check_tensors, target_shapes
from builder.checkpoints.rope import parse_rope
from builder.checkpoints.safetensors_source import SafetensorsSource, open_safetensors
from builder.checkpoints.tokenizer_files import load_tokenizer
from builder.errors import CheckpointError
from builder.spec import SourceInfo, TargetCheckpoint, TargetSpec

PACKAGING = "huggingface"


@dataclass(frozen=True)
class Family:
    """What a model family's config leaves unsaid.

    `default_theta` is meant by an absent ``rope_theta`` (None: must be there); `mlp_bias`: that key exists.
    """

    name: str
    qk_norm: bool
    mlp_bias: bool
    default_theta: float | None


FAMILIES = {
    "LlamaForCausalLM": Family("llama", qk_norm=False, mlp_bias=True, default_theta=10000.0),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, mlp_bias=False, default_theta=None),
}


def load_huggingface(path: Path) -> TargetCheckpoint:
    """Read a target directory. Only headers are read (and both embeddings, where a tied model saved its lm_head too).

    Raises:
        CheckpointError: naming the file and the field or tensor.
    """
    config = read_json(path / "config.json")
    family = _family(config)
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else None
    source = open_safetensors(path)
    bias = config.boolean("attention_bias", default=False)
    tied = config.boolean("tie_word_embeddings", default=False)
    sizes = parse_sizes(config)
    eos = parse_eos([generation, config] if generation else [config], sizes.vocab_size)
    tokenizer, tokenizer_files = load_tokenizer(path, sizes.vocab_size, eos)
    spec = TargetSpec(
        family=family.name,
        **asdict(sizes),
        rope=parse_rope(config, default_theta=family.default_theta),
        qk_norm=family.qk_norm,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=family.mlp_bias and config.boolean("mlp_bias", default=False),
        tied=tied,
        eos_token_ids=eos or (tokenizer.eos_token_ids if tokenizer else ()),
    )
    if tied and "lm_head.weight" in source.names():
        source = _without_copy(path, source)
    check_tensors(path, source.infos, target_shapes(spec))
    files = [config.path, *source.files, *tokenizer_files, *([generation.path] if generation else [])]
    return TargetCheckpoint(
        path=path,
        spec=spec,
        tensors=source.only(target_shapes(spec)),
        tokenizer=tokenizer,
        source=SourceInfo(PACKAGING, path.resolve().name, FileHashes(path, files)),
    )


def _family(config: Config) -> Family:
    names = config.sequence("architectures", str)
    if len(names) != 1 or names[0] not in FAMILIES:
        config.fail(
            "architectures",
            "unknown target architecture",
            expected=f"one of {', '.join(FAMILIES)}",
            remedy="Only these targets are supported",
        )
    return FAMILIES[names[0]]


def parse_eos(configs: list[Config], vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids of the first config that names any (an id or a list of ids); () when none does."""
    for config in configs:
        key = "eos_token_id"
        if not config.has(key):
            continue
        value = config.values[key]
        ids = value if isinstance(value, list) else [value]
        if any(type(entry) is not int for entry in ids):
            config.fail(key, "wrong type", expected="an integer or a list of integers")
        if any(not 0 <= entry < vocab_size for entry in ids):
            config.fail(key, "out of range", expected=f"ids in [0, {vocab_size - 1}]")
        return tuple(dict.fromkeys(ids))
    return ()


def _without_copy(path: Path, source: SafetensorsSource) -> SafetensorsSource:
    """Hide the lm_head that a tied model saved beside its embeddings, once it has proved to be the same."""
    head, embedding = (source.infos.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if (
        head is not None
        and embedding is not None
        and not (
            (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
            and np.array_equal(source.read("lm_head.weight"), source.read("model.embed_tokens.weight"))
        )
    ):
        raise CheckpointError(
            f"{head.file}: lm_head.weight",
            "differs from the embeddings although tie_word_embeddings is true",
            expected="equal weights or none",
            found=f"{show(list(head.shape))} {head.dtype} with other values",
            remedy=f"Set tie_word_embeddings to false in {path / 'config.json'} if the model is untied",
        )
    return source.only(source.names() - {"lm_head.weight"})
