"""The blocking twin of a client for asyncio: its event loop in a thread of its own, for calls from any thread.

    class BlockingClient(Twin[Client]):
        publish = blocking(Client.publish)      # the same arguments, result and errors, without `await`
        follow = streaming(Client.follow)       # an async generator becomes a generator

The methods keep signature and docstring of the client's own, for type checkers and for `help`.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from functools import wraps
from types import AsyncGeneratorType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from babelbus.errors import BabelbusError

A = TypeVar("A", covariant=True)
B = TypeVar("B")
T = TypeVar("T")
P = ParamSpec("P")


class _End:
    """Stands behind the last item of an iteration."""


class Portal:
    """A thread with an event loop. `refuse` makes the error of calls while it is not open."""

    def __init__(self, name: str, refuse: Callable[[], BabelbusError]) -> None:
        self._refuse = refuse
        self._lock = threading.Lock()  # so that no call reaches a loop that is about to end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started: Future[asyncio.AbstractEventLoop] = Future()

    def _run(self) -> None:
        async def until_the_end() -> None:
            self._end = asyncio.Event()
            self._started.set_result(asyncio.get_running_loop())
            await self._end.wait()

        try:
            asyncio.run(until_the_end())  # cancels running tasks and closes generators when it ends
        except OSError as error:  # no descriptors are left for a loop
            self._started.set_exception(error)

    def open(self) -> None:
        """Start the thread; a portal opens once."""
        if self._thread.ident is not None:
            raise self._refuse()
        self._thread.start()
        self._loop = self._started.result()

    def close(self) -> None:
        """Stop the thread: waiting calls of other threads are refused, and all later ones."""
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is None:
                return
            loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    @property
    def is_open(self) -> bool:
        """Whether calls are taken."""
        return self._loop is not None

    def post(self, callback: Callable[[], object]) -> None:
        """Call a function in the loop, before all calls that follow, and return at once."""
        with self._lock:
            if self._loop is None:
                raise self._refuse()
            self._loop.call_soon_threadsafe(callback)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; an interrupt (Ctrl-C) cancels the coroutine."""
        if threading.get_ident() == self._thread.ident:
            coroutine.close()
            raise RuntimeError("a blocking client was called from its own callback, which would wait for itself")
        with self._lock:
            if self._loop is None:
                coroutine.close()
                raise self._refuse()
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            if self.is_open:
                raise
            raise self._refuse() from None  # closed while this call waited
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yield the values of an async generator, and close it when the caller stops."""
        assert isinstance(items, AsyncGeneratorType)

        async def step() -> T | _End:
            return await anext(items, _End())

        async def finish() -> None:
            while items.ag_running:  # noqa: ASYNC110 - a step that an interrupt cancelled may not have ended yet
                await asyncio.sleep(0)
            await items.aclose()

        try:
            while not isinstance(item := self.call(step()), _End):
                yield item
        finally:
            if self.is_open:
                self.call(finish())


class Twin(Generic[A]):
    """An object of an asynchronous client, and the portal to its loop."""

    def __init__(self, portal: Portal, twin: A) -> None:
        self._portal = portal
        self._twin = twin


def building(make: Callable[P, A]) -> Callable[[Callable[[B, A], None]], Callable[Concatenate[B, P], None]]:
    """Return a decorator for `__init__(self, twin)`: the arguments are those of `make`, which makes the twin."""

    def decorate(begin: Callable[[B, A], None]) -> Callable[Concatenate[B, P], None]:
        def init(self: B, /, *args: P.args, **kwargs: P.kwargs) -> None:
            begin(self, make(*args, **kwargs))

        return wraps(make)(init)

    return decorate


def blocking(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Twin[A], P], T]:
    """Return the blocking form of a method."""

    @wraps(method)
    def call(self: Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._portal.call(method(self._twin, *args, **kwargs))

    return call


def streaming(
    method: Callable[Concatenate[A, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Twin[A], P], Generator[T, None, None]]:
    """Return the blocking form of a method that returns an async generator."""

    @wraps(method)
    def iterate(self: Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return self._portal.iterate(method(self._twin, *args, **kwargs))

    return iterate


def opening(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, B]], face: Callable[[Portal, B], T]
) -> Callable[Concatenate[Twin[A], P], T]:
    """Return the blocking form of a method whose result has a blocking form, `face`."""

    @wraps(method)
    def call(self: Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return face(self._portal, self._portal.call(method(self._twin, *args, **kwargs)))

    return call
