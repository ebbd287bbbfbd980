"""Locks of the state over a client's connection: `async with client.state.lock("line1/recipe")`."""

import asyncio
from collections.abc import Callable
from typing import Any

from babelbus.clients.jebp.calls import Calls, Stream
from babelbus.clients.jebp.connection import Link
from babelbus.clients.jebp.errors import ClientError, ConnectionLostError, LockLostError, RequestTimeoutError
from babelbus.errors import LocalProtocolError
from babelbus.protocols.jebp import state_messages as m


class _HeldStream(Stream):
    """The stream of a lock; tells its end while the lock is held."""

    def __init__(self, link: Link, parameters: object, ended: Callable[[ClientError], None]) -> None:
        self._tell = ended
        self.held = False
        super().__init__("state.lock", link, parameters)

    def lost(self, error: ClientError) -> None:
        """Handle the loss of the connection."""
        super().lost(error)
        self._tell_end(error)

    def failed(self, code: str, message: str, details: object) -> None:
        """Handle the server's error."""
        super().failed(code, message, details)
        if self.error is not None:
            self._tell_end(self.error)

    def _tell_end(self, error: ClientError) -> None:
        if self.held:
            self.held = False
            self._tell(error)


class Lock:
    """A lock of the state, see `State.lock`; `held` says whether it is ours at this moment."""

    def __init__(self, calls: Calls, key: str, timeout_seconds: float | None, *, reconnect: bool) -> None:
        self.key = key
        self._calls = calls
        self._timeout_seconds = timeout_seconds
        self._reconnect = reconnect
        self._stream: _HeldStream | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._error: LockLostError | None = None

    @property
    def held(self) -> bool:
        """Whether it is ours."""
        return self._stream is not None and self._stream.held

    async def acquire(self) -> None:
        """Wait for the lock; `release` it. A loss is not told then: look at `held`.

        Raises:
            LockedError: somebody else held it all the time.
            RequestTimeoutError: the server did not even say so, for `request_timeout_seconds` more.
            ClientError: there is no connection.
        """
        if self._stream is not None:
            raise LocalProtocolError(f"the lock of {self.key!r} is in use; make another one with `state.lock`")
        now = asyncio.get_running_loop().time
        deadline = None if self._timeout_seconds is None else now() + self._timeout_seconds
        self._error = None
        while True:
            left = None if deadline is None else max(deadline - now(), 0)
            link = await self._calls.link("state.lock", left if deadline is None else max(left or 0, 1))
            wait_ms = None if left is None else int(left * 1000)
            stream = _HeldStream(link, m.LockKey(self.key, wait_ms), self._lost)
            if left is not None:
                stream.expect_answer(left + self._calls.timeout_seconds)
            try:
                await stream.first()
            except (ConnectionLostError, RequestTimeoutError):
                if not self._reconnect:
                    raise
                if deadline is not None and now() >= deadline:
                    raise
                continue
            except BaseException:
                stream.close()
                raise
            stream.held = not stream.ended_now
            self._stream = stream
            if stream.error is not None:
                self._lost(stream.error)
            return

    def release(self) -> None:
        """Release the lock; without it, nothing happens."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.held = False
            stream.close()

    async def finish(self, raises: bool) -> None:
        """Release the lock at the end of a block of another thread.

        Raises:
            LockLostError: it was lost inside the block, and the block raises nothing itself.
        """
        self.release()
        lost, self._error = self._error, None
        if lost is not None and raises:
            raise lost

    async def __aenter__(self) -> "Lock":
        """Wait for the lock; see `acquire`."""
        await self.acquire()
        self._task = task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()
        if self._error is not None:
            self.release()
            raise self._error
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the lock.

        Raises:
            LockLostError: it was lost inside the block.
        """
        task, self._task = self._task, None
        self.release()
        lost, self._error = self._error, None
        if lost is None or task is None:
            return
        left = task.uncancel()
        if error is None or (isinstance(error, asyncio.CancelledError) and left <= self._cancelling):
            raise lost from error

    def _lost(self, error: ClientError) -> None:
        self._error = LockLostError(f"the lock of {self.key!r} was lost: {error}")
        self._error.__cause__ = error
        if self._task is not None:
            self._task.cancel()
