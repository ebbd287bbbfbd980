"""Live events: a subscription by patterns that survives reconnects.

async for event in client.subscribe("plant/+/temp"):
    print(event.subject, event.payload)
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Final, Self

import msgspec

from babelbus.clients.jebp.calls import Calls, Stream
from babelbus.clients.jebp.errors import is_loss
from babelbus.protocols.jebp.call_messages import LiveEvent, Watch, Watching
from babelbus.records.envelope import SOURCE_HEADER

log = logging.getLogger(__name__)

_decode_watching: Final = msgspec.msgpack.Decoder(Watching).decode


class Event(LiveEvent, frozen=True, array_like=True, gc=False):
    """An event as a subscriber gets it.

    Attributes:
        payload: the bytes; `None` says that the key was removed.
        key, headers: as they were published; `timestamp` is milliseconds since the epoch.
    """

    @property
    def subject(self) -> str:
        """The subject; bytes that are no UTF-8 (of sbus) are escaped as `os.fsdecode` does."""
        return self.raw_subject.decode("utf-8", "surrogateescape")

    @property
    def source(self) -> str:
        """The protocol and the name of the publisher, as the server verified it."""
        for name, value in self.headers:
            if name == SOURCE_HEADER and value is not None:
                return value.decode("utf-8", "replace")
        return ""


class _Received(msgspec.Struct, frozen=True, array_like=True):
    """`Events`, as events of the client."""

    dropped: int
    events: list[Event]


_decode_received: Final = msgspec.msgpack.Decoder(_Received).decode


class Subscription:
    """A live subscription. Made by `Client.subscribe`; ends with `close`, or when nobody refers to it any more.

    Events that are published while the connection is lost, or while the program is too slow, are not delivered later:
    who needs every event follows the topic or consumes in a group.

    Attributes:
        dropped: how many events the server dropped because the program was too slow.
        resubscribed: how often it was made again after a lost connection.
        narrowed: for each pattern, whether the client may only have a part of it.
    """

    def __init__(self, calls: Calls, patterns: Sequence[str], window: int) -> None:
        self.dropped = 0
        self.resubscribed = 0
        self.narrowed: list[bool] = []
        self._calls = calls
        self._request = Watch(list(patterns), window)
        self._stream: Stream | None = None
        self._events: deque[Event] = deque()
        self._handled = 0
        self._closed = False

    async def begin(self) -> None:
        """Subscribe now, instead of with the first event: what is published from then on is delivered.

        Raises:
            NoRightsError: the client may subscribe to nothing of a pattern.
            BadArgumentError: a pattern is wrong.
            UnsupportedByServerError: the server is older than jebp/1.2.
            ClientError: there is no connection.
        """
        if self._stream is None:
            await self._open(patient=False)

    async def _open(self, *, patient: bool) -> Stream:
        while True:
            stream = await self._calls.stream("subscribe", self._request, patient=patient)
            try:
                self.narrowed = _decode_watching(await stream.first()).narrowed
            except BaseException as error:
                stream.close()
                if patient and is_loss(error):
                    continue
                raise
            self._stream = stream
            return stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event.

        Raises:
            NoRightsError: the right to subscribe was taken away.
            ClientError: the connection is lost for good.
        """
        events = self._events
        while not events:
            await self._load()
        return events.popleft()

    async def _load(self) -> None:
        if self._closed:
            raise StopAsyncIteration
        stream = self._stream or await self._open(patient=bool(self.resubscribed))
        if self._handled:
            stream.send(self._handled)
            self._handled = 0
        try:
            received = _decode_received(await anext(stream))
        except StopAsyncIteration:
            self._closed = True
            raise
        except Exception as error:
            self._lose(error)
            return
        if received.dropped:
            self.dropped += received.dropped
            log.warning("subscription to %s: %d events were dropped, the program is too slow",
                        ", ".join(self._request.patterns), received.dropped)  # fmt: skip
        self._handled += len(received.events)
        self._events.extend(received.events)

    def _lose(self, error: Exception) -> None:
        """Handle a lost connection: the next event subscribes again.

        Raises:
            ClientError: it was not that.
        """
        self._stream = None
        self._handled = 0
        if self._closed:
            return
        if not (is_loss(error) and self._calls.resends):
            self._closed = True
            raise error
        self.resubscribed += 1
        log.info("subscription to %s: %s; subscribing again", ", ".join(self._request.patterns), error)

    async def take(self) -> list[Event]:
        """Wait for events, and return all that are there; none when the subscription has ended.

        Raises: as `__anext__`.
        """
        try:
            event = await anext(self)
        except StopAsyncIteration:
            return []
        events = [event, *self._events]
        self._events.clear()
        return events

    async def close(self) -> None:
        """End the subscription; events that came already are still read."""
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
        """End the subscription, when a loop over the events was left without `close`."""
        if self._stream is not None:
            self._stream.close_soon()
