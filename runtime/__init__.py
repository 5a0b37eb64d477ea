"""The thin runtime: serve a bundle with speculative decoding, exactly.

>>> import runtime
>>> runtime.generate("engines/build/smollm2-135m", ["The capital of France is"], max_new_tokens=16)
"""

from runtime.api import generate
from runtime.engine import Engine, Handle
from runtime.errors import (
    BackendUnavailable,
    BundleError,
    CheckpointError,
    DSparkError,
    ProfileError,
    RequestError,
)
from runtime.request import Request, Result, Stats
from runtime.sampling import SamplingParams
from runtime.sequence import Piece

__all__ = [
    "BackendUnavailable",
    "BundleError",
    "CheckpointError",
    "DSparkError",
    "Engine",
    "Handle",
    "Piece",
    "ProfileError",
    "Request",
    "RequestError",
    "Result",
    "SamplingParams",
    "Stats",
    "generate",
]
