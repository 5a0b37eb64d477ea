"""The drafter as two graphs over one set of weights: `Draft` (a round's block) and `Seed` (ring rows after prefill)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from builder.graphs.layers import Linear, RMSNorm, SwiGLU
from builder.graphs.ops import markov_chain, ring_attention, ring_write, rotate
from builder.spec import DrafterSpec


class ContextKV(nn.Module):
    """What one layer keeps of a context row: K (normed, rotated at the row's own position) and V."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.kv_heads, self.head_dim = spec.num_kv_heads, spec.head_dim
        self.kv = Linear(spec.hidden_size, 2 * spec.num_kv_heads * spec.head_dim, spec.attention_bias)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def forward(self, context: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        b, n, _ = context.shape
        k, v = self.kv(context).view(b, n, 2 * self.kv_heads, self.head_dim).chunk(2, dim=2)
        return rotate(self.k_norm(k), cos, sin, positions), v


class Context(nn.Module):
    """Tap rows into ring rows: ``hidden_norm(fc(taps))`` once, then each layer's K and V, without input_layernorm."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.fc = Linear(len(spec.taps) * spec.hidden_size, spec.hidden_size)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(ContextKV(spec) for _ in range(spec.num_layers))

    def forward(
        self, taps: Tensor, start: Tensor, count: Tensor, slot: Tensor, rings: list[Tensor], cos: Tensor, sin: Tensor
    ) -> list[Tensor]:
        """Write the first ``count[b]`` rows of ``taps[b, n, T·H]`` at positions ``start[b] …``; returns new rings."""
        context = self.hidden_norm(self.fc(taps))
        # Rows past the count are discarded by ring_write, but still look up a RoPE phase: keep that inside the table.
        positions = (start[:, None] + torch.arange(taps.shape[1], device=start.device)).clamp(0, cos.shape[0] - 1)
        updated: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            for ring, rows in zip(rings[2 * i : 2 * i + 2], layer(context, cos, sin, positions), strict=True):
                updated.append(ring_write(ring, rows, start, count, slot))
        return updated


class DraftLayer(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        q_size = spec.num_heads * spec.head_dim
        self.input_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.qkv = Linear(spec.hidden_size, q_size + 2 * spec.num_kv_heads * spec.head_dim, spec.attention_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.o = Linear(q_size, spec.hidden_size, spec.attention_bias)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = SwiGLU(spec.hidden_size, spec.intermediate_size)

    def forward(
        self,
        x: Tensor,
        rings: list[Tensor],
        start: Tensor,
        valid_len: Tensor,
        slot: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
    ) -> Tensor:
        b, block, _ = x.shape
        qkv = self.qkv(self.input_norm(x)).view(b, block, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        q = rotate(self.q_norm(q), cos, sin, positions)
        k = rotate(self.k_norm(k), cos, sin, positions)
        x = x + self.o(ring_attention(q, k, v, rings[0], rings[1], start, valid_len, slot))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class MarkovHead(nn.Module):
    """Parameters of the chain; the arithmetic is in `builder.graphs.ops.markov_chain`."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.kind = spec.markov
        rank = spec.markov_rank
        self.w1 = nn.Parameter(torch.empty(spec.vocab_size, rank), requires_grad=False) if rank else None
        self.w2 = nn.Parameter(torch.empty(spec.vocab_size, rank), requires_grad=False) if rank else None
        self.proj: Linear | None = None
        if spec.markov == "gated":
            self.proj = Linear(spec.hidden_size + rank, rank, bias=True)
        elif spec.markov == "rnn":
            self.proj = Linear(2 * rank + spec.hidden_size, 3 * rank, bias=True)

    def weights(self) -> list[Tensor]:
        weights: list[Tensor] = [w for w in (self.w1, self.w2) if w is not None]
        if self.proj is not None and self.proj.bias is not None:
            weights += (self.proj.weight, self.proj.bias)
        return weights


class Draft(nn.Module):
    """One round for b sequences: write the accepted tap rows, run the block, draft ``s = uniforms.shape[1]`` tokens.

    Inputs: ``bonus[b]``, ``start[b]`` (the bonus's position), ``valid_len[b]``, ``new_len[b]``, ``slot[b]`` int64;
    ``temperature[b]`` (0 = argmax); ``uniforms[b, s]``, s ≤ B; ``noise[b, s, V]`` or ``[b, s, 1]`` of zeros; the taps
    state ``[slots+1, n, T·H]``, of which the first B+1 rows are read; ring K and V ``[slots+1, kv_heads, W, d]`` of
    each layer.

    Outputs: ``ids[b, s]``, ``confidence_logits[b, s]`` (if there is a head), ``q[b, s, V]``, then for debugging
    ``hidden[b, B, H]``, ``base[b, s, V]``, ``corrected[b, s, V]``, then the rings.
    """

    def __init__(self, spec: DrafterSpec, rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size), requires_grad=False)
        self.context = Context(spec)
        self.layers = nn.ModuleList(DraftLayer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size)
        self.markov = MarkovHead(spec)
        width = spec.hidden_size + (spec.markov_rank if spec.confidence == "markov" else 0)
        self.confidence = Linear(width, 1, bias=True) if spec.confidence != "none" else None
        self.cos, self.sin = (nn.Parameter(t, requires_grad=False) for t in rope)

    def forward(
        self,
        bonus: Tensor,
        start: Tensor,
        valid_len: Tensor,
        new_len: Tensor,
        slot: Tensor,
        temperature: Tensor,
        uniforms: Tensor,
        noise: Tensor,
        taps: Tensor,
        rings: list[Tensor],
    ) -> tuple[Tensor, ...]:
        block = self.spec.block_size
        rings = self.context(taps.index_select(0, slot), start - new_len, new_len, slot, rings, self.cos, self.sin)
        masks = bonus.new_full((1, block - 1), self.spec.mask_token_id).expand(bonus.shape[0], -1)
        x = F.embedding(torch.cat((bonus[:, None], masks), dim=1), self.embed)
        positions = start[:, None] + torch.arange(block, device=start.device)
        for i, layer in enumerate(self.layers):
            x = layer(x, rings[2 * i : 2 * i + 2], start, valid_len, slot, self.cos, self.sin, positions)
        hidden = self.norm(x)
        # Only the drafted slots pay for the lm_head and the chain; the block is whole, since it attends to itself.
        drafted = hidden[:, : uniforms.shape[1]]
        base = self.lm_head(drafted)
        ids, rows, q, corrected = markov_chain(
            self.markov.kind, base, drafted, bonus, temperature, uniforms, noise, self.markov.weights()
        )
        outputs = [ids]
        if self.confidence is not None:
            features = torch.cat((drafted, rows), dim=-1) if self.spec.confidence == "markov" else drafted
            outputs.append(self.confidence(features).squeeze(-1))
        return *outputs, q, hidden, base, corrected, *rings


class Seed(nn.Module):
    """Ring rows of the first ``count[b]`` of ``taps[b, c, T·H]`` (c ≤ W), at positions ``start[b] …``; returns the
    rings.
    """

    def __init__(self, spec: DrafterSpec, rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.context = Context(spec)
        self.cos, self.sin = (nn.Parameter(t, requires_grad=False) for t in rope)

    def forward(
        self, taps: Tensor, start: Tensor, count: Tensor, slot: Tensor, rings: list[Tensor]
    ) -> tuple[Tensor, ...]:
        return tuple(self.context(taps, start, count, slot, rings, self.cos, self.sin))
