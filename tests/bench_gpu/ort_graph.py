"""A model file on ONNX Runtime with torch tensors bound by address: state and weights are never copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

# ONNX's numbers of element types, and ONNX Runtime's names of them.
_ONNX_TYPE = {torch.float32: 1, torch.int64: 7, torch.float16: 10, torch.bfloat16: 16}
_TORCH_TYPE = {
    "tensor(float)": torch.float32,
    "tensor(int64)": torch.int64,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
}
NEW = ".new"


class OrtGraph:
    """One session.

    Args:
        model: an ``.onnx`` file whose inputs include its weights and states; an output ``x.new`` is bound to input x.
        plugins: the custom-op library, or None for the bodies of standard operators.
        graphs: ``library`` lets ONNX Runtime capture each binding as a CUDA graph and replay it; ``none`` launches node
            by node on `stream`, without waiting.
        stream: the CUDA stream to work on (None: the library's own).
        device: ``cuda``, or ``cpu`` for tests.
    """

    def __init__(
        self,
        model: Path,
        plugins: Path | None,
        graphs: Literal["library", "none"] = "library",
        stream: torch.cuda.Stream | None = None,
        device: str = "cuda",
    ) -> None:
        if device == "cuda":
            torch.cuda.init()  # loads the CUDA libraries that ONNX Runtime's provider looks for
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        if plugins is not None:
            options.register_custom_ops_library(str(plugins))
        provider: object = "CPUExecutionProvider"
        if device == "cuda":
            settings = {
                "device_id": "0",
                "enable_cuda_graph": str(int(graphs == "library")),
                "use_tf32": "0",
                "arena_extend_strategy": "kSameAsRequested",
            }
            if stream is not None:
                settings["user_compute_stream"] = str(stream.cuda_stream)
            provider = ("CUDAExecutionProvider", settings)
        self._ort, self._device, self._library = ort, device, graphs == "library"
        self._session = ort.InferenceSession(str(model), options, providers=[provider])
        if device == "cuda" and self._session.get_providers()[0] != "CUDAExecutionProvider":
            raise RuntimeError(f"ONNX Runtime runs {model.name} on {self._session.get_providers()}")
        self.inputs = {value.name: _TORCH_TYPE[value.type] for value in self._session.get_inputs()}
        self.outputs = {value.name: _TORCH_TYPE[value.type] for value in self._session.get_outputs()}
        self._kept: list[object] = []

    def bind(self, tensors: Mapping[str, Tensor], number: int) -> Callable[[], None]:
        """A step over `tensors`, which holds every input and every output that isn't an input's ``.new``; more names
        are ignored. `number` tells the bindings of a session apart. The tensors stay where they are, and alive.

        Raises:
            ValueError: a tensor is missing, of another type, or not contiguous.
        """
        binding = self._session.io_binding()
        for name, dtype in self.inputs.items():
            tensor = _checked(tensors, name, dtype)
            binding.bind_input(name, self._device, 0, _ONNX_TYPE[dtype], list(tensor.shape), tensor.data_ptr())
        for name, dtype in self.outputs.items():
            tensor = _checked(tensors, name.removesuffix(NEW), dtype)
            binding.bind_output(name, self._device, 0, _ONNX_TYPE[dtype], list(tensor.shape), tensor.data_ptr())
        run_options = self._ort.RunOptions()
        if self._device == "cuda" and self._library:
            run_options.add_run_config_entry("gpu_graph_id", str(number))
        elif self._device == "cuda":
            run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._kept.append((binding, run_options, dict(tensors)))

        def step() -> None:
            self._session.run_with_iobinding(binding, run_options)

        return step


def _checked(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise ValueError(f"no tensor for {name!r}; there are {', '.join(sorted(tensors)[:8])} …")
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{name!r}: expected a contiguous {dtype}, found {tensor.dtype} of strides {tensor.stride()}")
    return tensor
