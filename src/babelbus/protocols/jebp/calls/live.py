"""Live events over calls: `subscribe` by patterns, `emit` by subject.

A subscriber says how many events it has handled. Beyond its window events wait here, up to a bound; beyond that they
are dropped, and the subscriber is told how many are missing and where.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from babelbus.core.access import Narrowing
from babelbus.core.flow_policy import Bound
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from babelbus.core.rooted import relative_event
from babelbus.core.router import Subscription
from babelbus.core.work import settled
from babelbus.protocols.jebp.call_messages import Emit, Emitted, Watch, Watching
from babelbus.protocols.jebp.calls.call import Call, Method, Stream
from babelbus.protocols.jebp.calls.errors import CallRefusedError
from babelbus.protocols.jebp.calls.subjects import check_subject, read_pattern, signed
from babelbus.protocols.jebp.messages import PROTOCOL, Data

PATTERNS_MAX: Final = 1_000
BOUND: Final = Bound()
EVENT_BYTES: Final = 100
"""About what an event costs beside its payload."""
BATCH_EVENTS: Final = 512
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_count: Final = msgspec.msgpack.Decoder(int).decode


class Subscriber(Stream):
    """The subscription of one stream."""

    def __init__(self, call: Call, request: Watch) -> None:
        if not 1 <= len(request.patterns) <= PATTERNS_MAX or request.window < 1:
            raise CallRefusedError("bad_argument", f"1 to {PATTERNS_MAX} patterns, and a window above 0")
        self._call = call
        self._credit = request.window
        self._root = call.principal.root
        self._waiting: deque[Event] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._delivered = call.metrics.live_delivered(PROTOCOL)
        self._slow = call.metrics.live_dropped_total.labels(PROTOCOL, "slow")
        self._too_large = call.metrics.live_dropped_total.labels(PROTOCOL, "too_large")
        self._subscriptions: list[Subscription] = []
        self._texts = [call.principal.absolute(text) for text in request.patterns]
        broker = call.broker
        try:
            for text in self._texts:
                pattern = read_pattern(text, broker.state.key_bytes_max)
                # Shared among the patterns: an event that matches two of them comes once.
                one = broker.subscribe(pattern, self._receive, principal=call.principal, shared=True, owner=self)
                self._subscriptions.append(one)
        except BaseException:
            self._unsubscribe()
            raise
        narrowed = [one.narrowing is Narrowing.PART for one in self._subscriptions]
        call.send(_encode(Watching(narrowed)))

    def _receive(self, events: Sequence[Event]) -> None:
        """Send events, or let them wait."""
        if not self._waiting and len(events) <= min(self._credit, BATCH_EVENTS) and not self._call.full:
            self._send(events)
            return
        for event in events:
            if self._waiting_bytes >= BOUND.size_bytes or len(self._waiting) >= BOUND.count:
                self._dropped += 1
                self._slow.inc()
                continue
            self._waiting.append(event)
            self._waiting_bytes += _size_of(event)
        self._drain()

    def _drain(self) -> None:
        while self._waiting and self._credit > 0 and not self._call.full:
            batch: list[Event] = []
            while self._waiting and len(batch) < min(self._credit, BATCH_EVENTS):
                event = self._waiting.popleft()
                self._waiting_bytes -= _size_of(event)
                batch.append(event)
            self._send(batch)

    def _send(self, events: Sequence[Event]) -> None:
        self._credit -= len(events)
        if self._root is not None:
            events = [relative_event(event, self._root) for event in events]
        rows = [
            (one.subject.encode("utf-8", "surrogateescape"), one.payload, one.key, one.headers, one.timestamp)
            for one in events
        ]
        # What was dropped was behind all that waited then: it is told with the first that comes after the gap.
        dropped = 0
        if self._dropped and not self._waiting:
            dropped, self._dropped = self._dropped, 0
        body = _encode((0, rows))
        if len(body) > self._call.body_bytes_max:
            self._send_each(rows)
        else:
            self._call.send(body)
            self._delivered.inc(len(rows), len(body))
        if dropped:
            self._call.send(_encode((dropped, ())))

    def _send_each(self, rows: Sequence[object]) -> None:
        """Send each event by itself, and of an event that is too large for a frame that it is dropped."""
        for row in rows:
            body = _encode((0, (row,)))
            if len(body) > self._call.body_bytes_max:
                self._call.send(_encode((1, ())))
                self._too_large.inc()
            else:
                self._call.send(body)
                self._delivered.inc(1, len(body))

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """The patterns, and of each whether only a part of it is granted."""
        return [
            (text, one.narrowing is Narrowing.PART) for text, one in zip(self._texts, self._subscriptions, strict=False)
        ]

    def receive(self, body: Data) -> None:
        """Handle how many events the client has handled."""
        self._credit += max(_decode_count(body), 0)
        self._drain()

    def resume(self) -> None:
        """Resume sending."""
        self._drain()

    def access_changed(self) -> None:
        """Update the rights: events that wait are dropped if the client may not have them any more.

        The stream ends when nothing of any pattern is granted any more.
        """
        principal, may_hear = self._call.principal, self._call.broker.router.may_hear
        for one in self._subscriptions:
            one.principal = principal
        if all(one.narrowing is Narrowing.NONE for one in self._subscriptions):
            self._call.fail(CallRefusedError("refused", "the right to subscribe was taken away"))
            return
        self._waiting = deque(event for event in self._waiting if may_hear(principal, event.subject))
        self._waiting_bytes = sum(map(_size_of, self._waiting))

    def close(self, *, lost: bool) -> None:
        """End the subscription."""
        self._unsubscribe()
        self._waiting.clear()

    def _unsubscribe(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, []
        for one in subscriptions:
            self._call.broker.unsubscribe(one)


def _size_of(event: Event) -> int:
    return EVENT_BYTES + len(event.payload or b"") + len(event.subject)


async def emit(call: Call, request: Emit) -> Emitted:
    """Publish an event under its subject."""
    broker, principal = call.broker, call.principal
    subject = principal.absolute(request.subject)
    check_subject(subject, broker.state.key_bytes_max)
    headers = signed(request.headers, principal)
    event = Event(subject, request.payload, request.key, headers, max(request.timestamp, 0))
    topic = broker.topic_of(subject)
    receivers = len(broker.router.find(subject))
    receipt = broker.publish(Publication(principal, PROTOCOL, [event]))
    await settled(receipt)
    if receipt.error is not None:
        raise receipt.error
    if topic is None or (principal.root is not None and not principal.root.contains(topic)):
        return Emitted(None, None, None, receivers)  # a topic above the root of the client is not for it to know
    part = receipt.parts[0]
    return Emitted(principal.relative(topic), part.partition, part.base_offset, receivers)


METHODS: Final = {"subscribe": Method(Watch, Subscriber), "emit": Method(Emit, emit)}
