"""Reading all that a database of engine `db` stores and naming what is wrong; nothing is written (docs/storage.md).

Every record is checked, batches must follow each other without a hole, what a row says of its batch must be true, and a
partition must reach the end that its own row and the file of ends know. A server may use the database meanwhile: a
partition with problems is read again then, because the cleaner may have changed batches between two reads.
"""

import msgspec
from sqlalchemy import func, select

from babelbus.arrays import np
from babelbus.clock import SystemClock
from babelbus.records.columns import decode_columns
from babelbus.storage.disk import Meter, Problem, Progress, Report
from babelbus.storage.files import FileSystem
from babelbus.storage.sql.batches import Batch, examine, fetch
from babelbus.storage.sql.database import Database
from babelbus.storage.sql.store import choose_database
from babelbus.storage.sql.tables import (
    batches,
    has_tables,
    partitions,
    topics,
)

PAGE_BYTES = 2**22
LEFT_ALONE = "nothing: readers are refused it and go on behind it; put the rows back from a copy of the database"
NOTED_AGAIN = "nothing: put the rows back from a copy of the database"


class _Place(msgspec.Struct, frozen=True):
    """A partition: topic, number, id in the database, name for messages."""

    topic: str
    number: int
    id: int
    name: str


def check_database(url: str, files: FileSystem, *, progress: Progress | None = None, live: bool = False) -> Report:
    """Read all records of a database and return what is wrong with them; an empty report if nothing was stored there.

    The batches of a partition count as one segment. `live` says that a server uses the database.

    Raises:
        DatabaseUrlError: the URL cannot be used.
        SchemaVersionError: the tables are not those of this release.
        DiskError: the database cannot be reached, or the file is no database.
    """
    database = choose_database(url, files, SystemClock())
    report = Report()
    if not database.is_there():
        return report
    database.look()
    try:
        with database.read() as connection:
            if not has_tables(connection, database.name):
                return report
            total = connection.execute(select(func.sum(batches.c.size_bytes))).scalar() or 0
        places, report.problems = _places(database, live=live)
        meter = Meter(progress, int(total))
        for place in places:
            report.partitions.append((place.topic, place.number))
            report.segments += 1
            _look_twice(database, place, meter, report, live=live)
    finally:
        database.close()
    return report


def _places(database: Database, *, live: bool) -> tuple[list[_Place], list[Problem]]:
    """Return the partitions, and what is wrong with the topics."""
    query = (
        select(topics.c.name, topics.c.removed, partitions.c.number, partitions.c.id)
        .join(partitions, partitions.c.topic_id == topics.c.id, isouter=True)
        .order_by(topics.c.name, partitions.c.number)
    )
    with database.read() as connection:
        rows = connection.execute(query).all()
    problems = []
    for name in sorted({name for name, removed, _, _ in rows if removed}) if not live else ():
        reason, fix = "the removal of a topic was cut short", "nothing: the next start of the server finishes it"
        problems.append(Problem("leftover", f"{database.name}, topic {name!r}", reason, fix))
    places: list[_Place] = []
    expected: dict[str, int] = {}
    for topic, removed, number, partition_id in rows:
        if removed or number is None:
            continue
        problems += [
            Problem("missing", _name(database, topic, missing), "the partition is missing", NOTED_AGAIN)
            for missing in range(expected.get(topic, 0), number)
        ]
        expected[topic] = number + 1
        places.append(_Place(topic, number, partition_id, _name(database, topic, number)))
    return places, problems


def _name(database: Database, topic: str, number: int) -> str:
    return f"{database.name}, topic {topic!r}, partition {number}"


def _look_twice(database: Database, place: _Place, meter: Meter, report: Report, *, live: bool) -> None:
    """Add a partition to a report; beside a server, only the problems that a second look finds too."""
    problems, count, size_bytes = _look(database, place, meter)
    if live and problems:
        again, count, size_bytes = _look(database, place, Meter(None, 0))
        problems = [problem for problem in again if problem in problems]
    report.problems += problems
    report.records += count
    report.size_bytes += size_bytes


def _look(database: Database, place: _Place, meter: Meter) -> tuple[list[Problem], int, int]:
    """Read a partition; return what is wrong with it, its good records and their bytes."""
    database.ends.load()  # before the database is read: a server writes the end behind its commit
    durable = database.ends.get(place.topic, place.number)
    with database.read() as connection:
        partition = connection.execute(select(partitions).where(partitions.c.id == place.id)).one_or_none()
    if partition is None:
        return [], 0, 0
    end = max(partition.next_offset, durable)
    problems: list[Problem] = []

    def note(kind: str, reason: str, first: int, after: int, fix: str = LEFT_ALONE) -> None:
        problems.append(Problem(kind, place.name, reason, fix, None, first, after))

    at, count, size_bytes = partition.first_offset, 0, 0
    for batch in fetch(database, place.id, 0, end, PAGE_BYTES):
        if batch.base_offset > at:
            note("damaged", "batches are missing", at, batch.base_offset)
        count += _check_batch(batch, place.name, problems)
        size_bytes += len(batch.data)
        at = max(at, batch.next_offset)
        meter.add(len(batch.data))
    if at < end:
        note("ends_early", "the end of the partition is lost", at, end)
    if not problems and size_bytes != partition.size_bytes:
        reason = f"it is noted with {partition.size_bytes} bytes, and its batches have {size_bytes}"
        note("range", reason, partition.first_offset, end, NOTED_AGAIN)
    return problems, count, size_bytes


def _check_batch(batch: Batch, name: str, problems: list[Problem]) -> int:
    """Check the records of a batch and what its row says of them; return how many are good."""
    verified = batch.sum_holds
    starts, offsets, good = examine(batch, verified=verified)
    bad = [*offsets[~good].tolist()]
    if len(starts) < batch.count:
        bad += range(int(offsets[-1]) + 1 if len(offsets) else batch.base_offset, batch.next_offset)
    for run in np.split(np.array(bad, np.int64), np.flatnonzero(np.diff(bad) > 1) + 1) if bad else ():
        reason = "the records are damaged"
        problems.append(Problem("damaged", name, reason, LEFT_ALONE, None, int(run[0]), int(run[-1]) + 1))
    if not bad:
        columns = decode_columns(batch.data, starts)
        greatest = int(columns.timestamps.max()) if len(columns) else 0
        if (len(starts), greatest) != (batch.count, batch.greatest_timestamp) or (
            not verified and batch.sum is not None
        ):
            reason = (
                f"its row says {batch.count} records up to time {batch.greatest_timestamp}, there are {len(starts)}"
                f" up to time {greatest}, and the checksum {'fits' if verified else 'does not fit'}"
            )
            problems.append(Problem("range", name, reason, NOTED_AGAIN, None, batch.base_offset, batch.next_offset))
    return int(good.sum())
