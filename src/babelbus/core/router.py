"""Live subscriptions: which receivers want a subject, and handing them what is published.

A subject's receivers are looked up once and remembered as a `Route` until a subscription that concerns it comes or
goes: an exact one concerns its own subject, a pattern the remembered subjects that it matches. Who keeps a `Route` for
longer than a call looks at `valid` first.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from babelbus.core.record import Event
from babelbus.core.subject import CACHE_MAX, CACHED_LENGTH_MAX, Pattern

log = logging.getLogger(__name__)

SCAN_MAX = 512
"""Most remembered subjects that a new pattern is compared with; beyond, forgetting all of them is cheaper."""

Receiver = Callable[[Sequence[Event]], None]
"""Takes the events of one publish that match. It must not block; a bound for what it cannot send is its own matter."""


class Subscription:
    """One live subscription; `Router.remove` ends it. `owner` is whatever the subscriber wants to find again."""

    __slots__ = ("key", "number", "owner", "pattern", "receiver")

    def __init__(self, pattern: Pattern, receiver: Receiver, number: int, *, shared: bool, owner: object) -> None:
        self.pattern = pattern
        self.receiver = receiver
        self.number = number
        self.owner = owner
        self.key: object = receiver if shared else self


class Route:
    """Where the events of one subject go: its subscriptions, and once each receiver with who stands for it."""

    __slots__ = ("receivers", "subscriptions", "valid")

    def __init__(self, subscriptions: tuple[Subscription, ...]) -> None:
        self.subscriptions = subscriptions
        self.receivers = tuple({one.key: one.receiver for one in subscriptions}.items())
        self.valid = True


class Router:
    """Subject -> receivers, by a look-up that is made once for each subject and kept until a subscription changes."""

    def __init__(self) -> None:
        self._exact: dict[str, dict[Subscription, None]] = {}
        # Patterns by the first element of what they match, None for those that may begin with anything; dictionaries
        # for their order and because one client may have 100,000.
        self._patterns: dict[str | None, dict[Subscription, None]] = {}
        self._cache: dict[str, Route] = {}
        self._made = 0

    def add(self, pattern: Pattern, receiver: Receiver, *, shared: bool = False, owner: object = None) -> Subscription:
        """Let a receiver have what is published from now on under matching subjects.

        A receiver of several subscriptions gets an event once for each; with `shared`, once for all of them: so a
        protocol encodes an event once, whatever number of its clients want it.
        """
        self._made += 1
        subscription = Subscription(pattern, receiver, self._made, shared=shared, owner=owner)
        literal = pattern.literal
        if literal is None:
            self._patterns.setdefault(_first_element(pattern), {})[subscription] = None
        else:
            self._exact.setdefault(literal, {})[subscription] = None
        self._forget(pattern)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """End a subscription; one that ended already is no error."""
        pattern = subscription.pattern
        literal = pattern.literal
        if literal is not None:
            found = _take(self._exact, literal, subscription)
        else:
            found = _take(self._patterns, _first_element(pattern), subscription)
        if found:
            self._forget(pattern)

    def _forget(self, pattern: Pattern) -> None:
        """Forget the routes that a change of this pattern concerns."""
        cache = self._cache
        literal = pattern.literal
        if literal is not None:
            route = cache.pop(literal, None)
            if route is not None:
                route.valid = False
        elif len(cache) > SCAN_MAX:
            self._forget_all()
        else:
            prefix, matches = pattern.prefix, pattern.matches
            for subject in [one for one in cache if one.startswith(prefix) and matches(one)]:
                cache.pop(subject).valid = False

    def _forget_all(self) -> None:
        for route in self._cache.values():
            route.valid = False
        self._cache.clear()

    @property
    def empty(self) -> bool:
        """Whether nobody listens, so that publishing need not look."""
        return not self._exact and not self._patterns

    def find(self, subject: str) -> tuple[Subscription, ...]:
        """Return the subscriptions that want a subject: those of it alone, then the patterns, each in order of
        making.
        """
        return self.route_of(subject).subscriptions

    def route_of(self, subject: str) -> Route:
        """Return the route of a subject; a dictionary look-up as a rule."""
        found = self._cache.get(subject)
        if found is not None:
            return found
        some = self._patterns.get(subject.partition("/")[0])
        others = self._patterns.get(None)
        wild = [one for one in some if one.pattern.matches(subject)] if some else []
        if others:
            wild += [one for one in others if one.pattern.matches(subject)]
            if some:
                wild.sort(key=lambda one: one.number)
        found = Route((*self._exact.get(subject, ()), *wild))
        if len(subject) > CACHED_LENGTH_MAX:
            found.valid = False  # nobody would tell it of a change
            return found
        if len(self._cache) >= CACHE_MAX:
            self._forget_all()
        self._cache[subject] = found
        return found

    def route(self, events: Sequence[Event]) -> None:
        """Hand each receiver the events that it wants, together and in order; not those that came `via` itself."""
        if self.empty:
            return
        wanted: dict[object, tuple[Receiver, list[Event]]] = {}
        for event in events:
            via = event.via
            for key, receiver in self.route_of(event.subject).receivers:
                if via is not None and receiver is via:
                    continue
                entry = wanted.get(key)
                if entry is None:
                    wanted[key] = (receiver, [event])
                else:
                    entry[1].append(event)
        for receiver, matching in wanted.values():
            try:
                receiver(matching)
            except Exception:  # a receiver's bug is neither the publisher's nor the other receivers' matter
                log.exception("a live subscription failed")


K = TypeVar("K")


def _take(table: dict[K, dict[Subscription, None]], place: K, subscription: Subscription) -> bool:
    """Take a subscription out of its place; return whether it was there."""
    subscriptions = table.get(place, {})
    if subscription not in subscriptions:
        return False
    del subscriptions[subscription]
    if not subscriptions:
        del table[place]
    return True


def _first_element(pattern: Pattern) -> str | None:
    """Return the first element of all subjects that match, `None` if they differ or it is not known."""
    element, slash, _ = pattern.prefix.partition("/")
    return element if slash else None
