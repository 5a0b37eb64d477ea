"""Bodies, in standard ops, of the CUDA operators with state: slot rows, the context's K and V, attention.

They ask little of the library: ONNX Runtime selects (``Where``) in no bfloat16 on CUDA, and what its Attention takes
has changed from version to version, so neither is used.
"""

from __future__ import annotations

from builder.graphs.functions import ROWS_INDEX

_CONSTANTS = """
  zero = Constant <value = int64 {0}> ()
  one = Constant <value = int64 {1}> ()
  zero_f = Constant <value = float {0.0}> ()
  minus_1 = Constant <value = int64[1] {-1}> ()
  axes_0 = Constant <value = int64[1] {0}> ()
  axes_1 = Constant <value = int64[1] {1}> ()
  axes_2 = Constant <value = int64[1] {2}> ()
  axes_3 = Constant <value = int64[1] {3}> ()
  axes_12 = Constant <value = int64[2] {1, 2}> ()
  axes_13 = Constant <value = int64[2] {1, 3}> ()
  axes_123 = Constant <value = int64[3] {1, 2, 3}> ()
  axes_124 = Constant <value = int64[3] {1, 2, 4}> ()
  same_2 = Constant <value = int64[2] {0, 0}> ()
"""


def _positions(x: str) -> str:
    """`position` ``[b, w]`` of the rows of x, counted up from ``start``."""
    return f"""
  width = Shape <start = 1, end = 2> ({x})
  width_scalar = Squeeze (width)
  offsets = Range (zero, width_scalar, one)
  start_column = Unsqueeze (start, axes_1)
  position = Add (start_column, offsets)
"""


# Rows past the tables are padding, whose results nobody reads.
_PHASE = """
  table_rows = Shape <start = 0, end = 1> (cos)
  last_phase = Sub (table_rows, axes_1)
  phase = Min (position, last_phase)
"""


def _split(x: str, state: str, parts: str) -> str:
    """x ``[b, w, (heads of all parts)*d]`` as float32 rows of heads, ``{part}_rows [b, w, heads, d]``."""
    count = {"q": "num_heads_1", "k": "kv_heads", "v": "kv_heads"}
    heads = """
  num_heads_scalar = Constant <value_int: int = @num_heads> ()
  num_heads_1 = Unsqueeze (num_heads_scalar, axes_0)
"""
    return f"""
  {heads if "q" in parts else ""}
  kv_heads = Shape <start = 1, end = 2> ({state})
  head_dim = Shape <start = 3, end = 4> ({state})
  sizes = Concat <axis = 0> ({", ".join(count[part] for part in parts)})
  by_head = Concat <axis = 0> (same_2, minus_1, head_dim)
  wide = Cast <to = 1> ({x})
  heads_of_all = Reshape (wide, by_head)
  {", ".join(f"{part}_rows" for part in parts)} = Split <axis = 2> (heads_of_all, sizes)
"""


def _norm(part: str) -> str:
    return f"""
  {part}_gamma = Cast <to = 1> ({part}_norm)
  {part}_normed = RMSNormalization <axis = -1, epsilon: float = @epsilon> ({part}_rows, {part}_gamma)
"""


def _rotate(part: str, rows: str, like: str) -> str:
    """`{part}_new` ``[b, heads, w, d]`` of type T, as a kernel keeps it."""
    return f"""
  {part}_heads = Transpose <perm = [0, 2, 1, 3]> ({rows})
  {part}_rotated = RotaryEmbedding ({part}_heads, cos, sin, phase)
  {part}_new = CastLike ({part}_rotated, {like})
"""


def _raw(part: str, like: str) -> str:
    return f"""
  {part}_heads = Transpose <perm = [0, 2, 1, 3]> ({part}_rows)
  {part}_new = CastLike ({part}_heads, {like})
"""


