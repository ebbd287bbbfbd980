"""One subscription of a Wörterbuch client, and which changes are messages for it.

Specification: docs/specifications/worterbuch.md, 7.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from babelbus.core.router import Subscription
from babelbus.core.state import Change, Kept, Kind
from babelbus.protocols.worterbuch.values import same_value

if TYPE_CHECKING:
    from babelbus.protocols.worterbuch.peer import Peer

DELETED = Kind.DELETED


class Subscriber:
    """Who wants the events of a key or of a pattern, and in what form.

    `subject` is the key or the pattern in our characters, of an ls subscription the parent (`None`: the root);
    `pattern` is what the client sent, if it is one. `since` is the last commit whose result it has seen. Subscribers
    with an equal `shape` get the same bytes.
    """

    __slots__ = ("_pending", "_pending_keys", "_timer", "aggregate_ms", "pattern", "session", "shape", "since",
                 "subject", "subscription", "transaction_id", "unique")  # fmt: skip

    def __init__(
        self,
        session: "Peer",
        transaction_id: int,
        subject: str | None,
        *,
        unique: bool,
        since: int,
        pattern: str | None = None,
        aggregate_ms: int | None = None,
    ) -> None:
        self.session = session
        self.transaction_id = transaction_id
        self.subject = subject
        self.pattern = pattern
        self.unique = unique
        self.since = since
        self.aggregate_ms = aggregate_ms
        self.subscription: Subscription | None = None
        self.take_shape()
        self._pending: list[Change] = []
        self._pending_keys: set[str | None] = set()
        self._timer: asyncio.TimerHandle | None = None

    def take_shape(self) -> None:
        """See in what form the client wants its messages, now that it is known or has changed."""
        self.shape = f"{self.session.form} {self.transaction_id} {self.pattern}"  # a string remembers its hash

    @property
    def plain(self) -> bool:
        """Whether each change is one message, whatever it changed."""
        return not self.unique and self.aggregate_ms is None

    def take(
        self, changes: Sequence[Change], later: Callable[[float, Callable[[], None]], asyncio.TimerHandle]
    ) -> None:
        """Take a run of changes when not every one of them is a message."""
        if self.unique:
            changes = [change for change in changes if is_news(change)]
        if self.aggregate_ms is None:
            if changes:
                self.session.push(self.session.encode_run(self, changes))
            return
        for change in changes:
            pending = self._pending
            if pending and ((pending[0][0] is DELETED) != (change[0] is DELETED) or change[1] in self._pending_keys):
                self.send_pending()
            if self._timer is None:
                self._timer = later(self.aggregate_ms / 1000, self._time_is_up)
            self._pending.append(change)
            self._pending_keys.add(change[1])

    def _time_is_up(self) -> None:
        self._timer = None
        self.send_pending()
        self.session.flush()

    def send_pending(self) -> None:
        """Send what was collected as one message; the timer that runs goes on."""
        pending, self._pending = self._pending, []
        self._pending_keys.clear()
        text = self.session.encode_collected(self, pending) if pending else b""
        if text:
            self.session.push([text])

    def stop(self) -> None:
        """Send nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pending.clear()


def is_news(change: Change) -> bool:
    """Return whether a subscriber that asked for `unique` wants a change: deletions and publishes always (section
    7.2).
    """
    kind, _, value, before, _ = change
    if kind is not Kind.SET or before is None:
        return True
    return not same_value(before.value if isinstance(before, Kept) else before, value)
