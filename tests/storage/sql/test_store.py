"""The engine `db` beyond the contract: integrity, failures, fences, lost ends, ownership, secrets."""

import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import cast

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from babelbus.errors import StorageError
from babelbus.records.columns import decode_chunk
from babelbus.records.format import CorruptRecordError, encode_batch, mark_producer
from babelbus.records.record import Record
from babelbus.storage.contract import LogSettings
from babelbus.storage.errors import DiskError, DiskFullError, FolderLockedError, OffsetOutOfRangeError, StaleWriterError
from babelbus.storage.files import File, LocalFiles
from babelbus.storage.sql import log as database_log
from babelbus.storage.sql.cleaner import clean
from babelbus.storage.sql.ends import Ends
from babelbus.storage.sql.log import DatabaseLog
from babelbus.storage.sql.sqlite import FOLD_SECONDS
from babelbus.storage.sql.store import DatabaseStore, DatabaseUrlError
from babelbus.storage.sql.tables import SchemaVersionError
from tests.storage.helpers import NOW, append, fill, numbered, payloads, read_all, records
from tests.support.clock import ManualClock
from tests.support.postgres import PostgresServer

SECRET = "hunter2-is-secret"
ROOT = Path(__file__).parent.parent.parent.parent


def open_log(store: DatabaseStore, topic: str, number: int, settings: LogSettings) -> DatabaseLog:
    """Open a partition without the queue in front of it: an append is committed when it returns."""
    return DatabaseLog(*store._claim(topic, number), settings)


class WatchedFile:
    """A file whose flushes are counted, and fail when they are told to."""

    def __init__(self, files: "WatchedFiles", file: File) -> None:
        self._files = files
        self._file = file

    def flush(self) -> None:
        self._files.flushes += 1
        if self._files.failures:
            self._files.failures -= 1
            raise OSError(5, "Input/output error")
        self._file.flush()
        self._files.durable_bytes = self._file.size()

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


class WatchedFiles(LocalFiles):
    """The files of this machine, watched."""

    def __init__(self) -> None:
        self.flushes = self.failures = self.durable_bytes = 0

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        return WatchedFile(self, super().open(path, create=create, write=write))  # type: ignore[return-value]


