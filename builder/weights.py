"""One weights file for every graph: each checkpoint tensor is read once, written once, and shared by its users."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from builder.errors import CheckpointError
from builder.graphs.layers import rope_tables
from builder.spec import DrafterCheckpoint, DrafterSpec, TargetCheckpoint, TargetSpec, TensorSource
from runtime.manifest import Limits

WEIGHTS_NAME = "weights.bin"
# A page, for what is written as one stretch: a library can then map it in place.
_ALIGN = 4096


@dataclass(frozen=True)
class Weight:
    """Where a weight lies in the file: float32, C order."""

    offset: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return 4 * int(np.prod(self.shape))


@dataclass(frozen=True)
class WeightIndex:
    """The weights file: `weights` by graph name (``target.layers.0.qkv.weight``), and its length in bytes."""

    path: Path
    weights: dict[str, Weight]
    bytes: int

    def tensor(self, name: str) -> Tensor:
        """The weight as a view of the mapped file; writing to it does not change the file."""
        weight = self.weights[name]
        data = np.memmap(self.path, dtype=np.float32, mode="c", offset=weight.offset, shape=weight.shape)
        return torch.from_numpy(data)


@dataclass(frozen=True)
class _Piece:
    source: str  # "target" or "drafter"
    tensor: str


def write_weights(dest: Path, target: TargetCheckpoint, drafter: DrafterCheckpoint, limits: Limits) -> WeightIndex:
    """Write ``weights.bin`` under `dest` in float32, streaming one tensor at a time.

    The rotary tables go in too, one row a position the engines can reach.

    A weight made of several tensors (q, k and v) lies as one stretch, so a weight made of part of them (k and v) costs
    nothing. Tensors with equal bytes, such as tied or copied embeddings, are stored once.
    """
    sources: dict[str, TensorSource] = {"target": target.tensors, "drafter": drafter.tensors}
    writer = _Writer(dest / WEIGHTS_NAME)
    weights: dict[str, Weight] = {}
    with writer.file:
        for name, pieces in weight_plan(target.spec, drafter.spec):
            weights[name] = writer.add([(p, partial(sources[p.source].read, p.tensor)) for p in pieces])
        positions = limits.max_seq_len + limits.block_size
        for model, spec in (("target", target.spec), ("drafter", drafter.spec)):
            for part, table in zip(("cos", "sin"), rope_tables(spec.rope, spec.head_dim, positions), strict=True):
                weights[f"{model}.{part}"] = writer.add([(_Piece(model, part), partial(torch.clone, table))])
    return WeightIndex(writer.path, weights, writer.end)


class _Writer:
    """Appends tensors to the file, remembering where each lies and what its bytes were."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("wb")
        self.end = 0
        self._located: dict[_Piece, Weight] = {}
        self._by_digest: dict[bytes, Weight] = {}

    def add(self, pieces: list[tuple[_Piece, Callable[[], Tensor]]]) -> Weight:
        """The place of the pieces as one stretch: found if they already lie so, else written."""
        stretch = _stretch([self._located.get(piece) for piece, _ in pieces])
        if stretch is not None:
            return stretch
        arrays = [read().to(torch.float32).contiguous().numpy() for _, read in pieces]
        for (piece, _), array in zip(pieces, arrays, strict=True):
            if not np.isfinite(array).all():
                raise CheckpointError(
                    f"{piece.source} tensor {piece.tensor}",
                    "holds values that are not numbers",
                    expected="finite values",
                    found=f"{int((~np.isfinite(array)).sum())} of {array.size} NaN or infinite",
                    remedy="Get the checkpoint again",
                )
        digest = hashlib.sha256(repr([a.shape for a in arrays]).encode())
        for array in arrays:
            digest.update(array.data)
        key = digest.digest()
        if key not in self._by_digest:
            self.end += self.file.write(b"\0" * (-self.end % _ALIGN))
            parts = []
            for array in arrays:
                parts.append(Weight(self.end, array.shape))
                self.end += self.file.write(array.data)
            rows = sum(a.shape[0] for a in arrays)
            self._by_digest[key] = Weight(parts[0].offset, (rows, *arrays[0].shape[1:]))
        offset = self._by_digest[key].offset
        for (piece, _), array in zip(pieces, arrays, strict=True):
            self._located[piece] = Weight(offset, array.shape)
            offset += array.nbytes
        return self._by_digest[key]


def weight_plan(target: TargetSpec, drafter: DrafterSpec) -> Iterator[tuple[str, list[_Piece]]]:
    """Every graph weight with the checkpoint tensors it consists of, stacked on the first axis."""
    yield from _target_plan(target)
    yield from _drafter_plan(drafter, tied=target.tied)


