"""The drafter's step in plain torch, as well as torch does it: the baseline under a CUDA graph.

Nothing here is slot-indexed: row i of a batch owns ring i, so no ring row is ever gathered. Behind its W rows a ring
has room for the block's own K and V, so nothing is concatenated either. Both favour torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from builder.spec import DrafterSpec

Attention = Literal["folded", "gqa", "repeated", "unmasked"]
MASKED: tuple[Attention, ...] = ("folded", "gqa", "repeated")
"""Ways to call SDPA that are right for any number of visible rows; ``unmasked`` is right for a full window only."""

_ALIGN = 8
"""Key rows are a multiple of it: SDPA's memory-efficient kernel copies masks of any other length."""


@dataclass(frozen=True)
class Inputs:
    """Of one step, all on the device: int64 ``[b]`` and `taps` ``[b, B+1, T·H]``."""

    bonus: Tensor
    start: Tensor
    valid_len: Tensor
    new_len: Tensor
    taps: Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split RoPE of ``x[b, n, heads, d]`` with ``cos, sin [b, n, 1, d]``, either half of sin signed."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), dim=-1) * sin


class TorchDrafter:
    """A step with argmax in the chain (vanilla Markov head, confidence of h and W1 row).

    Args:
        spec: sizes.
        weights: by their names in the product's graphs (``drafter.layers.0.qkv.weight`` …), on one device.
        batch, window: of the rings, which are allocated here, zeroed.
        attention: how SDPA is called.
    """

    def __init__(
        self, spec: DrafterSpec, weights: Mapping[str, Tensor], batch: int, window: int, attention: Attention
    ) -> None:
        if spec.markov != "vanilla" or spec.confidence != "markov" or spec.attention_bias:
            raise ValueError("the baseline knows a vanilla Markov head with confidence, and no biases")
        self.spec, self.w, self.window, self.attention = spec, weights, window, attention
        embed = weights["drafter.embed"]
        self.rows = -(-(window + spec.block_size) // _ALIGN) * _ALIGN
        shape = (spec.num_layers, batch, spec.num_kv_heads, self.rows, spec.head_dim)
        # One row of batch more, for rows past a sequence's count: with fixed shapes they have to go somewhere.
        self.spare = batch
        self.k = embed.new_zeros(shape[0], batch + 1, *shape[2:])
        self.v = torch.zeros_like(self.k)
        self.context_rows = torch.arange(spec.block_size + 1, device=embed.device)
        self.block_rows = torch.arange(spec.block_size, device=embed.device)
        self.ring_rows = torch.arange(window, device=embed.device)
        self.masks = torch.full((batch, spec.block_size - 1), spec.mask_token_id, device=embed.device)
        half = [torch.cat((weights["drafter.cos"],) * 2, -1), torch.cat((-weights["drafter.sin"],
                weights["drafter.sin"]), -1)]  # fmt: skip
        self.cos, self.sin = (table.to(embed.dtype) for table in half)
        # Of the key rows, those that belong to the block; the padding behind them is masked.
        tail = torch.zeros(batch, self.rows - window, dtype=torch.bool, device=embed.device)
        tail[:, : spec.block_size] = True
        self.tail = tail

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """ids int64 ``[b, B]`` and confidence logits float32 ``[b, B]``; the rings are updated in place."""
        spec, w = self.spec, self.w
        self._context(inputs)
        positions = inputs.start[:, None] + self.block_rows
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        x = F.embedding(torch.cat((inputs.bonus[:, None], self.masks), dim=1), w["drafter.embed"])
        bias = self._bias(inputs, x.dtype)
        for i in range(spec.num_layers):
            layer = f"drafter.layers.{i}"
            x = x + F.linear(self._attend(i, x, cos, sin, bias), w[f"{layer}.o.weight"])
            y = F.linear(self._norm(x, f"{layer}.mlp_norm"), w[f"{layer}.mlp.gate_up.weight"])
            gate, up = y.chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w[f"{layer}.mlp.down.weight"])
        return self._chain(self._norm(x, "drafter.norm"), inputs.bonus)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.w[f"{name}.weight"]
        return F.rms_norm(x, (weight.shape[0],), weight, self.spec.rms_norm_eps)

    def _context(self, inputs: Inputs) -> None:
        """The new tap rows into every layer's ring."""
        spec, w = self.spec, self.w
        context = self._norm(F.linear(inputs.taps, w["drafter.context.fc.weight"]), "drafter.context.hidden_norm")
        batch, count, _ = context.shape
        live = self.context_rows < inputs.new_len[:, None]
        positions = inputs.start[:, None] - inputs.new_len[:, None] + self.context_rows
        ring = torch.where(live, torch.arange(batch, device=live.device)[:, None], self.spare)
        row = positions.remainder(self.window)
        table = positions.clamp(0, self.cos.shape[0] - 1)
        cos, sin = self.cos[table][:, :, None], self.sin[table][:, :, None]
        for i in range(spec.num_layers):
            name = f"drafter.context.layers.{i}"
            kv = F.linear(context, w[f"{name}.kv.weight"]).view(batch, count, 2 * spec.num_kv_heads, spec.head_dim)
            k, v = kv.chunk(2, dim=2)
            self.k[i][ring, :, row] = rotate(self._norm(k, f"{name}.k_norm"), cos, sin)
            self.v[i][ring, :, row] = v

    def _bias(self, inputs: Inputs, dtype: torch.dtype) -> Tensor:
        """``[b, 1, 1, rows]``: 0 where a key is seen, else -inf. All queries of a block see the same keys."""
        age = (inputs.start[:, None] - 1 - self.ring_rows).remainder(self.window)
        seen = torch.cat((age < inputs.valid_len[:, None], self.tail), dim=1)
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)[:, None, None]

    def _attend(self, i: int, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        spec, layer = self.spec, f"drafter.layers.{i}"
        batch, block, _ = x.shape
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = F.linear(self._norm(x, f"{layer}.input_norm"), self.w[f"{layer}.qkv.weight"])
        q, k, v = qkv.view(batch, block, heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), dim=2)
        q = rotate(self._norm(q, f"{layer}.q_norm"), cos, sin)
        keys, values = self.k[i][:batch], self.v[i][:batch]
        own = slice(self.window, self.window + block)
        keys[:, :, own] = rotate(self._norm(k, f"{layer}.k_norm"), cos, sin).transpose(1, 2)
        values[:, :, own] = v.transpose(1, 2)
        if self.attention in ("folded", "unmasked"):
            return self._folded(q, keys, values, bias)
        q = q.transpose(1, 2)
        if self.attention == "repeated":
            keys, values = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (keys, values))
        bias = bias.expand(-1, heads, block, -1)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, enable_gqa=self.attention == "gqa")
        return out.transpose(1, 2).flatten(2)

    def _folded(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """The query heads of a K/V head as more rows of one head: exact, since they all see the same keys, and K and V
        are read once.
        """
        batch, block, heads, d = q.shape
        kv_heads = keys.shape[1]
        rows = q.view(batch, block, kv_heads, -1, d).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, d)
        if self.attention == "unmasked":
            whole = self.window + block
            out = F.scaled_dot_product_attention(rows, keys[:, :, :whole], values[:, :, :whole])
        else:
            bias = bias.expand(-1, kv_heads, rows.shape[2], -1)
            out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=bias)
        return out.view(batch, kv_heads, heads // kv_heads, block, d).permute(0, 3, 1, 2, 4).reshape(batch, block, -1)

    def _chain(self, hidden: Tensor, bonus: Tensor) -> tuple[Tensor, Tensor]:
        w1, w2 = self.w["drafter.markov.w1"], self.w["drafter.markov.w2"].t()
        base = F.linear(hidden, self.w["drafter.lm_head.weight"])
        prev, ids, rows = bonus, [], []
        for j in range(hidden.shape[1]):
            row = w1[prev]
            prev = torch.addmm(base[:, j], row, w2).argmax(dim=-1)
            ids.append(prev)
            rows.append(row)
        features = torch.cat((hidden, torch.stack(rows, dim=1)), dim=-1).float()
        confidence = F.linear(features, self.w["drafter.confidence.weight"], self.w["drafter.confidence.bias"])
        return torch.stack(ids, dim=1), confidence.squeeze(-1)
