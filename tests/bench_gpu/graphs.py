"""The draft graph of a drafter without a checkpoint: sizes are all that a build needs to write one.

``python -m tests.bench_gpu.graphs DIR`` writes what the bench measures; it needs no GPU, and the file is small.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from builder.backends.ort_cuda import OrtCuda
from builder.export import export_drafter, modules
from builder.rope_tables import rope_tables
from builder.spec import DrafterSpec
from builder.weights import WEIGHTS_NAME, Weight, WeightIndex, weight_dtype
from runtime.manifest import Limits
from tests.bench_gpu.shapes import BATCHES, DRAFTER, MAX_SEQ_LEN, WINDOW, fitting_target

PRECISION = "bf16"
FILE = "draft.onnx"


def limits_of(spec: DrafterSpec, window: int = WINDOW, max_seq_len: int = MAX_SEQ_LEN) -> Limits:
    """As many tap rows a slot as a draft reads: how many more wait there is no business of a draft."""
    return Limits(BATCHES, BATCHES[-1], window, max_seq_len, spec.block_size, prefill_chunk=1)


def weight_shapes(spec: DrafterSpec, limits: Limits) -> dict[str, tuple[int, ...]]:
    """Of every weight of the draft graph, by name."""
    draft = modules(fitting_target(spec), spec, limits)["draft"]
    return {f"drafter.{name}": tuple(value.shape) for name, value in draft.named_parameters()}


def write_graph(
    dest: Path, spec: DrafterSpec = DRAFTER, limits: Limits | None = None, precision: str = PRECISION
) -> Path:
    """``draft.onnx`` in `dest`, as a build lowers it for a CUDA card."""
    limits = limits or limits_of(spec)
    weights, end = {}, 0
    for name, shape in weight_shapes(spec, limits).items():
        weights[name] = Weight(end, shape, weight_dtype(name, precision))
        end += weights[name].nbytes
    index = WeightIndex(dest / WEIGHTS_NAME, weights, end)
    draft = {"draft": export_drafter(fitting_target(spec), spec, limits)["draft"]}
    dest.mkdir(parents=True, exist_ok=True)
    OrtCuda(precision).compile(draft, index, limits, dest)
    return dest / FILE


def random_weights(
    spec: DrafterSpec, limits: Limits, precision: str = PRECISION, device: str = "cuda"
) -> dict[str, Tensor]:
    """Made on the device, scaled so that activations stay around one. The context's K and V are rows of qkv, as in a
    bundle.
    """
    types = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    generator = torch.Generator(device).manual_seed(0)
    rope = rope_tables(spec.rope, spec.head_dim, limits.max_seq_len + limits.block_size)
    made: dict[str, Tensor] = {
        f"drafter.{name}": table.to(device)
        for name, table in zip(("cos", "sin"), map(torch.from_numpy, rope), strict=True)
    }
    for name, shape in weight_shapes(spec, limits).items():
        dtype = types[weight_dtype(name, precision)]
        if name in made:
            continue
        if name.endswith("norm.weight"):
            made[name] = torch.ones(shape, dtype=dtype, device=device)
        elif name.endswith(".bias"):
            made[name] = torch.zeros(shape, dtype=dtype, device=device)
        else:
            scale = 1.0 if name in ("drafter.embed", "drafter.markov.w1") else shape[-1] ** -0.5
            made[name] = torch.randn(shape, dtype=dtype, device=device, generator=generator).mul_(scale)
    for i in range(spec.num_layers):
        qkv = made[f"drafter.layers.{i}.qkv.weight"]
        made[f"drafter.context.layers.{i}.kv.weight"] = qkv[spec.num_heads * spec.head_dim :]
    return made


if __name__ == "__main__":
    print(write_graph(Path(sys.argv[1])))
