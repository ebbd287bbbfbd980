"""`check` of engine `db`: what it counts, what it finds, and that it changes nothing and holds up no server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.records.record import Record
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk.check import Problem, Report
from babelbus.storage.errors import DiskError
from babelbus.storage.files import LocalFiles
from babelbus.storage.sql.check import check_database
from babelbus.storage.sql.cleaner import clean
from babelbus.storage.sql.log import DatabaseLog
from babelbus.storage.sql.store import DatabaseStore
from babelbus.storage.sql.tables import SchemaVersionError
from tests.storage.helpers import NOW, append, fill, numbered
from tests.storage.sql.test_store import Place, open_log
from tests.support.clock import ManualClock
from tests.support.postgres import PostgresServer


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.store.close()


def check(place: Place, *, live: bool = True) -> Report:
    return check_database(f"sqlite:///{place.path}", LocalFiles(), live=live)


def found(report: Report) -> list[tuple[str, int | None, int | None]]:
    return [(problem.kind, problem.offset, problem.next_offset) for problem in report.problems]


def several_batches(place: Place, topic: str = "t") -> DatabaseLog:
    log = place.log(topic)
    for first in range(0, 100, 5):
        append(log, numbered(5, first=first))
    log.flush()
    return log


def test_a_whole_database_has_no_problems_and_is_counted(place: Place) -> None:
    log = several_batches(place, "news")
    fill(place.log("other", 0), 7)
    place.log("other", 1)
    seen: list[tuple[int, int]] = []
    report = check_database(f"sqlite:///{place.path}", LocalFiles(), progress=lambda *both: seen.append(both))
    assert report.problems == []
    assert report.partitions == [("news", 0), ("other", 0), ("other", 1)]
    assert report.records == 107
    assert report.size_bytes == log.size_bytes + place.log("other", 0).size_bytes
    assert seen[-1][0] <= seen[-1][1]


def test_where_nothing_was_stored_there_is_nothing_to_check(place: Place) -> None:
    assert check(place) == Report()
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


def test_trimmed_and_compacted_partitions_are_whole(place: Place) -> None:
    log = several_batches(place)
    log.trim(12)
    other = place.log("keys", segment_bytes=1, cleanup="compact")
    append(other, [Record(b"x", b"k%d" % (number % 3), timestamp=NOW) for number in range(20)])
    clean(other, NOW)
    report = check(place)
    assert (report.problems, report.records) == ([], 3 + 90)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("offset", [0, 50, 99])
def test_damaged_records_are_named(place: Place, offset: int, live: bool) -> None:
    several_batches(place, "news")
    place.damage(offset)
    report = check(place, live=live)
    assert found(report) == [("damaged", offset, offset + 1)]
    assert report.records == 99
    (problem,) = report.problems
    assert problem.file.endswith("db.sqlite, topic 'news', partition 0")
    assert "from a copy of the database" in problem.repair


def test_a_damaged_length_names_the_records_that_it_hides(place: Place) -> None:
    several_batches(place)
    place.damage(52, at=-23)
    assert found(check(place)) == [("damaged", 52, 55)]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("DELETE FROM batches WHERE base_offset BETWEEN 20 AND 40", ("damaged", 20, 45)),
        ("DELETE FROM batches WHERE base_offset = 0", ("damaged", 0, 5)),
        ("DELETE FROM batches WHERE base_offset >= 90", ("ends_early", 90, 100)),
        ("UPDATE batches SET count = 4 WHERE base_offset = 10", ("range", 10, 15)),
        ("UPDATE batches SET greatest_timestamp = 9 WHERE base_offset = 10", ("range", 10, 15)),
        ("UPDATE batches SET sum = 1 WHERE base_offset = 10", ("range", 10, 15)),
        ("UPDATE partitions SET size_bytes = 1", ("range", 0, 100)),
    ],
)
def test_missing_batches_and_wrong_columns_are_named(place: Place, change: str, problem: tuple[str, int, int]) -> None:
    several_batches(place)
    place.sql(change)
    assert found(check(place)) == [problem]


def test_an_end_that_the_database_lost_is_named_although_nothing_in_it_knows(place: Place, tmp_path: Path) -> None:
    log = several_batches(place)
    log.flush()
    after = place.copy(tmp_path / "after")
    wal = Path(f"{after.path}-wal")
    content = bytearray(wal.read_bytes())
    content[len(content) // 2] ^= 1
    wal.write_bytes(content)
    ((kind, first, end),) = found(check(after))
    assert (kind, end) == ("ends_early", 100)
    assert first is not None
    assert 0 < first < 100


def test_a_partition_that_is_missing_and_a_removal_that_was_cut_short_are_named(place: Place) -> None:
    place.log("t", 0)
    place.log("t", 2)
    place.log("gone")
    place.store.hide("gone")
    assert [(one.kind, one.file.partition(", ")[2]) for one in check(place, live=False).problems] == [
        ("leftover", "topic 'gone'"),
        ("missing", "topic 't', partition 1"),
    ]
    assert [one.kind for one in check(place).problems] == ["missing"]  # a server may be about to erase it


def test_what_is_no_database_of_ours_is_refused(place: Place) -> None:
    place.log()
    place.sql("UPDATE babelbus SET value = 99 WHERE name = 'schema'")
    with pytest.raises(SchemaVersionError, match="version 99"):
        check(place)
    place.store.close()
    place.path.write_bytes(b"no database at all, but long enough" * 100)
    with pytest.raises(DiskError, match=r"db\.sqlite"):
        check(place)


def test_postgresql_is_checked_beside_its_server(postgres: PostgresServer) -> None:
    assert check_database(postgres.url(), LocalFiles()) == Report()
    store = DatabaseStore(postgres.url(), LocalFiles(), ManualClock(NOW))
    log = open_log(store, "news", 0, LogSettings())
    fill(log, 50)
    report = check_database(postgres.url(), LocalFiles(), live=True)
    assert (report.records, report.problems) == (50, [])
    postgres.sql(
        "DELETE FROM batches WHERE base_offset = 20;"
        " UPDATE batches SET data = overlay(data PLACING 'x' FROM octet_length(data) - 10) WHERE base_offset = 30"
    )
    damaged: list[Problem] = check_database(postgres.url(), LocalFiles(), live=True).problems
    assert [(one.offset, one.next_offset) for one in damaged] == [(20, 30), (39, 40)]
    store.close()
