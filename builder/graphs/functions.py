"""ONNX bodies, in standard ops, of the ``dspark`` operators: what a back end without a kernel runs.

They are local functions of the model, over slot-indexed state, and say the same as the eager code in
`builder.graphs.ops`. Written in ONNX's own textual syntax, since that is what a reader of the model sees.
"""

from __future__ import annotations

from functools import cache

import onnx
import onnx.parser

from builder.graphs.ops import DOMAIN, SIGNATURES

OPSET = 24

# Rows [b, h, n, 3] of (slot, head, row) into a state tensor [slots+1, heads, rows, d], from slot[b], row[b, n].
ROWS_INDEX = """
  heads = Shape <start = 1, end = 2> (state)
  b = Shape <start = 0, end = 1> (row)
  n = Shape <start = 1, end = 2> (row)
  shape = Concat <axis = 0> (b, heads, n)
  i_slot = Unsqueeze (slot, axes_12)
  i_head_end = Squeeze (heads)
  i_head_range = Range (zero, i_head_end, one)
  i_head = Unsqueeze (i_head_range, axes_1)
  i_row = Unsqueeze (row, axes_1)
  e_slot = Expand (i_slot, shape)
  e_head = Expand (i_head, shape)
  e_row = Expand (i_row, shape)
  u_slot = Unsqueeze (e_slot, axes_3)
  u_head = Unsqueeze (e_head, axes_3)
  u_row = Unsqueeze (e_row, axes_3)
  index = Concat <axis = 3> (u_slot, u_head, u_row)
"""

_CONSTANTS = """
  zero = Constant <value = int64 {0}> ()
  one = Constant <value = int64 {1}> ()
  axes_1 = Constant <value = int64[1] {1}> ()
  axes_3 = Constant <value = int64[1] {3}> ()
  axes_12 = Constant <value = int64[2] {1, 2}> ()
  axes_13 = Constant <value = int64[2] {1, 3}> ()
  rows_flat = Constant <value = int64[3] {0, 0, -1}> ()
"""

_BODIES = {
    "CachedAttention": f"""
  {_CONSTANTS}
  w = Shape <start = 1, end = 2> (q)
  w_scalar = Squeeze (w)
  offsets = Range (zero, w_scalar, one)
  start_column = Unsqueeze (start, axes_1)
  row = Add (start_column, offsets)
  q_heads = Transpose <perm = [0, 2, 1, 3]> (q)
  k_heads = Transpose <perm = [0, 2, 1, 3]> (k)
  v_heads = Transpose <perm = [0, 2, 1, 3]> (v)
  q_rotated = RotaryEmbedding (q_heads, cos, sin, row)
  k_rotated = RotaryEmbedding (k_heads, cos, sin, row)
  state = Identity (k_cache)
  {ROWS_INDEX}
  k_cache_out = ScatterND (k_cache, index, k_rotated)
  v_cache_out = ScatterND (v_cache, index, v_heads)
  slot_keys = Gather <axis = 0> (k_cache_out, slot)
  slot_values = Gather <axis = 0> (v_cache_out, slot)
  size = Shape <start = 2, end = 3> (k_cache)
  size_scalar = Squeeze (size)
  columns = Range (zero, size_scalar, one)
  last = Unsqueeze (row, axes_13)
  mask = LessOrEqual (columns, last)
  newest = ReduceMax <keepdims = 1> (row, axes_1)
  seen_columns = LessOrEqual (columns, newest)
  seen = Unsqueeze (seen_columns, axes_13)
  zero_float = Constant <value = float {{0.0}}> ()
  keys = Where (seen, slot_keys, zero_float)
  values = Where (seen, slot_values, zero_float)
  attended = Attention (q_rotated, keys, values, mask)
  attended_rows = Transpose <perm = [0, 2, 1, 3]> (attended)
  out = Reshape (attended_rows, rows_flat)
""",
    # Rows past the count are written back as they were: every index of the scatter is distinct, nothing else changes.
    "RingWrite": f"""
  {_CONSTANTS}
  n_rows = Shape <start = 1, end = 2> (rows)
  n_scalar = Squeeze (n_rows)
  offsets = Range (zero, n_scalar, one)
  start_column = Unsqueeze (start, axes_1)
  position = Add (start_column, offsets)
  window = Shape <start = 2, end = 3> (ring)
  row = Mod (position, window)
  state = Identity (ring)
  {ROWS_INDEX}
  old = GatherND (ring, index)
  count_column = Unsqueeze (count, axes_1)
  counted = Less (offsets, count_column)
  write = Unsqueeze (counted, axes_13)
  new = Transpose <perm = [0, 2, 1, 3]> (rows)
  merged = Where (write, new, old)
  ring_out = ScatterND (ring, index, merged)
""",
    "RingAttention": f"""
  {_CONSTANTS}
  window = Shape <start = 2, end = 3> (ring_k)
  window_scalar = Squeeze (window)
  ring_rows = Range (zero, window_scalar, one)
  start_column = Unsqueeze (start, axes_1)
  newest = Sub (start_column, one)
  distance = Sub (newest, ring_rows)
  age = Mod (distance, window)
  valid_column = Unsqueeze (valid_len, axes_1)
  visible = Less (age, valid_column)
  block_shape = Shape <start = 0, end = 2> (q)
  true = Constant <value = bool[1] {{1}}> ()
  block_visible = Expand (true, block_shape)
  both = Concat <axis = 1> (visible, block_visible)
  one_query = Unsqueeze (both, axes_12)
  b = Shape <start = 0, end = 1> (q)
  queries = Shape <start = 1, end = 2> (q)
  total = Shape <start = 1, end = 2> (both)
  mask_shape = Concat <axis = 0> (b, axes_1, queries, total)
  mask = Expand (one_query, mask_shape)
  q_heads = Transpose <perm = [0, 2, 1, 3]> (q)
  k_heads = Transpose <perm = [0, 2, 1, 3]> (k)
  v_heads = Transpose <perm = [0, 2, 1, 3]> (v)
  ring_keys = Gather <axis = 0> (ring_k, slot)
  ring_values = Gather <axis = 0> (ring_v, slot)
  seen = Unsqueeze (visible, axes_13)
  zero_float = Constant <value = float {{0.0}}> ()
  seen_keys = Where (seen, ring_keys, zero_float)
  seen_values = Where (seen, ring_values, zero_float)
  keys = Concat <axis = 2> (seen_keys, k_heads)
  values = Concat <axis = 2> (seen_values, v_heads)
  attended = Attention (q_heads, keys, values, mask)
  attended_rows = Transpose <perm = [0, 2, 1, 3]> (attended)
  out = Reshape (attended_rows, rows_flat)
""",
}

