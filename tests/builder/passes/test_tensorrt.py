"""The last passes before TensorRT: sizes are fixed, bodies are inlined or left for plugins, results stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from builder.backends.ort_cuda import OrtCuda
from builder.export import Graph
from builder.graphs.ops import DOMAIN
from builder.passes.base import apply
from builder.passes.tensorrt import PLUGINS, FixSizes, FoldConstants, InlineBodies, MarkPlugins
from builder.spec import DrafterCheckpoint, TargetCheckpoint
from builder.weights import WeightIndex, write_weights
from plugins.operators import VERSION
from runtime.manifest import Limits
from runtime.sessions.base import DraftRows
from tests.builder.passes.cuda_graphs import CudaGraphs, cpu_session
from tests.builder.passes.test_cuda import pair
from tests.golden.neutral import PADDING
from tests.support import exported_drafter

BATCH, DRAFTS = 2 + PADDING, 3


@pytest.fixture(scope="module")
def checkpoints() -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    return pair("qwen3")


@pytest.fixture(scope="module")
def limits(checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint]) -> Limits:
    return Limits((BATCH,), 2, 16, 32, checkpoints[1].spec.block_size, 8)


def fixed(graph: Graph, index: WeightIndex, limits: Limits, kept: frozenset[str], sample: bool = False) -> ir.Model:
    model = OrtCuda("f32").lower(graph, index, limits, sample=sample)
    sizes = {"b": BATCH, "s": DRAFTS, "v": 1, "slots": limits.slots + 1}
    return apply(model, [FixSizes(sizes), InlineBodies(kept), FoldConstants(), MarkPlugins()])


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("kept", [PLUGINS, frozenset()], ids=["plugins", "bodies"])
def test_a_draft_of_fixed_sizes_computes_the_same(
    kept: frozenset[str],
    sample: bool,
    checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint],
    limits: Limits,
    tmp_path: Path,
) -> None:
    target, drafter = checkpoints
    graphs = exported_drafter(target.spec, drafter.spec, limits)
    lowered, other = (CudaGraphs(tmp_path, target, drafter, limits, graphs) for _ in range(2))
    index = write_weights(tmp_path, target, drafter, limits)
    name = "draft_sampled" if sample else "draft"
    model = fixed(graphs["draft"], index, limits, kept, sample)

    left = [node for node in model.graph if node.domain == DOMAIN]
    assert {node.op_type for node in left} <= kept
    assert bool(left) == bool(kept)
    for node in left:
        assert node.attributes.get_string("plugin_namespace") == DOMAIN
        assert node.attributes.get_string("plugin_version") == VERSION
    values = [*model.graph.inputs, *model.graph.outputs]
    assert all(value.shape is not None and value.shape.is_static() for value in values)
    ids = next(value for value in model.graph.outputs if value.name == "ids")
    assert tuple(ids.shape or ()) == (BATCH, DRAFTS)

    other._sessions[name] = cpu_session(model)
    rng = np.random.default_rng(3)
    taps = rng.standard_normal(lowered._state["taps"].shape, dtype=np.float32)
    for session in (lowered, other):
        session._state["taps"][:] = taps
    rows = DraftRows(
        bonus=np.array([3, 5]),
        start=np.array([9, 14]),
        valid_len=np.array([2, 4]),
        new_len=np.array([2, 4]),
        slot=np.array([0, 1]),
        temperature=np.array([0, 0.7 if sample else 0], np.float32),
        uniforms=rng.random((2, DRAFTS), dtype=np.float32),
        noise=None,
    )
    expected, out = (session.draft(rows, sample=sample) for session in (lowered, other))
    np.testing.assert_array_equal(out.ids, expected.ids)
    np.testing.assert_allclose(out.q, expected.q, rtol=0, atol=1e-6)
    for key, state in lowered._state.items():
        np.testing.assert_allclose(other._state[key], state, rtol=0, atol=1e-6, err_msg=key)


def test_a_size_that_nothing_names_is_an_error(
    checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint], limits: Limits, tmp_path: Path
) -> None:
    target, drafter = checkpoints
    graph = exported_drafter(target.spec, drafter.spec, limits)["draft"]
    model = OrtCuda("f32").lower(graph, write_weights(tmp_path, target, drafter, limits), limits)
    with pytest.raises(RuntimeError, match="no fixed size"):
        apply(model, [FixSizes({"b": BATCH})])
