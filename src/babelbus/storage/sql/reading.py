"""Rows -> chunks of stored records: fetched a range at a time, checked, and as many as fit.

So a read fetches at most one range more than it gives, however the sizes of the records are spread.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from babelbus.records.format import CorruptRecordError
from babelbus.storage.contract import Chunk
from babelbus.storage.sql.ranges import Range
from babelbus.storage.sql.rows import Row, sizes, to_stored

Fetch = Callable[[int, int, int], Sequence[Row]]
"""(offset, end offset, most rows) -> rows in order."""


class _Part(NamedTuple):
    """What one fetch gave: records, their first offset, where to read on, what is wrong there, is the rest too much."""

    data: bytes
    base_offset: int
    next_offset: int
    reason: str | None
    is_full: bool


def find_range(ranges: list[Range], offset: int) -> int:
    """Return the number of the range that holds `offset`, of ranges that touch."""
    return bisect_right(ranges, offset, key=lambda found: found.base_offset) - 1


def read_chunk(fetch: Fetch, ranges: list[Range], offset: int, end_offset: int, bytes_max: int, name: str) -> Chunk:
    """Return the records from the first one at or after `offset` on, below `end_offset`, that fit `bytes_max`.

    Raises:
        CorruptRecordError: the first one is damaged or missing.
    """
    parts: list[bytes] = []
    base_offset, at, room = -1, offset, bytes_max
    while at < end_offset:
        part = _read_part(fetch, ranges, at, end_offset, room)
        at = part.next_offset
        if part.data:
            base_offset = base_offset if parts else part.base_offset
            parts.append(part.data)
            room -= len(part.data)
        if part.reason is not None and not parts:
            raise CorruptRecordError(0, part.reason, path=name, offset=at)
        if part.is_full and not parts:
            return Chunk(b"", offset, offset)
        if part.reason is not None or part.is_full:
            break
    return Chunk(b"".join(parts), base_offset, at) if parts else Chunk(b"", end_offset, end_offset)


def _read_part(fetch: Fetch, ranges: list[Range], at: int, end_offset: int, room: int) -> _Part:
    """Return the records that fit `room` bytes, of the range that holds `at`."""
    here = ranges[find_range(ranges, at)]
    stop = min(end_offset, here.next_offset)
    mean = here.size_bytes // (here.next_offset - here.base_offset) or 1
    limit = min(room // mean + 1, stop - at)
    rows = list(fetch(at, stop, limit))
    is_last = len(rows) < limit or limit == stop - at
    reason = None
    if not here.gaps and (len(rows) < limit or rows[-1][0] != at + limit - 1):
        reason = "the row is missing"
        del rows[next((number for number, row in enumerate(rows) if row[0] != at + number), len(rows)) :]
    first = rows[0][0] if rows else at
    totals = np.cumsum(sizes(rows))
    if len(totals) < len(rows):
        reason = "its columns hold what no record has"
        at = first if not len(totals) else at
    fitting = int(np.searchsorted(totals, room, side="right"))
    is_full = fitting < len(totals)
    if is_full:
        reason = None  # that lies behind what is too much already
    data, good, wrong = to_stored(rows[:fitting])
    if wrong is not None:
        reason, is_full = wrong, False
        at = first if not good else at
    if is_last and reason is None and not is_full:
        return _Part(data, first, stop, None, False)
    return _Part(data, first, rows[good - 1][0] + 1 if good else at, reason, is_full)
