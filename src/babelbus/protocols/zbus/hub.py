"""The state that all zbus connections of one server share: MQs and channels, peers, bindings, calls that wait.

An MQ is a topic of the same name, a channel the consumer group of that name on it (docs/specifications/zbus.md, 1 and
5).
"""

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Collection
from typing import Any, Protocol

import msgspec

from babelbus.clock import Clock
from babelbus.config import ZbusSettings
from babelbus.core.access import NOBODY, SERVER, AccessRefusedError, Action, Identity, Root, covers, owner_of, refusal
from babelbus.core.broker import Broker
from babelbus.core.catalog import TopicExistsError
from babelbus.core.groups import BEGINNING, END, Group, GroupOwnedError, GroupSettings, Member, at_offset
from babelbus.core.publish import Bodies, Content, Publication
from babelbus.core.receipt import DONE, Promise, Receipt
from babelbus.core.subject import EVERYTHING, check_topic_name, text_of
from babelbus.core.topic import Topic
from babelbus.core.work import Work
from babelbus.errors import BabelbusError
from babelbus.identities.directory import Directory
from babelbus.identities.guessing import Guessing
from babelbus.metrics import Metrics
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus.book import UNKNOWN, Book, Entry
from babelbus.protocols.zbus.calls import Calls
from babelbus.protocols.zbus.errors import NotFoundError, RequestError
from babelbus.protocols.zbus.filters import record_filter
from babelbus.protocols.zbus.heads import Heads, stored_id
from babelbus.protocols.zbus.messages import PROTOCOL, Mask, Message
from babelbus.protocols.zbus.proofs import Prover, ReplayGuard
from babelbus.protocols.zbus.records import from_record
from babelbus.protocols.zbus.rooted import bound
from babelbus.protocols.zbus.routing import BindTable, Prefixes, UrlEntry, path_of
from babelbus.protocols.zbus.services import Services
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import CorruptRecordError, encode_bodies
from babelbus.storage.errors import OffsetOutOfRangeError
from babelbus.storage.files import FileSystem

log = logging.getLogger(__name__)

FILTER_KIND = "zbus"
MASK_LABEL = "zbus.mask"
_MASK = re.compile("-?[0-9]{1,19}")
ENGINES = (m.MEMORY, m.DISK, m.DATABASE)
IDS = 1024
"""So many new ids are made at once."""
RING = {
    "retention_records": 1000, "segment_bytes": 2**20, "cleanup": "delete",
    "retention_bytes": None, "retention_seconds": None,
}  # fmt: skip
"""How an MQ of type `memory` is kept: its newest 1000 messages (section 5.1)."""
SLACK_BYTES = 64 * 2**20
"""Most that is kept beyond those for channels whose consumers take more."""


class Peer(Protocol):
    """A session, as others of the server know it."""

    @property
    def called(self) -> Collection[str]:
        """The MQs to which it has sent what a service may answer."""

    def take_reply(self, message: Message) -> bool:
        """Send what `route` brought; return whether somebody waits for it."""

    def hold(self) -> None:
        """Stop deliveries."""

    def tick(self, now: float) -> None:
        """Check the connection; called about once a second."""


class Subscriber(Protocol):
    """A subscription of a session to a channel, as the hub knows it."""

    principal: Identity
    session_id: str
    address: str
    mq: str
    channel: str
    filter: str | None
    member: Member | None

    @property
    def window(self) -> int | None:
        """How many more messages it takes."""

    def join(self, group: Group) -> None:
        """Add the subscription to the group of the channel."""


