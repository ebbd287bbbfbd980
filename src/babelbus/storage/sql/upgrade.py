"""Converting a database with one row for each record (schema version 1) into one row for each batch.

Each transaction moves some records of one partition from the old tables into `batches`. After a kill at any point, each
record is in exactly one of them, and the next start goes on. A damaged or missing record leaves a hole, which is
refused to readers.
"""

import logging
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Column, LargeBinary, MetaData, Row, Table, delete, func, insert, select, update

from babelbus.arrays import np
from babelbus.records.fields import crcs_at
from babelbus.records.format import TOMBSTONE, InvalidRecordError, decode_headers, encode_batch
from babelbus.records.record import Record
from babelbus.storage.sql.batches import ROW_BYTES_MAX, make_row
from babelbus.storage.sql.database import Database
from babelbus.storage.sql.tables import (
    CONVERTING,
    ROW_VERSION,
    SCHEMA_VERSION,
    Big,
    batches,
    find_version,
    make_tables,
    meta,
    partitions,
)

log = logging.getLogger(__name__)

STEP_RECORDS = 5_000
"""Most records that one transaction converts; all are of one range, which has about 1 MiB."""

_old = MetaData()
records = Table(
    "records",
    _old,
    *(Column(name, Big) for name in ("partition_id", "offset", "timestamp", "attributes", "crc")),
    *(Column(name, LargeBinary) for name in ("key", "payload", "headers")),
)
ranges = Table(
    "ranges",
    _old,
    *(Column(name, Big) for name in ("partition_id", "base_offset", "next_offset", "gaps")),
)


def prepare(database: Database) -> None:
    """Build the tables, or convert those of an older release.

    Raises:
        SchemaVersionError: the tables are not ours, or of another release.
        DiskError: the database refused; the next start goes on with the conversion.
    """
    with database.write() as connection:
        make_tables(connection, database.name)
        if find_version(connection, database.name) == ROW_VERSION:
            kind = Big.compile(connection.dialect)
            for name in ("epoch", "first_offset", "next_offset", "size_bytes"):
                connection.exec_driver_sql(f"ALTER TABLE partitions ADD COLUMN {name} {kind} NOT NULL DEFAULT 0")
            batches.create(connection)
            # From here on an older release refuses the database.
            connection.execute(update(meta).where(meta.c.name == "schema").values(value=SCHEMA_VERSION))
            connection.execute(insert(meta), {"name": CONVERTING, "value": 1})
    with database.read() as connection:
        converting = connection.execute(select(meta.c.value).where(meta.c.name == CONVERTING)).scalar()
    if converting:
        _convert(database)
    database.make_durable()  # a killed server may have left commits that are not, and readers see all


def _convert(database: Database) -> None:
    with database.read() as connection:
        numbers = connection.execute(select(partitions.c.id).order_by(partitions.c.id)).scalars().all()
    log.warning("%s: converting it to one row for each batch; a stop is safe, the next start goes on", database.name)
    for count, partition_id in enumerate(numbers, 1):
        while _convert_some(database, partition_id):
            database.make_durable()  # so that the WAL stays small
        log.warning("%s: %d of %d partitions converted", database.name, count, len(numbers))
    with database.write() as connection:
        _old.drop_all(connection)
        connection.execute(delete(meta).where(meta.c.name == CONVERTING))


def _convert_some(database: Database, partition_id: int) -> bool:
    """Convert records of the first range of a partition in one transaction; return whether there was a range."""
    first_range = select(ranges).where(ranges.c.partition_id == partition_id).order_by(ranges.c.base_offset).limit(1)
    with database.write() as connection:
        found = connection.execute(first_range).one_or_none()
        if found is None:
            return False
        chosen = (records.c.partition_id == partition_id) & (records.c.offset >= found.base_offset)
        if found.next_offset is not None:
            chosen &= records.c.offset < found.next_offset
        rows = connection.execute(select(records).where(chosen).order_by(records.c.offset).limit(STEP_RECORDS)).all()
        here = partitions.c.id == partition_id
        partition = connection.execute(select(partitions).where(here)).one()
        begin, is_last = max(found.base_offset, partition.next_offset), len(rows) < STEP_RECORDS
        stop = rows[-1].offset + 1 if rows else begin
        if is_last and found.next_offset is not None:
            stop = found.next_offset
        made = list(_group(rows, begin, stop, gaps=bool(found.gaps)))
        newest = select(func.max(batches.c.latest_timestamp)).where(batches.c.partition_id == partition_id)
        latest = connection.execute(newest).scalar() or 0
        for first, after, data, timestamps in made:
            row = make_row(first, after, data, timestamps, latest) | {"partition_id": partition_id}
            latest = row["latest_timestamp"]
            connection.execute(insert(batches), row)
        values = {
            "first_offset": partition.first_offset if partition.next_offset else found.base_offset,
            "next_offset": stop,
            "size_bytes": partition.size_bytes + sum(len(data) for _, _, data, _ in made),
        }
        connection.execute(update(partitions).where(here).values(values))
        connection.execute(delete(records).where(chosen, records.c.offset < stop))
        if is_last:
            of_range = (ranges.c.partition_id == partition_id) & (ranges.c.base_offset == found.base_offset)
            connection.execute(delete(ranges).where(of_range))
    return True


def _group(
    rows: Sequence[Row[Any]], begin: int, stop: int, *, gaps: bool
) -> Iterator[tuple[int, int, bytes, list[int]]]:
    """Yield first and next offset, records and timestamps of each batch.

    A damaged record leaves a hole, and so does a missing record if there are no `gaps`.
    """
    first = after = begin
    data, timestamps = bytearray(), list[int]()
    for row in rows:
        record = _encode(row)
        if record is None or (row.offset != after and not gaps) or len(data) >= ROW_BYTES_MAX:
            until = row.offset if gaps else after
            if first < until:
                yield first, until, bytes(data), timestamps
            first, data, timestamps = row.offset + (record is None), bytearray(), []
        after = row.offset + 1
        if record is not None:
            data += record
            timestamps.append(row.timestamp)
    until = stop if gaps else after
    if first < until:
        yield first, until, bytes(data), timestamps


def _encode(row: Row[Any]) -> bytes | None:
    """Return the stored form of an old record; `None`, with a log line, if its columns do not match its CRC."""
    try:
        headers = decode_headers(row.headers, 1, row.headers[0]) if row.headers else ()
        payload = None if row.attributes & TOMBSTONE else row.payload
        record = Record(payload, row.key, headers, row.timestamp, row.attributes & ~TOMBSTONE)
        data = bytes(encode_batch([record], row.offset).data)
    except (IndexError, struct.error, InvalidRecordError):
        data = b""
    if data and crcs_at(data, np.zeros(1, np.int64))[0] == row.crc:
        return data
    log.error("partition %d, offset %d: the record is damaged and not converted", row.partition_id, row.offset)
    return None
