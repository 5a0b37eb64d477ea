"""The table of operators against the wrappers for ONNX Runtime, which are compiled apart from it; no GPU is needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plugins.operators import OPERATORS

ROOT = Path(__file__).resolve().parents[2] / "plugins"
SOURCES = "\n".join(path.read_text() for path in sorted(ROOT.glob("*/ort.cc")))
DRAFTS = [name for name in OPERATORS if name.startswith("Draft")]


def declared(name: str, which: str) -> list[str]:
    found = re.search(rf'kName = "{name}";.*?{which}\[\] = {{(.*?)}};', SOURCES, re.DOTALL)
    assert found is not None
    return re.findall(r"Type::(\w+)", found.group(1))


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in DRAFTS])
def test_types_are_those_of_the_wrapper(name: str) -> None:
    operator = OPERATORS[name]
    assert [tensor.kind for tensor in operator.inputs] == declared(name, "kInputs")
    assert [tensor.kind for tensor in operator.outputs] == declared(name, "kOutputs")


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts(name: str) -> None:
    """Their wrapper is a template: base, hidden, bonus, temperature, uniforms, noise, weights, confidence head."""
    kinds = [tensor.kind for tensor in OPERATORS[name].inputs]
    confidence = name.endswith("C")
    weights = {"DraftPlain": 0, "DraftMarkov": 2, "DraftGated": 4, "DraftRnn": 4}[name.removesuffix("C")]
    assert kinds == ["F32", "T", "I64", "F32", "F32", "F32", *["T"] * weights, *["F32", "F32"] * confidence]
    assert [tensor.kind for tensor in OPERATORS[name].outputs] == ["I64", "F32", "F32"][: 2 + confidence]
    assert f'"{name}"' in SOURCES


def test_shapes_follow_from_the_inputs() -> None:
    attention = OPERATORS["CausalAttention"]
    cache = (5, 2, 96, 64)
    inputs = [(3, 4, 13 * 64), (100, 32), (100, 32), cache, cache, (3,), (3,)]
    assert attention.shapes(inputs, {"num_heads": 9}) == ((3, 4, 576), cache, cache)
    assert [output.updates for output in attention.outputs] == [None, "k_cache", "v_cache"]
    swiglu = OPERATORS["NormSwiGLU"]
    assert swiglu.shapes([(3, 4, 16), (16,), (48, 16)], {"epsilon": 1e-5}) == ((3, 4, 24),)
    draft = OPERATORS["DraftMarkovC"]
    shapes = [(2, 7, 50), (2, 7, 8), (2,), (2,), (2, 7), (2, 7, 1), (50, 4), (50, 4), (1, 12), (1,)]
    assert draft.shapes(shapes, {"sample": 0}) == ((2, 7), (2, 7, 1), (2, 7))
    assert draft.shapes(shapes, {"sample": 1}) == ((2, 7), (2, 7, 50), (2, 7))
