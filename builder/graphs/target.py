"""The target as one graph: prefill, plain decoding and verification differ only in how many ids a row has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from builder.graphs.layers import Linear, RMSNorm, SwiGLU
from builder.graphs.ops import cached_attention
from builder.spec import TargetSpec


class TargetLayer(nn.Module):
    """Pre-norm decoder layer, q, k and v stacked in one product."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        q_size = spec.num_heads * spec.head_dim
        self.input_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.qkv = Linear(spec.hidden_size, q_size + 2 * spec.num_kv_heads * spec.head_dim, spec.qkv_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.o = Linear(q_size, spec.hidden_size, spec.o_bias)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = SwiGLU(spec.hidden_size, spec.intermediate_size, spec.mlp_bias)

    def forward(
        self, x: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, slot: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        b, w, _ = x.shape
        qkv = self.qkv(self.input_norm(x)).view(b, w, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, k_cache, v_cache = cached_attention(q, k, v, k_cache, v_cache, start, slot, cos, sin)
        x = x + self.o(out)
        return x + self.mlp(self.mlp_norm(x)), k_cache, v_cache


class Target(nn.Module):
    """Decoder with taps.

    Inputs: ``ids[b, w]`` at positions ``start[b] …``, ``slot[b]``, ``head_rows[b, h]`` (which of the w rows go through
    the lm_head: all of them to verify, the last one to prefill), then K and V cache of each layer,
    ``[slots+1, kv_heads, S, head_dim]``.

    Outputs: ``argmax[b, h]``, ``logits[b, h, V]`` float32, ``taps[b, w, T·H]`` (outputs of the tapped layers, -1 =
    embedding), then the updated caches. Rows past a row's true length write cache rows that nothing committed refers
    to; they are overwritten before they become visible.
    """

    def __init__(self, spec: TargetSpec, taps: tuple[int, ...], rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.taps = taps
        self.embed = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size), requires_grad=False)
        self.layers = nn.ModuleList(TargetLayer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size)
        self.cos, self.sin = (nn.Parameter(t, requires_grad=False) for t in rope)

    def forward(
        self, ids: Tensor, start: Tensor, slot: Tensor, head_rows: Tensor, caches: list[Tensor]
    ) -> tuple[Tensor, ...]:
        x = F.embedding(ids, self.embed)
        seen = {-1: x}
        updated: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x, k, v = layer(x, caches[2 * i], caches[2 * i + 1], start, slot, self.cos, self.sin)
            seen[i] = x
            updated += (k, v)
        taps = torch.cat([seen[i] for i in self.taps], dim=-1)
        rows = x.gather(1, head_rows[:, :, None].expand(-1, -1, x.shape[2]))
        logits = self.lm_head(self.norm(rows))
        return logits.argmax(dim=-1), logits, taps, *updated
