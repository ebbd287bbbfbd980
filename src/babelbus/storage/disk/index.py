"""The files beside a `.log`: what is derived from it, so that nobody must read all of it (docs/storage.md).

`.index` and `.timeindex` are arrays of i64: the position and the timestamp of every 1,024th record, the first one of
the segment included (docs/specifications/jebp.md, 5.2). `.blocks` is ours, an entry of 16 bytes for each full block of
1,024 records, and for the last block of a sealed segment: CRC-32C of the block's bytes u32, check u32 (CRC-32 over the
block's number, position and timestamp, i64 each, and the other two fields), greatest timestamp i64. All are
big-endian, and all are only a memory of the log: what is missing or does not fit is made again from it.
"""

import struct
import sys
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import google_crc32c

from babelbus.arrays import np
from babelbus.records.format import FEW, Buffer
from babelbus.records.record import RecordBatch

BLOCK_RECORDS = 1024
ENTRY_BYTES = 8
BLOCK_ENTRY = struct.Struct(">IIq")
_CHECKED = struct.Struct(">qqqIq")
UNKNOWN_SUM = -1
"""Stands for the sum of a block whose bytes were not all good when it was made: its records are checked one by one."""

crc32c = google_crc32c.value
_extend = google_crc32c.extend


class SparseIndex:
    """The blocks of one segment, in memory; 28 bytes for every 1,024 records.

    Invariant: block k begins at `positions[k]`, which is the 1,024*k-th record of the file. The last block is open:
    it grows with `add` until it has 1,024 records.
    """

    def __init__(self) -> None:
        self.positions = array("q")
        self.timestamps = array("q")
        self.greatest = array("q")
        self.sums = array("q")
        self.last_count = 0
        """Records in the last block."""

    def copy(self) -> "SparseIndex":
        """Return another index that knows the same."""
        other = SparseIndex()
        other.positions, other.timestamps = self.positions[:], self.timestamps[:]
        other.greatest, other.sums = self.greatest[:], self.sums[:]
        other.last_count = self.last_count
        return other

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def record_count(self) -> int:
        """Records of the segment."""
        return (len(self.positions) - 1) * BLOCK_RECORDS + self.last_count if self.positions else 0

    @property
    def full_blocks(self) -> int:
        """Blocks that will not change any more."""
        return len(self.positions) - (0 < self.last_count < BLOCK_RECORDS)

    @property
    def greatest_timestamp(self) -> int:
        """The greatest timestamp of the segment, -1 when it is empty."""
        return max(self.greatest, default=-1)

    def add(self, batch: RecordBatch, position: int) -> None:
        """Record the records of `batch`, which were written at `position`, the end of what is noted."""
        count, data, positions, timestamps = batch.count, batch.data, batch.positions, batch.timestamps
        if count <= FEW and not isinstance(timestamps, list):
            timestamps = np.asarray(timestamps).tolist()
        first = 0
        while first < count:
            if self.last_count == BLOCK_RECORDS or not self.positions:
                self._begin(position + int(positions[first]), int(timestamps[first]))
                if len(self.positions) == 1 and self.positions[0]:
                    # The file begins with bytes that are no record: entry 0 stands for the beginning all the same.
                    self.positions[0], self.sums[0] = 0, UNKNOWN_SUM
            after = min(first + BLOCK_RECORDS - self.last_count, count)
            part: Buffer = data
            if after - first < count:
                part = memoryview(data)[positions[first] : positions[after] if after < count else len(data)]
                times = timestamps[first:after]
            else:
                times = timestamps
            greatest = max(times) if isinstance(times, list) else int(np.asarray(times).max())
            if greatest > self.greatest[-1]:
                self.greatest[-1] = greatest
            if self.sums[-1] != UNKNOWN_SUM:
                self.sums[-1] = _extend(self.sums[-1], bytes(part))  # the library takes nothing but bytes
            self.last_count += after - first
            first = after

    def _begin(self, position: int, timestamp: int) -> None:
        self.positions.append(position)
        self.timestamps.append(timestamp)
        self.greatest.append(timestamp)
        self.sums.append(0)
        self.last_count = 0

    def distrust_last(self) -> None:
        """Record that the last block holds bytes that are no good record."""
        if self.sums:
            self.sums[-1] = UNKNOWN_SUM

    def cut(self, blocks: int) -> None:
        """Remove all but the first `blocks` blocks, which are full."""
        for column in (self.positions, self.timestamps, self.greatest, self.sums):
            del column[blocks:]
        self.last_count = BLOCK_RECORDS if self.positions else 0

    def block_at(self, position: int) -> int:
        """Return the number of the block that the byte `position` of the log falls in; -1 without blocks."""
        return bisect_right(self.positions, position) - 1

    def blocks_from(self, position: int) -> Sequence[int]:
        """Return where the blocks at and behind the byte `position` begin, or none if not all of them are good."""
        first = bisect_left(self.positions, position)
        return () if UNKNOWN_SUM in self.sums[first:] else self.positions[first:]

    def encode(self, start: int, end: int, blocks_start: int, blocks_end: int) -> tuple[bytes, bytes, bytes]:
        """Return the bytes of entries `start` to `end` of `.index` and `.timeindex`, and of some of `.blocks`."""
        positions, timestamps = _big_endian(self.positions[start:end]), _big_endian(self.timestamps[start:end])
        blocks = b"".join(map(self._block_entry, range(blocks_start, blocks_end)))
        return positions, timestamps, blocks

    def _block_entry(self, block: int) -> bytes:
        total, greatest = self.sums[block], self.greatest[block]
        check = _check(block, self.positions[block], self.timestamps[block], max(total, 0), greatest)
        if total == UNKNOWN_SUM:  # a check that cannot fit: a reader takes the records' own CRCs
            return BLOCK_ENTRY.pack(0, check ^ 0xFFFFFFFF, greatest)
        return BLOCK_ENTRY.pack(total, check, greatest)


