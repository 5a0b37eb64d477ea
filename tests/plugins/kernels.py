"""The kernel library from Python: launchers by ctypes on torch tensors, and the arithmetic that references share."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch

BUILD = Path(os.environ.get("DSPARK_PLUGINS", "plugins/build"))
"""Where the plugins were built: environment variable ``DSPARK_PLUGINS``."""

KERNELS = BUILD / "libdspark_kernels.so"

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""torch's precisions as the C interface numbers them."""

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of a result near 1 that is rounded to a precision once or twice on its way."""

Argument = torch.Tensor | int | float | None


class Kernels:
    """``kernels.slot_read(state, slot, …)`` calls ``dspark_slot_read`` on the current stream.

    Tensors are passed by address, integers as int64, floats as float32, None as a null pointer; dtype and stream are
    appended. Raises RuntimeError with the number of the CUDA error.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._library, f"dspark_{name}")

        def launch(*arguments: Argument, dtype: torch.dtype) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            error = function(*map(_passed, arguments), ctypes.c_int(DTYPES[dtype]), stream)
            if error:
                raise RuntimeError(f"dspark_{name}: CUDA error {error}")

        return launch

    def workspace(self, name: str, *sizes: int) -> torch.Tensor:
        """As many bytes as ``dspark_<name>_workspace`` asks for, full of NaN."""
        function = self._library[f"dspark_{name}_workspace"]
        function.restype = ctypes.c_int64
        size = function(*map(ctypes.c_int64, sizes))
        assert size >= 0
        return torch.full((size,), 255, dtype=torch.uint8, device="cuda")


def _passed(argument: Argument) -> object:
    if isinstance(argument, torch.Tensor):
        assert argument.is_contiguous()
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_void_p() if argument is None else ctypes.c_int64(argument)


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * gamma.float()


def phases(positions: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin ``[positions, head_dim/2]`` float32 on the device."""
    half = head_dim // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float().cuda(), angles.sin().float().cuda()


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """x ``[…, d]`` float32 turned by the phases of `position` (int64, broadcast over ``[…]``), half-split."""
    one, two = x.chunk(2, -1)
    c, s = cos[position], sin[position]
    return torch.cat((one * c - two * s, two * c + one * s), -1)


def ints(*values: int) -> torch.Tensor:
    """int64 on the device."""
    return torch.tensor(values, dtype=torch.int64, device="cuda")
