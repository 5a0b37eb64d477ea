"""Sessions, one an inference back end, behind `runtime.sessions.base.Session`; imported only when a bundle needs it."""

from __future__ import annotations

from pathlib import Path

from runtime.errors import BackendUnavailable
from runtime.manifest import Manifest
from runtime.sessions.base import Session

BACKENDS = ("ort-cpu",)


def open_session(path: Path, manifest: Manifest, threads: int | None = None) -> Session:
    """Load a checked bundle's engines and allocate its state.

    Raises:
        BackendUnavailable: a back end that this runtime doesn't have.
        BundleError: engines that the library refuses.
    """
    if manifest.backend.name not in BACKENDS:
        raise BackendUnavailable(
            path,
            "this runtime has no such back end",
            expected=", ".join(BACKENDS),
            found=manifest.backend.name,
            remedy="Upgrade the runtime, or rebuild the bundle with another --backend",
        )
    from runtime.sessions.ort import OrtSession

    return OrtSession(path, manifest, threads)
