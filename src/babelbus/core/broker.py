"""The broker that all sessions use: the topics of `catalog`, publishing, live subscriptions, requests, the state."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from babelbus.clock import Clock
from babelbus.config import QuotaSettings, StagingLimits
from babelbus.core.access import (
    NOBODY,
    SERVER,
    STATE_TOPIC,
    Action,
    Identity,
    Rights,
    check_subscription,
)
from babelbus.core.access.gate import NOTE_ADVICE, NOTE_NAME, Gate, NotedVersion
from babelbus.core.catalog import Catalog, UnknownTopicError
from babelbus.core.failures import count_failures
from babelbus.core.groups import COMMIT_SECONDS, READ_AHEAD_BYTES, Groups
from babelbus.core.json_text import json_text
from babelbus.core.partition import Partition
from babelbus.core.publish import Publication
from babelbus.core.quotas import Quotas
from babelbus.core.receipt import DONE, Promise, Receipt, join
from babelbus.core.record import Event
from babelbus.core.request import Key, Reply, Request, Responders
from babelbus.core.router import Receiver, Router, Subscription
from babelbus.core.settings import TopicSettings
from babelbus.core.state import (
    KEY_BYTES_MAX,
    NOTHING_PUBLISHED,
    Change,
    Commit,
    GuardedHistory,
    GuardedState,
    History,
    Kind,
    Published,
    State,
    StateLog,
    size_fault,
)
from babelbus.core.subject import Pattern, is_text, text_of
from babelbus.core.tail import TailBudget
from babelbus.core.topic import RESERVED_PREFIX, ReservedTopicError, Topic, stamped
from babelbus.core.transactions import Staging
from babelbus.errors import BabelbusError, StorageError
from babelbus.metrics import Metrics
from babelbus.records.envelope import CONTENT_TYPE, JSON_TYPE, SOURCE_HEADER
from babelbus.records.record import Headers
from babelbus.storage.contract import Store
from babelbus.storage.files import FileSystem
from babelbus.storage.notes import Note

log = logging.getLogger(__name__)

TAIL_CACHE_BYTES = 64 * 2**20
"""Default memory for the newest records of all partitions."""
UNTOLD_KINDS = frozenset((Kind.CHILDREN, Kind.RETAINED, Kind.TESTAMENT))
"""Kinds of state changes that are not events."""


class Broker(Catalog):
    """The topics, and what is published to them. All calls come from the event loop that it was made in."""

    def __init__(
        self,
        stores: Mapping[str, Store],
        *,
        defaults: TopicSettings,
        checkpoint_bytes: int,
        clock: Clock,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        default_partitions: int = 1,
        tail_cache_bytes: int = TAIL_CACHE_BYTES,
        quotas: Quotas | None = None,
        refused_engines: Sequence[str] = (),
    ) -> None:
        quotas = quotas or Quotas(QuotaSettings(), clock, metrics)
        super().__init__(
            stores,
            defaults,
            checkpoint_bytes,
            clock,
            metrics,
            loop,
            default_partitions,
            TailBudget(tail_cache_bytes),
            quotas,
            on_visible=self._route,
            is_heard=lambda: not self.router.empty,
            refused_engines=refused_engines,
        )
        self.on_sources_changed = self.access_changed
        self.router = Router(self._sources_of, quotas)
        self.gate: Gate
        """The table of access; there once `open_gate` has returned, which is called before `open_state`."""
        self.responders = Responders(clock, loop, metrics, quotas)
        self.state: State
        self.state_receiver: object = object()
        """The shared receiver of the router that hears of the state's changes from the state itself."""
        self.history: History
        self.staging: Staging
        """Staged, atomic appends; there once `open_staging` has returned, as `state` and `groups` once theirs have."""
        self.groups: Groups
        self.wildcards: Literal["narrow", "refuse"] = "narrow"
        """The answer to a subscription to a pattern of which the principal is granted a part."""
        self._opened: list[Callable[[], Awaitable[None]]] = []
        """The functions that close the opened parts, in the order of opening."""

    # -- parts -------------------------------------------------------------------------------------------------------

    def open_gate(
        self,
        files: FileSystem,
        folder: str,
        *,
        settings: TopicSettings,
        audit_settings: TopicSettings,
        mode: Literal["off", "enforce"] = "off",
        wildcards: Literal["narrow", "refuse"] = "narrow",
        accept_version: int | None = None,
    ) -> Gate:
        """Open the gate, whose table and audit are topics with these settings, made when the first record comes.

        The version of the table is noted in `folder`; with `accept_version`, the table may lack all changes behind it.

        Raises:
            StorageError: the table cannot be read whole, or lacks changes that it had.
        """
        gate = Gate(
            self,
            self._clock,
            self._loop,
            Note(files, f"{folder}/{NOTE_NAME}", NotedVersion, advice=NOTE_ADVICE),
            settings=settings,
            audit_settings=audit_settings,
            mode=mode,
            accept_version=accept_version,
        )
        gate.open()
        gate.on_changed += [self.access_changed, self._set_quotas]
        self.gate, self.wildcards = gate, wildcards
        self.responders.whole_patterns = wildcards == "refuse"
        self._set_quotas()
        return gate

    def open_state(
        self,
        files: FileSystem,
        folder: str,
        *,
        settings: TopicSettings,
        checkpoint_bytes: int,
        transient: str,
        key_bytes_max: int = KEY_BYTES_MAX,
        away: Iterable[str] = (),
        since: int | None = None,
    ) -> State:
        """Open the state, kept by a topic with these settings and checkpoints in `folder`; see `State.open`.

        Raises:
            StorageError: its log cannot be opened or read.
        """
        topic = self.open_reserved(STATE_TOPIC, settings)
        kept = StateLog(topic, self.publish, files, folder, checkpoint_bytes=checkpoint_bytes, transient=transient)
        self.state = State(kept, self._publish_changes, key_bytes_max=key_bytes_max)
        if hasattr(self, "gate"):
            self.state.rights_of = self._rights_of
        self.state.open(self._topic_of_key, away, since)
        self._opened.append(self.state.close)
        self.history = History(topic)
        return self.state

    def open_groups(
        self,
        files: FileSystem,
        folder: str,
        commit_seconds: float = COMMIT_SECONDS,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> Groups:
        """Open the consumer groups, whose cursors are kept in `folder`.

        Raises:
            StorageError: the disk refused.
        """
        self.groups = Groups(
            self,
            files,
            folder,
            clock=self._clock,
            loop=self._loop,
            commit_seconds=commit_seconds,
            read_ahead_bytes=read_ahead_bytes,
            quotas=self.quotas,
        )
        self.groups.open()
        self._on_changed.append(self.groups.topics_changed)
        self._opened.append(self.groups.close)
        return self.groups

    def open_staging(self, files: FileSystem, folder: str, settings: StagingLimits | None = None) -> Staging:
        """Open what is staged in `folder`, and go on with commits that a crash cut short; `settle` waits for them.

        Raises:
            StorageError: the disk refused.
        """
        self.staging = Staging(
            files,
            folder,
            topics=self._topics,
            publish=self.publish,
            flusher=self._backend("disk").flusher,
            clock=self._clock,
            loop=self._loop,
            settings=settings,
        )
        self.staging.open()
        self._opened.append(self.staging.close)
        return self.staging

    # -- events ------------------------------------------------------------------------------------------------------

    # Each call that changes or shows something asks for the right to do so. A forgotten principal is nobody.

    def state_for(self, principal: Identity) -> "State | GuardedState":
        """Return the state as a principal may read and change it."""
        return self.state if principal.rights is None else GuardedState(self.state, principal)

    def history_for(self, principal: Identity) -> "History | GuardedHistory":
        """Return the history of the state as a principal may read it."""
        return self.history if principal.rights is None else GuardedHistory(self.history, principal)

    def _rights_of(self, principal: str) -> Rights | None:
        """Return the rights that a testament has."""
        return self.gate.table.rights(principal) if self.gate.enforcing else None

    def _set_quotas(self) -> None:
        self.quotas.set_limits(self.gate.table.quotas())

    def access_changed(self) -> None:
        """Update live subscriptions and responders after a change of the table of access."""
        self.router.forget_all()
        self.responders.access_changed()
        if hasattr(self, "groups"):
            self.groups.access_changed()

    def publish(self, publication: Publication) -> Receipt:
        """Publish: the only way into topics and to live subscriptions, for clients and for the server itself.

        Whatever prevents it is the error of the receipt: the right to publish, the topic, the disk. A subject that no
        topic covers is live only; then the receipt is done and has no parts.
        """
        name = publication.topic
        if name is None:
            return self._publish_by_subject(publication)
        topic = self._topics.get(name)
        if topic is None:
            error = self.why_not_open(publication.principal, name)
            if not isinstance(error, UnknownTopicError):
                count_failures(self._metrics, (publication.protocol,), error)
            return Receipt.refused(error)
        principal = publication.principal
        rights = principal.rights
        refused = None
        if not self.may_publish_all(principal, topic):
            refused = self.refuse_events(principal, topic, topic.subjects_of(publication.content))
        if refused is None and rights is not None and topic.has_letters:
            refused = self.refuse_letters(principal, topic)
        if refused is not None:
            return Receipt.refused(refused)
        if topic.reserved and principal is not SERVER:
            reserved = ReservedTopicError(f"topic {name!r} is the server's own and cannot be written to")
            count_failures(self._metrics, (publication.protocol,), reserved)
            return Receipt.refused(reserved)
        return topic.publish(publication)

    def why_not_open(self, principal: Identity, name: str) -> BabelbusError:
        """Return why nothing can be published to a topic that is not open: it is closed, or there is no such topic."""
        closed = self.why_closed(name)
        if closed is None or not self.may_some(principal, Action.PUBLISH, name):
            return UnknownTopicError(f"there is no topic {name!r}")
        return closed

    def _publish_by_subject(self, publication: Publication) -> Receipt:
        """Publish events: to the topics that cover their subjects, or to live subscriptions alone."""
        events = publication.content
        assert isinstance(events, list)
        by_topic: dict[str | None, list[Event]] = {}
        for event in events:
            by_topic.setdefault(self._table.find(event.subject), []).append(event)
        receipts = []
        for name, batch in by_topic.items():
            closed = None if name is None else self.why_closed(name)
            if name is not None and closed is None:
                receipts.append(self.publish(msgspec.structs.replace(publication, topic=name, content=batch)))
                continue
            refused = self.refuse_events(publication.principal, None, {event.subject for event in batch}) or closed
            if refused is not None:
                receipts.append(Receipt.refused(refused))
            elif not self.router.empty:
                self.router.route(stamped(batch, self._clock.now_ms()))
        return join(receipts)

    def _topic_of_key(self, key: str) -> Topic | None:
        name = self._table.find(key)
        return None if name is None else self._topics.get(name)

    def request(
        self, subject: str, payload: bytes | None, headers: Headers, deadline: float, principal: Identity
    ) -> Request[Reply]:
        """Send a request to a subject, with an absolute deadline (`Clock.monotonic`); see `request`."""
        return self.responders.request(subject, payload, headers, deadline, principal)

    def respond(self, key: Key, reply: Reply) -> bool:
        """Answer a question; `False`: nobody waits for the reply any more."""
        return self.responders.requests.respond(key, reply)

    def refuse(self, key: Key, error: BabelbusError) -> None:
        """End a request that its responder cannot answer; nothing happens if nobody waits for the reply any more."""
        self.responders.requests.refuse(key, error)

    def decline(self, key: Key, error: BabelbusError) -> None:
        """Record that a responder did not take a request; if nobody else was asked, it ends with the error."""
        self.responders.requests.decline(key, error)

    async def settle_requests(self, seconds: float) -> None:
        """Wait until no request waits for its reply, at most for some seconds."""
        await self.responders.requests.settle(seconds)

    def end_requests(self) -> None:
        """End the requests that wait for their reply, and refuse further ones: the server stops."""
        self.responders.requests.close()

    def topic_of(self, subject: str) -> str | None:
        """Return the name of the topic that records what is published under a subject, `None` if it is live only."""
        return self._table.find(subject)

    def retains(self, subject: str) -> bool:
        """Return whether events under a subject set values of the state."""
        topic = self._topics.get(self._table.find(subject) or "")
        return topic is not None and topic.retains

    def subscribe(
        self,
        pattern: Pattern,
        receiver: Receiver,
        principal: Identity = NOBODY,
        *,
        shared: bool = False,
        owner: object = None,
    ) -> Subscription:
        """Register a receiver for the events that are published from now on under matching subjects; see `Router.add`.

        `narrowing` of the subscription says whether the principal is granted the whole pattern or a part of it.

        Raises:
            AccessRefusedError: nothing of the pattern is granted, or a part and `wildcards` is "refuse".
            QuotaExceededError: the principal has as many subscriptions as it may.
        """
        check_subscription(principal, pattern, text_of(pattern), whole=self.wildcards == "refuse")
        return self.router.add(pattern, receiver, shared=shared, owner=owner, principal=principal)

    def unsubscribe(self, subscription: Subscription) -> None:
        """End a live subscription."""
        self.router.remove(subscription)

    def _route(self, name: str, events: Sequence[Event]) -> None:
        self.router.route(events)
        topic = self._topics.get(name)
        if topic is not None and topic.retains:
            self._retain(events)

    def _retain(self, events: Sequence[Event]) -> None:
        """Keep the last event of each subject as state; who listens to the state has heard it as an event."""
        state = self.state
        own = self.state_receiver
        for event in events:
            if event.via is own:
                continue
            if not is_text(event.subject) or size_fault(event.subject, state.key_bytes_max) is not None:
                continue  # bytes that are no UTF-8 (sbus), or a key that no client could have set: no key of the state
            if event.payload is not None:
                state.put(event.subject, json_text(event.payload, event.headers), kind=Kind.RETAINED)
            elif state.find(event.subject) is not None:
                state.delete(event.subject, Kind.RETAINED)
        receipt = state.commit("retained")
        receipt.when_done(_note_not_retained)

    def _publish_changes(self, changes: Sequence[Change], commit: Commit) -> Published:
        """Publish changes of the state as events: to topics at once, to live subscriptions when the state is stored."""
        router, find = self.router, self._table.find
        if router.empty and not self._table.names:
            return NOTHING_PUBLISHED
        own, unheard = self.state_receiver, router.empty
        headers = ((CONTENT_TYPE, JSON_TYPE), (SOURCE_HEADER, commit.source.encode()))
        recorded: list[Event] = []
        live: list[Event] = []
        for kind, key, value, _, _ in changes:
            if kind in UNTOLD_KINDS or key is None or key.startswith(RESERVED_PREFIX):
                continue
            topic = find(key)
            if topic is not None and self._has_letters(topic):  # it needs rights to the sources of the letters, too
                topic = None
            if topic is None and (unheard or all(receiver is own for _, receiver in router.route_of(key).receivers)):
                continue
            payload = None if kind == Kind.DELETED else value
            (live if topic is None else recorded).append(Event(key, payload, key.encode(), headers, 0, own))
        receipt: Promise = DONE
        if recorded:
            principal = Identity(commit.source, commit.source, None)
            receipt = self.publish(Publication(principal, commit.protocol, recorded))
        if not live:
            return receipt, NOTHING_PUBLISHED[1]
        return receipt, lambda: router.route(stamped(live, self._clock.now_ms()))

    def _has_letters(self, name: str) -> bool:
        topic = self._topics.get(name)
        return topic is not None and topic.has_letters

    async def settle(self) -> None:
        """Wait until everything that was published is stored, and live subscribers have heard of it, or has failed."""
        while partitions := [one for topic in self.topics() for one in topic.partitions if one.is_unsettled]:
            await asyncio.gather(*map(_flush, partitions))

    async def close(self) -> None:
        """Flush and close everything; publishers that wait for an ack are answered."""
        if hasattr(self, "gate"):
            await self.gate.close()  # first: its audit may have to make a topic
        self._closed = True
        self.end_requests()
        for close in reversed(self._opened):
            await close()
        await self._close_topics()


def _note_not_retained(receipt: Promise) -> None:
    if receipt.error is not None:
        log.warning("events were recorded but not kept as state: %s", receipt.error)


async def _flush(partition: Partition) -> None:
    with contextlib.suppress(StorageError):  # its publishers are told, and nothing waits any more
        await partition.flush()
