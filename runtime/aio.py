"""The engine for asyncio: many tasks submit and listen, one worker thread steps.

Only the worker thread moves the engine, so that nothing in it needs a lock. A turn of it takes what came in since the
last one, drops what nobody listens to any more, steps once, and leaves what came of that for the loop to hand out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from typing import Any, TypeVar

from runtime.bundle import Bundle
from runtime.engine import Engine, Handle
from runtime.errors import RequestError, ServingError
from runtime.request import Request
from runtime.result import Piece, Result
from runtime.stats import EngineStats
from runtime.text import Tokenizer

_T = TypeVar("_T")


class AsyncEngine:
    """Serves a bundle to the tasks of one event loop.

    >>> async with AsyncEngine("engines/build/smollm2-135m") as engine:
    ...     async for piece in engine.stream(request):
    ...         print(piece.text, end="")

    Args:
        engine: a bundle's directory, or an `Engine`, which then belongs to this object: nobody else may use it.
        options: `Engine`'s keywords, for a directory.

    Raises:
        RequestError: an `Engine` together with options.
    """

    def __init__(self, engine: str | PathLike[str] | Engine, **options: Any) -> None:
        if isinstance(engine, Engine) and options:
            raise RequestError(
                "engine", "is open already, so takes no options", found=", ".join(options), remedy="Give them to Engine"
            )
        self._opens: Callable[[], Engine] | None = lambda: (
            engine if isinstance(engine, Engine) else Engine(engine, **options)
        )
        self._opened: Engine | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="dspark-engine")
        self._driver: asyncio.Task[None] | None = None
        # The loop appends to the first and takes from the last, the worker the other way round, and has `_live` alone.
        self._arrived: deque[_Call] = deque()
        self._live: dict[Handle, _Call] = {}
        self._events: deque[tuple[_Call, _Event]] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._failure: Exception | None = None

    async def open(self) -> None:
        """Load the bundle, in the worker thread. ``async with`` does it, and closes at the end.

        Raises:
            BundleError, BackendUnavailable, RequestError: as `Engine` does; this object is closed then.
        """
        if self._opens is None:
            raise RequestError("engine", "was opened or closed before", remedy="Make a new AsyncEngine")
        opens, self._opens = self._opens, None
        try:
            self._opened = await self._work(opens)
        except BaseException:
            self._closed = True
            self._worker.shutdown(wait=False)
            raise
        self._driver = asyncio.create_task(self._drive(self._opened), name="dspark-engine")

    @property
    def bundle(self) -> Bundle:
        """What is served."""
        return self._engine.bundle

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Makes prompts of text and messages; None for a bundle without."""
        return self._engine.tokenizer

    def stream(self, request: Request) -> Stream:
        """The pieces of a request. It is submitted when they are first asked for.

        A full queue is an error at once, not a wait: a server must know that it is overloaded while it can still
        refuse. Who would rather wait holds a semaphore of as many permits as may wait and run.

        Raises, from the iteration:
            RequestError: a request that this engine can't serve, or a closed engine.
            QueueFull: as many as may are waiting already.
            ServingError: the request failed, or the engine failed or was closed before its end.
        """
        self._require_open()
        call = _Call(request)
        return Stream(call, self._pieces(call))

    async def run(self, request: Request) -> Result:
        """The result of a request; errors as of `stream`. Cancelling the task that awaits it cancels the request."""
        stream = self.stream(request)
        async for _ in stream:
            pass
        return stream.result

    async def drain(self) -> None:
        """Wait until no request is waiting or running."""
        self._require_open()
        await self._idle.wait()

    def stats(self) -> EngineStats:
        """As `Engine.stats`. A step that is under way may be counted in part."""
        return self._engine.stats()

    async def close(self) -> None:
        """Release engines and state, after the step that is under way. Requests that still run end with a ServingError:
        `drain` first to let them finish. Does nothing the second time."""
        self._opens, self._closed = None, True
        self._wake.set()
        if self._driver is not None:
            await asyncio.shield(self._driver)  # it closes, even for a caller who is cancelled meanwhile

    async def __aenter__(self) -> AsyncEngine:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _engine(self) -> Engine:
        if self._opened is None:
            raise RequestError("engine", "is not open yet", remedy="Use it in `async with`, or await open()")
        return self._opened

    def _require_open(self) -> Engine:
        if self._closed:
            raise RequestError(
                "engine", "is closed", expected="an open engine", found=self._failure, remedy="Open a new one"
            ) from self._failure
        return self._engine

    async def _pieces(self, call: _Call) -> AsyncGenerator[Piece]:
        self._require_open()
        self._arrived.append(call)
        self._idle.clear()
        self._wake.set()
        try:
            while isinstance(event := await call.events.get(), Piece):
                yield event
            if isinstance(event, Exception):
                raise event
            call.result = event
        finally:
            call.left = True
            self._wake.set()

    async def _drive(self, engine: Engine) -> None:
        """Have the worker run while there is work; sleep while there is none."""
        loop = asyncio.get_running_loop()
        try:
            while await self._wake.wait() and not self._closed:
                self._wake.clear()
                await self._work(lambda: self._run(engine, loop))
                if not self._wake.is_set():
                    self._idle.set()
        except Exception as error:
            self._failure = error
        finally:
            self._closed = True
            # If this task was cancelled, a turn is still under way: closing waits behind it.
            closing = self._worker.submit(engine.close)
            self._worker.shutdown(wait=False)
            try:
                await asyncio.shield(asyncio.wrap_future(closing))
            finally:
                self._end()

    def _run(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        """In the worker thread: turn after turn while there is work. The loop hands out while the next step runs."""
        while True:
            self._turn(engine)
            if self._events:
                loop.call_soon_threadsafe(self._hand_out)
            if self._closed or (engine.idle and not self._arrived):
                return

    def _turn(self, engine: Engine) -> None:
        """In the worker thread: one step, and what it brings each request that somebody listens to."""
        while self._arrived:
            call = self._arrived.popleft()
            if not call.left:
                try:
                    self._live[engine.submit(call.request)] = call
                except Exception as error:
                    self._events.append((call, error))
        for handle in [handle for handle, call in self._live.items() if call.left]:
            engine.forget(handle)
            del self._live[handle]
        engine.step()
        for handle, call in list(self._live.items()):
            piece = engine.take(handle)
            if piece is not None:
                self._events.append((call, piece))
            if engine.finished(handle) is not None:
                del self._live[handle]
                self._events.append((call, _outcome(engine, handle)))

    def _hand_out(self) -> None:
        while self._events:
            call, event = self._events.popleft()
            call.events.put_nowait(event)

    def _end(self) -> None:
        """Tell everyone who still listens that there will be no more."""
        self._hand_out()
        for call in (*self._live.values(), *self._arrived):
            if self._failure is None:
                error = ServingError("engine", "was closed before the request's end", remedy="Drain it before closing")
            else:
                error = ServingError("engine", "failed in a step", found=self._failure, remedy="Open a new one")
                error.__cause__ = self._failure
            call.events.put_nowait(error)
        self._live.clear()
        self._arrived.clear()
        self._idle.set()

    async def _work(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


class Stream:
    """The pieces of a request as they come, to iterate over once.

    A loop that is left early, by ``break`` or by its task's cancellation, cancels the request once the stream is
    dropped; ``contextlib.aclosing(stream)`` does so at once.
    """

    def __init__(self, call: _Call, pieces: AsyncGenerator[Piece]) -> None:
        self._call = call
        self._pieces = pieces

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Piece:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Cancel the request if it still runs; its slot is free for the next step."""
        await self._pieces.aclose()

    @property
    def result(self) -> Result:
        """The result, once the last piece has come.

        Raises:
            RequestError: it hasn't.
        """
        if self._call.result is None:
            raise RequestError("stream", "has no result yet", remedy="Read it to its end first")
        return self._call.result


class _Call:
    """A request and who listens: `events` are its pieces and, last, its result or error. `left`: nobody listens now."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.events: asyncio.Queue[_Event] = asyncio.Queue()
        self.result: Result | None = None
        self.left = False


_Event = Piece | Result | Exception


def _outcome(engine: Engine, handle: Handle) -> Result | Exception:
    try:
        return engine.result(handle)
    except Exception as error:
        return error
