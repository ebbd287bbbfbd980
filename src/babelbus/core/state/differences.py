"""The differences of the state between two moments: which keys were added, changed and removed (docs/state.md).

The log is read once up to the later moment. A key costs about 200 bytes if it has changed in between; values are read
only for the page that is shown.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from heapq import nsmallest

import msgspec

from babelbus.core.state.log import READ_BYTES, TESTAMENT_MARK, VERSION_HEADER
from babelbus.errors import BabelbusError
from babelbus.records.columns import Columns, decode_chunk, iterate_rows
from babelbus.records.envelope import SOURCE_HEADER
from babelbus.records.format import TOMBSTONE, CorruptRecordError, decode_headers
from babelbus.storage.contract import PartitionLog

KEYS_MAX = 500_000
"""Most keys that may have changed between two moments."""


class TooManyChangesError(BabelbusError):
    """More keys have changed between two moments than are compared at once."""

    def __init__(self) -> None:
        super().__init__(
            f"more than {KEYS_MAX:,} keys have changed between the two moments: ask for a part of the tree, "
            "or for moments that are closer"
        )


class InvalidMomentsError(BabelbusError):
    """The first moment comes after the second one."""


class Revision(msgspec.Struct, frozen=True, gc=False):
    """One stored change of a key. `value` is `None` when it was deleted; `version` is 0 for a plain value."""

    offset: int
    timestamp: int
    value: bytes | None
    version: int
    source: str


class Difference(Enum):
    """How a key differs."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


class Row(msgspec.Struct, frozen=True, gc=False):
    """One key that differs. `before` is its value at the first moment, `after` at the second or that it was deleted."""

    key: str
    difference: Difference
    before: Revision | None
    after: Revision | None


class Differences(msgspec.Struct, frozen=True):
    """A page of rows in the order of the keys, and how many keys differ in all; the offsets are those compared.

    `next_after` is what the next page begins behind, `None` behind the last page.
    """

    rows: list[Row]
    counts: dict[Difference, int]
    first_offset: int
    end_offset: int
    next_after: str | None


class Trace(msgspec.Struct, frozen=True, gc=False):
    """The last record of a key: its offset, and a number that equal values of equal version have; `None`: deleted."""

    offset: int
    mark: int | None


def changed_keys(log: PartitionLog, start: int, end: int, matches: Callable[[str], bool]) -> dict[str, Trace]:
    """Return the last record of each key that has one between two offsets.

    Raises:
        TooManyChangesError: the keys are more than `KEYS_MAX`.
        StorageError: the log cannot be read.
    """
    traces: dict[str, Trace] = {}
    for key, trace in _traces(log, start, end):
        if key in traces or matches(key):
            traces[key] = trace
            if len(traces) > KEYS_MAX:
                raise TooManyChangesError
    return traces


def compare(
    log: PartitionLog, start: int, end: int, later: dict[str, Trace], *, after: str | None, count: int
) -> Differences:
    """Return how the state at `start` differs from that at `end`, where `later` are the keys changed in between.

    Raises:
        StorageError: the log cannot be read.
    """
    earlier = {key: trace for key, trace in _traces(log, log.first_offset, start) if key in later}
    counts = dict.fromkeys(Difference, 0)
    differing: dict[str, Difference] = {}
    for key, trace in later.items():
        before = earlier.get(key)
        mark = None if before is None else before.mark
        if mark == trace.mark:
            continue
        difference = Difference.CHANGED
        if mark is None:
            difference = Difference.ADDED
        elif trace.mark is None:
            difference = Difference.REMOVED
        differing[key] = difference
        counts[difference] += 1
    names: Iterable[str] = differing if after is None else (key for key in differing if key > after)
    page = nsmallest(count + 1, names)
    rows = []
    for key in page[:count]:
        before = earlier.get(key)
        rows.append(Row(key, differing[key], _revision_at(log, before), _revision_at(log, later[key])))
    return Differences(rows, counts, start, end, page[count - 1] if len(page) > count else None)


def _traces(log: PartitionLog, offset: int, end: int) -> Iterator[tuple[str, Trace]]:
    """Yield the records of all keys between two offsets; damaged records are left out."""
    while offset < end:
        try:
            chunk = log.read(offset, READ_BYTES, end)
        except CorruptRecordError:
            offset += 1
            continue
        if chunk.data:
            yield from _traces_of(decode_chunk(chunk.data, verified=True))
        offset = chunk.next_offset


def _traces_of(columns: Columns) -> Iterator[tuple[str, Trace]]:
    data = bytes(columns.data)
    for offset, _, start, stop, key_length, attributes, count in iterate_rows(columns):
        raw = data[start - 4 - key_length : start - 4]
        if key_length < 0 or raw[:1] == TESTAMENT_MARK:
            continue
        mark = None
        if not attributes & TOMBSTONE:
            version = dict(decode_headers(data, stop + 1, count)).get(VERSION_HEADER) if count > 1 else None
            mark = hash((data[start:stop], version))
        yield raw.decode(), Trace(offset, mark)


def _revision_at(log: PartitionLog, trace: Trace | None) -> Revision | None:
    """Return the record that a trace is of; `None` also if it cannot be read."""
    if trace is None:
        return None
    try:
        data = log.read(trace.offset, 0, trace.offset + 1).data
    except CorruptRecordError:
        return None
    columns = decode_chunk(data, verified=True) if data else None
    return revision_of(columns, 0) if columns else None


def revision_of(columns: Columns, row: int) -> Revision:
    """Return one record as a change of its key."""
    start, stop = int(columns.payload_positions[row]), int(columns.headers_positions[row])
    headers = dict(decode_headers(columns.data, stop + 1, int(columns.headers_counts[row])))
    gone = columns.attributes[row] & TOMBSTONE
    return Revision(
        int(columns.offsets[row]),
        int(columns.timestamps[row]),
        None if gone else bytes(columns.data[start:stop]),
        int(headers.get(VERSION_HEADER) or 0),
        (headers.get(SOURCE_HEADER) or b"").decode("utf-8", "replace"),
    )
