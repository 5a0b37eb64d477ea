"""The Markov chain alone: all steps of a block, against its serial products in torch and the bytes of W2."""

from __future__ import annotations

import torch

from tests.bench_gpu.replays import median_ms
from tests.plugins.kernels import KERNELS, Kernels
from tests.plugins.test_markov_chain import launch, make

VOCAB, RANK, STEPS, HIDDEN = 151_936, 256, 7, 4096
BATCHES = (1, 8, 32)
COPY_BYTES_A_MS = 4.26e9


def measure() -> list[dict[str, object]]:
    """Medians in milliseconds over replays of a CUDA graph. The floor reads W2 once a step and base once."""
    kernels, generator = Kernels(KERNELS), torch.Generator("cuda").manual_seed(1)
    rows: list[dict[str, object]] = []
    for batch in BATCHES:
        chain = make(generator, "vanilla", torch.bfloat16, batch, STEPS, VOCAB, RANK, HIDDEN)
        arguments = chain.arguments(kernels, sample=False)
        w1, w2 = chain.weights
        out = torch.empty(batch, VOCAB, dtype=torch.bfloat16, device="cuda")
        rows_of = w1[:batch].contiguous()

        def products(rows_of: torch.Tensor = rows_of, w2: torch.Tensor = w2, out: torch.Tensor = out) -> None:
            for _ in range(STEPS):
                torch.mm(rows_of, w2.T, out=out)

        read = STEPS * 2 * w2.numel() + 4 * chain.base.numel()
        rows.append(
            {
                "name": f"chain, batch {batch}",
                "ms": median_ms(lambda a=arguments, c=chain: launch(kernels, a, c.dtype)),
                "torch_ms": median_ms(products),
                "floor_ms": read / COPY_BYTES_A_MS,
                "w2_once_ms": 2 * w2.numel() / COPY_BYTES_A_MS,
            }
        )
    return rows
