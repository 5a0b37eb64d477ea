"""Speculation never changes the output: 50 prompts of many kinds, 128 tokens each, with and without it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime.api import prompt_ids
from tests.golden.real_pair import default_settings
from tests.support import target_rows

PROMPTS = json.loads((Path(__file__).parent.parent / "data" / "prompts.json").read_text(encoding="utf-8"))
TOKENS = 128
NEAR_TIE = 1e-3
"""Where the two best logits are nearer than this, kernels that round differently may choose differently."""

WHOLE_BLOCK = range(0, len(PROMPTS), 8)
"""Prompts that also run with the whole block, not only with the default profile's settings."""


@pytest.fixture(scope="module")
def plain(real_engine: runtime.Engine) -> list[runtime.Result]:
    return runtime.generate(real_engine, _prompts(), max_new_tokens=TOKENS, ignore_eos=True, speculate=False)


def test_prompts_are_varied(real_engine: runtime.Engine) -> None:
    lengths = [len(prompt_ids(prompt, real_engine.tokenizer)) for prompt in _prompts()]
    assert len(lengths) == 50
    assert min(lengths) < 4
    assert sum(n > real_engine.bundle.manifest.limits.prefill_chunk for n in lengths) >= 3
    assert {type(prompt) for prompt in _prompts()} == {str, list}


def test_default_settings(real_engine: runtime.Engine, plain: list[runtime.Result], record_property: Any) -> None:
    with default_settings(real_engine):
        speculative = runtime.generate(real_engine, _prompts(), max_new_tokens=TOKENS, ignore_eos=True)
    assert sum(sum(result.stats.accepted) for result in speculative) > 0.2 * 50 * TOKENS
    assert all(len(result.token_ids) == TOKENS for result in plain)
    compare(real_engine, range(len(PROMPTS)), plain, speculative, record_property)


def test_whole_block(real_engine: runtime.Engine, plain: list[runtime.Result], record_property: Any) -> None:
    prompts = [_prompts()[i] for i in WHOLE_BLOCK]
    speculative = runtime.generate(real_engine, prompts, max_new_tokens=TOKENS, ignore_eos=True)
    block = real_engine.bundle.manifest.limits.block_size
    assert max(max(result.stats.accepted) for result in speculative) > block // 2
    compare(real_engine, WHOLE_BLOCK, [plain[i] for i in WHOLE_BLOCK], speculative, record_property)


def compare(
    engine: runtime.Engine,
    indices: range,
    plain: list[runtime.Result],
    speculative: list[runtime.Result],
    record_property: Any,
) -> None:
    """Equal ids, or the first difference is a near-tie, which is listed."""
    parted = []
    for i, one, other in zip(indices, plain, speculative, strict=True):
        if one.token_ids == other.token_ids:
            assert one.text == other.text
            continue
        at = next(k for k, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b)
        ids = [*prompt_ids(PROMPTS[i]["prompt"], engine.tokenizer), *one.token_ids[:at]]
        parted.append((i, at, margin(engine, ids, one.token_ids[at], other.token_ids[at])))
    lines = [f"prompt {i} parts at token {at}: margin {gap:.2g}" for i, at, gap in parted]
    record_property("near-ties", lines)
    for line in lines:
        warnings.warn(line, stacklevel=2)
    assert all(gap < NEAR_TIE for _, _, gap in parted), lines


def margin(engine: runtime.Engine, ids: list[int], *chosen: int) -> float:
    """How far the lesser of the `chosen` tokens lies below the best logit after `ids`, by a plain prefill in a slot
    that nobody uses now."""
    chunk = engine.bundle.manifest.limits.prefill_chunk
    for at in range(0, len(ids), chunk):
        out = engine._session.prefill(target_rows(np.array([ids[at : at + chunk]]), np.array([at]), np.array([0])))
    logits = out.logits[0]
    return float(logits.max() - min(logits[token] for token in chosen))


def _prompts() -> list[Any]:
    return [entry["prompt"] for entry in PROMPTS]
