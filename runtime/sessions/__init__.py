"""Sessions: one inference back end each behind `runtime.sessions.base.Session`, imported when a bundle needs it."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from runtime.manifest import Manifest
from runtime.sessions.base import Session

# ONNX Runtime's wheels write a device id and a queue of events under the home directory when they are imported. A
# runtime for appliances leaves nothing behind; who wants them can set it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

SESSIONS = {"ort-cpu": "runtime.sessions.ort:OrtSession", "ort-cuda": "runtime.sessions.ort_cuda:OrtCudaSession"}
"""Back end to its session class; the names are the supported ones of `runtime.libraries`."""


def open_session(path: Path, manifest: Manifest, threads: int | None = None) -> Session:
    """Load the engines of a bundle that `open_bundle` and `check_machine` have passed, and allocate its state.

    Raises:
        BundleError: engines that the library refuses.
    """
    module, name = SESSIONS[manifest.backend.name].split(":")
    session: Session = getattr(import_module(module), name)(path, manifest, threads)
    return session
