"""All consumer groups of the server, and when their cursors are saved.

Every group that changed is written at most once in `commit_seconds`, all in one file, by a thread; so a cursor on disk
lags behind by that and the time of one write (more while the disk refuses), and never runs ahead: it says what was
handed out (`on_delivery`) or acked (`explicit`) when the file was made. After a crash what lies behind is handed out
again: in explicit mode, records that were acked in the last `commit_seconds`; in mode `on_delivery`, records that were
handed out in that time, which is "at most once" no more. After a stop in order nothing comes again. That a group came,
went or was altered is durable when the call returns.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from babelbus.clock import Clock
from babelbus.core.groups.cursor_files import EncodedGroup, GroupFile, StoredGroup, encode_file, encode_group
from babelbus.core.groups.dead_letters import DeadLetters, TopicDoor, topic_name
from babelbus.core.groups.group import Group
from babelbus.core.groups.in_flight import Counts
from babelbus.core.groups.info import StoredCursor
from babelbus.core.groups.partition_cursor import ReadAhead
from babelbus.core.groups.settings import (
    END,
    FilterFactory,
    GroupClosedError,
    GroupExistsError,
    GroupSettings,
    Place,
    RecordFilter,
    UnknownFilterError,
    UnknownGroupError,
    check_group_name,
    header_filter,
)
from babelbus.core.settings import InvalidSettingError, change_settings
from babelbus.core.subject import check_topic_name
from babelbus.core.topic import Topic
from babelbus.errors import InvalidTopicNameError, StorageError
from babelbus.storage.files import FileSystem

log = logging.getLogger(__name__)

COMMIT_SECONDS = 1.0
READ_AHEAD_BYTES = 64 * 2**20
"""What all groups together may hold of chunks that they are handing out."""


class Groups:
    """The registry. All calls come from the event loop; call `open` before the first one, when the topics are there.

    `topics_changed` must be called when a topic came, went, grew or was opened again (`Broker.on_topics_changed`),
    `close` before the broker is closed.
    """

    def __init__(
        self,
        door: TopicDoor,
        files: FileSystem,
        folder: str,
        *,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        commit_seconds: float = COMMIT_SECONDS,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        defaults: GroupSettings | None = None,
    ) -> None:
        self.defaults = defaults or GroupSettings()
        """What a new group is set to where its maker says nothing."""
        self.read_ahead = ReadAhead(read_ahead_bytes)
        self.commit_failures = 0
        self._door = door
        self._file = GroupFile(files, folder)
        self._clock = clock
        self._loop = loop
        self._commit_seconds = commit_seconds
        self._dead_letters = DeadLetters(door, clock)
        self._factories: dict[str, FilterFactory] = {"header": header_filter}
        self._groups: dict[tuple[str, str], Group] = {}
        self._encoded: dict[Group, EncodedGroup] = {}
        self._waiting: list[EncodedGroup] = []
        """Groups of damaged topics, kept as they are."""
        self._unsaved = False
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None
        self._commit: asyncio.Future[None] | None = None
        self._gone = Counts()
        self._closed = False

    def register_filter(self, kind: str, factory: FilterFactory) -> None:
        """Let a protocol read the filters of its kind; before its groups are used."""
        self._factories[kind] = factory

    # -- groups ------------------------------------------------------------------------------------------------------

    def create(self, topic: str, name: str, settings: GroupSettings | None = None, *, start: Place = END) -> Group:
        """Create a group on a topic, durably. Blocks for a flush of the disk.

        Raises:
            UnknownTopicError: there is no such topic.
            GroupExistsError: there is a group of this name on it.
            InvalidGroupNameError, InvalidSettingError, UnknownFilterError: the name or a setting is none.
            UnknownPartitionError: `start` names a partition that there is not.
            StorageError: the disk refused.
        """
        found = self._door.topic(topic)
        check_group_name(name)
        if self._closed:
            raise GroupClosedError("the server stops")
        if (topic, name) in self._groups:
            raise GroupExistsError(f"topic {topic!r} has a group {name!r}")
        if start.partition is not None:
            found.partition(start.partition)
        made = settings or self.defaults
        self._check(found, name, made)
        group = self._make(found, name, made, self._clock.now_ms(), {}, paused=False)
        self._groups[topic, name] = group
        if start.partition is None:
            group.seek(start)
        else:
            group.seek(END)
            group.seek(start)
        try:
            self._save()
        except StorageError:
            self._drop(group)
            raise
        return group

    def ensure(self, topic: str, name: str, settings: GroupSettings | None = None, *, start: Place = END) -> Group:
        """Return a group; make it if there is none. What it is set to stays if there is one.

        Raises: as `create`, but for `GroupExistsError`.
        """
        group = self._groups.get((topic, name))
        return group if group is not None else self.create(topic, name, settings, start=start)

    async def at_time(self, topic: str, timestamp: int, partition: int | None = None) -> Place:
        """Return the place of the first records whose time (ms since the epoch) is `timestamp` or later, else the end.

        Raises:
            UnknownTopicError, UnknownPartitionError: there is no such topic or partition.
            StorageError: the engine cannot read.
        """
        partitions = self._door.topic(topic).partitions
        if partition is not None:
            partitions = [self._door.topic(topic).partition(partition)]
        offsets = {}
        for one in partitions:
            offset = await one.find_time(timestamp)
            offsets[one.number] = one.high_watermark if offset is None else offset
        return Place("offset", partition=partition, offsets=offsets)

    def alter(self, topic: str, name: str, changes: dict[str, Any]) -> Group:
        """Update settings of a group, durably, while it is used.

        Raises:
            UnknownGroupError: there is none.
            InvalidSettingError, UnknownFilterError: a setting is unknown, wrong, or cannot change.
            StorageError: the disk refused; nothing was changed.
        """
        group = self.get(topic, name)
        made = change_settings(group.settings, changes, of="a group")
        if made.ack != group.settings.ack:
            raise InvalidSettingError("ack is fixed when a group is made")
        if made == group.settings:
            return group
        self._check(group.topic, name, made)
        before = group.settings
        group.alter(made)
        try:
            self._note(group)
            self._save()
        except StorageError:
            group.alter(before)
            self._note(group)
            raise
        return group

    def remove(self, topic: str, name: str) -> None:
        """Remove a group, durably; its members are told.

        Raises:
            UnknownGroupError: there is none.
            StorageError: the disk refused; the group is still there.
        """
        group = self.get(topic, name)
        del self._groups[topic, name]
        try:
            self._save()
        except StorageError:
            self._groups[topic, name] = group
            self._unsaved = True
            raise
        self._drop(group)
        group.close(GroupClosedError(f"group {name!r} on topic {topic!r} was removed"))

    def get(self, topic: str, name: str) -> Group:
        """Return a group.

        Raises:
            UnknownGroupError: there is none.
        """
        group = self._groups.get((topic, name))
        if group is None:
            raise UnknownGroupError(f"topic {topic!r} has no group {name!r}")
        return group

    def find(self, topic: str, name: str) -> Group | None:
        """Return a group, or `None`."""
        return self._groups.get((topic, name))

    def on_topic(self, topic: str) -> list[Group]:
        """Return the groups of a topic, by name."""
        return [group for group in self.all() if group.topic.name == topic]

    def all(self) -> list[Group]:
        """Return all groups, by topic and name."""
        return [group for _, group in sorted(self._groups.items(), key=lambda pair: pair[0])]

    def totals(self) -> Counts:
        """Return what happened in all groups since the server started, those that are gone too."""
        return _sum([self._gone, *(group.counts for group in self._groups.values())])

    def topics_changed(self) -> None:
        """Record topics that came, went, grew or were opened again: groups of those that went go too."""
        gone = []
        for (name, _), group in self._groups.items():
            topic = self._door.find_topic(name)
            if topic is None:
                gone.append(group)
            elif topic is not group.topic or len(topic.partitions) != group.cursor_count:
                group.topic_changed(topic)
        if not gone:
            return
        for group in gone:
            self._drop(group)
        try:
            self._save()
        except StorageError as error:  # without their topics they are dropped when the file is read, too
            log.warning("groups of a removed topic are still on disk: %s", error)
            self._note_unsaved()
        for group in gone:
            group.close(GroupClosedError(f"topic {group.topic.name!r} was removed"))

    def _check(self, topic: Topic, name: str, settings: GroupSettings) -> None:
        """Refuse settings that this group cannot have."""
        self._make_filter(settings)
        dead = settings.dead_letter_topic
        if dead is not None:
            try:
                check_topic_name(dead)
            except InvalidTopicNameError as error:
                raise InvalidSettingError(f"dead_letter_topic: {error}") from error
        if (dead or topic_name(name)) == topic.name:
            raise InvalidSettingError(f"group {name!r} cannot send its dead letters to the topic that it reads")

    def _make(
        self,
        topic: Topic,
        name: str,
        settings: GroupSettings,
        created_ms: int,
        cursors: dict[int, StoredCursor],
        *,
        paused: bool,
    ) -> Group:
        return Group(
            name,
            topic,
            settings,
            created_ms=created_ms,
            clock=self._clock,
            loop=self._loop,
            read_ahead=self.read_ahead,
            dead_letters=self._dead_letters,
            make_filter=self._make_filter,
            on_changed=self._note,
            on_lost=self._lost,
            stored=cursors,
            paused=paused,
        )

    def _make_filter(self, settings: GroupSettings) -> RecordFilter | None:
        if settings.filter is None:
            return None
        factory = self._factories.get(settings.filter_kind)
        if factory is None:
            raise UnknownFilterError(f"no protocol here reads filters of the kind {settings.filter_kind!r}")
        return factory(settings.filter)

    def _drop(self, group: Group) -> None:
        self._groups.pop((group.topic.name, group.name), None)
        self._encoded.pop(group, None)
        self._gone = _sum([self._gone, group.counts])

    def _lost(self, group: Group) -> None:
        """A group's topic went away under it; nothing is to be done if the server stops."""
        if self._closed or group.closed:
            return
        topic = self._door.find_topic(group.topic.name)
        if topic is None:
            self.topics_changed()
        elif topic is not group.topic:
            group.topic_changed(topic)

    # -- files -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read what is stored; groups whose topic is gone are forgotten.

        Raises:
            DamagedNoteError: both files are damaged, or of a later version.
            StorageError: the disk refused.
        """
        self._sequence, found = self._file.load()
        for stored in found:
            topic = self._door.find_topic(stored.topic)
            if stored.topic in self._door.damaged_topics:
                self._waiting.append(encode_group(stored))
                continue
            if topic is None:
                log.info("group %r is forgotten: its topic %r is gone", stored.name, stored.topic)
                self._unsaved = True
                continue
            # A topic in memory begins anew, and so do the cursors in it.
            cursors = {} if topic.settings.engine == "memory" else stored.cursors
            group = self._make(topic, stored.name, stored.settings, stored.created_ms, cursors, paused=stored.paused)
            self._groups[stored.topic, stored.name] = group
        if self._unsaved:
            self._note_unsaved()

    def _note(self, group: Group) -> None:
        """A group has changed: write it with the next commit."""
        if self._encoded.pop(group, None) is not None or not self._unsaved:
            self._note_unsaved()

    def _note_unsaved(self) -> None:
        self._unsaved = True
        if self._timer is None and self._commit is None and not self._closed:
            self._timer = self._loop.call_later(self._commit_seconds, self._begin_commit)

    def _snapshot(self) -> tuple[int, bytes]:
        """Return what is to be written, and the number of this version."""
        self._sequence += 1
        self._unsaved = False
        for group in self._groups.values():
            if group not in self._encoded:
                self._encoded[group] = encode_group(
                    StoredGroup(
                        group.topic.name, group.name, group.settings, group.paused, group.created_ms, group.stored()
                    )
                )
        groups = [*self._waiting, *(self._encoded[group] for group in self._groups.values())]
        return self._sequence, encode_file(self._sequence, groups)

    def _save(self) -> None:
        """Write everything now.

        Raises:
            StorageError: the disk refused.
        """
        try:
            self._file.write(*self._snapshot())
        except StorageError:
            self._note_unsaved()
            raise

    def _begin_commit(self) -> None:
        self._timer = None
        if self._unsaved and self._commit is None:
            self._commit = self._loop.run_in_executor(None, self._file.write, *self._snapshot())
            self._commit.add_done_callback(self._end_commit)

    def _end_commit(self, commit: "asyncio.Future[None]") -> None:
        self._commit = None
        error = None if commit.cancelled() else commit.exception()
        if error is not None:
            self.commit_failures += 1
            log.warning("cursors of groups are not saved, trying again: %s", error)
            self._unsaved = True
        if self._unsaved:
            self._note_unsaved()

    async def commit(self) -> None:
        """Write what has changed, and return when it is durable.

        Raises:
            StorageError: the disk refused.
        """
        while self._commit is not None:
            await asyncio.wait([self._commit])
        if self._unsaved:
            try:
                await self._loop.run_in_executor(None, self._file.write, *self._snapshot())
            except StorageError:
                self._note_unsaved()
                raise

    async def close(self) -> None:
        """End all groups and save their cursors; before the broker is closed.

        Raises:
            StorageError: the disk refused; the cursors are those of the last commit.
        """
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for group in self._groups.values():
            group.close(GroupClosedError("the server stops"))
        await self.commit()


def _sum(counts: Iterable[Counts]) -> Counts:
    total = Counts()
    for one in counts:
        for name in Counts.__struct_fields__:
            setattr(total, name, getattr(total, name) + getattr(one, name))
    return total
