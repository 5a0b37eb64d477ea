"""Back ends as siblings of one shape, each imported only when it is built for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from builder.errors import BackendUnavailable
from builder.spec import DrafterSpec, TargetSpec
from runtime.manifest import Backend, EngineFile, Limits, StateTensor

if TYPE_CHECKING:
    from builder.export import Graph
    from builder.weights import WeightIndex

NAMES = ("ort-cpu",)


class BackendBuilder(Protocol):
    """What a back end does at build time."""

    def compile(
        self, graphs: Mapping[str, Graph], weights: WeightIndex, limits: Limits, dest: Path
    ) -> tuple[EngineFile, ...]:
        """Write the engines of every graph and batch into `dest`, where ``weights.bin`` lies already."""
        ...

    def state(self, target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> tuple[StateTensor, ...]:
        """The state buffers that the engines read and update."""
        ...

    def loaded_bytes(self, graphs: Mapping[str, Graph], weights: WeightIndex, limits: Limits) -> int:
        """What the weights of all engines occupy once they are loaded, copies that the library makes included."""
        ...

    def describe(self) -> Backend:
        """The manifest's entry: which library, of which version, must run the bundle."""
        ...


def get(name: str) -> BackendBuilder:
    """The back end of that name.

    Raises:
        BackendUnavailable: this version can't build for it.
    """
    if name != "ort-cpu":
        raise BackendUnavailable(f"--backend {name}", "no such back end", expected=", ".join(NAMES), found=name)
    from builder.backends.ort_cpu import OrtCpu

    return OrtCpu()
