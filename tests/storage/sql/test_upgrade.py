"""A database with one row for each record, made by the release before, is converted when it is opened."""

import shutil
import sqlite3
import zlib
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from babelbus.records.format import CorruptRecordError
from babelbus.storage.contract import LogSettings
from babelbus.storage.files import File, LocalFiles
from babelbus.storage.sql import upgrade
from babelbus.storage.sql.check import check_database
from babelbus.storage.sql.store import DatabaseStore
from babelbus.storage.sql.tables import SchemaVersionError
from tests.storage.helpers import NOW, append, numbered, read_all
from tests.storage.sql.test_store import open_log
from tests.support.clock import ManualClock
from tests.support.postgres import PostgresServer

OLD = Path(__file__).parent / "a_row_a_record.sql"
"""What the release before wrote: retention, a producer, compaction, an empty topic, a removal that was cut short."""
EXPECTED = {
    ("news", 0): (30, 103, 0, 3012, 0x4372D817),
    ("news", 1): (0, 3, 0, 128, 0x4DD97ED0),
    ("keys", 0): (0, 60, 60, 266, 0xEC8D2341),
    ("empty", 0): (0, 0, 0, 0, 0),
}
"""First and next offset, where compaction looked, size and CRC-32 of all records, as that release read them."""
POSTGRESQL_TABLES = """
    CREATE TABLE babelbus (name TEXT PRIMARY KEY, value BIGINT NOT NULL);
    CREATE TABLE topics (id SERIAL PRIMARY KEY, name TEXT NOT NULL, removed TEXT NOT NULL, settings BYTEA,
        UNIQUE (name, removed));
    CREATE TABLE partitions (id SERIAL PRIMARY KEY, topic_id INTEGER NOT NULL, number INTEGER NOT NULL,
        compacted_until BIGINT NOT NULL, UNIQUE (topic_id, number));
    CREATE TABLE ranges (partition_id INTEGER, base_offset BIGINT, next_offset BIGINT,
        greatest_timestamp BIGINT NOT NULL, size_bytes BIGINT NOT NULL, gaps SMALLINT NOT NULL,
        PRIMARY KEY (partition_id, base_offset));
    CREATE TABLE records (partition_id INTEGER, "offset" BIGINT, timestamp BIGINT NOT NULL,
        attributes SMALLINT NOT NULL, crc BIGINT NOT NULL, key BYTEA, payload BYTEA, headers BYTEA,
        PRIMARY KEY (partition_id, "offset"));
    CREATE TABLE producers (partition_id INTEGER, base_offset BIGINT, producer_id BIGINT NOT NULL,
        first_sequence BIGINT NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (partition_id, base_offset));
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "db.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(OLD.read_text())
    return path


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


def open_store(path: Path, files: LocalFiles | None = None) -> DatabaseStore:
    return DatabaseStore(f"sqlite:///{path}", files or LocalFiles(), ManualClock(NOW))


def check_all(store: DatabaseStore) -> None:
    """Compare what a store holds with what the release before read."""
    assert list(store.removed().values()) == ["gone"]
    for (topic, number), expected in EXPECTED.items():
        log = open_log(store, topic, number, LogSettings())
        content, offset = b"", log.first_offset
        while offset < log.next_offset:
            chunk = log.read(offset, 500)
            content += chunk.data
            offset = chunk.next_offset
        bounds = (log.first_offset, log.next_offset, log.compacted_until, log.size_bytes)
        assert (*bounds, zlib.crc32(content)) == expected
        assert log.recovery.bad == []
    log = open_log(store, "news", 0, LogSettings())
    ((one,),) = log.producers.snapshot().values()
    assert (one.first_sequence, one.count, one.base_offset) == (40, 3, 100)
    assert log.find_time(NOW + 77) == 77
    assert append(log, numbered(1)) == 103


def test_an_old_database_is_converted_once_with_all_that_it_holds(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SchemaVersionError, match="start the server, which converts it"):
        check_database(f"sqlite:///{old}", LocalFiles())
    caplog.set_level("INFO")
    store = open_store(old)
    check_all(store)
    store.close()
    assert "5 of 5 partitions converted" in caplog.text
    with closing(sqlite3.connect(old)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert tables == {"babelbus", "topics", "partitions", "producers", "batches"}
    report = check_database(f"sqlite:///{old}", LocalFiles(), live=True)
    assert (report.problems, report.records) == ([], 73 + 1 + 3 + 7)
    caplog.clear()
    store = open_store(old)
    assert store.partition_count("news") == 2
    assert "convert" not in caplog.text
    store.close()


class Snapshots(LocalFiles):
    """Copies the database at each flush: what a kill at that moment would leave."""

    def __init__(self, path: Path, target: Path) -> None:
        self._path, self._target = path, target
        self.folders: list[Path] = []

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        file = super().open(path, create=create, write=write)
        flush = file.flush

        class Copied:
            def flush(copied) -> None:  # noqa: N805
                flush()
                folder = self._target / str(len(self.folders))
                folder.mkdir()
                for name in ("db.sqlite", "db.sqlite-wal"):
                    shutil.copy(self._path.parent / name, folder)
                self.folders.append(folder)

            def __getattr__(copied, name: str) -> object:  # noqa: N805
                return getattr(file, name)

        return Copied()  # type: ignore[return-value]


def test_a_conversion_that_was_killed_anywhere_goes_on(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrade, "STEP_RECORDS", 7)
    (tmp_path / "killed").mkdir()
    files = Snapshots(old, tmp_path / "killed")
    store = open_store(old, files)
    store.removed()
    store.close()
    half = 0
    for folder in files.folders:
        with closing(sqlite3.connect(folder / "db.sqlite")) as connection:
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            half += "records" in names and 0 < connection.execute("SELECT count(*) FROM records").fetchone()[0] < 83
        store = open_store(folder / "db.sqlite")
        check_all(store)
        store.close()
    assert half > 5


def test_an_old_release_refuses_a_database_that_is_half_converted(old: Path, tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    files = Snapshots(old, tmp_path / "killed")
    open_store(old, files).removed()
    with closing(sqlite3.connect(files.folders[0] / "db.sqlite")) as connection:
        assert connection.execute("SELECT value FROM babelbus WHERE name = 'schema'").fetchone() == (2,)


@pytest.mark.parametrize(
    ("statement", "reason", "behind"),
    [
        ("UPDATE records SET payload = x'00' WHERE partition_id = 1 AND \"offset\" = 50", "missing", 51),
        ('UPDATE records SET payload = NULL WHERE partition_id = 1 AND "offset" = 50', "missing", 51),
        ('DELETE FROM records WHERE partition_id = 1 AND "offset" BETWEEN 50 AND 52', "missing", 53),
    ],
)
def test_a_record_that_was_damaged_stays_refused_and_the_others_stay_readable(
    old: Path, statement: str, reason: str, behind: int
) -> None:
    change(old, statement)
    store = open_store(old)
    log = open_log(store, "news", 0, LogSettings())
    assert log.read(30, 2**20).next_offset == 50
    with pytest.raises(CorruptRecordError, match=reason):
        log.read(50, 2**20)
    assert [record.offset for record in read_all(log, behind)] == list(range(behind, 103))
    (problem,) = check_database(store._database._url.render_as_string(), LocalFiles()).problems[1:]
    assert (problem.kind, problem.offset, problem.next_offset) == ("damaged", 50, behind)
    store.close()


def test_an_old_range_that_compaction_emptied_and_lost_its_end_is_converted(old: Path) -> None:
    change(old, 'DELETE FROM records WHERE partition_id = 3 AND "offset" >= 59')
    store = open_store(old)
    log = open_log(store, "keys", 0, LogSettings())
    assert log.next_offset == 60
    with pytest.raises(CorruptRecordError, match="missing"):
        log.read(59, 2**20)
    assert append(log, numbered(1)) == 60
    store.close()


def test_an_old_schema_of_postgresql_is_converted(postgres: PostgresServer, old: Path) -> None:
    with psycopg.connect(postgres.url()) as there, closing(sqlite3.connect(old)) as here:
        there.execute(POSTGRESQL_TABLES)
        for table in ("babelbus", "topics", "partitions", "ranges", "records", "producers"):
            for row in here.execute(f"SELECT * FROM {table}"):
                there.execute(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(row))})", row)
    store = DatabaseStore(postgres.url(), LocalFiles(), ManualClock(NOW))
    check_all(store)
    store.close()
    assert check_database(postgres.url(), LocalFiles(), live=True).problems == []
