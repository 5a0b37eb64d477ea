"""What every back end's session asks of a call before it runs it."""

from __future__ import annotations

from runtime.errors import RequestError
from runtime.manifest import Limits
from runtime.sessions.base import DraftRows


def smallest_batch(limits: Limits, rows: int) -> int:
    """The smallest fixed batch that holds so many rows. Raises RequestError when none does."""
    for batch in limits.batches:
        if batch >= rows:
            return batch
    raise RequestError("batch", "no engine holds so many rows", expected=f"<= {limits.batches[-1]}", found=rows)


def check_draft(limits: Limits, rows: DraftRows) -> None:
    """Refuse a draft that can't be, before anything is written.

    Raises:
        RequestError: a start ≤ 0, or more new tap rows than a round leaves.
    """
    if (rows.start <= 0).any():
        raise RequestError(
            "start_pos",
            "a draft needs committed tokens before the bonus token",
            expected="> 0",
            found=int(rows.start.min()),
        )
    most = limits.block_size + 1
    if (rows.new_len > most).any():
        raise RequestError(
            "new_len", "more tap rows than a round leaves", expected=f"0 … {most}", found=int(rows.new_len.max())
        )
