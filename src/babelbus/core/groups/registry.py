"""All consumer groups of the server, and when their cursors are saved.

Changes are written half of `commit_seconds` after the first of them at the latest, all groups in one file, by a thread;
a write that is under way then is waited for. So a cursor on disk is at most `commit_seconds` old while a write takes
less than half of that (older while the disk is slower or refuses), and never runs ahead: it says what was handed out
(`on_delivery`) or acked (`explicit`) when the write began. After a crash, records behind the cursors are handed out
again: in explicit mode, records that were acked in the last `commit_seconds`; in mode `on_delivery`, records that were
handed out in that time, which is "at most once" no more. After a stop in order no record comes again. That a group was
created, altered or removed is written at once; `saved` is done when it is durable.
"""

import asyncio
import logging
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from babelbus.clock import Clock
from babelbus.core.access import NOBODY, SERVER, Action, Identity, owner_of, refusal
from babelbus.core.groups.cursor_files import GroupFile, StoredGroup
from babelbus.core.groups.dead_letters import DeadLetters, TopicDoor, fits, own_topic_name, topic_name
from babelbus.core.groups.group import Group
from babelbus.core.groups.in_flight import Counts
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
from babelbus.core.quotas import Quotas
from babelbus.core.receipt import DONE, Promise
from babelbus.core.settings import InvalidSettingError, change_settings
from babelbus.core.subject import check_topic_name, is_secret
from babelbus.core.topic import DEAD_LETTERS_PREFIX as PREFIX
from babelbus.core.topic import RESERVED_PREFIX, Topic
from babelbus.errors import InvalidTopicNameError
from babelbus.storage.files import FileSystem

log = logging.getLogger(__name__)

