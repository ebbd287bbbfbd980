"""Live events: a subscription by patterns that survives reconnects.

async for event in client.subscribe("plant/+/temp"):
    print(event.subject, event.payload)
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from babelbus.clients.jebp.calls import Calls, Stream
from babelbus.clients.jebp.lasting import LastingStream
from babelbus.protocols.jebp.call_messages import LiveEvent, Watch, Watching
from babelbus.records.envelope import SOURCE_HEADER

if TYPE_CHECKING:
    from babelbus.protocols.jebp.messages import Data

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


class Subscription(LastingStream):
    """A live subscription. Made by `Client.subscribe`; ends with `close`, or when nobody refers to it any more.

    Events that are published while the connection is lost, or while the program is too slow, are not delivered later:
    who needs every event follows the topic or consumes in a group.

    Attributes:
        dropped: how many events the server dropped because the program was too slow.
        narrowed: for each pattern, whether the client may only have a part of it.
    """

    def __init__(self, calls: Calls, patterns: Sequence[str], window: int) -> None:
        super().__init__(calls, "subscribe", Watch(list(patterns), window), f"subscription to {', '.join(patterns)}")
        self.dropped = 0
        self.narrowed: list[bool] = []
        self._events: deque[Event] = deque()
        self._handled = 0

    @property
    def resubscribed(self) -> int:
        """How often it was made again after a lost connection."""
        return self.opened_again

    def _opened(self, answer: "Data") -> None:
        self.narrowed = _decode_watching(answer).narrowed
        self._handled = 0

    def _before(self, stream: Stream) -> None:
        if self._handled:
            stream.send(self._handled)
            self._handled = 0

    async def __anext__(self) -> Event:
        """Wait for the next event.

        Raises:
            NoRightsError: the right to subscribe was taken away.
            ClientError: the connection is lost for good.
        """
        events = self._events
        while not events:
            _, body = await self._next()
            received = _decode_received(body)
            if received.dropped:
                self.dropped += received.dropped
                log.warning("%s: %d events were dropped, the program is too slow", self._name, received.dropped)
            self._handled += len(received.events)
            events.extend(received.events)
        return events.popleft()

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
