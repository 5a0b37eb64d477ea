"""Back ends as siblings of one shape, each imported only when it is built for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from builder.errors import BackendUnavailable
from builder.spec import DrafterSpec, TargetSpec
from runtime.libraries import BACKENDS, SUPPORTED, installed, library, library_remedies
from runtime.manifest import Backend, EngineFile, Limits, Serving, StateTensor

if TYPE_CHECKING:
    from builder.export import Graph
    from builder.weights import WeightIndex

BUILDERS = {
    "ort-cpu": "builder.backends.ort_cpu:OrtCpu",
    "ort-cuda": "builder.backends.ort_cuda:OrtCuda",
    "tensorrt": "builder.backends.tensorrt:TensorRt",
    "tensorrt-rtx": "builder.backends.tensorrt:TensorRt",
}
"""Back end to its builder class; the names are the supported ones of `runtime.libraries`."""


@dataclass(frozen=True)
class EngineBuilt:
    """How building an engine went, of back ends that take their time: `seconds`, the `peak_memory` in bytes of the
    process that built it, and whether it would come out the same again."""

    file: str
    seconds: float
    peak_memory: int
    reproducible: bool


@dataclass(frozen=True)
class BackendOptions:
    """What engines depend on besides the graphs.

    `precision` is one of `builder.profile.PRECISIONS`, `gpu` the one to build for (``sm_89``; None for back ends whose
    engines run on any), and `kernels` says whether the bundle brings a library of kernels.
    """

    name: str
    precision: str
    serving: Serving
    gpu: str | None = None
    kernels: bool = False


class BackendBuilder(Protocol):
    """What a back end does at build time. `built` says how it went, once it has compiled."""

    built: tuple[EngineBuilt, ...]

    @classmethod
    def make(cls, options: BackendOptions) -> Self: ...

    def compile(
        self, graphs: Mapping[str, Graph], weights: WeightIndex, limits: Limits, dest: Path
    ) -> tuple[EngineFile, ...]:
        """Write the engines of every graph and batch into `dest`, where ``weights.bin`` lies already."""
        ...

    def compile_seconds(self, target: TargetSpec, limits: Limits) -> float:
        """About how long `compile` takes on two cores, for who waits."""
        ...

    def state(self, target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> tuple[StateTensor, ...]:
        """The state buffers that the engines read and update."""
        ...

    def working_bytes(self, target: TargetSpec, limits: Limits, state: Sequence[StateTensor]) -> int:
        """What serving takes of the device's memory besides weights and state."""
        ...

    def loaded_bytes(self, graphs: Mapping[str, Graph], weights: WeightIndex) -> int:
        """What the weights of all engines occupy once they are loaded, copies that the library makes included."""
        ...

    def describe(self) -> Backend:
        """The manifest's entry: which library, of which version, must run the bundle."""
        ...


def check(name: str) -> None:
    """Can this version, on this machine, build for the back end of that name? Nothing is imported to find out.

    Raises:
        BackendUnavailable: a back end that this version doesn't have, or one whose library isn't installed.
    """
    where = f"--backend {name}"
    if name not in SUPPORTED:
        raise BackendUnavailable(
            where,
            "this version can't build for it",
            expected=" or ".join(SUPPORTED),
            found=name,
            remedy=f"Pass --backend {SUPPORTED[0]}",
        )
    info = BACKENDS[name]
    if not info.build_needs_library:
        return
    found = library(info, {package: installed(package) for package in info.packages})
    for package, remedy in library_remedies(info, found):
        raise BackendUnavailable(
            where,
            "its library is not installed" if found.bindings is None else "its bindings lack the library itself",
            expected=" or ".join(info.libraries) if package in info.libraries else package,
            remedy=remedy,
        )


def get(options: BackendOptions) -> BackendBuilder:
    """The back end of a name that `check` has passed."""
    module, attribute = BUILDERS[options.name].split(":")
    builder: type[BackendBuilder] = getattr(import_module(module), attribute)
    return builder.make(options)
