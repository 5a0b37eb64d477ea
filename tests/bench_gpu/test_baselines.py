"""The baselines in torch compute what the product's modules do; arithmetic about them adds up. All of it on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from builder.export import modules
from builder.graphs.target import Target
from builder.rope_tables import rope_tables
from builder.spec import DrafterSpec, RopeSpec, TargetSpec
from runtime.manifest import Limits
from tests.bench_gpu.drafter import make_state
from tests.bench_gpu.reference import MASKED, Attention, Inputs, TorchDrafter
from tests.bench_gpu.shapes import DRAFTER, fitting_target, products, ring_bytes, small, weight_bytes
from tests.bench_gpu.target import TorchTarget

SPEC = small(DRAFTER)
WINDOW = 16
LIMITS = Limits((1, 2), 2, WINDOW, 64, SPEC.block_size, 1)


def _tables(spec: TargetSpec | DrafterSpec, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = map(torch.from_numpy, rope_tables(spec.rope, spec.head_dim, positions))
    return cos, sin


def _filled(module: torch.nn.Module, rope: tuple[Tensor, Tensor]) -> torch.nn.Module:
    module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(5)
    for name, value in module.named_parameters():
        if name in ("cos", "sin"):
            value.data.copy_(rope[name == "sin"])
        else:
            value.data.copy_(torch.randn(value.shape, generator=generator) * value.shape[-1] ** -0.5)
    return module


@pytest.fixture(scope="module")
def draft() -> torch.nn.Module:
    rope = _tables(SPEC, LIMITS.max_seq_len + LIMITS.block_size)
    return _filled(modules(fitting_target(SPEC), SPEC, LIMITS)["draft"], rope)


@pytest.mark.parametrize("attention", [*MASKED, "unmasked"])
@torch.inference_mode()
def test_torch_drafter(draft: torch.nn.Module, attention: Attention) -> None:
    """Rounds of two sequences, one of them with a ring that wraps, against the module that the product exports."""
    weights = {f"drafter.{name}": value for name, value in draft.named_parameters()}
    state = make_state(SPEC, 2, WINDOW, torch.float32, "cpu")
    taps, rings = state.pop("taps"), list(state.values())
    drafter = TorchDrafter(SPEC, weights, 2, WINDOW, attention)
    for i in range(SPEC.num_layers):
        drafter.k[i, :2, :, :WINDOW], drafter.v[i, :2, :, :WINDOW] = rings[2 * i][:2], rings[2 * i + 1][:2]
    start = torch.tensor([40, 3])
    for new in ((2, 0), (SPEC.block_size + 1, 3), (1, 1)):
        new_len = torch.tensor(new)
        valid = torch.minimum(start, torch.tensor(WINDOW))
        if attention == "unmasked":
            valid = torch.full((2,), WINDOW)
        bonus = torch.tensor([5, 7])
        ours = drafter(Inputs(bonus, start, valid, new_len, taps[:2]))
        expected = draft(
            bonus, start, valid, new_len, torch.arange(2), torch.zeros(2), torch.zeros(2, SPEC.block_size),
            torch.zeros(2, SPEC.block_size, 1), taps, rings,
        )  # fmt: skip
        rings = list(expected[-len(rings) :])
        torch.testing.assert_close(ours[0], expected[0])
        torch.testing.assert_close(ours[1], expected[1], rtol=0, atol=1e-4)
        for i in range(SPEC.num_layers):
            torch.testing.assert_close(drafter.k[i, :2, :, :WINDOW], rings[2 * i][:2], rtol=0, atol=1e-5)
            torch.testing.assert_close(drafter.v[i, :2, :, :WINDOW], rings[2 * i + 1][:2], rtol=0, atol=1e-5)
        start = start + 3


TARGET = TargetSpec(
    "llama", 61, 32, 48, 3, 4, 2, 16, 1e-5, RopeSpec(10_000.0), 128, qk_norm=False, qkv_bias=False, o_bias=False,
    mlp_bias=False, tied=True,
)  # fmt: skip


@pytest.mark.parametrize("qk_norm", [False, True])
@torch.inference_mode()
def test_torch_target(qk_norm: bool) -> None:
    """Greedy decoding of two prompts of different length, against the product's module over everything each time."""
    spec = replace(TARGET, qk_norm=qk_norm)
    rope = _tables(spec, 64)
    with torch.device("meta"):
        module = Target(spec, (0,), rope)
    module = _filled(module, rope)
    weights = {f"target.{name}": value for name, value in module.named_parameters()}
    prompts, count = [[3, 9, 27, 20, 5], [8, 1]], 9
    target = TorchTarget(spec, weights, len(prompts), 32)
    first = target.prefill(prompts)
    steps = [first.tolist()]
    for _ in range(count - 1):
        target.step()
        steps.append(target.ids.tolist())
    for row, prompt in enumerate(prompts):
        ids = list(prompt)
        for _ in range(count):
            cache = [torch.zeros(1, spec.num_kv_heads, 64, spec.head_dim) for _ in range(2 * spec.num_layers)]
            last = torch.tensor([[len(ids) - 1]])
            zero = torch.zeros(1, dtype=torch.int64)
            argmax, *_ = module(torch.tensor([ids]), zero, zero, last, cache)
            ids.append(int(argmax))
        assert [step[row] for step in steps] == ids[len(prompt) :]


def test_bytes_of_a_step() -> None:
    """By hand: 3.17 GB of layers and lm_head in bf16, fc and W2 on top; 40 MiB of ring a sequence."""
    layer = 4096 * (6144 + 4096 + 2 * 12288) + 12288 * 4096
    assert weight_bytes(DRAFTER) == 2 * (5 * layer + 4096 * 151936 + 5 * 4096 * 4096 + 256 * 151936)
    assert ring_bytes(DRAFTER, 8, 2048) == 8 * 40 * 2**20
    made = products(DRAFTER, 8)
    assert sum(p.times for p in made) == 1 + 5 + 20 + 1 + 7
    assert {p.rows for p in made} == {64, 56, 8}
