"""What the CPU runs for the ``dspark`` operators, a row at a time with its state bound: functions of standard ops."""

from __future__ import annotations

import onnx_ir as ir

from builder.graphs.functions import CHAIN_CONSTANTS, chain_statements, parse_function

CPU_DOMAIN = "dspark.cpu"

RING_WRITE = """
  zero = Constant <value = int64[1] {0}> ()
  one = Constant <value = int64[1] {1}> ()
  kept = Slice (rows, zero, count, one)
  heads = Transpose <perm = [0, 2, 1, 3]> (kept)
  window = Shape <start = 2, end = 3> (ring)
  first = Mod (start, window)
  ring_out = TensorScatter <axis = -2, mode = "circular"> (ring, heads, first)
"""

# Only rows below min(start, W) can be visible, so only they are read. The mask drops those too old or never seeded.
RING_ATTENTION = """
  zero = Constant <value = int64[1] {0}> ()
  zero_scalar = Constant <value = int64 {0}> ()
  one = Constant <value = int64 {1}> ()
  axis = Constant <value = int64[1] {2}> ()
  window = Shape <start = 2, end = 3> (ring_k)
  end = Min (start, window)
  end_scalar = Squeeze (end)
  ring_rows = Range (zero_scalar, end_scalar, one)
  newest = Sub (start, one)
  distance = Sub (newest, ring_rows)
  age = Mod (distance, window)
  visible = Less (age, valid_len)
  block = Shape <start = 1, end = 2> (q)
  true = Constant <value = bool[1] {1}> ()
  block_visible = Expand (true, block)
  row_mask = Concat <axis = 0> (visible, block_visible)
  axes = Constant <value = int64[3] {0, 1, 2}> ()
  one_row = Unsqueeze (row_mask, axes)
  unit = Constant <value = int64[2] {1, 1}> ()
  total = Shape (row_mask)
  mask_shape = Concat <axis = 0> (unit, block, total)
  mask = Expand (one_row, mask_shape)
  q_heads = Transpose <perm = [0, 2, 1, 3]> (q)
  k_heads = Transpose <perm = [0, 2, 1, 3]> (k)
  v_heads = Transpose <perm = [0, 2, 1, 3]> (v)
  ring_keys = Slice (ring_k, zero, end, axis)
  ring_values = Slice (ring_v, zero, end, axis)
  row_axis = Constant <value = int64[1] {1}> ()
  seen = Unsqueeze (visible, row_axis)
  zero_float = Constant <value = float {0.0}> ()
  seen_keys = Where (seen, ring_keys, zero_float)
  seen_values = Where (seen, ring_values, zero_float)
  keys = Concat <axis = 2> (seen_keys, k_heads)
  values = Concat <axis = 2> (seen_values, v_heads)
  attended = Attention (q_heads, keys, values, mask)
  attended_rows = Transpose <perm = [0, 2, 1, 3]> (attended)
  flat = Constant <value = int64[3] {0, 0, -1}> ()
  out = Reshape (attended_rows, flat)
"""


def chain_body(op_type: str, results: tuple[str, ...]) -> str:
    """Sampling costs a softmax and a running sum over the vocabulary a slot: taken only when some row samples."""

    def branch(name: str, sample: bool) -> str:
        own = tuple(f"{result}_{name}" for result in results)
        types = ["int64[B, S]", *["float[B, S, X]"] * (len(own) - 1)]
        outputs = ", ".join(f"{kind} {result}" for kind, result in zip(types, own, strict=True))
        return f"{name} () => ({outputs}) {{ {chain_statements(op_type, sample, own)} }}"

    return f"""
  {CHAIN_CONSTANTS}
  sampled_int = Cast <to = 6> (sampled)
  any_int = ReduceMax <keepdims = 0> (sampled_int)
  any = Cast <to = 9> (any_int)
  {", ".join(results)} = If (any) <then_branch = {branch("drawn", True)}, else_branch = {branch("best", False)}>
"""


def cpu_function(op_type: str, body: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> ir.Function:
    """The operator as a function of domain ``dspark.cpu``, from statements in ONNX's textual syntax."""
    return ir.serde.deserialize_function(parse_function(CPU_DOMAIN, op_type, inputs, outputs, body))
