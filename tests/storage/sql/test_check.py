"""`check` of engine `db`: what it counts, what it finds, and that it changes nothing and holds up no server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.clock import ManualClock
from babelbus.records.record import Record
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk.check import Problem, Report
from babelbus.storage.errors import DiskError
from babelbus.storage.files import LocalFiles
from babelbus.storage.sql.check import check_database
from babelbus.storage.sql.log import DatabaseLog
from babelbus.storage.sql.store import DatabaseStore
from babelbus.storage.sql.tables import SchemaVersionError
from tests.storage.helpers import NOW, append, fill, numbered
from tests.storage.sql.test_store import Place
from tests.support.postgres import PostgresMissingError, PostgresServer, postgres_server


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.store.close()


def check(place: Place, *, live: bool = True) -> Report:
    return check_database(f"sqlite:///{place.path}", LocalFiles(), live=live)


def found(report: Report) -> list[tuple[str, int | None, int | None]]:
    return [(problem.kind, problem.offset, problem.next_offset) for problem in report.all_problems]


def several_ranges(place: Place, topic: str = "t") -> DatabaseLog:
    log = place.log(topic, segment_bytes=1000)
    for first in range(0, 100, 5):
        append(log, numbered(5, first=first))
    assert log.segment_count > 3
    return log


def test_a_whole_database_has_no_problems_and_is_counted(place: Place) -> None:
    log = several_ranges(place, "news")
    fill(place.log("other", 0), 7)
    place.log("other", 1)
    seen: list[tuple[int, int]] = []
    report = check_database(f"sqlite:///{place.path}", LocalFiles(), progress=lambda *both: seen.append(both))
    assert report.all_problems == []
    assert [(one.topic, one.partition) for one in report.partitions] == [("news", 0), ("other", 0), ("other", 1)]
    assert report.records == 107
    assert sum(segment.size_bytes for segment in report.partitions[0].segments) == log.size_bytes
    assert seen[-1][0] <= seen[-1][1]


def test_where_nothing_was_stored_there_is_nothing_to_check(place: Place) -> None:
    assert check(place) == Report([], [])
    assert not place.path.exists()


def test_a_check_beside_a_server_reads_what_it_has_committed_and_holds_nothing(place: Place) -> None:
    log = place.log()
    fill(log, 10)
    assert check(place).records == 10
    append(log, numbered(1, first=10))
    log.flush()
    assert check(place).records == 11
    place.restart()
    assert place.log().next_offset == 11


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("change", "offsets"),
    [
        ("UPDATE records SET payload = x'00' WHERE \"offset\" = 50", (50, 51)),
        ('UPDATE records SET crc = 7 WHERE "offset" = 99', (99, 100)),
        ('UPDATE records SET payload = NULL WHERE "offset" = 0', (0, 1)),
        ('DELETE FROM records WHERE "offset" BETWEEN 20 AND 22', (20, 23)),
        ('DELETE FROM records WHERE "offset" = 0', (0, 1)),
        ('DELETE FROM records WHERE "offset" = 98', (98, 99)),
    ],
)
def test_damaged_and_missing_rows_are_named(place: Place, change: str, offsets: tuple[int, int], live: bool) -> None:
    several_ranges(place, "news")
    place.sql(change)
    report = check(place, live=live)
    assert found(report) == [("damaged", *offsets)]
    assert report.records == 100 - (offsets[1] - offsets[0])
    (problem,) = report.all_problems
    assert problem.file.endswith("db.sqlite, topic 'news', partition 0")
    assert "from a copy of the database" in problem.repair


def test_a_whole_range_of_missing_rows_is_one_problem(place: Place) -> None:
    log = several_ranges(place)
    second = log.sealed_ranges()[1]
    place.sql('DELETE FROM records WHERE "offset" >= ? AND "offset" < ?', second.base_offset, second.next_offset)
    assert found(check(place)) == [("damaged", second.base_offset, second.next_offset)]


def test_a_row_that_somebody_took_from_a_compacted_range_is_told_by_what_is_noted_of_it(place: Place) -> None:
    log = place.log(segment_bytes=300, cleanup="compact")
    append(log, [Record(b"x", b"alone", timestamp=NOW)])
    for number in range(20):
        append(log, [Record(b"%d" % number, b"k%d" % (number % 3), timestamp=NOW + number)])
    log.roll()
    log.clean(NOW)
    assert check(place).all_problems == []
    assert check(place).records < 20
    place.sql('DELETE FROM records WHERE "offset" = 0')
    (problem,) = check(place).all_problems
    assert problem.kind == "range"
    assert "is noted with" in problem.reason


def test_rows_outside_of_all_ranges_and_ranges_that_do_not_touch_are_named(place: Place) -> None:
    log = several_ranges(place)
    first, second = log.sealed_ranges()[:2]
    place.sql("DELETE FROM ranges WHERE base_offset = ?", first.base_offset)
    (problem,) = check(place).all_problems
    assert (problem.kind, f"{second.base_offset} rows lie outside" in problem.reason) == ("leftover", True)
    third = log.sealed_ranges()[2]
    place.sql("DELETE FROM ranges WHERE base_offset = ?", third.base_offset)
    assert ("range", third.base_offset, third.next_offset) in found(check(place))


def test_a_partition_that_is_missing_and_a_removal_that_was_cut_short_are_named(place: Place) -> None:
    place.log("t", 0)
    place.log("t", 2)
    place.log("gone")
    place.store.hide("gone")
    assert [(one.kind, one.file.partition(", ")[2]) for one in check(place, live=False).all_problems] == [
        ("leftover", "topic 'gone'"),
        ("missing", "topic 't', partition 1"),
    ]
    assert [one.kind for one in check(place).all_problems] == ["missing"]  # a server may be about to erase it


def test_what_is_no_database_of_ours_is_refused(place: Place) -> None:
    place.log()
    place.sql("UPDATE babelbus SET value = 99 WHERE name = 'schema'")
    with pytest.raises(SchemaVersionError, match="version 99"):
        check(place)
    place.store.close()
    place.path.write_bytes(b"no database at all, but long enough" * 100)
    with pytest.raises(DiskError, match=r"db\.sqlite"):
        check(place)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    try:
        with postgres_server() as server:
            yield server
    except PostgresMissingError as missing:
        pytest.skip(f"check of engine db is not tested on PostgreSQL: {missing}")


def test_postgresql_is_checked_beside_its_server(server: PostgresServer) -> None:
    assert check_database(server.url(), LocalFiles()) == Report([], [])
    store = DatabaseStore(server.url(), LocalFiles(), ManualClock(NOW))
    log = store.open_partition("news", 0, LogSettings())
    fill(log, 50)
    report = check_database(server.url(), LocalFiles(), live=True)
    assert (report.records, report.all_problems) == (50, [])
    server.sql('DELETE FROM records WHERE "offset" = 20; UPDATE records SET crc = 1 WHERE "offset" = 30')
    damaged: list[Problem] = check_database(server.url(), LocalFiles(), live=True).all_problems
    assert [(one.offset, one.next_offset) for one in damaged] == [(20, 21), (30, 31)]
    store.close()
