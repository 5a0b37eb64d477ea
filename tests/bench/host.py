"""Time outside the inference library: what a round costs in Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from runtime import Engine, Request
from tests.bench.arithmetic import summary
from tests.bench.decoding import options_of, run
from tests.bench.plan import BenchPrompt, Plan


@dataclass
class CallLog:
    """Calls since the last `clear`: what was called, how wide, how long."""

    calls: list[tuple[str, int, float]] = field(default_factory=list)

    def seconds(self) -> float:
        return sum(call[2] for call in self.calls)


class _Timed:
    """Stands before an object and times some of its methods."""

    def __init__(self, inner: Any, names: Sequence[str], log: CallLog) -> None:
        self._inner, self._names, self._log = inner, frozenset(names), log

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name not in self._names:
            return method

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            result = method(*args, **kwargs)
            seconds = perf_counter() - began
            wide = kwargs["uniforms"] if name == "draft" else args[0]
            self._log.calls.append((name, wide.shape[1] if hasattr(wide, "shape") and wide.ndim > 1 else 0, seconds))
            return result

        return timed


@contextmanager
def logged_session(engine: Engine) -> Iterator[CallLog]:
    """Log the engine's calls into its session."""
    log, session = CallLog(), engine._session
    engine._session = _Timed(session, ("prefill", "seed", "verify", "draft"), log)
    try:
        yield log
    finally:
        engine._session = session


@contextmanager
def logged_library(engine: Engine) -> Iterator[CallLog]:
    """Log the session's calls into the inference library alone. Raises AttributeError for a session of another make."""
    session: Any = engine._session
    log, engines = CallLog(), session._engines
    session._engines = {key: _Timed(item, ("run_with_iobinding",), log) for key, item in engines.items()}
    try:
        yield log
    finally:
        session._engines = engines


def measure_host(engine: Engine, prompts: Sequence[BenchPrompt], plan: Plan) -> dict[str, object]:
    """Milliseconds a round outside the library, in three ways: the engine's clock; the wall between pieces less the
    calls into the session; the same less the calls into the library alone, the session's own Python counted as host.
    """
    result: dict[str, object] = {}
    for mode in ("plain", "default"):
        options = options_of(engine, mode)
        run(engine, prompts[0], 24, mode, **options)
        clock = [item for p in prompts if (item := run(engine, p, plan.tokens, mode, **options)) is not None]
        result[mode] = {
            "engine_clock_ms": summary(1e3 * item.host_seconds / item.rounds for item in clock),
            "outside_session_ms": summary(_outside(engine, prompts, plan, mode, logged_session)),
            "outside_library_ms": summary(_outside(engine, prompts, plan, mode, logged_library)),
        }
    return result


def _outside(engine: Engine, prompts: Sequence[BenchPrompt], plan: Plan, mode: str, logged: Any) -> list[float]:
    """Milliseconds of each round outside the logged calls."""
    outside: list[float] = []
    with logged(engine) as log:
        for prompt in prompts:
            options = options_of(engine, mode)
            handle = engine.submit(Request(prompt_ids=prompt.ids, max_new_tokens=plan.tokens, **options))
            pieces = engine.stream(handle)
            next(pieces)  # the prefill
            log.calls.clear()
            began = perf_counter()
            for _ in pieces:
                now = perf_counter()
                if log.calls:
                    outside.append(1e3 * (now - began - log.seconds()))
                log.calls.clear()
                began = perf_counter()
            engine.result(handle)
    return outside
