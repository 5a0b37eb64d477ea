"""Plain decoding by Hugging Face transformers, on the very weights that the bundle was built from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch

from builder.checkpoints import load_target
from runtime import Engine
from tests.bench.arithmetic import first_difference, median_ratio, summary
from tests.bench.decoding import PLAIN, Run, run
from tests.bench.plan import KINDS, BenchPrompt, Plan

ATTENTION = ("eager", "sdpa")
# Lets one library's worker threads fall asleep before the other's turn.
_PAUSE = 0.1


def load_model(path: Path) -> Any:
    """The target as a float32 `LlamaForCausalLM` with the checkpoint's de-quantised tensors."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM

    target = load_target(path)
    spec = target.spec
    if spec.family != "llama" or spec.rope.kind != "default":
        raise ValueError(f"the baseline knows plain Llama only, found {spec.family} with {spec.rope.kind} RoPE")
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=spec.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=spec.tied,
        attention_bias=spec.qkv_bias,
        mlp_bias=spec.mlp_bias,
    )
    model: Any = LlamaForCausalLM(config)
    model.float().eval()
    state = {name: target.tensors.read(name).to(torch.float32) for name in target.tensors.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    left = [name for name in missing if not (spec.tied and name == "lm_head.weight")]
    if left or unexpected:
        raise ValueError(f"tensors don't fit: missing {left}, unexpected {unexpected}")
    model.tie_weights()
    return model


@torch.inference_mode()
def decode(model: Any, ids: Sequence[int], count: int) -> tuple[list[int], float]:
    """Greedy continuation of `count` tokens with a KV cache; its ids, and seconds per token after the prefill's.

    The loop is bare (`generate` adds some tenths of a millisecond a token), so the baseline is at its best.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    token = _next(model, torch.tensor([list(ids)]), cache)
    tokens = [token]
    began = perf_counter()
    for _ in range(count - 1):
        token = _next(model, token.view(1, 1), cache)
        tokens.append(token)
    seconds = perf_counter() - began
    return [int(t) for t in tokens], seconds / (count - 1)


def _next(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
    best: torch.Tensor = logits[0, -1].argmax()
    return best


def measure_transformers(engine: Engine, target: Path, prompts: Sequence[BenchPrompt], plan: Plan) -> dict[str, object]:
    """Our plain decoding, eager and sdpa in turn on every prompt, as many tokens each as ours produced. The better of
    the two (by the median of all pairs) is the baseline.
    """
    torch.set_num_threads(plan.threads)
    model = load_model(target)
    for attention in ATTENTION:
        model.set_attn_implementation(attention)
        decode(model, prompts[0].ids, 4)
    run(engine, prompts[0], 8, "plain", **PLAIN)
    pairs: list[dict[str, Any]] = []
    for prompt in [p for _ in range(plan.hf_repeats) for p in prompts]:
        ours = run(engine, prompt, plan.hf_tokens, "plain", **PLAIN)
        if ours is not None:
            pairs.append(_pair(model, prompt, ours))
    medians = {a: median_ratio([p[a] for p in pairs], [p["ours"] for p in pairs]) for a in ATTENTION}
    best = min(ATTENTION, key=lambda a: medians[a])
    by_kind = {}
    for kind in KINDS:
        mine = [p for p in pairs if p["kind"] == kind]
        if mine:
            by_kind[kind] = {
                "speedup": median_ratio([p[best] for p in mine], [p["ours"] for p in mine]),
                "tokens_per_second": summary(1 / p[best] for p in mine),
                "ours_tokens_per_second": summary(1 / p["ours"] for p in mine),
            }
    parted = {p["prompt"]: p["parts_at"] for p in pairs if any(at is not None for at in p["parts_at"].values())}
    return {
        "best": best,
        "speedup": medians[best],
        "speedups": medians,
        "token_ms": {a: summary(1e3 * p[a] for p in pairs) for a in ("ours", *ATTENTION)},
        "kinds": by_kind,
        "prompts": len({p["prompt"] for p in pairs}),
        "parted": parted,
        "pairs": pairs,
        "threads": torch.get_num_threads(),
    }


def _pair(model: Any, prompt: BenchPrompt, ours: Run) -> dict[str, Any]:
    """Seconds per token of ours and of each attention, and where their tokens part from ours (None: nowhere)."""
    result: dict[str, Any] = {
        "prompt": prompt.name,
        "kind": prompt.kind,
        "tokens": len(ours.token_ids),
        "ours": ours.token_seconds,
        "parts_at": {},
    }
    for attention in ATTENTION:
        model.set_attn_implementation(attention)
        sleep(_PAUSE)
        tokens, result[attention] = decode(model, prompt.ids, len(ours.token_ids))
        result["parts_at"][attention] = first_difference(tokens, ours.token_ids)
    sleep(_PAUSE)
    return result
