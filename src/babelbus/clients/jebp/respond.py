"""Answering requests: questions that come to a responder, and their replies.

async for question in client.respond("calc/double"):
    question.reply(b"%d" % (2 * int(question.payload)))
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Self

import msgspec

from babelbus.clients.jebp.calls import Calls, Stream
from babelbus.clients.jebp.errors import is_loss
from babelbus.protocols.jebp.call_messages import Answer, Asked, Headers, Respond

if TYPE_CHECKING:
    from babelbus.protocols.jebp.messages import Data

log = logging.getLogger(__name__)
_decode: Final = msgspec.msgpack.Decoder(Asked).decode


class Question:
    """A request that waits for the reply of this responder: `reply`, or `fail`.

    Attributes:
        subject, payload, headers: as they were sent.
        timeout_seconds: how long the requester waits, from when the question came.
    """

    __slots__ = ("_number", "_send", "answered", "headers", "payload", "subject", "timeout_seconds")

    def __init__(self, send: Callable[[Answer], None], asked: Asked) -> None:
        self.subject = asked.subject
        self.payload = asked.payload
        self.headers = asked.headers
        self.timeout_seconds = asked.timeout_seconds
        self.answered = False
        self._number = asked.number
        self._send = send

    def reply(self, payload: bytes | None, *, headers: Headers = ()) -> None:
        """Send the reply; nothing happens if it was answered, or its connection was lost.

        Raises:
            LocalProtocolError: the reply is over the frame limit.
        """
        if not self.answered:
            self._send(Answer(self._number, payload, headers))
            self.answered = True

    def fail(self, reason: str) -> None:
        """End the request without a reply: the requester gets `RequestFailedError` with this reason."""
        if not self.answered:
            self._send(Answer(self._number, failed=reason or "no reason was given"))
            self.answered = True


class Responder:
    """A responder. Made by `Client.respond`; ends with `close`, or when nobody refers to it any more.

    After a lost connection it answers again by itself. Questions from before have gone to other responders of the
    group, or their requesters were told; replies to them do nothing.

    Attributes:
        rejoined: how often it was made again after a lost connection.
    """

    def __init__(self, calls: Calls, request: Respond) -> None:
        self.rejoined = 0
        self._calls = calls
        self._request = request
        self._stream: Stream | None = None
        self._closed = False
        self.send_over: Callable[[Stream], Callable[[Answer], None]] = lambda stream: stream.send
        """Returns what sends answers; another one for questions that are answered in other threads."""

    @property
    def pattern(self) -> str:
        """The pattern of the subjects that it answers."""
        return self._request.pattern

    async def begin(self) -> None:
        """Start to answer now, instead of with the first question.

        Raises:
            NoRightsError: the client may answer nothing of the pattern.
            BadArgumentError: the pattern is wrong.
            UnsupportedByServerError: the server is older than jebp/1.2.
            ClientError: there is no connection.
        """
        if self._stream is None:
            await self._open(patient=False)

    async def _open(self, *, patient: bool) -> Stream:
        while True:
            stream = await self._calls.stream("respond", self._request, patient=patient)
            try:
                await stream.first()
            except BaseException as error:
                stream.close()
                if patient and is_loss(error):
                    continue
                raise
            self._stream = stream
            return stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Question:
        """Wait for the next question.

        Raises:
            ClientError: the connection is lost for good.
        """
        while True:
            if self._closed:
                raise StopAsyncIteration
            stream = self._stream or await self._open(patient=bool(self.rejoined))
            try:
                body: Data = await anext(stream)
            except StopAsyncIteration:
                self._closed = True
                raise
            except Exception as error:
                self._lose(error)
            else:
                return Question(self.send_over(stream), _decode(body))

    def _lose(self, error: Exception) -> None:
        """Handle a lost connection: the next question joins again.

        Raises:
            ClientError: it was not that.
        """
        self._stream = None
        if self._closed:
            return
        if not (is_loss(error) and self._calls.resends):
            self._closed = True
            raise error
        self.rejoined += 1
        log.info("responder of %s: %s; answering again", self._request.pattern, error)

    async def take(self) -> Question | None:
        """Wait for the next question; `None` when the responder has ended.

        Raises: as `__anext__`.
        """
        try:
            return await anext(self)
        except StopAsyncIteration:
            return None

    async def close(self) -> None:
        """Stop to answer: replies so far are sent, other questions go to other responders."""
        self._closed = True
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.finish()

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self.close()

    def __del__(self) -> None:
        """End the responder, when a loop over the questions was left without `close`."""
        if self._stream is not None:
            self._stream.close_soon()
