"""Random inputs for each ``dspark`` operator, its eager results, and one-operator models for ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from numpy.typing import NDArray

from builder.graphs import ops
from builder.graphs.functions import OPSET
from builder.graphs.ops import CHAIN_OPS, DOMAIN, SIGNATURES
from builder.passes.cpu_functions import CPU_DOMAIN

Arrays = dict[str, NDArray[Any]]

SEEDS = range(8)
CHAINS = {op_type: kind for kind, op_type in CHAIN_OPS.items()}


@dataclass(frozen=True)
class Case:
    """Inputs of one operator, by the names of `SIGNATURES`. The first `real` rows are requests in slots of their own,
    the rest padding on the scratch slot, whose results nobody reads."""

    op_type: str
    inputs: Arrays
    real: int

    def eager(self) -> Arrays:
        """What the torch operator makes of the inputs, by the output names of `SIGNATURES`."""
        args = {name: torch.from_numpy(value) for name, value in self.inputs.items()}
        results: Any
        if self.op_type in CHAINS:
            chain = ("base", "hidden", "bonus", "temperature", "uniforms", "noise")
            weights = [value for name, value in args.items() if name not in chain]
            results = ops.markov_chain(CHAINS[self.op_type], *(args[name] for name in chain), weights)
        else:
            operator = {
                "CachedAttention": ops.cached_attention,
                "RingWrite": ops.ring_write,
                "RingAttention": ops.ring_attention,
            }[self.op_type]
            results = operator(**args)
        results = results if isinstance(results, tuple) else (results,)
        return {name: value.numpy() for name, value in zip(SIGNATURES[self.op_type][1], results, strict=True)}

    def row(self, r: int, state: tuple[str, ...]) -> Arrays:
        """The inputs of row r alone, as the CPU's lowered operators take them: its slot's part of the state."""
        slot = int(self.inputs["slot"][r])
        return {
            name: value[slot : slot + 1] if name in state else value[r : r + 1]
            for name, value in self.inputs.items()
            if name != "slot"
        }


def cached_attention(seed: int, head_dim: int = 8) -> Case:
    rng = np.random.default_rng(seed)
    real, padding = int(rng.integers(1, 4)), int(rng.integers(0, 3))
    slots, kv_heads, group = real + 1, int(rng.integers(1, 4)), int(rng.integers(1, 4))
    width, size = int(rng.integers(1, 6)), 16
    b = real + padding
    # The last row of the cache is reached too.
    start = np.append(rng.integers(0, size - width + 1, real - 1), size - width)
    angles = rng.uniform(0, 6, (size, head_dim // 2)).astype(np.float32)
    return Case(
        "CachedAttention",
        {
            "q": _normal(rng, b, width, kv_heads * group, head_dim),
            "k": _normal(rng, b, width, kv_heads, head_dim),
            "v": _normal(rng, b, width, kv_heads, head_dim),
            "k_cache": _normal(rng, slots + 1, kv_heads, size, head_dim),
            "v_cache": _normal(rng, slots + 1, kv_heads, size, head_dim),
            "start": _padded(start, b, 0),
            "slot": _slots(rng, real, b, slots),
            "cos": np.cos(angles),
            "sin": np.sin(angles),
        },
        real,
    )


def ring_write(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    real, padding = int(rng.integers(1, 4)), int(rng.integers(0, 3))
    slots, kv_heads, head_dim = real + 1, int(rng.integers(1, 4)), 2 * int(rng.integers(1, 5))
    window = int(rng.integers(3, 9))
    # Seed 0 writes a whole window, and every row of a few seeds wraps.
    n = window if seed == 0 else int(rng.integers(1, window + 1))
    b = real + padding
    start = rng.integers(0, 40, real) if seed % 2 else window * rng.integers(1, 5, real) - rng.integers(1, n + 1, real)
    count = rng.integers(0, n + 1, real)
    count[0] = n if seed == 0 else count[0]
    return Case(
        "RingWrite",
        {
            "ring": _normal(rng, slots + 1, kv_heads, window, head_dim),
            "rows": _normal(rng, b, n, kv_heads, head_dim),
            "start": _padded(start, b, 1),
            "count": _padded(count, b, 0),
            "slot": _slots(rng, real, b, slots),
        },
        real,
    )


def ring_attention(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    real, padding = int(rng.integers(2, 5)), int(rng.integers(0, 3))
    slots, kv_heads, group = real + 1, int(rng.integers(1, 4)), int(rng.integers(1, 4))
    head_dim, window, block = 2 * int(rng.integers(1, 5)), int(rng.integers(4, 10)), int(rng.integers(1, 6))
    b = real + padding
    start = rng.integers(1, 4 * window, real)
    start[-1] = window * int(rng.integers(1, 4))  # start on a multiple of the window
    valid = rng.integers(0, np.minimum(start, window) + 1)
    valid[0], valid[-1] = 0, window  # an empty context, and a full ring
    return Case(
        "RingAttention",
        {
            "q": _normal(rng, b, block, kv_heads * group, head_dim),
            "k": _normal(rng, b, block, kv_heads, head_dim),
            "v": _normal(rng, b, block, kv_heads, head_dim),
            "ring_k": _normal(rng, slots + 1, kv_heads, window, head_dim),
            "ring_v": _normal(rng, slots + 1, kv_heads, window, head_dim),
            "start": _padded(start, b, 1),
            "valid_len": _padded(valid, b, 0),
            "slot": _slots(rng, real, b, slots),
        },
        real,
    )


def unseen_nan(case: Case) -> Case:
    """The RingAttention case with NaN in every ring row that no block may see, other slots included."""
    x = case.inputs
    rings = {name: np.full_like(x[name], np.nan) for name in ("ring_k", "ring_v")}
    window = x["ring_k"].shape[2]
    for b in range(case.real):
        for p in range(x["start"][b] - x["valid_len"][b], x["start"][b]):
            for name, ring in rings.items():
                ring[x["slot"][b], :, p % window] = x[name][x["slot"][b], :, p % window]
    return Case(case.op_type, x | rings, case.real)


def chain(op_type: str, seed: int, temperatures: str = "mixed") -> Case:
    """`temperatures`: ``greedy``, ``sampled`` or ``mixed`` (one greedy row, one at least that samples)."""
    rng = np.random.default_rng(seed)
    b, s = int(rng.integers(2, 5)), int(rng.integers(1, 6))
    vocab, hidden, rank = int(rng.integers(5, 50)), int(rng.integers(1, 8)), int(rng.integers(1, 6))
    temperature = rng.uniform(0.3, 2, b).astype(np.float32)
    if temperatures == "greedy":
        temperature[:] = 0
    elif temperatures == "mixed":
        temperature[0] = 0
    inputs: Arrays = {
        "base": _normal(rng, b, s, vocab),
        "hidden": _normal(rng, b, s, hidden),
        "bonus": rng.integers(0, vocab, b),
        "temperature": temperature,
        "uniforms": (rng.integers(0, 2**23, (b, s)) / 2**23).astype(np.float32),
        # Of every other case none, as one column of zeros.
        "noise": _normal(rng, b, s, vocab) if seed % 2 else np.zeros((b, s, 1), np.float32),
    }
    # The smallest uniform, where the first token has no probability at all, and the largest.
    inputs["uniforms"][-1, 0], inputs["base"][-1, 0, 0] = 0, -1e9
    inputs["uniforms"][-1, -1] = 1 - 2.0**-23
    if op_type != "PlainChain":
        inputs |= {"w1": _normal(rng, vocab, rank), "w2": _normal(rng, vocab, rank)}
    shape = {"GatedMarkovChain": (rank, hidden + rank), "RnnMarkovChain": (3 * rank, 2 * rank + hidden)}.get(op_type)
    if shape is not None:
        inputs |= {"proj_w": _normal(rng, *shape), "proj_b": _normal(rng, shape[0])}
    return Case(op_type, inputs, b)


def session(function: onnx.FunctionProto, inputs: Mapping[str, NDArray[Any]]) -> Any:
    """A session that runs one call of the function on inputs of these shapes."""
    helper = onnx.helper
    outputs = list(function.output)
    if function.name == "PlainChain":  # its rows have no columns: nobody reads them, and ONNX Runtime can't make them
        outputs[outputs.index("rows")] = ""
    node = helper.make_node(function.name, list(inputs), outputs, domain=function.domain)
    typed = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
    ]
    kinds = {"ids": onnx.TensorProto.INT64}
    results = [helper.make_tensor_value_info(n, kinds.get(n, onnx.TensorProto.FLOAT), None) for n in outputs if n]
    domains = {"": OPSET, DOMAIN: 1, CPU_DOMAIN: 1, "com.microsoft": 1}
    model = helper.make_model(
        helper.make_graph([node], "one", typed, results),
        functions=[function],
        opset_imports=[helper.make_opsetid(*item) for item in domains.items()],
        ir_version=10,
    )
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(function: onnx.FunctionProto, inputs: Arrays) -> Arrays:
    """The function's results by name."""
    one = session(function, inputs)
    results = one.run(None, {n: np.ascontiguousarray(v) for n, v in inputs.items()})
    return {output.name: value for output, value in zip(one.get_outputs(), results, strict=True)}


def assert_close(found: NDArray[Any], expected: NDArray[Any], name: str = "") -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=name)


def _normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape, dtype=np.float32)


def _padded(values: NDArray[Any], b: int, padding: int) -> NDArray[np.int64]:
    out = np.full(b, padding, np.int64)
    out[: len(values)] = values
    return out


def _slots(rng: np.random.Generator, real: int, b: int, slots: int) -> NDArray[np.int64]:
    """Slots in any order for the real rows, scratch for the others."""
    return _padded(rng.permutation(slots)[:real], b, slots)
