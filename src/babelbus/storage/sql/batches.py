"""Batches of records <-> rows of the table `batches`; reading checks all bytes and starts anywhere in a batch.

A whole batch is checked by the CRC-32C of its row. If that sum fails, each record is checked by its own CRC: the good
records are served, a damaged one is refused by its offset. The offsets of a dense batch follow from its first one; in a
batch that compaction rewrote, only the sum covers them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import google_crc32c
import msgspec
from sqlalchemy import BindParameter, bindparam, func, select

from babelbus.arrays import I64, Flags, np
from babelbus.records.columns import find_positions
from babelbus.records.fields import offset_of, offsets_at
from babelbus.records.format import record_error
from babelbus.records.record import Positions, RecordBatch
from babelbus.storage.sql.database import Database
from babelbus.storage.sql.tables import batches

ROW_BYTES_MAX = 2**18
"""A larger batch becomes several rows, so that a small read does not fetch megabytes."""
ROWS_MAX = 1000
"""Most rows of one SELECT."""
MISSING = "the record is missing in its batch"
UNSURE = "the checksum of its batch does not fit, so its offset may be wrong"


class Batch(msgspec.Struct, frozen=True):
    """One row: the records with offsets from `base_offset` to `next_offset` (excluded)."""

    base_offset: int
    next_offset: int
    count: int
    greatest_timestamp: int
    sum: int | None
    data: bytes

    @property
    def dense(self) -> bool:
        """Whether a record was stored for each offset."""
        return self.count == self.next_offset - self.base_offset

    @property
    def sum_holds(self) -> bool:
        """Whether all bytes are those that were stored."""
        return self.sum is not None and google_crc32c.value(self.data) == self.sum


class Piece(NamedTuple):
    """The records that a read takes from one batch; `reason`: the record at `next_offset` is damaged."""

    data: bytes
    base_offset: int
    next_offset: int
    reason: str | None = None
    is_full: bool = False


# -- writing -----------------------------------------------------------------------------------------------------------


def make_rows(batch: RecordBatch, latest_timestamp: int) -> list[dict[str, Any]]:
    """Return the rows that store a batch; `latest_timestamp` is that of the row in front."""
    data, count = bytes(batch.data), batch.count
    if len(data) <= ROW_BYTES_MAX:
        return [make_row(batch.base_offset, batch.base_offset + count, data, batch.timestamps, latest_timestamp)]
    positions = np.append(np.asarray(batch.positions, np.int64), len(data))
    rows, first = [], 0
    while first < count:
        fitting = int(np.searchsorted(positions, positions[first] + ROW_BYTES_MAX, "right")) - 1
        after = min(max(fitting, first + 1), count)
        part, base = data[positions[first] : positions[after]], batch.base_offset
        rows.append(make_row(base + first, base + after, part, batch.timestamps[first:after], latest_timestamp))
        latest_timestamp, first = rows[-1]["latest_timestamp"], after
    return rows


def make_row(
    base_offset: int, next_offset: int, data: bytes, timestamps: Positions, latest_timestamp: int
) -> dict[str, Any]:
    """Return the columns of one batch but for its partition."""
    times = timestamps.tolist() if isinstance(timestamps, np.ndarray) else timestamps
    greatest = max(times, default=0)
    return {
        "base_offset": base_offset,
        "next_offset": next_offset,
        "count": len(times),
        "least_timestamp": min(times, default=0),
        "greatest_timestamp": greatest,
        "latest_timestamp": max(greatest, latest_timestamp),
        "size_bytes": len(data),
        "sum": google_crc32c.value(data),
        "data": data,
    }


# -- reading -----------------------------------------------------------------------------------------------------------

_COLUMNS = [batches.c[name] for name in Batch.__struct_fields__]
_OFFSET: BindParameter[int] = bindparam("offset")
_OF_PARTITION = batches.c.partition_id == bindparam("partition_id")
_HOLDING = select(func.max(batches.c.base_offset)).where(_OF_PARTITION, batches.c.base_offset <= _OFFSET)
REACHING = (
    _OF_PARTITION
    & (batches.c.base_offset >= func.coalesce(_HOLDING.scalar_subquery(), _OFFSET))
    & (batches.c.next_offset > _OFFSET)
)
"""The condition for the batch of a `partition_id` that holds the `offset`, and those behind it."""
_FETCH = (
    select(*_COLUMNS)
    .where(REACHING, batches.c.base_offset < bindparam("end_offset"))
    .order_by(batches.c.base_offset)
    .limit(bindparam("rows"))
)


def fetch(database: Database, partition_id: int, offset: int, end_offset: int, page_bytes: int) -> Iterator[Batch]:
    """Yield the batches from the one that holds `offset`, or the next one, up to `end_offset`.

    One SELECT fetches about `page_bytes`, by the mean size of the rows before.

    Raises:
        DiskError: the database cannot be read.
    """
    limit = 2
    while offset < end_offset:
        bounds = {"partition_id": partition_id, "offset": offset, "end_offset": end_offset, "rows": limit}
        with database.read() as connection:
            rows = [Batch(*row) for row in connection.execute(_FETCH, bounds)]
        yield from rows
        if len(rows) < limit:
            return
        offset = rows[-1].next_offset
        mean = sum(len(row.data) for row in rows) // limit
        limit = min(page_bytes // (mean or 1) + 1, ROWS_MAX)


def cut(batch: Batch, offset: int, end_offset: int, bytes_max: int, least: int) -> Piece:
    """Return the checked records of a batch from `offset` on, below `end_offset`, that fit `bytes_max`.

    At least `least` good records are returned, if the batch has them.
    """
    stop, data = min(end_offset, batch.next_offset), batch.data
    verified = batch.sum_holds
    if verified and offset <= batch.base_offset and stop == batch.next_offset and 0 < len(data) <= bytes_max:
        first = offset_of(data)
        if not batch.dense or first == batch.base_offset:
            return Piece(data, first, stop)
    starts, offsets, good = examine(batch, verified=verified)
    complete = len(starts) >= batch.count
    at, after = np.searchsorted(offsets, (offset, stop)).tolist()
    if at == after:
        return Piece(b"", offset, stop) if complete else Piece(b"", offset, offset, MISSING)
    bad = np.flatnonzero(~good[at:after])
    whole = at + int(bad[0]) if len(bad) else after
    if whole == at:
        return Piece(b"", offset, int(offsets[at]), record_error(data, int(starts[at]), len(data)) or UNSURE)
    ends = np.append(starts[1:], len(data))
    fitting = at + max(int(np.searchsorted(ends[at:whole], int(starts[at]) + bytes_max, "right")), least)
    if fitting == at:
        return Piece(b"", offset, offset, is_full=True)
    part, following = data[starts[at] : ends[fitting - 1]], int(offsets[fitting - 1]) + 1
    if fitting < whole:
        return Piece(part, int(offsets[at]), following, is_full=True)
    if whole < after or not (complete or following == stop):
        return Piece(part, int(offsets[at]), following, MISSING)
    return Piece(part, int(offsets[at]), stop)


def examine(batch: Batch, *, verified: bool) -> tuple[I64, I64, Flags]:
    """Return where the records of a batch begin, their offsets, and which records are good.

    A damaged record has the greatest offset that it may have. Fewer records than `count` mean that a damaged length
    hides the records behind it.
    """
    data = batch.data
    starts, end = find_positions(data, 0, len(data))
    if not len(starts):
        return starts, starts, np.empty(0, np.bool_)
    stored = offsets_at(data, starts)
    whole = np.ones(len(starts), np.bool_)
    if not verified:
        whole[:] = [record_error(data, at, end) is None for at in starts.tolist()]
    if batch.dense:
        expected = np.arange(batch.base_offset, batch.base_offset + len(starts))
        return starts, expected, whole & (stored == expected)
    if not verified and batch.sum is not None and whole.all():
        whole[:] = False  # the CRC of a record does not cover its offset, and the sum says that bytes changed
    least, greatest = batch.base_offset, batch.next_offset
    for number in np.flatnonzero(~whole).tolist()[::-1]:
        stored[number] = (stored[number + 1] if number + 1 < len(stored) else greatest) - 1
    rising = (np.diff(stored, prepend=least - 1) > 0) & (stored < greatest)
    return starts, stored, whole & rising
