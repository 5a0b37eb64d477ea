"""Plain greedy decoding of a Llama-shaped target in torch under a CUDA graph: the baseline of the real pair."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from builder.spec import TargetSpec
from tests.bench_gpu.reference import rotate

_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def read_weights(bundle: Path, prefix: str, device: str) -> dict[str, Tensor]:
    """Weights of a bundle whose names begin so, in their own types, on the device."""
    made = {}
    for entry in json.loads((bundle / "weights.json").read_text(encoding="ascii"))["weights"]:
        if entry["name"].startswith(prefix):
            shape, dtype = tuple(entry["shape"]), _NUMPY[entry["dtype"]]
            data = np.memmap(bundle / "weights.bin", dtype=dtype, mode="r", offset=entry["offset"], shape=shape)
            tensor = torch.from_numpy(np.array(data))  # a copy: the map is read-only
            made[entry["name"]] = (tensor.view(torch.bfloat16) if dtype is np.uint16 else tensor).to(device)
    return made


class TorchTarget:
    """A batch of sequences that decode in step, over a static cache of `rows` positions.

    Token, position and cache stay on the device, so a step is the same launches each time. K/V heads are read once for
    all query heads that share them.

    Args:
        spec: sizes; Llama or Qwen3 shape without biases.
        weights: by their names in the product's graphs (``target.layers.0.qkv.weight`` …), on one device.
        batch: sequences.
        rows: of the cache; the longest prompt and what is generated must fit.

    Attributes:
        ids: int64 ``[batch]``, each sequence's newest token.
    """

    def __init__(self, spec: TargetSpec, weights: Mapping[str, Tensor], batch: int, rows: int) -> None:
        if spec.qkv_bias or spec.o_bias or spec.mlp_bias:
            raise ValueError("the baseline knows no biases")
        self.spec, self.w, self.batch = spec, weights, batch
        embed = weights["target.embed"]
        self.rows = -(-rows // 8) * 8
        self.k = embed.new_zeros(spec.num_layers, batch, spec.num_kv_heads, self.rows, spec.head_dim)
        self.v = torch.zeros_like(self.k)
        cos, sin = weights["target.cos"], weights["target.sin"]
        self.cos = torch.cat((cos, cos), dim=-1).to(embed.dtype)
        self.sin = torch.cat((-sin, sin), dim=-1).to(embed.dtype)
        self.ids = torch.zeros(batch, dtype=torch.int64, device=embed.device)
        self.positions = torch.zeros_like(self.ids)
        self.each = torch.arange(batch, device=embed.device)[:, None]
        self.keys = torch.arange(self.rows, device=embed.device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Run the prompts, one sequence each; their first tokens, which `ids` then holds."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.ids.device)
        padded = torch.zeros(self.batch, max(map(len, prompts)), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.tensor(prompt)
        # Cache rows of the padding are overwritten before any query may see them.
        positions = torch.arange(padded.shape[1], device=self.ids.device).expand(self.batch, -1)
        x = self._layers(padded.to(self.ids.device), positions)
        self.ids.copy_(self._head(x[self.each[:, 0], lengths - 1]))
        self.positions.copy_(lengths)
        return self.ids.clone()

    def step(self) -> None:
        """One more token for every sequence. Captured as a CUDA graph, it can be replayed until the cache is full."""
        x = self._layers(self.ids[:, None], self.positions[:, None])
        self.ids.copy_(self._head(x[:, 0]))
        self.positions.add_(1)

    def _head(self, x: Tensor) -> Tensor:
        return F.linear(self._norm(x, "target.norm"), self.w["target.lm_head.weight"]).argmax(dim=-1)

    def _layers(self, ids: Tensor, positions: Tensor) -> Tensor:
        w, spec = self.w, self.spec
        x = F.embedding(ids, w["target.embed"])
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        seen = self.keys <= positions[:, :, None]
        bias = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill(~seen, -torch.inf)[:, None]
        # The query heads of a K/V head become rows of one head: [b, 1, group · width, rows].
        bias = bias.repeat(1, 1, spec.num_heads // spec.num_kv_heads, 1)
        for i in range(spec.num_layers):
            layer = f"target.layers.{i}"
            x = x + F.linear(self._attend(i, x, cos, sin, positions, bias), w[f"{layer}.o.weight"])
            y = F.linear(self._norm(x, f"{layer}.mlp_norm"), w[f"{layer}.mlp.gate_up.weight"])
            gate, up = y.chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w[f"{layer}.mlp.down.weight"])
        return x

    def _attend(self, i: int, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        spec, layer = self.spec, f"target.layers.{i}"
        heads, kv_heads, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
        batch, width, _ = x.shape
        qkv = F.linear(self._norm(x, f"{layer}.input_norm"), self.w[f"{layer}.qkv.weight"])
        q, k, v = qkv.view(batch, width, heads + 2 * kv_heads, d).split((heads, kv_heads, kv_heads), dim=2)
        if spec.qk_norm:
            q, k = self._norm(q, f"{layer}.q_norm"), self._norm(k, f"{layer}.k_norm")
        q = rotate(q, cos, sin).view(batch, width, kv_heads, -1, d)
        self.k[i][self.each, :, positions] = rotate(k, cos, sin)
        self.v[i][self.each, :, positions] = v
        rows = q.permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, d)
        mask = bias.expand(-1, kv_heads, -1, -1)
        out = F.scaled_dot_product_attention(rows, self.k[i], self.v[i], attn_mask=mask)
        return out.view(batch, kv_heads, -1, width, d).permute(0, 3, 1, 2, 4).reshape(batch, width, -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.w[f"{name}.weight"]
        return F.rms_norm(x, (weight.shape[0],), weight, self.spec.rms_norm_eps)
