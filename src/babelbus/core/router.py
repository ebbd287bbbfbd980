"""Live subscriptions: the receivers of each subject, and the delivery of what is published.

A subject's receivers are looked up once and remembered as a `Route` until a subscription that concerns it comes or
goes: an exact one concerns its own subject, a pattern the remembered subjects that it matches. If a `Route` is kept
for longer than a call, look at `valid` first. Neither a new subject nor a new pattern costs a look at all of the others
(`subject_index.py`): who subscribes to much must not slow down everybody's publishing.
"""

import logging
from collections.abc import Callable, Sequence

from babelbus.core.access import NOBODY, Action, Identity, Narrowing, may, may_topic, overlaps
from babelbus.core.quotas import Quota, Quotas
from babelbus.core.record import Event
from babelbus.core.subject import CACHE_MAX, CACHED_LENGTH_MAX, Element, Pattern
from babelbus.core.subject_index import SubjectIndex

log = logging.getLogger(__name__)

INDEXED_MAX = 512
"""Most routes that a change of a pattern adds to the index: about 3 us each, with the event loop waiting."""

Receiver = Callable[[Sequence[Event]], None]
"""Takes the events of one publish that match. It must not block; a bound for what it cannot send is its own matter."""


class Subscription:
    """One live subscription; `Router.remove` ends it. `owner` is whatever the subscriber wants to find again.

    The subscription gets what its principal may subscribe to, by the rights of the moment.
    """

    __slots__ = ("key", "number", "owner", "pattern", "principal", "quota", "receiver")

    def __init__(
        self,
        pattern: Pattern,
        receiver: Receiver,
        number: int,
        *,
        shared: bool,
        owner: object,
        principal: Identity = NOBODY,
    ) -> None:
        self.pattern = pattern
        self.receiver = receiver
        self.number = number
        self.owner = owner
        self.principal = principal
        self.key: object = receiver if shared else self
        self.quota: Quota | None = None
        """The quota that counts the subscription."""

    @property
    def narrowing(self) -> Narrowing:
        """How much of the pattern the principal is granted now."""
        return overlaps(self.principal, Action.SUBSCRIBE, self.pattern)

    @property
    def rest(self) -> bool:
        """See `Pattern.rest`."""
        return self.pattern.rest

    def element(self, depth: int) -> Element | None:
        """Return the element; see `Pattern.element`."""
        return self.pattern.element(depth)


class Route:
    """Where the events of one subject go: its subscriptions, and once each receiver with who stands for it."""

    __slots__ = ("receivers", "subject", "subscriptions", "valid")
    rest = False
    """A route is the `Item` of its own subject."""

    def __init__(self, subject: str, subscriptions: tuple[Subscription, ...]) -> None:
        self.subject = subject
        self.subscriptions = subscriptions
        self.receivers = tuple({one.key: one.receiver for one in subscriptions}.items())
        self.valid = True

    def element(self, depth: int) -> Element | None:
        """Return an element of the subject."""
        parts = self.subject.split("/", depth + 1)
        return (parts[depth], True) if depth < len(parts) else None


