"""One run of files of a partition: append, seal, recover (docs/specifications/jebp.md, section 5; docs/storage.md)."""

import contextlib
import logging

from babelbus.arrays import np
from babelbus.records.columns import find_positions
from babelbus.records.fields import offsets_at, size_of
from babelbus.records.format import RECORD_BYTES_MIN
from babelbus.records.record import RecordBatch
from babelbus.storage.contract import Chunk
from babelbus.storage.disk.index import BLOCK_ENTRY, BLOCK_RECORDS, ENTRY_BYTES, SparseIndex, decode
from babelbus.storage.disk.reading import SegmentReader
from babelbus.storage.disk.scan import OFFSET_MAX, Scan, scan
from babelbus.storage.errors import DiskError
from babelbus.storage.files import FileSystem, disk_error

__all__ = ["DERIVED_SUFFIXES", "SUFFIXES", "Chunk", "Segment", "base_name"]

log = logging.getLogger(__name__)

SUFFIXES = (".log", ".index", ".timeindex", ".blocks")
DERIVED_SUFFIXES = SUFFIXES[1:]
RESERVE_BYTES = 2**16
"""An append of less than a page makes the file this much longer. Then the flushes of the next appends change neither
its size nor, mostly, its blocks, so that the file system writes no journal: 140 us and not 200 on ext4. The zeros take
no room on the disk."""
PAGE_BYTES = TAIL_BYTES = 4096
"""A segment that is smaller is not made longer in advance: most of many topics are small."""


def base_name(base_offset: int) -> str:
    """Return the name of a segment's files without suffix: 20 digits, so that names sort as offsets (DECISION 30)."""
    return f"{base_offset:020d}"


