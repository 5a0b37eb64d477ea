"""DSpark drafters as DeepSpec's trainer saves them: ``config.json`` (``Qwen3DSparkModel``) beside safetensors."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from builder.checkpoints.config import Config, read_json, show
from builder.checkpoints.decoder import parse_sizes, refuse_quantised
from builder.checkpoints.hashing import FileHashes
from builder.checkpoints.layout import check_tensors, drafter_shapes
from builder.checkpoints.rope import parse_rope
from builder.checkpoints.safetensors_source import SafetensorsSource, open_safetensors
from builder.errors import CheckpointError
from builder.spec import DrafterCheckpoint, DrafterSpec, SourceInfo

PACKAGING = "deepspec"
ARCHITECTURE = "Qwen3DSparkModel"
SUPPORTED = f"DeepSpec packaging with architectures [{show(ARCHITECTURE)}]"
EXPORT = "Use the checkpoint that DeepSpec's trainer saved"

MARKOV_HEADS = ("vanilla", "gated", "rnn")

# Keys that only other packagings have. Some frameworks rewrite those to ARCHITECTURE: the name alone says little.
FOREIGN_KEYS = {
    "speculators_config": "speculators (vLLM)",
    "speculators_model_type": "speculators (vLLM)",
    "speculators_version": "speculators (vLLM)",
    "transformer_layer_config": "speculators (vLLM)",
    "aux_hidden_state_layer_ids": "speculators (vLLM)",
    "draft_vocab_size": "a reduced draft vocabulary (speculators or Eagle)",
    "eagle_config": "Eagle",
    "dflash_config": "DFlash",
    "dspark_config": "another framework's DSpark",
    "text_config": "a nested (Gemma4 or multimodal) config",
    "global_head_dim": "Gemma4 DSpark",
}
FOREIGN_TENSORS = {"d2t": "speculators (vLLM)", "t2d": "speculators (vLLM)"}


def load_deepspec(path: Path) -> DrafterCheckpoint:
    """Read a drafter directory, headers only; `builder.checkpoints.load_drafter` also checks it against a target.

    Raises:
        CheckpointError: see the module's functions; always names file and field or tensor.
    """
    config = read_json(path / "config.json")
    check_packaging(config)
    source = open_safetensors(path)
    for name in sorted(source.names() & FOREIGN_TENSORS.keys()):
        raise CheckpointError(
            f"{source.infos[name].file}: {name}",
            "unknown drafter packaging",
            expected=SUPPORTED,
            found=FOREIGN_TENSORS[name],
            remedy=EXPORT,
        )
    spec = parse_spec(config, source)
    check_tensors(path, source.infos, drafter_shapes(spec))
    return DrafterCheckpoint(
        path=path,
        spec=spec,
        tensors=source.only(drafter_shapes(spec)),
        source=SourceInfo(PACKAGING, path.resolve().name, FileHashes(path, [config.path, *source.files])),
    )


def check_packaging(config: Config) -> None:
    """Make sure that this is DeepSpec's Qwen3 packaging before any of its unprefixed keys is believed."""
    for key, packaging in FOREIGN_KEYS.items():
        if config.has(key):
            raise CheckpointError(
                config.where(key),
                "unknown drafter packaging",
                expected=SUPPORTED,
                found=f"{packaging}, architectures {show(config.values.get('architectures'))}",
                remedy=EXPORT,
            )
    if config.values.get("architectures") != [ARCHITECTURE]:
        config.fail("architectures", "unknown drafter architecture", expected=show([ARCHITECTURE]), remedy=EXPORT)
    refuse_quantised(config)
    if not config.boolean("sample_from_anchor", default=True):
        config.fail(
            "sample_from_anchor",
            "another block layout",
            expected="true or absent (all slots used, anchor first)",
            remedy=EXPORT,
        )


def parse_spec(config: Config, source: SafetensorsSource) -> DrafterSpec:
    """The DrafterSpec of a DeepSpec config; `source` tells which of the optional embeddings are there."""
    sizes = parse_sizes(config)
    layers = config.integer("num_target_layers", minimum=2)
    markov, rank = _parse_markov(config)
    own_embeddings, own_lm_head = "embed_tokens.weight" in source.names(), "lm_head.weight" in source.names()
    if config.boolean("tie_word_embeddings", default=False) and own_embeddings != own_lm_head:
        config.fail(
            "tie_word_embeddings",
            "tied, but only one of embed_tokens and lm_head is there",
            expected="false",
            remedy=EXPORT,
        )
    return DrafterSpec(
        block_size=config.integer("block_size", minimum=1),
        taps=_parse_taps(config, layers),
        num_target_layers=layers,
        mask_token_id=config.integer("mask_token_id", maximum=sizes.vocab_size - 1),
        **asdict(sizes),
        rope=parse_rope(config),
        attention_bias=config.boolean("attention_bias", default=False),
        markov=markov,
        markov_rank=rank,
        confidence=_parse_confidence(config, rank),
        own_embeddings=own_embeddings,
        own_lm_head=own_lm_head,
    )


def _parse_taps(config: Config, layers: int) -> tuple[int, ...]:
    key = "target_layer_ids"
    taps = config.sequence(key, int)
    allowed = f"ids in [-1, {layers - 2}], strictly increasing"
    if not taps:
        config.fail(key, "empty", expected=allowed, remedy=EXPORT)
    if len(set(taps)) != len(taps):
        config.fail(key, "the same layer twice", expected=allowed, remedy=EXPORT)
    if taps != sorted(taps):
        config.fail(key, "not in order", expected=allowed, remedy=EXPORT)
    if taps[-1] == layers - 1:
        # Hugging Face saves this state after the final norm, others before it: the id doesn't say which was trained on.
        config.fail(key, "taps the final layer, whose saved state is ambiguous", expected=allowed, remedy=EXPORT)
    if taps[0] < -1 or taps[-1] >= layers:
        config.fail(key, "out of range", expected=allowed, remedy=EXPORT)
    return tuple(taps)


def _parse_markov(config: Config) -> tuple[str, int]:
    rank = config.integer("markov_rank")
    key = "markov_head_type"
    if rank == 0:
        if config.has(key):
            config.fail(key, "a head type although markov_rank is 0", expected="absent", remedy=EXPORT)
        return "none", 0
    kind = config.string(key).lower()
    if kind not in MARKOV_HEADS:
        config.fail(key, "unknown Markov head", expected=" or ".join(MARKOV_HEADS), remedy=EXPORT)
    return kind, rank


def _parse_confidence(config: Config, rank: int) -> str:
    key = "confidence_head_with_markov"
    if not config.boolean("enable_confidence_head"):
        if config.boolean(key, default=False):
            config.fail(key, "set although enable_confidence_head is false", expected="absent", remedy=EXPORT)
        return "none"
    if not config.boolean(key):
        return "hidden"
    if rank == 0:
        config.fail(key, "needs a Markov head, but markov_rank is 0", expected="false", remedy=EXPORT)
    return "markov"
