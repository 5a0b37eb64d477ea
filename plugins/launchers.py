"""The kernels' C interface (each folder's ``kernel.h``) by ctypes: an operator of `plugins.operators` on addresses."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.operators import CHAIN_WEIGHTS, Attributes, Operator, Shapes

DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
"""Precisions as the C interface numbers them."""

LIBRARY = "libdspark_kernels.so"

_I64, _F32, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class LinearArgs(ctypes.Structure):
    """``dspark_linear_args``"""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "gamma", "w", "residual", "y", "workspace")),
        *((name, _I64) for name in ("rows", "inputs", "outputs", "mode")),
        ("epsilon", _F32),
    )


class ChainArgs(ctypes.Structure):
    """``dspark_chain_args``"""

    _fields_ = (
        *((n, _POINTER) for n in ("base", "hidden", "bonus", "temperature", "uniforms", "noise", "w1", "w2")),
        *((n, _POINTER) for n in ("proj_w", "proj_b", "conf_w", "conf_b", "ids", "q", "confidence", "workspace")),
        *((n, _I64) for n in ("batch", "steps", "vocab", "rank", "hidden_size", "conf_rows", "kind")),
    )


@dataclass(frozen=True)
class Call:
    """One call of an operator: shapes of its inputs and addresses of all tensors by name, state being where its input
    is. `dtype` is a value of `DTYPES`."""

    operator: Operator
    shapes: Shapes
    at: Mapping[str, int]
    attributes: Attributes
    dtype: int
    workspace: int
    stream: int


class Kernels:
    """A loaded library of launchers. Raises OSError for a file that isn't one for this machine."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name in ("attention", "linear", "markov_chain"):
            self._library[f"dspark_{name}_workspace"].restype = _I64

    def workspace(self, operator: Operator, shapes: Shapes, attributes: Attributes, dtype: int) -> int:
        """Bytes of device memory that a call of these sizes takes besides its tensors.

        Raises:
            ValueError: sizes that no kernel takes.
        """
        sizes = _SIZES.get(_family(operator))
        if sizes is None:
            return 0
        name, values = sizes(operator, shapes, attributes)
        arguments = [_I64(value) for value in values]
        more = [ctypes.c_int(dtype)] if name == "linear" else []
        found = int(getattr(self._library, f"dspark_{name}_workspace")(*arguments, *more))
        if found < 0:
            raise ValueError(f"dspark::{operator.name}: no kernel takes these sizes ({dict(shapes)})")
        return found

    def launch(self, call: Call) -> None:
        """Put the call's work on its stream.

        Raises:
            RuntimeError: the number of the CUDA error.
        """
        function, arguments = _LAUNCHES[_family(call.operator)](call)
        error = getattr(self._library, f"dspark_{function}")(
            *arguments, ctypes.c_int(call.dtype), _POINTER(call.stream)
        )
        if error:
            raise RuntimeError(f"dspark::{call.operator.name}: CUDA error {error}")


def _family(operator: Operator) -> str:
    """Operators of one launcher: those of linear layers and those of drafts differ in an argument."""
    if operator.name.startswith("Draft"):
        return "Draft"
    if operator.name.endswith("CausalAttention"):
        return "CausalAttention"
    return "Linear" if operator.outputs[0].name == "y" else operator.name


def _attention_sizes(operator: Operator, s: Shapes, a: Attributes) -> list[int]:
    """batch, width, heads, kv_heads, head_dim, rows."""
    state = s["ring_k" if "ring_k" in s else "k_cache"]
    return [s["qkv"][0], s["qkv"][1], int(a["num_heads"]), state[1], state[3], state[2]]


_MODES = {"Linear": 0, "NormLinear": 0, "LinearFloat": 1, "LinearAdd": 2, "NormSwiGLU": 3}


