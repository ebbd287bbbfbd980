"""Records in their stored form -> offsets of those that match a filter; many blocks are passed at memory speed."""

import re
from typing import NamedTuple

from babelbus.arrays import I64, np
from babelbus.records.columns import decode_columns, find_positions, iterate
from babelbus.records.fields import offsets_at, timestamps_at
from babelbus.records.format import CorruptRecordError
from babelbus.web.search.matching import Filter, Needle

ROWS_AT_ONCE = 500
"""So many records are decoded between two looks at the limits."""


class Scanned(NamedTuple):
    """Offsets of matching records, and how far the scan came: bytes, records, the offset to go on, the last time."""

    hits: list[int]
    size_bytes: int
    records: int
    next_offset: int
    time_ms: int


def scan(data: bytes, wanted: Filter, offset: int, end_offset: int, count: int) -> Scanned:
    """Return up to `count` matches among the whole records at the beginning of `data`, between two offsets.

    Raises:
        CorruptRecordError: the inner lengths of a record do not add up, or offsets do not rise.
    """
    positions, stop = find_positions(data, 0, len(data))
    if not len(positions):
        return Scanned([], 0, 0, offset, 0)
    offsets = offsets_at(data, positions)
    if (offsets[1:] <= offsets[:-1]).any():
        raise CorruptRecordError(0, "offsets do not rise")
    first, last = (int(place) for place in np.searchsorted(offsets, (offset, end_offset)))
    rows = _candidates(data, positions, wanted, first, last)
    hits: list[int] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        columns = decode_columns(data, positions[rows[start : start + ROWS_AT_ONCE]])
        for record in iterate(columns):
            if wanted.matches(record):
                hits.append(record.offset)
                if len(hits) == count:
                    last = int(np.searchsorted(offsets, record.offset)) + 1
                    break
        if len(hits) == count:
            break
    if last < len(positions):
        stop = int(positions[last])
    seen = last - first
    following = int(offsets[last - 1]) + 1 if seen > 0 else offset
    time_ms = int(timestamps_at(data, positions[last - 1 : last])[0]) if seen > 0 else 0
    return Scanned(hits, stop, max(seen, 0), following, time_ms)


def may_match(data: bytes, wanted: Filter) -> bool:
    """Return whether a record that matches may have a part in `data`; a filter without needles matches anything."""
    return wanted.needles is None or any(_places(data, needle, 0) is None for needle in wanted.needles)


def _candidates(data: bytes, positions: I64, wanted: Filter, first: int, last: int) -> I64:
    """Return the rows from `first` to `last` that may match."""
    if wanted.needles is None:
        return np.arange(first, last)
    found: list[I64] = []
    for needle in wanted.needles:
        places = _places(data, needle, last - first + 16)
        if places is None:
            return np.arange(first, last)
        if places:
            found.append(np.searchsorted(positions, np.array(places), "right") - 1)
    if not found:
        return np.empty(0, np.int64)
    rows = np.unique(np.concatenate(found))
    return rows[(rows >= first) & (rows < last)]


def _places(data: bytes, needle: Needle, count_max: int) -> list[int] | None:
    """Return where a needle is, `None` if it is so frequent that the search for it saves nothing."""
    places: list[int] = []
    if needle.is_pattern:
        for found in re.finditer(needle.data, data):
            places.append(found.start())
            if len(places) > count_max:
                return None
        return places
    if needle.table is not None:
        data = data.translate(needle.table)
    find, wanted, size = data.find, needle.data, len(needle.data)
    at = find(wanted)
    while at >= 0:
        places.append(at)
        if len(places) > count_max:
            return None
        at = find(wanted, at + size)
    return places
