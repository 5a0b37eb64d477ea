"""The standard-op bodies of the CUDA operators, on ONNX Runtime's CPU, against the eager operators in torch. In float16
too, where they must round where a kernel would."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from builder.graphs import ops
from builder.graphs.functions import OPSET
from builder.graphs.ops import DOMAIN
from builder.passes.cuda_functions import cuda_function
from builder.passes.cuda_ops import DRAFT_OPS, SIGNATURES
from tests.builder.graphs import cases
from tests.builder.graphs.cases import SEEDS, Arrays
from tests.builder.passes.cuda_graphs import cpu_session

FLOATS = [np.float32, np.float16]
TOLERANCE = {np.float32: 1e-5, np.float16: 1e-2}
EPSILON = 1e-3
KEPT_FLOAT32 = ("cos", "sin", "base", "temperature", "uniforms", "noise", "conf_w", "conf_b")


def run(op_type: str, inputs: Arrays, dtype: Any = np.float32, rows: bool = False, **attributes: float | int) -> Arrays:
    """One operator's results by name. Inputs of type T are given in float32 and cast to `dtype`."""
    names_in, names_out, wanted = SIGNATURES[op_type]
    assert set(wanted) == attributes.keys()
    assert set(names_in) == inputs.keys()
    feed = {
        name: np.ascontiguousarray(value if value.dtype == np.int64 or name in KEPT_FLOAT32 else value.astype(dtype))
        for name, value in inputs.items()
    }
    helper = onnx.helper
    floats = op_type == "LinearFloat" or op_type.startswith("Draft")
    kind = onnx.TensorProto.FLOAT if floats else helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    kinds = dict.fromkeys(names_out, kind) | {"ids": onnx.TensorProto.INT64}
    node = helper.make_node(op_type, names_in, names_out, domain=DOMAIN, **attributes)
    typed = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(feed[name].dtype), feed[name].shape)
        for name in names_in
    ]
    results = [helper.make_tensor_value_info(name, kinds[name], None) for name in names_out]
    body = cuda_function(op_type, bool(attributes.get("sample")), rows)
    model = helper.make_model(
        helper.make_graph([node], "one", typed, results),
        functions=[ir.serde.serialize_function(body)],
        opset_imports=[helper.make_opsetid(*domain) for domain in (("", OPSET), (DOMAIN, 1))],
        ir_version=10,
    )
    found = cpu_session(ir.serde.deserialize_model(model)).run(list(names_out), feed)
    return dict(zip(names_out, found, strict=True))


def close(found: NDArray[Any], expected: Any, dtype: Any, name: str = "") -> None:
    assert np.isfinite(found).all(), name
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=0, atol=TOLERANCE[dtype], err_msg=name)


def stacked(x: Arrays, parts: str) -> NDArray[np.float32]:
    """q, k and v as one projection gives them."""
    heads = np.concatenate([x[part] for part in parts], axis=2)
    return heads.reshape(*heads.shape[:2], -1)


