"""One export a graph: torch modules on the meta device to ONNX, weights left as names.

The result is back-end neutral: batch and width are symbolic, state is whole and slot-indexed, the ``dspark`` operators
carry their standard-op bodies as local functions. `builder.weights` says where each weight lies; `builder.passes`
specialise.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor, nn

from builder.graphs.drafter import Draft, Seed
from builder.graphs.functions import OPSET, function
from builder.graphs.ops import DOMAIN, TRANSLATIONS
from builder.graphs.target import Target
from builder.spec import DrafterSpec, TargetSpec
from runtime.manifest import Limits

_FLOAT = torch.float32
# Anything but 0 and 1, which export would take for constants.
_B, _W = 2, 3


@dataclass(frozen=True)
class Graph:
    """An exported graph: `name` is ``target``, ``draft`` or ``seed``.

    State inputs have a leading axis ``slots``, and each an output ``<name>.new`` (the taps, which draft only reads,
    have none). Weight names carry the prefix ``target.`` or ``drafter.``.
    """

    name: str
    model: ir.Model


def modules(target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> dict[str, nn.Module]:
    """The three modules, on the meta device: shapes without data."""
    positions = limits.max_seq_len + limits.block_size
    with torch.device("meta"):
        return {
            "target": Target(target, drafter.taps, _tables(target.head_dim, positions)).eval(),
            "draft": Draft(drafter, _tables(drafter.head_dim, positions)).eval(),
            "seed": Seed(drafter, _tables(drafter.head_dim, positions)).eval(),
        }


def _tables(head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """Shapes of `builder.rope_tables`."""
    return torch.empty(positions, head_dim // 2), torch.empty(positions, head_dim // 2)


def state_names(target: TargetSpec, drafter: DrafterSpec) -> dict[str, tuple[str, ...]]:
    """State inputs of each graph, in the order of its module's arguments."""
    caches = tuple(f"{kv}_cache.{i}" for i in range(target.num_layers) for kv in "kv")
    rings = tuple(f"ring_{kv}.{i}" for i in range(drafter.num_layers) for kv in "kv")
    return {"target": caches, "draft": ("taps", *rings), "seed": rings}


def export_graphs(target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> dict[str, Graph]:
    """Export target, draft and seed. No weight is read."""
    return {"target": export_target(target, drafter, limits), **export_drafter(target, drafter, limits)}


def export_target(target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> Graph:
    b, w, h, slots = _dims("b", "w", "h", "slots")
    states = state_names(target, drafter)["target"]
    cache = _float(limits.slots + 1, target.num_kv_heads, limits.max_seq_len + limits.block_size, target.head_dim)
    return _export(
        "target",
        modules(target, drafter, limits)["target"],
        {
            "ids": (_int(_B, _W), {0: b, 1: w}),
            "start": (_int(_B), {0: b}),
            "slot": (_int(_B), {0: b}),
            "head_rows": (_int(_B, _W), {0: b, 1: h}),
        },
        (cache, {0: slots}),
        ("argmax", "logits", "taps"),
        states,
    )


def export_drafter(target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> dict[str, Graph]:
    """The graphs ``draft`` and ``seed``."""
    nets = modules(target, drafter, limits)
    states = state_names(target, drafter)
    b, s, v, c, n, slots = _dims("b", "s", "v", "c", "n", "slots")
    ring = _float(limits.slots + 1, drafter.num_kv_heads, limits.window, drafter.head_dim)
    width = len(drafter.taps) * drafter.hidden_size
    confidence = ("confidence_logits",) if drafter.confidence != "none" else ()
    row = {0: b}
    return {
        "draft": _export(
            "draft",
            nets["draft"],
            {
                **{k: (_int(_B), row) for k in ("bonus", "start", "valid_len", "new_len", "slot")},
                "temperature": (_float(_B), row),
                "uniforms": (_float(_B, min(_W, limits.block_size)), {0: b, 1: s} if limits.block_size > 1 else row),
                "noise": (
                    _float(_B, min(_W, limits.block_size), drafter.vocab_size),
                    {0: b, 1: s, 2: v} if limits.block_size > 1 else {0: b, 2: v},
                ),
                # Dynamic in the rows too: a back end may pass fewer than B+1.
                "taps": (_float(limits.slots + 1, limits.block_size + 1, width), {0: slots, 1: n}),
            },
            (ring, {0: slots}),
            ("ids", *confidence, "q", "hidden", "base", "corrected"),
            states["draft"],
        ),
        "seed": _export(
            "seed",
            nets["seed"],
            {
                "taps": (_float(_B, _W, width), {0: b, 1: c}),
                **{k: (_int(_B), row) for k in ("start", "count", "slot")},
            },
            (ring, {0: slots}),
            (),
            states["seed"],
        ),
    }


def _dims(*names: str) -> list[object]:
    return [torch.export.Dim(name) for name in names]


def _int(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _float(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=_FLOAT, device="meta")


def _export(
    name: str,
    module: nn.Module,
    inputs: dict[str, tuple[Tensor, dict[int, object]]],
    state: tuple[Tensor, dict[int, object]],
    outputs: tuple[str, ...],
    state_inputs: tuple[str, ...],
) -> Graph:
    """Export `module`, whose last argument is a list of like states; the taps that it may read are a usual input."""
    updated = [name for name in state_inputs if name != "taps"]
    # A tensor each: export takes two inputs that are one object for the same input.
    args = (*(t for t, _ in inputs.values()), [torch.empty_like(state[0]) for _ in updated])
    shapes = (*(d for _, d in inputs.values()), [state[1]] * len(updated))
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
    for value, wanted in zip(graph.inputs, (*inputs, *updated), strict=True):
        value.name = wanted
    for value, wanted in zip(graph.outputs, (*outputs, *(f"{name}.new" for name in updated)), strict=True):
        value.name = wanted
    graph.name = name
    for op_type in sorted({node.op_type for node in graph if node.domain == DOMAIN}):
        body = ir.serde.deserialize_function(function(op_type))
        model.functions[body.identifier()] = body
    model.opset_imports[DOMAIN] = 1
    return Graph(name, model)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own housekeeping (absent torchvision, unnamed axes): none of it concerns a user."""
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
