"""The topics as the stores of the engines have them: opened at a start, written to a store, hidden in a store.

Nothing here knows who may change a topic, or which change comes first: `catalog` does.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import cast

import msgspec

from babelbus import arrays
from babelbus.clock import Clock
from babelbus.core.access import name_of_owner
from babelbus.core.access.gate import ACCESS_TOPIC
from babelbus.core.backend import Backend
from babelbus.core.partition import Partition
from babelbus.core.quotas import Quotas
from babelbus.core.record import Event
from babelbus.core.settings import TopicSettings
from babelbus.core.tail import TailBudget
from babelbus.core.topic import FIRST_ID, RESERVED_PREFIX, Topic
from babelbus.core.topic_rights import TopicRights
from babelbus.errors import BabelbusError, StorageError
from babelbus.metrics import Metrics
from babelbus.storage import notes
from babelbus.storage.contract import Catalog, PartitionLog, Store
from babelbus.storage.errors import AlteredError, DiskError, LostPartitionError, TooManyFilesError
from babelbus.storage.files import disk_error

log = logging.getLogger(__name__)


class UnknownEngineError(StorageError):
    """Nothing says which engine has the records of a topic, or its settings name an engine that has none of them."""


class StoredTopic(msgspec.Struct, frozen=True):
    """The stored settings of a topic."""

    partitions: int
    settings: TopicSettings
    id: str = FIRST_ID
    """Another one when the topic is removed and made again; topics made before there were ids have the first."""
    owner: str = ""
    sources: tuple[str, ...] = ()
    since: dict[str, tuple[int, ...]] = {}


class StoredTopics(TopicRights):
    """Topics over their stores. All calls come from the event loop that it was made in.

    `stores` gives the store of each engine; the settings of all topics are kept in the store of engine `disk`.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        defaults: TopicSettings,
        checkpoint_bytes: int,
        clock: Clock,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        tails: TailBudget,
        quotas: Quotas,
        *,
        on_visible: Callable[[str, Sequence[Event]], None],
        is_heard: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._stores = stores
        self._catalog = cast(Catalog, stores["disk"])
        self._defaults = defaults
        self._checkpoint_bytes = checkpoint_bytes
        self._clock = clock
        self._metrics = metrics
        self._loop = loop
        self._on_visible = on_visible
        self._is_heard = is_heard
        self._cut_short: set[str] = set()
        """The removed topics whose engine could not be asked: the engine may hold something of them still."""
        self._graves: list[str] = []
        """The tokens of removals that `open` finished."""
        self.tails = tails
        self.quotas = quotas
        self.backends: dict[str, Backend] = {}
        """The engines that are in use."""

    # -- opening -----------------------------------------------------------------------------------------------------

    def open(self, listed: Mapping[str, int] = MappingProxyType({})) -> dict[str, str]:
        """Open every topic that is stored; finish removals that a crash cut short. Blocks: nobody is served yet.

        A topic of the data folder that cannot be opened, or whose records in another engine somebody has altered, stays
        closed (`damaged_topics`): the others are served.
        `listed` are the numbers of partitions in the list of topics, which is written when a topic is whole. Such a
        partition that is missing was lost; another one that is missing was never made, because of a crash.

        Returns the topics whose removal was finished: token -> name. The list of topics may have them still: call
        `erase_removed` when it has not, as nothing else tells the next start that they were removed.

        Raises:
            StorageError: an engine beside the data folder cannot open a log, or no further file can be opened.
        """
        finished = self._catalog.removed()
        removed = set(finished.values())
        kept_topics: dict[str, StoredTopic] = {}
        for name in self._catalog.topics():
            try:
                found = self._load_settings(name, listed.get(name, 0))
            except (OSError, notes.DamagedNoteError, UnknownEngineError) as error:
                self._leave_closed(name, error)
                continue
            if found is not None:
                kept_topics[name] = found
        engines = {"disk", *(kept.settings.engine for kept in kept_topics.values())}
        stored_topics: dict[str, StoredTopic] = {}
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

    def _finish_removal(self, token: str, name: str, stored: Mapping[str, StoredTopic]) -> None:
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
            self._graves.append(token)
        except (OSError, BabelbusError) as error:
            self._cut_short.add(name)
            log.warning("topic %r is removed, the next start tries again to erase its records: %s", name, error)

    def erase_removed(self) -> None:
        """Delete what is left of the topics whose removal `open` finished. Blocks."""
        graves, self._graves = self._graves, []
        for token in graves:
            try:
                self._catalog.erase(token)
            except OSError as error:
                log.warning("a removed topic could not be erased, the next start tries again: %s", error)

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
        self, stored: dict[str, StoredTopic], whole: Mapping[str, int], lost: Mapping[str, LostPartitionError]
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

    # -- settings and logs -------------------------------------------------------------------------------------------

    def _load_settings(self, name: str, listed: int) -> StoredTopic | None:
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
            return StoredTopic(max(listed, 1), self._defaults)  # the folder came from elsewhere
        if not listed:
            return None
        raise UnknownEngineError(
            f"settings.json of topic {name!r} is missing, and nothing else says which engine has its records: put a "
            "copy of the file back, or give the topic up and remove its folder and its line in conf/topics; start again"
        )

    def _decode_settings(self, name: str, content: bytes) -> StoredTopic:
        advice = (
            "put a copy of the file back, or, if the topic has engine disk, remove the file: then it has the default "
            "settings; start again"
        )
        return notes.decode(content, StoredTopic, path=f"settings.json of topic {name!r}", advice=advice, bare=True)

    def _save_settings(self, name: str, kept: StoredTopic) -> None:
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
            close_logs(opened)
            if isinstance(error, OSError):
                raise disk_error(error, f"topic {name!r} could not be opened") from error
            raise
        return opened

    def _add_topic(self, name: str, kept: StoredTopic, logs: list[PartitionLog]) -> Topic:
        settings = kept.settings
        topic_id = new_id() if settings.engine == "memory" else kept.id  # whatever memory held is gone
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

    def _store_topic(self, backend: Backend, name: str, kept: StoredTopic) -> list[PartitionLog]:
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


def close_logs(logs: Iterable[PartitionLog]) -> None:
    """Close logs that are not used; nothing was appended to them."""
    for each in logs:
        with contextlib.suppress(OSError, StorageError):
            each.close()


def new_id() -> str:
    """Return an id that no topic has had."""
    return secrets.token_hex(8)
