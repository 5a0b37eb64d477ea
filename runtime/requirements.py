"""Does this machine have what a bundle's engines run with: library, GPU and driver? Told from packages' metadata and
the driver, before any of it is loaded."""

from __future__ import annotations

from pathlib import Path

from runtime import libraries, machine
from runtime.errors import BackendUnavailable
from runtime.libraries import BACKENDS, BackendInfo, Library, library, library_remedies, release
from runtime.machine import Driver, Gpu
from runtime.manifest import REBUILD, Backend
from runtime.tensorrt_flavours import FLAVOURS


def check_backend(where: Path, backend: Backend) -> None:
    """Can the engines of the bundle at `where` run here? Raises BackendUnavailable for the first thing that is missing
    or doesn't fit."""
    info = BACKENDS.get(backend.name)
    if info is None or not info.supported:
        known = [name for name, other in BACKENDS.items() if other.supported]
        raise BackendUnavailable(
            where,
            "its back end can't run in this version",
            expected=f"one of {', '.join(known)}",
            found=backend.name,
            remedy=f"{REBUILD} --backend {known[0]}",
        )
    found = library(info, {name: libraries.installed(name) for name in info.packages})
    _check_installed(where, backend, info, found)
    if info.exact:
        _check_same(where, backend, info, found)
    else:
        _check_recent(where, backend, info, found)
    if info.architectures:
        _check_gpu(where, backend, info)


def _check_installed(where: Path, backend: Backend, info: BackendInfo, found: Library) -> None:
    for package, remedy in library_remedies(info, found, backend.version if info.exact else ""):
        named = backend.library if found.bindings is None else package
        remedy = remedy if info.exact else f"pip install '{package}>={backend.version}'"
        raise BackendUnavailable(where, f"needs {named}, which is not installed", remedy=remedy)
    for group in info.run_packages:
        if not any(map(libraries.installed, group)):
            problem = f"needs {group[0]}, which is not installed"
            raise BackendUnavailable(where, problem, remedy=f"pip install {group[0]}")


def _check_recent(where: Path, backend: Backend, info: BackendInfo, found: Library) -> None:
    if release(found.bindings or "") < release(backend.version):
        raise BackendUnavailable(
            where,
            f"{backend.library} is older than the build's",
            expected=f"{backend.library} >= {backend.version}",
            found=found.bindings,
            remedy=f"pip install '{info.libraries[0]}>={backend.version}'",
        )


def _check_same(where: Path, backend: Backend, info: BackendInfo, found: Library) -> None:
    """Both halves must be the version that built the engines: another refuses them, or takes them wrongly."""
    for package, version in ((info.libraries[0], found.bindings), (info.natives[0], found.native)):
        if version is not None and not _same(version, backend.version):
            raise BackendUnavailable(
                where,
                "its engines run only with the version that built them",
                expected=f"{package} {backend.version}",
                found=version,
                remedy=f"pip install {package}=={backend.version}, or rebuild the bundle with the version here",
            )


def _same(found: str, wanted: str) -> bool:
    """Whether two versions are one, as far as the name of a library's file tells: ``10.16.1`` of ``10.16.1.11``, or
    nothing."""
    if found == "unknown":
        return True
    numbers = found.split(".")
    return release(found) == release(wanted) or (len(numbers) == 3 and numbers == wanted.split(".")[:3])


def _check_gpu(where: Path, backend: Backend, info: BackendInfo) -> None:
    """The first GPU is the one that sessions take."""
    cards, driver = machine.gpus(), machine.driver()
    if not cards:
        raise BackendUnavailable(
            where,
            "needs a GPU, and the driver shows none",
            expected=f"an NVIDIA GPU for {backend.name}",
            found=driver or "no driver",
            remedy="Serve it on a machine with a GPU and its driver, or build with --backend ort-cpu",
        )
    if info.driver and driver is not None and not driver.runs(info.driver):
        raise _too_old(where, info, driver)
    if info.exact and cards[0].architecture != backend.arch:
        raise _other_gpu(where, backend, info, cards)


def _too_old(where: Path, info: BackendInfo, driver: Driver) -> BackendUnavailable:
    expected = f"driver {info.driver} or later (CUDA 13)"
    return BackendUnavailable(
        where, "the NVIDIA driver is too old", expected=expected, found=driver, remedy="Upgrade it"
    )


def _other_gpu(where: Path, backend: Backend, info: BackendInfo, cards: tuple[Gpu, ...]) -> BackendUnavailable:
    here = cards[0].architecture
    present = any(card.architecture == backend.arch for card in cards)
    if present:
        remedy = "Put that GPU first with the environment variable CUDA_VISIBLE_DEVICES"
    elif here in FLAVOURS[backend.name].architectures:
        remedy = f"{REBUILD} --gpu {here.replace('_', '')}"
    elif here in info.architectures:
        remedy = f"{REBUILD} on this machine"
    else:
        remedy = f"Serve it on a GPU of {backend.arch}, or build with --backend ort-cuda"
    return BackendUnavailable(
        where,
        "the GPU that its engines run on isn't the first" if present else "its engines run on another GPU",
        expected=backend.arch,
        found=", ".join(f"{card.name} ({card.architecture})" for card in cards),
        remedy=remedy,
    )
