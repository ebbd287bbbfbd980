"""Moving topics of a data folder from engine `disk` to engine `jetstream`, with their offsets (docs/cluster.md).

The settings, consumer groups and the state stay in the folder: they name topics by id and records by offset, and both
stay. A migration that was stopped goes on where it was. The engine in the settings of a
topic changes when every record was compared; until then a server finds the topic on the disk, as before.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from babelbus.clock import Clock
from babelbus.config import Config
from babelbus.core.settings import TopicSettings
from babelbus.core.topic import RESERVED_PREFIX
from babelbus.errors import StorageError
from babelbus.storage import notes
from babelbus.storage.contract import LogSettings, PartitionLog
from babelbus.storage.disk import LOCK_NAME, FolderStore
from babelbus.storage.files import LocalFiles
from babelbus.storage.jetstream import JetstreamStore, StreamLog

log = logging.getLogger(__name__)

COPY_BYTES = 2**18
"""One frame: what is read of the disk at a time."""
UNDER_WAY_BYTES = 16 * 2**20
COMPARE_BYTES = 4 * 2**20

Seen = Callable[[int], object]
"""Called with the bytes of records that were copied or compared since the last call."""


class DifferentRecordsError(StorageError):
    """A copied record is not what the disk holds."""

    retriable = False


class Migrated(msgspec.Struct, frozen=True):
    """A topic after its migration: `reason` says why it was left where it is."""

    topic: str
    partitions: int = 0
    copied_bytes: int = 0
    """Records copied by this run; a run before may have copied others."""
    compared_bytes: int = 0
    reason: str = ""
    files: int = 0
    """Files of the data folder that were moved, of groups, keys and the like; `topic` is empty then."""


def migrate(
    config: Config, clock: Clock, topics: Iterable[str] = (), *, remove: bool = False, seen: Seen = lambda size: None
) -> Iterator[Migrated]:
    """Move topics into engine `jetstream`: copy, compare, change their settings. Yield each topic that is done.

    Without names, all topics of engine `disk`. With `remove`, the files of a topic are deleted afterwards.

    Raises:
        FolderLockedError: a server runs in the folder.
        StorageError: the disk or NATS refused, or a record is damaged or not equal; the topic stays on the disk.
    """
    assert not config.cluster.enabled  # then the whole folder moves: `move_in`
    files, folder = LocalFiles(), os.path.abspath(config.data.folder)
    lock = files.lock(os.path.join(folder, LOCK_NAME))
    try:
        source = FolderStore(files, folder, clock)
        target = JetstreamStore(config.jetstream, files, folder, clock)
        try:
            for name in list(topics) or source.topics():
                yield _migrate(config, source, target, name, remove=remove, seen=seen)
        finally:
            target.close()
    finally:
        lock.close()


def _migrate(
    config: Config, source: FolderStore, target: JetstreamStore, name: str, *, remove: bool, seen: Seen
) -> Migrated:
    content = source.load_settings(name)
    if content is None:
        raise StorageError(f"there is no topic {name!r} in this data folder")
    kept: dict[str, Any] = notes.decode(content, dict[str, Any], path=f"settings.json of topic {name!r}", bare=True)
    settings = msgspec.convert(kept["settings"], TopicSettings)
    count = kept["partitions"]
    if name.startswith(RESERVED_PREFIX):
        return Migrated(name, count, reason="the server's own topics stay in the data folder")
    if settings.engine != "disk":
        if settings.engine == "jetstream" and remove:
            source.remove_partitions(name)  # which a stop between the two may have left
        return Migrated(name, count, reason=f"its engine is {settings.engine}")
    layout = settings.for_log(config.storage.checkpoint_bytes)
    sizes = move(source, target, name, count, layout, seen)
    kept["settings"]["engine"] = "jetstream"
    source.save_settings(name, notes.encode(kept))
    if remove:
        source.remove_partitions(name)
    return Migrated(name, count, *sizes)


def move(
    source: FolderStore, target: JetstreamStore, name: str, count: int, layout: LogSettings, seen: Seen
) -> tuple[int, int]:
    """Move the partitions of a topic and compare them; return how many bytes of records were copied and compared.

    A topic that changed since a run before is copied anew.
    """
    was_there = target.partition_count(name) > 0
    try:
        return _move(source, target, name, count, layout, seen)
    except DifferentRecordsError as error:
        if not was_there:
            raise
        log.warning("%s; the topic changed since a run before, it is copied anew", error)
        target.erase(target.hide(name))
        return _move(source, target, name, count, layout, seen)


def _move(
    source: FolderStore, target: JetstreamStore, name: str, count: int, layout: LogSettings, seen: Seen
) -> tuple[int, int]:
    copied = compared = 0
    for number in range(count):
        disk = source.open_partition(name, number, layout, anew=False)
        try:
            if disk.recovery.bad:
                path, bad = disk.recovery.bad[0]
                raise StorageError(f"{path}: damaged from offset {bad.offset} on: run 'babelbus repair' first")
            stream = target.open_partition(name, number, layout)
            copied += _copy(disk, stream, seen)
            compared += _compare(disk, stream, seen)
            stream.close()
        finally:
            disk.close()
    return copied, compared


def _copy(disk: PartitionLog, stream: StreamLog, seen: Seen) -> int:
    """Append the records that the stream does not have; return their bytes."""
    if stream.next_offset < disk.first_offset:
        if stream.first_offset < stream.next_offset:
            raise DifferentRecordsError(f"{stream.name}: the disk begins at offset {disk.first_offset} now")
        stream.begin_at(disk.first_offset)
    if stream.next_offset > disk.next_offset:
        raise DifferentRecordsError(
            f"{stream.name} ends at offset {stream.next_offset}, and the disk at {disk.next_offset}"
        )
    copied = under_way = 0
    at = stream.next_offset
    while at < disk.next_offset:
        chunk = disk.read(at, COPY_BYTES)
        stream.append_as_is(chunk)
        at = chunk.next_offset
        copied += len(chunk.data)
        under_way += len(chunk.data)
        seen(len(chunk.data))
        if under_way >= UNDER_WAY_BYTES:
            stream.durable()
            under_way = 0
    stream.durable()
    for producer_id, batches in disk.producers.snapshot().items():
        for batch in batches:
            stream.producers.add(producer_id, batch.first_sequence, batch.count, batch.base_offset)
    stream.write_bounds(compacted_until=max(disk.compacted_until, stream.compacted_until))
    return copied


def _compare(disk: PartitionLog, stream: StreamLog, seen: Seen) -> int:
    """Check every record of the disk against its copy; return their bytes.

    Raises:
        DifferentRecordsError: a record is not equal.
    """
    compared, at = 0, disk.first_offset
    while at < disk.next_offset:
        chunk = disk.read(at, COMPARE_BYTES)
        parts, place = [], at
        while place < chunk.next_offset:
            copy = stream.read(place, COMPARE_BYTES, chunk.next_offset)
            parts.append(copy.data)
            place = copy.next_offset
        if b"".join(parts) != chunk.data:
            raise DifferentRecordsError(
                f"{stream.name}: the records from offset {at} to {chunk.next_offset - 1} are not those of the disk"
            )
        at = chunk.next_offset
        compared += len(chunk.data)
        seen(len(chunk.data))
    if (stream.next_offset, disk.producers.snapshot()) != (disk.next_offset, stream.producers.snapshot()):
        raise DifferentRecordsError(f"{stream.name}: its end or its producers are not those of the disk")
    return compared
