"""Reading a data folder in place, whether a server runs on it or not, and without changing anything in it.

A reader may see the records that a server started now would show: whole records, of whole batches of a producer, and
durable. So before an end is reported the log is flushed (`fdatasync`), which any reader of a file may ask for: a record
that Spark has counted cannot be lost with the power and its offset given to another.
"""

import errno
import os
from bisect import bisect_right
from collections.abc import Iterator
from urllib.parse import unquote

import msgspec

from babelbus.errors import StorageError
from babelbus.records.columns import Columns, decode_columns, find_positions
from babelbus.records.format import CorruptRecordError
from babelbus.spark.errors import UnknownTopicError
from babelbus.spark.plan import Bounds
from babelbus.storage import notes
from babelbus.storage.disk import (
    BLOCK_ENTRY,
    BLOCK_RECORDS,
    ENTRY_BYTES,
    RESCUED_SUFFIX,
    SETTINGS_NAME,
    Segment,
    base_name,
    checkpoint_note,
    find_bases,
    folder_name,
    parse_base,
    scan,
    written_size,
)
from babelbus.storage.errors import OffsetOutOfRangeError
from babelbus.storage.files import File, LocalFiles, disk_error
from babelbus.storage.memory import MemoryFile

CHUNK_BYTES = 4 * 2**20
OPEN_TRIES = 3
"""How often a segment is opened again that retention, compaction or a rescue changed while it was being opened."""
_NOTHING_TO_FLUSH = frozenset({errno.EROFS, errno.EINVAL, errno.ENOTSUP})


class ReadOnlyFiles(LocalFiles):
    """The files of this machine, opened for reading alone. An index that storage makes anew stays in its memory."""

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        """Open a file to read it; a file that would be made is made in memory."""
        return MemoryFile(bytearray()) if create else super().open(path, write=False)


class Tail(msgspec.Struct):
    """The position to which the last segment of a partition was read and found good."""

    base: int
    position: int
    next_offset: int
    end: int
    """`next_offset`, or where an incomplete batch begins."""
    inode: int


