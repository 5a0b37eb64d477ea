"""Memory by kind, and what is free where it will be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import machine
from runtime.bundle import memory_of, open_bundle
from runtime.machine import Gpu
from runtime.manifest import Backend, Memory, StateTensor
from runtime.preflight import KINDS, Preflight
from tests.examples import tensorrt_example

MakeBundle = Callable[..., Path]
ENGINES = 2 * sum(100 + width for width in (1, 4, 5, 8, 5, 8, 3, 4, 3, 4, 3, 4))


def test_state_by_kind(make_bundle: MakeBundle) -> None:
    state = (
        StateTensor("k_cache.0", "cache", (2, 68, 8), "float32"),
        StateTensor("v_cache.0", "cache", (2, 68, 8), "float16"),
        StateTensor("ring_k.0", "ring", (2, 16, 8), "bfloat16"),
        StateTensor("taps", "taps", (8, 24), "float32"),
    )
    bundle = open_bundle(make_bundle(state=state, memory=Memory(5000, 0, 0, 50_000)))
    memory = memory_of(bundle, 50_000)
    cache, ring, taps = 3 * 2 * 68 * 8 * (4 + 2), 3 * 2 * 16 * 8 * 2, 3 * 8 * 24 * 4
    other = 50_000 - 5000 - cache - ring - taps
    assert memory.needed == dict(zip(KINDS, (5000, cache, ring, taps, 0, other, 0), strict=True))
    assert (memory.total, memory.fits, memory.on) == (50_000, True, "host")
    assert not memory_of(bundle, 49_999).fits


def test_engines_and_what_they_copy(make_bundle: MakeBundle) -> None:
    """All engines copy the same state, by turns: one second buffer."""
    memory = memory_of(open_bundle(make_bundle(**tensorrt_example(kernels=False))), 0)
    assert memory.needed == dict(zip(KINDS, (5000, 0, 0, 1440, 1440, 700, ENGINES), strict=True))
    memory = memory_of(open_bundle(make_bundle("kernels", **tensorrt_example())), 0)
    assert memory.needed == dict(zip(KINDS, (5000, 0, 0, 1440, 0, 700, ENGINES), strict=True))
    assert memory.kinds() == "weights 4.9 KiB, taps 1.4 KiB, other 700 B, engines 2.4 KiB"


def test_gpu_memory_is_what_is_free_there(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = open_bundle(make_bundle(**tensorrt_example()))
    monkeypatch.setattr(machine, "available_memory", lambda: 7)
    for cards, free in (
        ((Gpu("a", "sm_89", 1000, 600), Gpu("b", "sm_89", 9000, 9000)), 600),
        ((Gpu("a", "sm_89", 1000),), 1000),
        ((), None),
    ):
        monkeypatch.setattr(machine, "gpus", lambda cards=cards: cards)
        memory = memory_of(cuda)
        assert (memory.free, memory.on) == (free, "gpu")
        assert memory.fits is (free is None)
    assert memory_of(open_bundle(make_bundle("cpu"))).free == 7


def test_an_unknown_back_end_is_taken_for_one_of_the_host(make_bundle: MakeBundle) -> None:
    bundle = open_bundle(make_bundle(backend=Backend("quantum", "quantum", "1", "any", "f32")))
    assert memory_of(bundle, 1).on == "host"


def test_unknown_memory_fits() -> None:
    assert Preflight({"weights": 1 << 60}, None, "gpu").fits
