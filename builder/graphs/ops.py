"""The custom operators of domain ``dspark`` as torch operators: eager reference semantics, and how each exports.

Each operator has three faces that must agree: the eager torch code here (the float32 reference of everything), an ONNX
function body of standard ops (`builder.graphs.functions`), and whatever a back end puts in its place (`builder.passes`,
``plugins/``). State is slot-indexed, ``[slots+1, …]``, passed in and returned; back ends update it in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from onnx.defs import OpSchema
from onnxscript.values import Op, Opset
from torch import Tensor

DOMAIN = "dspark"
VERSION = 1


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding, half-split form: ``x[b, w, heads, d]`` at ``positions[b, w]``, tables ``[P, d/2]``."""
    flat = x.flatten(2)
    return torch.onnx.ops.rotary_embedding(flat, cos, sin, positions, num_heads=x.shape[2]).view(x.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q ``[b, w, heads, d]`` over k, v ``[b, kv_heads, T, d]`` where `mask` ``[b, w, T]``, to ``[b, w, heads*d]``."""
    # Rows no query may see can hold anything finite or not: 0 * NaN would poison the sum, so they are cleared.
    seen = mask.any(dim=1)[:, None, :, None]
    k, v = k.masked_fill(~seen, 0.0), v.masked_fill(~seen, 0.0)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask.unsqueeze(1), enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


@torch.library.custom_op("dspark::cached_attention", mutates_args=())
def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    slot: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention of new rows over a slot's cache, which they join first.

    Args:
        q: ``[b, w, heads, d]``; k, v: ``[b, w, kv_heads, d]``, before RoPE.
        k_cache, v_cache: ``[slots+1, kv_heads, S, d]``; position p of a slot lives in row p.
        start: int64 ``[b]``, the position of the first new row; slot: int64 ``[b]``.
        cos, sin: ``[≥ S, d/2]``.

    Returns:
        ``[b, w, heads*d]`` and the caches with rows ``start … start+w-1`` of each slot replaced.
    """
    positions = start[:, None] + torch.arange(q.shape[1])
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    k_cache[slot[:, None], :, positions] = rotate(k, cos, sin, positions)
    v_cache[slot[:, None], :, positions] = v
    mask = torch.arange(k_cache.shape[2]) <= positions[:, :, None]
    return _attend(rotate(q, cos, sin, positions), k_cache[slot], v_cache[slot], mask), k_cache, v_cache


@cached_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    slot: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3]), k_cache.clone(), v_cache.clone()


@torch.library.custom_op("dspark::ring_write", mutates_args=())
def ring_write(ring: Tensor, rows: Tensor, start: Tensor, count: Tensor, slot: Tensor) -> Tensor:
    """Write the first ``count[b]`` of ``rows[b, n, kv_heads, d]``, at positions ``start[b] …``, into the ring.

    ``ring`` is ``[slots+1, kv_heads, W, d]`` and position p lies in row ``p mod W``; ``n ≤ W``, so no row is written
    twice. Rows past the count change nothing.
    """
    ring = ring.clone()
    for b in range(rows.shape[0]):
        n = int(count[b])
        at = (start[b] + torch.arange(n)) % ring.shape[2]
        ring[slot[b], :, at] = rows[b, :n].transpose(0, 1)
    return ring


@ring_write.register_fake
def _(ring: Tensor, rows: Tensor, start: Tensor, count: Tensor, slot: Tensor) -> Tensor:
    return ring.clone()


@torch.library.custom_op("dspark::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, ring_k: Tensor, ring_v: Tensor, start: Tensor, valid_len: Tensor, slot: Tensor
) -> Tensor:
    """Bidirectional attention of a block over its slot's visible ring rows and the block itself.

    Ring row r is visible when its age ``(start-1-r) mod W`` (floor mod) is below ``valid_len``. q is
    ``[b, B, heads, d]``, k and v are ``[b, B, kv_heads, d]``, all after RoPE; the block's own rows are never written.
    Returns ``[b, B, heads*d]``.
    """
    window = ring_k.shape[2]
    age = torch.remainder(start[:, None] - 1 - torch.arange(window), window)
    visible = age < valid_len[:, None]
    mask = torch.cat((visible, visible.new_ones(visible.shape[0], q.shape[1])), dim=1)
    keys = torch.cat((ring_k[slot], k.transpose(1, 2)), dim=2)
    values = torch.cat((ring_v[slot], v.transpose(1, 2)), dim=2)
    return _attend(q, keys, values, mask[:, None].expand(-1, q.shape[1], -1))


