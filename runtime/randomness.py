"""Counter-based random numbers: uniforms and Gumbel noise.

A random number is a pure function of (seed, stream, position, purpose): the same whatever the order of calls, the
batch, the slot or the neighbours. That is what makes a seeded request repeatable in a busy engine. The stream tells
requests of one seed apart.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import RequestError

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Purpose(IntEnum):
    """What a random number is for; part of its key, so that the streams are independent. Values are part of a seed's
    meaning: never renumber."""

    DRAFT = 0
    ACCEPT = 1
    FINAL = 2
    GUMBEL = 3


class _Philox(threading.local):
    """One reusable Philox generator a thread: making one costs ten times as much as setting its state."""

    def __init__(self) -> None:
        self.key = np.zeros(2, np.uint64)
        self.counter = np.zeros(4, np.uint64)
        self.bits = np.random.Philox(key=self.key)
        # buffer_pos 4: the buffer is used up, the next value comes from the counter.
        self.state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": self.counter, "key": self.key},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def raw(self, seed: int, stream: int, position: int, purpose: int, n: int) -> NDArray[np.uint64]:
        key, counter = self.key, self.counter
        try:
            key[0], key[1] = seed, stream
            # Word 0 counts blocks of four values, upwards from here: n values never run into another key's.
            counter[0], counter[1], counter[2] = 0, position, purpose
        except (OverflowError, TypeError) as error:
            raise RequestError(
                "random numbers",
                "the key is made of words",
                expected="seed, stream, position and purpose in 0 … 2^64-1",
                found=(seed, stream, position, purpose),
                remedy="Choose a seed and a draw_stream in that range",
            ) from error
        self.bits.state = self.state
        words: NDArray[np.uint64] = self.bits.random_raw(n)
        return words


_philox = _Philox()


def uniforms(seed: int, stream: int, position: int, purpose: Purpose, n: int = 1) -> Float64:
    """Return `n` uniforms in [0, 1), float64 ``[n]`` on the grid 2⁻⁵³, for draws on the host.

    Philox4x64-10 (Salmon et al., SC 2011) with key (seed, stream) and counter (block, position, purpose, 0). The first
    k of n values are the values for n = k. `position` is any number that a request uses once for a purpose: a round's
    start_pos.

    Raises:
        RequestError: a part of the key outside 0 … 2⁶⁴-1.
    """
    words = _philox.raw(seed, stream, position, purpose, n) >> np.uint64(11)
    return words.astype(np.float64) * np.float64(2.0**-53)


def uniforms32(seed: int, stream: int, position: int, purpose: Purpose, n: int = 1) -> Float32:
    """Return the same numbers as `uniforms`, cut to float32 ``[n]`` on the grid 2⁻²³, for draws inside a graph.

    2⁻²³ and not 2⁻²⁴, though float32 can hold that: the largest u is then 1 - 2⁻²³, and ``u·total`` lies at least a
    whole unit in the last place below `total`, in every rounding mode and with fused arithmetic. So an inverse CDF in
    float32 finds a token with a cumulative sum above it. On a finer grid (or with float64 numbers rounded to float32,
    where u becomes 1) it may not.
    """
    words = _philox.raw(seed, stream, position, purpose, n) >> np.uint64(41)
    return words.astype(np.float32) * np.float32(2.0**-23)


def gumbel(seed: int, stream: int, position: int, vocab_size: int) -> Float32:
    """Return standard Gumbel noise, float32 ``[vocab_size]``, for the token drawn at the absolute `position`.

    ``argmax(logits + T·noise)`` is then a draw from ``softmax(logits / T)`` (the Gumbel-max trick: Gumbel 1954;
    Maddison et al. 2014). It is ``-log(E)`` with ``E = -log1p(-v)`` and ``v = (x + ½)·2⁻³²`` of 32 random bits x.

    The largest noise wins, so E must be fine where it is small. It is: v below 2⁻⁹ is exact in float32, and log1p keeps
    its relative precision. (A plain ``-log(u)`` has its small values where u is near 1, on steps of 2⁻²⁴.) Rounded are
    the v near 1, whose noise is least and loses; those that reach 1 become the float32 below it, so that all noise is
    finite: -2.9 … 22.9.

    Raises:
        RequestError: a part of the key outside 0 … 2⁶⁴-1.
    """
    words = _philox.raw(seed, stream, position, Purpose.GUMBEL, (vocab_size + 1) // 2)
    bits = words.astype("<u8", copy=False).view("<u4")[:vocab_size]  # the low half of a word first, on any machine
    noise = bits.astype(np.float32)
    noise += np.float32(0.5)
    noise *= np.float32(-(2.0**-32))  # -v
    np.maximum(noise, np.float32(2.0**-24 - 1), out=noise)
    np.log1p(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    return noise
