"""Greedy without logits on the host equals the path with logits: what the graphs pick is the argmax of what they
compute, and a batch in which some row samples (whose draft takes another branch) gives its greedy rows the same ids and
confidences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import runtime
from runtime.bundle import open_bundle
from runtime.sessions.base import DraftOut, DraftRows
from runtime.sessions.ort import OrtSession
from runtime.verify import accept_greedy
from tests.support import seed_rows, target_rows, tiny_prompts


def prefilled(session: Any, prompts: list[list[int]]) -> NDArray[np.int64]:
    """Each prompt in the slot of its index, rings seeded; the first tokens, which are the argmax of the logits."""
    first = []
    for i, prompt in enumerate(prompts):
        chunk = session.limits.prefill_chunk
        slot = np.array([i])
        for at in range(0, len(prompt), chunk):
            ids, start = np.array([prompt[at : at + chunk]]), np.array([at])
            out = session.prefill(target_rows(ids, start, slot))
            session.seed(seed_rows(start, ids.shape[1], slot))
            np.testing.assert_array_equal(out.argmax, out.logits.argmax(-1))
        first.append(int(out.argmax[0]))
    return np.array(first)


def draft(session: Any, bonus: NDArray[Any], start: NDArray[Any], temperature: list[float]) -> DraftOut:
    """A whole block for each slot, from the ring as seeded; drafting again writes nothing new."""
    rows = len(bonus)
    valid = np.minimum(start, session.limits.window)
    uniforms = np.full((rows, session.limits.block_size), 0.5, np.float32)
    zero, slot = np.zeros(rows, np.int64), np.arange(rows)
    return session.draft(DraftRows(bonus, start, valid, zero, slot, np.array(temperature, np.float32), uniforms))


@pytest.mark.parametrize("pair", ["llama", "qwen3"])
def test_greedy_rows_of_a_mixed_batch(tiny_bundle: Callable[..., Path], pair: str) -> None:
    bundle = open_bundle(tiny_bundle(pair), check="quick")
    session = OrtSession(bundle.path, bundle.manifest, threads=1)
    prompts = [p["input_ids"] for p in tiny_prompts(pair)]
    for one in range(len(prompts) - 1):
        chosen = prompts[one : one + 2]
        bonus, start = prefilled(session, chosen), np.array([len(p) for p in chosen])
        greedy = draft(session, bonus, start, [0, 0])
        assert greedy.q is None
        for sampling in (0, 1):
            temperature = [1.0 if row == sampling else 0.0 for row in range(2)]
            mixed = draft(session, bonus, start, temperature)
            assert mixed.q is not None
            row = 1 - sampling
            np.testing.assert_array_equal(mixed.ids[row], greedy.ids[row])
            np.testing.assert_array_equal(confidence(mixed)[row], confidence(greedy)[row])
        ids = np.concatenate((bonus[:, None], greedy.ids), axis=1)
        out = session.verify(target_rows(ids, start, np.arange(2)))
        np.testing.assert_array_equal(out.argmax, out.logits.argmax(-1))
    session.close()


def test_real_pair(real_engine: runtime.Engine) -> None:
    """Both branches of the draft engine, with a vocabulary four hundred times as large, over several rounds."""
    session: Any = real_engine._session
    assert real_engine.tokenizer is not None
    ids = real_engine.tokenizer.encode_chat([{"role": "user", "content": "What is 12 times 12? Explain."}])
    (bonus,), start = prefilled(session, [ids]), len(ids)
    slot, new_len = np.array([0]), 0
    for _ in range(12):
        block = session.limits.block_size
        inputs = (np.array([bonus]), np.array([start]), np.array([start]), np.array([new_len]), slot)
        results = []
        # A temperature next to none draws the argmax, through the other branch.
        for temperature in (0.0, 1e-5):
            uniforms = np.full((1, block), 0.5, np.float32)
            results.append(session.draft(DraftRows(*inputs, np.array([temperature], np.float32), uniforms)))
        np.testing.assert_array_equal(results[0].ids, results[1].ids)
        np.testing.assert_array_equal(confidence(results[0]), confidence(results[1]))
        drafts = results[0].ids[0]
        verified = session.verify(target_rows(np.array([[bonus, *drafts]]), np.array([start]), slot))
        np.testing.assert_array_equal(verified.argmax, verified.logits.argmax(-1))
        accepted, token = accept_greedy(drafts, verified.argmax)
        bonus, start, new_len = token, start + accepted + 1, accepted + 1


def confidence(out: DraftOut) -> NDArray[np.float32]:
    assert out.confidence_logits is not None
    return out.confidence_logits