@ring_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, ring_k: Tensor, ring_v: Tensor, start: Tensor, valid_len: Tensor, slot: Tensor
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


def pick(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row of ``logits[b, V]``: argmax at temperature 0, else the inverse CDF of q at `uniform`.

    q is softmax(logits/T). Returns ids ``[b]`` and the very q ``[b, V]`` that was drawn from. The running sum is in
    float64: in float32 its rounding over a vocabulary of 50,000 comes to 1e-4, so that the tokens drawn would not quite
    be distributed as the q that verification is told. The draw compares against ``uniform * total``, so it never
    selects past the last token of positive probability.
    """
    sampled = temperature > 0
    q = torch.softmax(logits / torch.where(sampled, temperature, 1.0)[:, None], dim=-1)
    cdf = torch.cumsum(q.double(), dim=-1)
    drawn = (cdf <= uniform[:, None] * cdf[:, -1:]).sum(dim=-1)
    return torch.where(sampled, drawn, logits.argmax(dim=-1)), q


@torch.library.custom_op("dspark::markov_chain", mutates_args=())
def markov_chain(
    kind: str,
    base: Tensor,
    hidden: Tensor,
    bonus: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
    noise: Tensor,
    weights: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The serial part of a draft: slot by slot, bias from the previous token, pick, go on.

    Args:
        kind: ``none``, ``vanilla`` (base + W2·W1[prev]), ``gated`` (the W1 row times σ(gate([h; W1[prev]]))) or ``rnn``
            (``g, c, o = joint([s; W1[prev]; h])``, ``s ← σ(g)s + (1-σ(g))tanh(c)``, bias W2·tanh(o), s₀ = 0).
        base: ``[b, s, V]``; hidden: ``[b, s, H]``; bonus: int64 ``[b]``; temperature: ``[b]``; uniforms: ``[b, s]``.
        noise: ``[b, s, V]``, or ``[b, s, 1]`` of zeros for none, added to the logits before a token is picked: at
            temperature 0 with noise T·g, g standard Gumbel, that draws at temperature T.
        weights: W1 ``[V, r]``, W2 ``[V, r]``, then the gate's or joint projection's weight and bias.

    Returns:
        ids int64 ``[b, s]``, the W1 rows of each slot's previous token ``[b, s, r]`` (r = 0 for ``none``), the
        probabilities drawn from ``[b, s, V]``, and the corrected logits ``[b, s, V]``.
    """
    rank = weights[0].shape[1] if weights else 0
    prev, state = bonus, base.new_zeros(base.shape[0], rank)
    columns: list[tuple[Tensor, ...]] = []
    for j in range(base.shape[1]):
        row, h, logits = base.new_zeros(base.shape[0], 0), hidden[:, j], base[:, j] + noise[:, j]
        if weights:
            row = weights[0][prev]
            mixed = row
            if kind == "gated":
                mixed = torch.sigmoid(F.linear(torch.cat((h, row), dim=-1), weights[2], weights[3])) * row
            elif kind == "rnn":
                gate, cell, out = F.linear(torch.cat((state, row, h), dim=-1), weights[2], weights[3]).chunk(3, dim=-1)
                gate = torch.sigmoid(gate)
                state = gate * state + (1 - gate) * torch.tanh(cell)
                mixed = torch.tanh(out)
            logits = logits + F.linear(mixed, weights[1])
        prev, q = pick(logits, temperature, uniforms[:, j])
        columns.append((prev, row, q, logits))
    ids, rows, q, logits = (torch.stack(c, dim=1) for c in zip(*columns, strict=True))
    return ids, rows, q, logits


@markov_chain.register_fake
def _(
    kind: str,
    base: Tensor,
    hidden: Tensor,
    bonus: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
    noise: Tensor,
    weights: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, s, vocab = base.shape
    rank = weights[0].shape[1] if weights else 0
    ids = torch.empty(b, s, dtype=torch.int64, device=base.device)
    return ids, base.new_empty(b, s, rank), base.new_empty(b, s, vocab), base.new_empty(b, s, vocab)


# Inputs and outputs of each ONNX operator; the integer ones are named, everything else is float.
_INTEGERS = {"start", "slot", "count", "valid_len", "bonus", "ids"}
_CHAIN = ("base", "hidden", "bonus", "temperature", "uniforms", "noise")
_CHAIN_OUT = ("ids", "rows", "q", "logits")
SIGNATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "CachedAttention": (
        ("q", "k", "v", "k_cache", "v_cache", "start", "slot", "cos", "sin"),
        ("out", "k_cache_out", "v_cache_out"),
    ),
    "RingWrite": (("ring", "rows", "start", "count", "slot"), ("ring_out",)),
    "RingAttention": (("q", "k", "v", "ring_k", "ring_v", "start", "valid_len", "slot"), ("out",)),
    "PlainChain": (_CHAIN, _CHAIN_OUT),
    "MarkovChain": ((*_CHAIN, "w1", "w2"), _CHAIN_OUT),
    "GatedMarkovChain": ((*_CHAIN, "w1", "w2", "proj_w", "proj_b"), _CHAIN_OUT),
    "RnnMarkovChain": ((*_CHAIN, "w1", "w2", "proj_w", "proj_b"), _CHAIN_OUT),
}
"""ONNX operator type of domain ``dspark`` → names of its inputs and outputs, shared by export and function bodies."""

CHAIN_OPS = {"none": "PlainChain", "vanilla": "MarkovChain", "gated": "GatedMarkovChain", "rnn": "RnnMarkovChain"}
"""One operator a Markov head, since a function's body can't branch on an attribute."""


def _operator(op_type: str) -> Op:
    names_in, names_out = SIGNATURES[op_type]

    def parameters(names: tuple[str, ...]) -> list[OpSchema.FormalParameter]:
        return [OpSchema.FormalParameter(n, "tensor(int64)" if n in _INTEGERS else "T") for n in names]

    floats = ("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")
    schema = OpSchema(
        op_type,
        DOMAIN,
        VERSION,
        inputs=parameters(names_in),
        outputs=parameters(names_out),
        type_constraints=[floats],
    )
    return Op(Opset(DOMAIN, VERSION), op_type, schema)


# Plain functions with plain parameters: the exporter reads their signatures.
def _export_cached_attention(q, k, v, k_cache, v_cache, start, slot, cos, sin):  # type: ignore[no-untyped-def]
    return _operator("CachedAttention")(q, k, v, k_cache, v_cache, start, slot, cos, sin)


def _export_ring_write(ring, rows, start, count, slot):  # type: ignore[no-untyped-def]
    return _operator("RingWrite")(ring, rows, start, count, slot)


def _export_ring_attention(q, k, v, ring_k, ring_v, start, valid_len, slot):  # type: ignore[no-untyped-def]
    return _operator("RingAttention")(q, k, v, ring_k, ring_v, start, valid_len, slot)


def _export_chain(kind, base, hidden, bonus, temperature, uniforms, noise, weights):  # type: ignore[no-untyped-def]
    return _operator(CHAIN_OPS[kind])(base, hidden, bonus, temperature, uniforms, noise, *weights)


TRANSLATIONS: dict[Callable[..., object], Callable[..., object]] = {
    torch.ops.dspark.cached_attention.default: _export_cached_attention,
    torch.ops.dspark.ring_write.default: _export_ring_write,
    torch.ops.dspark.ring_attention.default: _export_ring_attention,
    torch.ops.dspark.markov_chain.default: _export_chain,
}
"""For `torch.onnx.export`: each torch operator to its ONNX node."""