def _write_heads(state_k: str, state_v: str, written: str) -> str:
    """k_new and v_new into the rows `position` of the states, where `written` ``[b, w]`` says so.

    The others are written back as they were, to a row of their own: every index of the scatter is distinct.
    """
    text = f"""
  state_rows = Shape <start = 2, end = 3> ({state_k})
  row = Mod (position, state_rows)
  state = Identity ({state_k})
  {ROWS_INDEX}
  write = Unsqueeze ({written}, axes_13)
"""
    return text + "".join(_merge(part, state, "index") for part, state in (("k", state_k), ("v", state_v)))


def _merge(part: str, state: str, index: str) -> str:
    return f"""
  {part}_old = GatherND ({state}, {index})
  {part}_old_f = Cast <to = 1> ({part}_old)
  {part}_new_f = Cast <to = 1> ({part}_new)
  {part}_merged_f = Where (write, {part}_new_f, {part}_old_f)
  {part}_merged = CastLike ({part}_merged_f, {part}_new)
  {state}_out = ScatterND ({state}, {index}, {part}_merged)
"""


# q_new over keys and values [b, kv_heads, n, d] float32 where mask [b, 1, 1, 1 or w, n]: the query heads of a K/V head
# are rows of one product.
_ATTEND = """
  q_wide = Cast <to = 1> (q_new)
  head_dim_f = Cast <to = 1> (head_dim)
  root = Sqrt (head_dim_f)
  q_scaled = Div (q_wide, root)
  grouped = Concat <axis = 0> (axes_0, kv_heads, minus_1, head_dim)
  queries = Reshape (q_scaled, grouped)
  keys_t = Transpose <perm = [0, 1, 3, 2]> (keys)
  scores = MatMul (queries, keys_t)
  total = Shape <start = 2, end = 3> (keys)
  by_query = Concat <axis = 0> (same_2, minus_1, width, total)
  scores_by_query = Reshape (scores, by_query)
  lowest = Constant <value = float {-3.4028234e38}> ()
  masked = Where (mask, scores_by_query, lowest)
  weights = Softmax <axis = -1> (masked)
  together = Concat <axis = 0> (same_2, minus_1, total)
  weights_together = Reshape (weights, together)
  attended = MatMul (weights_together, values)
  ungrouped = Concat <axis = 0> (axes_0, num_heads_1, minus_1, head_dim)
  attended_heads = Reshape (attended, ungrouped)
  attended_rows = Transpose <perm = [0, 2, 1, 3]> (attended_heads)
  flat_shape = Concat <axis = 0> (same_2, minus_1)
  out_wide = Reshape (attended_rows, flat_shape)
  out = CastLike (out_wide, qkv)
"""


def _causal(norm: bool) -> str:
    q, k = ("q_normed", "k_normed") if norm else ("q_rows", "k_rows")
    return f"""
  {_CONSTANTS} {_positions("qkv")} {_PHASE} {_split("qkv", "k_cache", "qkv")}
  {_norm("q") + _norm("k") if norm else ""}
  {_rotate("q", q, "qkv")} {_rotate("k", k, "qkv")} {_raw("v", "qkv")}
  cache_rows = Shape <start = 2, end = 3> (k_cache)
  within = Less (position, cache_rows)
  {_write_heads("k_cache", "v_cache", "within")}
  state_rows_scalar = Squeeze (state_rows)
  columns = Range (zero, state_rows_scalar, one)
  last = Unsqueeze (position, axes_124)
  mask = LessOrEqual (columns, last)
  ahead = Sub (width, axes_1)
  newest = Add (start_column, ahead)
  seen_columns = LessOrEqual (columns, newest)
  seen = Unsqueeze (seen_columns, axes_13)
  slot_keys = Gather <axis = 0> (k_cache_out, slot)
  slot_values = Gather <axis = 0> (v_cache_out, slot)
  slot_keys_f = Cast <to = 1> (slot_keys)
  slot_values_f = Cast <to = 1> (slot_values)
  keys = Where (seen, slot_keys_f, zero_f)
  values = Where (seen, slot_values_f, zero_f)
  {_ATTEND}
"""


