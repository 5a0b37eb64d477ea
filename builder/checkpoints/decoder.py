"""The keys that Llama, Qwen3 and DeepSpec drafters share in ``config.json``: sizes, heads, norm, positions."""

from __future__ import annotations

from dataclasses import dataclass

from builder.checkpoints.config import Config
from builder.errors import CheckpointError

# Far above any model; keeps a corrupt count from turning into hours of work.
MAX_LAYERS = 1024


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a stack of decoder layers; field names are those of TargetSpec and DrafterSpec."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int


def check_heads(where: str, *, hidden: int, heads: int, kv_heads: int, head_dim: int | None) -> int:
    """The head dimension, hidden / heads where None. Raises CheckpointError for sizes that don't divide."""
    remedy = "Use the config that came with the checkpoint"
    if heads % kv_heads:
        raise CheckpointError(
            where,
            "query heads are not a multiple of key/value heads",
            expected=f"a multiple of {kv_heads}",
            found=heads,
            remedy=remedy,
        )
    if head_dim is None:
        if hidden % heads:
            raise CheckpointError(
                where,
                "head_dim absent and hidden size not divisible by heads",
                expected=f"a multiple of {heads}",
                found=hidden,
                remedy="Add head_dim to the config",
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise CheckpointError(
            where, "odd head_dim", expected="an even number (RoPE turns pairs)", found=head_dim, remedy=remedy
        )
    return head_dim


def parse_sizes(config: Config) -> DecoderSizes:
    """Read the sizes, and refuse what no decoder here does: quantised weights, sliding windows, other activations.

    Raises:
        CheckpointError: a key missing, of the wrong type or out of range, or one of the refused features.
    """
    refuse_quantised(config)
    config.one_of("hidden_act", ["silu"], default="silu", problem="unknown activation")
    heads = config.integer("num_attention_heads", minimum=1)
    kv_heads = config.integer("num_key_value_heads", minimum=1, default=heads)
    hidden = config.integer("hidden_size", minimum=1)
    head_dim = config.integer("head_dim", minimum=1) if config.has("head_dim") else None
    layers = config.integer("num_hidden_layers", minimum=1, maximum=MAX_LAYERS)
    _refuse_windows(config, layers)
    return DecoderSizes(
        vocab_size=config.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", minimum=1),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=check_heads(
            config.where("num_attention_heads"), hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim
        ),
        rms_norm_eps=config.number("rms_norm_eps"),
        max_positions=config.integer("max_position_embeddings", minimum=1),
    )


def refuse_quantised(config: Config) -> None:
    for key in ("quantization_config", "compression_config"):
        if config.has(key):
            config.fail(
                key,
                "quantised checkpoint",
                expected="float32, float16 or bfloat16 weights",
                remedy="Use the checkpoint from before quantisation",
            )


def _refuse_windows(config: Config, layers: int) -> None:
    if config.boolean("use_sliding_window", default=False):
        config.fail("use_sliding_window", "sliding-window attention", expected="false", remedy="Not supported")
    if config.has("sliding_window"):
        config.integer("sliding_window")  # unused without use_sliding_window, but a wrong type is still a corrupt file
    types = config.sequence("layer_types", str, default=[])
    if config.has("layer_types") and len(types) != layers:
        config.fail("layer_types", "wrong length", expected=f"{layers} entries (num_hidden_layers)")
    if any(kind != "full_attention" for kind in types):
        config.fail(
            "layer_types", "unsupported layer type", expected="full_attention everywhere", remedy="Not supported"
        )
