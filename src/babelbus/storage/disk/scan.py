"""Reading a `.log` from a byte on, record by record as far as it goes: recovery, rebuilt indexes, `babelbus check`.

The result is what the log *is*: its blocks, where it ends, and which ranges hold no good records. Nothing is
changed.
"""

import msgspec

from babelbus.arrays import I64, np
from babelbus.records.columns import decode_columns, find_positions
from babelbus.records.fields import crcs_hold, offset_of, offsets_at, size_of, timestamps_at
from babelbus.records.format import (
    FEW,
    PRODUCER_HEADER,
    RECORD_BYTES_MIN,
    CorruptRecordError,
    is_cut_off,
    read_producer,
    record_error,
)
from babelbus.records.record import RecordBatch, StoredBatch
from babelbus.storage.contract import BadRange
from babelbus.storage.disk.index import SparseIndex
from babelbus.storage.files import File

CHUNK_BYTES = 4 * 2**20
SEARCH_BYTES = 2**19
ZEROS_BYTES = 2**16
OFFSET_MAX = 2**63 - 1
WRONG_OFFSET = "its offset is"
OVERLAP = "its offset belongs to the next segment"


class Scan(msgspec.Struct):
    """The content of a log from `start` on. `end` is where its last good record ends, `tail` why nothing good follows.

    `overlap`: behind `end` stand records that the next segment holds too, left over from a rescue after a failed flush.
    `size` is where the file ends, without the zeros that wait for the next records (docs/storage.md, a record).
    """

    start: int
    end: int
    next_offset: int
    index: SparseIndex
    bad: list[BadRange]
    producers: list[StoredBatch]
    tail: str | None = None
    overlap: bool = False
    size: int = 0


def scan(
    file: File,
    start: int,
    next_offset: int,
    *,
    index: SparseIndex | None = None,
    gaps: bool = False,
    size: int | None = None,
    limit: int = OFFSET_MAX,
) -> Scan:
    """Read the records from the byte `start` to the end of the file, checking each (DECISION 41).

    `next_offset` is the offset that the first one must have. With `gaps` (a compacted segment) offsets need only
    rise. No offset may reach `limit`, where the next segment begins. `index` holds the blocks before `start` and is
    added to. Costs about 0.5 s for 100 MiB of small records.
    """
    if gaps:
        # Most segments have none, and where none is expected an offset that damage changed cannot pass for a gap.
        trial = _scan(file, start, next_offset, index.copy() if index else None, size, limit, dense=True)
        if trial is not None:
            return trial
    found = _scan(file, start, next_offset, index, size, limit, gaps=gaps)
    assert found is not None
    return found


def _scan(
    file: File,
    start: int,
    next_offset: int,
    index: SparseIndex | None,
    size: int | None,
    limit: int,
    *,
    gaps: bool = False,
    dense: bool = False,
) -> Scan | None:
    """Read as `scan` does; with `dense`, return `None` at the first offset that is not the next."""
    found = Scan(start, start, next_offset, index if index is not None else SparseIndex(), [], [])
    size = found.size = file.size() if size is None else size
    position, wanted = start, CHUNK_BYTES
    while position < size:
        data = file.pread(min(wanted, size - position), position)
        if not data:
            break
        used, reason = _take(found, data, position, gaps, limit)
        position += used
        if reason is None:
            if used:
                wanted = CHUNK_BYTES
                continue
            if len(data) == wanted < size - position:  # one record is larger than the chunk
                wanted = min(_record_bytes(data), size - position)
                continue
            reason = record_error(data, 0, len(data)) or "its length passes the end of the file"
        if reason is OVERLAP:
            found.overlap = True
            break
        if dense and reason.startswith(WRONG_OFFSET):
            return None
        written = written_size(file, size)
        if written <= position and (limit == OFFSET_MAX or found.next_offset == limit):
            found.size = position
            break
        following = _find_good(file, position, size, written, found.next_offset, gaps, limit)
        if following is None:
            found.tail = reason
            break
        after, offset = following
        found.bad.append(BadRange(position, after, found.next_offset, offset, reason))
        found.index.distrust_last()
        found.end, found.next_offset, position = after, offset, after
    return found


def written_size(file: File, size: int | None = None) -> int:
    """Return the size of a file, or of its first `size` bytes, without the zeros at its end."""
    end = file.size() if size is None else size
    while end:
        start = max(end - ZEROS_BYTES, 0)
        rest = file.pread(end - start, start).rstrip(b"\0")
        if rest:
            return start + len(rest)
        end = start
    return 0


def _record_bytes(data: bytes) -> int:
    return max(size_of(data[:RECORD_BYTES_MIN]), CHUNK_BYTES)


