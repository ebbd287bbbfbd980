"""The topics of all engines: opened at the start, made, altered and removed while the server runs, cleaned and closed.

A change of the topics flushes the disk: a thread of the topic's engine carries it out, in order for each name, while
the event loop serves everything else.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

import msgspec

from babelbus import arrays
from babelbus.clock import Clock
from babelbus.core.access import NOBODY, Action, Identity, check_topic, name_of_owner, owner_of
from babelbus.core.access.gate import ACCESS_TOPIC
from babelbus.core.backend import Backend
from babelbus.core.partition import Partition, TopicClosedError
from babelbus.core.quotas import Quotas
from babelbus.core.receipt import DONE, Promise
from babelbus.core.receipt import settled as finished
from babelbus.core.record import Event
from babelbus.core.settings import InvalidSettingError, TopicSettings, change_settings
from babelbus.core.subject import check_topic_name
from babelbus.core.tail import TailBudget
from babelbus.core.topic import FIRST_ID, RESERVED_PREFIX, ClosedTopicError, Topic
from babelbus.core.topic_rights import TopicRights
from babelbus.core.work import Work, Writer, settled
from babelbus.errors import BabelbusError, InvalidTopicNameError, StorageError
from babelbus.metrics import Metrics
from babelbus.storage import notes
from babelbus.storage.contract import PARTITIONS_MAX, PartitionLog, Store
from babelbus.storage.contract import Catalog as CatalogStore
from babelbus.storage.errors import AlteredError, DiskError, LostPartitionError, TooManyFilesError
from babelbus.storage.files import disk_error

log = logging.getLogger(__name__)

T = TypeVar("T")


class TopicExistsError(BabelbusError):
    """There is a topic of this name."""


class UnknownTopicError(BabelbusError):
    """There is no topic of this name."""


class UnknownEngineError(StorageError):
    """Nothing says which engine has the records of a topic, or its settings name an engine that has none of them."""


class _Kept(msgspec.Struct, frozen=True):
    """The stored settings of a topic."""

    partitions: int
    settings: TopicSettings
    id: str = FIRST_ID
    """Another one when the topic is removed and made again; topics made before there were ids have the first."""
    owner: str = ""
    sources: tuple[str, ...] = ()
    since: dict[str, tuple[int, ...]] = {}


class Catalog(TopicRights):
    """Topics over their stores. All calls come from the event loop that it was made in.

    `stores` gives the store of each engine; the settings of all topics are kept in the store of engine `disk`.
    `on_topics_changed` is called with its name after a topic came, went or grew; the promise that it returns is done
    when the change is noted where the next start looks for it: the space of a removed topic is not given back earlier.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        defaults: TopicSettings,
        checkpoint_bytes: int,
        clock: Clock,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        default_partitions: int,
        tails: TailBudget,
        quotas: Quotas,
        *,
        on_visible: Callable[[str, Sequence[Event]], None],
        is_heard: Callable[[], bool],
        refused_engines: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._stores = stores
        self._catalog = cast(CatalogStore, stores["disk"])
        self._defaults = defaults
        self._checkpoint_bytes = checkpoint_bytes
        self._clock = clock
        self._metrics = metrics
        self._loop = loop
        self._default_partitions = default_partitions
        self._on_visible = on_visible
        self._is_heard = is_heard
        self.refused_engines = refused_engines
        """The engines that no other member of the cluster could read."""
        self._notes = ThreadPoolExecutor(2, "notes")
        self._writers: list[Writer] = []
        self._changes: dict[str, Promise] = {}
        """The last change of each topic that is asked for and not done."""
        self._unlisted: dict[str, Promise] = {}
        """Of the removed topics whose removal is not noted yet, what is done then."""
        self._background: set[asyncio.Future[Any]] = set()
        """Tasks that `close` waits for, so that nobody touches the folder once the server has given it back."""
        self._cut_short: set[str] = set()
        """The removed topics whose engine could not be asked: the engine may hold something of them still."""
        self._cleaning: dict[str, asyncio.Task[int]] = {}
        """The cleaning that is under way, by engine."""
        self._closed = False
        self.tails = tails
        self.quotas = quotas
        self.backends: dict[str, Backend] = {}
        """The engines that are in use."""
        self.on_topics_changed: Callable[[str], Promise] = lambda name: DONE
        self.on_topic_edited: Callable[[str, str, Identity], None] = lambda name, what, by: None
        """Called with name, deed in words and principal, after a topic was made, changed or removed."""
        self._on_changed: list[Callable[[], None]] = []
        self.on_sources_changed: Callable[[], None] = lambda: None

    # -- opening -----------------------------------------------------------------------------------------------------

    def open(self, listed: Mapping[str, int] = MappingProxyType({})) -> dict[str, str]:
        """Open every topic that is stored; finish removals that a crash cut short. Blocks: nobody is served yet.

        A topic of the data folder that cannot be opened, or whose records in another engine somebody has altered, stays
        closed (`damaged_topics`): the others are served.
        `listed` are the numbers of partitions in the list of topics, which is written when a topic is whole. Such a
        partition that is missing was lost; another one that is missing was never made, because of a crash.

        Returns the topics whose removal was finished: token -> name.

        Raises:
            StorageError: an engine beside the data folder cannot open a log, or no further file can be opened.
        """
        finished = self._catalog.removed()
        removed = set(finished.values())
        kept_topics: dict[str, _Kept] = {}
        for name in self._catalog.topics():
            try:
                found = self._load_settings(name, listed.get(name, 0))
            except (OSError, notes.DamagedNoteError, UnknownEngineError) as error:
                self._leave_closed(name, error)
                continue
            if found is not None:
                kept_topics[name] = found
        engines = {"disk", *(kept.settings.engine for kept in kept_topics.values())}
        stored_topics: dict[str, _Kept] = {}
        whole: dict[str, int] = {}
        lost: dict[str, LostPartitionError] = {}
        for name, kept in kept_topics.items():
            engine = kept.settings.engine
            try:
                # Of a topic that was removed and made again, another engine may hold something still.
                stored = self._count_stored(name, engine, () if name in removed else engines - {engine})
            except (OSError, UnknownEngineError) as error:
                self._leave_closed(name, error)
                continue
            if engine == "disk":
                # The table of access is in no list, and an empty table would turn the gate off.
                complete = kept.partitions if name == ACCESS_TOPIC else listed.get(name, 0)
                # A crash leaves the folder of the last partition empty if it comes before the partition's first file.
                whole[name] = max(stored - 1, min(kept.partitions, complete))
            elif engine != "memory" and stored < min(kept.partitions, listed.get(name, 0)):
                lost[name] = LostPartitionError(
                    f"engine {engine} has {stored} of its {kept.partitions} partitions: give it up ('babelbus topics "
                    f"remove {name} --yes'), or name the place that has them (db.url, jetstream.servers), then start "
                    "again"
                )
            missing = 0 if name in lost else kept.partitions - max(stored, whole.get(name, 0))
            if missing > 0 and engine != "memory":
                # A crash while it was made or grew, or the wrong database or folder: then this must be seen.
                log.error(
                    "topic %r: %d of its %d partitions are not there (engine %s) and begin anew, empty; "
                    "if they are somewhere else, stop the server now and name that place",
                    name, missing, kept.partitions, engine,
                )  # fmt: skip
            stored_topics[name] = msgspec.structs.replace(kept, partitions=max(kept.partitions, stored))
        for token, name in finished.items():
            self._finish_removal(token, name, stored_topics)
        self._open_topics(stored_topics, whole, lost)
        names = {*self._topics, *self._topics.damaged}
        public = {name for name in names if not name.startswith(RESERVED_PREFIX)}
        self._table.replace(public)
        if public:
            arrays.load()  # their records need it, and nobody waits yet
        return finished

    def _finish_removal(self, token: str, name: str, stored: Mapping[str, _Kept]) -> None:
        """Remove what its engine still holds of a removed topic, then the rest.

        If that fails, the next start tries again. If `stored` has a topic of this name in the same engine, that topic
        was created after the removal. If it cannot be opened, nobody knows, and all stays.
        """
        if name in self._topics.damaged:
            return
        try:
            content = self._catalog.load_removed(token)
            engine = "disk" if content is None else self._decode_settings(name, content).settings.engine
            if engine not in ("disk", "memory") and (name not in stored or stored[name].settings.engine != engine):
                store = self._stores[engine]
                if store.partition_count(name):
                    store.erase(store.hide(name))
            self._catalog.erase(token)
        except (OSError, BabelbusError) as error:
            self._cut_short.add(name)
            log.warning("topic %r is removed, the next start tries again to erase its records: %s", name, error)

    def _count_stored(self, name: str, engine: str, others: Iterable[str]) -> int:
        """Return how many partitions of a topic an engine has.

        Raises:
            UnknownEngineError: none, and another engine has some.
            OSError, StorageError: the disk or an engine refused.
        """
        stored = self._stores[engine].partition_count(name)
        for other in () if stored else others:
            if self._stores[other].partition_count(name):
                raise UnknownEngineError(
                    f"settings.json of topic {name!r} names engine {engine}, which has none of its records, and engine "
                    f"{other} has some: put the right copy of settings.json back, or take away what engine {other} has "
                    "(disk: the numbered folders); start again"
                )
        return stored

    def _leave_closed(self, name: str, error: OSError | StorageError) -> None:
        """Record why a topic cannot be opened; its name stays taken.

        Raises:
            TooManyFilesError: that is why, so no topic is to blame.
        """
        if isinstance(error, OSError):
            error = disk_error(error, f"reading {error.filename or 'its folder'}")
        if isinstance(error, TooManyFilesError):
            raise error
        if not isinstance(error, notes.DamagedNoteError | UnknownEngineError | LostPartitionError | AlteredError):
            error = DiskError(f"{error}; mend that ('babelbus check' names what is wrong), then start again")
        log.error("topic %r is not opened, its name stays taken: %s", name, error)
        self._topics.damaged[name] = error

    def _open_topics(
        self, stored: dict[str, _Kept], whole: Mapping[str, int], lost: Mapping[str, LostPartitionError]
    ) -> None:
        """Open the logs of topics that are not lost, of some engines several at once."""
        pools: dict[str, ThreadPoolExecutor] = {}
        opening: dict[str, Future[list[PartitionLog]]] = {}
        try:
            for name, kept in stored.items():
                settings, backend = kept.settings, self._backend(kept.settings.engine)
                if backend.fit.opens_at_once > 1 and name not in lost:
                    pool = pools.get(backend.engine)
                    if pool is None:
                        pool = pools[backend.engine] = ThreadPoolExecutor(backend.fit.opens_at_once)
                    opening[name] = pool.submit(self._open_logs, backend, name, settings, range(kept.partitions))
            for name, kept in stored.items():
                if kept.owner:
                    self.quotas.restore(name_of_owner(kept.owner), "topics")
                backend = self._backend(kept.settings.engine)
                if name in lost:
                    self._leave_closed(name, lost[name])
                    continue
                try:
                    if name in opening:
                        logs = opening[name].result()
                    else:
                        logs = self._open_logs(backend, name, kept.settings, range(kept.partitions), whole.get(name, 0))
                except StorageError as error:
                    if backend.store is not self._catalog and not isinstance(error, AlteredError):
                        raise  # the engine is away, perhaps: a later start finds the topic
                    self._leave_closed(name, error)
                    continue
                self._add_topic(name, kept, logs)
        finally:
            for pool in pools.values():
                pool.shutdown(cancel_futures=True)

    def open_reserved(self, name: str, settings: TopicSettings) -> Topic:
        """Return a topic of the server's own with these settings; make it at the first start. Blocks, as `open` does.

        Raises:
            StorageError: the disk refused.
        """
        assert name.startswith(RESERVED_PREFIX)
        topic = self._topics.get(name)
        if topic is None:
            damage = self._topics.damaged.get(name)
            if damage is not None and not isinstance(damage, notes.DamagedNoteError):
                raise type(damage)(f"topic {name!r} cannot be opened: {damage}") from damage
            kept = _Kept(1, settings, _new_id())
            topic = self._add_topic(name, kept, self._store_topic(self._backend(settings.engine), name, kept))
            self._changed(name)
        elif topic.settings != settings:
            self._save_settings(name, _Kept(len(topic.partitions), settings, topic.id))
            self._configure(topic, settings)
        return topic

    def ensure_reserved(self, name: str, settings: TopicSettings) -> Work[Topic]:
        """Return a topic of the server's own; create the topic, durably, if the name is free.

        Errors of the work:
            StorageError: the disk refused.
        """
        assert name.startswith(RESERVED_PREFIX)
        return Work(self._in_turn(name, lambda: self._ensure_reserved(name, settings)))

    async def _ensure_reserved(self, name: str, settings: TopicSettings) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            kept, backend = _Kept(1, settings, _new_id()), self._backend(settings.engine)
            logs = await self._run(backend.changes, lambda: self._store_topic(backend, name, kept))
            topic = self._add_topic(name, kept, logs)
            self._changed(name)
        return topic

    def _load_settings(self, name: str, listed: int) -> _Kept | None:
        """Return what is stored of a topic that has so many partitions in the list of topics.

        `None`: a crash cut its creation short, and there is an empty folder.

        Raises:
            DamagedNoteError, UnknownEngineError: the settings are damaged, or missing and nothing stands for them.
            OSError: the disk refused.
        """
        content = self._catalog.load_settings(name)
        if content is not None:
            return self._decode_settings(name, content)
        if any(store.partition_count(name) for store in (self._catalog, self._stores[self._defaults.engine])):
            return _Kept(max(listed, 1), self._defaults)  # the folder came from elsewhere
        if not listed:
            return None
        raise UnknownEngineError(
            f"settings.json of topic {name!r} is missing, and nothing else says which engine has its records: put a "
            "copy of the file back, or give the topic up and remove its folder and its line in conf/topics; start again"
        )

    def _decode_settings(self, name: str, content: bytes) -> _Kept:
        advice = (
            "put a copy of the file back, or, if the topic has engine disk, remove the file: then it has the default "
            "settings; start again"
        )
        return notes.decode(content, _Kept, path=f"settings.json of topic {name!r}", advice=advice, bare=True)

    def _save_settings(self, name: str, kept: _Kept) -> None:
        try:
            self._catalog.save_settings(name, notes.encode(kept))
        except OSError as error:
            raise disk_error(error, f"the settings of topic {name!r} could not be stored") from error

    def _backend(self, engine: str) -> Backend:
        backend = self.backends.get(engine)
        if backend is None:
            backend = Backend(engine, self._stores[engine], self._loop, self._clock, self._metrics)
            self.backends[engine] = backend
        return backend

    def _open_logs(
        self, backend: Backend, name: str, settings: TopicSettings, numbers: Iterable[int], whole: int = 0
    ) -> list[PartitionLog]:
        """Open the logs of some partitions of a topic; those below `whole` must be there, others are made. Blocks.

        Raises:
            StorageError: a log cannot be opened; all are closed.
        """
        layout = settings.for_log(self._checkpoint_bytes)
        opened: list[PartitionLog] = []
        try:
            for number in numbers:
                if number < whole:
                    opened.append(self._catalog.open_partition(name, number, layout, anew=False))
                else:
                    opened.append(backend.store.open_partition(name, number, layout))
        except (OSError, StorageError) as error:
            _close_logs(opened)
            if isinstance(error, OSError):
                raise disk_error(error, f"topic {name!r} could not be opened") from error
            raise
        return opened

    def _add_topic(self, name: str, kept: _Kept, logs: list[PartitionLog]) -> Topic:
        settings = kept.settings
        topic_id = _new_id() if settings.engine == "memory" else kept.id  # whatever memory held is gone
        partitions = self._make_partitions(settings, logs, 0)
        topic = Topic(
            name,
            settings,
            partitions,
            self._clock,
            self._metrics,
            self._on_visible,
            self._is_heard,
            self._loop.call_soon,
            topic_id,
            kept.owner,
            kept.sources,
            None if settings.engine == "memory" else kept.since,
        )
        self._topics[name] = topic
        self._topics.damaged.pop(name, None)  # of a topic of the server's own, which settings it has is known
        return topic

    def _make_partitions(self, settings: TopicSettings, logs: list[PartitionLog], first: int) -> list[Partition]:
        backend, metrics = self._backend(settings.engine), self._metrics
        for recovery in [opened.recovery for opened in logs if opened.recovery.cut_bytes or opened.recovery.bad]:
            metrics.recovered_bytes_cut_total.inc(recovery.cut_bytes)
            metrics.corrupt_records_total.inc(sum(bad.next_offset - bad.offset for _, bad in recovery.bad))
        return [
            Partition(
                number,
                opened,
                settings,
                backend,
                self._loop,
                tails=self.tails,
                flush_every_bytes=self._checkpoint_bytes // 2,
            )
            for number, opened in enumerate(logs, first)
        ]

    # -- changes -----------------------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        settings: dict[str, Any] | None = None,
        principal: Identity = NOBODY,
        *,
        source: str | None = None,
    ) -> Work[Topic]:
        """Create a topic, durably, with the default number of partitions unless told otherwise. The principal owns it.

        `source` is the topic whose records it is to hold copies of.

        Errors of the work:
            AccessRefusedError: the principal may not manage all subjects that the topic would record.
            InvalidTopicNameError: the name is not valid.
            InvalidSettingError: the number of partitions or a setting is not valid.
            TopicExistsError: a topic has this name.
            QuotaExceededError: the principal owns as many topics as it may.
            StorageError: the disk refused.
        """
        return Work(self._in_turn(name, lambda: self._create(name, partitions, settings or {}, principal, source)))

    def alter_topic(self, name: str, changes: dict[str, Any], principal: Identity = NOBODY) -> Work[Topic]:
        """Update settings of a topic while it is used; `partitions` may only grow.

        Errors of the work:
            AccessRefusedError: the principal may not manage the topic.
            UnknownTopicError: no topic has this name.
            InvalidSettingError: a setting is unknown, wrong, or cannot change; nothing was changed.
            StorageError: the disk refused.
        """
        return Work(self._in_turn(name, lambda: self._alter(name, dict(changes), principal)))

    def remove_topic(self, name: str, principal: Identity = NOBODY) -> Work[None]:
        """Remove a topic and its records: gone at once, then durably; the space is given back in the background.

        A closed topic that has lost a partition is given up so. Other closed topics may have all of their records.

        Errors of the work:
            AccessRefusedError: the principal may not manage the topic.
            UnknownTopicError: no topic has this name.
            InvalidTopicNameError: the name is reserved for the server's own topics.
            StorageError: the disk refused; the topic is still there.
        """
        return Work(self._in_turn(name, lambda: self._remove(name, principal)))

    async def _in_turn(self, name: str, change: Callable[[], Awaitable[T]]) -> T:
        """Run a change of a topic after the changes that were asked for before."""
        before, done = self._changes.get(name), Promise()
        self._changes[name] = done
        try:
            if before is not None:
                await settled(before)
            if self._closed:
                raise TopicClosedError("the server stops")
            return await change()
        finally:
            if self._changes[name] is done:
                del self._changes[name]
                done.resolve()
            else:  # in a turn of its own: of a thousand changes, each would begin inside of the one before
                self._loop.call_soon(done.resolve)

    async def _create(
        self, name: str, partitions: int | None, settings: dict[str, Any], principal: Identity, source: str | None
    ) -> Topic:
        check_topic(principal, Action.MANAGE, name)
        kept = self._check_new(name, partitions, settings, owner_of(principal))
        if source is not None:
            kept = msgspec.structs.replace(kept, sources=tuple(sorted(self._with_sources(source))))
        if kept.owner:
            self.quotas.take(name_of_owner(kept.owner), "topics")
        try:
            if name in self._unlisted:  # after a crash, the partitions of the old topic would look lost in the new one
                await settled(self._unlisted[name])
            engine = kept.settings.engine
            if engine not in self._stores:  # it is opened when a topic first needs it; a database may hang
                await self._loop.run_in_executor(None, self._stores.__getitem__, engine)
            backend = self._backend(engine)
            if not arrays.is_loaded():  # the records of the topic need it
                await self._run(backend.changes, arrays.load)
            logs = await self._run(backend.changes, lambda: self._store_topic(backend, name, kept))
        except BaseException:
            self._give_topic(kept.owner)
            raise
        topic = self._add_topic(name, kept, logs)
        self._changed(name)
        self.on_topic_edited(name, "made", principal)
        return topic

    def _check_new(self, name: str, partitions: int | None, settings: dict[str, Any], owner: str) -> _Kept:
        """Return what is to be stored of a new topic. Raises: the errors of `create_topic`."""
        check_topic_name(name)
        _check_not_reserved(name)
        if name in self._topics:
            raise TopicExistsError(f"topic {name!r} exists")
        if name in self._topics.damaged:
            raise TopicExistsError(f"topic {name!r} exists and cannot be opened: {self._topics.damaged[name]}")
        if partitions is None:
            partitions = self._default_partitions
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise InvalidSettingError(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}")
        made = change_settings(self._defaults, settings)
        if made.engine in self.refused_engines:
            raise InvalidSettingError(
                f"this server is in a cluster, whose other members could not read engine {made.engine}: name jetstream,"
                " or memory for records that may be lost"
            )
        return _Kept(partitions, made, _new_id(), owner)

    async def _alter(self, name: str, changes: dict[str, Any], principal: Identity) -> Topic:
        self.check_managed(principal, name)
        topic = self.topic(name)
        _check_not_reserved(name)
        count = len(topic.partitions)
        partitions = changes.pop("partitions", count)
        if not isinstance(partitions, int) or not count <= partitions <= PARTITIONS_MAX:
            raise InvalidSettingError(
                f"partitions can grow from {count} up to {PARTITIONS_MAX}, not become {partitions}"
            )
        made = change_settings(topic.settings, changes)
        if made.engine != topic.settings.engine:
            raise InvalidSettingError("engine is fixed when a topic is made")
        backend = self._backend(made.engine)

        def store() -> list[PartitionLog]:
            # First the logs: a partition of the settings that was never made would look lost to the next start.
            logs = self._open_logs(backend, name, made, range(count, partitions))
            try:
                self._save_settings(name, _kept(topic, partitions, made))
            except StorageError:
                _close_logs(logs)
                raise
            return logs

        topic.partitions += self._make_partitions(made, await self._run(backend.changes, store), count)
        self._configure(topic, made)
        self._changed(name)
        names = [*changes, *(["partitions"] if partitions > count else [])]
        self.on_topic_edited(name, f"changed: {', '.join(names)}" if names else "left as it was", principal)
        return topic

    def _configure(self, topic: Topic, settings: TopicSettings) -> None:
        topic.settings = settings
        for partition in topic.partitions:
            partition.configure(settings, self._checkpoint_bytes)

    async def _remove(self, name: str, principal: Identity) -> None:
        self.check_managed(principal, name)
        if isinstance(self._topics.damaged.get(name), LostPartitionError):
            await self._give_up(name, principal)
            return
        topic = self.topic(name)
        _check_not_reserved(name)
        del self._topics[name]
        backend, settings = self._backend(topic.settings.engine), topic.settings
        await topic.close(partial(self._run, backend.changes), TopicClosedError(f"topic {name!r} was removed"))
        try:
            hidden = await self._run(backend.changes, lambda: self._hide(name, backend.store))
        except OSError as error:
            numbers = range(len(topic.partitions))
            logs = await self._run(backend.changes, lambda: self._open_logs(backend, name, settings, numbers))
            self._add_topic(name, _kept(topic, len(numbers), settings), logs)
            raise disk_error(error, f"topic {name!r} could not be removed") from error
        self._note_removal(name, topic.owner, principal, hidden)

    async def _give_up(self, name: str, principal: Identity) -> None:
        """Remove a closed topic that has lost a partition."""
        _check_not_reserved(name)
        try:
            kept = await self._run(self._notes, lambda: self._load_settings(name, 1))
            assert kept is not None, "it is in the list of topics"
            backend = self._backend(kept.settings.engine)
            hidden = await self._run(backend.changes, lambda: self._hide(name, backend.store))
        except OSError as error:
            raise disk_error(error, f"topic {name!r} could not be removed") from error
        del self._topics.damaged[name]
        self._note_removal(name, kept.owner, principal, hidden)

    def _note_removal(self, name: str, owner: str, principal: Identity, hidden: list[tuple[Store, str]]) -> None:
        """Record that a topic is gone, and erase in the background what `_hide` left."""
        self._give_topic(owner)
        noted = self._unlisted[name] = self._changed(name)

        def forget(_: Promise) -> None:
            del self._unlisted[name]

        noted.when_done(forget)
        self.on_topic_edited(name, "removed", principal)
        for store, token in hidden:
            task = self._loop.create_task(self._erase(store, token, noted))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    def _give_topic(self, owner: str) -> None:
        if owner:
            self.quotas.give(name_of_owner(owner), "topics")

    def _hide(self, name: str, store: Store) -> list[tuple[Store, str]]:
        """Remove a topic from its stores, durably; return where and under which token its space is left. Blocks.

        If its engine refuses, its settings stay hidden: they tell the next start that the engine is to be asked again.

        Raises:
            OSError: the disk refused; nothing has changed.
        """
        hidden: list[tuple[Store, str]] = [(self._catalog, self._catalog.hide(name))]
        if store is not self._catalog:
            try:
                hidden.append((store, store.hide(name)))
            except (OSError, StorageError) as error:  # the topic is gone all the same
                self._cut_short.add(name)
                log.warning("topic %r is removed, and its engine still holds records of it: %s", name, error)
                return []
        return hidden

    async def _run(self, executor: Executor, work: Callable[[], T]) -> T:
        """Return what `work` gives, in a thread where the disk may wait."""
        return await self._loop.run_in_executor(executor, work) if self._catalog.fit.reads_wait else work()

    def writer(self, prepare: Callable[[], Callable[[], None]]) -> Writer:
        """Return a writer of one small file; see `Writer`."""
        writer = Writer(prepare, partial(self._run, self._notes))
        self._writers.append(writer)
        return writer

    def _store_topic(self, backend: Backend, name: str, kept: _Kept) -> list[PartitionLog]:
        """Write a topic with empty logs, durably, or nothing of it. Blocks.

        Logs that are there, of a topic of the server's own whose settings are damaged, stay in any case.
        """
        store = backend.store
        try:
            stored = store.partition_count(name)
        except OSError as error:
            raise disk_error(error, f"topic {name!r} could not be stored") from error
        if store is not self._catalog and stored:
            if name not in self._cut_short:  # this folder is new to a database that others use, or used
                raise StorageError(
                    f"topic {name!r}: engine {backend.engine} holds records of a topic of this name that this data "
                    "folder does not know; take another name, or the folder or the database that belongs to them"
                )
            store.erase(store.hide(name))
        try:
            self._save_settings(name, kept)
            return self._open_logs(backend, name, kept.settings, range(kept.partitions))
        except StorageError:
            if stored:
                raise
            for each in {id(each): each for each in (self._catalog, store)}.values():  # so that no restart opens it
                try:
                    each.erase(each.hide(name))
                except (OSError, StorageError) as error:
                    log.debug("nothing to take away of topic %r: %s", name, error)
            raise

    async def _erase(self, store: Store, token: str, noted: Promise) -> None:
        await finished([noted])  # an error is logged, and costs no room
        try:
            await self._loop.run_in_executor(None, store.erase, token)
        except (OSError, StorageError) as error:
            log.warning("a removed topic could not be erased, the next start tries again: %s", error)

    def add_source(self, name: str, source: str) -> Work[None]:
        """Record, durably, that a topic has copies of the records of another topic."""
        return Work(self._in_turn(name, lambda: self._add_source(name, source)))

    async def _add_source(self, name: str, source: str) -> None:
        topic = self.topic(name)
        wanted = self._with_sources(source)
        if wanted <= set(topic.sources):
            return
        topic.flush()
        before = self._sources(topic) if any(one.next_offset for one in topic.partitions) else topic.sources
        sources = tuple(sorted({*before, *wanted}))
        # Records below these offsets were written by others, whatever their headers say.
        ends = tuple(one.next_offset for one in topic.partitions)
        since = {**dict.fromkeys(wanted - set(topic.sources), ends), **topic.since}
        kept = msgspec.structs.replace(
            _kept(topic, len(topic.partitions), topic.settings), sources=sources, since=since
        )
        topic.coming, topic.has_letters = tuple(wanted), True
        try:
            await self._run(self._backend(topic.settings.engine).changes, lambda: self._save_settings(name, kept))
            topic.sources, topic.since = sources, since
        finally:
            topic.coming = ()
        self.on_sources_changed()

    def _changed(self, name: str) -> Promise:
        if not name.startswith(RESERVED_PREFIX):
            self._table.change(name, there=name in self._topics)
        for listener in self._on_changed:
            listener()
        return self.on_topics_changed(name)

    # -- what there is -----------------------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """Return a topic.

        Raises:
            UnknownTopicError: no topic has this name.
            ClosedTopicError: the topic could not be opened.
        """
        try:
            return self._topics[name]
        except KeyError:
            raise self.why_closed(name) or UnknownTopicError(f"there is no topic {name!r}") from None

    def why_closed(self, name: str) -> ClosedTopicError | None:
        """Return the error of a topic that is not open; see `Topics`."""
        return self._topics.why_closed(name)

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

    async def _close_topics(self) -> None:
        """Close all topics and stores behind the changes that are under way; publishers that wait are answered."""
        while self._changes:
            await finished(self._changes.values())
        await asyncio.gather(*map(self._close_topic, self._topics.values()))
        await finished([writer.last for writer in self._writers])
        background: set[asyncio.Future[Any]] = {*self._background, *self._cleaning.values()}
        if background:
            await asyncio.wait(background)
        self._notes.shutdown(wait=False)
        await asyncio.gather(*(self._loop.run_in_executor(None, one.stop) for one in self.backends.values()))
        for engine, store in self._stores.items():
            if engine not in self.backends:
                store.close()

    async def _close_topic(self, topic: Topic) -> None:
        await topic.close(partial(self._run, self._backend(topic.settings.engine).changes))


def _close_logs(logs: Iterable[PartitionLog]) -> None:
    """Close logs that are not used; nothing was appended to them."""
    for each in logs:
        with contextlib.suppress(OSError, StorageError):
            each.close()


def _kept(topic: Topic, partitions: int, settings: TopicSettings) -> _Kept:
    """Return what is to be stored of a topic with these settings."""
    return _Kept(partitions, settings, topic.id, topic.owner, topic.sources, topic.since)


def _new_id() -> str:
    return secrets.token_hex(8)


def _check_not_reserved(name: str) -> None:
    if name.startswith(RESERVED_PREFIX):
        raise InvalidTopicNameError(f"topic {name!r}: names that begin with {RESERVED_PREFIX} are the server's own")
