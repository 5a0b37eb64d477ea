"""How both command lines end: a user's mistake is one line on stderr and exit code 1, never a traceback."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from runtime.errors import BackendUnavailable, DSparkError, MemoryShortage

EXIT_ERROR, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 130, 143

EXIT_DIFFERS, EXIT_MEMORY, EXIT_MACHINE = 3, 4, 5
"""Of `validate`, for automation: a stage differs, too little memory is free, or the machine lacks the library, GPU or
driver."""
VALIDATE_CODES: Mapping[type[BaseException], int] = {MemoryShortage: EXIT_MEMORY, BackendUnavailable: EXIT_MACHINE}
VALIDATE_HELP = (
    f"Exit codes: 0 passed; {EXIT_ERROR} the bundle can't be read or served; 2 wrong usage; {EXIT_DIFFERS} a stage "
    f"differs; {EXIT_MEMORY} too little memory is free; {EXIT_MACHINE} the machine lacks the library, GPU or driver. "
    "What was timed never changes them."
)


class Terminated(BaseException):
    """SIGTERM came (inside `terminable`)."""


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise Terminated inside the block, so that the clean-up of what is half-done runs.

    The handler before is restored. Signals that are ignored stay so, and other threads than the main one can't change
    them.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before in (signal.SIG_IGN, None) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut the clean-up short
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def guarded(
    command: Callable[[], int | None], extra: str, codes: Mapping[type[BaseException], int] | None = None
) -> int:
    """Run `command` and return the exit code; errors become one line on stderr (``DSPARK_DEBUG=1`` shows the
    traceback).

    `extra` is the optional dependency set that brings a package found to be missing (empty: the base installation).
    `codes` are exit codes of classes of errors; others have 1.
    """
    debug = os.environ.get("DSPARK_DEBUG", "") not in ("", "0")
    try:
        return command() or 0
    except BrokenPipeError:
        # The reader (head, less) went away; point stdout elsewhere so that the interpreter's last flush doesn't
        # complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Terminated:
        print("terminated", file=sys.stderr)
        return EXIT_TERMINATED
    except (DSparkError, OSError, ImportError, MemoryError) as error:
        if debug:
            raise
        line = describe(error, extra)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return next((code for kind, code in (codes or {}).items() if isinstance(error, kind)), EXIT_ERROR)


def describe(error: BaseException, extra: str) -> str | None:
    """The one line for an error that a user can mend, or None for one that is a fault of the program."""
    if isinstance(error, DSparkError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"{where}the disk is full; nothing was changed. Free some space, or choose another --out"
        return f"{where}{error.strerror or ' '.join(str(error).split()) or type(error).__name__}"
    if isinstance(error, MemoryError):
        return "out of memory. Free some memory, or choose a smaller --batch, --max-seq-len or --window"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith(("builder", "runtime")):
        package = f".[{extra}]" if extra else "."
        return f"{error.name.partition('.')[0]} is not installed. In the project's folder: pip install '{package}'"
    return None
