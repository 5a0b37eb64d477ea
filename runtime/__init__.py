"""The thin runtime: serve a bundle with speculative decoding, exactly.

>>> import runtime
>>> runtime.generate("engines/build/smollm2-135m", ["The capital of France is"], max_new_tokens=16)

Names are loaded when they are first used: importing the package takes no numpy and no inference library, so that the
command line can say which of them is missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.adaptive import AdaptivePolicy
    from runtime.aio import AsyncEngine, Stream
    from runtime.api import generate
    from runtime.distribution import TokenLogprob
    from runtime.engine import Engine, Handle
    from runtime.errors import (
        BackendUnavailable,
        BundleError,
        CheckpointError,
        DSparkError,
        ProfileError,
        QueueFull,
        RequestError,
        ServingError,
    )
    from runtime.policy import DraftPolicy, StaticPolicy
    from runtime.request import Request
    from runtime.result import Piece, Result, Stats
    from runtime.sampling import SamplingParams
    from runtime.scheduler import FifoScheduler
    from runtime.slots import SlotTable
    from runtime.stats import EngineStats

__all__ = [
    "AdaptivePolicy",
    "AsyncEngine",
    "BackendUnavailable",
    "BundleError",
    "CheckpointError",
    "DSparkError",
    "DraftPolicy",
    "Engine",
    "EngineStats",
    "FifoScheduler",
    "Handle",
    "Piece",
    "ProfileError",
    "QueueFull",
    "Request",
    "RequestError",
    "Result",
    "SamplingParams",
    "ServingError",
    "SlotTable",
    "StaticPolicy",
    "Stats",
    "Stream",
    "TokenLogprob",
    "generate",
]

_MODULES = {
    "runtime.adaptive": ("AdaptivePolicy",),
    "runtime.aio": ("AsyncEngine", "Stream"),
    "runtime.api": ("generate",),
    "runtime.distribution": ("TokenLogprob",),
    "runtime.engine": ("Engine", "Handle"),
    "runtime.errors": (
        "BackendUnavailable",
        "BundleError",
        "CheckpointError",
        "DSparkError",
        "ProfileError",
        "QueueFull",
        "RequestError",
        "ServingError",
    ),
    "runtime.policy": ("DraftPolicy", "StaticPolicy"),
    "runtime.request": ("Request",),
    "runtime.result": ("Piece", "Result", "Stats"),
    "runtime.sampling": ("SamplingParams",),
    "runtime.scheduler": ("FifoScheduler",),
    "runtime.slots": ("SlotTable",),
    "runtime.stats": ("EngineStats",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # a type checker sees the imports above, and so still finds names that don't exist

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
