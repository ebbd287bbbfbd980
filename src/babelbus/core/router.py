"""Live subscriptions: which receivers want a subject, and handing them what is published."""

import logging
from collections.abc import Callable, Sequence

from babelbus.core.record import Event
from babelbus.core.subject import CACHE_MAX, Pattern

log = logging.getLogger(__name__)

Receiver = Callable[[Sequence[Event]], None]
"""Takes the events of one publish that match. It must not block; a bound for what it cannot send is its own matter."""


class Subscription:
    """One live subscription; `Router.remove` ends it."""

    __slots__ = ("pattern", "receiver")

    def __init__(self, pattern: Pattern, receiver: Receiver) -> None:
        self.pattern = pattern
        self.receiver = receiver


class Router:
    """Subject -> receivers, by a look-up that is made once for each subject and kept until a subscription changes."""

    def __init__(self) -> None:
        self._exact: dict[str, list[Subscription]] = {}
        self._patterns: list[Subscription] = []
        self._cache: dict[str, tuple[Subscription, ...]] = {}

    def add(self, pattern: Pattern, receiver: Receiver) -> Subscription:
        """Let a receiver have what is published from now on under matching subjects."""
        subscription = Subscription(pattern, receiver)
        literal = pattern.literal
        if literal is None:
            self._patterns.append(subscription)
            self._cache.clear()
        else:
            self._exact.setdefault(literal, []).append(subscription)
            self._cache.pop(literal, None)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """End a subscription; one that ended already is no error."""
        literal = subscription.pattern.literal
        if literal is None:
            if subscription in self._patterns:
                self._patterns.remove(subscription)
                self._cache.clear()
            return
        subscriptions = self._exact.get(literal, [])
        if subscription in subscriptions:
            subscriptions.remove(subscription)
            self._cache.pop(literal, None)
            if not subscriptions:
                del self._exact[literal]

    @property
    def empty(self) -> bool:
        """Whether nobody listens, so that publishing need not look."""
        return not self._exact and not self._patterns

    def find(self, subject: str) -> tuple[Subscription, ...]:
        """Give the subscriptions that want a subject: those of it alone, then the patterns, each in order of making."""
        found = self._cache.get(subject)
        if found is None:
            wild = [subscription for subscription in self._patterns if subscription.pattern.matches(subject)]
            found = tuple(self._exact.get(subject, []) + wild)
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
            self._cache[subject] = found
        return found

    def route(self, events: Sequence[Event]) -> None:
        """Hand each receiver the events that it wants, together and in order."""
        if self.empty:
            return
        wanted: dict[Subscription, list[Event]] = {}
        for event in events:
            for subscription in self.find(event.subject):
                wanted.setdefault(subscription, []).append(event)
        for subscription, matching in wanted.items():
            try:
                subscription.receiver(matching)
            except Exception:  # a receiver's bug is neither the publisher's nor the other receivers' matter
                log.exception("a live subscription failed")
