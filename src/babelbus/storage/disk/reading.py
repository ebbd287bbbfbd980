"""Finding and checking records in one segment: what is served was compared with its CRC and stands at its offset.

A segment is *dense* as long as compaction has removed nothing: then the offset of every record follows from its number
in the file, and is checked too although no CRC covers it. In a segment with gaps offsets must rise, and the sum of the
whole block (`.blocks`) stands for them. Nothing here changes a file.
"""

from babelbus.arrays import I64, np
from babelbus.errors import StorageError
from babelbus.records.columns import find_positions
from babelbus.records.fields import crcs_hold, offset_of, offsets_at, size_of, timestamps_at
from babelbus.records.format import RECORD_BYTES_MIN, CorruptRecordError, record_error
from babelbus.storage.contract import BadRange, Chunk
from babelbus.storage.disk.index import BLOCK_RECORDS, UNKNOWN_SUM, SparseIndex, crc32c
from babelbus.storage.disk.scan import scan
from babelbus.storage.files import File, FileSystem, disk_error


class SegmentReader:
    """The records of one segment from `base_offset` on, to be read. `size_bytes` ends on a record boundary.

    The caller locks. Only a `sealed` segment, which nobody appends to, may have gaps.
    """

    def __init__(self, files: FileSystem, path: str, base_offset: int) -> None:
        self._files = files
        self.path = path
        """The files' name without suffix."""
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.size_bytes = 0
        self.index = SparseIndex()
        self.sealed = False
        self.bad: list[BadRange] | None = None
        """The ranges that a scan found damaged; `None` before the segment was scanned."""
        self._log: File | None = None
        self._dense: bool | None = None
        self._entry_offsets: I64 | None = None
        self._walked: tuple[int, int, I64, I64] | None = None
        """The damaged block that was searched last, and its good records: clients ask for one again and again."""

    def set_index(self, index: SparseIndex) -> None:
        """Replace the index and drop what was learned from the last index."""
        self.index = index
        self._dense = None
        self._entry_offsets = None
        self._walked = None

    def view(self) -> "SegmentReader":
        """Return a reader of the records that are here now, which does not see what is appended meanwhile."""
        view = SegmentReader(self._files, self.path, self.base_offset)
        view.next_offset, view.size_bytes, view.bad = self.next_offset, self.size_bytes, self.bad
        view.index = self.index.copy()
        view._log = self.file()
        return view

    # -- finding -----------------------------------------------------------------------------------------------------

    def locate(self, offset: int) -> tuple[int, int]:
        """Return position and offset of the first record at or after `offset`, which is below `next_offset`.

        Costs one read of a block and a walk through the block, about 0.5 ms at most for small records.

        Raises:
            CorruptRecordError: the record is not readable.
        """
        found = self.find(offset)
        if found is None:
            raise self.corrupt(offset)
        return found

    def find(self, offset: int) -> tuple[int, int] | None:
        """Return position and offset of the first record at or after `offset`, or `None` when it cannot be told.

        Raises:
            CorruptRecordError: what stands there has another offset.
        """
        for bad in self.bad or ():
            if bad.offset <= offset < bad.next_offset:
                raise CorruptRecordError(
                    bad.position, bad.reason, path=f"{self.path}.log", offset=offset, after=bad.next_offset
                )
        if not len(self.index):
            return None
        block = self._block_of(offset)
        start, end = self._bounds(block)
        data = self.pread(end - start, start)
        positions, last = find_positions(data, 0, len(data))
        if len(positions) and last == len(data):
            offsets = offsets_at(data, positions)
            if self.dense:
                # Each record is there, so its number says where; its own CRC is checked by `read`.
                lowest = self._first_of(block)
                if len(positions) == min(BLOCK_RECORDS, self.next_offset - lowest):
                    at = int(positions[offset - lowest])
                    if offsets[offset - lowest] == offset:
                        return start + at, offset
                    reason = f"its offset is {offsets[offset - lowest]}"
                    raise CorruptRecordError(start + at, reason, path=f"{self.path}.log", offset=offset)
            elif crc32c(data) == self.index.sums[block]:
                at = int(np.searchsorted(offsets, offset))
                if at < len(positions):
                    return start + int(positions[at]), int(offsets[at])
                if block + 1 < len(self.index):  # the rest of this block was compacted away
                    return end, int(self._entries()[block + 1])
                return None
        return self._find_slowly(data, block, offset)

    def _find_slowly(self, data: bytes, block: int, offset: int) -> tuple[int, int] | None:
        """Find the record in a block that is damaged, or not where the index says.

        Raises:
            CorruptRecordError: the block's sum says that an offset in it has changed.
        """
        if not self.dense and not self.offsets_hold(data, block):
            raise self.corrupt(offset)  # and not `None`: a new index would believe what stands there
        if self.bad is None and self.index.sums[block] == UNKNOWN_SUM:
            return None  # a scan must say first what of it is damaged
        start, end = self._bounds(block)
        if self._walked is None or self._walked[:2] != (block, end):
            self._walked = block, end, *self._scan_block(data, block)
        positions, offsets = self._walked[2:]
        at = int(np.searchsorted(offsets, offset))
        if at == len(offsets):
            return None
        if offsets[at] != offset:
            # Between two good records that touch there was never a damaged one: it was compacted away.
            touches = at > 0 and positions[at] == positions[at - 1] + size_of(data[positions[at - 1] :])
            if self.dense or not (touches or (at == 0 and positions[0] == 0)):
                return None
        return start + int(positions[at]), int(offsets[at])

    def _scan_block(self, data: bytes, block: int) -> tuple[I64, I64]:
        """Return where the good records of a damaged block begin in its bytes, and their offsets."""
        start, end = self._bounds(block)
        first, gaps = self._first_of(block), not self.dense
        found = scan(self.file(), start, first, gaps=gaps, size=end, limit=self.next_offset)
        begins = [start, *(bad.end for bad in found.bad)]
        ends = [*(bad.position for bad in found.bad), found.end]
        parts = [find_positions(data, at - start, to - start)[0] for at, to in zip(begins, ends, strict=True)]
        positions = np.concatenate(parts)
        return positions, offsets_at(data, positions)

    def offsets_hold(self, data: bytes, block: int) -> bool:
        """Return whether the offsets of a whole block can be as they were written, as far as its sum can tell."""
        total = self.index.sums[block]
        if total == UNKNOWN_SUM or crc32c(data) == total:
            return True
        # A record that its own CRC refuses explains the difference; if all are good it must be an offset.
        positions, end = find_positions(data, 0, len(data))
        return end != len(data) or not crcs_hold(data, positions, end)

    @property
    def dense(self) -> bool:
        """Whether no offset is missing; told by the number of records alone."""
        if not self.sealed:
            return True
        if self._dense is None:
            blocks, records = len(self.index), self.next_offset - self.base_offset
            self._dense = blocks == -(-records // BLOCK_RECORDS)
            if self._dense and blocks:
                start, end = self._bounds(blocks - 1)
                data = self.pread(end - start, start)
                positions, _ = find_positions(data, 0, len(data))
                self._dense = len(positions) == records - (blocks - 1) * BLOCK_RECORDS
        return self._dense

    def _block_of(self, offset: int) -> int:
        if self.dense:
            return min((offset - self.base_offset) // BLOCK_RECORDS, len(self.index) - 1)
        return max(int(np.searchsorted(self._entries(), offset, side="right")) - 1, 0)

    def _entries(self) -> I64:
        """Return the offset that each block of a segment with gaps begins with (DECISION 43)."""
        if self._entry_offsets is None:
            inner = [self.offset_at(at) for at in self.index.positions[1:]]
            self._entry_offsets = np.array([self.base_offset, *inner], np.int64)
        return self._entry_offsets

    def _bounds(self, block: int) -> tuple[int, int]:
        positions = self.index.positions
        return positions[block], positions[block + 1] if block + 1 < len(positions) else self.size_bytes

    def offset_at(self, position: int) -> int:
        """Return the eight bytes at `position` as an offset, -1 when they are not there."""
        head = self.pread(8, position)
        return offset_of(head) if len(head) == 8 else -1

    def find_time(self, timestamp: int) -> int | None:
        """Return the offset of the first record, in offset order, at or after `timestamp` (DECISION 39).

        When a damaged one stands in front of it, that one's: reading on from there says so.
        """
        for block, value in enumerate(self.index.greatest):
            if value < timestamp:
                continue
            start, end = self._bounds(block)
            data = self.pread(end - start, start)
            positions, last = find_positions(data, 0, len(data))
            offsets = offsets_at(data, positions)
            times = timestamps_at(data, positions)
            if crc32c(data) != self.index.sums[block]:
                bad = next((n for n, at in enumerate(positions.tolist()) if record_error(data, at, last)), None)
                if bad is not None or last != len(data):
                    positions = positions[:bad]
                    late = np.flatnonzero(times[:bad] >= timestamp)
                    behind = int(offsets[len(positions) - 1]) + 1 if len(positions) else self._first_of(block)
                    return int(offsets[late[0]]) if len(late) else behind
            late = np.flatnonzero(times >= timestamp)
            if len(late):
                return int(offsets[late[0]])
        return None

    def _first_of(self, block: int) -> int:
        return self.base_offset + block * BLOCK_RECORDS if self.dense else int(self._entries()[block])

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, position: int, offset: int, bytes_max: int, end: int) -> Chunk:
        """Return the whole records from `position` on that fit `bytes_max` and end before the byte `end`, all checked.

        The first record at or after `offset` must stand at `position`; a record larger than `bytes_max` is returned
        alone. Costs a read and a checksum of the bytes, and up to 1,023 record CRCs at either end.

        Raises:
            CorruptRecordError: the first record is bad; good ones in front of a bad one are given first.
        """
        wanted = min(bytes_max, end - position)
        edge = self.index.positions[self.index.block_at(position + wanted)] - position
        if wanted // 2 <= edge and position + wanted < end:
            wanted = edge  # ends with a block: its sum checks it, and nothing that was read is thrown away
        data = self.pread(wanted, position)
        good, final = self._check(data, position, offset)
        if final < 0:
            return self.read(position, offset, self._size_of_larger(data, position, offset, bytes_max, end), end)
        if good < len(data):
            data = data[:good]
        return Chunk(data, offset_of(data), offset_of(data, final) + 1)

    def _check(self, data: bytes, position: int, offset: int) -> tuple[int, int]:
        """Check what was read at `position`, where `offset` is expected, as far as it is good.

        Returns where the good records end in `data`, and where the last good record begins, else -1.
        """
        index, size = self.index, len(data)
        if not self.dense and not self._edges_hold(position, position + size):
            return 0, -1
        # Blocks that lie in `data` as a whole are checked by their sum, the parts in front and behind by records.
        block = index.block_at(position)
        block += block < 0 or index.positions[block] < position
        last = index.block_at(position + size)
        at = expected = 0
        final = -1
        expected = offset
        if block <= last:
            begin = index.positions[block] - position
            at, final = self._check_records(data, 0, begin, expected)
            if final >= 0:
                expected = offset_of(data, final) + 1
            whole = -1
            while at == begin and block < last:
                finish = index.positions[block + 1] - position
                if index.sums[block] == UNKNOWN_SUM or crc32c(data[begin:finish]) != index.sums[block]:
                    break
                first = offset_of(data, begin)
                if first != expected if self.dense else first < expected:
                    return at, final
                whole = begin
                block += 1
                at = begin = finish
                expected = first + BLOCK_RECORDS if self.dense else first + 1
            if whole >= 0:
                final = int(find_positions(data, whole, at)[0][-1])
                expected = offset_of(data, final) + 1
        good, behind = self._check_records(data, at, size, expected)
        return (good, behind) if behind >= 0 else (at, final)

    def _edges_hold(self, begin: int, end: int) -> bool:
        """Check the blocks of which only a part was read by their sums: the offsets of a segment with gaps."""
        for block in {self.index.block_at(begin), self.index.block_at(end - 1)}:
            if block >= 0:
                start, finish = self._bounds(block)
                if (start < begin or end < finish) and not self.offsets_hold(self.pread(finish - start, start), block):
                    return False
        return True

    def _check_records(self, data: bytes, begin: int, finish: int, expected: int) -> tuple[int, int]:
        """Check the records in the bytes `begin` to `finish` by their own CRCs, and their offsets.

        Returns where the good records end, and where the last good record begins, else -1.
        """
        positions, end = find_positions(data, begin, finish)
        if not len(positions):
            return begin, -1
        count, offsets = len(positions), offsets_at(data, positions)
        if self.dense:
            wrong = offsets != np.arange(expected, expected + count)
        else:
            wrong = np.diff(offsets, prepend=expected - 1) <= 0
            wrong |= offsets >= self.next_offset
        if wrong.any():
            count = int(np.flatnonzero(wrong)[0])
            end = int(positions[count])
        if not crcs_hold(data, positions[:count], end):
            for number, at in enumerate(positions[:count].tolist()):
                if record_error(data, at, end):
                    count, end = number, at
                    break
        return end, int(positions[count - 1]) if count else -1

    def _size_of_larger(self, data: bytes, position: int, offset: int, bytes_max: int, end: int) -> int:
        """Return the size of the record at `position` if the record is only larger than `bytes_max`.

        Raises:
            CorruptRecordError: the record is damaged.
        """
        head = data if len(data) >= RECORD_BYTES_MIN else self.pread(RECORD_BYTES_MIN, position)
        if len(head) >= RECORD_BYTES_MIN:
            size = size_of(head)
            if RECORD_BYTES_MIN <= size <= end - position and size > bytes_max:
                return size
        reason = record_error(data, 0, len(data)) or f"its offset is {offset_of(data)}, or one near it is wrong"
        raise CorruptRecordError(position, reason, path=f"{self.path}.log", offset=offset)

    def corrupt(self, offset: int) -> CorruptRecordError:
        """Return the error for a record that is not found; it names the byte where its block begins."""
        position = self._bounds(self._block_of(offset))[0] if len(self.index) else 0
        return CorruptRecordError(
            position, "it is missing or damaged, in the block that begins here", path=f"{self.path}.log", offset=offset
        )

    # -- files -------------------------------------------------------------------------------------------------------

    def file(self) -> File:
        """Return the open log.

        Raises:
            StorageError: it is missing.
            DiskError: the system does not open it, as when file descriptors run out.
        """
        if self._log is None:
            try:
                self._log = self._files.open(f"{self.path}.log")
            except FileNotFoundError:
                raise StorageError(f"{self.path}.log is missing") from None
            except OSError as error:
                raise disk_error(error, f"opening {self.path}.log") from error
        return self._log

    def file_bytes(self) -> int:
        """Return the size of the file, which has more than `size_bytes` when its tail is torn."""
        return self.file().size()

    def pread(self, size: int, position: int) -> bytes:
        """Read from the log.

        Raises:
            DiskError: the disk refused.
        """
        try:
            return self.file().pread(size, position)
        except OSError as error:
            raise disk_error(error, f"read of {size} bytes at {position} of {self.path}.log") from error

    def close(self) -> None:
        """Close the log; the next call opens it again."""
        if self._log is not None:
            self._log.close()
            self._log = None
