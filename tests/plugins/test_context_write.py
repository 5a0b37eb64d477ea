"""ContextWrite."""

from __future__ import annotations

import pytest
import torch

from tests.plugins.kernels import DTYPES, TOLERANCE, Kernels, ints, phases, rms_norm, rope

SLOTS, KV_HEADS, WINDOW, EPSILON = 4, 3, 12, 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 64, 128, 256])
def test_rows_go_to_their_position_modulo_the_window(
    kernels: Kernels, generator: torch.Generator, head_dim: int, dtype: torch.dtype
) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    kv, k_norm = random(5, 8, 2 * KV_HEADS * head_dim), random(head_dim)
    ring_k, ring_v = (random(SLOTS + 1, KV_HEADS, WINDOW, head_dim) for _ in "kv")
    # A ring that wraps, one row, none, a first row of all, and scratch.
    start, count, slot = ints(20, 35, 7, 0, 3), ints(8, 1, 0, 5, 2), ints(2, 0, 3, 1, SLOTS)
    cos, sin = phases(64, head_dim)
    want_k, want_v = ring_k.clone().float(), ring_v.clone()
    keys, values = kv.view(5, 8, 2, KV_HEADS, head_dim).unbind(2)
    position = start[:, None] + torch.arange(8, device="cuda")
    keys = rope(rms_norm(keys, k_norm, EPSILON), cos, sin, position[:, :, None])
    for b in range(5):
        for j in range(int(count[b])):
            row = int(position[b, j]) % WINDOW
            want_k[slot[b], :, row], want_v[slot[b], :, row] = keys[b, j], values[b, j]
    untouched = want_k == ring_k.float()

    sizes = (5, 8, KV_HEADS, head_dim, WINDOW, 64, EPSILON)
    before = ring_k.clone()
    kernels.context_write(kv, k_norm, cos, sin, start, count, slot, ring_k, ring_v, *sizes, dtype=dtype)
    assert torch.equal(ring_v, want_v)
    assert torch.equal(ring_k[untouched], before[untouched])
    torch.testing.assert_close(ring_k.float(), want_k, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_refuses_more_rows_than_the_window(kernels: Kernels, generator: torch.Generator) -> None:
    x = torch.zeros(64, device="cuda")
    cos, sin = phases(4, 8)
    with pytest.raises(RuntimeError, match="context_write: CUDA error 1"):
        kernels.context_write(
            x, x, cos, sin, ints(0), ints(0), ints(0), x, x, 1, 3, 1, 8, 2, 4, EPSILON, dtype=torch.float32
        )
