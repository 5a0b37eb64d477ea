"""Back ends as siblings of one shape, each imported only when it is built for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from builder.errors import BackendUnavailable
from builder.spec import DrafterSpec, TargetSpec
from runtime.libraries import BACKENDS, SUPPORTED, installed
from runtime.manifest import Backend, EngineFile, Limits, StateTensor

if TYPE_CHECKING:
    from builder.export import Graph
    from builder.weights import WeightIndex

BUILDERS = {"ort-cpu": "builder.backends.ort_cpu:OrtCpu", "ort-cuda": "builder.backends.ort_cuda:OrtCuda"}
"""Back end to its builder class; the names are the supported ones of `runtime.libraries`."""


class BackendBuilder(Protocol):
    """What a back end does at build time, for one precision of those in `builder.profile.PRECISIONS`."""

    def compile(
        self, graphs: Mapping[str, Graph], weights: WeightIndex, limits: Limits, dest: Path
    ) -> tuple[EngineFile, ...]:
        """Write the engines of every graph and batch into `dest`, where ``weights.bin`` lies already."""
        ...

    def state(self, target: TargetSpec, drafter: DrafterSpec, limits: Limits) -> tuple[StateTensor, ...]:
        """The state buffers that the engines read and update."""
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
    if info.build_needs_library and not any(map(installed, info.libraries)):
        raise BackendUnavailable(
            where,
            "its library is not installed",
            expected=" or ".join(info.libraries),
            remedy=f"pip install {info.libraries[0]}",
        )


def get(name: str, precision: str) -> BackendBuilder:
    """The back end of a name that `check` has passed."""
    module, attribute = BUILDERS[name].split(":")
    builder: BackendBuilder = getattr(import_module(module), attribute)(precision=precision)
    return builder