COMMIT_SECONDS = 1.0
READ_AHEAD_BYTES = 64 * 2**20
"""Most bytes that all groups together hold of chunks that they are handing out."""


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
        quotas: Quotas | None = None,
    ) -> None:
        self.defaults = defaults or GroupSettings()
        """The settings of a new group, unless its creator names others."""
        self.read_ahead = ReadAhead(read_ahead_bytes)
        self.commit_failures = 0
        self._door = door
        self._quotas = quotas
        self._file = GroupFile(files, folder)
        self._clock = clock
        self._loop = loop
        self._commit_seconds = commit_seconds
        self._dead_letters = DeadLetters(door)
        self._factories: dict[str, FilterFactory] = {"header": header_filter}
        self._groups: dict[tuple[str, str], Group] = {}
        self._encoded: dict[Group, msgspec.Raw] = {}
        self._waiting: list[tuple[StoredGroup, msgspec.Raw]] = []
        """Groups of damaged topics, kept as they are, with their encoded form."""
        self._unsaved = False
        self._saved_at = loop.time()
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writer = door.writer("the cursors of consumer groups", self._prepare)
        self._gone = Counts()
        self._closed = False

    def register_filter(self, kind: str, factory: FilterFactory) -> None:
        """Register who reads the filters of a kind; before its groups are used."""
        self._factories[kind] = factory

    # -- groups ------------------------------------------------------------------------------------------------------

    def create(
        self,
        topic: str,
        name: str,
        settings: GroupSettings | None = None,
        *,
        start: Place = END,
        principal: Identity = NOBODY,
    ) -> Group:
        """Create a group on a topic; `Group.saved` is done when that is durable, or when the disk refused.

        In the second case the group is removed again. The principal owns the group, and may manage it.

        Raises:
            AccessRefusedError: the principal may not consume everything that the topic holds.
            UnknownTopicError: there is no such topic.
            GroupExistsError: there is a group of this name on it.
            InvalidGroupNameError, InvalidSettingError, UnknownFilterError: the name or a setting is invalid.
            UnknownPartitionError: `start` names a partition that there is not.
        """
        self._door.check_topic(principal, Action.CONSUME, topic)
        owner = self._door.topic(topic)
        check_group_name(name)
        if self._closed:
            raise GroupClosedError("the server stops")
        if (topic, name) in self._groups:
            raise GroupExistsError(f"topic {topic!r} has a group {name!r}")
        if start.partition is not None:
            owner.partition(start.partition)
        settings = settings or self.defaults
        self._check(owner, name, settings)
        self._check_letters(principal, settings)
        settings = self._keep_apart(principal, owner, name, _rooted(principal, name, settings))
        made_ms, made_by = self._clock.now_ms(), owner_of(principal)
        group = self._make(owner, StoredGroup(topic, name, settings, False, made_ms, {}, made_by))
        self._groups[topic, name] = group
        if start.partition is not None:
            group.seek(END, SERVER)
        group.seek(start, SERVER)

        def settle(saved: Promise) -> None:
            if saved.error is not None:
                self._drop(group, f"group {name!r} on topic {topic!r} could not be saved: {saved.error}")

        group.saved = self.saved()
        group.saved.when_done(settle)
        return group

    def ensure(
        self,
        topic: str,
        name: str,
        settings: GroupSettings | None = None,
        *,
        start: Place = END,
        principal: Identity = NOBODY,
    ) -> Group:
        """Return a group, with the settings that it has; create it if the name is free.

        Raises: as `create`, but for `GroupExistsError`.
        """
        group = self._groups.get((topic, name))
        if group is None:
            return self.create(topic, name, settings, start=start, principal=principal)
        self._door.check_topic(principal, Action.CONSUME, topic)
        return group

    def access_changed(self) -> None:
        """Close the memberships of principals that lost the right to consume."""
        for group in self.all():
            group.access_changed()

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

    def alter(self, topic: str, name: str, changes: dict[str, Any], principal: Identity = NOBODY) -> Group:
        """Update settings of a group while it is used; `Group.saved` is done when they are durable.

        If the disk refuses, they change back.

        Raises:
            AccessRefusedError: the principal may not manage the group.
            UnknownGroupError: there is no such group.
            InvalidSettingError, UnknownFilterError: a setting is unknown, wrong, or cannot change.
        """
        group = self._get_managed(topic, name, principal)
        before = group.settings
        settings = change_settings(before, changes, of="a group")
        if settings.ack != before.ack:
            raise InvalidSettingError("ack is fixed when a group is made")
        if settings == before:
            if group.saved.done:
                group.saved = DONE
            return group
        self._check(group.topic, name, settings)
        if settings.dead_letter_topic != before.dead_letter_topic:
            self._check_letters(principal, settings)
            settings = self._keep_apart(principal, group.topic, name, _rooted(principal, name, settings))
        settings = _rooted(principal, name, settings)
        group.alter(settings)
        self._note(group)

        def settle(saved: Promise) -> None:
            if saved.error is not None and group.settings is settings:
                group.alter(before)
                self._note(group)

        group.saved = self.saved()
        group.saved.when_done(settle)
        return group

    def remove(self, topic: str, name: str, principal: Identity = NOBODY) -> Promise:
        """Remove a group and tell its members; return what is done when that is durable.

        If the disk refuses, the group is there again, without members.

        Raises:
            AccessRefusedError: the principal may not manage the group.
            UnknownGroupError: there is no such group.
        """
        group = self._get_managed(topic, name, principal)
        stored = group.to_store()
        self._drop(group, f"group {name!r} on topic {topic!r} was removed")
        self._unsaved = True

        def settle(saved: Promise) -> None:
            if saved.error is not None and self._door.find_topic(topic) is group.topic and not self._closed:
                self._groups.setdefault((topic, name), self._make(group.topic, stored))

        saved = self.saved()
        saved.when_done(settle)
        return saved

    def _get_managed(self, topic: str, name: str, principal: Identity) -> Group:
        """Return a group that a principal may manage.

        Raises:
            AccessRefusedError: it may not; groups of topics that it may not know of are unknown to it.
            UnknownGroupError: there is no such group.
        """
        group = self._groups.get((topic, name))
        if group is None and not self._door.may_see(principal, topic):
            raise refusal(principal, Action.MANAGE, topic)
        group = self.get(topic, name)
        group.check_managed(principal)
        return group

    def get(self, topic: str, name: str) -> Group:
        """Return a group.

        Raises:
            UnknownGroupError: there is no such group.
            ClosedTopicError: its topic could not be opened, so nobody knows.
        """
        group = self._groups.get((topic, name))
        if group is None:
            raise self._door.why_closed(topic) or UnknownGroupError(f"topic {topic!r} has no group {name!r}")
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
        for group in gone:
            self._drop(group, f"topic {group.topic.name!r} was removed")
        waiting, self._waiting = self._waiting, []
        self._restore(waiting)
        if gone or len(self._waiting) < len(waiting):
            # If that is not saved, reading the file drops groups without a topic, too.
            self._unsaved = True
            self.saved()

    def _check(self, topic: Topic, name: str, settings: GroupSettings) -> None:
        """Refuse settings that this group cannot have."""
        self._make_filter(settings)
        dead = settings.dead_letter_topic
        if dead is not None:
            try:
                check_topic_name(dead)
            except InvalidTopicNameError as error:
                raise InvalidSettingError(f"dead_letter_topic: {error}") from error
            # Nothing could be stored there, and its letters would wait for ever.
            if dead.startswith(RESERVED_PREFIX) or is_secret(f"{dead}/"):
                raise InvalidSettingError(f"dead_letter_topic: {dead!r} is the server's own")
        if (dead or topic_name(name)) == topic.name:
            raise InvalidSettingError(f"group {name!r} cannot send its dead letters to the topic that it reads")

    def _check_letters(self, principal: Identity, settings: GroupSettings) -> None:
        """Check that a principal may publish to the topic that it names for dead letters.

        Raises:
            AccessRefusedError: it may not.
        """
        if settings.dead_letter_topic is not None:
            self._door.check_topic(principal, Action.PUBLISH, settings.dead_letter_topic)

    def _keep_apart(self, principal: Identity, topic: Topic, name: str, settings: GroupSettings) -> GroupSettings:
        """Return settings with a dead-letter topic of the group's own, if the default topic is of other records, too.

        Groups of one name on topics of two tenants would share it, and neither tenant could read its letters any more.
        Clients whose rights nobody asks for share it as ever.
        """
        default = topic_name(name)
        if principal.rights is None or settings.dead_letter_topic is not None:
            return settings
        letters = self._door.find_topic(default)
        is_shared = letters is not None and (
            not {topic.name, *topic.sources} >= set(letters.sources)
            or (not letters.sources and any(one.next_offset for one in letters.partitions))
        )
        if not is_shared and not any(
            group.name == name and group.topic is not topic and group.settings.dead_letter_topic in (None, default)
            for group in self._groups.values()
        ):
            return settings
        return msgspec.structs.replace(settings, dead_letter_topic=own_topic_name(name, topic.name))

    def _make(self, topic: Topic, stored: StoredGroup) -> Group:
        return Group(
            topic,
            stored,
            clock=self._clock,
            loop=self._loop,
            read_ahead=self.read_ahead,
            dead_letters=self._dead_letters,
            make_filter=self._make_filter,
            on_changed=self._note,
            on_lost=self._lost,
            may_manage=self._door.may_manage,
            check_topic=self._door.check_topic,
            quotas=self._quotas,
        )

    def _make_filter(self, settings: GroupSettings) -> RecordFilter | None:
        if settings.filter is None:
            return None
        factory = self._factories.get(settings.filter_kind)
        if factory is None:
            raise UnknownFilterError(f"no protocol here reads filters of the kind {settings.filter_kind!r}")
        return factory(settings.filter)

    def _drop(self, group: Group, reason: str) -> None:
        """Remove a group from memory and tell its members why."""
        if self._groups.get((group.topic.name, group.name)) is group:
            del self._groups[group.topic.name, group.name]
        self._encoded.pop(group, None)
        self._gone = _sum([self._gone, group.counts])
        group.close(GroupClosedError(reason))

    def _lost(self, group: Group) -> None:
        """Handle a topic that went away under a group, unless the server stops."""
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
        self._sequence, groups = self._file.load()
        self._restore(zip(groups, map(_encode, groups), strict=True))
        if self._unsaved:
            self._note_unsaved()

    def _restore(self, groups: Iterable[tuple[StoredGroup, msgspec.Raw]]) -> None:
        for stored, encoded in groups:
            topic = self._door.find_topic(stored.topic)
            if stored.topic in self._door.damaged_topics:
                self._waiting.append((stored, encoded))
                continue
            if topic is None:
                log.info("group %r is forgotten: its topic %r is gone", stored.name, stored.topic)
                self._unsaved = True
                continue
            if topic.settings.engine == "memory":  # it begins anew, and so do the cursors in it
                stored = msgspec.structs.replace(stored, cursors={})
            self._groups[stored.topic, stored.name] = self._make(topic, stored)

    def _note(self, group: Group) -> None:
        """Record that a group has changed: the next commit writes it."""
        if self._encoded.pop(group, None) is not None or not self._unsaved:
            self._note_unsaved()

    def _note_unsaved(self) -> None:
        self._unsaved = True
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._commit_seconds / 2, self._begin_commit)

    def _begin_commit(self) -> None:
        self._timer = None
        self.saved()

    def saved(self) -> Promise:
        """Return a promise that is done when all changes up to now are durable; its error is a `StorageError`."""
        return self._writer.write() if self._unsaved else self._writer.last

    def _prepare(self) -> Callable[[], None]:
        """Return the write of all groups as they are now."""
        self._sequence += 1
        self._unsaved = False
        for group in self._groups.values():
            if group not in self._encoded:
                self._encoded[group] = _encode(group.to_store())
        groups = [encoded for _, encoded in self._waiting] + [self._encoded[group] for group in self._groups.values()]
        self._writer.last.when_done(partial(self._written, self._loop.time()))
        return partial(self._file.write, self._sequence, groups)

    def _written(self, began_at: float, saved: Promise) -> None:
        if saved.error is None:
            self._saved_at = began_at
        else:
            self.commit_failures += 1
            log.warning("cursors of groups are not saved, trying again: %s", saved.error)
            self._note_unsaved()

    @property
    def saved_at(self) -> float:
        """The time of the event loop up to which all changes are durable."""
        is_saved = not self._unsaved and self._writer.last.done
        return self._loop.time() if is_saved else self._saved_at

    async def commit(self) -> None:
        """Write all changes up to now, and return when they are durable.

        Raises:
            StorageError: the disk refused.
        """
        await self.saved().wait()

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


def _encode(group: StoredGroup) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(group))


def _rooted(principal: Identity, name: str, settings: GroupSettings) -> GroupSettings:
    """Return settings whose dead letters stay below the root of the principal, if it has one."""
    if principal.root is None or settings.dead_letter_topic is not None:
        return settings
    topic = principal.root.absolute(topic_name(name))
    if not fits(topic):
        topic = principal.root.absolute(f"{PREFIX}group-{zlib.crc32(name.encode()):08x}")
    return msgspec.structs.replace(settings, dead_letter_topic=topic)


def _sum(counts: Iterable[Counts]) -> Counts:
    total = Counts()
    for one in counts:
        for name in Counts.__struct_fields__:
            setattr(total, name, getattr(total, name) + getattr(one, name))
    return total
