"""Converting a database with one row for each record (schema version 1) into one row for each batch.

Each transaction moves some records of one partition from the old tables into `batches`. After a kill at any point, each
record is in exactly one of them, and the next start goes on. A damaged record keeps its bytes and its wrong CRC, and a
missing record leaves a hole: both are refused to readers as before.
"""

import logging
import struct
from typing import Any

from sqlalchemy import Column, LargeBinary, MetaData, Row, Table, bindparam, delete, insert, select, update

from babelbus.records.format import BODY, HEAD, HEAD_BYTES, INT32, LENGTH_FROM, TOMBSTONE, record_error
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
PROGRESS_RECORDS = 1_000_000

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


_Record = tuple[int, int, tuple[bytes | None, bool]]
"""Offset, timestamp, what `_to_stored` returns."""
_Group = tuple[int, int, bytes, list[int], bool]
"""First offset, the offset behind the last one, records, timestamps, and whether all records are good."""


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
    done = 0
    for count, partition_id in enumerate(numbers, 1):
        while (moved := _convert_some(database, partition_id)) is not None:
            if (done + moved) // PROGRESS_RECORDS > done // PROGRESS_RECORDS:
                log.warning("%s: %d records converted so far", database.name, done + moved)
            done += moved
            database.make_durable()  # so that the WAL stays small
        log.info("%s: %d of %d partitions converted", database.name, count, len(numbers))
    with database.write() as connection:
        _old.drop_all(connection)
        connection.execute(delete(meta).where(meta.c.name == CONVERTING))
    log.warning("%s: converted, %d records", database.name, done)


def _convert_some(database: Database, partition_id: int) -> int | None:
    """Convert records of the first range of a partition in one transaction; return how many, `None` without a range."""
    first_range = select(ranges.c.base_offset, ranges.c.next_offset, ranges.c.gaps)
    first_range = first_range.where(ranges.c.partition_id == partition_id).order_by(ranges.c.base_offset).limit(1)
    with database.write() as connection:
        found = connection.execute(first_range).one_or_none()
        if found is None:
            return None
        base, end, gaps = found
        here = select(partitions).where(partitions.c.id == partition_id)
        partition = connection.execute(here).one()
        chosen = (records.c.partition_id == partition_id) & (records.c.offset >= base)
        if end is not None:
            chosen &= records.c.offset < end
        columns = [
            records.c[name] for name in ("offset", "timestamp", "attributes", "crc", "key", "payload", "headers")
        ]
        query = select(*columns).where(chosen).order_by(records.c.offset).limit(STEP_RECORDS)
        rows = [(row[0], row[1], _to_stored(row)) for row in connection.execute(query)]
        is_last = len(rows) < STEP_RECORDS
        begin = max(base, partition.next_offset)
        stop = end if is_last and end is not None else rows[-1][0] + 1 if rows else begin
        made = _group(rows, begin, stop, gaps=bool(gaps))
        latest = connection.execute(_LATEST, {"partition_id": partition_id}).scalar() or 0
        for first, after, part, timestamps, is_good in made:
            row = make_row(first, after, part, timestamps, latest) | {"partition_id": partition_id}
            latest = row["latest_timestamp"]
            connection.execute(insert(batches), row if is_good else row | {"sum": None})
        values = {
            "first_offset": partition.first_offset if partition.next_offset else base,
            "next_offset": stop,
            "size_bytes": partition.size_bytes + sum(len(part) for _, _, part, _, _ in made),
        }
        connection.execute(update(partitions).where(partitions.c.id == partition_id).values(values))
        connection.execute(delete(records).where(chosen, records.c.offset < stop))
        if is_last:
            of_range = (ranges.c.partition_id == partition_id) & (ranges.c.base_offset == base)
            connection.execute(delete(ranges).where(of_range))
    return len(rows)


_LATEST = (
    select(batches.c.latest_timestamp)
    .where(batches.c.partition_id == bindparam("partition_id"))
    .order_by(batches.c.base_offset.desc())
    .limit(1)
)


def _group(rows: list[_Record], begin: int, stop: int, *, gaps: bool) -> list[_Group]:
    """Return the batches for records: a record that cannot be stored, or is missing without `gaps`, leaves a hole."""
    made: list[_Group] = []
    parts: list[bytes] = []
    timestamps: list[int] = []
    first = after = begin
    is_good = True

    def end_group(until: int) -> None:
        nonlocal parts, timestamps, is_good
        if parts or (gaps and first < until):
            made.append((first, until, b"".join(parts), timestamps, is_good))
        parts, timestamps, is_good = [], [], True

    for offset, timestamp, (data, record_is_good) in rows:
        is_hole = data is None or (not gaps and offset != after)
        if is_hole or sum(map(len, parts)) >= ROW_BYTES_MAX:
            end_group(offset if gaps else after)
            first = offset + 1 if data is None else offset
        after = offset + 1
        if data is not None:
            parts.append(data)
            timestamps.append(timestamp)
            is_good &= record_is_good
    end_group(stop if gaps else after)
    return made


def _to_stored(row: Row[Any]) -> tuple[bytes | None, bool]:
    """Return the stored form of an old record and whether it is good; `None` if its columns hold what no record has."""
    offset, timestamp, attributes, crc, key, payload, headers = tuple(row)
    if payload is None and not attributes & TOMBSTONE:
        return None, False
    parts = (key or b"", INT32.pack(len(payload or b"")), payload or b"", b"\0" if headers is None else headers)
    try:
        body = BODY.pack(attributes, timestamp, -1 if key is None else len(key)) + b"".join(parts)
        data = HEAD.pack(offset, len(body) + HEAD_BYTES - LENGTH_FROM, crc) + body
    except struct.error:
        return None, False
    return data, record_error(data, 0, len(data)) is None
