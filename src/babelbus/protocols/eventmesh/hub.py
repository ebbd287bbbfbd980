"""The shared part of all EventMesh connections of one server: topics, groups, open questions, connected clients.

A topic of EventMesh is a topic of the bus; a consumer group is the group of that name on it, whatever protocol its
other members speak (docs/design/design.md, section 1).
"""

import asyncio
import itertools
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from babelbus.clock import Clock
from babelbus.config import EventmeshSettings
from babelbus.core.access import Action, Identity, check_may, may, refusal
from babelbus.core.broker import Broker
from babelbus.core.catalog import TopicExistsError
from babelbus.core.groups import END, Delivery, Group, GroupSettings, Member
from babelbus.core.publish import GATHER_RECORDS_MAX, Publication
from babelbus.core.receipt import Promise, all_of
from babelbus.core.record import Event
from babelbus.core.request import Key, Question, Reply, Request
from babelbus.core.topic import ReservedTopicError, Topic
from babelbus.core.work import Work
from babelbus.metrics import Metrics, Traffic
from babelbus.protocols.eventmesh.callers import PROTOCOL as PROTOCOL
from babelbus.protocols.eventmesh.callers import Callers
from babelbus.protocols.eventmesh.messages import SubscriptionItem
from babelbus.records.record import Headers

TTL_MS_MAX = 24 * 3600 * 1000
"""No request waits longer for its reply, whatever time to live its client names."""
TTL_STEP_MS = 100
TTL_NAMES = frozenset((b"ttl", b"ce_ttl"))
GRPC_MARKS = frozenset((b"seqnum", b"ce_seqnum"))
"""Headers that only what was published over gRPC has; each message there must name a `ttl`, wanted or not (10)."""
TIMED = TTL_NAMES | GRPC_MARKS
STOPS = "graceful normal quit from eventmesh"
"""The goodbye of a server that stops."""
NUMBER_BITS = 48
"""The numbers of two servers begin so far apart that no window of pushes has numbers of both."""
CORRELATION = "correlation99id"
REPLY_TO = "reply99to99client"
CLUSTER = "cluster"
_ADDED = frozenset(f"{kind}{name}".encode() for kind in ("", "ce_") for name in (CORRELATION, REPLY_TO, CLUSTER))


def correlation(name: str) -> dict[str, str]:
    """Return the properties that a responder copies from a question into its reply (3.8)."""
    return {CORRELATION: name, REPLY_TO: PROTOCOL, CLUSTER: PROTOCOL}


def without_correlation(headers: Headers) -> Headers:
    """Return the headers of a reply without what the server added to the question."""
    return tuple(pair for pair in headers if pair[0] not in _ADDED)


def _resolve(promise: Promise, receipt: Promise) -> None:
    promise.resolve(receipt.error)


def _ttl_ms(headers: Headers, rule: str) -> float:
    """Return the time to live of a record; without a wish of its publisher it has no end."""
    text = b"0"
    for name, value in headers:
        if name not in TIMED:
            continue
        if name in TTL_NAMES:
            text = value or b"0"
        elif rule != "all":
            return math.inf
    try:
        ttl = float(text)
    except ValueError:
        return math.inf
    return ttl if ttl > 0 else math.inf


class Peer(Protocol):
    """A session, as the hub knows it."""

    @property
    def heard_at(self) -> float:
        """When the last bytes came (`Clock.monotonic`)."""

    @property
    def ends_at(self) -> float:
        """When the connection is closed whatever comes."""

    @property
    def stays(self) -> bool:
        """Whether the session may go on at another server when this one stops."""

    def say_goodbye(self, reason: str) -> None:
        """Send the goodbye of the server."""

    def check_proof(self) -> None:
        """End the session if what the client has proved is over."""

    def expire(self) -> None:
        """Close the connection: the client has been silent for too long."""


