"""A process that builds one engine: its job is JSON on stdin, what it has to say is JSON on stdout.

Each engine has a process of its own, for three reasons. Engines are built side by side. Where the library aborts, a
build ends with an error, and not without a word. And the library goes through tables in the order of addresses, which
shows in the engine's bytes: here they are the same each time, for the process starts without address randomisation,
and builds on a thread whose heap nothing has touched before.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from runtime.engine_records import EngineRecord
from runtime.errors import BackendUnavailable
from runtime.manifest import from_plain, to_plain

_SAME_ADDRESSES = 0x0040000  # ADDR_NO_RANDOMIZE, <sys/personality.h>
_ASK = 0xFFFFFFFF
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, <linux/prctl.h>
_ARENA_MAX = -8  # M_ARENA_MAX, <malloc.h>
_ARENAS = 64
_RESTARTED = "DSPARK_WORKER_RESTARTED"

_ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).resolve().parent.parent.parent),
    "PYTHONHASHSEED": "0",
    # numpy's: threads that start at some time or other take memory at some address or other.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Result:
    """What `builder.backends.EngineBuilt` says. Where the system doesn't let a process fix its addresses, the engine
    isn't reproducible."""

    record: EngineRecord
    seconds: float
    peak_memory: int
    reproducible: bool


class Workers:
    """Processes that build engines, of which none outlives this object's `close`."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        self._lock = threading.Lock()

    def run(self, job: object) -> Result:
        """Build what a `builder.backends.tensorrt_engine.Job` says; from any thread.

        Raises:
            BackendUnavailable: what the library refuses, or died of.
            OSError: the engine can't be written.
        """
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            process = subprocess.Popen(
                [sys.executable, "-m", "builder.backends.tensorrt_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**kept, **_ENVIRONMENT},
            )
            self._running.add(process)
        try:
            out, err = process.communicate(json.dumps(to_plain(job)).encode())
        finally:
            self._running.discard(process)
        return _result(process.returncode, out, err)

    def close(self) -> None:
        """Kill those that run."""
        with self._lock:
            self._closed = True
        for process in list(self._running):
            process.kill()


def _result(code: int, out: bytes, err: bytes) -> Result:
    try:
        said = json.loads(out)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        lines = err.decode(errors="replace").strip().splitlines()
        raise BackendUnavailable(
            "building an engine",
            f"the library's process died ({reason})",
            found=lines[-1] if lines else "no word",
            remedy="Run doctor, or report it with this line",
        )
    if "record" in said:
        return from_plain(Result, said, "a worker")
    if "errno" in said:
        raise OSError(said["errno"], said["problem"], said["where"])
    raise BackendUnavailable(**said)


def _fix_addresses() -> bool:
    """Start this process anew without address randomisation; False where the system doesn't allow it, as in some
    containers."""
    libc = ctypes.CDLL(None)
    persona = libc.personality(ctypes.c_ulong(_ASK))
    if persona & _SAME_ADDRESSES:
        return True
    if _RESTARTED in os.environ or libc.personality(ctypes.c_ulong(persona | _SAME_ADDRESSES)) < 0:
        return False
    os.environ[_RESTARTED] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "builder.backends.tensorrt_worker"])


def _build(data: bytes, reproducible: bool) -> dict[str, object]:
    from builder.backends.tensorrt_engine import Job, compile_engine
    from builder.report import peak_memory

    began = time.perf_counter()
    try:
        record = compile_engine(from_plain(Job, json.loads(data), "job"))
    except BackendUnavailable as error:
        names = ("where", "problem", "expected", "found", "remedy")
        return {name: getattr(error, name) for name in names}
    except OSError as error:
        return {"errno": error.errno, "problem": error.strerror, "where": error.filename}
    result = Result(record, time.perf_counter() - began, peak_memory(), reproducible)
    return {name: to_plain(getattr(result, name)) for name in ("record", "seconds", "peak_memory", "reproducible")}


def main() -> None:
    libc = ctypes.CDLL(None)
    reproducible = _fix_addresses()
    # Whoever waits for the engine is gone: so is the reason to build it.
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    data = sys.stdin.buffer.read()
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever the library prints
    # A heap of its own for each thread, however many threads there have been.
    libc.mallopt(_ARENA_MAX, _ARENAS)
    said: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: said.append(_build(data, reproducible)))
    thread.start()
    thread.join()
    if said:
        with os.fdopen(answer, "w") as file:
            json.dump(said[0], file)


if __name__ == "__main__":
    main()
