"""Products of an 8B-shaped drafter alone, against torch's and the bytes of their weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.bench_gpu.chain import COPY_BYTES_A_MS
from tests.bench_gpu.replays import median_ms
from tests.plugins.kernels import KERNELS, Kernels
from tests.plugins.test_linear import Product, launch, make

SHAPES = {
    "qkv": ("linear", 4096, 6144, True),
    "o": ("add", 4096, 4096, False),
    "gate_up": ("swiglu", 4096, 12288, True),
    "down": ("add", 12288, 4096, False),
    "fc": ("linear", 20480, 4096, False),
    "context kv": ("linear", 4096, 2048, False),
    "lm_head": ("float", 4096, 151936, False),
}
ROWS = (7, 56, 224)
_BYTES = 600 << 20  # of copies of the weights, so that the cache holds none from replay to replay


def measure() -> list[dict[str, object]]:
    """Medians in milliseconds of one product, over copies of its weights in turn."""
    kernels, generator = Kernels(KERNELS), torch.Generator("cuda").manual_seed(1)
    found: list[dict[str, object]] = []
    for name, (mode, inputs, outputs, normed) in SHAPES.items():
        for rows in ROWS:
            first = make(generator, mode, torch.bfloat16, rows, inputs, outputs, normed)
            size = 2 * first.w.numel()
            copies = [first.w] + [first.w.clone() for _ in range(max(1, _BYTES // size) - 1)]
            products = [Product(mode, first.x, w, first.gamma, first.residual) for w in copies]
            arguments = [product.arguments(kernels) for product in products]
            x = first.x

            def ours(arguments: list[object] = arguments) -> None:
                for one in arguments:
                    launch(kernels, one, torch.bfloat16)  # type: ignore[arg-type]

            def theirs(copies: list[torch.Tensor] = copies, x: torch.Tensor = x) -> None:
                for w in copies:
                    F.linear(x, w)

            found.append(
                {
                    "name": f"{name}, {rows} rows",
                    "ms": median_ms(ours, groups=5) / len(copies),
                    "torch_ms": median_ms(theirs, groups=5) / len(copies),
                    "floor_ms": size / COPY_BYTES_A_MS,
                }
            )
            del first, copies, products, arguments
            torch.cuda.empty_cache()
    return found
