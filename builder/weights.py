"""One weights file for every graph: each checkpoint tensor is read once, written once, and shared by its users."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.errors import CheckpointError
from builder.rope_tables import rope_tables
from builder.spec import DrafterCheckpoint, DrafterSpec, TargetCheckpoint, TargetSpec, TensorSource
from runtime.manifest import ITEM_BYTES, WEIGHTS_NAME, Limits

Float32 = NDArray[np.float32]

# Of a type: the bits of infinity, and the greatest value below.
_RANGES = {"float16": (0x7C00, 65504.0), "bfloat16": (0x7F80, 3.3895314e38)}
# A page, for what is written as one stretch: a library can then map it in place.
_ALIGN = 4096


@dataclass(frozen=True)
class Weight:
    """Where a weight lies in the file, in C order, and in which type of `runtime.manifest.ITEM_BYTES`."""

    offset: int
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * int(np.prod(self.shape))


@dataclass(frozen=True)
class WeightIndex:
    """The weights file: `weights` by graph name (``target.layers.0.qkv.weight``), and its length in bytes."""

    path: Path
    weights: dict[str, Weight]
    bytes: int

    def array(self, name: str) -> Float32:
        """The weight in float32: where it is stored so, a view of the mapped file; writing to it does not change the
        file.
        """
        weight = self.weights[name]
        data = np.memmap(self.path, dtype=np.uint8, mode="c", offset=weight.offset, shape=(weight.nbytes,))
        if weight.dtype == "bfloat16":
            wide = data.view("<u2").astype(np.uint32)
            wide <<= 16
            return wide.view(np.float32).reshape(weight.shape)
        return data.view(weight.dtype).astype(np.float32, copy=False).reshape(weight.shape)


def weight_dtype(name: str, precision: str) -> str:
    """The type that a weight of that name is stored in for a precision, ``f32``, ``bf16`` or ``f16``.

    Whatever the precision, rotary tables and the confidence head stay float32. So does the range of what reads taps:
    their values pass what float16 sums can hold, so ``fc`` and its norm are bfloat16 then.
    """
    if precision == "f32" or name.endswith((".cos", ".sin")) or name.startswith("drafter.confidence."):
        return "float32"
    if precision == "f16" and not name.startswith(("drafter.context.fc.", "drafter.context.hidden_norm.")):
        return "float16"
    return "bfloat16"


@dataclass(frozen=True)
class _Piece:
    source: str  # "target" or "drafter"
    tensor: str


def write_weights(
    dest: Path, target: TargetCheckpoint, drafter: DrafterCheckpoint, limits: Limits, precision: str = "f32"
) -> WeightIndex:
    """Write ``weights.bin`` under `dest` in the types of a precision (`weight_dtype`), streaming one tensor at a time.

    The rotary tables go in too, one row a position the engines can reach.

    A weight made of several tensors (q, k and v) lies as one stretch, so a weight made of part of them (k and v) costs
    nothing. Tensors with equal bytes, such as tied or copied embeddings, are stored once.
    """
    sources: dict[str, TensorSource] = {"target": target.tensors, "drafter": drafter.tensors}
    writer = _Writer(dest / WEIGHTS_NAME)
    weights: dict[str, Weight] = {}
    with writer.file:
        for name, pieces in weight_plan(target.spec, drafter.spec):
            read = [(p, partial(sources[p.source].read, p.tensor)) for p in pieces]
            weights[name] = writer.add(read, weight_dtype(name, precision))
        positions = limits.max_seq_len + limits.block_size
        for model, spec in (("target", target.spec), ("drafter", drafter.spec)):
            for part, table in zip(("cos", "sin"), rope_tables(spec.rope, spec.head_dim, positions), strict=True):
                weights[f"{model}.{part}"] = writer.add([(_Piece(model, part), partial(np.asarray, table))], "float32")
    return WeightIndex(writer.path, weights, writer.end)


class _Writer:
    """Appends tensors to the file, remembering where each lies and what its bytes were."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("wb")
        self.end = 0
        self._located: dict[tuple[_Piece, str], Weight] = {}
        self._by_digest: dict[bytes, Weight] = {}

    def add(self, pieces: Sequence[tuple[_Piece, Callable[[], Float32]]], dtype: str) -> Weight:
        """The place of the pieces as one stretch of that type: found if they already lie so, else written."""
        stretch = _stretch([self._located.get((piece, dtype)) for piece, _ in pieces])
        if stretch is not None:
            return stretch
        arrays = [_stored(piece, read(), dtype) for piece, read in pieces]
        shapes = [array.shape for array in arrays]
        digest = hashlib.sha256(repr((dtype, shapes)).encode())
        for array in arrays:
            digest.update(array.data)
        key = digest.digest()
        if key not in self._by_digest:
            self.end += self.file.write(b"\0" * (-self.end % _ALIGN))
            parts = []
            for shape, array in zip(shapes, arrays, strict=True):
                parts.append(Weight(self.end, shape, dtype))
                self.end += self.file.write(array.data)
            rows = sum(shape[0] for shape in shapes)
            self._by_digest[key] = Weight(parts[0].offset, (rows, *shapes[0][1:]), dtype)
        offset = self._by_digest[key].offset
        for (piece, _), shape, array in zip(pieces, shapes, arrays, strict=True):
            self._located[piece, dtype] = Weight(offset, shape, dtype)
            offset += array.nbytes
        return self._by_digest[key]


def _stored(piece: _Piece, values: Float32, dtype: str) -> NDArray[Any]:
    """The values in that type, contiguous; bfloat16, which numpy lacks, as uint16. Raises CheckpointError for values
    that aren't finite, or too large for it.
    """
    where = f"{piece.source} tensor {piece.tensor}"
    wrong = np.count_nonzero(~np.isfinite(values))
    if wrong:
        raise CheckpointError(
            where,
            "holds values that are not numbers",
            expected="finite values",
            found=f"{wrong} of {values.size} NaN or infinite",
            remedy="Get the checkpoint again",
        )
    if dtype == "float32":
        return np.ascontiguousarray(values)
    with np.errstate(over="ignore"):
        stored = values.astype(np.float16) if dtype == "float16" else _bfloat16(values)
    infinite, most = _RANGES[dtype]
    if ((stored.view(np.uint16) & 0x7FFF) == infinite).any():
        raise CheckpointError(
            where,
            f"holds values that {dtype} has no room for",
            expected=f"at most {most:g}",
            found=f"{float(np.abs(values).max()):g}",
            remedy="Build with --precision bf16",
        )
    return np.ascontiguousarray(stored)


def _bfloat16(values: Float32) -> NDArray[np.uint16]:
    """The upper halves, rounded to the nearest, of two equally near ones to the even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    return rounded.astype(np.uint16)


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
    return Weight(first.offset, (rows, *first.shape[1:]), first.dtype)