def tables(rng: np.random.Generator, positions: int, head_dim: int) -> Arrays:
    angles = rng.uniform(0, 6, (positions, head_dim // 2)).astype(np.float32)
    return {"cos": np.cos(angles), "sin": np.sin(angles)}


def gammas(rng: np.random.Generator, head_dim: int) -> Arrays:
    return {f"{part}_norm": rng.uniform(0.5, 1.5, head_dim).astype(np.float32) for part in "qk"}


def normed(x: NDArray[Any], gamma: NDArray[Any]) -> NDArray[Any]:
    return F.rms_norm(torch.from_numpy(x), gamma.shape, torch.from_numpy(gamma), EPSILON).numpy()


def rotated(x: NDArray[Any], table: Arrays, positions: NDArray[Any]) -> NDArray[Any]:
    cos, sin = (torch.from_numpy(table[name]) for name in ("cos", "sin"))
    return ops.rotate(torch.from_numpy(x), cos, sin, torch.from_numpy(positions)).numpy()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("norm", [False, True])
def test_causal_attention(norm: bool, seed: int, dtype: Any) -> None:
    case, rng = cases.cached_attention(seed), np.random.default_rng(seed)
    x, gamma = dict(case.inputs), gammas(rng, 8)
    newest = x["start"] + x["q"].shape[1] - 1
    # What a slot holds behind the newest row is another request's: it may be anything.
    for name in ("k_cache", "v_cache"):
        for row in range(case.real):
            x[name][x["slot"][row], :, newest[row] + 1 :] = np.nan
        x[name] = x[name].astype(dtype).astype(np.float32)
    qkv = stacked(x, "qkv").astype(dtype).astype(np.float32)
    given = {name: x[name] for name in ("cos", "sin", "k_cache", "v_cache", "start", "slot")} | {"qkv": qkv}
    heads = x["q"].shape[2]
    if norm:
        found = run("NormedCausalAttention", given | gamma, dtype, num_heads=heads, epsilon=EPSILON)
        x |= {part: normed(x[part], gamma[f"{part}_norm"]) for part in "qk"}
    else:
        found = run("CausalAttention", given, dtype, num_heads=heads)
    expected = cases.Case("CachedAttention", x, case.real).eager()
    close(found["out"][: case.real], expected["out"][: case.real], dtype)
    for name in ("k_cache", "v_cache"):
        for slot in range(len(x[name]) - 1):
            changed = found[f"{name}_out"][slot].astype(np.float32)
            wanted = expected[f"{name}_out"][slot]
            np.testing.assert_allclose(changed, wanted, rtol=0, atol=TOLERANCE[dtype], err_msg=name)
            if slot not in x["slot"]:
                np.testing.assert_array_equal(changed, x[name][slot])


def test_rows_past_the_cache_are_dropped() -> None:
    case = cases.cached_attention(0)
    x, width = case.inputs, 4
    rng, size = np.random.default_rng(0), x["k_cache"].shape[2]
    x |= {part: rng.standard_normal((1, width, 2, 8), dtype=np.float32) for part in "qkv"}
    kv = {f"{part}_cache": rng.standard_normal((2, 2, size, 8), dtype=np.float32) for part in "kv"}
    start, slot = np.array([size - 2]), np.array([0])
    table = {name: x[name] for name in ("cos", "sin")}
    given = {"qkv": stacked(x, "qkv"), "start": start, "slot": slot} | table | kv
    found = run("CausalAttention", given, num_heads=2)
    kept = {part: x[part][:, :2] for part in "qkv"}
    expected = cases.Case("CachedAttention", kept | kv | table | {"start": start, "slot": slot}, 1).eager()
    close(found["out"][:, :2], expected["out"], np.float32)
    for name in kv:
        close(found[f"{name}_out"], expected[f"{name}_out"], np.float32, name)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", SEEDS)
def test_block_attention(seed: int, dtype: Any) -> None:
    case, rng = cases.ring_attention(seed), np.random.default_rng(seed)
    x = cases.unseen_nan(case).inputs
    head_dim, heads = x["q"].shape[3], x["q"].shape[2]
    gamma, table = gammas(rng, head_dim), tables(rng, 64, head_dim)
    given = {name: x[name] for name in ("ring_k", "ring_v", "start", "valid_len", "slot")}
    # The scratch slot may hold anything finite.
    for name in ("ring_k", "ring_v"):
        given[name][-1] = case.inputs[name][-1]
    given |= {"qkv": stacked(x, "qkv")} | gamma | table
    found = run("BlockAttention", given, dtype, num_heads=heads, epsilon=EPSILON)["out"]
    positions = x["start"][:, None] + np.arange(x["q"].shape[1])
    block = {part: rotated(normed(x[part], gamma[f"{part}_norm"]), table, positions) for part in "qk"}
    expected = cases.Case("RingAttention", x | block, case.real).eager()["out"]
    close(found[: case.real], expected[: case.real], dtype)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", SEEDS)
def test_context_write(seed: int, dtype: Any) -> None:
    case, rng = cases.ring_write(seed), np.random.default_rng(seed)
    x = case.inputs
    k = x["rows"]
    v, ring_v = (rng.standard_normal(value.shape, dtype=np.float32) for value in (k, x["ring"]))
    head_dim = k.shape[3]
    # As many rows as real positions reach: those of padding rows reach further.
    gamma, table = gammas(rng, head_dim)["k_norm"], tables(rng, int((x["start"] + x["count"]).max()) + 1, head_dim)
    rings = {"ring_k": x["ring"].astype(dtype).astype(np.float32), "ring_v": ring_v.astype(dtype).astype(np.float32)}
    common = {name: x[name] for name in ("start", "count", "slot")}
    given = {"kv": stacked({"k": k, "v": v}, "kv"), "k_norm": gamma} | rings | common | table
    found = run("ContextWrite", given, dtype, epsilon=EPSILON)
    positions = np.minimum(x["start"][:, None] + np.arange(k.shape[1]), len(table["cos"]) - 1)
    rows = {"ring_k": rotated(normed(k, gamma), table, positions), "ring_v": v}
    for name, ring in rings.items():
        expected = cases.Case("RingWrite", {"ring": ring, "rows": rows[name]} | common, case.real).eager()["ring_out"]
        close(found[f"{name}_out"], expected, dtype, name)
        untouched = (expected == ring).all(axis=(1, 3))
        assert untouched.any()
        np.testing.assert_array_equal(found[f"{name}_out"].swapaxes(1, 2)[untouched], ring.swapaxes(1, 2)[untouched])


def test_slot_rows() -> None:
    rng = np.random.default_rng(3)
    state = rng.standard_normal((4, 6, 5), dtype=np.float32)
    slot, row = np.array([2, 0, 3, 3]), np.array([0, 1, 4])
    read = run("SlotRead", {"state": state, "slot": slot, "row": row})["rows"]
    np.testing.assert_array_equal(read, state[slot[:, None], row])
    rows = rng.standard_normal((4, 3, 5), dtype=np.float32)
    start, count = np.array([1, 4, 0, 0]), np.array([2, 3, 0, 0])
    written = run("SlotWrite", {"state": state, "rows": rows, "start": start, "count": count, "slot": slot})
    expected = state.copy()
    expected[2, 1:3], expected[0, 4:6] = rows[0, :2], rows[1, :2]  # a third row of slot 0 would lie past the state
    np.testing.assert_array_equal(written["state_out"], expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_linear(dtype: Any) -> None:
    rng = np.random.default_rng(4)
    x, residual = rng.standard_normal((2, 3, 8), dtype=np.float32), rng.standard_normal((2, 3, 6), dtype=np.float32)
    w, gamma = rng.standard_normal((6, 8), dtype=np.float32), rng.uniform(0.5, 1.5, 8).astype(np.float32)
    x, w = (value.astype(dtype).astype(np.float32) for value in (x, w))
    product = x @ w.T
    close(run("Linear", {"x": x, "w": w}, dtype)["y"], product, dtype)
    exact = run("LinearFloat", {"x": x, "w": w}, dtype)["y"]
    assert exact.dtype == np.float32
    np.testing.assert_allclose(exact, product, rtol=0, atol=1e-5)
    close(run("LinearAdd", {"x": x, "w": w, "residual": residual}, dtype)["y"], product + residual, dtype)
    normal = {"x": x, "gamma": gamma, "w": w}
    product = normed(x, gamma) @ w.T
    close(run("NormLinear", normal, dtype, epsilon=EPSILON)["y"], product, dtype)
    gate, up = product[..., :3], product[..., 3:]
    close(run("NormSwiGLU", normal, dtype, epsilon=EPSILON)["y"], gate / (1 + np.exp(-gate)) * up, dtype)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("confidence", ["none", "hidden", "rows"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("exported", DRAFT_OPS)
def test_draft(exported: str, seed: int, confidence: str, sample: bool) -> None:
    if confidence == "rows" and exported == "PlainChain":
        pytest.skip("a head without W1 rows")
    case = cases.chain(exported, seed, "mixed" if sample else "greedy")
    inputs, expected = dict(case.inputs), case.eager()
    op_type, rows = DRAFT_OPS[exported], confidence == "rows"
    if confidence != "none":
        op_type = f"{op_type}C"
        features = inputs["hidden"]
        if rows:
            features = np.concatenate((features, expected["rows"]), axis=2)
        rng = np.random.default_rng(seed)
        inputs["conf_w"] = rng.standard_normal((1, features.shape[2]), dtype=np.float32)
        inputs["conf_b"] = rng.standard_normal(1, dtype=np.float32)
        expected["confidence"] = (features @ inputs["conf_w"].T)[..., 0] + inputs["conf_b"]
    found = run(op_type, inputs, rows=rows, sample=int(sample))
    np.testing.assert_array_equal(found["ids"], expected["ids"])
    if confidence != "none":
        close(found["confidence"], expected["confidence"], np.float32)
    if sample:
        close(found["q"], expected["q"], np.float32)
    else:
        assert found["q"].shape == (*expected["ids"].shape, 1)


@pytest.mark.parametrize("exported", DRAFT_OPS)
def test_draft_of_float16_weights_adds_up_in_float32(exported: str) -> None:
    case = cases.chain(exported, 1, "mixed")
    kept = {"bonus", *KEPT_FLOAT32}
    rounded = {n: v if n in kept else v.astype(np.float16).astype(np.float32) for n, v in case.inputs.items()}
    expected = cases.Case(exported, rounded, case.real).eager()
    found = run(DRAFT_OPS[exported], rounded, np.float16, sample=1)
    np.testing.assert_array_equal(found["ids"], expected["ids"])
    close(found["q"], expected["q"], np.float32)