# What each head adds to the base logits of one slot: from `row` = W1[prev], `h` and, for rnn, `state`. The noise rides
# along in the product: one column of zeros, where there is none, then costs nothing.
_BIAS = {
    "PlainChain": """
    row = Expand (no_rank, empty)
    corrected = Add (base_j, noise_j)
    state_out = Identity (state)
""",
    "MarkovChain": """
    row = Gather <axis = 0> (w1, prev)
    bias = Gemm <transB = 1> (row, w2, noise_j)
    corrected = Add (base_j, bias)
    state_out = Identity (state)
""",
    "GatedMarkovChain": """
    row = Gather <axis = 0> (w1, prev)
    features = Concat <axis = 1> (h, row)
    gate_logits = Gemm <transB = 1> (features, proj_w, proj_b)
    gate = Sigmoid (gate_logits)
    mixed = Mul (gate, row)
    bias = Gemm <transB = 1> (mixed, w2, noise_j)
    corrected = Add (base_j, bias)
    state_out = Identity (state)
""",
    "RnnMarkovChain": """
    row = Gather <axis = 0> (w1, prev)
    features = Concat <axis = 1> (state, row, h)
    joint = Gemm <transB = 1> (features, proj_w, proj_b)
    gate_logits, cell, output = Split <axis = 1, num_outputs = 3> (joint)
    gate = Sigmoid (gate_logits)
    kept = Mul (gate, state)
    open = Sub (one_f, gate)
    cell_value = Tanh (cell)
    added = Mul (open, cell_value)
    state_out = Add (kept, added)
    mixed = Tanh (output)
    bias = Gemm <transB = 1> (mixed, w2, noise_j)
    corrected = Add (base_j, bias)
""",
}

_PICK_SAMPLED = """
    scaled = Div (corrected, t_column)
    q_j = Softmax <axis = 1> (scaled)
    q_wide = Cast <to = 11> (q_j)
    cdf = CumSum (q_wide, one)
    total = Gather <axis = 1> (cdf, last)
    u_column = Unsqueeze (u, axes_1)
    u_wide = Cast <to = 11> (u_column)
    threshold = Mul (u_wide, total)
    passed = LessOrEqual (cdf, threshold)
    passed_int = Cast <to = 7> (passed)
    drawn = ReduceSum <keepdims = 0> (passed_int, axes_1)
    best = ArgMax <axis = 1, keepdims = 0> (corrected)
    id_j = Where (sampled, drawn, best)
"""

