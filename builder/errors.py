"""The runtime's error family, re-exported: builder and runtime raise the same classes."""

from runtime.errors import (
    BackendUnavailable,
    BundleError,
    CheckpointError,
    DSparkError,
    ProfileError,
    RequestError,
)

__all__ = [
    "BackendUnavailable",
    "BundleError",
    "CheckpointError",
    "DSparkError",
    "ProfileError",
    "RequestError",
]
