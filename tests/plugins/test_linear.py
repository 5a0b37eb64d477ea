"""Products with weights, against float64 of the same rounded inputs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.plugins.kernels import DTYPES, Kernels, rms_norm

MODES = {"linear": 0, "float": 1, "add": 2, "swiglu": 3}
POINTERS = ("x", "gamma", "w", "residual", "y", "workspace")
EPSILON = 1e-6
ERROR = {torch.float32: 6e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""Relative, of a result that is rounded once; twice after a norm."""


class Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "mode")),
        ("epsilon", ctypes.c_float),
    ]


@dataclass
class Product:
    mode: str
    x: Tensor
    w: Tensor
    gamma: Tensor | None = None
    residual: Tensor | None = None
    workspace: Tensor = field(init=False)
    y: Tensor = field(init=False)

    def arguments(self, kernels: Kernels) -> Arguments:
        (rows, inputs), outputs = self.x.shape, self.w.shape[0] // (2 if self.mode == "swiglu" else 1)
        kind = torch.float32 if self.mode == "float" else self.x.dtype
        self.y = torch.full((rows, outputs), torch.nan, dtype=kind, device="cuda")
        size = kernels._library["dspark_linear_workspace"]
        size.restype = ctypes.c_int64
        sizes = (rows, inputs, outputs, MODES[self.mode])
        needed = size(*map(ctypes.c_int64, sizes), ctypes.c_int(DTYPES[self.x.dtype]))
        self.workspace = torch.full((needed,), 255, dtype=torch.uint8, device="cuda")
        tensors = {name: getattr(self, name) for name in POINTERS}
        pointers = {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
        return Arguments(**pointers, rows=rows, inputs=inputs, outputs=outputs, mode=MODES[self.mode], epsilon=EPSILON)

    def run(self, kernels: Kernels) -> Tensor:
        launch(kernels, self.arguments(kernels), self.x.dtype)
        return self.y

    def wanted(self) -> Tensor:
        x = self.x if self.gamma is None else rms_norm(self.x, self.gamma, EPSILON).to(self.x.dtype)
        y = x.double() @ self.w.double().T
        if self.mode == "swiglu":
            gate, up = y.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up
        return y if self.residual is None else y + self.residual.double()


def launch(kernels: Kernels, arguments: Arguments, dtype: torch.dtype) -> None:
    function = kernels._library["dspark_linear"]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = function(ctypes.byref(arguments), ctypes.c_int(DTYPES[dtype]), stream)
    if error:
        raise RuntimeError(f"dspark_linear: CUDA error {error}")


def make(
    generator: torch.Generator, mode: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, normed: bool
) -> Product:
    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)

    w = random(outputs * (2 if mode == "swiglu" else 1), inputs, scale=inputs**-0.5)
    residual = random(rows, outputs) if mode == "add" else None
    return Product(mode, random(rows, inputs), w, random(inputs) if normed else None, residual)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < ERROR[dtype]
    assert (found.double() - wanted).abs().max() < 30 * ERROR[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mode", "normed"), [(m, n) for m in MODES for n in (False, True) if m != "add" or not n])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 35, 64, 65, 224])
def test_products(
    kernels: Kernels, generator: torch.Generator, mode: str, normed: bool, dtype: torch.dtype, rows: int
) -> None:
    # Sizes of the tiny pairs, of the real one, odd ones, and a piece of a large one.
    for inputs, outputs in ((32, 48), (48, 131), (576, 960), (40, 33), (4096, 512)):
        product = make(generator, mode, dtype, rows, inputs, outputs, normed)
        close(product.run(kernels), product.wanted(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_any_number(kernels: Kernels, generator: torch.Generator, dtype: torch.dtype) -> None:
    for mode in MODES:
        product = make(generator, mode, dtype, 5, 37, 50, False)
        close(product.run(kernels), product.wanted(), dtype)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_is_what_it_is_alone(kernels: Kernels, generator: torch.Generator, mode: str) -> None:
    """Bit for bit, for as many rows as the kernel takes. In 16 bits cuBLAS promises no such thing."""
    whole = make(generator, mode, torch.float32, 64, 1536, 400, mode == "swiglu")
    whole.run(kernels)
    for rows in (1, 8, 13, 32, 56):
        residual = None if whole.residual is None else whole.residual[:rows].contiguous()
        part = Product(mode, whole.x[:rows].contiguous(), whole.w, whole.gamma, residual)
        assert torch.equal(part.run(kernels), whole.y[:rows])


@pytest.mark.parametrize("rows", [7, 100])
def test_replays_with_other_inputs(kernels: Kernels, generator: torch.Generator, rows: int) -> None:
    product = make(generator, "swiglu", torch.bfloat16, rows, 512, 256, True)
    arguments = product.arguments(kernels)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(kernels, arguments, product.x.dtype)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch(kernels, arguments, product.x.dtype)
    product.x.copy_(torch.randn(product.x.shape, generator=generator, device="cuda"))
    product.y.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    close(product.y, product.wanted(), torch.bfloat16)


def test_refuses_what_it_cannot_do(kernels: Kernels, generator: torch.Generator) -> None:
    product = make(generator, "linear", torch.float32, 2, 16, 16, False)
    arguments = product.arguments(kernels)
    for name, value in (("mode", 7), ("rows", -1), ("outputs", 0), ("mode", MODES["add"])):
        before = getattr(arguments, name)
        setattr(arguments, name, value)
        with pytest.raises(RuntimeError, match="CUDA error 1"):
            launch(kernels, arguments, torch.float32)
        setattr(arguments, name, before)
