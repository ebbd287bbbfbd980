"""The one door for sessions: topics, publishing, reading and live subscriptions; a thin face that delegates."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from babelbus.clock import Clock
from babelbus.config import StagingLimits
from babelbus.core.access import SERVER, AccessRefusedError, Action, Identity, may
from babelbus.core.backend import Backend
from babelbus.core.groups import COMMIT_SECONDS, READ_AHEAD_BYTES, Groups
from babelbus.core.json_text import json_text
from babelbus.core.partition import Partition, TopicClosedError
from babelbus.core.publish import Publication
from babelbus.core.receipt import DONE, Promise, Receipt, join
from babelbus.core.record import Event
from babelbus.core.request import Key, Reply, Request, Responders
from babelbus.core.router import Receiver, Router, Subscription
from babelbus.core.settings import InvalidSettingError, TopicSettings, change_settings
from babelbus.core.state import (
    KEY_BYTES_MAX,
    NOTHING_PUBLISHED,
    Change,
    Commit,
    History,
    Kind,
    Published,
    State,
    StateLog,
    size_fault,
)
from babelbus.core.subject import Pattern, TopicTable, check_topic_name, is_text
from babelbus.core.tail import TailBudget
from babelbus.core.topic import FIRST_ID, RESERVED_PREFIX, ReservedTopicError, Topic, Topics, stamped
from babelbus.core.transactions import Staging
from babelbus.errors import BabelbusError, InvalidTopicNameError, StorageError
from babelbus.metrics import Metrics
from babelbus.records.envelope import CONTENT_TYPE, JSON_TYPE, SOURCE_HEADER
from babelbus.records.record import Headers
from babelbus.storage import notes
from babelbus.storage.contract import Catalog, Store
from babelbus.storage.files import FileSystem, disk_error

log = logging.getLogger(__name__)

PARTITIONS_MAX = 1024
TAIL_CACHE_BYTES = 64 * 2**20
"""Default memory for the newest records of all partitions."""
STATE_TOPIC = "$state"
UNTOLD_KINDS = frozenset((Kind.CHILDREN, Kind.RETAINED, Kind.TESTAMENT))
"""Kinds of state changes that are not events."""


class TopicExistsError(BabelbusError):
    """There is a topic of this name."""


class UnknownTopicError(BabelbusError):
    """There is no topic of this name."""


class _Kept(msgspec.Struct, frozen=True):
    """The stored settings of a topic."""

    partitions: int
    settings: TopicSettings
    id: str = FIRST_ID
    """Another one when the topic is removed and made again; those made before there were ids have the first."""


class Broker:
    """Topics over their stores. All calls come from the event loop that it was made in.

    `stores` gives the store of each engine; the settings of all topics are kept in the one of engine `disk`.
    `on_topics_changed` is called after a topic came, went or grew.
    """

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
    ) -> None:
        self._stores = stores
        self._catalog = cast(Catalog, stores["disk"])
        self._defaults = defaults
        self._checkpoint_bytes = checkpoint_bytes
        self._clock = clock
        self._metrics = metrics
        self._loop = loop
        self._table = TopicTable()
        self._default_partitions = default_partitions
        self._erasing: set[asyncio.Future[None]] = set()
        self._cut_short: set[str] = set()
        """The topics whose removal the start finished: another engine may hold something of them still."""
        self._cleaning: dict[str, asyncio.Task[int]] = {}
        """The cleaning that is under way, by engine."""
        self._closed = False
        self._topics = Topics()
        self.router = Router()
        self.tails = TailBudget(tail_cache_bytes)
        self.backends: dict[str, Backend] = {}
        """The engines that are in use."""
        self.responders = Responders(clock, loop, metrics)
        self.state: State
        self.state_receiver: object = object()
        """The shared receiver of the router that hears of the state's changes from the state itself."""
        self.on_topics_changed: Callable[[], None] = lambda: None
        self.history: History
        self.staging: Staging
        """Staged, atomic appends; there once `open_staging` has returned, as `state` and `groups` once theirs have."""
        self.groups: Groups
        self._on_changed: list[Callable[[], None]] = []
        self._opened: list[Callable[[], Awaitable[None]]] = []
        """The functions that close the opened parts, in the order of opening."""

    # -- topics ------------------------------------------------------------------------------------------------------

    def open(self) -> dict[str, str]:
        """Open every topic that is stored; finish removals that a crash cut short.

        A topic whose settings are damaged stays closed (`Topics.damaged`): the others are served.

        Returns the topics whose removal was finished: token -> name.

        Raises:
            StorageError: a log cannot be opened.
        """
        finished = {}
        for token, name in self._catalog.removed().items():
            self._catalog.erase(token)
            finished[token] = name
        self._cut_short = set(finished.values())
        for name in self._catalog.topics():
            try:
                kept = self._load_settings(name)
            except notes.DamagedNoteError as error:
                log.error("topic %r is not opened, its name stays taken: %s", name, error)
                self._topics.damaged[name] = error
                continue
            stored = self._stores[kept.settings.engine].partition_count(name)
            if stored < kept.partitions and kept.settings.engine != "memory":
                # A crash while it was made or grew, or the wrong database or folder: then this must be seen.
                log.error(
                    "topic %r: %d of its %d partitions are not there (engine %s) and begin anew, empty; "
                    "if they are somewhere else, stop the server now and name that place",
                    name, kept.partitions - stored, kept.partitions, kept.settings.engine,
                )  # fmt: skip
            self._topics[name] = self._open_topic(name, kept.settings, max(kept.partitions, stored), kept.id)
        self._note_names()
        return finished

    def open_state(
        self,
        files: FileSystem,
        folder: str,
        *,
        settings: TopicSettings,
        checkpoint_bytes: int,
        transient: str,
        key_bytes_max: int = KEY_BYTES_MAX,
    ) -> State:
        """Open the state, kept by a topic with these settings and checkpoints in `folder`.

        Raises:
            StorageError: its log cannot be opened or read.
        """
        topic = self.open_reserved(STATE_TOPIC, settings)
        kept = StateLog(topic, self.publish, files, folder, checkpoint_bytes=checkpoint_bytes, transient=transient)
        self.state = State(kept, self._publish_changes, key_bytes_max=key_bytes_max)
        self.state.open(self._topic_of_key)
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

    def open_reserved(self, name: str, settings: TopicSettings) -> Topic:
        """Return a topic of the server's own with these settings; make it at the first start.

        Raises:
            StorageError: the disk refused.
        """
        assert name.startswith(RESERVED_PREFIX)
        topic = self._topics.get(name)
        if self._topics.damaged.pop(name, None) is not None:  # nothing was lost: the settings are the server's own
            kept = _Kept(1, settings, _new_id())
            self._save_settings(name, kept)
            topic = self._topics[name] = self._open_topic(name, settings, 1, kept.id)
        if topic is None:
            return self._make_topic(name, 1, settings)
        if topic.settings != settings:
            self._apply_settings(topic, len(topic.partitions), settings)
        return topic

    def _load_settings(self, name: str) -> "_Kept":
        content = self._catalog.load_settings(name)
        if content is None:  # the folder came from elsewhere
            return _Kept(1, self._defaults)
        advice = "put a copy of the file back, or remove the file: then the topic has the default settings; start again"
        return notes.decode(content, _Kept, path=f"settings.json of topic {name!r}", advice=advice, bare=True)

    def _save_settings(self, name: str, kept: "_Kept") -> None:
        self._catalog.save_settings(name, notes.encode(kept))

    def _open_topic(self, name: str, settings: TopicSettings, partitions: int, topic_id: str) -> Topic:
        if settings.engine == "memory":
            topic_id = _new_id()  # whatever it held is gone
        opened = [self._open_partition(name, settings, number) for number in range(partitions)]
        heard, later = lambda: not self.router.empty, self._loop.call_soon
        return Topic(name, settings, opened, self._clock, self._metrics, self._route, heard, later, topic_id)

    def _backend(self, engine: str) -> Backend:
        backend = self.backends.get(engine)
        if backend is None:
            backend = Backend(engine, self._stores[engine], self._loop, self._clock, self._metrics)
            self.backends[engine] = backend
        return backend

    def _open_partition(self, name: str, settings: TopicSettings, number: int) -> Partition:
        backend = self._backend(settings.engine)
        opened = backend.store.open_partition(name, number, settings.for_log(self._checkpoint_bytes))
        self._metrics.recovered_bytes_cut_total.inc(opened.recovery.cut_bytes)
        self._metrics.corrupt_records_total.inc(sum(bad.next_offset - bad.offset for _, bad in opened.recovery.bad))
        return Partition(
            number,
            opened,
            settings,
            backend,
            self._loop,
            tails=self.tails,
            flush_every_bytes=self._checkpoint_bytes // 2,
        )

    def create_topic(self, name: str, partitions: int | None = None, settings: dict[str, Any] | None = None) -> Topic:
        """Create a topic, durably, with the default number of partitions unless told otherwise.

        Blocks for some flushes of the disk, about 5 ms a partition.

        Raises:
            InvalidTopicNameError: the name is not valid.
            InvalidSettingError: the number of partitions or a setting is not valid.
            TopicExistsError: a topic has this name.
            StorageError: the disk refused.
        """
        check_topic_name(name)
        _check_not_reserved(name)
        if self._closed:
            raise TopicClosedError("the server stops")
        if name in self._topics:
            raise TopicExistsError(f"topic {name!r} exists")
        if name in self._topics.damaged:
            raise TopicExistsError(f"topic {name!r} exists and cannot be opened: {self._topics.damaged[name]}")
        if partitions is None:
            partitions = self._default_partitions
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise InvalidSettingError(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}")
        return self._make_topic(name, partitions, change_settings(self._defaults, settings or {}))

    def _make_topic(self, name: str, partitions: int, settings: TopicSettings) -> Topic:
        store = self._stores[settings.engine]
        if store is not self._catalog and store.partition_count(name):
            if name not in self._cut_short:  # this folder is new to a database that others use, or used
                raise StorageError(
                    f"topic {name!r}: engine {settings.engine} holds records of a topic of this name that this data "
                    "folder does not know; take another name, or the folder or the database that belongs to them"
                )
            store.erase(store.hide(name))
        try:
            kept = _Kept(partitions, settings, _new_id())
            self._save_settings(name, kept)
            self._topics[name] = self._open_topic(name, settings, partitions, kept.id)
        except (OSError, StorageError) as error:
            self._forget(name, store)
            if isinstance(error, StorageError):
                raise
            raise disk_error(error, f"creating topic {name!r}") from error
        self._changed()
        return self._topics[name]

    def _forget(self, name: str, store: Store) -> None:
        """Remove the remains of a topic whose creation failed, so that no restart opens it."""
        for one in {id(each): each for each in (self._catalog, store)}.values():
            try:
                one.erase(one.hide(name))
            except (OSError, StorageError) as error:
                log.debug("nothing to take away of topic %r: %s", name, error)

    def alter_topic(self, name: str, changes: dict[str, Any]) -> Topic:
        """Update settings of a topic while it is used; `partitions` may only grow.

        Raises:
            UnknownTopicError: no topic has this name.
            InvalidSettingError: a setting is unknown, wrong, or cannot change; nothing was changed.
            StorageError: the disk refused.
        """
        topic = self.topic(name)
        _check_not_reserved(name)
        changes = dict(changes)
        partitions = changes.pop("partitions", len(topic.partitions))
        if not isinstance(partitions, int) or not len(topic.partitions) <= partitions <= PARTITIONS_MAX:
            raise InvalidSettingError(
                f"partitions can grow from {len(topic.partitions)} up to {PARTITIONS_MAX}, not become {partitions}"
            )
        made = change_settings(topic.settings, changes)
        if made.engine != topic.settings.engine:
            raise InvalidSettingError("engine is fixed when a topic is made")
        self._apply_settings(topic, partitions, made)
        self._changed()
        return topic

    def _apply_settings(self, topic: Topic, partitions: int, made: TopicSettings) -> None:
        name = topic.name
        try:
            self._save_settings(name, _Kept(partitions, made, topic.id))
            for number in range(len(topic.partitions), partitions):
                topic.partitions.append(self._open_partition(name, made, number))
        except OSError as error:
            raise StorageError(f"topic {name!r} could not be changed: {error.strerror}") from error
        topic.settings = made
        for partition in topic.partitions:
            partition.configure(made, self._checkpoint_bytes)

    def remove_topic(self, name: str) -> None:
        """Remove a topic and its records: gone at once and durably, the space is given back in the background.

        Raises:
            UnknownTopicError: no topic has this name.
            InvalidTopicNameError: the name is reserved for the server's own topics.
            StorageError: the disk refused.
        """
        topic = self.topic(name)
        _check_not_reserved(name)
        del self._topics[name]
        topic.close(TopicClosedError(f"topic {name!r} was removed"))
        try:
            token = self._catalog.hide(name)
        except OSError as error:
            self._topics[name] = self._open_topic(name, topic.settings, len(topic.partitions), topic.id)
            raise StorageError(f"topic {name!r} could not be removed: {error.strerror}") from error
        if topic.settings.engine != "disk":
            store = self._stores[topic.settings.engine]
            self._erase_later(store, store.hide(name))
        self._changed()
        self._erase_later(self._catalog, token)

    def _erase_later(self, store: Store, token: str) -> None:
        erasing = self._loop.run_in_executor(None, store.erase, token)
        self._erasing.add(erasing)
        erasing.add_done_callback(self._erased)

    def _erased(self, erasing: "asyncio.Future[None]") -> None:
        self._erasing.discard(erasing)
        error = erasing.exception()
        if error is not None:
            log.warning("a removed topic could not be erased, the next start tries again: %s", error)

    def _changed(self) -> None:
        self._note_names()
        for listener in self._on_changed:
            listener()
        self.on_topics_changed()

    def _note_names(self) -> None:
        names = {*self._topics, *self._topics.damaged}
        self._table.replace({name for name in names if not name.startswith(RESERVED_PREFIX)})

    def topic(self, name: str) -> Topic:
        """Return a topic.

        Raises:
            UnknownTopicError: no topic has this name.
        """
        try:
            return self._topics[name]
        except KeyError:
            damage = self._topics.damaged.get(name)
            if damage is not None:
                raise UnknownTopicError(f"topic {name!r} cannot be opened: {damage}") from None
            raise UnknownTopicError(f"there is no topic {name!r}") from None

    def find_topic(self, name: str) -> Topic | None:
        """Return a topic, `None` if no topic has this name."""
        return self._topics.get(name)

    def has_topic(self, name: str) -> bool:
        """Return whether there is a topic of this name."""
        return name in self._topics

    def topic_names(self) -> list[str]:
        """Return the names of all topics, sorted; those of the server's own begin with `$`."""
        return sorted(self._topics)

    def topics(self) -> list[Topic]:
        """Return all topics, by name."""
        return [self._topics[name] for name in sorted(self._topics)]

    @property
    def damaged_topics(self) -> Mapping[str, StorageError]:
        """Why topics are not open whose names stay taken."""
        return self._topics.damaged

    # -- events ------------------------------------------------------------------------------------------------------

    def may(self, principal: Identity, action: Action, subject: str) -> bool:
        """Return whether a principal may do this; `publish` asks by itself."""
        return may(principal, action, subject)

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
            return Receipt.refused(UnknownTopicError(f"there is no topic {name!r}"))
        principal = publication.principal
        if principal.grants is not None and not may(principal, Action.PUBLISH, name):
            return Receipt.refused(AccessRefusedError(Action.PUBLISH, name))
        if topic.reserved and principal is not SERVER:
            return Receipt.refused(ReservedTopicError(f"topic {name!r} is the server's own and cannot be written to"))
        return topic.publish(publication)

    def _publish_by_subject(self, publication: Publication) -> Receipt:
        """Publish events: to the topics that cover their subjects, or to live subscriptions alone."""
        events = publication.content
        assert isinstance(events, list)
        by_topic: dict[str | None, list[Event]] = {}
        for event in events:
            by_topic.setdefault(self._table.find(event.subject), []).append(event)
        receipts = []
        for name, batch in by_topic.items():
            if name in self._topics.damaged:
                receipts.append(Receipt.refused(self._topics.damaged[name]))
                continue
            if name is not None:
                receipts.append(self.publish(msgspec.structs.replace(publication, topic=name, content=batch)))
                continue
            refused = self._refuse_live(publication.principal, batch)
            if refused is not None:
                receipts.append(Receipt.refused(refused))
            elif not self.router.empty:
                self.router.route(stamped(batch, self._clock.now_ms()))
        return join(receipts)

    def _refuse_live(self, principal: Identity, events: Sequence[Event]) -> AccessRefusedError | None:
        if principal.grants is not None:
            for subject in {event.subject for event in events}:
                if not may(principal, Action.PUBLISH, subject):
                    return AccessRefusedError(Action.PUBLISH, subject)
        return None

    def _topic_of_key(self, key: str) -> Topic | None:
        name = self._table.find(key)
        return None if name is None else self._topics.get(name)

    def request(
        self, subject: str, payload: bytes | None, headers: Headers, deadline: float, principal: Identity
    ) -> Request[Reply]:
        """Ask those who answer requests to a subject, until an absolute deadline (`Clock.monotonic`); see `request`."""
        return self.responders.request(subject, payload, headers, deadline, principal)

    def respond(self, key: Key, reply: Reply) -> bool:
        """Answer a question; `False`: nobody waits for the reply any more."""
        return self.responders.requests.respond(key, reply)

    def topic_of(self, subject: str) -> str | None:
        """Return the name of the topic that records what is published under a subject, `None` if it is live only."""
        return self._table.find(subject)

    def subscribe(self, pattern: Pattern, receiver: Receiver) -> Subscription:
        """Register a receiver for the events that are published from now on under matching subjects."""
        return self.router.add(pattern, receiver)

    def unsubscribe(self, subscription: Subscription) -> None:
        """End a live subscription."""
        self.router.remove(subscription)

    def _route(self, name: str, events: Sequence[Event]) -> None:
        self.router.route(events)
        topic = self._topics.get(name)
        if topic is not None and topic.settings.retain == "last":
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
        own = self.state_receiver
        headers = ((CONTENT_TYPE, JSON_TYPE), (SOURCE_HEADER, commit.source.encode()))
        recorded: list[Event] = []
        live: list[Event] = []
        for kind, key, value, _, _ in changes:
            if kind in UNTOLD_KINDS or key is None or key.startswith(RESERVED_PREFIX):
                continue
            topic = find(key)
            if topic is None and all(receiver is own for _, receiver in router.route_of(key).receivers):
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

    # -- care --------------------------------------------------------------------------------------------------------

    async def clean(self) -> int:
        """Run retention and compaction, in a thread for each engine; return how many bytes became free.

        An engine whose last cleaning is still under way is left out: it may hang.
        """
        begun = []
        for engine in self.backends.keys() - self._cleaning.keys():
            task = self._cleaning[engine] = self._loop.create_task(self._clean(engine))
            task.add_done_callback(lambda _, engine=engine: self._cleaning.pop(engine))  # type: ignore[misc]
            begun.append(task)
        return sum(await asyncio.shield(asyncio.gather(*begun)))  # `close` waits for it even if we are cancelled

    async def _clean(self, engine: str) -> int:
        freed = 0
        for topic in [topic for topic in self._topics.values() if topic.settings.engine == engine]:
            for partition in topic.partitions:
                if self._closed:
                    return freed
                try:
                    freed += await partition.clean(self._clock.now_ms())
                except (StorageError, OSError) as error:
                    log.warning("cleaning topic %r: %s", topic.name, error)
        return freed

    async def close(self) -> None:
        """Flush and close everything; who still waits for an ack is answered."""
        self._closed = True
        self.responders.requests.close()
        for close in reversed(self._opened):
            await close()
        for topic in self._topics.values():
            topic.close()
        background: set[asyncio.Future[Any]] = {*self._erasing, *self._cleaning.values()}
        if background:
            await asyncio.wait(background)  # nobody touches the folder once the server has given it back
        await asyncio.gather(*(self._loop.run_in_executor(None, one.stop) for one in self.backends.values()))
        for engine, store in self._stores.items():
            if engine not in self.backends:
                store.close()


def _new_id() -> str:
    return secrets.token_hex(8)


def _check_not_reserved(name: str) -> None:
    if name.startswith(RESERVED_PREFIX):
        raise InvalidTopicNameError(f"topic {name!r}: names that begin with {RESERVED_PREFIX} are the server's own")


def _note_not_retained(receipt: Promise) -> None:
    if receipt.error is not None:
        log.warning("events were recorded but not kept as state: %s", receipt.error)