class Hub:
    """The shared part of all zbus connections of one server."""

    def __init__(
        self,
        broker: Broker,
        files: FileSystem,
        folder: str,
        *,
        metrics: Metrics,
        clock: Clock,
        guessing: Guessing,
        directory: Directory | None = None,
        settings: ZbusSettings,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.broker = broker
        self.gate = broker.gate
        self.directory = directory
        """The proofs of the principals."""
        self.groups = broker.groups
        self.settings = settings
        self.clock = clock
        self.bindings = BindTable()
        self.calls = Calls(clock, loop, metrics)
        """Calls over plain HTTP, which wait for the answer of a service behind an MQ (6.3)."""
        self.calls.keep_expired = settings.rpc_keep_expired
        self._door = guessing.door(m.PROTOCOL)
        window = settings.replay_window_seconds
        self._guard = None if window is None else ReplayGuard(window)
        self.peers: dict[str, Peer] = {}
        self.subscribers: dict[tuple[str, str], dict[Subscriber, None]] = {}
        self.stopping = False
        """Set when the server stops: what goes now comes again, and no MQ is removed for it."""
        self._book = Book(broker, files, folder)
        self.published_ms: dict[str, int] = {}
        """When something was last published, in ms since the epoch, by MQ."""
        self.subscribed_ms: dict[str, dict[str, int]] = {}
        """When somebody last subscribed, in ms since the epoch, by MQ and channel."""
        self._heads: dict[str, dict[Root | None, Heads]] = {}
        self._ids: list[str] = []
        self.services = Services(broker, self.calls, self.find_topic, self.publish, self.new_id)
        self.groups.register_filter(FILTER_KIND, record_filter)
        self._book.open(self._current)

    def prover(self, address: str | None, connection: str) -> Prover:
        """Return the checks of the signatures of a new connection."""
        return Prover(self._door, self._guard, self.clock.monotonic, address, connection)

    def new_id(self) -> str:
        """Return a new UUID of version 4; costs about 0.5 us, a fifth of `uuid.uuid4`."""
        if not self._ids:  # many at a time: asking the system for randomness costs more than the rest
            digits = os.urandom(16 * IDS).hex()
            self._ids = [_format_id(digits[at : at + 32]) for at in range(0, len(digits), 32)]
        return self._ids.pop()

    # -- MQs ---------------------------------------------------------------------------------------------------------

    def exists(self, mq: str) -> bool:
        """Return whether there is an MQ of this name; a topic of the server's own is no MQ."""
        return self.find_topic(mq) is not None

    def is_called(self, name: str) -> bool:
        """Return whether a url may call this name: an MQ, or a subject that responders of other protocols answer."""
        return self.exists(name) or self.broker.responders.answers(name)

    def find_topic(self, mq: str) -> Topic | None:
        """Return the topic of an MQ, `None` if the MQ does not exist."""
        topic = self.broker.find_topic(mq)
        return None if topic is None or topic.reserved else topic

    def topic(self, mq: str) -> Topic:
        """Return the topic that an MQ is.

        Raises:
            NotFoundError: there is no such MQ.
            ClosedTopicError: its topic could not be opened.
        """
        topic = self.find_topic(mq)
        if topic is None:
            raise self.broker.why_closed(mq) or NotFoundError(m.mq_not_found(mq))
        return topic

    async def ensure_mq(
        self, mq: str, mq_type: str | None, mask: int | None, creator: str, principal: Identity
    ) -> Topic:
        """Return an MQ; create it if it does not exist (4.1). Its type never changes, its mask does.

        Raises:
            AccessRefusedError: the principal may not manage the MQ.
            RequestError: there is no such type.
            InvalidTopicNameError: no topic can have this name.
            StorageError: the disk refused.
        """
        topic = self.topic(mq) if self.broker.has_topic(mq) else None
        if topic is None:
            self.broker.check_managed(principal, mq)
            engine = mq_type or m.MEMORY
            if engine not in ENGINES:
                raise RequestError(m.FAILED, m.type_not_supported(engine))
            if engine in self.broker.refused_engines:  # the durable type of a cluster
                engine = "jetstream"
            settings: dict[str, Any] = {"engine": engine, **(RING if engine == m.MEMORY else {})}
            check_topic_name(mq)
            self._check_not_closed(mq)
            entry = Entry(mask or 0, creator, self.clock.now_ms(), owner=owner_of(principal))
            await self._book.put(mq, entry)
            try:
                topic = await self.broker.create_topic(mq, 1, settings, principal)  # one partition: an MQ is one order
            except TopicExistsError:  # another connection was first
                topic = self.topic(mq)
            except BabelbusError:
                await self._book.forget(mq)
                raise
            else:
                # Not awaited: until it is written the entry is believed all the same.
                Work(self._book.put(mq, msgspec.structs.replace(entry, topic_id=topic.id)))
                return topic
        entry = self.entry(topic)
        if mask is None or mask == entry.mask:
            self._check_used(principal, topic)
        else:
            if mask & (Mask.DELETE_ON_EXIT | Mask.EXCLUSIVE):
                self._check_made_here(principal, topic)
            self.broker.check_managed(principal, mq)
            changed = msgspec.structs.replace(entry, mask=mask, topic_id=topic.id, owner=owner_of(principal))
            await self._book.put(mq, changed)
        return topic

    # -- rights ------------------------------------------------------------------------------------------------------

    def sees(self, principal: Identity, topic: Topic) -> bool:
        """Return whether a principal may see an MQ: it may consume or manage the MQ."""
        broker = self.broker
        return broker.may_topic(principal, Action.CONSUME, topic.name) or self.manages(principal, topic)

    def manages(self, principal: Identity, topic: Topic) -> bool:
        """Return whether a principal may manage an MQ."""
        return self.broker.may_manage(principal, topic.name, topic.owner)

    def check_seen(self, principal: Identity, topic: Topic) -> None:
        """Check that a principal may see an MQ.

        Raises:
            AccessRefusedError: it may not.
        """
        if not self.sees(principal, topic):
            raise refusal(principal, Action.CONSUME, topic.name)

    def find_seen(self, principal: Identity, mq: str) -> Topic:
        """Return the topic of an MQ that a principal may see; of others it does not hear whether they are there.

        Raises:
            AccessRefusedError: it may not.
            NotFoundError: there is no such MQ.
            ClosedTopicError: its topic could not be opened.
        """
        topic = self.find_topic(mq)
        if topic is not None:
            self.check_seen(principal, topic)
            return topic
        may_know = self.broker.may_topic(principal, Action.CONSUME, mq) or self.broker.may_manage(principal, mq, "")
        if not may_know:
            raise refusal(principal, Action.CONSUME, mq)
        raise self.broker.why_closed(mq) or NotFoundError(m.mq_not_found(mq))

    def _check_used(self, principal: Identity, topic: Topic) -> None:
        """Check that a principal may see an MQ, or publish to it; else it may not create the MQ.

        Raises:
            AccessRefusedError: it may not.
        """
        if not self.broker.may_some(principal, Action.PUBLISH, topic.name) and not self.sees(principal, topic):
            raise refusal(principal, Action.MANAGE, topic.name)

    def _check_made_here(self, principal: Identity, topic: Topic) -> None:
        """Check that an MQ was made by zbus; the rights of a principal decide instead if there are any.

        Raises:
            RequestError: another protocol has made it.
        """
        if principal.rights is None and not self.entry(topic).creator:
            raise RequestError(m.FORBIDDEN, f"MQ={topic.name} was {m.MADE_ELSEWHERE}")

    def _check_channel(self, principal: Identity, group: Group) -> None:
        """Check that a group was made by zbus; the rights of a principal decide instead if there are any.

        Raises:
            RequestError: another protocol has made it.
        """
        if principal.rights is None and group.settings.filter_kind != FILTER_KIND:
            raise RequestError(m.FORBIDDEN, f"Channel={group.name} was {m.MADE_ELSEWHERE}")

    def _executor(self, owner: str) -> Identity:
        """Return for whom a mask is executed: its owner; a mask from before the gate is nobody's."""
        return self.gate.owner(f"{PROTOCOL}:mask", owner)

    # -- entries -----------------------------------------------------------------------------------------------------

    def entry(self, topic: Topic) -> Entry:
        """Return the entry of an MQ; an entry of an earlier topic of the same name does not count."""
        entry = self._book.entries.get(topic.name, UNKNOWN)
        return entry if entry.topic_id in ("", topic.id) else UNKNOWN

    def _current(self, mq: str, entry: Entry) -> Entry | None:
        """Return what holds of an entry of the last run; topics in memory have another id in each."""
        topic = self.find_topic(mq)
        if topic is None:
            return entry if mq in self.broker.damaged_topics else None
        if topic.settings.engine == m.MEMORY:
            if entry.ring and topic.settings.retention_records is None:  # made before there was the setting
                self.broker.alter_topic(mq, RING, SERVER).when_done(_note_not_altered)
            return msgspec.structs.replace(entry, topic_id=topic.id, ring=False)
        return entry if entry.topic_id in ("", topic.id) else None

    def _check_not_closed(self, mq: str) -> None:
        closed = self.broker.why_closed(mq)
        if closed is not None:
            raise closed

    async def remove_mq(self, mq: str, principal: Identity = NOBODY) -> None:
        """Remove an MQ with its channels and messages; it need not be there.

        Raises:
            AccessRefusedError: the principal may not manage the MQ.
            RequestError: another protocol has made it, and the gate is off.
            StorageError: the disk refused.
        """
        topic = self.find_topic(mq)
        if topic is None:
            self.broker.check_managed(principal, mq)
            self._check_not_closed(mq)
        else:
            self._check_made_here(principal, topic)
            await self.broker.remove_topic(mq, principal)
        await self._book.forget(mq)
        self.published_ms.pop(mq, None)
        self.subscribed_ms.pop(mq, None)
        self._heads.pop(mq, None)
        self.calls.forget(mq)

    def mask_of(self, mq: str) -> int:
        """Return the mask of an MQ."""
        topic = self.find_topic(mq)
        return 0 if topic is None else self.entry(topic).mask

    def publish(
        self, principal: Identity, topic: Topic, bodies: list[bytes], timestamp: int, size_bytes: int
    ) -> Receipt:
        """Publish the bodies of records with one timestamp, and release the memory of messages that they replace."""
        timestamps = [timestamp] * len(bodies)
        content: Content = Bodies(bodies, timestamps, size_bytes)
        if len(topic.partitions) > 1:  # the keys of events choose among them
            stored = encode_bodies(bodies, timestamps, 0)
            content = topic.decode(bytes(stored.data), stored.positions)
        receipt = self.broker.publish(Publication(principal, PROTOCOL, content, topic.name))
        self.published_ms[topic.name] = self.clock.now_ms()
        self._trim(topic)
        return receipt

    def _trim(self, topic: Topic) -> None:
        """Release the memory of messages that nobody can get any more, of a topic that keeps the newest alone.

        Channels whose consumers take more are waited for, up to `SLACK_BYTES`: their turn comes within a moment.
        """
        if topic.settings.engine != m.MEMORY or topic.settings.retention_records is None:
            return
        for partition in topic.partitions:
            if partition.log.part_count == 1:
                continue
            keep_from = partition.oldest
            if partition.log.size_bytes < SLACK_BYTES:
                groups = self.groups.on_topic(topic.name)
                waiting = [group for group in groups if any(member.capacity for member in group.members)]
                keep_from = min([keep_from, *(group.stored()[partition.number].committed for group in waiting)])
            partition.log.trim(keep_from)

    def heads(self, mq: str, root: Root | None = None) -> Heads:
        """Return what writes the messages of an MQ for those of a root who get them."""
        topic = self.broker.find_topic(mq)
        topic_id = "" if topic is None else topic.id
        roots = self._heads.setdefault(mq, {})
        found = roots.get(root)
        if found is None or found.topic_id != topic_id:  # others may have removed and made it again
            found = roots[root] = Heads(mq, topic_id, root)
        return found

    # -- channels ----------------------------------------------------------------------------------------------------

    def channel(self, mq: str, channel: str) -> Group:
        """Return the group that a channel is, at a message that is still kept.

        Raises:
            NotFoundError: there is no such MQ or channel.
        """
        group = self.groups.find(mq, channel)
        if group is None:
            self.topic(mq)
            raise NotFoundError(m.channel_not_found(channel))
        if group.topic.settings.engine == m.MEMORY:
            group.catch_up()
        return group

    def ensure_channel(
        self,
        topic: Topic,
        channel: str,
        *,
        mask: int | None,
        wanted: str | None,
        offset: int | None,
        principal: Identity,
    ) -> Promise:
        """Create or alter a channel (4.1); what it returns is done when that is durable.

        Raises:
            AccessRefusedError: the principal may not consume the MQ, or not change the channel.
            InvalidGroupNameError, InvalidSettingError: no channel can be called so, or set so.
            RequestError: another protocol has made it, and the gate is off.
        """
        group = self.groups.find(topic.name, channel)
        if group is None:
            labels = {} if mask is None else {MASK_LABEL: str(mask)}
            settings = GroupSettings(filter=wanted or None, filter_kind=FILTER_KIND, labels=labels)
            start = END if topic.settings.engine == m.MEMORY else BEGINNING
            if offset is not None:
                start = at_offset(max(offset, 0))
            group = self.groups.create(topic.name, channel, settings, start=start, principal=principal)
            for subscriber in self.subscribers.get((topic.name, channel), {}):
                if subscriber.member is None:  # it was there when the channel was removed (4.5)
                    with contextlib.suppress(GroupOwnedError):  # another one was first
                        subscriber.join(group)
            return group.saved
        changed = DONE
        self.check_seen(principal, topic)
        changes: dict[str, Any] = {}
        if wanted is not None and (wanted or None) != group.settings.filter:
            changes |= {"filter": wanted or None, "filter_kind": FILTER_KIND}
        if mask is not None and mask != self.channel_mask(group):
            changes["labels"] = {**group.settings.labels, MASK_LABEL: str(mask)}
        if changes or offset is not None:
            self._check_channel(principal, group)
        if changes:
            changed = self.groups.alter(topic.name, channel, changes, principal).saved
        if offset is not None:
            group.seek(at_offset(max(offset, 0)), principal)
        return changed

    def remove_channel(self, mq: str, channel: str, principal: Identity = NOBODY) -> Promise:
        """Remove a channel, which need not be there; what it returns is done when that is durable.

        Raises:
            AccessRefusedError: the principal may not manage the channel.
            RequestError: another protocol has made it, and the gate is off.
            ClosedTopicError: the topic could not be opened, and its channels wait.
        """
        removed = DONE
        group = self.groups.find(mq, channel)
        if group is not None:
            self._check_channel(principal, group)
            removed = self.groups.remove(mq, channel, principal)
        elif not self.broker.may_see(principal, mq):
            raise refusal(principal, Action.MANAGE, mq)
        else:
            self._check_not_closed(mq)
        self.subscribed_ms.get(mq, {}).pop(channel, None)
        return removed

    async def id_at(self, topic: Topic, offset: int) -> str | None:
        """Return the id of the message at an offset, `None` if there is no message there."""
        partition = topic.partitions[0]
        if not partition.log.first_offset <= offset < partition.high_watermark:
            return None
        try:
            chunk = await partition.read(offset, 0)
        except (OffsetOutOfRangeError, CorruptRecordError):
            return None
        record = next(iter(iterate(decode_chunk(chunk.data))), None)
        if record is None or record.offset != offset:
            return None
        given = from_record(record.payload, record.key, record.headers).headers.get("id")
        return stored_id(topic.name, topic.id, 0, offset) if given is None else given

    def channel_mask(self, group: Group) -> int:
        """Return the mask of a channel; clients of other protocols may have written anything there."""
        text = group.settings.labels.get(MASK_LABEL, "0")
        return int(text) if _MASK.fullmatch(text) else 0

    # -- subscriptions -----------------------------------------------------------------------------------------------

    def subscribed(self, subscriber: Subscriber) -> None:
        """Record a subscription: it makes the MQ a service that answers requests of the bus."""
        self.services.add(subscriber.mq)
        self.subscribers.setdefault((subscriber.mq, subscriber.channel), {})[subscriber] = None

    def touched(self, mq: str, channel: str) -> None:
        """Record when somebody last subscribed."""
        self.subscribed_ms.setdefault(mq, {})[channel] = self.clock.now_ms()

    def unsubscribed(self, subscriber: Subscriber) -> None:
        """Handle the end of a subscription; remove the MQ and the channel that were to end with it (5.4)."""
        key = subscriber.mq, subscriber.channel
        others = self.subscribers.get(key)
        if others is not None:
            if subscriber in others:
                del others[subscriber]
                self.services.remove(subscriber.mq)
            if not others:
                del self.subscribers[key]
        if self.stopping or not self.exists(subscriber.mq):
            return
        group = self.groups.find(*key)
        if group is not None and not group.members and self.channel_mask(group) & Mask.DELETE_ON_EXIT:
            try:
                self.remove_channel(*key, self._executor(group.owner)).when_done(_note_not_removed)
            except BabelbusError as error:
                log.warning("a channel was to be removed with its last subscriber: %s", error)
        if self.mask_of(subscriber.mq) & Mask.DELETE_ON_EXIT and not any(
            group.members for group in self.groups.on_topic(subscriber.mq)
        ):
            owner = self.entry(self.topic(subscriber.mq)).owner
            Work(self.remove_mq(subscriber.mq, self._executor(owner))).when_done(_note_not_removed)

    def route(
        self, target: str, message: Message, principal: Identity, *, taker: str, consumed: Collection[str]
    ) -> bool:
        """Deliver the answer of a service to its caller; return whether the caller waits for it.

        A call that waits is answered by who was handed it. Only a caller over WebSocket knows its calls: while the
        gate is on, their answers come from who consumes an MQ that the caller has called.

        Raises:
            RequestError: the service did not take the request.
        """
        key = target, message.headers.get("id", "")
        peer = self.peers.get(target)
        is_taken = self.calls.may_answer(key, taker)
        if is_taken and principal.rights is not None and peer is not None and not self.calls.waits(key):
            is_taken = any(mq in peer.called for mq in consumed)
        if not is_taken:
            known = "" if principal.rights is None else refusal(principal, Action.SUBSCRIBE, target).id
            raise RequestError(m.FORBIDDEN, m.NOT_TAKEN + (f" (refusal {known})" if known else ""))
        if target == self.services.id:
            return self.services.take_reply(message)
        return peer is not None and peer.take_reply(message)

    def bind(self, mq: str, entries: Collection[UrlEntry], principal: Identity, *, clear: bool) -> None:
        """Register urls for an MQ.

        Raises:
            AccessRefusedError: the principal does not see the MQ.
            RequestError: the urls would take over the calls of an MQ that the principal does not see.
            MalformedMessageError: there would be too many urls.
        """
        if principal.rights is not None:
            topic = self.find_topic(mq)
            if topic is None:
                self.broker.check_managed(principal, mq)
            elif not self.sees(principal, topic):
                raise refusal(principal, Action.MANAGE, mq)
            self._check_urls(mq, entries, principal)
        root = principal.root
        if root is not None:
            entries = [UrlEntry(bound(entry.url, root), mq) for entry in entries]
        name = "" if principal.rights is None else principal.name
        self.bindings.bind(mq, entries, clear=clear, principal=name)

    def _check_urls(self, mq: str, entries: Collection[UrlEntry], principal: Identity) -> None:
        """Check that urls take no calls from the services of others, whose urls begin alike."""
        urls, root = [entry.url for entry in entries], principal.root
        everything = EVERYTHING if root is None else root.pattern
        if any(not url.strip("/") for url in urls) and not covers(principal, Action.MANAGE, everything):
            raise refusal(principal, Action.MANAGE, text_of(everything))
        own = Prefixes(urls)
        kept = own if root is None else Prefixes([bound(url, root) for url in urls])
        taken = {owner for url, owner in self.bindings.items() if kept.begin(url) or kept.has_below(url)}
        mqs = [topic.name for topic in self.mqs() if root is None or root.contains(topic.name)]
        paths = ((path_of(principal.relative(name)), name) for name in mqs)
        taken |= {owner for path, owner in paths if own.begin(path) or own.has_below(f"{path}/")}
        for owner in sorted(taken - {mq}):
            topic = self.find_topic(owner)
            try:
                if topic is None:
                    self.broker.check_managed(principal, owner)
                else:
                    self.check_seen(principal, topic)
            except AccessRefusedError as error:  # its text names the MQ, which the principal may not know of
                raise RequestError(m.FORBIDDEN, m.urls_are_taken(error.id)) from error

    def mqs(self) -> list[Topic]:
        """Return the topics that are MQs: all but the server's own."""
        return [topic for topic in self.broker.topics() if not topic.reserved]

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Check connections and MQs in memory; called about once a second."""
        now = self.clock.monotonic()
        for peer in list(self.peers.values()):
            peer.tick(now)
        for mq, entry in list(self._book.entries.items()):
            topic = self.find_topic(mq)
            if mq in self.broker.damaged_topics:
                continue
            if topic is None or entry.topic_id not in ("", topic.id):
                Work(self._book.forget(mq))  # others have removed it
            else:
                self._trim(topic)

    def stop(self) -> None:
        """Stop all deliveries: the server stops, and later deliveries might not arrive."""
        self.stopping = True
        for peer in self.peers.values():
            peer.hold()
        self.calls.close()


def _format_id(digits: str) -> str:
    """Return the UUID of 32 random digits, with version and variant in place (RFC 9562, section 5.4)."""
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def _note_not_removed(work: Promise) -> None:
    if work.error is not None:
        log.warning("an MQ was to be removed with its last subscriber: %s", work.error)


def _note_not_altered(work: Promise) -> None:
    if work.error is not None:
        log.warning("an MQ in memory keeps all its messages: %s", work.error)
