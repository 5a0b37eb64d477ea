"""Rotary embedding of a Llama GGUF: metadata keys, and Llama 3's scaling, which is stored as a tensor of factors."""

from __future__ import annotations

import math

import numpy as np
from gguf.quants import dequantize

from builder.checkpoints.config import Config
from builder.checkpoints.gguf_file import GGUFFile
from builder.errors import CheckpointError
from builder.spec import RopeSpec

ROPE_FACTORS = "rope_freqs.weight"
DEFAULT_THETA = 10000.0  # llama.cpp's, for files without llama.rope.freq_base

# The published Llama 3.1, 3.2 and 3.3 checkpoints all have these; only `factor` differs (8 or 32).
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_POSITIONS = 1.0, 4.0, 8192


def parse_gguf_rope(config: Config, file: GGUFFile, head_dim: int) -> RopeSpec:
    """The RopeSpec of a Llama GGUF.

    Raises:
        CheckpointError: a scaling type other than none or linear, or factors that aren't Llama 3's.
    """
    theta = config.number("llama.rope.freq_base", default=DEFAULT_THETA)
    kind = config.one_of(
        "llama.rope.scaling.type", ("none", "linear"), default="none", problem="unknown rope scaling type"
    )
    legacy = "llama.rope.scale_linear"
    for key in ("llama.rope.scaling.attn_factor", "llama.rope.scaling.yarn_ext_factor"):
        if config.has(key) and config.values[key] not in (0.0, 1.0):
            config.fail(key, "attention scaled with the rope", expected="1 or absent", remedy="Not supported")
    factors = file.tensors.get(ROPE_FACTORS)
    if kind == "linear" or config.has(legacy):
        key = "llama.rope.scaling.factor" if config.has("llama.rope.scaling.factor") else legacy
        factor = config.number(key)
        if factors is not None:
            config.fail(key, f"linear scaling beside {ROPE_FACTORS}", expected="one of them", remedy="Not supported")
        return RopeSpec(theta, "linear", factor) if factor != 1.0 else RopeSpec(theta)
    if factors is None:
        return RopeSpec(theta)

    where = f"{file.path}: {ROPE_FACTORS}"
    if factors.shape != (head_dim // 2,) or factors.type.name != "F32":
        raise CheckpointError(
            where,
            "wrong shape or type",
            expected=f"[{head_dim // 2}] F32",
            found=f"{list(factors.shape)} {factors.type.name}",
            remedy="Download the file again",
        )
    values = dequantize(file.raw(ROPE_FACTORS), factors.type)
    rope = RopeSpec(theta, "llama3", float(values.max()), LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_POSITIONS)
    if not (
        np.isfinite(values).all()
        and rope.factor >= 1
        and np.allclose(values, llama3_factors(rope, head_dim), rtol=1e-4)
    ):
        raise CheckpointError(
            where,
            "unknown rope scaling",
            expected="the factors of Llama 3.1 to 3.3",
            found=f"{values[0]:.4g} … {values[-1]:.4g}",
            remedy="Use the model's Hugging Face checkpoint instead",
        )
    return rope if rope.factor != 1.0 else RopeSpec(theta)


def llama3_factors(rope: RopeSpec, head_dim: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What Llama 3's scaling divides each of the head_dim/2 frequencies by (Llama 3.1's ``apply_scaling``)."""
    wavelength = 2 * math.pi * rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return np.asarray(1 / ((1 - smooth.clip(0, 1)) / rope.factor + smooth.clip(0, 1)))