def _linear_sizes(operator: Operator, s: Shapes) -> list[int]:
    """rows, inputs, outputs, mode."""
    rows = math.prod(s["x"][:-1])
    outputs, inputs = s["w"]
    mode = _MODES[operator.name]
    return [rows, inputs, outputs // 2 if operator.name == "NormSwiGLU" else outputs, mode]


_SIZES: Mapping[str, Callable[[Operator, Shapes, Attributes], tuple[str, list[int]]]] = {
    "BlockAttention": lambda o, s, a: ("attention", [*_attention_sizes(o, s, a), 1]),
    "CausalAttention": lambda o, s, a: ("attention", [*_attention_sizes(o, s, a), 0]),
    "Linear": lambda o, s, a: ("linear", _linear_sizes(o, s)),
    "Draft": lambda o, s, a: ("markov_chain", [*s["base"][:2], s["w1"][1] if "w1" in s else 0]),
}


def _pointers(call: Call, *names: str | None) -> list[Any]:
    """Of those tensors; None, or what the operator doesn't have, is null."""
    return [_POINTER(None if name is None else call.at.get(name)) for name in names]


def _numbers(*values: int) -> list[Any]:
    return [_I64(value) for value in values]


def _slot_read(call: Call) -> tuple[str, list[Any]]:
    _, rows, width = call.shapes["state"]
    sizes = call.shapes["slot"][0], call.shapes["row"][0], rows, width
    return "slot_read", [*_pointers(call, "state", "slot", "row", "rows"), *_numbers(*sizes)]


def _slot_write(call: Call) -> tuple[str, list[Any]]:
    _, rows, width = call.shapes["state"]
    sizes = *call.shapes["rows"][:2], rows, width
    return "slot_write", [*_pointers(call, "state", "rows", "start", "count", "slot"), *_numbers(*sizes)]


def _context_write(call: Call) -> tuple[str, list[Any]]:
    names = "kv", "k_norm", "cos", "sin", "start", "count", "slot", "ring_k", "ring_v"
    _, kv_heads, window, head_dim = call.shapes["ring_k"]
    sizes = *call.shapes["kv"][:2], kv_heads, head_dim, window, call.shapes["cos"][0]
    return "context_write", [*_pointers(call, *names), *_numbers(*sizes), _F32(call.attributes["epsilon"])]


def _best_token(call: Call) -> tuple[str, list[Any]]:
    *rows, vocab = call.shapes["logits"]
    return "best_token", [*_pointers(call, "logits", "best_ids", "best"), *_numbers(math.prod(rows), vocab)]


def _attention(call: Call) -> tuple[str, list[Any]]:
    ring = "ring_k" in call.shapes
    state = ("ring_k", "ring_v", "start", "valid_len", "slot") if ring else ("k_cache", "v_cache", "start", "slot")
    tensors = _pointers(call, "qkv", "q_norm", "k_norm", "cos", "sin", *state, "out")
    sizes = _numbers(*_attention_sizes(call.operator, call.shapes, call.attributes), call.shapes["cos"][0])
    epsilon = _F32(call.attributes.get("epsilon", 0.0))
    name = "block_attention" if ring else "causal_attention"
    return name, [*tensors, _POINTER(call.workspace or None), *sizes, epsilon]


def _linear(call: Call) -> tuple[str, list[Any]]:
    args = LinearArgs(*_pointers(call, "x", "gamma", "w", "residual", "y"), _POINTER(call.workspace or None))
    args.rows, args.inputs, args.outputs, args.mode = _linear_sizes(call.operator, call.shapes)
    args.epsilon = call.attributes.get("epsilon", 0.0)
    return "linear", [ctypes.byref(args)]


def _draft(call: Call) -> tuple[str, list[Any]]:
    shapes, kind = call.shapes, call.operator.name.removesuffix("C")
    args = ChainArgs()
    for name, address in call.at.items():
        setattr(args, name, address)
    batch, steps, vocab = shapes["base"]
    if shapes["noise"][2] == 1 != vocab:
        args.noise = None
    if not call.attributes["sample"]:
        args.q = None
    args.workspace = call.workspace or None
    args.batch, args.steps, args.vocab, args.hidden_size = batch, steps, vocab, shapes["hidden"][2]
    args.rank = shapes["w1"][1] if "w1" in shapes else 0
    args.conf_rows = int("conf_w" in shapes and args.rank > 0 and shapes["conf_w"][1] == args.hidden_size + args.rank)
    args.kind = list(CHAIN_WEIGHTS).index(kind)
    return "markov_chain", [ctypes.byref(args)]


_LAUNCHES: Mapping[str, Callable[[Call], tuple[str, list[Any]]]] = {
    "SlotRead": _slot_read,
    "SlotWrite": _slot_write,
    "ContextWrite": _context_write,
    "BestToken": _best_token,
    "BlockAttention": _attention,
    "CausalAttention": _attention,
    "Linear": _linear,
    "Draft": _draft,
}
