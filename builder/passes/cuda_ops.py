"""The operators of the CUDA lowering, domain ``dspark``: what each means. `plugins.operators` has their types and
shapes.

T is the precision of activations, state and matrices: float32, float16 or bfloat16. Sums are float32, and a result is
rounded to T once. b is the batch, h and kv_heads the heads, d their size; integers are int64. State is whole,
``[slots+1, …]``, updated in place; the last slot is scratch, which padding rows may share. What a row gets depends on
no other row.

- ``SlotRead(state [slots+1, n, C], slot [b], row [c])``: rows ``[b, c, C]`` of each slot.
- ``SlotWrite(state, rows [b, w, C], start [b], count [b], slot [b])``: the first ``count`` rows go to rows ``start …``
  of their slot.
- ``ContextWrite(kv [b, c, 2·kv_heads·d], k_norm [d], cos, sin [P, d/2] float32, start, count, slot, ring_k, ring_v
  [slots+1, kv_heads, W, d])``: the first ``count`` rows, at positions ``start …``, go to rows ``position mod W``: K
  normed and rotated, V as it is.
- ``BlockAttention(qkv [b, B, (h+2·kv_heads)·d], q_norm, k_norm, cos, sin, ring_k, ring_v, start, valid_len, slot)``:
  norm and RoPE at ``start …``, then each row attends to the ring rows of age ``(start-1-r) mod W < valid_len`` and to
  the block: ``[b, B, h·d]``.
- ``CausalAttention(qkv [b, w, …], cos, sin, k_cache, v_cache [slots+1, kv_heads, S, d], start, slot)``: RoPE, K and V
  into rows ``start …`` (those past S are dropped), then row j attends to cache rows up to ``start+j``: ``[b, w, h·d]``
  and the caches. ``NormedCausalAttention`` norms q and k first.
- ``BestToken(logits [b, h, V] float32)``: of each row the token with the greatest logit (the first of equals) and that
  logit, ``[b, h]``.
- ``Linear(x [b, w, K], w [N, K])``: ``x wᵀ`` of type T; ``LinearFloat``: the same in float32; ``LinearAdd``: plus a
  residual; ``NormLinear``: of x RMS-normed by ``gamma``; ``NormSwiGLU``: ``silu(g)·u``, where g and u are the halves of
  NormLinear.
- ``Draft…(base [b, s, V] float32, hidden [b, s, H], bonus [b], temperature [b], uniforms [b, s], noise [b, s, V or 1],
  …)``: `builder.graphs.ops.markov_chain`, one operator a kind of head: ids ``[b, s]`` and q float32 ``[b, s, V]``. With
  attribute ``sample`` 0 every row takes the best, and q is ``[b, s, 1]`` without meaning. Those with a ``C`` also give
  the confidence head's logits float32 ``[b, s]``, from ``hidden`` or, by the width of ``conf_w``, from it and the W1
  row of the token before.
"""

from __future__ import annotations

from builder.graphs.ops import CHAIN_OPS
from plugins.operators import OPERATORS

Signature = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]

DRAFT_OPS = dict(zip(CHAIN_OPS.values(), ("DraftPlain", "DraftMarkov", "DraftGated", "DraftRnn"), strict=True))
"""The exported chain to the operator that the CUDA lowering puts in its place; with a confidence head a ``C``
follows."""

SIGNATURES: dict[str, Signature] = {
    name: (
        tuple(tensor.name for tensor in operator.inputs),
        tuple(tensor.name for tensor in operator.outputs),
        tuple(operator.attributes),
    )
    for name, operator in OPERATORS.items()
}
"""Operator type to the names of its inputs, outputs and attributes."""
