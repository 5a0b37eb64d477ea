"""Session calls for rows of requests: timed, and failing only the requests in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import numpy as np

from runtime.errors import DSparkError, ServingError
from runtime.result import FinishReason
from runtime.sequence import Sequence as Running
from runtime.sessions.base import SeedRows, Session
from runtime.slots import SlotState
from runtime.stats import Recorder

_T = TypeVar("_T")
Finish = Callable[[int, FinishReason, DSparkError | None], None]


@dataclass(frozen=True)
class Live:
    """A row of a call: a running request, its slot, and what that holds."""

    request_id: int
    slot: int
    sequence: Running
    state: SlotState


class Calls:
    """The session as rounds see it.

    Args:
        session: makes the calls.
        recorder: is told what they took.
        finish: called with a request's id when it ends, the reason, and the error if it failed.

    Attributes:
        spent: seconds by stage since it was last cleared.
    """

    def __init__(self, session: Session, recorder: Recorder, finish: Finish) -> None:
        self.session = session
        self.recorder = recorder
        self.finish = finish
        self.spent: dict[str, float] = {}

    def run(self, stage: str, rows: Sequence[Live], call: Callable[[], _T]) -> _T | None:
        """Time a session call for `rows`; None if there are none, or if it raised: then they have failed."""
        if not rows:
            return None
        began = perf_counter()
        try:
            return call()
        except Exception as error:
            self.fail(rows, error)
            return None
        finally:
            seconds = perf_counter() - began
            self.spent[stage] = self.spent.get(stage, 0.0) + seconds
            self.recorder.spend(stage, seconds)

    def seed(self, rows: Sequence[Live]) -> int:
        """Move all tap rows that wait in these slots into their rings; how many."""
        windows = [row.state.seed_window() for row in rows]

        def seed() -> bool:
            start, count = ([getattr(w, name) for w in windows] for name in ("start", "count"))
            slot = [row.slot for row in rows]
            self.session.seed(SeedRows(np.array(start), np.array(count), np.array(slot)))
            return True

        if self.run("seed", rows, seed):
            for row in rows:
                row.state.seeded()
        return sum(window.count for window in windows)

    def fail(self, rows: Iterable[Live], error: Exception) -> None:
        """End requests with an error."""
        for row in rows:
            failure = ServingError(f"request {row.request_id}", "failed while it was served", found=error)
            failure.__cause__ = error
            self.finish(row.request_id, "error", failure)


def running(rows: Iterable[Live]) -> list[Live]:
    """Those that have not ended or failed since."""
    return [row for row in rows if row.sequence.finished is None]