class Place:
    """A SQLite file, and stores on it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "db.sqlite"
        self.files = WatchedFiles()
        self.clock = ManualClock(NOW)
        self.store = self.make()

    def make(self) -> DatabaseStore:
        return DatabaseStore(f"sqlite:///{self.path}", self.files, self.clock)

    def log(self, topic: str = "t", number: int = 0, **how: object) -> DatabaseLog:
        return open_log(self.store, topic, number, LogSettings(**how))  # type: ignore[arg-type]

    def restart(self) -> None:
        self.store.close()
        self.store = self.make()

    def sql(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        """Do what another program does with the file."""
        connection = sqlite3.connect(self.path)
        try:
            with connection:
                return connection.execute(statement, values).fetchall()
        finally:
            connection.close()

    def damage(self, offset: int, *, at: int = -1) -> None:
        """Change a byte of a record in the database; `at` counts from its payload."""
        ((base, data),) = self.sql(
            "SELECT base_offset, data FROM batches WHERE base_offset <= ? ORDER BY base_offset DESC LIMIT 1", offset
        )
        changed = bytearray(cast("bytes", data))
        columns = decode_chunk(bytes(changed))
        number = columns.offsets.tolist().index(offset)
        changed[int(columns.payload_positions[number]) + at] ^= 1
        self.sql("UPDATE batches SET data = ? WHERE base_offset = ?", bytes(changed), base)

    def copy(self, folder: Path) -> "Place":
        """Return a copy of the files as they are, as a killed server leaves them."""
        folder.mkdir()
        for path in self.path.parent.glob("db.sqlite*"):
            if not path.name.endswith((".lock", "-shm")):
                shutil.copy(path, folder)
        return Place(folder)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.store.close()


@pytest.fixture
def server(postgres: PostgresServer) -> PostgresServer:
    """The server with an empty schema."""
    postgres.sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return postgres


@pytest.fixture
def remote(server: PostgresServer) -> Iterator[DatabaseStore]:
    store = DatabaseStore(server.url(), LocalFiles(), ManualClock(NOW))
    yield store
    store.close()


# -- what SQL sees -----------------------------------------------------------------------------------------------------


def test_sql_can_ask_what_is_stored_while_the_store_is_used(place: Place) -> None:
    append(place.log("news", 1), [Record(b"hello", b"k", ((b"h", b"v"),), NOW), Record(None, b"k", (), NOW + 1)])
    found = place.sql(
        "SELECT t.name, p.number, b.base_offset, b.count, b.least_timestamp, b.greatest_timestamp FROM batches b"
        " JOIN partitions p ON p.id = b.partition_id JOIN topics t ON t.id = p.topic_id"
    )
    assert found == [("news", 1, 0, 2, NOW, NOW + 1)]


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(st.lists(st.lists(records(), min_size=1, max_size=30), min_size=1, max_size=4))
def test_what_is_read_is_byte_for_byte_what_the_disk_engine_would_store(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Record]]
) -> None:
    here = Place(tmp_path_factory.mktemp("any"))
    log = here.log()
    for batch in batches:
        append(log, batch)
    sent = [record for batch in batches for record in batch]
    assert log.read(0, 2**30).data == encode_batch(sent, 0).data
    assert log.size_bytes == len(encode_batch(sent, 0).data)
    here.restart()
    assert here.log().size_bytes == log.size_bytes
    here.store.close()


def test_postgresql_gives_back_any_record_byte_for_byte(remote: DatabaseStore) -> None:
    log = open_log(remote, "t", 0, LogSettings())
    sent = [
        Record(b"\0\xff" * 50, b"", ((b"", None), (b"\0", b"")), 1, 7),
        Record(None, b"key", (), 2**63 - 1),
        Record(b"", None, (), NOW),
        *numbered(300),
    ]
    append(log, sent)
    assert log.read(0, 2**30).data == encode_batch(sent, 0).data


def test_topics_and_partitions_of_one_database_do_not_mix(place: Place) -> None:
    logs = {(topic, number): place.log(topic, number) for topic in ("a", "b") for number in (0, 1)}
    for (topic, number), log in logs.items():
        append(log, [Record(f"{topic}{number}".encode(), timestamp=NOW)] * (number + 1))
    logs["a", 0].trim(1)
    assert {at: payloads(read_all(log)) for at, log in logs.items()} == {
        ("a", 0): [], ("a", 1): [b"a1", b"a1"], ("b", 0): [b"b0"], ("b", 1): [b"b1", b"b1"],
    }  # fmt: skip


def test_an_erased_topic_leaves_no_rows(place: Place) -> None:
    for topic in ("gone", "kept"):
        fill(place.log(topic), 200, batch=1)
    place.store.erase(place.store.hide("gone"))
    assert place.store.removed() == {}
    assert place.sql("SELECT count(*), count(DISTINCT partition_id) FROM batches") == [(200, 1)]
    assert [place.sql(f"SELECT count(*) FROM {table}") for table in ("topics", "partitions")] == [[(1,)], [(1,)]]


def test_a_removal_that_a_crash_cut_short_is_found_again(place: Place) -> None:
    fill(place.log("gone"), 10)
    token = place.store.hide("gone")
    place.restart()
    assert place.store.removed() == {token: "gone"}


def test_a_store_without_topics_makes_no_file(place: Place) -> None:
    assert (place.store.removed(), place.store.partition_count("t")) == ({}, 0)
    assert place.store.removed() == {}
    assert not place.path.exists()


# -- integrity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 50, 99])
@pytest.mark.parametrize("at", [-1, 0, -10])
def test_a_changed_byte_is_refused_by_offset_and_the_other_records_are_served(
    place: Place, offset: int, at: int
) -> None:
    log = place.log("news", 3)
    append(log, numbered(100))
    place.damage(offset, at=at)
    if offset:
        assert log.read(0, 2**20).next_offset == offset
    with pytest.raises(CorruptRecordError, match=r"db\.sqlite, topic 'news', partition 3: ") as caught:
        log.read(offset, 2**20)
    assert caught.value.offset == offset
    assert [record.offset for record in read_all(log, offset + 1)] == list(range(offset + 1, 100))


@pytest.mark.parametrize("at", [-21, -22, -25, -26])
def test_a_changed_head_is_refused_and_what_is_behind_it_is_never_mistaken(place: Place, at: int) -> None:
    """The CRC, the length (twice), the offset: a wrong length hides the records behind it in the same batch."""
    log = place.log()
    append(log, numbered(10))
    append(log, numbered(5, first=10))
    place.damage(5, at=at)
    assert log.read(0, 2**20).next_offset == 5
    with pytest.raises(CorruptRecordError, match="offset 5"):
        log.read(5, 2**20)
    served = []
    for offset in range(6, 10):
        with suppress(CorruptRecordError):
            served.append((offset, log.read(offset, 2**20).base_offset))
    assert served in ([], [(offset, offset) for offset in range(6, 10)])
    assert [record.offset for record in read_all(log, 10)] == list(range(10, 15))


def test_a_changed_offset_in_a_compacted_batch_is_refused(place: Place) -> None:
    log = place.log(segment_bytes=1, cleanup="compact")
    append(log, [Record(b"%d" % number, b"k%d" % (number % 5), timestamp=NOW) for number in range(10)])
    clean(log, NOW)
    ((data,),) = place.sql("SELECT data FROM batches")
    changed = bytearray(cast("bytes", data))
    assert changed[7] == 5
    changed[7] = 3
    place.sql("UPDATE batches SET data = ?", bytes(changed))
    with pytest.raises(CorruptRecordError):
        log.read(0, 2**20)


@pytest.mark.parametrize("base", [0, 50, 90])
def test_a_missing_batch_is_refused_and_never_passed_over(place: Place, base: int) -> None:
    log = place.log()
    fill(log, 100)
    place.sql("DELETE FROM batches WHERE base_offset = ?", base)
    if base:
        assert log.read(0, 2**20).next_offset == base
    for offset in (base, base + 9):
        with pytest.raises(CorruptRecordError, match=f"offset {offset}.*missing"):
            log.read(offset, 2**20)
    assert len(read_all(log, base + 10)) == 90 - base


def test_a_start_names_a_lost_end_and_appends_behind_it(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    fill(place.log(), 100)
    place.sql("DELETE FROM batches WHERE base_offset >= 90")
    place.restart()
    log = place.log()
    assert [(bad.offset, bad.next_offset) for _, bad in log.recovery.bad] == [(90, 100)]
    assert "the records 90 to 99 are lost" in caplog.text
    assert append(log, numbered(1)) == 100
    with pytest.raises(CorruptRecordError, match="missing"):
        log.read(95, 1000)
    assert len(read_all(log, 100)) == 1


def test_a_large_batch_is_stored_in_several_rows_at_once(place: Place) -> None:
    log = place.log()
    sent = numbered(1000, bytes_each=1000)
    append(log, sent)
    assert place.sql("SELECT count(*) FROM batches") > [(3,)]
    assert payloads(read_all(log)) == payloads(sent)
    assert log.find_time(NOW + 700) == 700


def test_a_batch_can_be_read_from_any_record_up_to_any_record(place: Place) -> None:
    log = place.log()
    append(log, numbered(10, bytes_each=30))
    append(log, [Record(b"x" * number, timestamp=NOW + 10 + number) for number in range(10)])
    whole = log.read(0, 2**20).data
    for offset in range(20):
        for end in range(offset + 1, 21):
            chunk = log.read(offset, 2**20, end)
            assert (chunk.base_offset, chunk.next_offset) == (offset, end)
            assert chunk.data in whole
    log.trim(13)
    assert (log.first_offset, [record.offset for record in read_all(log)]) == (13, [13, 14, 15, 16, 17, 18, 19])
    with pytest.raises(OffsetOutOfRangeError):
        log.read(12, 1000)
    place.restart()
    log = place.log()
    assert (log.first_offset, [record.offset for record in read_all(log)]) == (13, [13, 14, 15, 16, 17, 18, 19])
    assert log.find_time(0) == 13


def test_compaction_merges_small_batches_without_a_hole(place: Place) -> None:
    log = place.log(segment_bytes=1, cleanup="compact")
    for number in range(100):
        append(log, [Record(b"%d" % number, b"k%d" % (number % 3), timestamp=NOW + number)])
    assert clean(log, NOW) > 0
    assert place.sql("SELECT base_offset, next_offset, count FROM batches") == [(0, 100, 3)]
    assert [record.offset for record in read_all(log)] == [97, 98, 99]
    assert log.size_bytes == len(log.read(0, 2**20).data)
    assert log.find_time(NOW + 98) == 98
    append(log, [Record(b"again", b"k0", timestamp=NOW)])
    clean(log, NOW)
    assert [record.offset for record in read_all(log)] == [97, 98, 100]
    assert log.read(0, 2**20, 50) == (b"", 50, 50)


def test_compaction_leaves_a_batch_that_is_trimmed_in_part(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    log = place.log(segment_bytes=1, cleanup="compact")
    for first in range(0, 30, 10):
        append(
            log, [Record(b"%d" % number, b"k%d" % (number % 5), timestamp=NOW) for number in range(first, first + 10)]
        )
    log.trim(4)
    clean(log, NOW)
    assert [record.offset for record in read_all(log)] == [4, 5, 6, 7, 8, 9, 25, 26, 27, 28, 29]
    assert "damaged" not in caplog.text


def test_compaction_leaves_a_damaged_range_and_the_tombstones_that_it_may_need(place: Place) -> None:
    log = place.log(segment_bytes=200, cleanup="compact", tombstone_seconds=1.0)
    for record in (Record(b"old", b"k", timestamp=NOW), Record(None, b"k", timestamp=NOW), *numbered(20)):
        append(log, [record])
    place.damage(0)
    clean(log, NOW + 10**6)
    assert read_all(log, 1)[0].key == b"k"


def test_where_compaction_has_looked_is_remembered_and_young_records_are_left_alone(place: Place) -> None:
    log = place.log(segment_bytes=500, cleanup="compact", compact_after_seconds=1.0)
    for number in range(200):
        append(log, [Record(b"%d" % number, b"key", timestamp=NOW + 100 * number)])
    log.flush()
    assert log.compacted_until == 0
    clean(log, NOW + 11_000)
    until = log.compacted_until
    assert 70 <= until <= 100
    found = [record.offset for record in read_all(log)]
    assert found == list(range(until - 1, 200))
    place.restart()
    assert place.log().compacted_until == until


# -- the disk ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_refuses_a_batch_as_a_whole_and_goes_on_when_there_is_room(place: Place) -> None:
    log = place.log()
    fill(log, 10)
    database = place.store._database

    def limit(pages: int) -> None:
        with database.write() as connection:
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

    limit(1)
    with pytest.raises(DiskFullError, match=r"db\.sqlite.*full"):
        append(log, numbered(1000, first=10, bytes_each=1000))
    assert (log.next_offset, len(read_all(log)), log.failed) == (10, 10, False)
    limit(10**6)
    fill(log, 1000, batch=100)
    assert len(read_all(log)) == 1010


def test_a_full_postgresql_is_told_as_a_full_disk(place: Place) -> None:
    store = DatabaseStore("postgresql://user@nowhere/bus", place.files, place.clock)
    with pytest.raises(DiskFullError, match="no space left"), store._database._translated("write"):
        raise psycopg.errors.DiskFull("could not extend file: no space left on device")


def test_after_a_failed_flush_nothing_is_appended_before_the_records_are_checked_and_moved(place: Place) -> None:
    log = place.log()
    fill(log, 10)
    assert log.flush() == 10
    fill(log, 10)
    place.files.failures = 1
    with pytest.raises(DiskError, match=r"flush of .*db\.sqlite: Input/output error"):
        log.flush()
    assert log.failed
    with pytest.raises(DiskError, match="not repaired"):
        append(log, numbered(1))
    with pytest.raises(DiskError, match="not repaired"):
        log.flush()
    assert len(read_all(log)) == 20
    log.recover_flush()
    assert os.path.getsize(f"{place.path}-wal") < 100_000
    assert (log.failed, log.next_offset, len(read_all(log))) == (False, 20, 20)
    fill(log, 5)
    assert log.flush() == 25


def test_a_failed_flush_concerns_every_partition_and_each_looks_for_itself(place: Place) -> None:
    logs = [place.log("t", number) for number in range(3)]
    for log in logs:
        fill(log, 5)
    place.files.failures = 1
    with pytest.raises(DiskError):
        logs[0].flush()
    assert [log.failed for log in logs] == [True, True, True]
    logs[1].recover_flush()
    assert [log.failed for log in logs] == [True, False, True]
    assert append(logs[1], numbered(1)) == 5
    for log in logs:
        log.recover_flush()
        assert log.flush() == log.next_offset


def test_what_the_system_lost_with_a_failed_flush_is_gone_and_its_offsets_are_given_again(place: Place) -> None:
    log = place.log(segment_bytes=500)
    fill(log, 100)
    log.flush()
    for _ in range(10):
        fill(log, 10)
    place.files.failures = 1
    with pytest.raises(DiskError):
        log.flush()
    place.damage(155)
    log.recover_flush()
    assert (log.next_offset, len(read_all(log))) == (150, 150)
    fill(log, 1)
    place.restart()
    assert [record.offset for record in read_all(place.log(segment_bytes=500))] == list(range(151))


def test_one_flush_of_the_disk_serves_all_partitions(place: Place) -> None:
    logs = [place.log("t", number) for number in range(8)]
    for log in logs:
        fill(log, 10)
    before = place.files.flushes
    assert [log.flush() for log in logs] == [10] * 8
    assert place.files.flushes == before + 1


def test_the_wal_is_folded_into_the_database_under_light_load(place: Place, tmp_path: Path) -> None:
    def in_database_alone() -> int:
        alone = tmp_path / f"alone{place.clock.monotonic()}"
        alone.mkdir()
        shutil.copy(place.path, alone)
        with closing(sqlite3.connect(alone / "db.sqlite")) as connection:
            return int(connection.execute("SELECT coalesce(sum(count), 0) FROM batches").fetchone()[0])

    log = place.log()
    place.clock.advance(FOLD_SECONDS)
    fill(log, 10)
    log.flush()
    assert in_database_alone() == 10  # a flush does it
    fill(log, 10)
    log.flush()
    place.clock.advance(FOLD_SECONDS / 2)
    clean(log, NOW)
    assert in_database_alone() == 10
    place.clock.advance(FOLD_SECONDS / 2)
    clean(log, NOW)
    assert in_database_alone() == 20  # the cleaner does it when nobody flushes


def test_what_was_flushed_survives_the_loss_of_all_that_was_not(place: Place, tmp_path: Path) -> None:
    log = place.log()
    fill(log, 300)
    log.flush()
    flushed_bytes = place.files.durable_bytes
    fill(log, 300)
    after = tmp_path / "after"
    after.mkdir()
    shutil.copy(place.path, after / "db.sqlite")
    with open(f"{place.path}-wal", "rb") as wal:
        (after / "db.sqlite-wal").write_bytes(wal.read(flushed_bytes))
    found = Place(after)
    assert len(read_all(found.log())) == 300
    found.store.close()


def test_what_was_appended_survives_a_killed_process_although_nobody_flushed(tmp_path: Path) -> None:
    program = (
        "import sys; from babelbus.clock import SystemClock; from babelbus.storage.contract import LogSettings\n"
        "from babelbus.storage.sql.store import DatabaseStore; from babelbus.storage.files import LocalFiles\n"
        "from babelbus.records.format import encode_payloads\n"
        "log = DatabaseStore(sys.argv[1], LocalFiles(), SystemClock()).open_partition('t', 0, LogSettings())\n"
        "while True:\n"
        "    log.append(encode_payloads([b'x' * 90] * 40, [1] * 40, log.next_offset))\n"
        "    print(log.durable(sync=False), flush=True)"
    )
    url = f"sqlite:///{tmp_path}/db.sqlite"
    with subprocess.Popen(
        [sys.executable, "-c", program, url], cwd=ROOT, env={**os.environ, "PYTHONPATH": "src"}, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        for _ in range(60):
            acknowledged = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split(b"\n")
        acknowledged = max([acknowledged, *(int(line) for line in rest[:-1])])
    store = DatabaseStore(url, LocalFiles(), ManualClock(NOW))
    log = open_log(store, "t", 0, LogSettings())
    assert log.next_offset >= acknowledged
    assert [record.offset for record in read_all(log)] == list(range(log.next_offset))
    store.close()


def test_appending_reading_flushing_and_cleaning_go_on_side_by_side(place: Place) -> None:
    log = place.log(segment_bytes=4_000, retention_bytes=40_000)
    done = threading.Event()
    failures: list[BaseException] = []

    def repeat(work: object) -> None:
        try:
            while not done.is_set():
                work()  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        offset = log.first_offset
        try:
            found = read_all(log, max(offset, log.next_offset - 100))
        except OffsetOutOfRangeError:
            return  # retention has overtaken the reader
        numbers = [record.offset for record in found]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True

    threads = [threading.Thread(target=repeat, args=(work,)) for work in (log.flush, lambda: clean(log, NOW), read)]
    for thread in threads:
        thread.start()
    fill(log, 3_000, batch=30)
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (log.flush(), log.next_offset) == (3_000, 3_000)


def test_rows_of_producers_that_nobody_remembers_do_not_pile_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_log, "PRODUCER_ROWS_MAX", 100)
    log = place.log()
    for number in range(150):
        log.append(mark_producer(encode_batch(numbered(1), number), 7, number))
        log.producers.add(7, number, 1, number)
    log.checkpoint()
    known = log.producers.snapshot()
    assert place.sql("SELECT count(*) FROM producers") == [(64,)]
    place.restart()
    assert place.log().producers.snapshot() == known


# -- lost ends, stale writers ------------------------------------------------------------------------------------------


def test_a_damaged_spot_in_the_wal_is_noticed_and_no_offset_is_given_twice(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite drops all that is behind the spot, without a word."""
    log = place.log("news", 2)
    for number in range(100):
        append(log, numbered(1, first=number))
        log.flush()
    after = place.copy(tmp_path / "after")
    wal = Path(f"{after.path}-wal")
    content = bytearray(wal.read_bytes())
    content[len(content) // 2] ^= 1
    wal.write_bytes(content)
    after.log("other", 0)
    opened = after.log("news", 2)
    assert opened.next_offset == 100
    ((_, bad),) = opened.recovery.bad
    assert 0 < bad.offset < bad.next_offset == 100
    assert f"topic 'news', partition 2: the records {bad.offset} to 99 are lost" in caplog.text
    assert "put back the whole copy" in caplog.text
    assert opened.read(0, 2**20).next_offset == bad.offset
    with pytest.raises(CorruptRecordError, match="missing"):
        opened.read(bad.offset, 1000)
    assert append(opened, numbered(1, first=100)) == 100
    after.store.close()


def test_a_wal_whose_damage_hides_even_the_topic_does_not_start_at_0_again(place: Place, tmp_path: Path) -> None:
    log = place.log()
    fill(log, 50)
    log.flush()
    after = place.copy(tmp_path / "after")
    Path(f"{after.path}-wal").write_bytes(b"")
    assert after.log().next_offset == 50
    after.store.close()


def test_a_removal_is_no_lost_end(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    log = place.log()
    fill(log, 50)
    log.flush()
    log.close()
    place.store.erase(place.store.hide("t"))
    assert (place.log().next_offset, caplog.text) == (0, "")


def test_ends_are_kept_for_many_partitions_and_a_damaged_slot_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = str(tmp_path / "ends"), ManualClock(NOW)
    ends = Ends(LocalFiles(), path, clock)
    ends.load()
    for number in range(100):
        ends.put("münchen/straße", number, number + 1)
    ends.remove("münchen/straße", 7)
    ends.put("new", 0, 5)  # takes the free slot
    ends.close()
    assert os.path.getsize(path) == 100 * 32
    again = Ends(LocalFiles(), path, clock)
    again.load()
    assert [again.get("münchen/straße", number) for number in (0, 7, 99)] == [1, 0, 100]
    assert again.get("new", 0) == 5
    content = bytearray(Path(path).read_bytes())
    content[20] ^= 1
    Path(path).write_bytes(content)
    again.load()
    assert "slot 0 is damaged" in caplog.text
    assert [again.get("münchen/straße", number) for number in (0, 1)] == [0, 2]


def test_ends_are_flushed_once_a_second_and_before_a_removal() -> None:
    files, clock = WatchedFiles(), ManualClock(NOW)
    with tempfile.TemporaryDirectory() as folder:
        ends = Ends(files, f"{folder}/ends", clock)
        ends.load()
        for number in range(10):
            ends.put("t", 0, number)
            ends.sync()
        assert files.flushes == 0
        clock.advance(1.0)
        for number in (10, 11):
            ends.put("t", 0, number)
            ends.sync()
        assert files.flushes == 1
        ends.remove("t", 0)
        assert files.flushes == 2
        ends.close()


def test_ends_that_cannot_be_written_are_logged_and_hold_up_nobody(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    log = place.log()
    os.mkdir(f"{place.path}.ends")
    for number in range(3):
        fill(log, 10)
        assert log.flush() == 10 * (number + 1)
    assert caplog.text.count("a damaged WAL may pass unnoticed") == 1


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_stale_writer_is_refused_and_changes_nothing(kind: str, place: Place, request: pytest.FixtureRequest) -> None:
    store: DatabaseStore = place.store if kind == "sqlite" else request.getfixturevalue("remote")
    old = open_log(store, "t", 0, LogSettings(cleanup="compact"))
    fill(old, 10)
    new = open_log(store, "t", 0, LogSettings())
    fill(new, 10)
    for write in (lambda: fill(old, 10), lambda: old.trim(5)):
        with pytest.raises(StaleWriterError, match="epoch 2, ours is 1"):
            write()
    assert (old.failed, new.next_offset, len(read_all(new))) == (False, 20, 20)
    assert append(new, numbered(1)) == 20


# -- ownership, versions, secrets --------------------------------------------------------------------------------------


def test_a_second_server_on_the_same_file_is_refused(place: Place) -> None:
    place.log()
    with pytest.raises(FolderLockedError, match=r"db\.sqlite is in use by process [0-9]+; one server"):
        open_log(place.make(), "t", 0, LogSettings())
    place.restart()
    assert place.log().next_offset == 0


@pytest.mark.parametrize("version", [1, 99])
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_tables_of_another_version_are_refused_and_not_touched(
    kind: str, version: int, place: Place, request: pytest.FixtureRequest
) -> None:
    change = f"UPDATE babelbus SET value = {version} WHERE name = 'schema'"
    if kind == "sqlite":
        place.log()
        place.store.close()
        place.sql(change)
        store = place.make()
    else:
        server: PostgresServer = request.getfixturevalue("server")
        remote: DatabaseStore = request.getfixturevalue("remote")
        open_log(remote, "t", 0, LogSettings())
        remote.close()
        server.sql(change)
        store = DatabaseStore(server.url(), LocalFiles(), ManualClock(NOW))
    with pytest.raises(SchemaVersionError, match=f"version {version}, this Babelbus knows version 2: export"):
        open_log(store, "t", 0, LogSettings())


def test_a_database_with_tables_of_somebody_else_is_not_touched(place: Place) -> None:
    place.sql("CREATE TABLE batches (id INTEGER)")
    with pytest.raises(SchemaVersionError, match="a table 'batches' that is not ours"):
        place.log()
    assert place.sql("SELECT name FROM sqlite_master") == [("batches",)]


def test_a_file_that_is_no_database_is_refused_by_name(place: Place) -> None:
    place.path.write_bytes(b"not a database" * 1000)
    with pytest.raises(DiskError, match=r"db\.sqlite: file is not a database"):
        place.log()


@pytest.mark.parametrize(
    "url",
    ["", "db.sqlite", "sqlite://", "sqlite:///:memory:", "mysql://root@localhost/x", f"postgresql://u:{SECRET}@h:x/"],
)
def test_a_url_that_is_none_is_refused_with_examples_and_without_its_secret(url: str) -> None:
    with pytest.raises(DatabaseUrlError) as caught:
        DatabaseStore(url, LocalFiles(), ManualClock(NOW))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}@/nowhere?host=/nonexistent",
        f"postgresql://me@/nowhere?host=/nonexistent&password={SECRET}",
        f"postgresql://me:{SECRET}@/nowhere?host=/nonexistent&no_such_option={SECRET}",
    ],
)
def test_a_database_that_cannot_be_reached_is_a_disk_error_without_the_password(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = DatabaseStore(url, LocalFiles(), ManualClock(NOW))
    with pytest.raises(DiskError, match="opening of postgresql:///nowhere") as caught:
        store.removed()
    assert SECRET not in f"{caught.value} {store.name} {caplog.text}"
    assert caught.value.__cause__ is None


# -- PostgreSQL --------------------------------------------------------------------------------------------------------


def test_a_second_server_on_the_same_schema_is_refused(remote: DatabaseStore, server: PostgresServer) -> None:
    open_log(remote, "t", 0, LogSettings())
    with pytest.raises(FolderLockedError, match="in use by another server"):
        DatabaseStore(server.url(), LocalFiles(), ManualClock(NOW)).removed()
    server.sql("CREATE SCHEMA other")
    other = DatabaseStore(server.url("other"), LocalFiles(), ManualClock(NOW))
    assert other.removed() == {}
    other.close()
    server.sql("DROP SCHEMA other CASCADE")


END_SESSIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'babelbus'"


def test_a_lost_connection_is_made_again_and_nothing_is_lost_or_doubled(
    remote: DatabaseStore, server: PostgresServer
) -> None:
    log = open_log(remote, "t", 0, LogSettings())
    fill(log, 20)
    server.sql(END_SESSIONS)
    with pytest.raises(DiskError):
        append(log, numbered(5, first=20))
    assert log.failed
    assert len(read_all(log)) == 20
    with pytest.raises(DiskError, match="not repaired"):
        append(log, numbered(5, first=20))
    log.recover_flush()
    assert append(log, numbered(5, first=20)) == 20
    assert log.flush() == 25
    assert payloads(read_all(log)) == payloads(numbered(25))


def test_a_connection_lost_before_a_flush_makes_the_flush_fail(remote: DatabaseStore, server: PostgresServer) -> None:
    log = open_log(remote, "t", 0, LogSettings())
    fill(log, 20)
    server.sql(END_SESSIONS)
    with pytest.raises(DiskError):
        log.flush()
    log.recover_flush()
    assert log.flush() == 20


@pytest.mark.parametrize("refused_once", [False, True])
def test_a_commit_that_was_in_doubt_is_taken_back_before_the_batch_is_stored_again(
    remote: DatabaseStore, server: PostgresServer, refused_once: bool
) -> None:
    log = open_log(remote, "t", 0, LogSettings())
    fill(log, 20)
    late = bytes(encode_batch(numbered(10, first=20), 20).data)
    with psycopg.connect(server.url()) as lost:  # a session that we have lost committed after all
        values = (20, 30, 10, NOW, NOW, NOW, len(late), late)
        lost.execute("INSERT INTO batches SELECT id, %s, %s, %s, %s, %s, %s, %s, NULL, %s FROM partitions", values)
        lost.execute("UPDATE partitions SET next_offset = 30")
    with pytest.raises(DiskError):
        append(log, numbered(3, first=20))
    if refused_once:
        with psycopg.connect(server.url()) as stranger:
            stranger.execute("LOCK TABLE batches IN SHARE MODE")
            with pytest.raises(DiskError, match="lock timeout"):
                log.recover_flush()
        assert log.failed
    log.recover_flush()
    assert append(log, numbered(3, first=20)) == 20
    assert payloads(read_all(log)) == payloads(numbered(23))


def test_a_crash_of_postgresql_loses_nothing_that_was_flushed_and_leaves_no_hole(
    remote: DatabaseStore, server: PostgresServer
) -> None:
    log = open_log(remote, "t", 0, LogSettings(segment_bytes=1_000))
    fill(log, 100)
    assert log.flush() == 100
    fill(log, 50)
    server.kill()
    with pytest.raises(DiskError):
        log.flush()
    with pytest.raises(StorageError):
        log.recover_flush()
    assert log.failed
    server.start()
    log.recover_flush()
    assert 100 <= log.next_offset <= 150
    fill(log, 10)
    assert log.flush() == log.next_offset
    assert payloads(read_all(log)) == payloads(numbered(log.next_offset))


def test_a_table_that_somebody_has_locked_refuses_a_batch_and_takes_it_later(
    remote: DatabaseStore, server: PostgresServer
) -> None:
    log = open_log(remote, "t", 0, LogSettings())
    fill(log, 10)
    with psycopg.connect(server.url()) as stranger:
        stranger.execute("LOCK TABLE batches IN SHARE MODE")
        with pytest.raises(DiskError, match="lock timeout"):
            append(log, numbered(1, first=10))
    assert not log.failed
    fill(log, 5)
    assert payloads(read_all(log)) == payloads(numbered(15))


def test_postgresql_cannot_serve_a_row_that_was_changed(remote: DatabaseStore, server: PostgresServer) -> None:
    log = open_log(remote, "t", 0, LogSettings())
    fill(log, 10)
    server.sql("UPDATE batches SET data = overlay(data PLACING 'x' FROM octet_length(data) - 10)")
    with pytest.raises(CorruptRecordError, match="offset 9"):
        log.read(9, 1000)


def test_errors_of_postgresql_show_neither_statement_nor_values(remote: DatabaseStore) -> None:
    open_log(remote, "t", 0, LogSettings())
    with pytest.raises(DiskError) as caught, remote._database.write() as connection:
        connection.execute(text("SELECT :value::no_such_type"), {"value": SECRET})
    assert SECRET not in str(caught.value)
