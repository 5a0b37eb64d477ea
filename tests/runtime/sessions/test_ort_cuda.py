"""The session for CUDA, run in the process: its graphs' bodies of standard operators, its own packing and padding.

What it computes is held to the CPU's session, call by call, and to the golden tokens through an engine. What only a GPU
has (kernels, captured graphs) is tested in ``tests/gpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import Engine, Request, SamplingParams
from runtime.bundle import check_machine, open_bundle
from runtime.errors import BackendUnavailable, BundleError, PluginWarning, RequestError
from runtime.machine import Gpu
from runtime.manifest import PLUGINS_FILE
from runtime.sessions import ort_cuda
from runtime.sessions.base import DraftRows, SeedRows, Session, SlotCopy, TargetOut, TargetRows
from runtime.sessions.ort import OrtSession
from runtime.sessions.ort_cuda import OrtCudaSession
from tests.support import tiny_prompts

PAIRS = ["llama", "qwen3"]
PROFILE: dict[str, Any] = {"batches": (1, 2, 4), "window": 16, "max_seq_len": 96, "prefill_chunk": 16}


@dataclass(frozen=True)
class Both:
    """The same pair for both back ends."""

    name: str
    cuda: Path
    cpu: Path

    def open(self) -> tuple[OrtCudaSession, OrtSession]:
        manifests = [open_bundle(path, check="quick").manifest for path in (self.cuda, self.cpu)]
        return OrtCudaSession(self.cuda, manifests[0], 1, device="cpu"), OrtSession(self.cpu, manifests[1], 1)


@pytest.fixture(params=PAIRS)
def both(request: pytest.FixtureRequest, tiny_bundle: Callable[..., Path]) -> Both:
    cuda, cpu = (tiny_bundle(request.param, backend=name, **PROFILE) for name in ("ort-cuda", "ort-cpu"))
    return Both(request.param, cuda, cpu)


@pytest.fixture
def sessions(both: Both) -> Iterator[tuple[Session, Session]]:
    opened = both.open()
    yield opened
    for session in opened:
        session.close()


@pytest.fixture
def engine(both: Both) -> Iterator[Engine]:
    with Engine(both.cuda, check="quick", session=both.open()[0]) as engine:
        yield engine


def rows(ids: list[list[int]], start: list[int], slot: list[int], tap_row: list[int] | None = None) -> TargetRows:
    count = np.array([len(row) for row in ids])
    at = np.zeros(len(ids), np.int64) if tap_row is None else np.array(tap_row)
    return TargetRows(np.array([i for row in ids for i in row]), count, np.array(start), np.array(slot), at)


def same(one: TargetOut, other: TargetOut) -> None:
    np.testing.assert_array_equal(one.argmax, other.argmax)
    for i in range(len(other.logits)):
        np.testing.assert_allclose(one.logits[i], other.logits[i], rtol=0, atol=1e-4)
        assert one.logits[i, int(one.argmax[i])] == pytest.approx(other.logits[i].max(), abs=1e-4)
        assert one.logits[i, 3] == one.logits[i][3]


def script(session: Session, pair: str) -> Iterator[Any]:
    """Rows of unlike lengths in slots out of order; a prompt in chunks, seeded in one go; drafts; a copied slot."""
    ids = [prompt["input_ids"] for prompt in tiny_prompts(pair)]
    long, short = (ids[0] * 9)[:21], ids[1][:5]
    yield session.prefill(rows([long[:16], short], [0, 0], [3, 1]))
    session.seed(SeedRows(np.array([0, 0]), np.array([16, 5]), np.array([3, 1])))
    yield session.prefill(rows([long[16:]], [16], [3]))
    session.copy(SlotCopy(1, 2, 5, 0, 5, 0))
    floats = np.zeros((3, 4), np.float32)
    block = session.draft(
        DraftRows(
            bonus=np.array([7, 8, 8]),
            start=np.array([21, 5, 5]),
            valid_len=np.array([16, 5, 5]),
            new_len=np.array([5, 0, 0]),
            slot=np.array([3, 1, 2]),
            temperature=floats[:, 0],
            uniforms=floats,
        )
    )
    yield block
    np.testing.assert_array_equal(block.ids[1], block.ids[2])  # the copy drafts what its source does
    drafts = block.ids.tolist()
    # As many ids as each row likes, so that one is padded to the width of another.
    yield session.verify(rows([[7, *drafts[0]], [8], [8, *drafts[2][:2]]], [21, 5, 5], [3, 1, 2]))
    yield session.verify(rows([[9]], [22], [3], [1]))


def test_calls_do_what_those_of_the_cpu_do(sessions: tuple[Session, Session], both: Both) -> None:
    """Step by step, since outputs are views that later calls overwrite."""
    for one, other in zip(*(script(session, both.name) for session in sessions), strict=True):
        if isinstance(one, TargetOut):
            same(one, other)
        else:
            np.testing.assert_array_equal(one.ids, other.ids)
            np.testing.assert_allclose(one.confidence_logits, other.confidence_logits, rtol=0, atol=1e-4)
            assert one.q is None


@pytest.mark.parametrize("noisy", [False, True], ids=["uniforms", "noise"])
def test_draws_are_those_of_the_cpu(sessions: tuple[Session, Session], both: Both, noisy: bool) -> None:
    ids = [prompt["input_ids"][:6] for prompt in tiny_prompts(both.name)[:2]]
    rng = np.random.default_rng(5)
    vocab = open_bundle(both.cpu, check="quick").manifest.models.vocab_size
    uniforms = rng.random((2, 3), np.float32)
    noise = rng.gumbel(size=(2, 3, vocab)).astype(np.float32) if noisy else None
    temperature = np.array([0.0 if noisy else 0.8, 0.0], np.float32)
    blocks = []
    for session in sessions:
        session.prefill(rows(ids, [0, 0], [0, 1]))
        start = np.array([6, 6])
        draft = DraftRows(start, start, start, start, np.array([0, 1]), temperature, uniforms, noise)
        blocks.append(session.draft(draft))
    one, other = blocks
    np.testing.assert_array_equal(one.ids, other.ids)
    if noisy:
        assert one.q is None
    else:
        assert one.q is not None
        assert other.q is not None
        assert len(one.q) == 2
        np.testing.assert_allclose(one.q[0], other.q[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(one.q[0].sum(axis=-1), 1, rtol=1e-5)
        np.testing.assert_array_equal(one.q[-2], one.q[0])
        with pytest.raises(IndexError):
            one.q[2]


def test_only_what_is_looked_at_is_fetched(
    sessions: tuple[Session, Session], both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = sessions[0]
    out = session.verify(rows([[1, 2, 3], [4]], [0, 0], [0, 1]))
    reads: list[int] = []
    read = session._memory.read
    monkeypatch.setattr(
        session._memory, "read", lambda address, array: (reads.append(array.size), read(address, array))
    )
    best = [float(out.logits[i, int(token)]) for i, token in enumerate(out.argmax)]
    assert reads == []
    part = out.logits[1:3]
    assert len(part) == 2
    row = part[0]
    assert reads == [len(row)]
    assert row.max() == pytest.approx(best[1])


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "speculative"])
def test_golden_tokens(engine: Engine, both: Both, speculate: bool) -> None:
    prompts = tiny_prompts(both.name)
    requests = [
        Request(tuple(p["input_ids"]), max_new_tokens=48, speculate=speculate, adaptive=False, ignore_eos=True)
        for p in prompts
    ]
    results = [engine.result(handle) for handle in [engine.submit(request) for request in requests]]
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == prompt["greedy_new_tokens"][:48]
    assert (sum(sum(result.stats.accepted) for result in results) > 40) == speculate


@pytest.mark.parametrize("coupling", ["rejection", "gumbel"])
def test_sampled_tokens_are_those_of_the_cpu(engine: Engine, both: Both, coupling: Any) -> None:
    request = Request(
        tuple(tiny_prompts(both.name)[0]["input_ids"]),
        max_new_tokens=24,
        sampling=SamplingParams(0.8, seed=4, coupling=coupling, top_p=0.9, repetition_penalty=1.1),
        ignore_eos=True,
        adaptive=False,
        logprobs=2,
    )
    with Engine(both.cpu, check="quick", threads=1) as other:
        one, two = (e.result(e.submit(request)) for e in (engine, other))
    assert one.token_ids == two.token_ids
    assert one.logprobs is not None


def test_one_width_for_all(both: Both) -> None:
    manifest = open_bundle(both.cuda, check="quick").manifest
    session: Any = OrtCudaSession(both.cuda, manifest, 1, device="cpu", fixed_width=True)
    out = session.verify(rows([[5]], [0], [0]))
    assert len(out.argmax) == len(out.logits) == 1
    (key,) = session._graphs["target"]._variants
    assert key[0] == (1, manifest.limits.block_size + 1)


def test_calls_that_no_engine_takes(sessions: tuple[Session, Session]) -> None:
    session = sessions[0]
    floats = np.zeros((1, 2), np.float32)
    one = np.ones(1, np.int64)
    with pytest.raises(RequestError, match="start_pos"):
        session.draft(DraftRows(one, 0 * one, 0 * one, 0 * one, 0 * one, floats[:, 0], floats))
    with pytest.raises(RequestError, match="new_len"):
        session.draft(DraftRows(one, one * 50, one, one * 50, 0 * one, floats[:, 0], floats))
    with pytest.raises(RequestError, match="no engine holds so many rows"):
        session.verify(rows([[1]] * 5, [0] * 5, [0] * 5))
    with pytest.raises(RequestError, match="more rows than a call takes"):
        session.prefill(rows([[1] * 17], [0], [0]))


def test_without_kernels_there_is_a_warning(
    both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    manifest = open_bundle(both.cuda, check="quick").manifest
    monkeypatch.delenv("DSPARK_PLUGINS", raising=False)
    with pytest.warns(PluginWarning, match="no library of kernels"):
        assert ort_cuda._plugin_library(both.cuda, manifest) is None
    monkeypatch.setenv("DSPARK_PLUGINS", str(tmp_path))
    with pytest.warns(PluginWarning):
        assert ort_cuda._plugin_library(both.cuda, manifest) is None
    library = tmp_path / "libdspark_ort.so"
    library.write_bytes(b"no library")
    for named in (tmp_path, library):
        monkeypatch.setenv("DSPARK_PLUGINS", str(named))
        assert ort_cuda._plugin_library(both.cuda, manifest) == library
    with pytest.raises(BundleError, match=r"libdspark_ort.so: is no library of kernels for this machine"):
        ort_cuda._loader(both.cuda, "cpu", 1, library)
    assert PLUGINS_FILE.endswith(library.name)


def test_a_gpu_is_asked_for_before_anything_is_loaded(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(both.cuda, check="quick")
    monkeypatch.setattr("runtime.libraries.installed", lambda name: "1.31.1")
    monkeypatch.setattr("runtime.machine.gpus", lambda: ())
    with pytest.raises(BackendUnavailable, match="needs a GPU, and the driver shows none"):
        check_machine(bundle)
    monkeypatch.setattr("runtime.machine.gpus", lambda: (Gpu("a card", "sm_90", 1000),))
    with pytest.raises(BundleError, match=r"needs more memory than the GPU has.*found 1000 B"):
        check_machine(bundle)
    monkeypatch.setattr("runtime.machine.gpus", lambda: (Gpu("a card", "sm_90", 1 << 40),))
    check_machine(bundle)
