"""One run of files of a partition: append, read, seal, recover (specs/jebp.md, section 5; docs/storage.md)."""

import logging
from typing import NamedTuple

import numpy as np

from babelbus.errors import StorageError
from babelbus.storage.checksum import crcs_hold
from babelbus.storage.columns import I64, find_positions
from babelbus.storage.files import DiskError, File, FileSystem, disk_error
from babelbus.storage.format import (
    HEAD_BYTES,
    INT32,
    INT64,
    LENGTH_FROM,
    RECORD_BYTES_MIN,
    CorruptRecordError,
    record_error,
    walk,
)
from babelbus.storage.index import BLOCK_ENTRY, BLOCK_RECORDS, ENTRY_BYTES, UNKNOWN_SUM, SparseIndex, crc32c, decode
from babelbus.storage.record import RecordBatch
from babelbus.storage.scan import Scan, scan

log = logging.getLogger(__name__)

SUFFIXES = (".log", ".index", ".timeindex", ".blocks")
DERIVED_SUFFIXES = SUFFIXES[1:]


def base_name(base_offset: int) -> str:
    """Give the name of a segment's files without suffix: 20 digits, so that names sort as offsets (DECISION 30)."""
    return f"{base_offset:020d}"


class Chunk(NamedTuple):
    """Whole records as stored, one behind the other. `next_offset` is where to read on; `base_offset` is the first's.

    Every byte was checked against the CRCs.
    """

    data: bytes
    base_offset: int
    next_offset: int


