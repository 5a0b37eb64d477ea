"""What the figures were measured on."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("numpy", "onnxruntime", "onnx", "torch", "transformers", "tokenizers", "gguf")


def describe(root: Path) -> dict[str, object]:
    """The machine, the versions and the state of the repository. `load` tells how busy others kept it."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": cores(),
        "logical_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(root),
    }


def cores() -> int:
    """Physical cores, as ONNX Runtime counts them for its threads."""
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _cpu_model() -> str:
    """The model's name and, where Linux gives them, family, model and the vector extensions that matter to a matmul."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor()
    lines = info.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    parts = (line.partition(":") for line in lines)
    fields = {name.strip(): value.strip() for name, _, value in parts}
    flags = set(fields.get("flags", "").split())
    known = [flag for flag in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile") if flag in flags]
    place = f"family {fields.get('cpu family')} model {fields.get('model')}"
    return f"{fields.get('model name', platform.machine())} ({place}; {' '.join(known)})"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit(root: Path) -> str | None:
    """The commit, with ``+`` where the tree differs from it; None outside git."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
        status = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    if head.returncode != 0:
        return None
    return head.stdout.strip() + ("+" if status.stdout.strip() else "")
