"""A part of a bench: measured, or said to have failed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any


def measure_part(name: str, part: Callable[[], Mapping[str, object]]) -> Mapping[str, Any]:
    """The part's result, or its error: what one part lacks (memory, a package) must not cost the others' numbers."""
    print(f"{name} …", flush=True)
    began = perf_counter()
    try:
        result = part()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    print(f"{name}: {perf_counter() - began:.0f} s", flush=True)
    return result
