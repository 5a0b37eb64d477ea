"""The rotary tables that engines read as weights."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from builder.spec import RopeSpec

Float32 = NDArray[np.float32]


def rope_tables(rope: RopeSpec, head_dim: int, positions: int) -> tuple[Float32, Float32]:
    """cos and sin ``[positions, head_dim/2]`` in float32, by the same float32 steps as the reference implementations.

    ``llama3`` scaling after the Llama 3.1 release: low frequencies are divided by `factor`, high ones kept, those
    between blended linearly. Powers, cosines and sines are taken in float64 and rounded: numpy's own in float32 differ
    from processor to processor, and a bundle's bytes must not.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv = np.float32(1) / (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    if rope.kind == "linear":
        inv = inv / np.float32(rope.factor)
    elif rope.kind == "llama3":
        turns = np.float32(rope.original_max_positions) * inv / np.float32(2 * math.pi)
        span = np.float32(rope.high_freq_factor - rope.low_freq_factor)
        blend = ((turns - np.float32(rope.low_freq_factor)) / span).clip(0, 1)
        low = inv / np.float32(rope.factor)
        inv = low + blend * (inv - low)
    phases = np.arange(positions, dtype=np.float32)[:, None] * inv
    wide = phases.astype(np.float64)
    return np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)
