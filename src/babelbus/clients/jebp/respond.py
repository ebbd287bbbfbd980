"""Answering requests: questions that come to a responder, and their replies.

async for question in client.respond("calc/double"):
    question.reply(b"%d" % (2 * int(question.payload)))
"""

from collections.abc import Callable
from typing import Final

import msgspec

from babelbus.clients.jebp.calls import Calls, Stream
from babelbus.clients.jebp.lasting import LastingStream
from babelbus.protocols.jebp.call_messages import Answer, Asked, Headers, Respond

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


class Responder(LastingStream):
    """A responder. Made by `Client.respond`; ends with `close`, or when nobody refers to it any more.

    After a lost connection it answers again by itself. Questions from before have gone to other responders of the
    group, or their requesters were told; replies to them do nothing. With `close`, other questions go to other
    responders.
    """

    def __init__(self, calls: Calls, request: Respond) -> None:
        super().__init__(calls, "respond", request, f"responder of {request.pattern}")
        self.pattern = request.pattern
        """The pattern of the subjects that it answers."""
        self.send_over: Callable[[Stream], Callable[[Answer], None]] = lambda stream: stream.send
        """Returns what sends answers; another one for questions that are answered in other threads."""

    @property
    def rejoined(self) -> int:
        """How often it was made again after a lost connection."""
        return self.opened_again

    async def __anext__(self) -> Question:
        """Wait for the next question.

        Raises:
            ClientError: the connection is lost for good.
        """
        stream, body = await self._next()
        return Question(self.send_over(stream), _decode(body))

    async def take(self) -> Question | None:
        """Wait for the next question; `None` when the responder has ended.

        Raises: as `__anext__`.
        """
        try:
            return await anext(self)
        except StopAsyncIteration:
            return None
