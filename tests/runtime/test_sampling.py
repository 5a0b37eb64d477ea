"""`runtime.sampling`: parameters, probabilities against a plain oracle, draws, and Philox against its published
vectors."""

import math
import random
import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.errors import RequestError
from runtime.sampling import Purpose, SamplingParams, draw, probabilities, uniforms, uniforms32

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


@pytest.mark.parametrize("value", [-1, -1e-9, math.nan, math.inf, True, "1", None, 1e-6, 1e6, 10**400])
def test_temperature_is_validated(value: object) -> None:
    with pytest.raises(RequestError, match=r"^temperature: .*\. Use 0 for the likeliest token$"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize("value", [0, -0.1, 1.0001, math.nan, math.inf, True, "0.9", None])
def test_top_p_is_validated(value: object) -> None:
    with pytest.raises(RequestError, match=r"^top_p: .*\. Use 1 for no cut$"):
        SamplingParams(top_p=value)


@pytest.mark.parametrize("value", [-1, 2**64, 1.0, True, "1"])
def test_seed_is_validated(value: object) -> None:
    with pytest.raises(RequestError, match=r"^seed: .*\. Use None for a seed that the engine chooses$"):
        SamplingParams(seed=value)


def test_parameters_are_plain_numbers():
    params = SamplingParams(np.float32(0.5), np.float64(0.9), np.int64(3))
    assert params == SamplingParams(0.5, 0.9, 3)
    assert type(params.temperature) is float
    assert type(params.seed) is int
    assert SamplingParams().greedy
    assert SamplingParams(0, 1, 2**64 - 1).greedy
    assert not SamplingParams(1e-5).greedy


def oracle(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature and top_p by the definition: a full sort, ties by id."""
    p = probabilities(logits, SamplingParams(params.temperature))
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    kept, total = [], 0.0
    for i in order:
        kept.append(i)
        total += float(p[i])
        if total >= params.top_p and params.top_p < 1:  # 1 is no cut, though float32's rounding may reach it early
            break
    out = np.zeros(len(p))
    out[kept] = p[kept] / p[kept].sum()
    return out


@given(
    st.lists(st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, 1.0, -math.inf])), min_size=1, max_size=40),
    st.floats(0.05, 5),
    st.one_of(st.floats(1e-6, 1), st.sampled_from([1e-300, 0.25, 0.5, 0.75, 1 - 2**-53])),
)
@example([0.0] * 9 + [13.1875, -4.0], 1.0, 1.0)
@settings(max_examples=200, deadline=None)
def test_probabilities(values: list[float], temperature: float, top_p: float) -> None:
    logits = np.array(values, np.float32)
    if logits.max() == -np.inf:
        logits[0] = 0
    params = SamplingParams(temperature, top_p)
    before = logits.copy()
    p = probabilities(logits, params)
    assert p.dtype == np.float32
    assert np.array_equal(logits, before), "the logits are the session's"
    expected = oracle(logits, params)
    assert np.array_equal(p > 0, expected > 0)
    assert np.abs(p - expected).max() < 1e-6
    exact = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    assert np.abs(probabilities(logits, SamplingParams(temperature)) - exact / exact.sum()).max() < 1e-6


def test_top_p_ties_take_the_lower_ids_and_at_least_one_token():
    logits = np.array([0, 1, 1, 1, 1], np.float32)
    logits[0] = -np.inf
    assert np.flatnonzero(probabilities(logits, SamplingParams(1, 0.5))).tolist() == [1, 2]
    assert np.flatnonzero(probabilities(logits, SamplingParams(1, 0.51))).tolist() == [1, 2, 3]
    assert np.flatnonzero(probabilities(logits, SamplingParams(1, 1e-9))).tolist() == [1]


def test_top_p_of_a_large_vocabulary():
    logits = np.random.default_rng(3).standard_normal(5000).astype(np.float32)
    logits[::7] = logits[0]  # ties, right through the order
    for top_p in (0.01, 0.3, 0.9, 0.999, 0.9999999):
        params = SamplingParams(0.8, top_p)
        expected = oracle(logits, params)
        assert np.array_equal(probabilities(logits, params) > 0, expected > 0), top_p


def test_extreme_temperatures_and_logits():
    logits = np.array([3e38, -3e38, 1.0, 3e38], np.float32)
    assert probabilities(logits, SamplingParams(1e-5)).tolist() == [0.5, 0, 0, 0.5]
    assert np.allclose(probabilities(np.array([1, 2, 3], np.float32), SamplingParams(1e5)), 1 / 3, atol=1e-4)
    for bad in ([math.nan, 1], [math.inf, 1], [-math.inf, -math.inf]):
        with pytest.raises(RequestError, match=r"^logits: "):
            probabilities(np.array(bad, np.float32), SamplingParams(1))
    with pytest.raises(RequestError, match="greedy"):
        probabilities(logits, SamplingParams(0))


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(0, 1, width=32)), min_size=1, max_size=30),
    st.integers(0, 2**53 - 1),
    st.integers(1, 60),
)
@settings(max_examples=200, deadline=None)
def test_draw(values: list[float], grid: int, repeat: int) -> None:
    p = np.array(values * repeat, np.float32)  # up to 1800 entries: several blocks
    if p.sum(dtype=np.float64) == 0:
        with pytest.raises(RequestError, match="mass"):
            draw(p, 0.5)
        return
    for u in (grid * 2.0**-53, 0.0, 1 - 2.0**-53):
        token = draw(p, u)
        assert p[token] > 0
        exact = np.cumsum(p.astype(np.float64))
        assert exact[token] > u * exact[-1] * (1 - 1e-12)
        assert token == 0 or exact[token - 1] <= u * exact[-1] * (1 + 1e-12)


def test_draw_edges_and_refusals():
    assert draw(np.array([0.0, 1.0, 0.0]), 0.0) == 1
    assert draw(np.array([0.0, 1.0, 0.0], np.float32), 1 - 2**-53) == 1
    assert draw(np.array([0.25, 0.75]), 0.25) == 1, "an interval begins with its lower end"
    p = np.zeros(2000, np.float32)
    p[[511, 512, 1999]] = 0.25, 0.5, 0.25
    assert [draw(p, u) for u in (0, 0.2499, 0.25, 0.7499, 0.75, 0.99)] == [511, 511, 512, 512, 1999, 1999]
    for u in (1.0, -0.1, math.nan):
        with pytest.raises(RequestError, match=r"^u: "):
            draw(p, u)
    with pytest.raises(RequestError, match="mass"):
        draw(np.array([math.nan, 1.0]), 0.5)


def test_draw_where_two_sums_of_a_block_differ():
    """The point may lie between the block's running sum and its (pairwise) sum: the last token with a probability."""
    rng, met = np.random.default_rng(0), 0
    for _ in range(50):
        p = rng.random(400)
        p[390:] = 0
        point = (1 - 2**-53) * np.add.reduceat(p, [0])[0]
        met += point >= p.cumsum()[-1]
        assert p[draw(p, 1 - 2**-53)] > 0
    assert met > 5


def test_philox_known_answers():
    # Random123's kat_vectors, philox4x64 with 10 rounds.
    assert philox([0] * 4, [0] * 2) == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox([MASK] * 4, [MASK] * 2) == [
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    ]


@pytest.mark.parametrize(("seed", "request_id", "position"), [(0, 0, 0), (7, 3, 1000), (MASK, MASK, MASK)])
def test_uniforms_are_philox(seed: int, request_id: int, position: int) -> None:
    words = [w for block in (1, 2) for w in philox([block, position, Purpose.ACCEPT, 0], [seed, request_id])]
    got = uniforms(seed, request_id, position, Purpose.ACCEPT, 7)
    assert got.tolist() == [(w >> 11) / 2**53 for w in words[:7]]
    single = uniforms32(seed, request_id, position, Purpose.ACCEPT, 7)
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


def test_largest_uniform_of_a_graph_stays_below_any_float32_total():
    u = np.float32(1 - 2.0**-23)
    rng = np.random.default_rng(0)
    totals = np.concatenate([np.float32([0.5, 1, 2]), rng.uniform(0.4, 2.1, 10_000).astype(np.float32)])
    assert (u * totals < totals).all()
    assert (totals - u * totals >= np.spacing(u * totals)).all()
