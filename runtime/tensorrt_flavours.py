"""The two TensorRT libraries, and all that differs between them for builder and runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from runtime.errors import BackendUnavailable
from runtime.libraries import BACKENDS, installed, library, library_remedies


@dataclass(frozen=True)
class Flavour:
    """One library.

    `modules` are names that its bindings are imported by, the first found being taken. `architectures` are the GPUs
    that engines can be built for without one in the machine, as ``sm_89``, with the library's names for them; empty:
    engines are for the GPU that the machine has.
    """

    name: str
    modules: tuple[str, ...]
    architectures: Mapping[str, str]

    def load(self) -> ModuleType:
        """The library's module, ready to parse networks with plugins.

        Raises:
            BackendUnavailable: it isn't installed, or its libraries can't be loaded.
        """
        module = next((name for name in self.modules if find_spec(name)), None)
        if module is None:
            raise BackendUnavailable(
                self.name, "its bindings are not installed", expected=self.modules[0], remedy=self._remedy()
            )
        try:
            if self.name == "tensorrt-rtx":
                _link_rtx()
            return import_module(module)
        except (ImportError, OSError) as error:
            raise BackendUnavailable(
                self.name, "its libraries can't be loaded", found=str(error), remedy=self._remedy()
            ) from error

    def network_flags(self, module: Any) -> int:
        """For ``create_network``: types are those of the graph. TensorRT 11 knows nothing else and may drop the
        flag."""
        flag = getattr(module.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        return 0 if flag is None else 1 << int(flag)

    def aim(self, module: Any, config: Any, gpu: str) -> None:
        """Have a builder's configuration build for that GPU, as ``sm_89``."""
        if self.architectures:
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(module.ComputeCapability, self.architectures[gpu]), 0)

    def _remedy(self) -> str:
        info = BACKENDS[self.name]
        found = library(info, {name: installed(name) for name in info.packages})
        return " and ".join(remedy for _, remedy in library_remedies(info, found)) or "Reinstall them"


FLAVOURS: Mapping[str, Flavour] = {
    "tensorrt": Flavour("tensorrt", ("tensorrt", "tensorrt_bindings"), {}),
    "tensorrt-rtx": Flavour(
        "tensorrt-rtx",
        ("tensorrt_rtx", "tensorrt_rtx_bindings"),
        {f"sm_{number}": f"SM{number}" for number in (75, 80, 86, 89, 120, 121)},
    ),
}
"""By back end."""


def _link_rtx() -> None:
    """Its parser looks for the library by a name that the wheels don't carry, and aborts the process where it finds
    none: give it that name, beside the library."""
    found = find_spec("tensorrt_rtx_libs")
    if found is None or not found.submodule_search_locations:
        return  # installed otherwise, with the system's links
    folder = Path(next(iter(found.submodule_search_locations)))
    link, library = folder / "libtensorrt_rtx.so", folder / "libtensorrt_rtx.so.1"
    if link.exists() or not library.exists():
        return
    try:
        link.symlink_to(library.name)
    except FileExistsError:
        return  # another process was faster
    except OSError as error:
        raise BackendUnavailable(
            "tensorrt-rtx",
            "its library lacks a name that its parser needs, which can't be added",
            expected=str(link),
            found=error.strerror or str(error),
            remedy=f"As the owner of that folder: ln -s {library.name} {link}",
        ) from error
