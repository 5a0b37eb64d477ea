"""What this machine can build and run, what is missing, and what brings it. Nothing heavy is imported to find out."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from runtime import machine
from runtime.libraries import BACKENDS, BUILD_PACKAGES, RUN_PACKAGES, SUPPORTED, BackendInfo, installed
from runtime.machine import Gpu, gpus, human_bytes
from runtime.version import DISTRIBUTION, VERSION

RUN_REMEDY = "in the project's folder: pip install ."
BUILD_REMEDY = "in the project's folder: pip install '.[build]'"

PYTHON_MIN = (3, 11)
_LIBRARIES = tuple(dict.fromkeys(name for info in BACKENDS.values() for name in info.libraries))


@dataclass(frozen=True)
class BackendState:
    """`missing` says what is absent and `remedy` what to do about each, in the same order."""

    can_build: bool
    can_run: bool
    missing: tuple[str, ...]
    remedy: tuple[str, ...]


def examine() -> dict[str, object]:
    """The facts under stable keys: version, python, platform, packages, cpu, memory, gpus, backends."""
    packages = {name: installed(name) for name in dict.fromkeys((*RUN_PACKAGES, *_LIBRARIES, *BUILD_PACKAGES))}
    cards = gpus()
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
        "gpus": [{"name": card.name, "architecture": card.architecture, "memory": card.memory} for card in cards],
        "backends": {name: _plain(state(info, packages, cards)) for name, info in BACKENDS.items()},
    }


def state(info: BackendInfo, packages: Mapping[str, str | None], cards: tuple[Gpu, ...]) -> BackendState:
    """Can a back end build and run with these `packages` and GPUs, and if not, why?"""
    common: list[tuple[str, str]] = []
    run: list[tuple[str, str]] = []
    build: list[tuple[str, str]] = []
    if not info.supported:
        # What else it would need is of no use to anyone yet.
        return BackendState(False, False, ("not in this version",), (f"use {' or '.join(SUPPORTED)}",))
    if not any(packages.get(name) for name in info.libraries):
        lacking = (info.libraries[0], f"pip install {info.libraries[0]}")
        (common if info.build_needs_library else run).append(lacking)
    if info.architectures and not any(card.architecture in info.architectures for card in cards):
        lacking = (f"a GPU of {', '.join(info.architectures)}", "use a machine that has one, with its driver")
        (common if info.build_gpu else run).append(lacking)
    run += [(name, RUN_REMEDY) for name in RUN_PACKAGES if not packages.get(name)]
    build += [(name, BUILD_REMEDY) for name in BUILD_PACKAGES if not packages.get(name)]
    problems = [*common, *run, *build]
    return BackendState(
        can_build=not common and not build,
        can_run=not common and not run,
        missing=tuple(name for name, _ in problems),
        remedy=tuple(remedy for _, remedy in problems),
    )


def describe() -> list[str]:
    """`examine` as lines of text."""
    cpu, memory = machine.cpu(), machine.memory()
    packages = {name: installed(name) for name in (*RUN_PACKAGES, *_LIBRARIES, *BUILD_PACKAGES)}
    cards = gpus()
    ok = "" if sys.version_info[:2] >= PYTHON_MIN else " (too old: 3.11 or later is needed)"
    total, free = (human_bytes(size) if size is not None else "unknown" for size in (memory.total, memory.available))
    lines = [
        f"{DISTRIBUTION} {VERSION} on Python {platform.python_version()}{ok}, {platform.platform()}",
        f"cpu       {cpu.model}, {cpu.usable} of {cpu.cores} cores usable; {' '.join(cpu.features) or 'no features'}",
        f"memory    {free} free of {total}",
        f"gpus      {', '.join(map(_card, cards)) or 'none'}",
        f"packages  {', '.join(f'{name} {version}' for name, version in packages.items() if version)}",
    ]
    for name, info in BACKENDS.items():
        found = state(info, packages, cards)
        lines.append(f"{name:<13} build: {_yes(found.can_build)}  run: {_yes(found.can_run)}")
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
    }


def _card(card: Gpu) -> str:
    return f"{card.name} ({card.architecture}, {human_bytes(card.memory)})"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
