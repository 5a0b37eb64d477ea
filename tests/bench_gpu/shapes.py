"""The 8B-shaped drafter, and what a step of it has to move and multiply at the least."""

from __future__ import annotations

from dataclasses import dataclass, replace

from builder.spec import DrafterSpec, RopeSpec, TargetSpec

BATCHES = (1, 8, 32)
WINDOW = 2048
MAX_SEQ_LEN = 16384
"""Positions go beyond the window, so that a ring can have wrapped."""

_ROPE = RopeSpec(theta=1_000_000.0)
DRAFTER = DrafterSpec(
    block_size=7, taps=(1, 9, 17, 25, 33), num_target_layers=36, mask_token_id=151_669, vocab_size=151_936,
    hidden_size=4096, intermediate_size=12_288, num_layers=5, num_heads=32, num_kv_heads=8, head_dim=128,
    rms_norm_eps=1e-6, rope=_ROPE, max_positions=40_960, attention_bias=False, markov="vanilla", markov_rank=256,
    confidence="markov", own_embeddings=False, own_lm_head=False,
)  # fmt: skip
"""As published for Qwen3-8B, embedding and lm_head the target's."""


def fitting_target(drafter: DrafterSpec) -> TargetSpec:
    """A target that the drafter's graphs can be exported with; nothing of it is measured."""
    return TargetSpec(
        "qwen3", drafter.vocab_size, drafter.hidden_size, drafter.intermediate_size, drafter.num_target_layers,
        drafter.num_heads, drafter.num_kv_heads, drafter.head_dim, drafter.rms_norm_eps, drafter.rope,
        drafter.max_positions, qk_norm=True, qkv_bias=False, o_bias=False, mlp_bias=False, tied=False,
    )  # fmt: skip


def small(drafter: DrafterSpec) -> DrafterSpec:
    """The same drafter with every size small, for tests that run it on a CPU."""
    return replace(
        drafter, vocab_size=83, mask_token_id=82, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, markov_rank=8, taps=(0, 2), num_target_layers=4, max_positions=256, block_size=5,
    )  # fmt: skip


@dataclass(frozen=True)
class Product:
    """``[rows, k] × [k, n]`` by the weight of that name, `times` in a row."""

    weight: str
    rows: int
    k: int
    n: int
    times: int = 1


def products(spec: DrafterSpec, batch: int) -> list[Product]:
    """Every product of a step at a full block: the context's on B+1 rows a sequence, the layers' and the lm_head on B,
    and the chain's on one, B times.
    """
    block, hidden, inner = spec.block_size * batch, spec.hidden_size, spec.intermediate_size
    context = (spec.block_size + 1) * batch
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    made = [Product("drafter.context.fc.weight", context, len(spec.taps) * hidden, hidden)]
    made += [Product(f"drafter.context.layers.{i}.kv.weight", context, hidden, 2 * kv) for i in range(spec.num_layers)]
    for i in range(spec.num_layers):
        layer = f"drafter.layers.{i}"
        made += [
            Product(f"{layer}.qkv.weight", block, hidden, q + 2 * kv),
            Product(f"{layer}.o.weight", block, q, hidden),
            Product(f"{layer}.mlp.gate_up.weight", block, hidden, 2 * inner),
            Product(f"{layer}.mlp.down.weight", block, inner, hidden),
        ]
    made.append(Product("drafter.lm_head.weight", block, hidden, spec.vocab_size))
    made.append(Product("drafter.markov.w2", batch, spec.markov_rank, spec.vocab_size, times=spec.block_size))
    return made


def weight_bytes(spec: DrafterSpec, itemsize: int = 2) -> int:
    """Of the matrices that a step reads, each once: the context's K and V are part of qkv, W2 counts once."""
    return sum(itemsize * p.k * p.n for p in products(spec, 1) if not p.weight.endswith(".kv.weight"))


def ring_bytes(spec: DrafterSpec, batch: int, visible: int, itemsize: int = 2) -> int:
    """Of the visible ring rows that a step reads: K and V of every layer and sequence."""
    return batch * visible * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * itemsize
