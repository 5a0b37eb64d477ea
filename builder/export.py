"""One export a graph: torch modules on the meta device to ONNX, weights left as names.

The result is back-end neutral: batch and width are symbolic, state is whole and slot-indexed, the ``dspark`` operators carry
their standard-op bodies as local functions. `builder.weights` says where each weight lies; `builder.passes` specialise.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor, nn

from builder.graphs.drafter import Draft, Seed
from builder.graphs.functions import OPSET, function
from builder.graphs.layers import rope_tables
from builder.graphs.ops import DOMAIN, TRANSLATIONS
from builder.graphs.target import Target
from builder.spec import DrafterSpec, TargetSpec
from runtime.manifest import Limits

_FLOAT = torch.float32
# Anything but 0 and 1, which export would take for constants.
_B, _W = 2, 3


@dataclass(frozen=True)
class Graph:
    """An exported graph. `name` is ``target``, ``draft`` or ``seed``; `states` are the names of its state inputs in order, each
    with an output ``<name>.new`` (the taps, which draft only reads, have none); weight names carry the prefix ``target.`` or
    ``drafter.``."""

    name: str
    model: ir.Model
    states: tuple[str, ...]


def modules(target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> dict[str, nn.Module]:
    """The three modules, on the meta device: shapes without data."""
    positions = limits.max_seq_len + limits.block_size
    with torch.device("meta"):
        return {
            "target": Target(target, drafter.taps, rope_tables(target.rope, target.head_dim, positions)).eval(),
            "draft": Draft(drafter, rope_tables(drafter.rope, drafter.head_dim, positions)).eval(),
            "seed": Seed(drafter, rope_tables(drafter.rope, drafter.head_dim, positions)).eval(),
        }


def state_names(target: TargetSpec, drafter: DrafterSpec) -> dict[str, tuple[str, ...]]:
    """State inputs of each graph, in the order of its module's arguments."""
    caches = tuple(f"{kv}_cache.{i}" for i in range(target.num_layers) for kv in "kv")
    rings = tuple(f"ring_{kv}.{i}" for i in range(drafter.num_layers) for kv in "kv")
    return {"target": caches, "draft": ("taps", *rings), "seed": rings}


def export_graphs(target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> dict[str, Graph]:
    """Export target, draft and seed. No weight is read."""
    nets = modules(target, drafter, limits)
    names = state_names(target, drafter)
    rows = limits.slots + 1
    b, w, h, s, c, n, slots = (torch.export.Dim(d) for d in ("b", "w", "h", "s", "c", "n", "slots"))
    caches = [
        _float(rows, target.num_kv_heads, limits.max_seq_len + limits.block_size, target.head_dim)
        for _ in names["target"]
    ]
    rings = [_float(rows, drafter.num_kv_heads, limits.window, drafter.head_dim) for _ in names["seed"]]
    width = len(drafter.taps) * drafter.hidden_size
    confidence = ("confidence_logits",) if drafter.confidence != "none" else ()
    row = {0: b}
    state = [{0: slots}] * len(names["target"])
    ring_state = [{0: slots}] * len(rings)
    return {
        "target": _export(
            "target",
            nets["target"],
            {
                "ids": (_int(_B, _W), {0: b, 1: w}),
                "start": (_int(_B), row),
                "slot": (_int(_B), row),
                "head_rows": (_int(_B, _W), {0: b, 1: h}),
            },
            (caches, state),
            ("argmax", "logits", "taps"),
            names["target"],
        ),
        "draft": _export(
            "draft",
            nets["draft"],
            {
                **{k: (_int(_B), row) for k in ("bonus", "start", "valid_len", "new_len", "slot")},
                "temperature": (_float(_B), row),
                "uniforms": (_float(_B, min(_W, limits.block_size)), {0: b, 1: s} if limits.block_size > 1 else row),
                # Dynamic in the rows too: a back end may pass fewer than B+1.
                "taps": (_float(rows, limits.block_size + 1, width), {0: slots, 1: n}),
            },
            (rings, ring_state),
            ("ids", *confidence, "q", "hidden", "base", "corrected"),
            names["draft"],
        ),
        "seed": _export(
            "seed",
            nets["seed"],
            {
                "taps": (_float(_B, _W, width), {0: b, 1: c}),
                **{k: (_int(_B), row) for k in ("start", "count", "slot")},
            },
            (rings, ring_state),
            (),
            names["seed"],
        ),
    }


def _int(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _float(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=_FLOAT, device="meta")


def _export(
    name: str,
    module: nn.Module,
    inputs: dict[str, tuple[Tensor, dict[int, object]]],
    states: tuple[Sequence[Tensor], Sequence[dict[int, object]]],
    outputs: tuple[str, ...],
    state_inputs: tuple[str, ...],
) -> Graph:
    args = (*(t for t, _ in inputs.values()), list(states[0]))
    shapes = (*(d for _, d in inputs.values()), list(states[1]))
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            module,
            args,
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table=TRANSLATIONS,
            dynamic_shapes=shapes,
            optimize=False,
            verbose=False,
        )
        if program is None:
            raise RuntimeError(f"torch.onnx.export returned nothing for graph {name!r}")
        model = program.model
        graph = model.graph
        # Meta tensors hold no data: from here on a weight is a name and a shape.
        for value in graph.initializers.values():
            value.const_value = None
        onnxscript.optimizer.optimize(model, input_size_limit=1024)
    prefix = "target" if name == "target" else "drafter"
    for value in list(graph.initializers.values()):
        if value.const_value is None:
            value.name = f"{prefix}.{value.name}"
    for value, wanted in zip(graph.inputs, (*inputs, *(s for s in state_inputs if s != "taps")), strict=True):
        value.name = wanted
    updated = tuple(f"{s}.new" for s in state_inputs if s != "taps")
    for value, wanted in zip(graph.outputs, (*outputs, *updated), strict=True):
        value.name = wanted
    graph.name = name
    for op_type in sorted({node.op_type for node in graph if node.domain == DOMAIN}):
        body = ir.serde.deserialize_function(function(op_type))
        model.functions[body.identifier()] = body
    model.opset_imports[DOMAIN] = 1
    return Graph(name, model, state_inputs)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter reports its own housekeeping (absent torchvision, unnamed axes) as warnings: none concerns a user."""
    loggers = [logging.getLogger(n) for n in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