_PICK_GREEDY = """
    id_j = ArgMax <axis = 1, keepdims = 0> (corrected)
    q_j = Slice (corrected, axes_0, axes_1, axes_1)
"""


CHAIN_RESULTS = SIGNATURES["MarkovChain"][1]
"""ids, rows, q, logits: outputs of every chain."""


def chain_statements(op_type: str, sample: bool, results: tuple[str, ...] = CHAIN_RESULTS) -> str:
    """The chain as a Scan over the slots; `sample` False takes the argmax everywhere and returns a q of one
    column that means nothing (none at all crashes ONNX Runtime's Scan). `results` names what comes out;
    without a fourth name the corrected logits don't, a copy of the vocabulary a slot that only tests look at.

    A Scan, not an unrolled loop: W2 is packed once by the CPU's kernels, not once a slot.
    """
    rank = "rank = Shape <start = 1, end = 2> (w1)"
    if op_type == "PlainChain":
        # A column of zeros: ONNX Runtime's Scan crashes on values without any. `function` takes it off again.
        rank = "rank = Constant <value = int64[1] {1}> ()"
    logits = len(results) == len(CHAIN_RESULTS)
    return f"""
  b = Shape <start = 0, end = 1> (base)
  {rank}
  empty = Concat <axis = 0> (b, rank)
  no_rank = Constant <value = float[1, 1] {{0.0}}> ()
  state_0 = Expand (no_rank, empty)
  prev_last, state_last, {", ".join(results)} = Scan <
    num_scan_inputs = 4, scan_input_axes = [1, 1, 1, 1], scan_output_axes = [{", ".join("1" * len(results))}],
    body = slot (int64[B] prev, float[B, R] state, float[B, V] base_j, float[B, H] h, float[B] u, float[B, N] noise_j)
      => (int64[B] id_j, float[B, R] state_out, int64[B] id_out, float[B, R] row_out, float[B, Q] q_out
          {", float[B, V] logits_out" if logits else ""})
    {{
    {_BIAS[op_type]}
    {_PICK_SAMPLED if sample else _PICK_GREEDY}
    id_out = Identity (id_j)
    row_out = Identity (row)
    q_out = Identity (q_j)
    {"logits_out = Identity (corrected)" if logits else ""}
    }}
  > (bonus, state_0, base, hidden, uniforms, noise)
"""


CHAIN_CONSTANTS = """
  one = Constant <value = int64 {1}> ()
  one_f = Constant <value = float {1.0}> ()
  zero_f = Constant <value = float {0.0}> ()
  last = Constant <value = int64[1] {-1}> ()
  axes_0 = Constant <value = int64[1] {0}> ()
  axes_1 = Constant <value = int64[1] {1}> ()
  sampled = Greater (temperature, zero_f)
  t_safe = Where (sampled, temperature, one_f)
  t_column = Unsqueeze (t_safe, axes_1)
"""


def parse_function(
    domain: str,
    op_type: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    body: str,
    attributes: tuple[str, ...] = (),
) -> onnx.FunctionProto:
    """A FunctionProto from statements in ONNX's textual syntax, which may refer to ``@attribute``."""
    head = f'<domain: "{domain}", opset_import: ["": {OPSET}, "com.microsoft": 1]> {op_type}'
    listed = f"<{', '.join(attributes)}>" if attributes else ""
    return onnx.parser.parse_function(f"{head} {listed} ({', '.join(inputs)}) => ({', '.join(outputs)}) {{{body}}}")


@cache
def function(op_type: str) -> onnx.FunctionProto:
    """The standard-op body of a ``dspark`` operator."""
    body = _BODIES.get(op_type)
    if body is None:
        body = CHAIN_CONSTANTS + chain_statements(op_type, sample=True)
        if op_type == "PlainChain":
            body = CHAIN_CONSTANTS + chain_statements(op_type, sample=True, results=("ids", "column", "q", "logits"))
            body += "axes_2 = Constant <value = int64[1] {2}> ()  rows = Slice (column, axes_0, axes_0, axes_2)"
    return parse_function(DOMAIN, op_type, *SIGNATURES[op_type], body)