def _target_plan(spec: TargetSpec) -> Iterator[tuple[str, list[_Piece]]]:
    def pieces(*names: str) -> list[_Piece]:
        return [_Piece("target", n) for n in names]

    embedding = "model.embed_tokens.weight"
    yield "target.embed", pieces(embedding)
    for i in range(spec.num_layers):
        ours, theirs = f"target.layers.{i}", f"model.layers.{i}"
        yield f"{ours}.input_norm.weight", pieces(f"{theirs}.input_layernorm.weight")
        yield from _linear(pieces, f"{ours}.qkv", theirs, "self_attn.{}_proj", "qkv", spec.qkv_bias)
        if spec.qk_norm:
            for x in "qk":
                yield f"{ours}.{x}_norm.weight", pieces(f"{theirs}.self_attn.{x}_norm.weight")
        yield from _linear(pieces, f"{ours}.o", theirs, "self_attn.{}_proj", "o", spec.o_bias)
        yield f"{ours}.mlp_norm.weight", pieces(f"{theirs}.post_attention_layernorm.weight")
        yield from _linear(pieces, f"{ours}.mlp.gate_up", theirs, "mlp.{}_proj", ("gate", "up"), spec.mlp_bias)
        yield from _linear(pieces, f"{ours}.mlp.down", theirs, "mlp.{}_proj", ("down",), spec.mlp_bias)
    yield "target.norm.weight", pieces("model.norm.weight")
    yield "target.lm_head.weight", pieces(embedding if spec.tied else "lm_head.weight")


def _drafter_plan(spec: DrafterSpec, tied: bool) -> Iterator[tuple[str, list[_Piece]]]:
    def pieces(*names: str) -> list[_Piece]:
        return [_Piece("drafter", n) for n in names]

    target_head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    own, shared = pieces("embed_tokens.weight"), [_Piece("target", "model.embed_tokens.weight")]
    yield "drafter.embed", own if spec.own_embeddings else shared
    yield "drafter.context.fc.weight", pieces("fc.weight")
    yield "drafter.context.hidden_norm.weight", pieces("hidden_norm.weight")
    for i in range(spec.num_layers):
        ours, theirs = f"drafter.layers.{i}", f"layers.{i}"
        context = f"drafter.context.layers.{i}"
        yield f"{ours}.input_norm.weight", pieces(f"{theirs}.input_layernorm.weight")
        yield from _linear(pieces, f"{ours}.qkv", theirs, "self_attn.{}_proj", "qkv", spec.attention_bias)
        yield from _linear(pieces, f"{context}.kv", theirs, "self_attn.{}_proj", "kv", spec.attention_bias)
        for name, x in ((ours, "q"), (ours, "k"), (context, "k")):
            yield f"{name}.{x}_norm.weight", pieces(f"{theirs}.self_attn.{x}_norm.weight")
        yield from _linear(pieces, f"{ours}.o", theirs, "self_attn.{}_proj", "o", spec.attention_bias)
        yield f"{ours}.mlp_norm.weight", pieces(f"{theirs}.post_attention_layernorm.weight")
        yield from _linear(pieces, f"{ours}.mlp.gate_up", theirs, "mlp.{}_proj", ("gate", "up"), False)
        yield from _linear(pieces, f"{ours}.mlp.down", theirs, "mlp.{}_proj", ("down",), False)
    yield "drafter.norm.weight", pieces("norm.weight")
    yield "drafter.lm_head.weight", pieces("lm_head.weight") if spec.own_lm_head else [_Piece("target", target_head)]
    if spec.markov != "none":
        yield "drafter.markov.w1", pieces("markov_head.markov_w1.weight")
        yield "drafter.markov.w2", pieces("markov_head.markov_w2.weight")
    projection = {"gated": "gate_proj", "rnn": "joint_proj"}.get(spec.markov)
    if projection:
        for part in ("weight", "bias"):
            yield f"drafter.markov.proj.{part}", pieces(f"markov_head.{projection}.{part}")
    if spec.confidence != "none":
        for part in ("weight", "bias"):
            yield f"drafter.confidence.{part}", pieces(f"confidence_head.proj.{part}")


def _linear(
    pieces: Callable[..., list[_Piece]], ours: str, theirs: str, pattern: str, parts: Iterable[str], bias: bool
) -> Iterator[tuple[str, list[_Piece]]]:
    for kind in ("weight", "bias") if bias else ("weight",):
        yield f"{ours}.{kind}", pieces(*(f"{theirs}.{pattern.format(p)}.{kind}" for p in parts))


def _stretch(parts: list[Weight | None]) -> Weight | None:
    """The parts as one weight, if all are there and lie end to end."""
    first = parts[0]
    if first is None:
        return None
    rows, end = 0, first.offset
    for part in parts:
        if part is None or part.offset != end:
            return None
        rows, end = rows + part.shape[0], end + part.nbytes
    return Weight(first.offset, (rows, *first.shape[1:]))