class PartitionFolder:
    """One partition's segments. The object that tells bounds remembers the tail, so that only new records are read."""

    def __init__(self, folder: str) -> None:
        self._files = ReadOnlyFiles()
        self._folder = folder
        self._tail: Tail | None = None
        self._flushed = -1

    # -- what there is -----------------------------------------------------------------------------------------------

    def bounds(self) -> Bounds:
        """Return the offsets that can be read, all of them durable.

        Raises:
            StorageError: the disk refused.
        """
        for _ in range(OPEN_TRIES):
            bases = find_bases(self._files, self._folder)
            if not bases:
                return Bounds(0, 0, 0)
            try:
                end = self._find_end(bases)
                size = sum(os.stat(self._log(base)).st_size for base in bases)
            except FileNotFoundError:  # retention or a rescue took a segment away: look again
                self._tail = None
                continue
            except OSError as error:
                raise disk_error(error, f"reading {self._folder}") from error
            return Bounds(bases[0], max(end, bases[0]), size)
        raise disk_error(OSError(errno.EAGAIN, "its segments change all the time"), f"reading {self._folder}")

    def _find_end(self, bases: list[int]) -> int:
        last = bases[-1]
        known = checkpoint_note(self._files, self._folder).recall()
        if known is not None and known.segment not in bases:
            known = None
        file = self._files.open(self._log(last))
        try:
            size, inode = file.size(), os.stat(self._log(last)).st_ino
            tail = self._tail
            if tail is None or tail.base != last or tail.inode != inode or size < tail.position:
                position, offset = (known.position, known.next_offset) if known and known.segment == last else (0, last)
                tail = (
                    Tail(last, position, offset, offset, inode)
                    if position <= size
                    else Tail(last, 0, last, last, inode)
                )
            if size > tail.position:
                found = scan(file, tail.position, tail.next_offset, size=size)
                if found.end == tail.position < found.size and tail.position and self._tail is None:
                    # Not one good record behind what the checkpoint vouches for: rather it is wrong (as recovery says).
                    found = scan(file, 0, last, size=size)
                tail.end = found.next_offset
                batch = found.producers[-1] if found.producers else None
                if batch is not None and batch.base_offset + batch.count > found.next_offset and not found.bad:
                    tail.end = (
                        batch.base_offset
                    )  # a start would cut what is there of it, and its producer sends it again
                else:
                    tail.position, tail.next_offset = found.end, found.next_offset
            if self._flushed < tail.end:
                self._flush([base for base in bases if base >= (known.segment if known else 0)][:-1], file)
                self._flushed = tail.end
            self._tail = tail
            is_blank = tail.end == last and not written_size(file)
        finally:
            file.close()
        end = tail.end
        if is_blank and len(bases) > 1 and (known is None or known.segment < last):
            end = self._end_of_previous(bases[-2], last)
        return min([end, *self._rescued()])

    def _end_of_previous(self, base: int, following: int) -> int:
        """Return where the segment before an empty one ends: the power may have gone before its end was durable."""
        file = self._files.open(self._log(base))
        try:
            return min(scan(file, 0, base, gaps=True, limit=following).next_offset, following)
        finally:
            file.close()

    def _rescued(self) -> list[int]:
        """Return where records begin that a rescue after a failed flush is about to replace."""
        found = [parse_base(name) for name in self._files.list_folder(self._folder) if name.endswith(RESCUED_SUFFIX)]
        return [base for base, suffix in filter(None, found) if suffix == RESCUED_SUFFIX]

    def _flush(self, bases: list[int], last: File) -> None:
        for base in bases:
            if base < self._flushed:
                continue
            file = self._files.open(self._log(base))
            try:
                _flush_file(file)
            finally:
                file.close()
        _flush_file(last)

    def _log(self, base: int) -> str:
        return f"{self._folder}/{base_name(base)}.log"

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, start: int, end: int) -> Iterator[Columns]:
        """Yield the records from the offsets `start` to `end` (excluded), a few MiB at a time, every byte checked.

        Raises:
            OffsetOutOfRangeError: retention removed `start`, or the log ends before `end`.
            CorruptRecordError: a record is damaged; it names the file, the byte and the offset.
            StorageError: the disk refused.
        """
        tries = 0
        while start < end:
            bases = find_bases(self._files, self._folder)
            number = bisect_right(bases, start) - 1
            if number < 0:
                raise OffsetOutOfRangeError(start, bases[0] if bases else 0, bases[-1] if bases else 0)
            following = bases[number + 1] if number + 1 < len(bases) else None
            try:
                segment = self._open(bases[number], following)
            except FileNotFoundError:
                tries += 1
                if tries == OPEN_TRIES:
                    raise OffsetOutOfRangeError(start, bases[0], bases[-1]) from None
                continue
            try:
                stop = min(end, segment.next_offset)
                if stop <= start:
                    raise OffsetOutOfRangeError(start, bases[0], segment.next_offset)
                try:
                    for columns, next_offset in _read_segment(segment, start, stop):
                        start, tries = next_offset, 0
                        if columns is not None:
                            yield columns
                    start = max(start, stop)
                except CorruptRecordError:
                    tries += 1  # compaction may have put another file in this one's place while it was opened
                    if tries == OPEN_TRIES:
                        raise
            finally:
                segment.close()

    def _open(self, base: int, following: int | None) -> Segment:
        """Open a segment with what the index files know of it; the rest of it is read.

        Raises:
            FileNotFoundError: it is gone.
            StorageError: the disk refused.
        """
        segment = Segment(self._files, self._folder, base)
        try:
            if following is not None:
                segment.open_sealed(following)
            else:
                segment.recover(*self._indexed(segment))
        except StorageError:
            segment.close()
            if not self._files.exists(f"{segment.path}.log"):
                raise FileNotFoundError(f"{segment.path}.log") from None
            raise
        return segment

    def _indexed(self, segment: Segment) -> tuple[int, int]:
        """Return byte and offset of the last block of the open segment that the index files know the beginning of."""
        try:
            index, blocks = (self._files.read_file(segment.path + suffix) for suffix in (".index", ".blocks"))
        except OSError:
            return 0, segment.base_offset
        number = min(len(blocks) // BLOCK_ENTRY.size, len(index) // ENTRY_BYTES - 1)
        if number < 1:
            return 0, segment.base_offset
        position = int.from_bytes(index[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES], "big")
        return position, segment.base_offset + number * BLOCK_RECORDS

    def find_time(self, timestamp: int) -> int | None:
        """Return the offset of the first record at or after `timestamp` (ms), `None` without such a record."""
        bases = find_bases(self._files, self._folder)
        for base, following in zip(bases, [*bases[1:], None], strict=True):
            try:
                segment = self._open(base, following)
            except FileNotFoundError:
                continue
            try:
                if segment.index.greatest_timestamp >= timestamp:
                    found = segment.find_time(timestamp)
                    if found is not None:
                        return found
            finally:
                segment.close()
        return None


class _Kept(msgspec.Struct):
    """The settings of a topic that matter here."""

    id: str = ""


def _topic_id(path: str) -> str:
    """Return the id that the server gave to a topic, empty if the settings cannot be read."""
    try:
        with open(f"{path}/{SETTINGS_NAME}", "rb") as file:
            return notes.decode(file.read(), _Kept, path=file.name, bare=True).id
    except (FileNotFoundError, notes.DamagedNoteError):
        return ""


def _read_segment(segment: Segment, start: int, end: int) -> Iterator[tuple[Columns | None, int]]:
    """Yield the records of one segment, each time with the offset that follows."""
    position, offset = segment.locate(start)
    if offset >= end:
        yield None, end  # compaction removed all of them
        return
    stop = segment.locate(end)[0] if end < segment.next_offset else segment.size_bytes
    if stop <= position:
        if end < segment.next_offset:
            yield None, end
            return
        raise segment.corrupt(start)  # the segment has lost its end
    while position < stop:
        chunk = segment.read(position, offset, CHUNK_BYTES, stop)
        positions, _ = find_positions(chunk.data, 0, len(chunk.data))
        yield decode_columns(chunk.data, positions), chunk.next_offset
        position, offset = position + len(chunk.data), chunk.next_offset


def _flush_file(file: File) -> None:
    try:
        file.flush()
    except OSError as error:
        if error.errno not in _NOTHING_TO_FLUSH:  # a file system that nobody writes to from here
            raise


class FolderReach:
    """The topics of a data folder; see `record_source.Reach`. Topics of the engine `memory` are not in it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files = ReadOnlyFiles()
        self._partitions: dict[tuple[str, int], PartitionFolder] = {}

    def topics(self) -> list[str]:
        """Return the names of the topics, sorted."""
        names = self._files.list_folder(f"{self._folder}/topics")
        return sorted(unquote(name) for name in names if not name.startswith("."))

    def bounds(self, topic: str, wanted: tuple[int, ...] | None) -> dict[int, Bounds]:
        """Return what the wanted partitions of a topic hold (`None`: all).

        Raises:
            UnknownTopicError: there is no such topic.
            StorageError: the disk refused.
        """
        path = self._path(topic)
        try:
            identity = f"{_topic_id(path)}#{os.stat(path).st_ino}"
            names = os.listdir(path)
        except FileNotFoundError:
            raise UnknownTopicError(topic, f"in the data folder {self._folder}") from None
        found = {}
        for number in sorted(int(name) for name in names if name.isdecimal()):
            if wanted is not None and number not in wanted:
                continue
            bounds = self._partition(topic, number).bounds()
            found[number] = msgspec.structs.replace(bounds, identity=identity)
        return found

    def find_time(self, topic: str, partition: int, timestamp: int) -> int | None:
        """Return the offset of the first record at or after `timestamp` (ms), `None` without such a record."""
        return self._partition(topic, partition).find_time(timestamp)

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Columns]:
        """Yield the records of a partition; see `PartitionFolder.read`."""
        return self._partition(topic, partition).read(start, end)

    def close(self) -> None:
        """Close what is open: nothing stays open between calls."""

    def _partition(self, topic: str, number: int) -> PartitionFolder:
        found = self._partitions.get((topic, number))
        if found is None:
            found = self._partitions[topic, number] = PartitionFolder(f"{self._path(topic)}/{number}")
        return found

    def _path(self, topic: str) -> str:
        return f"{self._folder}/topics/{folder_name(topic)}"
