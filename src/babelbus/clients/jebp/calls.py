"""Calls and streams of jebp/1.2, as the families of methods use them: groups, live events, requests, state.

    calls = Calls(keeper.get, timeout_seconds=30, resend=True)
    names = await calls.call("methods", ListMethods(), list[str], safe=True)
    async with calls.stream("watch", Watch("plant/#")) as stream:
        async for body in stream: ...

A lost connection: a call that is `safe` is sent again; any other call raises `OutcomeUnknownError`. A stream raises
`ConnectionLostError` to its owner, who opens a new one.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from math import inf
from typing import Self, TypeVar

import msgspec

from babelbus.clients.jebp.connection import Link
from babelbus.clients.jebp.errors import (
    ClientError,
    ConnectionLostError,
    OutcomeUnknownError,
    RequestError,
    RequestTimeoutError,
    UnsupportedByServerError,
    call_error,
)
from babelbus.clients.jebp.requests import GetLink
from babelbus.errors import RemoteProtocolError
from babelbus.protocols.jebp.messages import CALL, Data

log = logging.getLogger(__name__)

T = TypeVar("T")
MINOR_MIN = 2
"""The first minor version of jebp that has calls."""
_encode = msgspec.msgpack.Encoder().encode


def encode_opening(method: str, parameters: object) -> bytes:
    """Return the body that opens a call."""
    return _encode((method, parameters))


class _Answer:
    """The receiver of a call with one answer."""

    __slots__ = ("deadline", "future", "method")

    def __init__(self, method: str, future: "asyncio.Future[Data]", deadline: float) -> None:
        self.method = method
        self.future = future
        self.deadline = deadline

    def item(self, body: Data) -> None:
        raise RemoteProtocolError(f"the server sent an item of {self.method}, which has one answer")

    def ended(self, result: Data) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def failed(self, code: str, message: str, details: object) -> None:
        if not self.future.done():
            self.future.set_exception(call_error(self.method, code, message, details))

    def lost(self, error: ClientError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Stream:
    """An open stream: `async for body in stream`, `send` for messages to the server, `close` to end it.

    Subclass it and override `item` to look at the items as they come, instead of one by one.

    Attributes:
        result: the body of the server's end, `None` before.
        error: why it ended otherwise.
    """

    deadline = inf
    """Loop time after which a silent server ends the stream; `expect_answer` sets it, the next item removes it."""

    def __init__(self, method: str, link: Link, parameters: object) -> None:
        self.method = method
        self.result: Data | None = None
        self.error: ClientError | None = None
        self.items: deque[Data] = deque()
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[asyncio.Future[None], None] = {}  # in order
        self._number = link.open_call(encode_opening(method, parameters), self)

    @property
    def ended_now(self) -> bool:
        """Whether nothing more comes."""
        return self.result is not None or self.error is not None

    # -- the receiver ------------------------------------------------------------------------------------------------

    def item(self, body: Data) -> None:
        """Append an item."""
        self.deadline = inf
        self.items.append(body)
        self.wake()

    def ended(self, result: Data) -> None:
        """Handle the server's end."""
        self.result = result
        self.wake()

    def failed(self, code: str, message: str, details: object) -> None:
        """Handle the server's error."""
        self.error = call_error(self.method, code, message, details)
        self.wake()

    def lost(self, error: ClientError) -> None:
        """Handle the loss of the connection, or a server that did not answer in time."""
        self.error = RequestTimeoutError(f"{self.method}: {error}") if isinstance(error, RequestTimeoutError) else error
        self.wake()

    def wake(self) -> None:
        """Resume those that wait for a change."""
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    # -- the owner ---------------------------------------------------------------------------------------------------

    def expect_answer(self, seconds: float) -> None:
        """End the stream with `RequestTimeoutError` if nothing comes for so many seconds."""
        self.deadline = self._loop.time() + seconds

    async def changed(self) -> None:
        """Wait until something comes."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)  # a caller that gives up leaves nothing behind

    def send(self, message: object) -> None:
        """Send a message in msgpack; it leaves with all of this turn."""
        self._link.send_more(self._number, _encode(message))

    async def first(self) -> Data:
        """Return the first item, by which many methods say how they began.

        Raises:
            ClientError: the stream ended before.
        """
        async for body in self:
            return body
        raise ConnectionLostError(f"{self.method}: the server ended the stream at once")

    def __aiter__(self) -> AsyncIterator[Data]:
        return self

    async def __anext__(self) -> Data:
        while True:
            if self.items:
                return self.items.popleft()
            if self.error is not None:
                raise self.error
            if self.result is not None:
                raise StopAsyncIteration
            await self.changed()

    async def read_all(self, timeout_seconds: float) -> list[Data]:
        """Return all items, when the server has ended the stream.

        Raises:
            RequestTimeoutError: nothing came for `timeout_seconds`.
            ClientError: the stream ended before.
        """
        items = []
        self.expect_answer(timeout_seconds)
        async for body in self:
            items.append(body)
            self.expect_answer(timeout_seconds)
        return items

    def close(self) -> None:
        """End the stream; what comes meanwhile is dropped."""
        if not self.ended_now:
            self._link.cancel_call(self._number)
            self.result = b""
            self.wake()

    def close_soon(self) -> None:
        """End the stream from any thread, without waiting."""
        if not self.ended_now and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.close)

    async def finish(self, timeout_seconds: float) -> None:
        """End the stream; return when the server has handled all that was sent before, or the connection is lost.

        A server that does not answer in time is like a lost connection: to leave raises no error.
        """
        if not self.ended_now:
            self._link.end_call(self._number)
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self.ended_now:
                    await self.changed()
        except TimeoutError:
            log.warning("%s: the server has not confirmed the end for %g s", self.method, timeout_seconds)
            self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


class Calls:
    """Opens calls and streams on the connection that there is."""

    def __init__(self, get_link: GetLink, *, timeout_seconds: float, resend: bool) -> None:
        self.timeout_seconds = timeout_seconds
        self._get_link = get_link
        self._link: Link | None = None
        """The connection of the last call: asking for it again is a tenth of the time of a call here."""
        self._resend = resend

    @property
    def resends(self) -> bool:
        """Whether a lost connection is made again."""
        return self._resend

    async def call(
        self, method: str, parameters: object, result: type[T], *, safe: bool, timeout_seconds: float | None = None
    ) -> T:
        """Return the result of a call.

        Args:
            method: its name.
            parameters: a Struct of `call_messages`, or a list.
            result: the type of the result; `NoneType` if it has none.
            safe: whether it does no harm when it is carried out twice: then it is sent again after a lost connection.
            timeout_seconds: how long to wait for the answer; by default the client's `request_timeout_seconds`.

        Raises:
            UnsupportedByServerError: the server is older than jebp/1.2, or does not know the method.
            RequestError: the server refused; its class is that of the code (`errors.CALL_ERRORS`).
            RequestTimeoutError: there was no answer in time.
            OutcomeUnknownError: the connection was lost before the answer, and the call is not safe.
            ConnectionLostError: there is no connection.
        """
        return _decode(method, await self.call_body(method, parameters, safe, timeout_seconds), result)

    async def call_body(
        self, method: str, parameters: object, safe: bool, timeout_seconds: float | None = None
    ) -> Data:
        """Return the encoded result of a call; see `call`."""
        body = encode_opening(method, parameters)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self.timeout_seconds if timeout_seconds is None else timeout_seconds)
        while True:
            link = await self.link_with_room(method, deadline)
            future: asyncio.Future[Data] = loop.create_future()
            number = link.open_call(body, _Answer(method, future, deadline))
            try:
                return await future
            except asyncio.CancelledError:
                link.cancel_call(number)  # or it would keep its place until its deadline
                raise
            except ConnectionLostError as error:
                if not safe:
                    raise OutcomeUnknownError(f"{method}: {error}; it may be done or not") from error
                if not self._resend:
                    raise
            except RequestTimeoutError as error:
                if not (safe and self._resend) or loop.time() >= deadline:
                    raise RequestTimeoutError(f"{method}: {error}") from error

    async def link_with_room(self, what: str, deadline: float) -> Link:
        """Return the connection as soon as one more call may be opened, until `deadline` (loop time).

        Raises:
            RequestTimeoutError: too many calls wait for their answers.
            ClientError: as `link`.
        """
        link = self._link
        if link is None or link.lost_error is not None:
            link = self._link = await self.link(what, max(deadline - asyncio.get_running_loop().time(), 0))
        if link.crowded:
            try:
                async with asyncio.timeout_at(deadline):
                    await link.room()
            except TimeoutError:
                reason = "too many calls of this client wait for their answers; it was not sent"
                raise RequestTimeoutError(f"{what}: {reason}") from None
        return link

    async def link(self, what: str, timeout_seconds: float | None) -> Link:
        """Return the connection, to a server that knows calls.

        Raises:
            UnsupportedByServerError: it does not.
            ClientError: there is no connection.
        """
        link = await self._get_link(timeout_seconds)
        if link.minor < MINOR_MIN:
            version = f"the server speaks jebp/1.{link.minor}; {what} needs jebp/1.{MINOR_MIN}: upgrade the server"
            raise UnsupportedByServerError(what, CALL, version)
        return link

    async def stream(self, method: str, parameters: object, *, patient: bool = False) -> Stream:
        """Open a stream; with `patient`, wait for a connection as long as it takes.

        Raises:
            ClientError: as `link`.
        """
        link = await self.link(method, None if patient else self.timeout_seconds)
        return Stream(method, link, parameters)


def _decode(method: str, body: Data, result: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=result)
    except msgspec.MsgspecError as error:
        raise RequestError(f"{method}: the server's result is malformed: {error}") from error
