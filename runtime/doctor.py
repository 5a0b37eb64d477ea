"""What this machine can build and run, what is missing, and what brings it. Nothing heavy is imported to find out."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime import machine
from runtime.libraries import (
    BACKENDS,
    BUILD_PACKAGES,
    PLUGINS_VARIABLE,
    RUN_PACKAGES,
    SUPPORTED,
    BackendInfo,
    Library,
    installed,
    library,
    library_remedies,
)
from runtime.machine import Driver, Gpu, driver, gpus, human_bytes
from runtime.manifest import KERNELS_FILE, PLUGINS_FILE
from runtime.tensorrt_flavours import FLAVOURS
from runtime.version import DISTRIBUTION, VERSION

RUN_REMEDY = "in the project's folder: pip install ."
BUILD_REMEDY = "in the project's folder: pip install '.[build]'"

PYTHON_MIN = (3, 11)
_PACKAGES = tuple(
    dict.fromkeys((*RUN_PACKAGES, *(name for info in BACKENDS.values() for name in info.packages), *BUILD_PACKAGES))
)


@dataclass(frozen=True)
class BackendState:
    """`missing` says what is absent and `remedy` what to do about each, in the same order. `library` is what is
    installed of its inference library. Engines can be built here for the GPUs `builds_for`, and run on those
    `runs_on`, of this machine; both are empty for a back end that needs none."""

    can_build: bool
    can_run: bool
    missing: tuple[str, ...]
    remedy: tuple[str, ...]
    library: Library
    builds_for: tuple[str, ...] = ()
    runs_on: tuple[str, ...] = ()


def examine() -> dict[str, object]:
    """The facts under stable keys: version, python, platform, packages, cpu, memory, driver, gpus, plugins,
    backends."""
    packages = {name: installed(name) for name in _PACKAGES}
    cards, system = gpus(), driver()
    cpu, memory = machine.cpu(), machine.memory()
    return {
        "version": VERSION,
        "python": {"version": platform.python_version(), "ok": sys.version_info[:2] >= PYTHON_MIN},
        "platform": platform.platform(),
        "packages": packages,
        "cpu": {
            "model": cpu.model,
            "architecture": cpu.architecture,
            "cores": cpu.cores,
            "usable": cpu.usable,
            "features": list(cpu.features),
        },
        "memory": {"total": memory.total, "available": memory.available},
        "driver": None if system is None else {"version": system.version, "cuda": _dotted(system.cuda)},
        "gpus": [
            {
                "name": card.name,
                "architecture": card.architecture,
                "compute_capability": card.compute_capability,
                "memory": card.memory,
                "free": card.free,
            }
            for card in cards
        ],
        "plugins": {"variable": PLUGINS_VARIABLE, "value": os.environ.get(PLUGINS_VARIABLE), **kernels()},
        "backends": {
            name: _plain(state(info, packages, cards, system, buildable(name))) for name, info in BACKENDS.items()
        },
    }


def kernels() -> dict[str, str | None]:
    """The libraries of kernels that the environment variable ``DSPARK_PLUGINS`` leads to: that for ONNX Runtime and
    that for TensorRT's plugins; None for one that isn't there."""
    named = os.environ.get(PLUGINS_VARIABLE)
    found: dict[str, str | None] = {}
    for name, file in (("onnxruntime", PLUGINS_FILE), ("tensorrt", KERNELS_FILE)):
        path = Path(named, Path(file).name) if named and Path(named).is_dir() else Path(named or "")
        found[name] = str(path.absolute()) if path.is_file() and path.name == Path(file).name else None
    return found


def buildable(name: str) -> tuple[str, ...]:
    """The GPUs that a back end builds for without one in the machine."""
    if name in FLAVOURS:
        return tuple(FLAVOURS[name].architectures)
    return BACKENDS[name].architectures


def state(
    info: BackendInfo,
    packages: Mapping[str, str | None],
    cards: tuple[Gpu, ...],
    system: Driver | None = None,
    targets: tuple[str, ...] = (),
) -> BackendState:
    """Can a back end build and run with these `packages` (name to version), GPUs and driver, and if not, why?

    `targets` are the GPUs that it can build for without having one; without any it builds for those of the machine.
    """
    common: list[tuple[str, str]] = []
    run: list[tuple[str, str]] = []
    build: list[tuple[str, str]] = []
    found = library(info, packages)
    if not info.supported:
        # What else it would need is of no use to anyone yet.
        return BackendState(False, False, ("not in this version",), (f"use {' or '.join(SUPPORTED)}",), found)
    (common if info.build_needs_library else run).extend(library_remedies(info, found))
    here = tuple(dict.fromkeys(card.architecture for card in cards if card.architecture in info.architectures))
    if info.architectures and not here:
        lacking = (f"a GPU of {', '.join(info.architectures)}", "use a machine that has one, with its driver")
        (common if info.build_gpu else run).append(lacking)
    if info.driver and system is not None and not system.runs(info.driver):
        lacking = (f"driver {info.driver} or later, this is {system}", "upgrade the NVIDIA driver")
        (common if info.build_gpu else run).append(lacking)
    for group in info.run_packages:
        if not any(packages.get(name) for name in group):
            run.append((group[0], f"pip install {group[0]}"))
    run += [(name, RUN_REMEDY) for name in RUN_PACKAGES if not packages.get(name)]
    build += [(name, BUILD_REMEDY) for name in BUILD_PACKAGES if not packages.get(name)]
    problems = [*common, *run, *build]
    can_build, can_run = not common and not build, not common and not run
    return BackendState(
        can_build=can_build,
        can_run=can_run,
        missing=tuple(name for name, _ in problems),
        remedy=tuple(remedy for _, remedy in problems),
        library=found,
        builds_for=(targets or here) if can_build else (),
        runs_on=here if can_run else (),
    )


def describe() -> list[str]:
    """`examine` as lines of text."""
    cpu, memory = machine.cpu(), machine.memory()
    packages = {name: installed(name) for name in _PACKAGES}
    cards, system = gpus(), driver()
    ok = "" if sys.version_info[:2] >= PYTHON_MIN else " (too old: 3.11 or later is needed)"
    total, free = (human_bytes(size) if size is not None else "unknown" for size in (memory.total, memory.available))
    libraries = [path for path in kernels().values() if path]
    lines = [
        f"{DISTRIBUTION} {VERSION} on Python {platform.python_version()}{ok}, {platform.platform()}",
        f"cpu       {cpu.model}, {cpu.usable} of {cpu.cores} cores usable; {' '.join(cpu.features) or 'no features'}",
        f"memory    {free} free of {total}",
        f"gpus      {', '.join(map(_card, cards)) or 'none'}",
        f"driver    {system or 'none'}",
        f"kernels   {', '.join(libraries) or f'none ({PLUGINS_VARIABLE} leads to none)'}",
        f"packages  {', '.join(f'{name} {version}' for name, version in packages.items() if version)}",
    ]
    for name, info in BACKENDS.items():
        found = state(info, packages, cards, system, buildable(name))
        targets = f" (for {', '.join(found.builds_for)})" if found.builds_for else ""
        lines.append(f"{name:<13} build: {_yes(found.can_build)}{targets}  run: {_yes(found.can_run)}")
        lines += [
            f"{'':<13} missing {what}: {remedy}" for what, remedy in zip(found.missing, found.remedy, strict=True)
        ]
    return lines


def _plain(found: BackendState) -> dict[str, object]:
    return {
        "can_build": found.can_build,
        "can_run": found.can_run,
        "missing": list(found.missing),
        "remedy": list(found.remedy),
        "library": {"bindings": found.library.bindings, "native": found.library.native},
        "builds_for": list(found.builds_for),
        "runs_on": list(found.runs_on),
    }


def _card(card: Gpu) -> str:
    free = "" if card.free is None else f", {human_bytes(card.free)} free"
    return f"{card.name} ({card.architecture}, {human_bytes(card.memory)}{free})"


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else f"{version[0]}.{version[1]}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
