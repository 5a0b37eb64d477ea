"""A body of standard ops for each operator of `builder.passes.cuda_ops`: what runs where no kernel library is.

A body rounds where a kernel does: norms, RoPE, attention, logits and the chain are float32 inside, whatever T is, and
a product's residual joins before the rounding. Only the product before SwiGLU is rounded once more.
"""

from __future__ import annotations

from functools import cache

import onnx_ir as ir

from builder.graphs.functions import CHAIN_CONSTANTS, chain_statements, parse_function
from builder.graphs.ops import DOMAIN
from builder.passes.cuda_ops import DRAFT_OPS, SIGNATURES
from builder.passes.cuda_state import STATE_BODIES
from plugins.operators import CHAIN_WEIGHTS


def _product(x: str, w: str, y: str, add: str = "") -> str:
    """``x wᵀ`` (+ add) as a Gemm, which takes W as it lies and adds before it rounds."""
    flat_add = f"flat_add = Flatten <axis = 2> ({add})" if add else ""
    return f"""
  flat = Flatten <axis = 2> ({x})
  {flat_add}
  product = Gemm <transB = 1> (flat, {w}{", flat_add" if add else ""})
  lead = Shape <start = 0, end = 2> ({x})
  last = Constant <value = int64[1] {{-1}}> ()
  whole = Concat <axis = 0> (lead, last)
  {y} = Reshape (product, whole)
"""


_NORMED = "normed = RMSNormalization <axis = -1, epsilon: float = @epsilon> (x, gamma)"

_BODIES = {
    **STATE_BODIES,
    "BestToken": """
  last_axis = Constant <value = int64[1] {-1}> ()
  best_ids = ArgMax <axis = -1, keepdims = 0> (logits)
  best = ReduceMax <keepdims = 0> (logits, last_axis)
""",
    "Linear": _product("x", "w", "y"),
    # In T a logit of 20 would be known to 0.1 only.
    "LinearFloat": f"x_f = Cast <to = 1> (x)  w_f = Cast <to = 1> (w) {_product('x_f', 'w_f', 'y')}",
    "LinearAdd": _product("x", "w", "y", add="residual"),
    "NormLinear": f"{_NORMED} {_product('normed', 'w', 'y')}",
    "NormSwiGLU": f"""
  {_NORMED} {_product("normed", "w", "gate_up")}
  gate_up_f = Cast <to = 1> (gate_up)
  gate, up = Split <axis = 2, num_outputs = 2> (gate_up_f)
  sigmoid = Sigmoid (gate)
  silu = Mul (gate, sigmoid)
  y_f = Mul (silu, up)
  y = CastLike (y_f, x)
""",
}


def _draft_body(op_type: str, sample: bool, rows_in_confidence: bool) -> str:
    """The chain of `builder.graphs.functions` on float32 copies, then the confidence of each slot."""
    kind = op_type.removesuffix("C")
    chain = next(exported for exported, ours in DRAFT_OPS.items() if ours == kind)
    copied = ("hidden", *CHAIN_WEIGHTS[kind])
    # The names within the Scan are taken: `features` for one.
    confidence = f"""
  {"conf_x = Concat <axis = 2> (hidden, rows)" if rows_in_confidence else "conf_x = Identity (hidden)"}
  conf_t = Transpose <perm = [1, 0]> (conf_w)
  score = MatMul (conf_x, conf_t)
  shifted = Add (score, conf_b)
  confidence = Squeeze (shifted, last)
"""
    return f"""
  {" ".join(f"{name} = Cast <to = 1> ({name}_t)" for name in copied)}
  {CHAIN_CONSTANTS}
  {chain_statements(chain, sample, ("ids", "rows", "q"))}
  {confidence if op_type.endswith("C") else ""}
"""


@cache
def cuda_function(op_type: str, sample: bool = False, rows_in_confidence: bool = False) -> ir.Function:
    """The body of an operator of `SIGNATURES`.

    A body can't branch, so that of a draft operator is made for the attribute ``sample`` of its node, and for a
    confidence head that reads the W1 rows or doesn't.
    """
    inputs, outputs, attributes = SIGNATURES[op_type]
    if op_type in _BODIES:
        body = _BODIES[op_type]
    else:
        body = _draft_body(op_type, sample, rows_in_confidence)
        copied = {"hidden", *CHAIN_WEIGHTS[op_type.removesuffix("C")]}
        inputs = tuple(f"{name}_t" if name in copied else name for name in inputs)
    return ir.serde.deserialize_function(parse_function(DOMAIN, op_type, inputs, outputs, body, attributes))