class Segment(SegmentReader):
    """The records of one partition from `base_offset` on, in one append-only file and three derived ones.

    Invariant: `size_bytes` ends on a record boundary. One task appends; the caller locks.
    """

    def __init__(self, files: FileSystem, folder: str, base_offset: int) -> None:
        super().__init__(files, f"{folder}/{base_name(base_offset)}", base_offset)
        self.created_ms = 0
        """When the first record came, by the server's clock; 0 before."""
        self.compacted_with = 0
        """How many sealed segments there were when this one was last compacted."""
        self._entries_written = 0
        self._blocks_written = 0
        self.index_dirty = False
        """Whether the derived files may not be durable yet."""
        self._rebuilt = False
        self._reserved_bytes = 0
        """Size of the file where that is more than `size_bytes`: zeros wait there for the next records."""

    # -- making and opening ------------------------------------------------------------------------------------------

    def create(self, *, durable: bool = True) -> None:
        """Write the files, empty; when not `durable`, the caller flushes the folder before it relies on them.

        Raises:
            OSError: the disk refused; no file is left, since an empty log would say that the one before ends here.
        """
        try:
            for suffix in reversed(SUFFIXES):
                file = self._files.open(self.path + suffix, create=True)
                try:
                    file.truncate(0)
                finally:
                    file.close()
            if durable:
                self._files.flush_folder(self.path.rpartition("/")[0])
        except OSError:
            with contextlib.suppress(OSError):
                self.remove()
            raise

    def open_sealed(self, next_offset: int) -> Scan | None:
        """Open a segment that ends before `next_offset`; its log is read only if the derived files do not fit it.

        Returns what the scan found when one was needed.
        """
        self.sealed = True
        self.next_offset = next_offset
        self.size_bytes = self.file_bytes()
        index = self._load_index()
        if index is not None and self._fits(index):
            self.set_index(index)
            self._entries_written = self._blocks_written = len(index)
            return None
        return self.rebuild()

    def _read_derived(self) -> tuple[bytes, bytes, bytes] | None:
        """Return the content of the derived files, `None` if a file cannot be read."""
        try:
            index, timeindex, blocks = (self._files.read_file(self.path + suffix) for suffix in DERIVED_SUFFIXES)
        except OSError:
            return None
        return index, timeindex, blocks

    def _load_index(self) -> SparseIndex | None:
        parts = self._read_derived()
        return None if parts is None else decode(*parts, self.size_bytes)

    def _fits(self, index: SparseIndex) -> bool:
        """Return whether the last block stands where the index says, and the segment ends in front of the next one.

        Other blocks are checked when they are read.
        """
        if not len(index):
            return self.size_bytes == 0
        offset = self.offset_at(index.positions[-1])
        lowest = self.base_offset + (len(index) - 1) * BLOCK_RECORDS
        if not lowest <= offset < self.next_offset:
            return False
        if self._last_offset(index.positions[-1]) == self.next_offset - 1:  # compaction keeps the last record
            return True
        # Either its end is lost, or this offset has changed: then the sum says so, and a new index would not.
        self.set_index(index)
        return not self.offsets_hold(self.pread(self.size_bytes, index.positions[-1]), len(index) - 1)

    def _last_offset(self, block: int) -> int:
        """Return the offset of the last record, whose block begins at the byte `block`; -1 when it cannot be told.

        Mostly a page is read: the head of the last record is known if its offset is the expected one.
        """
        expected, size = self.next_offset - 1, TAIL_BYTES
        while True:
            start = max(self.size_bytes - size, block)
            tail = self.pread(self.size_bytes - start, start)
            if start == block:
                positions, end = find_positions(tail, 0, len(tail))
                return int(offsets_at(tail, positions[-1:])[0]) if len(positions) and end == len(tail) else -1
            at = tail.rfind(expected.to_bytes(8, "big"))
            if at >= 0 and size_of(tail[at : at + RECORD_BYTES_MIN]) == len(tail) - at:
                return expected
            size *= 4

    def rebuild(self) -> Scan:
        """Build the derived files of a sealed segment again from the log."""
        found = scan(self.file(), 0, self.base_offset, gaps=True, size=self.size_bytes, limit=self.next_offset)
        log.warning("%s: index rebuilt from %d bytes of records", self.path, found.end)
        self._rebuilt = True
        self._reserved_bytes = self.size_bytes
        self.size_bytes = found.end if found.overlap else found.size
        self._take_scan(found)
        return found

    def recover(self, position: int, next_offset: int, following: int | None = None) -> Scan:
        """Open a segment of which all before the byte `position` is known to be good; read and check the rest.

        `position` begins a block and `next_offset` is the offset there; (0, base offset) reads the whole segment. It
        is sealed if another one is `following` at that offset. Nothing is cut: the scan says where the good records
        end.
        """
        size = self.file_bytes()
        known = self._load_part(position, next_offset) if 0 < position <= size else None
        found = self._scan_from(position if known else 0, next_offset, size, known, following)
        self._reserved_bytes = size
        if known is not None and found.end == position < found.size:
            # Not one good record behind what the checkpoint vouches for: rather it is the checkpoint that is wrong.
            found = self._scan_from(0, next_offset, size, None, following)
        if following is not None:
            self.sealed = True
            self.next_offset = following
            self.size_bytes = found.end if found.overlap else found.size
        self._take_scan(found)
        return found

    def _scan_from(
        self, position: int, next_offset: int, size: int, known: SparseIndex | None, following: int | None
    ) -> Scan:
        return scan(
            self.file(),
            position,
            next_offset if position else self.base_offset,
            index=known,
            gaps=following is not None,
            size=size,
            limit=OFFSET_MAX if following is None else following,
        )

    def _load_part(self, position: int, next_offset: int) -> SparseIndex | None:
        """Return the blocks in front of `position`, as far as the derived files know all of them."""
        parts = self._read_derived()
        if parts is None:
            return None
        index, timeindex, blocks = parts
        count = int(np.searchsorted(np.frombuffer(index[: len(index) // 8 * 8], ">i8"), position))
        known = decode(
            index[: count * ENTRY_BYTES],
            timeindex[: count * ENTRY_BYTES],
            blocks[: count * BLOCK_ENTRY.size],
            position,
        )
        if known is None or count == 0 or next_offset != self.base_offset + count * BLOCK_RECORDS:
            return None
        # The checkpoint is believed only if the block before it is whole, and ends there.
        start = known.positions[-1]
        data = self.pread(position - start, start)
        records, end = find_positions(data, 0, len(data))
        fits = end == position - start and len(records) == BLOCK_RECORDS
        return known if fits and self.offset_at(start) == next_offset - BLOCK_RECORDS else None

    def _take_scan(self, found: Scan) -> None:
        self.set_index(found.index)
        self.bad = found.bad if found.start == 0 else None
        if self.sealed:
            if not found.overlap and found.end < self.size_bytes:
                self.index.distrust_last()  # its bytes reach to the end of the file
        else:
            self.next_offset = found.next_offset
            self.size_bytes = found.end
        self._entries_written = self._blocks_written = 0
        self.write_index(anew=True)

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, batch: RecordBatch) -> None:
        """Write a batch whose offsets are the next ones; it is durable only after `flush`.

        Raises:
            DiskFullError, DiskError: nothing was appended.
        """
        assert batch.base_offset == self.next_offset
        assert not self.sealed
        position = self.size_bytes
        end = position + len(batch.data)
        if end > self._reserved_bytes and position >= PAGE_BYTES > end - position:
            self._reserve(end)
        try:
            self.file().pwrite(batch.data, position)
        except OSError as error:
            self._take_back(position)
            raise disk_error(error, f"write of {len(batch.data)} bytes to {self.path}.log") from error
        self.index.add(batch, position)
        self.size_bytes = end
        self.next_offset += batch.count
        if self.index.last_count <= batch.count or self.index.last_count == BLOCK_RECORDS:  # a block began or ended
            self.write_index()

    def _reserve(self, end: int) -> None:
        """Write zeros behind the end, for the next records; the disk may refuse that."""
        self._reserved_bytes = (end // RESERVE_BYTES + 1) * RESERVE_BYTES
        try:
            self.file().truncate(self._reserved_bytes)
        except OSError as error:
            log.debug("%s.log: not made longer in advance: %s", self.path, error)

    def trim(self) -> None:
        """Remove the zeros that wait for the next records.

        Raises:
            OSError: the disk refused; they stay.
        """
        if self._reserved_bytes > self.size_bytes:
            self._truncate(self.size_bytes)

    def _truncate(self, size: int) -> None:
        self.file().truncate(size)
        self._reserved_bytes = 0

    def _take_back(self, size: int) -> None:
        """Remove what a failed write left behind."""
        try:
            self._truncate(size)
        except OSError as error:  # the next write goes to the same position anyway, and recovery cuts a torn tail
            log.warning("%s.log: could not cut a failed write at byte %d: %s", self.path, size, error)

    def write_index(self, *, anew: bool = False) -> None:
        """Write the entries of the derived files that are not there yet, or all; the next call makes a failure good."""
        index = self.index
        entries, blocks = len(index), len(index) if self.sealed else index.full_blocks
        if entries == self._entries_written and blocks == self._blocks_written and not anew:
            return
        self.index_dirty = True
        parts = index.encode(self._entries_written, entries, self._blocks_written, blocks)
        if anew and self._read_derived() == parts:  # as at most starts: a comparison is far cheaper than a write
            self._entries_written, self._blocks_written = entries, blocks
            return
        starts = (self._entries_written * 8, self._entries_written * 8, self._blocks_written * BLOCK_ENTRY.size)
        try:
            for suffix, start, part in zip(DERIVED_SUFFIXES, starts, parts, strict=True):
                if part or anew:
                    file = self._files.open(self.path + suffix, create=True)
                    try:
                        if anew:
                            file.truncate(0)
                        file.pwrite(part, start)
                    finally:
                        file.close()
        except OSError as error:  # a full disk must not keep readers out
            log.warning("%s: index not written, it stays in memory: %s", self.path, error)
            return
        self._entries_written, self._blocks_written = entries, blocks

    def flush(self) -> None:
        """Flush all that was appended. Blocks for the disk, 0.1 ms to some.

        Raises:
            OSError: the system could not; what is on the disk behind the last good flush is unknown.
        """
        self.file().flush()

    def flush_index(self) -> None:
        """Flush the derived files, so that a checkpoint may stand on them.

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
        self.index_dirty = False

    def seal(self) -> None:
        """Refuse further records, and write the entry of the last block.

        Raises:
            OSError: the disk refused; further records are taken.
        """
        self.trim()
        self.sealed = True
        self.write_index()

    def cut_tail(self, position: int) -> None:
        """Remove bytes behind the last good record that are none, or stand in the next segment too.

        Raises:
            OSError: the disk refused.
        """
        self._truncate(position)
        self.file().flush()
        self.size_bytes = position

    def swap(self, source: str) -> None:
        """Replace the log by the file `source`: the same records without some.

        Raises:
            OSError: the disk refused; the segment is the old or the new one.
        """
        self.close()
        folder = self.path.rpartition("/")[0]
        # First, and durably: beside the new log the old sums would say that its offsets have changed.
        for suffix in DERIVED_SUFFIXES:
            self._files.unlink(self.path + suffix)
        self._files.flush_folder(folder)
        self._files.rename(source, f"{self.path}.log")
        # From here on the log is the new one, whatever else fails.
        self.size_bytes = self.file_bytes()
        self.rebuild()
        self._rebuilt = False
        self._files.flush_folder(folder)

    def cut(self, position: int) -> None:
        """Remove the records from the byte `position` on, where a record begins.

        Raises:
            OSError: the disk refused.
        """
        self._truncate(position)
        block = self.index.block_at(position - 1) if position else -1
        start = self.index.positions[block] if block > 0 else 0
        first = self.offset_at(start) if start else self.base_offset
        self.index.cut(max(block, 0))
        found = scan(self.file(), start, first, index=self.index, gaps=self.sealed, size=position)
        self.sealed = False
        self._take_scan(found)

    def locate(self, offset: int) -> tuple[int, int]:
        """Return position and offset of a record as `SegmentReader.locate`; scan a sealed segment with a wrong index.

        The scan happens once in the life of a sealed segment.

        Raises:
            CorruptRecordError: the record is not readable.
        """
        found = self.find(offset)
        if found is None and self.sealed and not self._rebuilt:
            log.warning("%s: record %d is not where the index says; rebuilding it", self.path, offset)
            self.rebuild()
        return super().locate(offset) if found is None else found

    def remove(self) -> None:
        """Remove the files, the log first: what a crash leaves are derived files without a log, removed at start."""
        self.close()
        for suffix in SUFFIXES:
            self._files.unlink(self.path + suffix)
