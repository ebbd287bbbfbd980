"""A subscription as a stream of server-sent events: one HTTP response that has no end.

Specification: docs/specifications/worterbuch.md, 12.2.
"""

from collections.abc import Callable, Sequence

import msgspec

from babelbus.core.receipt import Promise
from babelbus.core.state import Change, store_pattern, subscription_pattern
from babelbus.core.subject import PathPattern, exactly
from babelbus.protocols.contract import Outbox
from babelbus.protocols.worterbuch.access import Access
from babelbus.protocols.worterbuch.codec import encode_event, encode_names
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.peer import DELETED, Peer, Subscriber
from babelbus.protocols.worterbuch.values import one_line
from babelbus.wire.http import encode_chunk

_NUMBER = 1
"""A stream is one subscription."""


class EventFraming:
    """Each JSON text as the data of one event: as it is, or inside a JSON string (upstream since 1.3.8)."""

    def __init__(self, *, chunked: bool, double: bool) -> None:
        self._chunked = chunked
        self._double = double

    def encode(self, texts: Sequence[bytes]) -> bytes:
        """Return the events of these texts, as one chunk where the response has chunks."""
        if self._double:
            texts = [msgspec.json.encode(text.decode()) for text in texts]
        events = b"".join([b"data: %b\n\n" % one_line(text) for text in texts])
        return encode_chunk(events) if self._chunked else events


FRAMINGS = {
    (chunked, double): EventFraming(chunked=chunked, double=double)
    for chunked in (False, True)
    for double in (False, True)
}


class EventStream(Peer):
    """One client that reads events: in `$SYS` with the protocol HTTP, and with the bound of every other client."""

    def __init__(
        self, hub: Hub, outbox: Outbox, close: Callable[[], None], access: Access, *, address: str | None, chunked: bool
    ) -> None:
        super().__init__(hub.settings, hub.drop, outbox, close, transport_name="HTTP", address=address)
        self._hub = hub
        self.access = access
        self.framing = FRAMINGS[chunked, hub.settings.sse_double_encoding]
        self._state = hub.state
        hub.join(self)

    @property
    def form(self) -> str:
        """Clients of an equal form get the same bytes for the same change and subscription."""
        return f"{id(self.framing)} {self.access.identity.root}"

    def _shown(self, pairs: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        """Return pairs with the keys as the client has them."""
        relative = self.access.identity.relative
        return [(relative(key), value) for key, value in pairs]

    def subscribe(self, head: bytes, key: str, *, unique: bool, live_only: bool) -> None:
        """Send the head of the response, then the value of a key if it has one, then what becomes of it."""

        def first() -> list[bytes]:
            value = None if live_only else self.access.find_visible(key)
            return [] if value is None else [value]

        self._listen(head, first, Subscriber(self, _NUMBER, key, unique=unique), exactly(key))

    def psubscribe(self, head: bytes, pattern: str, *, unique: bool, live_only: bool) -> None:
        """Send the head of the response, then what matches a pattern, then what becomes of it."""

        def first() -> list[bytes]:
            return [] if live_only else [encode_event(self._shown(self.access.match_visible(store_pattern(pattern))))]

        # The messages do not name the pattern: all patterns are one shape.
        subscriber = Subscriber(self, _NUMBER, pattern, unique=unique, pattern="")
        self._listen(head, first, subscriber, subscription_pattern(pattern))

    def subscribe_ls(self, head: bytes, parent: str | None) -> None:
        """Send the head of the response, then the names below a key, whenever they change."""
        subscriber = self.ls_subscribers[_NUMBER] = Subscriber(self, _NUMBER, parent)

        def first() -> list[bytes]:
            subscriber.names = self.access.children(parent)
            return [encode_names(subscriber.names)]

        self._begin(head, first)
        self._hub.subscribe_ls(subscriber)

    def _begin(self, head: bytes, first: Callable[[], list[bytes]]) -> None:
        """Send head and first event once everything that this shows is stored; if it is not, show what is."""
        receipt: Promise = self._state.commit(self.access.source)
        data = head + self.framing.encode(first())
        self._outbox.answer_when(
            [receipt], lambda: data if receipt.error is None else head + self.framing.encode(first()), len(data)
        )

    def _listen(
        self, head: bytes, first: Callable[[], list[bytes]], subscriber: Subscriber, pattern: PathPattern
    ) -> None:
        """Register the subscription, then begin.

        Raises:
            AccessRefusedError, QuotaExceededError: see `Hub.subscribe`; nothing was sent.
        """
        self._hub.subscribe(subscriber, pattern)
        self._begin(head, first)
        subscriber.since = self._state.commit_number
        self.subscribers[_NUMBER] = subscriber
        self._hub.show_subscription(subscriber)
        self._hub.commit()

    def encode_run(self, subscriber: Subscriber, changes: Sequence[Change]) -> list[bytes]:
        """Return the texts that a run of changes is for a subscriber, one each."""
        if subscriber.pattern is None:
            return [b"null" if change[0] is DELETED else change[2] for change in changes]
        return [self.encode_collected(subscriber, (change,)) for change in changes]

    def encode_collected(self, subscriber: Subscriber, changes: Sequence[Change]) -> bytes:
        """Return the text that changes of one kind are for a subscriber of a pattern."""
        pairs = [(key or "", value) for _, key, value, _, _ in changes]
        return encode_event(self._shown(pairs), deleted=changes[0][0] is DELETED)

    def encode_names(self, subscriber: Subscriber, names: Sequence[str]) -> bytes:
        """Return the text that tells an ls subscriber the names below its parent."""
        return encode_names(names)

    def tick(self) -> None:
        """Send nothing: TCP notices a connection that is gone."""

    def close(self) -> None:
        """End the session: the connection is gone."""
        self._over = True
        self._hub.leave(self)
