"""`runtime.randomness`: Philox against its published vectors, keys, threads, and the law of the noise."""

import math
import random
import threading

import numpy as np
import pytest
from scipy.stats import kstest

from runtime.errors import RequestError
from runtime.randomness import Purpose, gumbel, uniforms, uniforms32

MASK = 2**64 - 1


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 as published (Salmon et al. 2011), in plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & MASK, (a >> 64) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return [c0, c1, c2, c3]


def test_philox_known_answers():
    # Random123's kat_vectors, philox4x64 with 10 rounds.
    assert philox([0] * 4, [0] * 2) == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox([MASK] * 4, [MASK] * 2) == [
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    ]


@pytest.mark.parametrize(("seed", "stream", "position"), [(0, 0, 0), (7, 3, 1000), (MASK, MASK, MASK)])
def test_uniforms_are_philox(seed: int, stream: int, position: int) -> None:
    words = [w for block in (1, 2) for w in philox([block, position, Purpose.ACCEPT, 0], [seed, stream])]
    got = uniforms(seed, stream, position, Purpose.ACCEPT, 7)
    assert got.tolist() == [(w >> 11) / 2**53 for w in words[:7]]
    single = uniforms32(seed, stream, position, Purpose.ACCEPT, 7)
    assert single.dtype == np.float32
    assert single.tolist() == [(w >> 41) / 2**23 for w in words[:7]]


def test_uniforms_do_not_depend_on_order_or_count():
    keys = [(s, r, p, u) for s in (1, 2) for r in (0, 9) for p in (1, 50) for u in Purpose]
    first = {key: uniforms(*key, 8).tolist() for key in keys}
    random.Random(1).shuffle(keys)
    for key in keys:
        assert uniforms(*key, 3).tolist() == first[key][:3]
        assert uniforms(*key).tolist() == first[key][:1]
    values = [v for row in first.values() for v in row]
    assert len(set(values)) == len(values), "every part of the key matters"
    assert len(uniforms(1, 1, 1, Purpose.DRAFT, 0)) == 0


def test_threads_do_not_mix_their_numbers():
    expected = {seed: uniforms(seed, 0, 1, Purpose.DRAFT, 5).tolist() for seed in range(4)}
    wrong = []

    def work(seed: int) -> None:
        wrong.extend(seed for _ in range(500) if uniforms(seed, 0, 1, Purpose.DRAFT, 5).tolist() != expected[seed])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_key_is_validated():
    for key in ((-1, 0, 0), (0, 2**64, 0), (0, 0, -1), (None, 0, 0)):
        with pytest.raises(RequestError, match="random numbers"):
            uniforms(*key, Purpose.DRAFT)
        with pytest.raises(RequestError, match="random numbers"):
            gumbel(*key, 5)


def test_largest_uniform_of_a_graph_stays_below_any_float32_total():
    u = np.float32(1 - 2.0**-23)
    rng = np.random.default_rng(0)
    totals = np.concatenate([np.float32([0.5, 1, 2]), rng.uniform(0.4, 2.1, 10_000).astype(np.float32)])
    assert (u * totals < totals).all()
    assert (totals - u * totals >= np.spacing(u * totals)).all()


def test_gumbel_noise_is_its_formula():
    """Word by word from Philox, in double precision."""
    words = [w for block in (1, 2) for w in philox([block, 41, 3, 0], [7, 9])]
    halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
    exact = [-math.log(-math.log1p(-(x + 0.5) / 2**32)) for x in halves]
    noise = gumbel(7, 9, 41, 15)
    assert noise.dtype == np.float32
    np.testing.assert_allclose(noise, exact[:15], rtol=0, atol=2e-6)
    assert np.array_equal(gumbel(7, 9, 41, 4), noise[:4]), "the first of a larger vocabulary"
    assert len(gumbel(7, 9, 41, 0)) == 0


@pytest.mark.parametrize("bits", [0, 1, 2**23 - 1, 2**32 - 2**8, 2**32 - 1])
def test_gumbel_noise_of_extreme_bits(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Precise where it wins, finite where it loses."""

    class Fixed:
        def raw(self, *key: int) -> np.ndarray:
            return np.full(key[-1], bits << 32 | bits, np.uint64)

    monkeypatch.setattr("runtime.randomness._philox", Fixed())
    (noise,) = gumbel(0, 0, 0, 1)
    exact = -math.log(-math.log1p(-(bits + 0.5) / 2**32))
    if bits < 2**31:
        assert abs(noise - exact) < 2e-6
    else:
        assert -2.9 < noise < -2.7


def test_gumbel_noise_depends_on_all_of_its_key():
    keys = [(s, r, p) for s in (1, 2) for r in (0, 9) for p in (1, 50)]
    first = {key: gumbel(*key, 64) for key in keys}
    for key in reversed(keys):
        assert np.array_equal(gumbel(*key, 64), first[key])
    firsts = [float(noise[0]) for noise in first.values()]
    assert len(set(firsts)) == len(firsts)


def test_gumbel_noise_follows_its_law():
    noise = np.concatenate([gumbel(5, 0, position, 1001) for position in range(200)])
    assert kstest(noise, "gumbel_r").pvalue > 0.01
    spread = gumbel(5, 1, 0, 100_000).reshape(-1, 2)
    assert abs(np.corrcoef(spread.T)[0, 1]) < 0.02, "neighbouring tokens"
