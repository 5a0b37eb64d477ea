"""What sampled tokens are held to: the exact joint distribution of three tokens, and χ² against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare

from builder.checkpoints import load_drafter, load_target
from builder.vectors import reference_modules
from builder.weights import write_weights
from runtime.manifest import Limits

TOKENS = 3
LEAST = 10.0
"""Expected count of a cell of the χ² test; rarer outcomes are merged with their neighbours."""

Array = NDArray[Any]
Distribution = Callable[[Array, Array], Array]
"""Of logits ``[n, V]`` and the tokens ``[n, k]`` that were generated before them, probabilities ``[n, V]``."""


@dataclass(frozen=True)
class Logits:
    """The target's after a prompt, and after every first, and every first two tokens that may follow it."""

    first: Array  # [V]
    second: Array  # [V, V]
    third: Array  # [V, V, V]

    def joint(self, distribution: Distribution) -> Array:
        """p(t1) p(t2 | t1) p(t3 | t1 t2) for every three tokens, float64 ``[V, V, V]``."""
        vocab = len(self.first)
        each = np.arange(vocab)
        pairs = np.stack(np.meshgrid(each, each, indexing="ij"), axis=-1).reshape(-1, 2)
        p1 = distribution(self.first[None], np.empty((1, 0), np.int64))[0]
        p2 = distribution(self.second, each[:, None])
        p3 = distribution(self.third.reshape(-1, vocab), pairs).reshape(vocab, vocab, vocab)
        joint = p1[:, None, None] * p2[:, :, None] * p3
        np.testing.assert_allclose(joint.sum(), 1, rtol=1e-6)
        return joint


def exact_logits(pair: Path, prompt: Sequence[int], dest: Path) -> Logits:
    """By the float32 torch module of the target of a tiny pair; `dest` takes its weights."""
    target = load_target(pair / "target")
    drafter = load_drafter(pair / "drafter", target)
    vocab, n = target.spec.vocab_size, len(prompt)
    limits = Limits((1,), vocab, 16, n + 2, drafter.spec.block_size, 8)
    index = write_weights(dest, target, drafter, limits)
    net = reference_modules(target.spec, drafter.spec, index, limits)["target"]
    slot, rows = torch.arange(vocab), torch.tensor([[n - 1]])
    shape = (vocab, target.spec.num_kv_heads, n + 2, target.spec.head_dim)
    caches = [torch.zeros(shape) for _ in range(2 * target.spec.num_layers)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many small calls: more threads only wait for each other
    with torch.no_grad():
        ids = torch.tensor(prompt).expand(vocab, -1)
        zero = torch.zeros(vocab, dtype=torch.int64)
        _, first, _, *after = net(ids, zero, slot, rows.expand(vocab, -1), caches)
        head = torch.zeros(vocab, 1, dtype=torch.int64)
        _, second, _, *after = net(torch.arange(vocab)[:, None], zero + n, slot, head, after)
        third = np.empty((vocab, vocab, vocab), np.float32)
        for token in range(vocab):
            _, logits, *_ = net(torch.full((vocab, 1), token), zero + n + 1, slot, head, after)
            third[:, token] = logits[:, 0].numpy()
    torch.set_num_threads(threads)
    return Logits(first[0, 0].numpy(), second[:, 0].numpy(), third)


def softmax(logits: Array) -> Array:
    p = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def nucleus(p: Array, top_p: float) -> Array:
    """p cut to the fewest tokens that reach `top_p`, by the full sort of each row."""
    order = np.argsort(-p, axis=-1, kind="stable")
    ranked = np.take_along_axis(p, order, axis=-1)
    ranked[np.cumsum(ranked, axis=-1) - ranked >= top_p] = 0
    kept = np.empty_like(p)
    np.put_along_axis(kept, order, ranked, axis=-1)
    return kept / kept.sum(axis=-1, keepdims=True)


def penalised(
    logits: Array, tokens: Array, prompt: Sequence[int], repetition: float, presence: float, frequency: float
) -> Array:
    """`logits` ``[n, V]`` after a prompt and the generated `tokens` ``[n, k]``: repetition counts prompt and output,
    presence and frequency the output alone."""
    counts = np.zeros(logits.shape)
    np.add.at(counts, (np.arange(len(tokens))[:, None], tokens), 1)
    seen = counts > 0
    seen[:, list(prompt)] = True
    repeated = np.where(logits > 0, logits / repetition, logits * repetition)
    return np.where(seen, repeated, logits) - frequency * counts - presence * (counts > 0)


def p_value(joint: Array, tokens: Array, cells: int = 100) -> float:
    """χ² of the outcomes ``[runs, 3]`` against the joint distribution, neighbours merged until each cell is expected
    `LEAST` times; at least `cells` are left."""
    vocab = joint.shape[0]
    expected = joint.reshape(-1) * len(tokens)
    cell = np.empty(expected.size, np.int64)
    index, mass, sums = 0, 0.0, []
    for i, value in enumerate(expected.tolist()):
        cell[i] = index
        mass += value
        if mass >= LEAST:
            sums.append(mass)
            index, mass = index + 1, 0.0
    sums[-1] += mass
    cell = np.minimum(cell, len(sums) - 1)
    outcome = (tokens[:, 0] * vocab + tokens[:, 1]) * vocab + tokens[:, 2]
    observed = np.bincount(cell[outcome], minlength=len(sums))
    assert len(sums) >= cells, "too few cells to tell anything"
    expected_counts = np.array(sums) * (observed.sum() / sum(sums))
    return float(chisquare(observed, expected_counts).pvalue)
