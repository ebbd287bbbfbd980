"""A thread with an event loop of its own for gRPC, and the way to the server's loop: many calls, one hop.

gRPC's library wakes its loop for every message. In a thread of its own that costs other protocols nothing but their
share of the interpreter; what comes and goes crosses in batches, each with one wake-up of the other loop.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from babelbus.core.receipt import Promise
from babelbus.errors import BabelbusError

P = TypeVar("P", bound=Promise)


class Side:
    """Work that one loop gets from the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._work: deque[Callable[[], None]] = deque()
        self._woken = False

    def do(self, work: Callable[[], None]) -> None:
        """Run something in the loop soon; called from the other thread."""
        self._work.append(work)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._woken = False  # first: what is added from now on wakes the loop again
        work = self._work
        while work:
            work.popleft()()


class Bridge:
    """The thread of gRPC; `server` is the side of the server's loop, `rpc` that of gRPC's."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.server = Side(loop)
        self.rpc_loop = type(loop)()  # the setting `server.uvloop` holds here too
        self.rpc = Side(self.rpc_loop)
        self._thread = threading.Thread(target=self._run, name="grpc", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.rpc_loop)
        self.rpc_loop.run_forever()

    async def call(self, begin: Callable[[], P]) -> P:
        """Begin something in the server's loop and wait, in gRPC's, until its promise is done; the promise is returned.

        Raises:
            BabelbusError: `begin` raised it, or it is the error of the promise.
        """
        future: asyncio.Future[P] = self.rpc_loop.create_future()

        def answer(promise: P) -> None:
            self.rpc.do(lambda: None if future.done() else future.set_result(promise))

        def work() -> None:
            try:
                begin().when_done(answer)
            except BabelbusError as error:
                failure = error
                self.rpc.do(lambda: None if future.done() else future.set_exception(failure))

        self.server.do(work)
        promise = await future
        if promise.error is not None:
            raise promise.error
        return promise

    async def run(self, coroutine: Any) -> Any:
        """Run a coroutine in gRPC's loop, and wait for it in the server's."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.rpc_loop))

    async def stop(self) -> None:
        """End the thread."""
        self.rpc_loop.call_soon_threadsafe(self.rpc_loop.stop)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self.rpc_loop.close()