_BLOCK_ATTENTION = f"""
  {_CONSTANTS} {_positions("qkv")} {_PHASE} {_split("qkv", "ring_k", "qkv")} {_norm("q")} {_norm("k")}
  {_rotate("q", "q_normed", "qkv")} {_rotate("k", "k_normed", "qkv")} {_raw("v", "qkv")}
  window = Shape <start = 2, end = 3> (ring_k)
  window_scalar = Squeeze (window)
  ring_rows = Range (zero, window_scalar, one)
  newest = Sub (start_column, one)
  distance = Sub (newest, ring_rows)
  age = Mod (distance, window)
  valid_column = Unsqueeze (valid_len, axes_1)
  visible = Less (age, valid_column)
  block_shape = Shape <start = 0, end = 2> (qkv)
  true = Constant <value = bool[1] {{1}}> ()
  block_visible = Expand (true, block_shape)
  both = Concat <axis = 1> (visible, block_visible)
  mask = Unsqueeze (both, axes_123)
  seen = Unsqueeze (visible, axes_13)
  ring_keys = Gather <axis = 0> (ring_k, slot)
  ring_values = Gather <axis = 0> (ring_v, slot)
  ring_keys_f = Cast <to = 1> (ring_keys)
  ring_values_f = Cast <to = 1> (ring_values)
  seen_keys = Where (seen, ring_keys_f, zero_f)
  seen_values = Where (seen, ring_values_f, zero_f)
  block_keys = Cast <to = 1> (k_new)
  block_values = Cast <to = 1> (v_new)
  keys = Concat <axis = 2> (seen_keys, block_keys)
  values = Concat <axis = 2> (seen_values, block_values)
  {_ATTEND}
"""

_CONTEXT_WRITE = f"""
  {_CONSTANTS} {_positions("kv")} {_PHASE} {_split("kv", "ring_k", "kv")} {_norm("k")}
  {_rotate("k", "k_normed", "ring_k")} {_raw("v", "ring_k")}
  count_column = Unsqueeze (count, axes_1)
  counted = Less (offsets, count_column)
  {_write_heads("ring_k", "ring_v", "counted")}
"""

# (slot, row) of each row, [b, w, 2].
_ROW_INDEX = """
  index_shape = Shape (at)
  i_slot = Unsqueeze (slot, axes_1)
  e_slot = Expand (i_slot, index_shape)
  u_slot = Unsqueeze (e_slot, axes_2)
  u_row = Unsqueeze (at, axes_2)
  index = Concat <axis = 2> (u_slot, u_row)
"""

_SLOT_READ = f"""
  {_CONSTANTS}
  batch = Shape (slot)
  count = Shape (row)
  at_shape = Concat <axis = 0> (batch, count)
  at = Expand (row, at_shape)
  {_ROW_INDEX}
  rows = GatherND (state, index)
"""

_SLOT_WRITE = f"""
  {_CONSTANTS} {_positions("rows")}
  state_rows = Shape <start = 1, end = 2> (state)
  at = Mod (position, state_rows)
  {_ROW_INDEX}
  within = Less (position, state_rows)
  count_column = Unsqueeze (count, axes_1)
  counted = Less (offsets, count_column)
  written = And (within, counted)
  write = Unsqueeze (written, axes_2)
  t_new = Identity (rows)
  {_merge("t", "state", "index")}
"""

STATE_BODIES = {
    "SlotRead": _SLOT_READ,
    "SlotWrite": _SLOT_WRITE,
    "ContextWrite": _CONTEXT_WRITE,
    "BlockAttention": _BLOCK_ATTENTION,
    "CausalAttention": _causal(norm=False),
    "NormedCausalAttention": _causal(norm=True),
}
"""By operator type, statements in ONNX's textual syntax."""
