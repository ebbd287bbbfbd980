"""Reading all that a database of engine `db` stores and saying what is wrong; nothing is written (docs/storage.md).

Every record's CRC is checked, offsets must be dense where compaction has not looked, and what is noted of each range is
compared with its rows. A server may use the database meanwhile: what looks wrong is looked at twice then, since it may
have removed ranges between two reads.
"""

from itertools import pairwise

import msgspec
from sqlalchemy import func, select

from babelbus.records.columns import decode_chunk
from babelbus.records.format import CorruptRecordError
from babelbus.storage.disk import Meter, PartitionReport, Problem, Progress, Report, SegmentReport
from babelbus.storage.files import FileSystem
from babelbus.storage.sql.connection import Database
from babelbus.storage.sql.ranges import PartitionRows, Range
from babelbus.storage.sql.reading import read_chunk
from babelbus.storage.sql.rows import Row
from babelbus.storage.sql.store import choose_database
from babelbus.storage.sql.tables import find_tables, partitions, ranges, topics

READ_BYTES = 2**22
LEFT_ALONE = "nothing: readers are refused it and go on behind it; put the rows back from a copy of the database"
NOTED_AGAIN = "nothing: put the rows back from a copy of the database"


class _Place(msgspec.Struct, frozen=True):
    """A partition: where its rows are, and what it is called."""

    topic: str
    number: int
    rows: PartitionRows
    name: str


def check_database(url: str, files: FileSystem, *, progress: Progress | None = None, live: bool = False) -> Report:
    """Read all records of a database and return what is wrong with them; an empty report if nothing was stored there.

    A range counts as a segment. `live` says that a server uses it.

    Raises:
        DatabaseUrlError: the URL is none.
        SchemaVersionError: the tables are not those of this release.
        DiskError: the database cannot be reached, or is none.
    """
    database = choose_database(url, files)
    report = Report([], [])
    if not database.is_there():
        return report
    database.look()
    try:
        with database.read() as connection:
            if not find_tables(connection, database.name):
                return report
            total = connection.execute(select(func.sum(ranges.c.size_bytes))).scalar() or 0
        places, report.problems = _places(database, live=live)
        meter = Meter(progress, int(total))
        for place in places:
            report.partitions.append(_look_twice(database, place, meter, live=live))
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
        places.append(_Place(topic, number, PartitionRows(partition_id), _name(database, topic, number)))
    return places, problems


def _name(database: Database, topic: str, number: int) -> str:
    return f"{database.name}, topic {topic!r}, partition {number}"


def _look_twice(database: Database, place: _Place, meter: Meter, *, live: bool) -> PartitionReport:
    """Read a partition; beside a server that may change it, believe only what looks wrong both times."""
    report = _look(database, place, meter)
    if live and report.all_problems:
        first = set(report.all_problems)
        again = _look(database, place, Meter(None, 0))
        segments = [
            msgspec.structs.replace(one, problems=[problem for problem in one.problems if problem in first])
            for one in again.segments
        ]
        problems = [problem for problem in again.problems if problem in first]
        return msgspec.structs.replace(again, segments=segments, problems=problems)
    return report


def _look(database: Database, place: _Place, meter: Meter) -> PartitionReport:
    rows, problems = place.rows, []
    with database.read() as connection:
        found, is_open = rows.load(connection)
        if is_open:
            rows.measure(connection, found[-1])
        first, end = (found[0].base_offset, found[-1].next_offset) if found else (0, 0)
        strays = rows.count_outside(connection, first, None if is_open else end)
    if strays:
        reason = f"{strays} rows lie outside of all ranges, where nobody reads them"
        problems.append(Problem("leftover", place.name, reason, "nothing: delete them with SQL"))
    for one, following in pairwise(found):
        if one.next_offset != following.base_offset:
            reason = "a range does not begin where the one in front of it ends"
            at = (one.next_offset, following.base_offset)
            problems.append(Problem("range", place.name, reason, NOTED_AGAIN, None, min(at), max(at)))
    segments = [_read_range(database, place, one, meter, noted=not (is_open and one is found[-1])) for one in found]
    return PartitionReport(place.topic, place.number, segments, problems)


def _read_range(database: Database, place: _Place, found: Range, meter: Meter, *, noted: bool) -> SegmentReport:
    """Read the records of a range; with `noted`, compare them with what is noted of it."""

    def fetch(offset: int, end_offset: int, limit: int) -> list[Row]:
        return list(database.fetch(place.rows.id, offset, end_offset, limit))

    problems: list[Problem] = []
    records = size = greatest = 0
    at = found.base_offset
    while at < found.next_offset:
        try:
            chunk = read_chunk(fetch, [found], at, found.next_offset, READ_BYTES, place.name)
            if not chunk.data and chunk.next_offset == at:  # one record is larger
                chunk = read_chunk(fetch, [found], at, found.next_offset, 2**31 - 1, place.name)
        except CorruptRecordError as error:
            bad = error.offset
            following = fetch(bad, found.next_offset, 1)
            is_missing = not following or following[0][0] != bad
            at = bad + 1 if not is_missing else following[0][0] if following else found.next_offset
            reason = "the rows are missing" if is_missing else error.reason
            problems.append(Problem("damaged", place.name, reason, LEFT_ALONE, None, bad, at))
            continue
        at = chunk.next_offset
        if chunk.data:
            columns = decode_chunk(chunk.data, verified=True)
            records, size = records + len(columns), size + len(chunk.data)
            greatest = max(greatest, int(columns.timestamps.max()))
            meter.add(len(chunk.data))
    if noted and not problems and (size, greatest) != (found.size_bytes, found.greatest_timestamp):
        reason = (
            f"it is noted with {found.size_bytes} bytes up to time {found.greatest_timestamp}, "
            f"and its rows have {size} bytes up to time {greatest}"
        )
        problems.append(Problem("range", place.name, reason, NOTED_AGAIN, None, found.base_offset, found.next_offset))
    return SegmentReport(place.name, found.base_offset, found.next_offset, records, size, problems)
