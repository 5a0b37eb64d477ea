"""The operators of `plugins.operators` as TensorRT plugins (IPluginV3), for TensorRT and TensorRT-RTX alike.

A plugin is the same class for every operator: sizes and types follow from the table, and ``enqueue`` calls the C
launcher. At build time neither a GPU nor the kernels are needed: the network only learns that there is such a layer. To
run, the process registers creators with the loaded kernels. Enqueueing happens in Python once a CUDA graph is
captured, and never again when it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from plugins.launchers import DTYPES, Call, Kernels
from plugins.operators import DOMAIN, OPERATORS, VERSION, Attributes, Operator, Shape


def register(trt: Any, kernels: Kernels | None = None) -> int:
    """Register a creator for every operator with that module's registry (``tensorrt`` or TensorRT-RTX's).

    Registering again, with kernels that were not there before, replaces what was registered.

    Returns:
        How many are registered.

    Raises:
        RuntimeError: the registry refuses one.
    """
    registry = trt.get_plugin_registry()
    plugin_class, creator_class = _classes(trt)
    for operator in OPERATORS.values():
        old = registry.get_creator(operator.name, VERSION, DOMAIN)
        if old is not None:
            registry.deregister_creator(old)
        creator = creator_class(operator, plugin_class, kernels)
        if not registry.register_creator(creator, DOMAIN):
            raise RuntimeError(f"TensorRT's registry refuses dspark::{operator.name}")
        _keep(creator)
    return len(OPERATORS)


_kept: list[object] = []


def _keep(made: Any) -> Any:
    """What Python made and the library holds, for good: it keeps no reference of its own, and a plugin whose layer it
    dropped as unused was freed under it."""
    _kept.append(made)
    return made


def _classes(trt: Any) -> tuple[type, type]:
    """The plugin and its creator over one flavour's base classes."""
    kinds = {"F32": trt.DataType.FLOAT, "I64": trt.DataType.INT64}
    precisions = {
        trt.DataType.FLOAT: DTYPES["float32"],
        trt.DataType.HALF: DTYPES["float16"],
        trt.DataType.BF16: DTYPES["bfloat16"],
    }

    class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):
        def __init__(self, operator: Operator, attributes: Attributes, kernels: Kernels | None) -> None:
            trt.IPluginV3.__init__(self)
            trt.IPluginV3OneCore.__init__(self)
            trt.IPluginV3OneBuildV2.__init__(self)
            trt.IPluginV3OneRuntime.__init__(self)
            self.operator, self.attributes, self.kernels = operator, attributes, kernels
            self.plugin_name, self.plugin_version, self.plugin_namespace = operator.name, VERSION, DOMAIN
            self.num_outputs = len(operator.outputs)

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            return _keep(Plugin(self.operator, self.attributes, self.kernels))

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def get_fields_to_serialize(self) -> Any:
            # Kept, as are their arrays: the library holds on to addresses.
            self.serialized, self.arrays = _fields(trt, self.attributes)
            return self.serialized

        def get_output_data_types(self, inputs: Sequence[Any]) -> list[Any]:
            t = self._precision(inputs)
            return [kinds.get(output.kind, t) for output in self.operator.outputs]

        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
            sizes = [tuple(dims[i].get_constant_value() for i in range(len(dims))) for dims in inputs]
            return [
                trt.DimsExprs([builder.constant(size) for size in shape])
                for shape in self.operator.shapes(sizes, self.attributes)
            ]

        def get_aliased_input(self, index: int) -> int:
            updated = self.operator.outputs[index].updates
            return -1 if updated is None else [tensor.name for tensor in self.operator.inputs].index(updated)

        def supports_format_combination(self, pos: int, tensors: Sequence[Any], num_inputs: int) -> bool:
            described = [tensor.desc for tensor in tensors[: pos + 1]]
            declared = [tensor.kind for tensor in self.operator.inputs] + [out.kind for out in self.operator.outputs]
            wanted = kinds.get(declared[pos])
            if wanted is None:
                wanted = self._precision([tensor.type for tensor in described])
            return bool(described[pos].format == trt.TensorFormat.LINEAR and described[pos].type == wanted)

        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            pass

        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            pass

        def set_tactic(self, tactic: int) -> None:
            pass

        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            if self.kernels is None:
                return 0
            shapes = [tuple(tensor.max) for tensor in inputs]
            types = [tensor.desc.type for tensor in inputs]
            return self.kernels.workspace(
                self.operator, self._named(shapes), self.attributes, precisions[self._precision(types)]
            )

        def enqueue(
            self,
            input_desc: Sequence[Any],
            output_desc: Sequence[Any],
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            if self.kernels is None:
                raise RuntimeError(f"dspark::{self.operator.name} has no kernels in this process")
            at = {tensor.name: address for tensor, address in zip(self.operator.inputs, inputs, strict=True)}
            for output, address in zip(self.operator.outputs, outputs, strict=True):
                if output.updates is None:
                    at[output.name] = address
            shapes = self._named([tuple(tensor.dims) for tensor in input_desc])
            dtype = precisions[self._precision([tensor.type for tensor in input_desc])]
            self.kernels.launch(Call(self.operator, shapes, at, self.attributes, dtype, workspace, stream))

        def _precision(self, types: Sequence[Any]) -> Any:
            """T: the type of the first input that has it; any for an operator without."""
            for tensor, dtype in zip(self.operator.inputs, types, strict=False):
                if tensor.kind == "T":
                    return dtype
            return trt.DataType.FLOAT

        def _named(self, shapes: Sequence[Shape]) -> dict[str, Shape]:
            return {tensor.name: shape for tensor, shape in zip(self.operator.inputs, shapes, strict=True)}

    class Creator(trt.IPluginCreatorV3One):
        def __init__(self, operator: Operator, plugin: type, kernels: Kernels | None) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.operator, self.plugin, self.kernels = operator, plugin, kernels
            self.name, self.plugin_version, self.plugin_namespace = operator.name, VERSION, DOMAIN
            defaults = {name: kind() for name, kind in operator.attributes.items()}
            self.field_names, self.arrays = _fields(trt, defaults)

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            found = {field.name: field.data for field in fields}
            attributes = {n: kind(np.asarray(found[n]).reshape(-1)[0]) for n, kind in self.operator.attributes.items()}
            return _keep(self.plugin(self.operator, attributes, self.kernels))

    return Plugin, Creator


def _fields(trt: Any, attributes: Attributes) -> tuple[Any, list[Any]]:
    """Attributes as the ONNX parser passes them, 64-bit integers as such and floats as float32; and the arrays and
    fields that the collection points into."""
    kept: list[Any] = []
    fields = []
    for name, value in attributes.items():
        if isinstance(value, float):
            array, kind = np.array([value], np.float32), trt.PluginFieldType.FLOAT32
        else:
            array, kind = np.array([value], np.int64), trt.PluginFieldType.INT64
        fields.append(trt.PluginField(name, array, kind))
        kept += [array, fields[-1]]
    return trt.PluginFieldCollection(fields), kept
