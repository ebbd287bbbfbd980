"""A client as the hub sees it: its subscriptions, which changes are messages for them, and how the messages are sent.

Specification: docs/specifications/worterbuch.md, 7.
"""

import asyncio
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from babelbus.config import WorterbuchSettings
from babelbus.core.router import Subscription
from babelbus.core.state import MULTI_WILDCARD, SEPARATOR, WILDCARD, Change, Kept, Kind
from babelbus.protocols.contract import Sender
from babelbus.protocols.worterbuch.access import Access
from babelbus.protocols.worterbuch.codec import encode_ack
from babelbus.protocols.worterbuch.names import SYS
from babelbus.protocols.worterbuch.values import same_value

log = logging.getLogger(__name__)

DELETED = Kind.DELETED


class Framing(Protocol):
    """The form of messages on a connection. There is one object for each kind, compared by identity."""

    def encode(self, texts: Sequence[bytes]) -> bytes:
        """Return the bytes that carry these messages."""


class Subscriber:
    """The subscription of one client to a key or a pattern, and the form of its messages.

    `subject` is the key or the pattern in our characters, of an ls subscription the parent (`None`: the root);
    `pattern` is what the client sent, if it is one. `since` is the last commit whose result it has seen. Subscribers
    with an equal `shape` get the same bytes.
    """

    __slots__ = ("_pending", "_timer", "aggregate_ms", "names", "narrowed", "pattern", "session", "shape", "since",
                 "subject", "subscription", "transaction_id", "unique")  # fmt: skip

    def __init__(
        self,
        session: "Peer",
        transaction_id: int,
        subject: str | None,
        *,
        unique: bool = False,
        pattern: str | None = None,
        aggregate_ms: int | None = None,
    ) -> None:
        self.session = session
        self.transaction_id = transaction_id
        self.subject = subject
        self.pattern = pattern
        self.unique = unique
        self.since = 0
        self.aggregate_ms = aggregate_ms
        self.subscription: Subscription | None = None
        self.shape = ""
        """Form of the messages; "" until the first one, as many patterns never have one."""
        self.names: list[str] | None = None
        """The names that were sent last to an ls subscriber."""
        self.narrowed = False
        """Whether not all of the pattern is granted."""
        self._pending: dict[str | None, Change] | None = None
        """Last change of each key while changes are collected."""
        self._timer: asyncio.TimerHandle | None = None

    def take_shape(self) -> str:
        """Read the form that the client wants now, and return the shape."""
        self.shape = f"{self.session.form} {self.transaction_id} {self.pattern}"  # a string remembers its hash
        return self.shape

    @property
    def plain(self) -> bool:
        """Whether each change is one message, whatever it changed."""
        return not self.unique and self.aggregate_ms is None

    @property
    def is_copyable(self) -> bool:
        """Whether everything that was sent is in the log of the state, and nothing is collected.

        The keys below `$SYS` are in no log, and others have them at the next server.
        """
        subject = self.subject
        if subject is None or self.aggregate_ms is not None or self._pending:
            return False
        return subject.partition(SEPARATOR)[0] not in (SYS, WILDCARD, MULTI_WILDCARD)

    def take(
        self, changes: Sequence[Change], later: Callable[[float, Callable[[], None]], asyncio.TimerHandle]
    ) -> None:
        """Send or collect the changes of a run, for a subscriber to which not every change is a message."""
        if self.unique:
            changes = [change for change in changes if is_news(change)]
        if self.aggregate_ms is None:
            if changes:
                self.session.push(self.session.encode_run(self, changes))
            return
        for change in changes:
            kind, key = change[0], change[1]
            pending = self._pending
            if pending and (key in pending or (next(iter(pending.values()))[0] is DELETED) != (kind is DELETED)):
                self.send_pending()
                pending = None
            if self._timer is None:
                self._timer = later(self.aggregate_ms / 1000, self._time_is_up)
            if pending is None:
                pending = self._pending = {}
            pending[key] = change

    def _time_is_up(self) -> None:
        self._timer = None
        self.send_pending()
        self.session.flush()

    def send_pending(self) -> None:
        """Send what was collected as one message; the timer that runs goes on."""
        pending, self._pending = self._pending, None
        text = self.session.encode_collected(self, list(pending.values())) if pending else b""
        if text:
            self.session.push([text])

    def forget_refused(self, granted: Callable[[str | None], bool]) -> None:
        """Drop collected changes of keys that the client may not see any more."""
        if self._pending:
            self._pending = {key: change for key, change in self._pending.items() if granted(key)}

    def stop(self) -> None:
        """Send nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pending = None


def is_news(change: Change) -> bool:
    """Return whether a subscriber that asked for `unique` wants a change: deletions and publishes always (section
    7.2).
    """
    kind, _, value, before, _ = change
    if kind is not Kind.SET or before is None:
        return True
    return not same_value(before.value if isinstance(before, Kept) else before, value)


class Peer(ABC):
    """One client of the hub, in any dialect. `dropped` counts events that do not reach the client, by their reason."""

    framing: Framing
    access: Access

    def __init__(
        self,
        settings: WorterbuchSettings,
        dropped: Callable[[str, int], None],
        outbox: Sender,
        close: Callable[[], None],
        *,
        transport_name: str,
        address: str | None,
        client_id: str = "",
    ) -> None:
        self.client_id = client_id or str(uuid.uuid4())
        self.transport_name = transport_name
        self.address = address
        self.subscribers: dict[int, Subscriber] = {}
        self.ls_subscribers: dict[int, Subscriber] = {}
        self.counted = 0
        """Subscriptions that `$SYS` shows."""
        self._settings = settings
        self._dropped = dropped
        self._outbox = outbox
        self._close = close
        self._pushed: list[bytes] = []
        self._pushed_bytes = 0
        self.sent = False
        """Whether anything was sent since the last tick."""
        self._over = False

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """The keys and patterns of the client, and of each whether only a part of it is granted."""
        own = (*self.subscribers.values(), *self.ls_subscribers.values())
        return [(one.subject or "", one.narrowed) for one in own]

    @property
    @abstractmethod
    def form(self) -> str:
        """Clients of an equal form get the same bytes for the same change and subscription."""

    @abstractmethod
    def encode_run(self, subscriber: Subscriber, changes: Sequence[Change]) -> list[bytes]:
        """Return the messages that a run of changes is for a subscriber of this client, one each."""

    @abstractmethod
    def encode_collected(self, subscriber: Subscriber, changes: Sequence[Change]) -> bytes:
        """Return the one message that changes are which were collected: all are deletions, or none is."""

    @abstractmethod
    def encode_names(self, subscriber: Subscriber, names: Sequence[str]) -> bytes:
        """Return the message that tells an ls subscriber the names below its parent."""

    @abstractmethod
    def tick(self) -> None:
        """Handle the end of a second."""

    @property
    def is_stuck(self) -> bool:
        """Whether the client does not take what was sent."""
        return self._outbox.is_stuck

    def end(self, reason: str) -> None:
        """Close the connection."""
        log.info("worterbuch %s: closing: %s", self.address or "local", reason)
        self._close()

    def send_granted(self, waits: Sequence[int]) -> None:
        """Answer `acquireLock` requests: answers, unlike events, are never dropped."""
        if waits and not self._over:
            self.sent = True
            data = self.framing.encode(list(map(encode_ack, waits)))
            self._outbox.answer(lambda: data, len(data))

    def push(self, texts: Sequence[bytes]) -> None:
        """Send messages that answer no request with the next `flush`."""
        self.push_bytes(self.framing.encode(texts))

    def push_bytes(self, data: bytes) -> None:
        """Send framed messages with the next `flush`."""
        self._pushed.append(data)
        self._pushed_bytes += len(data)

    def flush(self) -> None:
        """Send the pushed messages behind the answers that were promised before, up to the bound of the queue."""
        pushed = self._pushed
        if not pushed:
            return
        self._pushed = []
        size, self._pushed_bytes = self._pushed_bytes, 0
        if self._over:
            return
        outbox, settings = self._outbox, self._settings
        if outbox.size_bytes + size > settings.queue_bytes_max and outbox.size_bytes:
            self._dropped("slow", len(pushed))
            if settings.slow == "disconnect":
                self._over = True
                self._close()
            return
        self.sent = True
        data = pushed[0] if len(pushed) == 1 else b"".join(pushed)
        outbox.answer(lambda: data, size)