def _big_endian(numbers: "array[int]") -> bytes:
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers.tobytes()


def _check(block: int, position: int, timestamp: int, total: int, greatest: int) -> int:
    """Return the CRC that ties a block's entries in all three files together, so that one wrong one is noticed."""
    return zlib.crc32(_CHECKED.pack(block, position, timestamp, total, greatest))


def decode(index: bytes, timeindex: bytes, blocks: bytes, log_bytes: int) -> SparseIndex | None:
    """Return the full blocks that the three files tell of, or `None` when they do not fit each other or the log.

    Every block must have its entry in all three; `last_count` is given as if all were full.
    """
    count = len(index) // ENTRY_BYTES
    if len(index) != count * ENTRY_BYTES or len(timeindex) != len(index) or len(blocks) != count * BLOCK_ENTRY.size:
        return None
    if not count:
        return SparseIndex()
    positions = np.frombuffer(index, ">i8").astype(np.int64)
    if positions[0] != 0 or positions[-1] >= log_bytes or (np.diff(positions) <= 0).any():
        return None
    found = SparseIndex()
    found.positions = array("q", positions.tobytes())
    found.timestamps = array("q", np.frombuffer(timeindex, ">i8").astype(np.int64).tobytes())
    found.last_count = BLOCK_RECORDS
    for block, (total, check, greatest) in enumerate(BLOCK_ENTRY.iter_unpack(blocks)):
        wanted = _check(block, found.positions[block], found.timestamps[block], total, greatest)
        if wanted == check:
            found.sums.append(total)
        elif total == 0 and wanted ^ 0xFFFFFFFF == check:
            found.sums.append(UNKNOWN_SUM)
        else:
            return None
        if greatest < found.timestamps[block]:
            return None
        found.greatest.append(greatest)
    return found
