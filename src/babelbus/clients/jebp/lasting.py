"""A stream of the server that outlives its connection: it is opened again when the connection was lost."""

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Self

from babelbus.clients.jebp.calls import Calls, Stream
from babelbus.clients.jebp.errors import TEMPORARY_ERRORS, is_loss

if TYPE_CHECKING:
    from babelbus.protocols.jebp.messages import Data

log = logging.getLogger(__name__)


class LastingStream:
    """A stream of a jebp/1.2 method. It ends with `close`, or when nobody refers to it any more.

    Attributes:
        opened_again: how often it was opened again after a lost connection.
    """

    def __init__(self, calls: Calls, method: str, request: object, name: str) -> None:
        self.opened_again = 0
        self._calls = calls
        self._method = method
        self._request = request
        self._name = name
        self._stream: Stream | None = None
        self._closed = False
        self._opening = asyncio.Lock()

    async def begin(self) -> None:
        """Begin now, instead of with the first item: what comes from then on is delivered.

        Raises:
            NoRightsError: the client has the right to nothing of a pattern.
            BadArgumentError: a pattern is wrong.
            UnsupportedByServerError: the server is older than jebp/1.2.
            RequestTimeoutError: there was no answer in time.
            ClientError: there is no connection.
        """
        if self._stream is None:
            await self._open(patient=False)

    async def _open(self, *, patient: bool) -> Stream:
        """Return the stream; of the tasks that wait for it, one opens it."""
        async with self._opening:
            return self._stream or await self._open_now(patient=patient)

    async def _open_now(self, *, patient: bool) -> Stream:
        while True:
            stream = await self._calls.stream(self._method, self._request, patient=patient)
            stream.expect_answer(self._calls.timeout_seconds)
            try:
                self._opened(await stream.first())
            except BaseException as error:
                stream.close()
                if patient and is_loss(error):
                    continue
                raise
            self._stream = stream
            return stream

    def _opened(self, answer: "Data") -> None:
        """Handle the first answer of the server."""

    def _before(self, stream: Stream) -> None:
        """Send what is due before the next item is waited for."""

    def __aiter__(self) -> Self:
        return self

    async def _next(self) -> "tuple[Stream, Data]":
        """Return the next item, and the stream that it came over.

        Raises:
            StopAsyncIteration: the stream has ended.
            ClientError: the connection is lost for good.
        """
        while True:
            if self._closed:
                await self.close()  # it may have been closed while it was opened
                raise StopAsyncIteration
            stream = self._stream
            if stream is None:
                await self._open(patient=bool(self.opened_again))
                continue
            self._before(stream)
            try:
                return stream, await anext(stream)
            except StopAsyncIteration:
                self._closed = True
                raise
            except Exception as error:
                self._lose(stream, error)

    def _lose(self, stream: Stream, error: Exception) -> None:
        """Handle a lost connection: the next item opens the stream again.

        Raises:
            ClientError: it was not that.
        """
        if self._closed or self._stream is not stream:  # another task that reads has handled it
            return
        self._stream = None
        if not (is_loss(error) and self._calls.resends):
            self._closed = not isinstance(error, TEMPORARY_ERRORS)  # else the next item opens the stream again
            raise error
        self.opened_again += 1
        log.info("%s: %s; beginning again", self._name, error)

    async def close(self) -> None:
        """End the stream: what the program has sent is sent, and what came already is still read."""
        self._closed = True
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.finish(self._calls.timeout_seconds)

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    def __del__(self) -> None:
        """End the stream, when a loop over its items was left without `close`."""
        if self._stream is not None:
            self._stream.close_soon()
