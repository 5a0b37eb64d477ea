"""The tiny pairs through the engine on a card, with the kernels and without: golden tokens in float32, and what
speculation may change in 16 bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import Engine, Request, Result, SamplingParams
from runtime.bundle import open_bundle
from runtime.errors import PluginWarning
from runtime.sessions.base import TargetRows
from runtime.sessions.ort_cuda import PLUGINS_VARIABLE, OrtCudaSession
from tests.plugins.kernels import BUILD
from tests.support import tiny_prompts

PROFILE: dict[str, Any] = {"batches": (1, 2, 4), "window": 16, "max_seq_len": 96, "prefill_chunk": 16}
LENGTH = 48
MARGIN = 0.25
"""In 16 bits, runs may part where the best two logits of the float32 model are nearer than this."""

Bundle = Callable[..., Path]


@pytest.fixture(params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["kernels", "bodies"])
def plugins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the library of kernels is there."""
    if request.param == "bodies":
        monkeypatch.delenv(PLUGINS_VARIABLE, raising=False)
        return False
    if not (BUILD / "libdspark_ort.so").exists():
        pytest.skip(f"{BUILD} has no libdspark_ort.so (plugins/README.md)")
    monkeypatch.setenv(PLUGINS_VARIABLE, str(BUILD))
    return True


@contextmanager
def opened(path: Path, plugins: bool, **options: Any) -> Iterator[Engine]:
    manifest = open_bundle(path, check="quick").manifest
    with warnings.catch_warnings():
        warnings.simplefilter("error" if plugins else "ignore", PluginWarning)
        session = OrtCudaSession(path, manifest, **options)
    with Engine(path, check="quick", session=session) as engine:
        yield engine


def serve(engine: Engine, pair: str, speculate: bool, **settings: Any) -> list[Result]:
    handles = [
        engine.submit(
            Request(
                tuple(prompt["input_ids"]),
                max_new_tokens=LENGTH,
                ignore_eos=True,
                speculate=speculate,
                adaptive=False,
                **settings,
            )
        )
        for prompt in tiny_prompts(pair)
    ]
    return [engine.result(handle) for handle in handles]


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "speculative"])
def test_golden_tokens_in_float32(tiny_bundle: Bundle, pair: str, plugins: bool, speculate: bool) -> None:
    with opened(tiny_bundle(pair, backend="ort-cuda", **PROFILE), plugins) as engine:
        results = serve(engine, pair, speculate)
    for prompt, result in zip(tiny_prompts(pair), results, strict=True):
        assert list(result.token_ids) == prompt["greedy_new_tokens"][:LENGTH]
    assert (sum(sum(result.stats.accepted) for result in results) > 60) == speculate


@pytest.mark.parametrize("coupling", ["rejection", "gumbel"])
def test_draws_are_those_of_the_cpu(tiny_bundle: Bundle, pair: str, plugins: bool, coupling: Any) -> None:
    sampling = SamplingParams(0.9, seed=3, coupling=coupling, top_p=0.95)
    with opened(tiny_bundle(pair, backend="ort-cuda", **PROFILE), plugins) as engine:
        found = serve(engine, pair, True, sampling=sampling)
    with Engine(tiny_bundle(pair, **PROFILE), check="quick") as engine:
        wanted = serve(engine, pair, True, sampling=sampling)
    assert [result.token_ids for result in found] == [result.token_ids for result in wanted]


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_one_width_gives_the_same_bits(tiny_bundle: Bundle, pair: str, plugins: bool, precision: str) -> None:
    """Plain decoding through the width that verifies a block."""
    bundle = tiny_bundle(pair, backend="ort-cuda", precision=precision, **PROFILE)
    with opened(bundle, plugins, fixed_width=True) as engine:
        plain, speculative = (serve(engine, pair, speculate) for speculate in (False, True))
    assert [result.token_ids for result in plain] == [result.token_ids for result in speculative]
    assert sum(sum(result.stats.accepted) for result in speculative) > 40


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_what_16_bits_change_was_nearly_tied(
    tiny_bundle: Bundle, pair: str, plugins: bool, precision: str, record_property: Any
) -> None:
    """Against the golden tokens, with and without drafts: the first token that differs is listed with its margin."""
    with opened(tiny_bundle(pair, backend="ort-cuda", precision=precision, **PROFILE), plugins) as engine:
        runs = {speculate: serve(engine, pair, speculate) for speculate in (False, True)}
    exact = tiny_bundle(pair, backend="ort-cuda", **PROFILE)
    session = OrtCudaSession(exact, open_bundle(exact, check="quick").manifest, 1, device="cpu")
    parted = []
    for speculate, results in runs.items():
        for i, (prompt, result) in enumerate(zip(tiny_prompts(pair), results, strict=True)):
            golden = prompt["greedy_new_tokens"][:LENGTH]
            at = next((k for k, (a, b) in enumerate(zip(golden, result.token_ids, strict=True)) if a != b), None)
            if at is not None:
                before = [*prompt["input_ids"], *golden[:at]]
                parted.append((speculate, i, at, margin(session, before, golden[at], result.token_ids[at])))
    lines = [f"prompt {i}, drafts {s}: token {at} differs, margin {gap:.3g}" for s, i, at, gap in parted]
    record_property("near-ties", lines)
    for line in lines:
        warnings.warn(line, stacklevel=1)
    assert all(gap < MARGIN for *_, gap in parted), lines


def margin(session: OrtCudaSession, ids: list[int], *chosen: int) -> float:
    """How far the lesser of the `chosen` tokens lies below the best logit after `ids`."""
    chunk, out = session.limits.prefill_chunk, None
    for at in range(0, len(ids), chunk):
        part = np.array(ids[at : at + chunk])
        one = np.ones(1, np.int64)
        out = session.prefill(TargetRows(part, one * len(part), one * at, 0 * one, 0 * one))
    assert out is not None
    logits = out.logits[0]
    return float(logits.max() - min(logits[token] for token in chosen))