def _take(found: Scan, data: bytes, position: int, gaps: bool, limit: int) -> tuple[int, str | None]:
    """Add the good records at the beginning of `data`; return how many bytes they are, and why the next one is bad."""
    positions, end = find_positions(data, 0, len(data))
    reason = None
    if not len(positions):
        if len(data) >= RECORD_BYTES_MIN:
            reason = record_error(data, 0, len(data))
            if reason and "bytes are there" in reason:  # cut off by the chunk, not by the file: the caller reads on
                reason = None
        return 0, reason
    offsets = offsets_at(data, positions)
    good = _offsets_good(offsets, found.next_offset, gaps, limit)
    if good < len(positions):
        expected = (int(offsets[good - 1]) if good else found.next_offset - 1) + 1
        overlap = int(offsets[good]) == expected == limit
        reason = OVERLAP if overlap else f"{WRONG_OFFSET} {int(offsets[good])}, expected {expected}"
        end = int(positions[good])
    if good <= FEW or not _are_whole(data, positions[:good], end):
        for number, at in enumerate(positions[:good].tolist()):
            bad = record_error(data, at, end)
            if bad:
                good, end, reason = number, at, bad
                break
    if good:
        _add(found, data[:end] if end < len(data) else data, positions[:good], offsets[:good], position)
        found.end, found.next_offset = position + end, int(offsets[good - 1]) + 1
    return (end if good else 0), reason


def _are_whole(data: bytes, positions: I64, end: int) -> bool:
    """Return whether all records match their CRCs, and their lengths add up."""
    try:
        decode_columns(data, positions)
    except CorruptRecordError:
        return False
    return crcs_hold(data, positions, end)


def _add(found: Scan, data: bytes, positions: I64, offsets: I64, position: int) -> None:
    timestamps = timestamps_at(data, positions)
    found.index.add(RecordBatch(data, positions, timestamps, int(offsets[0])), position)
    if PRODUCER_HEADER in data:
        for number, at in enumerate(positions.tolist()):
            batch = read_producer(data, at)
            if batch is not None:
                found.producers.append(
                    StoredBatch(*batch, base_offset=int(offsets[number]), timestamp=int(timestamps[number]))
                )


def _offsets_good(offsets: I64, expected: int, gaps: bool, limit: int) -> int:
    """Return how many offsets from the first one on are as they must be."""
    if not gaps:
        wrong = np.flatnonzero((offsets != np.arange(expected, expected + len(offsets))) | (offsets >= limit))
        return int(wrong[0]) if len(wrong) else len(offsets)
    previous = np.concatenate((np.array([expected - 1]), offsets[:-1]))
    wrong = np.flatnonzero((offsets <= previous) | (offsets >= limit))
    if not len(wrong):
        return len(offsets)
    first = int(wrong[0])
    if first and previous[first - 1] < offsets[first] < limit:
        return first - 1  # it rises above the last but one: rather the one between them is too high
    return first


def _find_good(
    file: File, position: int, size: int, written: int, expected: int, gaps: bool, limit: int
) -> tuple[int, int] | None:
    """Return position and offset of the first good record behind the bad one at `position`, or `None`.

    A payload may hold records of ours (somebody records a log in a log), so the bad record's own
    length is asked first, and a torn record's inside is not searched. Behind `written` are zeros.
    """
    following = _follow(file, position, size, expected, gaps, limit)
    if following is not None or _is_torn(file, position, written, expected):
        return following
    for start in range(position + 1, size, SEARCH_BYTES):
        data = file.pread(min(SEARCH_BYTES + RECORD_BYTES_MIN - 1, size - start), start)
        offsets = offsets_at(data, np.arange(len(data) - RECORD_BYTES_MIN + 1))
        # At least one record is lost, so its offset is; and no more offsets than records fit in what is bad.
        lost_max = (start + np.arange(len(offsets)) - position) // RECORD_BYTES_MIN
        likely = (offsets > expected) & (offsets < limit) & (offsets <= (limit if gaps else expected + lost_max))
        for at in np.flatnonzero(likely).tolist():
            offset, end, reason = _read_record(file, start + at, size)
            if reason is None:
                # No CRC covers an offset: the damage may reach just over it, and make it another one that looks right.
                behind, _, reason = _read_record(file, end, size)
                if reason is not None or (behind > offset if gaps else behind == offset + 1):
                    return start + at, offset
    return None


def _follow(file: File, position: int, size: int, expected: int, gaps: bool, limit: int) -> tuple[int, int] | None:
    """Follow the lengths from the bad record on, as long as the offsets fit, to the next good record."""
    offset, (_, end, _) = expected, _read_record(file, position, size)
    while position + RECORD_BYTES_MIN <= end <= size - RECORD_BYTES_MIN:
        previous, position = offset, end
        offset, end, reason = _read_record(file, position, size)
        if not (previous < offset < limit if gaps else offset == previous + 1 < limit):
            return None
        if reason is None:
            return position, offset
    return None


def _read_record(file: File, position: int, size: int) -> tuple[int, int, str | None]:
    """Return offset and end of the record at `position` of a file of `size` bytes, and what is wrong with it."""
    head = file.pread(RECORD_BYTES_MIN, position)
    if len(head) < RECORD_BYTES_MIN:
        return -1, position, "it is cut off"
    end = position + size_of(head)
    if not position + RECORD_BYTES_MIN <= end <= size:
        return offset_of(head), end, "its length does not fit"
    data = file.pread(end - position, position)
    return offset_of(head), end, record_error(data, 0, len(data))


def _is_torn(file: File, position: int, size: int, expected: int) -> bool:
    """Return whether the record is good as far as the file goes; then all that follows is this record's inside."""
    head = file.pread(RECORD_BYTES_MIN, position)
    if len(head) == RECORD_BYTES_MIN and (offset_of(head) != expected or size_of(head) <= size - position):
        return False
    return is_cut_off(file.pread(size - position, position))