class Router:
    """Subject -> receivers, by a look-up that is made once for each subject and kept until a subscription changes."""

    def __init__(
        self, sources_of: Callable[[str], Sequence[str]] = lambda subject: (), quotas: Quotas | None = None
    ) -> None:
        self._sources_of = sources_of
        """Returns the topics whose rights a subject needs too: those that its records were copied from."""
        self._quotas = quotas
        """Counts the subscriptions of each principal; with `None` nothing is counted."""
        self._exact: dict[str, dict[Subscription, None]] = {}  # dictionaries: one key may have 100,000 subscribers
        self._patterns: SubjectIndex[Subscription] = SubjectIndex()
        self._cache: dict[str, Route] = {}
        self._cached: SubjectIndex[Route] = SubjectIndex()
        self._unindexed: list[Route] = []
        """Routes cached since a pattern changed last: only the next change needs them in the index."""
        self._made = 0
        self.count = 0
        """Number of subscriptions."""

    def add(
        self,
        pattern: Pattern,
        receiver: Receiver,
        *,
        shared: bool = False,
        owner: object = None,
        principal: Identity = NOBODY,
    ) -> Subscription:
        """Register a receiver for the events that are published from now on under matching subjects.

        A receiver of several subscriptions gets an event once for each; with `shared`, once for all of them: so a
        protocol encodes an event once, whatever number of its clients want it. Sessions subscribe by
        `Broker.subscribe`, which refuses patterns of which the principal is granted nothing.

        Raises:
            QuotaExceededError: the principal has as many subscriptions as it may.
        """
        quota = None if self._quotas is None else self._quotas.take_for(principal, "subscriptions")
        self._made += 1
        self.count += 1
        subscription = Subscription(pattern, receiver, self._made, shared=shared, owner=owner, principal=principal)
        subscription.quota = quota
        literal = pattern.literal
        if literal is None:
            self._patterns.add(subscription)
        else:
            self._exact.setdefault(literal, {})[subscription] = None
        self._forget(pattern)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """End a subscription; one that ended already is no error."""
        literal = subscription.pattern.literal
        if literal is None:
            found = self._patterns.discard(subscription)
        else:
            subscriptions = self._exact.get(literal, {})
            found = subscription in subscriptions
            subscriptions.pop(subscription, None)
            if found and not subscriptions:
                del self._exact[literal]
        if found:
            self.count -= 1
            self._forget(subscription.pattern)
            if subscription.quota is not None:
                subscription.quota.give("subscriptions")

    def _forget(self, pattern: Pattern) -> None:
        """Remove the routes that a change of this pattern concerns."""
        literal = pattern.literal
        if literal is not None:
            route = self._cache.pop(literal, None)
            if route is not None:
                route.valid = False
                self._cached.discard(route)
            return
        self._index_routes()
        for route in self._cached.take(pattern, lambda route: pattern.matches(route.subject)):
            route.valid = False
            del self._cache[route.subject]

    def _index_routes(self) -> None:
        """Add the new routes to the index, or remove them where so many came that to find each again costs less."""
        routes, self._unindexed = self._unindexed, []
        for route in routes:
            if not route.valid:
                continue
            if len(routes) <= INDEXED_MAX:
                self._cached.add(route)
            else:
                route.valid = False
                del self._cache[route.subject]

    def forget_all(self) -> None:
        """Remove all routes: the table of access has changed."""
        for route in self._cache.values():
            route.valid = False
        self._cache.clear()
        self._cached.clear()
        self._unindexed.clear()

    @property
    def empty(self) -> bool:
        """Whether nobody listens, so that publishing need not look."""
        return not self.count

    def find(self, subject: str) -> tuple[Subscription, ...]:
        """Return the subscriptions that want a subject: those of it alone, then the patterns, each in order of
        making.
        """
        return self.route_of(subject).subscriptions

    def route_of(self, subject: str) -> Route:
        """Return the route of a subject; usually a dictionary look-up."""
        found = self._cache.get(subject)
        if found is not None:
            return found
        wild = [one for one in self._patterns.candidates(subject) if one.pattern.matches(subject)]
        wild.sort(key=lambda one: one.number)
        found = Route(subject, self._granted(subject, [*self._exact.get(subject, ()), *wild]))
        if len(subject) > CACHED_LENGTH_MAX:
            found.valid = False  # nobody would tell it of a change
            return found
        if len(self._cache) >= CACHE_MAX:
            self.forget_all()
        if len(self._unindexed) >= CACHE_MAX:
            self._index_routes()
        self._cache[subject] = found
        self._unindexed.append(found)
        return found

    def _granted(self, subject: str, subscriptions: list[Subscription]) -> tuple[Subscription, ...]:
        """Return the subscriptions whose principal may have the subject."""
        guarded = [one for one in subscriptions if one.principal.rights is not None]
        if not guarded:
            return tuple(subscriptions)
        sources = self._sources_of(subject)
        refused = {one for one in guarded if not _may_hear(one.principal, subject, sources)}
        return tuple(one for one in subscriptions if one not in refused)

    def may_hear(self, principal: Identity, subject: str) -> bool:
        """Return whether a principal may have the events of a subject, by the rights of now."""
        return _may_hear(principal, subject, self._sources_of(subject))

    def route(self, events: Sequence[Event]) -> None:
        """Deliver matching events to each receiver, together and in order, except events that came `via` itself."""
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


def _may_hear(principal: Identity, subject: str, sources: Sequence[str]) -> bool:
    return may(principal, Action.SUBSCRIBE, subject) and all(
        may_topic(principal, Action.SUBSCRIBE, source) for source in sources
    )
