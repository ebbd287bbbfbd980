"""The statements on one partition's rows: its ranges, its records, its producers' batches. No state, no transaction.

Each takes the connection of a transaction that is under way; `database_log` says what belongs together.
"""

import msgspec
import numpy as np
from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from babelbus.records.record import StoredBatch
from babelbus.storage.sql.rows import BARE_BYTES
from babelbus.storage.sql.tables import partitions, producers, ranges, records

TOGETHER_MAX = 500
"""Records that one DELETE names."""


class Range(msgspec.Struct):
    """A run of records. `gaps`: compaction has removed some; `compacted_with`: how many ranges were sealed then."""

    base_offset: int
    next_offset: int
    greatest_timestamp: int = 0
    size_bytes: int = 0
    gaps: bool = False
    compacted_with: int = 0


class PartitionRows:
    """What is stored of one partition."""

    def __init__(self, partition_id: int) -> None:
        self.id = partition_id

    # -- ranges ------------------------------------------------------------------------------------------------------

    def load(self, connection: Connection) -> tuple[list[Range], bool]:
        """Return the ranges as they are noted, and whether the last one is open; of that only the base is noted."""
        table = ranges.c
        rows = connection.execute(
            select(table.base_offset, table.next_offset, table.greatest_timestamp, table.size_bytes, table.gaps)
            .where(table.partition_id == self.id)
            .order_by(table.base_offset)
        ).all()
        found = [
            Range(base, base if end is None else end, greatest, size, bool(gaps))
            for base, end, greatest, size, gaps in rows
        ]
        return found, bool(rows) and rows[-1].next_offset is None

    def insert_open(self, connection: Connection, base_offset: int) -> None:
        """Record where the open range begins."""
        row = {"base_offset": base_offset, "next_offset": None, "greatest_timestamp": 0, "size_bytes": 0, "gaps": 0}
        connection.execute(insert(ranges), {"partition_id": self.id, **row})

    def seal(self, connection: Connection, found: Range) -> None:
        """Note of a range what is known of it, its end included."""
        connection.execute(
            update(ranges)
            .where(ranges.c.partition_id == self.id, ranges.c.base_offset == found.base_offset)
            .values(
                next_offset=found.next_offset,
                greatest_timestamp=found.greatest_timestamp,
                size_bytes=found.size_bytes,
                gaps=int(found.gaps),
            )
        )

    def measure(self, connection: Connection, found: Range) -> list[tuple[int, int]]:
        """Count anew what is in a range up to its end, or in the open range; return the offsets that it misses."""
        table = records.c
        bounds: list[ColumnElement[bool]] = [table.partition_id == self.id, table.offset >= found.base_offset]
        if found.next_offset > found.base_offset:
            bounds.append(table.offset < found.next_offset)
        size = (
            func.coalesce(func.length(table.key), 0)
            + func.coalesce(func.length(table.payload), 0)
            + func.coalesce(func.length(table.headers), 1)
        )
        count, last, greatest, size_bytes = connection.execute(
            select(func.count(), func.max(table.offset), func.max(table.timestamp), func.sum(size)).where(*bounds)
        ).one()
        found.greatest_timestamp = greatest or 0
        found.size_bytes = int(size_bytes or 0) + BARE_BYTES * count
        if last is not None:
            found.next_offset = max(found.next_offset, last + 1)
        if found.gaps or count == found.next_offset - found.base_offset:
            return []
        offsets = connection.execute(select(table.offset).where(*bounds).order_by(table.offset)).scalars().all()
        known = np.array([found.base_offset - 1, *offsets, found.next_offset])
        return [(int(known[at]) + 1, int(known[at + 1])) for at in np.flatnonzero(np.diff(known) > 1).tolist()]

    def count_outside(self, connection: Connection, first: int, end: int | None) -> int:
        """Count the records in front of the offset `first`, and those from `end` on."""
        outside = records.c.offset < first if end is None else (records.c.offset < first) | (records.c.offset >= end)
        return int(
            connection.execute(select(func.count()).where(records.c.partition_id == self.id, outside)).scalar_one()
        )

    def find_time(self, connection: Connection, found: Range, timestamp: int) -> int | None:
        """Return the offset of the first record of a range whose timestamp (ms) is `timestamp` or later."""
        table = records.c
        offset = connection.execute(
            select(table.offset)
            .where(table.partition_id == self.id, table.timestamp >= timestamp)
            .where(table.offset >= found.base_offset, table.offset < found.next_offset)
            .order_by(table.offset)
            .limit(1)
        ).scalar()
        return None if offset is None else int(offset)

    # -- removing ----------------------------------------------------------------------------------------------------

    def delete_from(self, connection: Connection, next_offset: int) -> None:
        """Delete the records from `next_offset` on, the ranges that begin there or later, and what knows of them."""
        connection.execute(delete(records).where(records.c.partition_id == self.id, records.c.offset >= next_offset))
        connection.execute(delete(ranges).where(ranges.c.partition_id == self.id, ranges.c.base_offset >= next_offset))
        end = producers.c.base_offset + producers.c.count
        connection.execute(delete(producers).where(producers.c.partition_id == self.id, end > next_offset))

    def delete_first(self, connection: Connection, oldest: Range) -> None:
        """Delete the oldest range and its records."""
        before = records.c.offset < oldest.next_offset
        connection.execute(delete(records).where(records.c.partition_id == self.id, before))
        chosen = ranges.c.base_offset == oldest.base_offset
        connection.execute(delete(ranges).where(ranges.c.partition_id == self.id, chosen))

    def delete_records(self, connection: Connection, offsets: list[int]) -> None:
        """Delete single records."""
        for first in range(0, len(offsets), TOGETHER_MAX):
            chosen = records.c.offset.in_(offsets[first : first + TOGETHER_MAX])
            connection.execute(delete(records).where(records.c.partition_id == self.id, chosen))

    # -- compaction, producers ---------------------------------------------------------------------------------------

    def compacted_until(self, connection: Connection) -> int:
        """Return the offset in front of which compaction has looked."""
        return int(
            connection.execute(select(partitions.c.compacted_until).where(partitions.c.id == self.id)).scalar_one()
        )

    def note_compaction(self, connection: Connection, until: int) -> None:
        """Record that records in front of `until` may be missing."""
        connection.execute(
            update(partitions)
            .where(partitions.c.id == self.id, partitions.c.compacted_until < until)
            .values(compacted_until=until)
        )

    def producers(self, connection: Connection) -> list[StoredBatch]:
        """Return the batches of producers that are noted, oldest first."""
        table = producers.c
        rows = connection.execute(
            select(table.producer_id, table.first_sequence, table.count, table.base_offset)
            .where(table.partition_id == self.id)
            .order_by(table.base_offset)
        ).all()
        return [StoredBatch(row[0], row[1], row[2], row[3], timestamp=0) for row in rows]

    def insert_producers(self, connection: Connection, batches: list[StoredBatch]) -> None:
        """Note batches of producers."""
        rows = [
            {
                "partition_id": self.id,
                "base_offset": batch.base_offset,
                "producer_id": batch.producer_id,
                "first_sequence": batch.first_sequence,
                "count": batch.count,
            }
            for batch in batches
        ]
        if rows:
            connection.execute(insert(producers), rows)

    def delete_producers(self, connection: Connection) -> None:
        """Forget the batches of producers that are noted."""
        connection.execute(delete(producers).where(producers.c.partition_id == self.id))
