"""Reading a `.log` from a byte on, record by record as far as it goes: recovery, rebuilt indexes, `babelbus check`.

The result is what the log *is*: its blocks, where it ends, and which ranges hold no good records. Nothing is
changed.
"""

import struct
from collections.abc import Iterator

import msgspec
import numpy as np

from babelbus.records.columns import I64, decode_columns, find_positions
from babelbus.records.fields import crcs_hold, offsets_at, timestamps_at
from babelbus.records.format import (
    FEW,
    HEAD,
    LENGTH_FROM,
    LENGTH_MIN,
    PRODUCER_HEADER,
    RECORD_BYTES_MIN,
    CorruptRecordError,
    read_producer,
    record_error,
)
from babelbus.records.record import RecordBatch, StoredBatch
from babelbus.storage.contract import BadRange
from babelbus.storage.disk.index import SparseIndex
from babelbus.storage.files import File

CHUNK_BYTES = 4 * 2**20
_INNER = struct.Struct(">bqi")
_I32 = struct.Struct(">i")
OFFSET_MAX = 2**63 - 1
WRONG_OFFSET = "its offset is"
OVERLAP = "its offset belongs to the next segment"


class Scan(msgspec.Struct):
    """The content of a log from `start` on. `end` is where its last good record ends, `tail` why nothing good follows.

    `overlap`: behind `end` stand records that the next segment holds too, left over from a rescue after a failed flush.
    """

    start: int
    end: int
    next_offset: int
    index: SparseIndex
    bad: list[BadRange]
    producers: list[StoredBatch]
    tail: str | None = None
    overlap: bool = False


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
    size = file.size() if size is None else size
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
        following = _find_good(file, position, size, found.next_offset, gaps, limit)
        if following is None:
            found.tail = reason
            break
        after, offset = following
        found.bad.append(BadRange(position, after, found.next_offset, offset, reason))
        found.index.distrust_last()
        found.end, found.next_offset, position = after, offset, after
    return found


def _record_bytes(data: bytes) -> int:
    return max(int(HEAD.unpack_from(data)[1]) + LENGTH_FROM, CHUNK_BYTES)


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


def _find_good(file: File, position: int, size: int, expected: int, gaps: bool, limit: int) -> tuple[int, int] | None:
    """Return position and offset of the first good record behind the bad one at `position`, or `None`.

    A payload may hold records of ours (somebody records a log in a log), so the bad record's own
    length is asked first, and a torn record's inside is not searched.
    """
    following = _follow(file, position, size, expected, gaps, limit)
    if following is not None or _is_torn(file, position, size, expected):
        return following
    for start in range(position + 1, size, CHUNK_BYTES):
        data = file.pread(min(CHUNK_BYTES + HEAD.size, size - start), start)
        # So many records fit in what is bad, and no more offsets can be lost with it.
        highest = limit if gaps else min(limit, expected + (start + len(data) - position) // RECORD_BYTES_MIN + 1)
        # At least one record is lost, so its offset is.
        for at, offset in _candidates(data, expected + 1, highest, size - start):
            if not gaps and offset > expected + (start + at - position) // RECORD_BYTES_MIN:
                continue
            if _stored_error(file, start + at, size) is None and _agrees(file, start + at, size, offset, gaps):
                return start + at, offset
    return None


def _follow(file: File, position: int, size: int, offset: int, gaps: bool, limit: int) -> tuple[int, int] | None:
    """Follow the lengths from the bad record on, as long as the offsets fit, to the next good record."""
    while True:
        head = file.pread(HEAD.size, position)
        if len(head) < HEAD.size:
            return None
        _, length, _ = HEAD.unpack(head)
        position += LENGTH_FROM + length
        if length < LENGTH_MIN or position + RECORD_BYTES_MIN > size:
            return None
        found = HEAD.unpack(file.pread(HEAD.size, position))[0]
        if not (offset < found < limit if gaps else found == offset + 1 < limit):
            return None
        offset = found
        if _stored_error(file, position, size) is None:
            return position, offset


def _stored_error(file: File, position: int, size: int) -> str | None:
    """Return what is wrong with the record at `position` of a file of `size` bytes, or `None`."""
    head = file.pread(HEAD.size, position)
    if len(head) < HEAD.size:
        return "its head is cut off"
    _, length, _ = HEAD.unpack(head)
    if not LENGTH_MIN <= length <= size - position - LENGTH_FROM:
        return f"its length says {length}"
    record = file.pread(LENGTH_FROM + length, position)
    return record_error(record, 0, len(record))


def _agrees(file: File, position: int, size: int, offset: int, gaps: bool) -> bool:
    """Return whether the good record behind the one at `position`, if there is one, has an offset that follows
    `offset`.

    No CRC covers an offset: the damage may reach just over it, and make it another one that looks right.
    """
    behind = position + LENGTH_FROM + int(HEAD.unpack(file.pread(HEAD.size, position))[1])
    if _stored_error(file, behind, size) is not None:
        return True
    following = int(HEAD.unpack(file.pread(HEAD.size, behind))[0])
    return following > offset if gaps else following == offset + 1


def _is_torn(file: File, position: int, size: int, expected: int) -> bool:
    """Return whether the record is whole as far as the file goes: its length and its inner lengths both pass the end.

    One damaged length would contradict the others. Where none does, all that follows is this record's inside.
    """
    front = file.pread(HEAD.size + _INNER.size, position)
    if len(front) < HEAD.size + _INNER.size:
        return True
    offset, length, _ = HEAD.unpack_from(front)
    _, timestamp, key_length = _INNER.unpack_from(front, HEAD.size)
    stop = LENGTH_FROM + length
    if offset != expected or stop <= size - position or timestamp <= 0 or key_length < -1:
        return False
    data = file.pread(size - position, position)
    at = HEAD.size + _INNER.size + max(key_length, 0)
    lengths = [0]
    if at + 4 <= len(data):
        payload_length = _I32.unpack_from(data, at)[0]
        at += 4 + payload_length
        if payload_length < 0:
            return False
        lengths = [0, -1] * (data[at] if at < len(data) else 0)
        at += 1
    for least in lengths:
        if at + 4 > len(data):
            break
        part = _I32.unpack_from(data, at)[0]
        if part < least:
            return False
        at += 4 + max(part, 0)
    return bool(len(data) < at + 4 and at <= stop)


def _candidates(data: bytes, expected: int, highest: int, room: int) -> Iterator[tuple[int, int]]:
    """Yield where a head could begin: an offset from `expected` to `highest` and a length that has `room`."""
    count = len(data) - HEAD.size + 1
    if count <= 0:
        return
    offsets = np.ndarray((count,), ">i8", data, 0, (1,))
    lengths = np.ndarray((count,), ">i4", data, 8, (1,))
    likely = (offsets >= expected) & (offsets < highest)
    for at in np.flatnonzero(likely).tolist():
        if LENGTH_MIN <= lengths[at] <= room - at - LENGTH_FROM:
            yield at, int(offsets[at])
