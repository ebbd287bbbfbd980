"""The topics of all engines: made, altered and removed while the server runs, cleaned and closed.

A change of the topics flushes the disk: a thread of the topic's engine carries it out, in order for each name, while
the event loop serves everything else.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec

from babelbus import arrays
from babelbus.clock import Clock
from babelbus.core.access import NOBODY, Action, Identity, check_topic, name_of_owner, owner_of
from babelbus.core.backend import Backend
from babelbus.core.partition import TopicClosedError
from babelbus.core.quotas import Quotas
from babelbus.core.receipt import DONE, Promise
from babelbus.core.receipt import settled as finished
from babelbus.core.record import Event
from babelbus.core.settings import InvalidSettingError, TopicSettings, change_settings
from babelbus.core.stored_topics import StoredTopic, StoredTopics, close_logs, new_id
from babelbus.core.subject import check_topic_name, is_secret
from babelbus.core.tail import TailBudget
from babelbus.core.topic import RESERVED_PREFIX, ClosedTopicError, Topic
from babelbus.core.work import Work, Writer, settled
from babelbus.errors import BabelbusError, InvalidTopicNameError, StorageError
from babelbus.metrics import Metrics
from babelbus.storage import notes
from babelbus.storage.contract import PARTITIONS_MAX, PartitionLog, Store
from babelbus.storage.errors import LostPartitionError
from babelbus.storage.files import disk_error

log = logging.getLogger(__name__)

T = TypeVar("T")


class TopicExistsError(BabelbusError):
    """There is a topic of this name."""


class UnknownTopicError(BabelbusError):
    """There is no topic of this name."""


class Catalog(StoredTopics):
    """The topics, and what becomes of them. All calls come from the event loop that it was made in.

    `on_topics_changed` is called with its name after a topic came, went or grew; the promise that it returns is done
    when the change is noted where the next start looks for it: until then the store knows that a topic was removed.
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
        super().__init__(
            stores,
            defaults,
            checkpoint_bytes,
            clock,
            metrics,
            loop,
            tails,
            quotas,
            on_visible=on_visible,
            is_heard=is_heard,
        )
        self._default_partitions = default_partitions
        self.refused_engines = refused_engines
        """The engines that no other member of the cluster could read."""
        self._notes = ThreadPoolExecutor(2, "notes")
        self.writers: list[Writer] = []
        """The writers of small files."""
        self._changes: dict[str, Promise] = {}
        """The last change of each topic that is asked for and not done."""
        self._unlisted: dict[str, Promise] = {}
        """Of the removed topics whose removal is not noted yet, what is done then."""
        self._background: set[asyncio.Future[Any]] = set()
        """Tasks that `close` waits for, so that nobody touches the folder once the server has given it back."""
        self._cleaning: dict[str, asyncio.Task[int]] = {}
        """The cleaning that is under way, by engine."""
        self._closed = False
        self.on_topics_changed: Callable[[str], Promise] = lambda name: DONE
        self.on_topic_edited: Callable[[str, str, Identity], None] = lambda name, what, by: None
        """Called with name, deed in words and principal, after a topic was made, changed or removed."""
        self._on_changed: list[Callable[[], None]] = []
        self.on_sources_changed: Callable[[], None] = lambda: None

    # -- the server's own topics -------------------------------------------------------------------------------------

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
            kept = StoredTopic(1, settings, new_id())
            topic = self._add_topic(name, kept, self._store_topic(self._backend(settings.engine), name, kept))
            self._changed(name)
        elif topic.settings != settings:
            self._save_settings(name, StoredTopic(len(topic.partitions), settings, topic.id))
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
            kept, backend = StoredTopic(1, settings, new_id()), self._backend(settings.engine)
            logs = await self._run(backend.changes, lambda: self._store_topic(backend, name, kept))
            topic = self._add_topic(name, kept, logs)
            self._changed(name)
        return topic

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

    def _check_new(self, name: str, partitions: int | None, settings: dict[str, Any], owner: str) -> StoredTopic:
        """Return what is to be stored of a new topic. Raises: the errors of `create_topic`."""
        check_topic_name(name)
        _check_not_reserved(name)
        if is_secret(f"{name}/"):
            raise InvalidTopicNameError(f"topic {name!r}: nothing is recorded under secret keys of sbus")
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
        return StoredTopic(partitions, made, new_id(), owner)

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
                close_logs(logs)
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
        backend = self._backend(topic.settings.engine)
        await topic.close(partial(self._run, backend.changes), TopicClosedError(f"topic {name!r} was removed"))
        try:
            hidden = await self._run(backend.changes, lambda: self._hide(name, backend.store))
        except OSError as error:
            await self._reopen(topic, backend)
            raise disk_error(error, f"topic {name!r} could not be removed") from error
        self._note_removal(name, topic.owner, principal, hidden)

    async def _reopen(self, topic: Topic, backend: Backend) -> None:
        """Open a topic again that could not be removed; if that fails it is closed, and the next start tries again."""
        name, count = topic.name, len(topic.partitions)
        whole = count if backend.store is self._catalog else 0  # an empty log in the place of a lost one would hide it
        try:
            logs = await self._run(
                backend.changes, lambda: self._open_logs(backend, name, topic.settings, range(count), whole)
            )
        except StorageError as error:
            self._topics.damaged[name] = error
            log.error("topic %r could not be removed, and is closed until the next start: %s", name, error)
            return
        self._add_topic(name, _kept(topic, count, topic.settings), logs)

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
        if hidden:
            task = self._loop.create_task(self._erase(name, hidden, noted))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    def _give_topic(self, owner: str) -> None:
        if owner:
            self.quotas.give(name_of_owner(owner), "topics")

    async def _run(self, executor: Executor, work: Callable[[], T]) -> T:
        """Return what `work` gives, in a thread where the disk may wait."""
        return await self._loop.run_in_executor(executor, work) if self._catalog.fit.reads_wait else work()

    def writer(self, what: str, prepare: Callable[[], Callable[[], None]]) -> Writer:
        """Return a writer of one small file; see `Writer`. A write that fails is tried again with each cleaning."""
        writer = Writer(what, prepare, partial(self._run, self._notes))
        self.writers.append(writer)
        return writer

    async def _erase(self, name: str, hidden: list[tuple[Store, str]], noted: Promise) -> None:
        """Delete what `_hide` left; what tells the next start of the removal stays until the removal is noted."""
        run = partial(self._loop.run_in_executor, None)
        (_, grave), *others = hidden
        unnoted = await finished([noted])
        try:
            for store, token in others:
                await run(store.erase, token)
            if unnoted is not None:  # on a full disk, there may be room for the list now
                await run(self._catalog.erase_records, grave)
                unnoted = await finished([self.on_topics_changed(name)])
            if unnoted is None:
                await run(self._catalog.erase, grave)
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

        An engine whose last cleaning is still under way is left out: it may hang. Small files that could not be written
        are written again.
        """
        for writer in self.writers:
            if writer.failing is not None and not self._closed:
                writer.write()
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
        await finished([writer.last for writer in self.writers])
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


def _kept(topic: Topic, partitions: int, settings: TopicSettings) -> StoredTopic:
    """Return what is to be stored of a topic with these settings."""
    return StoredTopic(partitions, settings, topic.id, topic.owner, topic.sources, topic.since)


def _check_not_reserved(name: str) -> None:
    if name.startswith(RESERVED_PREFIX):
        raise InvalidTopicNameError(f"topic {name!r}: names that begin with {RESERVED_PREFIX} are the server's own")
