"""Time outside the inference library: what a round costs in Python, for one request and for a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from runtime import Engine, Request
from runtime.sessions.base import DraftRows, TargetRows
from runtime.stats import EngineStats
from tests.bench.arithmetic import summary
from tests.bench.decoding import forget_prompts, options_of, run
from tests.bench.plan import BenchPrompt, Plan

_HOST_STAGES = ("schedule", "host")
"""What the engine's clock counts outside its session; its other stages are calls into that."""


@dataclass
class CallLog:
    """Calls since the last `clear`: what was called, how wide (ids of a target call, drafts of a draft call, else 0),
    how long.
    """

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
            self._log.calls.append((name, _width(args[0]), seconds))
            return result

        return timed


def _width(rows: object) -> int:
    if isinstance(rows, TargetRows):
        return len(rows.ids)
    return rows.uniforms.shape[1] if isinstance(rows, DraftRows) else 0


@contextmanager
def logged_session(engine: Engine) -> Iterator[CallLog]:
    """Log the engine's calls into its session."""
    calls: Any = engine._calls
    log, session = CallLog(), calls.session
    calls.session = _Timed(session, ("prefill", "seed", "verify", "draft", "copy"), log)
    try:
        yield log
    finally:
        calls.session = session


@contextmanager
def logged_library(engine: Engine) -> Iterator[CallLog]:
    """Log the session's calls into the inference library alone. Raises AttributeError for a session of another make."""
    session: Any = engine._session
    log, engines = CallLog(), tuple(session._engines.values())
    libraries = [item._session for item in engines]
    for item, library in zip(engines, libraries, strict=True):
        item._session = _Timed(library, ("run_with_iobinding",), log)
    try:
        yield log
    finally:
        for item, library in zip(engines, libraries, strict=True):
            item._session = library


def measure_host(engine: Engine, prompts: Sequence[BenchPrompt], plan: Plan) -> dict[str, object]:
    """Milliseconds a round outside the library, in three ways: the engine's clock; the wall between pieces less the
    calls into the session; the same less the calls into the library alone, the session's own Python counted as host.
    """
    result: dict[str, object] = {}
    for mode in ("plain", "fixed", "adaptive"):
        options = options_of(engine, mode)
        run(engine, prompts[0], 24, mode, **options)
        clock = [item for p in prompts if (item := run(engine, p, plan.tokens, mode, **options)) is not None]
        result[mode] = {
            "engine_clock_ms": summary(1e3 * item.host_seconds / item.rounds for item in clock),
            "outside_session_ms": summary(_outside(engine, prompts, plan, mode, logged_session)),
            "outside_library_ms": summary(_outside(engine, prompts, plan, mode, logged_library)),
        }
    return result


def measure_steps(
    engines: Mapping[str, Engine], prompts: Sequence[BenchPrompt], batch: int, steps: int
) -> dict[str, object]:
    """Milliseconds of a step in which `batch` requests decode and none is prefilled, by mode, each on the engine given
    for it: ``schedule`` and ``host`` by the engine's clock, ``session`` what calls into the session take outside of the
    library, ``library``, and ``outside``, the ``step`` without the library.
    """
    result: dict[str, object] = {}
    for mode, engine in engines.items():
        forget_prompts(engine)
        options = options_of(engine, mode)
        # More tokens than the steps can emit: nobody may finish before.
        tokens = steps * (engine.bundle.manifest.limits.block_size + 1)
        requests = [
            Request(prompt_ids=p.ids, max_new_tokens=tokens, ignore_eos=True, **options) for p in prompts[:batch]
        ]
        handles = [engine.submit(request) for request in requests]
        made: list[dict[str, float]] = []
        with logged_library(engine) as log:
            for _ in range(steps):
                log.calls.clear()
                before, began = engine.stats(), perf_counter()
                engine.step()
                wall, after = perf_counter() - began, engine.stats()
                if after.rounds - before.rounds == batch and after.seconds.prefill == before.seconds.prefill:
                    made.append(_step_ms(before, after, wall, log.seconds()))
        for handle in handles:
            engine.forget(handle)
        if not made:
            raise RuntimeError(f"no step of {steps} decoded {batch} requests")
        result[mode] = {part: summary(step[part] for step in made) for part in made[0]}
    return {"batch": batch, "modes": result}


def _step_ms(before: EngineStats, after: EngineStats, wall: float, library: float) -> dict[str, float]:
    old = asdict(before.seconds)
    spent = {stage: seconds - old[stage] for stage, seconds in asdict(after.seconds).items()}
    calls = sum(seconds for stage, seconds in spent.items() if stage not in _HOST_STAGES)
    parts = {stage: spent[stage] for stage in _HOST_STAGES}
    parts |= {"session": calls - library, "library": library, "outside": wall - library, "step": wall}
    return {part: 1e3 * seconds for part, seconds in parts.items()}


def _outside(engine: Engine, prompts: Sequence[BenchPrompt], plan: Plan, mode: str, logged: Any) -> list[float]:
    """Milliseconds of each round outside the logged calls."""
    outside: list[float] = []
    with logged(engine) as log:
        for prompt in prompts:
            forget_prompts(engine)
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