class Segment:
    """The records of one partition from `base_offset` on, in one append-only file and three derived ones.

    Invariant: `size_bytes` ends on a record boundary. One task appends; the caller locks.
    """

    def __init__(self, files: FileSystem, folder: str, base_offset: int) -> None:
        self._files = files
        self.path = f"{folder}/{base_name(base_offset)}"
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.size_bytes = 0
        self.index = SparseIndex()
        self.sealed = False
        self.created_ms = 0
        """When the first record came, by the server's clock; 0 before."""
        self.compacted_with = 0
        """How many sealed segments there were when this one was last compacted."""
        self._log: File | None = None
        self._entries_written = 0
        self._blocks_written = 0
        self._entry_offsets: I64 | None = None
        self._index_dirty = False

    # -- making and opening ------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Make the files, empty and durable. Costs two flushes of the disk.

        Raises:
            OSError: the disk refused.
        """
        for suffix in SUFFIXES:
            file = self._files.open(self.path + suffix, create=True)
            file.truncate(0)
            file.close()
        self._files.flush_folder(self.path.rpartition("/")[0])

    def open_sealed(self, next_offset: int) -> Scan | None:
        """Take a segment that ends before `next_offset`; its log is read only if the derived files do not fit it.

        Gives what the scan found when one was needed.
        """
        self.sealed = True
        self.next_offset = next_offset
        self.size_bytes = self._file().size()
        index = self._load_index()
        if index is not None and self._fits(index):
            self.index = index
            self._entries_written = self._blocks_written = len(index)
            return None
        return self.rebuild()

    def _load_index(self) -> SparseIndex | None:
        try:
            parts = [self._files.read_file(self.path + suffix) for suffix in DERIVED_SUFFIXES]
        except FileNotFoundError:
            return None
        return decode(parts[0], parts[1], parts[2], self.size_bytes)

    def _fits(self, index: SparseIndex) -> bool:
        """Say whether the last block stands where the index says (the others are checked when they are read)."""
        if not len(index):
            return self.size_bytes == 0
        head = self._file().pread(8, index.positions[-1])
        if len(head) < 8:
            return False
        offset = INT64.unpack(head)[0]
        lowest = self.base_offset + (len(index) - 1) * BLOCK_RECORDS
        if not lowest <= offset < self.next_offset:
            return False
        # As many blocks as offsets, unless compaction left gaps, which raise the offset of the last block.
        return bool(offset > lowest or self.next_offset - offset <= BLOCK_RECORDS)

    def rebuild(self) -> Scan:
        """Make the derived files again from the log."""
        found = scan(self._file(), 0, self.base_offset, gaps=self.sealed, size=self.size_bytes)
        log.warning("%s: index rebuilt from %d bytes of records", self.path, found.end)
        self._take_scan(found)
        return found

    def recover(self, position: int, next_offset: int) -> Scan:
        """Open the last segment of a partition: trust it up to the byte `position`, read and check the rest.

        `position` begins a block and `next_offset` is the offset there; (0, base offset) reads the whole segment.
        Nothing is cut: the scan says where the good records end.
        """
        size = self._file().size()
        index = SparseIndex()
        if position:
            known = self._load_part(position, next_offset)
            if known is None or position > size:
                position, next_offset = 0, self.base_offset
            else:
                index = known
        found = scan(self._file(), position, next_offset, index=index, size=size)
        self._take_scan(found)
        return found

    def _load_part(self, position: int, next_offset: int) -> SparseIndex | None:
        """Give the blocks in front of `position`, as far as the derived files know all of them."""
        try:
            index, timeindex, blocks = (self._files.read_file(self.path + suffix) for suffix in DERIVED_SUFFIXES)
        except FileNotFoundError:
            return None
        count = int(np.searchsorted(np.frombuffer(index[: len(index) // 8 * 8], ">i8"), position))
        known = decode(
            index[: count * ENTRY_BYTES],
            timeindex[: count * ENTRY_BYTES],
            blocks[: count * BLOCK_ENTRY.size],
            position,
        )
        if known is None or count == 0 or next_offset != self.base_offset + count * BLOCK_RECORDS:
            return None
        return known if self._offset_at(known.positions[-1]) == next_offset - BLOCK_RECORDS else None

    def _take_scan(self, found: Scan) -> None:
        self.index = found.index
        self.next_offset = max(found.next_offset, self.next_offset if self.sealed else 0)
        self._entry_offsets = None
        self._entries_written = self._blocks_written = 0
        for suffix in DERIVED_SUFFIXES:
            file = self._files.open(self.path + suffix, create=True)
            file.truncate(0)
            file.close()
        if not self.sealed:
            self.size_bytes = found.end
        self.write_index()

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, batch: RecordBatch) -> None:
        """Write a batch whose offsets are the next ones; it is durable only after `flush`.

        Raises:
            DiskFullError, DiskError: nothing was appended.
        """
        assert batch.base_offset == self.next_offset
        assert not self.sealed
        position = self.size_bytes
        try:
            self._file().pwrite(batch.data, position)
        except OSError as error:
            self._take_back(position)
            raise disk_error(error, f"write of {len(batch.data)} bytes to {self.path}.log") from error
        self.index.add(batch, position)
        self.size_bytes = position + len(batch.data)
        self.next_offset += batch.count
        if len(self.index) > self._entries_written or self.index.full_blocks > self._blocks_written:
            self.write_index()

    def _take_back(self, size: int) -> None:
        """Cut what a failed write left behind, so that the next one does not stand on it."""
        try:
            self._file().truncate(size)
        except OSError as error:  # the next write goes to the same position anyway, and recovery cuts a torn tail
            log.warning("%s.log: could not cut a failed write at byte %d: %s", self.path, size, error)

    def write_index(self) -> None:
        """Write the entries of the derived files that are not there yet; a failure is made good at the next call."""
        index = self.index
        entries, blocks = len(index), len(index) if self.sealed else index.full_blocks
        if entries == self._entries_written and blocks == self._blocks_written:
            return
        self._index_dirty = True
        parts = index.encode(self._entries_written, entries, self._blocks_written, blocks)
        starts = (self._entries_written * 8, self._entries_written * 8, self._blocks_written * BLOCK_ENTRY.size)
        try:
            for suffix, start, part in zip(DERIVED_SUFFIXES, starts, parts, strict=True):
                if part:
                    file = self._files.open(self.path + suffix, create=True)
                    try:
                        file.pwrite(part, start)
                    finally:
                        file.close()
        except OSError as error:
            log.warning("%s: index not written, it stays in memory: %s", self.path, error)
            return
        self._entries_written, self._blocks_written = entries, blocks

    def flush(self) -> None:
        """Make all that was appended survive a loss of power. Blocks for the disk, 0.1 ms to some.

        Raises:
            OSError: the system could not; what is on the disk behind the last good flush is unknown.
        """
        self._file().flush()

    def flush_index(self) -> None:
        """Make the derived files durable, so that a checkpoint may stand on them.

        Raises:
            DiskError: they are not.
        """
        self.write_index()
        blocks = len(self.index) if self.sealed else self.index.full_blocks
        if self._blocks_written < blocks or self._entries_written < len(self.index):
            raise DiskError(f"{self.path}: the index could not be written")
        try:
            for suffix in DERIVED_SUFFIXES:
                file = self._files.open(self.path + suffix)
                try:
                    file.flush()
                finally:
                    file.close()
        except OSError as error:
            raise disk_error(error, f"flush of the index of {self.path}") from error
        self._index_dirty = False

    @property
    def index_dirty(self) -> bool:
        """Whether the derived files may not be durable yet."""
        return self._index_dirty

    def seal(self) -> None:
        """Take no more records; the entry of the last block is written too."""
        self.sealed = True
        self.write_index()

    def cut_tail(self, position: int) -> None:
        """Remove bytes that are no records, behind the last good one.

        Raises:
            OSError: the disk refused.
        """
        self._file().truncate(position)
        self._file().flush()
        self.size_bytes = position

    def swap(self, source: str) -> None:
        """Put the file `source` in the place of the log: the same records without some.

        Raises:
            OSError: the disk refused; the segment is the old or the new one, its index is made again at need.
        """
        self.close()
        for suffix in DERIVED_SUFFIXES:
            self._files.unlink(self.path + suffix)
        self._files.rename(source, f"{self.path}.log")
        self._files.flush_folder(self.path.rpartition("/")[0])
        self.size_bytes = self._file().size()
        self.rebuild()

    def cut(self, position: int, next_offset: int) -> None:
        """Remove the records from the byte `position` on, where the record `next_offset` begins.

        Raises:
            OSError: the disk refused.
        """
        self._file().truncate(position)
        block = self.index.block_at(position)
        if block >= 0 and self.index.positions[block] == position:
            block -= 1
        block = max(block, 0)
        start = self.index.positions[block] if len(self.index) else 0
        self.index.cut(block)
        self._entry_offsets = None
        first = self.base_offset if block == 0 else -1
        if position > start:
            first = INT64.unpack(self._file().pread(8, start))[0]
        found = scan(self._file(), start, first if first >= 0 else next_offset, index=self.index, size=position)
        self.sealed = False
        self._take_scan(found)
        self.next_offset = next_offset
        self.size_bytes = position

    # -- reading -----------------------------------------------------------------------------------------------------

    def locate(self, offset: int) -> tuple[int, int]:
        """Give position and offset of the first record at or after `offset`, which is below `next_offset`.

        Costs one read of a block and a walk through it, about 0.5 ms at most for small records.

        Raises:
            CorruptRecordError: the record is not readable.
        """
        for again in (True, False):
            block = self._block_of(offset)
            start = self.index.positions[block]
            end = self.index.positions[block + 1] if block + 1 < len(self.index) else self.size_bytes
            data = self._read(end - start, start)
            found = _find_offset(data, offset)
            if found is not None:
                return start + found[0], found[1]
            if block + 1 < len(self.index) and walk(data)[-1] == len(data):
                return end, self._offset_at(end)  # the rest of this block was compacted away
            if again and self.sealed:
                log.warning("%s: record %d is not where the index says; rebuilding it", self.path, offset)
                self.rebuild()
        raise CorruptRecordError(start, "it is missing or damaged", path=f"{self.path}.log", offset=offset)

    def _block_of(self, offset: int) -> int:
        if not self.sealed:  # an open segment has no gaps
            return (offset - self.base_offset) // BLOCK_RECORDS
        if self._entry_offsets is None or len(self._entry_offsets) != len(self.index):
            if self._dense():
                count = len(self.index)
                self._entry_offsets = np.arange(count, dtype=np.int64) * BLOCK_RECORDS + self.base_offset
            else:
                self._entry_offsets = np.array([self._offset_at(at) for at in self.index.positions], np.int64)
        return max(int(np.searchsorted(self._entry_offsets, offset, side="right")) - 1, 0)

    def _dense(self) -> bool:
        """Say whether no offset is missing: then entry k of the index is for the offset base + 1,024 k."""
        count = len(self.index)
        return self._offset_at(self.index.positions[-1]) == self.base_offset + (count - 1) * BLOCK_RECORDS

    def _offset_at(self, position: int) -> int:
        head = self._read(8, position)
        return int(INT64.unpack(head)[0]) if len(head) == 8 else -1

    def read(self, position: int, offset: int, bytes_max: int, end: int) -> Chunk:
        """Give the whole records from `position` on that fit `bytes_max` and end before the byte `end`, all checked.

        The record `offset` must stand at `position`. If it is larger than `bytes_max` the chunk is empty. Costs a
        read and a checksum of the bytes, and up to 1,023 record CRCs at either end.

        Raises:
            CorruptRecordError: the first record is bad; good ones in front of a bad one are given first.
        """
        index = self.index
        data = self._read(min(bytes_max, end - position), position)
        stop = position + len(data)
        first = index.block_at(position)
        first += index.positions[first] < position
        last = index.block_at(stop)
        # Blocks that lie in `data` as a whole are checked by their sum, the parts in front and behind by records.
        good, final = position, -1
        if first <= last and index.positions[first] > position:
            good, final = self._check_records(data, position, index.positions[first], position)
        if first <= last and good == index.positions[first]:
            for block in range(first, last):
                begin, finish = good, index.positions[block + 1]
                total = index.sums[block]
                if total != UNKNOWN_SUM and crc32c(data[begin - position : finish - position]) == total:
                    good, final = finish, -1
                    continue
                good, final = self._check_records(data, begin, finish, position)
                if good != finish:
                    break
        if first > last or good == index.positions[last]:
            end_of_tail, last_of_tail = self._check_records(data, good, stop, position)
            if last_of_tail >= 0:
                good, final = end_of_tail, last_of_tail
        if good == position:
            self._refuse(data, position, offset, bytes_max, end)
            return Chunk(b"", offset, offset)
        if good < stop:
            data = data[: good - position]
        if final < 0:
            final = find_positions(data, max(index.positions[index.block_at(good - 1)] - position, 0), len(data))[0][-1]
        return Chunk(data, INT64.unpack_from(data)[0], int(INT64.unpack_from(data, int(final))[0]) + 1)

    def _check_records(self, data: bytes, begin: int, finish: int, origin: int) -> tuple[int, int]:
        """Check the records in the bytes `begin` to `finish` by their own CRCs.

        Gives where the good ones end, and where in `data` the last good one begins (-1: there is none).
        """
        positions, end = find_positions(data, begin - origin, finish - origin)
        count = len(positions)
        if not crcs_hold(data, positions, end):
            for number, at in enumerate(positions.tolist()):
                if record_error(data, at, end):
                    count, end = number, at
                    break
        return end + origin, int(positions[count - 1]) if count else -1

    def _refuse(self, data: bytes, position: int, offset: int, bytes_max: int, end: int) -> None:
        """Raise what is wrong with the record at `position`, unless it is only larger than what was asked for."""
        head = data if len(data) >= HEAD_BYTES else self._read(HEAD_BYTES, position)
        if len(head) >= HEAD_BYTES:
            size = INT32.unpack_from(head, 8)[0] + LENGTH_FROM
            if RECORD_BYTES_MIN <= size <= end - position and size > bytes_max:
                return
        reason = record_error(data, 0, len(data)) or "it cannot be read"
        raise CorruptRecordError(position, reason, path=f"{self.path}.log", offset=offset)

    def find_time(self, timestamp: int) -> int | None:
        """Give the offset of the first record, in offset order, at or after `timestamp` (DECISION 39)."""
        greatest = self.index.greatest
        for block, value in enumerate(greatest):
            if value < timestamp:
                continue
            start = self.index.positions[block]
            end = self.index.positions[block + 1] if block + 1 < len(self.index) else self.size_bytes
            data = self._read(end - start, start)
            positions, _ = find_positions(data, 0, len(data))
            times = np.ndarray((len(data) - 7,), ">i8", data, 0, (1,))[positions + 17]
            late = np.flatnonzero(times >= timestamp)
            if len(late):
                return int(INT64.unpack_from(data, int(positions[late[0]]))[0])
        return None

    def hints(self, begin: int, end: int) -> I64:
        """Give where the blocks begin that lie between two bytes of the log, counted from `begin`."""
        positions = np.frombuffer(self.index.positions, np.int64)
        first, after = np.searchsorted(positions, (begin, end))
        inner = positions[first:after] - begin
        return inner if len(inner) and inner[0] == 0 else np.concatenate([np.zeros(1, np.int64), inner])

    # -- files -------------------------------------------------------------------------------------------------------

    def _file(self) -> File:
        if self._log is None:
            try:
                self._log = self._files.open(f"{self.path}.log")
            except FileNotFoundError:
                raise StorageError(f"{self.path}.log is missing") from None
        return self._log

    def file_bytes(self) -> int:
        """Give the size of the file, which has more than `size_bytes` when its tail is torn."""
        return self._file().size()

    def _read(self, size: int, position: int) -> bytes:
        try:
            return self._file().pread(size, position)
        except OSError as error:
            raise disk_error(error, f"read of {size} bytes at {position} of {self.path}.log") from error

    def close(self) -> None:
        """Give the descriptor back; the next call opens the file again."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def remove(self) -> None:
        """Remove the files, the log first: what a crash leaves are derived files without a log, removed at start."""
        self.close()
        for suffix in SUFFIXES:
            self._files.unlink(self.path + suffix)


def _find_offset(data: bytes, offset: int) -> tuple[int, int] | None:
    """Give position and offset of the first record at or after `offset` in a block, or `None` when there is none.

    Behind a damaged record the block is searched for the bytes of the offset: the records there are still good.
    """
    positions, end = find_positions(data, 0, len(data))
    if len(positions):
        offsets = np.ndarray((len(data) - 7,), ">i8", data, 0, (1,))[positions]
        at = int(np.searchsorted(offsets, offset))
        if at < len(positions) and (offsets[at] == offset or bool((np.diff(offsets[: at + 1]) > 0).all())):
            return int(positions[at]), int(offsets[at])
    if end == len(data):
        return None
    sought = INT64.pack(offset)
    at = data.find(sought, end)
    while at >= 0:
        if len(data) - at >= LENGTH_FROM and record_error(data, at, len(data)) is None:
            return at, offset
        at = data.find(sought, at + 1)
    return None
