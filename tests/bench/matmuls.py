"""The matmuls alone, in ONNX Runtime with nothing around them, against the engines' calls."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from runtime import Engine
from runtime.manifest import Models
from runtime.sessions.base import DraftRows, Int64, SeedRows, TargetRows
from tests.bench.arithmetic import median_ratio, summary

CONTEXT = 200
"""Committed tokens before the calls that are timed."""
_WEIGHTS = "random.bin"


@dataclass(frozen=True)
class Matmul:
    """``[r, k] × [k, n]``, constant weights; `rows` names what r is (``width``, ``block``, ``context`` or ``one``)."""

    k: int
    n: int
    rows: str


def target_matmuls(spec: Mapping[str, Any]) -> list[Matmul]:
    """All products of the target in one pass over ``width`` rows, lm_head included."""
    return [*_layers(spec, "width"), Matmul(spec["hidden_size"], spec["vocab_size"], "width")]


def drafter_matmuls(spec: Mapping[str, Any]) -> list[Matmul]:
    """The drafter's products in one block of which ``width`` slots are drafted, without the Markov chain's."""
    hidden, kv = spec["hidden_size"], 2 * spec["num_kv_heads"] * spec["head_dim"]
    return [
        Matmul(len(spec["taps"]) * hidden, hidden, "context"),
        *[Matmul(hidden, kv, "context")] * spec["num_layers"],
        *_layers(spec, "block"),
        Matmul(hidden, spec["vocab_size"], "width"),
    ]


def _layers(spec: Mapping[str, Any], rows: str) -> list[Matmul]:
    hidden, inner = spec["hidden_size"], spec["intermediate_size"]
    q, kv = spec["num_heads"] * spec["head_dim"], spec["num_kv_heads"] * spec["head_dim"]
    layer = [(hidden, q + 2 * kv), (q, hidden), (hidden, 2 * inner), (inner, hidden)]
    return [Matmul(k, n, rows) for _ in range(spec["num_layers"]) for k, n in layer]


def model_of(matmuls: Sequence[Matmul]) -> onnx.ModelProto:
    """Each product is a node of its own, its weights in an external file, one after the other."""
    nodes, weights, outputs, offset = [], [], [], 0
    inputs = dict.fromkeys((m.k, m.rows) for m in matmuls)
    for i, m in enumerate(matmuls):
        tensor = TensorProto(
            name=f"w{i}", data_type=TensorProto.FLOAT, dims=(m.k, m.n), data_location=TensorProto.EXTERNAL
        )
        size = 4 * m.k * m.n
        for key, value in (("location", _WEIGHTS), ("offset", str(offset)), ("length", str(size))):
            tensor.external_data.add(key=key, value=value)
        offset += size
        weights.append(tensor)
        nodes.append(helper.make_node("MatMul", [f"{m.rows}{m.k}", f"w{i}"], [f"y{i}"]))
        outputs.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, [m.rows, m.n]))
    values = [helper.make_tensor_value_info(f"{rows}{k}", TensorProto.FLOAT, [rows, k]) for k, rows in inputs]
    graph = helper.make_graph(nodes, "matmuls", values, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


class Bare:
    """A session over some products; call it with the rows of each name. Buffers are bound once for each set of rows."""

    def __init__(self, matmuls: Sequence[Matmul], threads: int) -> None:
        self._matmuls = matmuls
        self._bindings: dict[tuple[tuple[str, int], ...], tuple[Any, list[Any]]] = {}
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.add_session_config_entry("session.force_spinning_stop", "1")  # as the engines do
        random = np.random.default_rng(0)
        with tempfile.TemporaryDirectory() as folder:
            with (Path(folder) / _WEIGHTS).open("wb") as file:
                for m in matmuls:
                    file.write(random.standard_normal((m.k, m.n), dtype=np.float32).data)
            path = Path(folder) / "matmuls.onnx"
            onnx.save(model_of(matmuls), path)
            self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def __call__(self, **rows: int) -> None:
        key = tuple(sorted(rows.items()))
        if key not in self._bindings:
            self._bindings[key] = self._bind(rows)
        self._session.run_with_iobinding(self._bindings[key][0])

    def _bind(self, rows: Mapping[str, int]) -> tuple[Any, list[Any]]:
        binding, kept = self._session.io_binding(), []
        for k, name in dict.fromkeys((m.k, m.rows) for m in self._matmuls):
            x = np.ones((rows[name], k), np.float32)
            binding.bind_input(f"{name}{k}", "cpu", 0, x.dtype, x.shape, x.ctypes.data)
            kept.append(x)
        for i, m in enumerate(self._matmuls):
            y = np.empty((rows[m.rows], m.n), np.float32)
            binding.bind_output(f"y{i}", "cpu", 0, y.dtype, y.shape, y.ctypes.data)
            kept.append(y)
        return binding, kept


class Calls:
    """The engine's calls on slot 0, with `CONTEXT` tokens committed; each can be repeated at will.

    The engine doesn't know of them: what it believes slot 0 to hold is wrong until `forget_prompts`.
    """

    def __init__(self, engine: Engine) -> None:
        self.session = engine._session
        self.limits = engine.bundle.manifest.limits
        self._ids = np.random.default_rng(1).integers(100, engine.bundle.manifest.models.vocab_size, CONTEXT)
        step = self.limits.prefill_chunk
        for first in range(0, CONTEXT, step):
            chunk = self._ids[first : first + step]
            self.session.prefill(_one_row(chunk, first))
            self.session.seed(SeedRows(np.array([first]), np.array([len(chunk)]), np.array([0])))

    def verify(self, width: int) -> None:
        self.session.verify(_one_row(self._ids[:width], CONTEXT))

    def draft(self, slots: int) -> None:
        """A block right after two verified tokens were committed."""
        start = CONTEXT + 2
        self.session.draft(
            DraftRows(
                bonus=self._ids[:1],
                start=np.array([start]),
                valid_len=np.array([min(start, self.limits.window)]),
                new_len=np.array([2]),
                slot=np.array([0]),
                temperature=np.zeros(1, np.float32),
                uniforms=np.zeros((1, slots), np.float32),
            )
        )


def _one_row(ids: Int64, start: int) -> TargetRows:
    return TargetRows(ids, np.array([len(ids)]), np.array([start]), np.array([0]), np.array([0]))


def measure_matmuls(engine: Engine, repeats: int, threads: int) -> dict[str, object]:
    """Engine calls and bare matmuls of each width in turn: milliseconds, and the ratio pair by pair."""
    models = engine.bundle.manifest.models
    calls = Calls(engine)
    block = calls.limits.block_size
    return {
        "context": CONTEXT,
        "target": _target_pairs(calls, Bare(target_matmuls(models.target), threads), repeats),
        **_draft_pairs(calls, models, block, repeats, threads),
    }


def _target_pairs(calls: Calls, bare: Bare, repeats: int) -> dict[int, object]:
    def run_bare(width: int) -> None:
        bare(width=width)

    return {w: _pairs(calls.verify, run_bare, w, repeats) for w in range(1, calls.limits.block_size + 2)}


def _draft_pairs(calls: Calls, models: Models, block: int, repeats: int, threads: int) -> dict[str, object]:
    """By drafted slots. The Markov chain's product, of which a slot takes one, is timed alone: added as calls of their
    own, each would wake the threads anew, which costs more than the product.
    """
    drafter = Bare(drafter_matmuls(models.drafter), threads)
    rank = int(str(models.drafter["markov_rank"]))

    def run_bare(slots: int) -> None:
        drafter(width=slots, block=block, context=block + 1)

    calls.verify(3)
    result: dict[str, object] = {
        "draft": {slots: _pairs(calls.draft, run_bare, slots, repeats) for slots in range(1, block + 1)}
    }
    if rank:
        link = Bare([Matmul(rank, models.vocab_size, "one")], threads)
        result["chain_product_ms"] = summary(_times(lambda _: link(one=1), repeats))
    return result


def _times(call: Callable[[int], None], repeats: int) -> list[float]:
    """Milliseconds of each call after two that warm up."""
    times = []
    for _ in range(repeats + 2):
        began = perf_counter()
        call(0)
        times.append(1e3 * (perf_counter() - began))
    return times[2:]


def _pairs(engine: Callable[[int], None], bare: Callable[[int], None], width: int, repeats: int) -> dict[str, object]:
    times: dict[str, list[float]] = {"engine": [], "bare": []}
    for i in range(repeats + 2):
        for name, call in (("engine", engine), ("bare", bare)):
            began = perf_counter()
            call(width)
            if i >= 2:  # the first two warm up
                times[name].append(1e3 * (perf_counter() - began))
    return {
        "engine_ms": summary(times["engine"]),
        "bare_ms": summary(times["bare"]),
        "ratio": median_ratio(times["engine"], times["bare"]),
        "runs": times,
    }