class Hub:
    """The shared part of all EventMesh connections of one server.

    Topics and events are named as the principal of a call names them: with a root, relative to it.
    """

    def __init__(
        self, broker: Broker, clock: Clock, metrics: Metrics, settings: EventmeshSettings, callers: Callers
    ) -> None:
        self.broker = broker
        self.callers = callers
        self.clock = clock
        self.metrics = metrics
        self.delivered: Traffic = metrics.live_delivered(PROTOCOL)
        """Counts the events that clients were sent live."""
        self.settings = settings
        self.peers: dict[Peer, None] = {}
        self.stopping = False
        self._loop = asyncio.get_running_loop()
        self._principal = Identity(PROTOCOL, PROTOCOL, None)
        self._gathered: dict[str | tuple[str, str], tuple[list[Event], Promise, str, Identity]] = {}
        """Events that this turn of the event loop brought, with the promise of their publishers, topic and principal.

        The key is the topic, and the name of the principal if it has rights that are asked for.
        """
        # Not from 1 on: a session may go on here, and acknowledge late what another server has pushed.
        self._numbers = itertools.count(secrets.randbits(NUMBER_BITS))
        self._questions: dict[str, tuple[Key, str, str]] = {}
        """Questions whose requester waits, with the name of the principal that was asked, and the subject."""

    def next_number(self) -> int:
        """Return a number that no frame of the server had: the `seq` of a push, or the id of a question."""
        return next(self._numbers)

    async def ensure_topic(self, name: str, principal: Identity | None = None) -> Topic:
        """Return a topic; it is made at the first publish or subscription (specification, 0.6).

        Raises:
            AccessRefusedError: the topic is not there, and the principal may not make it.
            InvalidTopicNameError: no topic can have the name.
            ReservedTopicError: the topic is the server's own.
            StorageError: the disk refused, or the topic is closed.
        """
        principal = principal or self._principal
        name = principal.absolute(name)
        topic = self.broker.find_topic(name)
        if topic is None:
            closed = self.broker.why_closed(name)
            if closed is not None:
                raise closed
            try:
                return await self.broker.create_topic(name, principal=principal)
            except TopicExistsError:  # another client was first
                topic = self.broker.topic(name)
        if topic.reserved:
            raise ReservedTopicError(f"topic {name!r} is the server's own")
        return topic

    async def create_topic(self, name: str, principal: Identity | None = None) -> Topic:
        """Return a topic that a client wants to be there; of topics of others it does not hear whether they are.

        Raises: as `ensure_topic`.
        """
        asking = principal or self._principal
        if not self.broker.may_see(asking, asking.absolute(name)):
            raise refusal(asking, Action.MANAGE, asking.absolute(name))
        return await self.ensure_topic(name, principal)

    def remove_topic(self, name: str, principal: Identity | None = None) -> Promise:
        """Remove a topic; every failure is the error of the promise."""
        principal = principal or self._principal
        return self.broker.remove_topic(principal.absolute(name), principal)

    def group(self, topic: str, name: str, principal: Identity | None = None) -> Group:
        """Return the group of clients; a new group begins at the end of the topic, and keeps its place while empty.

        Raises:
            AccessRefusedError: the principal may not consume the topic.
            InvalidGroupNameError: no group can have the name.
            UnknownTopicError: there is no such topic.
        """
        self._flush()  # a new group begins behind what was published before
        settings = GroupSettings(ack="explicit", ack_seconds=self.settings.ack_seconds)
        principal = principal or self._principal
        topic = principal.absolute(topic)
        return self.broker.groups.ensure(topic, name, settings, start=END, principal=principal)

    async def ensure_group(self, topic: str, name: str, principal: Identity | None = None) -> None:
        """Create topic and group, durably, if they are not there.

        Raises:
            BabelbusError: the topic or the group cannot be.
        """
        asking = principal or self._principal
        self.broker.check_topic(asking, Action.CONSUME, asking.absolute(topic))  # first: is the topic of others there?
        await self.ensure_topic(topic, principal)
        await self.group(topic, name, principal).saved.wait()

    async def ensure_place(self, item: SubscriptionItem, group: str, principal: Identity) -> None:
        """Create topic and group of a subscription, durably, if they are not there and the principal may subscribe.

        CLUSTERING needs the right to consume, BROADCASTING and the answering of questions that to subscribe.

        Raises:
            AccessRefusedError: the principal may not subscribe.
            BabelbusError: the topic or the group cannot be.
        """
        is_live = item.mode == "BROADCASTING"
        if is_live or item.type == "SYNC":
            check_may(principal, Action.SUBSCRIBE, principal.absolute(item.topic))
        if is_live and principal.rights is not None:
            await self.ensure_topic(item.topic, principal)
        else:
            await self.ensure_group(item.topic, group, principal)

    def publish(self, events: Sequence[Event], principal: Identity | None = None) -> Promise:
        """Publish events as `publish_to` does; if a topic cannot be or is refused, no event is published."""
        by_topic: dict[str, list[Event]] = {}
        for event in events:
            by_topic.setdefault(event.subject, []).append(event)
        names: Sequence[str] = list(by_topic)
        if principal is not None and principal.rights is not None:
            if principal.root is not None:
                names = [principal.root.absolute(topic) for topic in by_topic]
            refused = principal.rights.find_refused(Action.PUBLISH, names)
            if refused is not None:
                return Promise.refused(refusal(principal, Action.PUBLISH, refused))
        if all(map(self.broker.has_topic, names)):
            return all_of([self.publish_to(topic, batch, principal) for topic, batch in by_topic.items()])
        return Work(self._publish_new(by_topic, principal))

    def publish_to(self, topic: str, events: list[Event], principal: Identity | None = None) -> Promise:
        """Publish events to a topic, which is made if it does not exist. Every failure is the error of the promise.

        Few events wait for the end of this turn of the event loop, and are appended with those of other connections.
        """
        root = None if principal is None else principal.root
        name = topic if root is None else root.absolute(topic)
        if not self.broker.has_topic(name):
            if principal is not None and not may(principal, Action.PUBLISH, name):
                return Promise.refused(refusal(principal, Action.PUBLISH, name))
            return Work(self._publish_new({topic: events}, principal))
        if root is not None:
            topic = root.absolute(topic)
            events = [msgspec.structs.replace(event, subject=root.absolute(event.subject)) for event in events]
        key: str | tuple[str, str] = topic
        if principal is None or principal.rights is None:
            principal = self._principal
        else:
            key = topic, principal.name
        if len(events) >= GATHER_RECORDS_MAX:
            self._flush()
            return self.broker.publish(Publication(principal, PROTOCOL, events, topic))
        if not self._gathered:
            self._loop.call_soon(self._flush)
        found = self._gathered.get(key)
        if found is None:
            found = self._gathered[key] = (events, Promise(), topic, principal)
        else:
            found[0].extend(events)
        return found[1]

    async def _publish_new(self, by_topic: dict[str, list[Event]], principal: Identity | None) -> None:
        for topic in by_topic:
            await self.ensure_topic(topic, principal)
        await all_of([self.publish_to(topic, batch, principal) for topic, batch in by_topic.items()]).wait()

    def _flush(self) -> None:
        """Append what is gathered."""
        gathered, self._gathered = self._gathered, {}
        for events, promise, topic, principal in gathered.values():
            receipt = self.broker.publish(Publication(principal, PROTOCOL, events, topic))
            receipt.when_done(partial(_resolve, promise))

    def fresh(self, member: Member, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Return the deliveries whose time to live is not over, to a tenth of a second; the group is done with others.

        A delivery that a client may have seen before stays (10).
        """
        now, rule = self.clock.now_ms(), self.settings.expire
        if rule == "none" or now - deliveries[0].timestamp < TTL_STEP_MS:
            return deliveries
        fresh: list[Delivery] = []
        expired: list[Delivery] = []
        for delivery in deliveries:
            is_over = delivery.attempt == 1 and now - delivery.timestamp > _ttl_ms(delivery.headers, rule)
            (expired if is_over else fresh).append(delivery)
        if expired:
            self.metrics.live_dropped_total.labels(PROTOCOL, "expired").inc(len(expired))
            self._loop.call_soon(lambda: None if member.closed else member.ack(expired))
        return fresh

    def reject(self, member: Member, deliveries: Sequence[Delivery], reason: str) -> None:
        """Reject deliveries as dead letters when the call that brought them is over."""
        self._loop.call_soon(lambda: None if member.closed else member.reject(deliveries, reason=reason))

    # -- questions ---------------------------------------------------------------------------------------------------

    def ask(self, event: Event, ttl_ms: float, principal: Identity) -> Request[Reply]:
        """Send a request to a responder; every failure is the error of the request."""
        subject = principal.absolute(event.subject)
        deadline = self.clock.monotonic() + min(ttl_ms, TTL_MS_MAX) / 1000
        return self.broker.request(subject, event.payload, event.headers, deadline, principal)

    def remember(self, question: Question, principal: Identity, done: Callable[[str], object] | None = None) -> str:
        """Return the id under which a responder answers a question; while the gate is on, the principal alone may.

        The id is forgotten as soon as nobody waits for the reply; `done` is called with it then.
        """
        name = f"babelbus-{self.next_number()}"
        self._questions[name] = question.key, principal.name, question.subject

        def forget(_: Request[Reply]) -> None:
            self._questions.pop(name, None)
            if done is not None:
                done(name)

        self.broker.responders.requests.when_done(question.key, forget)
        return name

    def respond(self, name: str, reply: Reply, principal: Identity | None) -> bool:
        """Answer a question; `False`: nobody waits for the reply, there was one before, or another client was asked."""
        found = self._questions.get(name)
        if found is None:
            self.metrics.requests_late_replies_total.inc()
            return False
        if self.callers.enforcing and (principal is None or principal.name != found[1]):
            return False
        return self.broker.respond(found[0], reply)

    def forget(self, names: Iterable[str], reason: str = "have gone") -> None:
        """Remove questions that their responder will not answer; requesters are told if no other group was asked."""
        for name in list(names):  # `remember` removes them where a request ends
            key, _, subject = self._questions.pop(name, (None, "", ""))
            if key is not None:
                self.broker.responders.decline(key, f"the responders of {subject!r} {reason}")

    def abandon(self, requests: Iterable[Request[Reply]]) -> None:
        """End requests whose client is gone: they would take the place of others until their time to live is over."""
        for request in list(requests):
            self.broker.responders.requests.abandon(request)

    # -- life --------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Close the connections of silent clients; called about once a second."""
        self.callers.tick()
        for peer in list(self.peers) if self.callers.enforcing else ():
            peer.check_proof()
        now = self.clock.monotonic()
        oldest = now - self.settings.idle_seconds
        for peer in [peer for peer in self.peers if peer.heard_at < oldest or peer.ends_at <= now]:
            peer.expire()

    def stop(self) -> None:
        """Send a goodbye to every client whose session ends here: the server stops."""
        self.stopping = True
        for peer in list(self.peers):
            if not peer.stays:
                peer.say_goodbye(STOPS)
