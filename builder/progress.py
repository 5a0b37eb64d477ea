"""How a build shows its progress: a live line on a terminal, plain lines elsewhere. Both go to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from builder.build import Progress as Listener
from builder.build import StageEvent


@contextmanager
def reporter() -> Iterator[Listener]:
    """A listener for `builder.build.build`, shown while the block runs."""
    if not sys.stderr.isatty():
        yield PlainReporter()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        _LeftColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield TerminalReporter(bar)


class PlainReporter:
    """One line a stage."""

    def stage(self, event: StageEvent) -> None:
        print(
            f"[{event.index + 1}/{event.count}] {event.name} (about {event.left:.0f} s left)",
            file=sys.stderr,
            flush=True,
        )

    def warning(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)


class TerminalReporter:
    """One live line: the stage, a bar over the estimated time, and the time left, which counts down within a stage."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=None)

    def stage(self, event: StageEvent) -> None:
        description = f"[{event.index + 1}/{event.count}] {event.name}"
        total = event.elapsed + event.left
        self._bar.update(self._task, description=description, total=total, completed=event.elapsed)

    def warning(self, text: str) -> None:
        self._bar.console.print("warning:", text, style="yellow", markup=False, highlight=False, soft_wrap=True)


class _LeftColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        if task.total is None or task.elapsed is None:
            return Text("")
        return Text(f"about {max(task.total - task.elapsed, 0):.0f} s left")
