"""The operators of the ONNX domain ``dspark`` that have kernels: names, types, shapes and what is updated in place.

Declared once: the ONNX functions (`builder.passes.cuda_ops`, which says what each computes) and the TensorRT plugins
(`plugins.tensorrt`) are made of this table, and ONNX Runtime's wrappers are held to it by a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

DOMAIN = "dspark"
VERSION = "1"

Kind = Literal["T", "F32", "I64"]
"""Type of a tensor: the precision T of activations and state (float32, float16 or bfloat16), float32, or int64."""

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Attributes = Mapping[str, int | float]


@dataclass(frozen=True)
class Input:
    name: str
    kind: Kind


@dataclass(frozen=True)
class Output:
    """`shape` follows from the inputs' shapes, by name, and the attributes. State that is updated in place `updates` an
    input: both are one buffer."""

    name: str
    kind: Kind
    shape: Callable[[Shapes, Attributes], Shape]
    updates: str | None = None


@dataclass(frozen=True)
class Operator:
    """`attributes` by name with their types, ``int`` or ``float``."""

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    attributes: Mapping[str, type]

    def shapes(self, inputs: Sequence[Shape], attributes: Attributes) -> tuple[Shape, ...]:
        """Of the outputs, for inputs of these shapes."""
        named = {tensor.name: shape for tensor, shape in zip(self.inputs, inputs, strict=True)}
        return tuple(output.shape(named, attributes) for output in self.outputs)


_INTEGERS = frozenset({"start", "slot", "count", "valid_len", "bonus", "row"})
_FLOATS = frozenset({"logits", "cos", "sin", "base", "temperature", "uniforms", "noise", "conf_w", "conf_b"})


def _kind(name: str) -> Kind:
    return "I64" if name in _INTEGERS else "F32" if name in _FLOATS else "T"


def _operator(name: str, inputs: str, outputs: tuple[Output, ...], **attributes: type) -> Operator:
    return Operator(name, tuple(Input(n, _kind(n)) for n in inputs.split()), outputs, attributes)


def _state(name: str) -> Output:
    return Output(f"{name}_out", "T", lambda s, _: s[name], updates=name)


def _attended(state: str) -> Output:
    """``[b, w, heads·d]``."""
    return Output("out", "T", lambda s, a: (*s["qkv"][:2], int(a["num_heads"]) * s[state][3]))


def _product(kind: Kind = "T", halves: int = 1) -> Output:
    return Output("y", kind, lambda s, _: (*s["x"][:-1], s["w"][0] // halves))


_TABLES = "cos sin"
_CHAIN = "base hidden bonus temperature uniforms noise"
CHAIN_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "DraftPlain": (),
    "DraftMarkov": ("w1", "w2"),
    "DraftGated": ("w1", "w2", "proj_w", "proj_b"),
    "DraftRnn": ("w1", "w2", "proj_w", "proj_b"),
}
"""Of each chain, the weights: of type T, as ``hidden`` is."""

_IDS = Output("ids", "I64", lambda s, _: s["base"][:2])
_Q = Output("q", "F32", lambda s, a: (*s["base"][:2], s["base"][2] if a["sample"] else 1))
_CONFIDENCE = Output("confidence", "F32", lambda s, _: s["base"][:2])


def _draft(name: str, confidence: bool) -> Operator:
    head = " conf_w conf_b" if confidence else ""
    outputs = (_IDS, _Q, _CONFIDENCE) if confidence else (_IDS, _Q)
    inputs = f"{_CHAIN} {' '.join(CHAIN_WEIGHTS[name])}{head}"
    return _operator(f"{name}C" if confidence else name, inputs, outputs, sample=int)


OPERATORS: Mapping[str, Operator] = {
    operator.name: operator
    for operator in (
        _operator(
            "SlotRead",
            "state slot row",
            (Output("rows", "T", lambda s, _: (s["slot"][0], s["row"][0], s["state"][2])),),
        ),
        _operator("SlotWrite", "state rows start count slot", (_state("state"),)),
        _operator(
            "ContextWrite",
            f"kv k_norm {_TABLES} start count slot ring_k ring_v",
            (_state("ring_k"), _state("ring_v")),
            epsilon=float,
        ),
        _operator(
            "BlockAttention",
            f"qkv q_norm k_norm {_TABLES} ring_k ring_v start valid_len slot",
            (_attended("ring_k"),),
            epsilon=float,
            num_heads=int,
        ),
        _operator(
            "CausalAttention",
            f"qkv {_TABLES} k_cache v_cache start slot",
            (_attended("k_cache"), _state("k_cache"), _state("v_cache")),
            num_heads=int,
        ),
        _operator(
            "NormedCausalAttention",
            f"qkv q_norm k_norm {_TABLES} k_cache v_cache start slot",
            (_attended("k_cache"), _state("k_cache"), _state("v_cache")),
            epsilon=float,
            num_heads=int,
        ),
        _operator(
            "BestToken",
            "logits",
            (
                Output("best_ids", "I64", lambda s, _: s["logits"][:-1]),
                Output("best", "F32", lambda s, _: s["logits"][:-1]),
            ),
        ),
        _operator("Linear", "x w", (_product(),)),
        _operator("LinearFloat", "x w", (_product("F32"),)),
        _operator("LinearAdd", "x w residual", (_product(),)),
        _operator("NormLinear", "x gamma w", (_product(),), epsilon=float),
        _operator("NormSwiGLU", "x gamma w", (_product(halves=2),), epsilon=float),
        *(_draft(name, confidence) for name in CHAIN_WEIGHTS for confidence in (False, True)),
    )
}
"""By operator type."""
