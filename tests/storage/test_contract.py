"""What every storage engine must do. A new engine is one more entry of ENGINES."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from babelbus.config import JetstreamSettings
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import encode_batch
from babelbus.records.record import Record
from babelbus.storage.contract import LogSettings, PartitionLog, Store
from babelbus.storage.disk.store import FolderStore
from babelbus.storage.errors import OffsetOutOfRangeError, StaleWriterError
from babelbus.storage.files import LocalFiles
from babelbus.storage.memory import MemoryFiles
from babelbus.storage.sql.store import DatabaseStore
from tests.storage.helpers import append, number_of, numbered, read_all
from tests.storage.helpers import fill as append_numbered
from tests.support.clock import ManualClock
from tests.support.postgres import PostgresServer

NOW = 1_700_000_000_000
TOPICS = ["news", "plant/line1", "münchen/straße", "a b", ".hidden", "..", "%2F", "#x", "x" * 249]

# Each gives a store on a folder; called again with the same folder it is the store after a restart.
ENGINES: dict[str, Callable[[str, ManualClock], Store]] = {
    "disk": lambda folder, clock: FolderStore(LocalFiles(), folder, clock),
    "memory": lambda folder, clock: FolderStore(_memory(folder), folder, clock),
    "sqlite": lambda folder, clock: DatabaseStore(f"sqlite:///{folder}/db.sqlite", LocalFiles(), clock),
    "postgresql": lambda url, clock: DatabaseStore(url, LocalFiles(), clock),
    "jetstream": lambda place, clock: _jetstream(place, clock),
}
_memories: dict[str, MemoryFiles] = {}


def _memory(folder: str) -> MemoryFiles:
    return _memories.setdefault(folder, MemoryFiles())


def _jetstream(place: str, clock: ManualClock) -> Store:
    from babelbus.storage.jetstream import JetstreamStore

    url, prefix, folder = place.split(" ")
    return JetstreamStore(JetstreamSettings(url, prefix=prefix, replicas=1, shards=2), LocalFiles(), folder, clock)


def fill(log: PartitionLog, count: int) -> None:
    """Append numbered records, ten in a write: an engine may write what is queued together."""
    for first in range(0, count, 10):
        append_numbered(log, min(10, count - first))
        log.durable(sync=False)


class Engine:
    """A store that can be opened again, as a restart does."""

    def __init__(self, make: Callable[[str, ManualClock], Store], folder: str) -> None:
        self._make = make
        self._folder = folder
        self.clock = ManualClock(NOW)
        self.store = make(folder, self.clock)

    def log(self, topic: str = "t", partition: int = 0, **settings: object) -> PartitionLog:
        return self.store.open_partition(topic, partition, LogSettings(**settings))  # type: ignore[arg-type]

    def restart(self) -> None:
        self.store.close()
        self.store = self._make(self._folder, self.clock)


_schemas = itertools.count()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    place = str(tmp_path)
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        schema = f"test{next(_schemas)}"
        server.sql(f"CREATE SCHEMA {schema}")
        place = server.url(schema)
    if request.param == "jetstream":
        place = f"{request.getfixturevalue('nats').url} test{next(_schemas)} {tmp_path}"
    engine = Engine(ENGINES[request.param], place)
    yield engine
    engine.store.close()
    _memories.clear()


# -- a log -------------------------------------------------------------------------------------------------------------


def test_a_new_log_is_empty_and_begins_at_0(engine: Engine) -> None:
    log = engine.log()
    assert (log.first_offset, log.next_offset, log.size_bytes) == (0, 0, 0)
    assert log.read(0, 1000).data == b""
    assert log.find_time(0) is None


def test_what_was_appended_comes_back_in_order_with_dense_offsets(engine: Engine) -> None:
    log = engine.log()
    sent = [*numbered(100), Record(None, b"key", ((b"h", None), (b"", b"v")), NOW), Record(b"", b"", (), NOW)]
    assert append(log, sent[:60]) == 0
    assert append(log, sent[60:]) == 60
    log.durable(sync=False)
    found = read_all(log)
    assert [record.offset for record in found] == list(range(102))
    assert [(one.payload, one.key, one.headers, one.timestamp) for one in found] == [
        (one.payload, one.key, one.headers, one.timestamp) for one in sent
    ]


def test_a_closed_log_is_the_same_when_it_is_opened_again(engine: Engine) -> None:
    log = engine.log(segment_bytes=20_000)
    fill(log, 3000)
    before = read_all(log)
    log.close()
    engine.restart()
    again = engine.log(segment_bytes=20_000)
    assert (again.next_offset, read_all(again)) == (3000, before)
    assert append(again, numbered(1, first=3000)) == 3000


def test_a_log_that_nobody_closed_is_the_same_when_it_is_opened_again(engine: Engine) -> None:
    log = engine.log(segment_bytes=20_000)
    fill(log, 3000)
    before = read_all(log)
    engine.restart()
    assert read_all(engine.log(segment_bytes=20_000)) == before


def test_durable_says_up_to_where_everything_is_durable(engine: Engine) -> None:
    log = engine.log()
    assert log.durable() == 0
    fill(log, 10)
    assert log.durable(sync=False) == 10
    assert log.durable() == 10


@pytest.mark.parametrize("segment_bytes", [2_000, 2**20])
def test_a_read_gives_whole_records_within_its_bounds(engine: Engine, segment_bytes: int) -> None:
    log = engine.log(segment_bytes=segment_bytes)
    fill(log, 2500)
    size = log.size_bytes // 2500
    for offset in (0, 1, 1023, 1024, 2499):
        chunk = log.read(offset, 10 * size)
        assert chunk.base_offset == offset
        assert 0 < len(chunk.data) <= 10 * size
        assert log.read(offset, 10**9, offset + 1).next_offset == offset + 1
    assert log.read(100, 10**9, 100) == (b"", 100, 100)
    assert log.read(2500, 1000) == (b"", 2500, 2500)


def test_a_record_larger_than_the_bound_is_given_alone(engine: Engine) -> None:
    log = engine.log()
    append(log, [Record(b"x" * 500, timestamp=NOW), Record(b"y" * 500, timestamp=NOW)])
    log.durable()
    for bytes_max in (0, 100):
        chunk = log.read(0, bytes_max)
        assert (len(chunk.data) > 500, chunk.base_offset, chunk.next_offset) == (True, 0, 1)


@pytest.mark.parametrize("offset", [-1, 11, 2**62])
def test_an_offset_outside_is_refused_with_the_range(engine: Engine, offset: int) -> None:
    log = engine.log()
    fill(log, 10)
    with pytest.raises(OffsetOutOfRangeError, match=r"\[0, 10\]") as caught:
        log.read(offset, 1000)
    assert (caught.value.first, caught.value.end) == (0, 10)


def test_a_time_is_found_although_times_do_not_rise(engine: Engine) -> None:
    log = engine.log(segment_bytes=20_000)
    times = [NOW + (number * 7919) % 5000 for number in range(5000)]
    for first in range(0, 5000, 100):
        part = [Record(b"x", timestamp=time) for time in times[first : first + 100]]
        append(log, part)
    log.durable(sync=False)
    for asked in (0, NOW, NOW + 1, NOW + 2500, NOW + 4999):
        assert log.find_time(asked) == next(number for number, time in enumerate(times) if time >= asked)
    assert log.find_time(NOW + 5000) is None


def test_retention_by_age_removes_old_records_and_keeps_offsets(engine: Engine) -> None:
    log = engine.log(segment_bytes=5_000, retention_seconds=10.0)
    fill(log, 500)
    assert log.clean(NOW + 5_000) == 0
    assert log.clean(NOW + 60_000) > 0
    assert (log.first_offset, log.next_offset) == (500, 500)
    with pytest.raises(OffsetOutOfRangeError):
        log.read(0, 1000)
    assert append(log, numbered(1, first=500)) == 500


def test_retention_by_size_keeps_at_least_that_much_of_the_end(engine: Engine) -> None:
    log = engine.log(segment_bytes=5_000, retention_bytes=12_000)
    fill(log, 1000)
    log.clean(NOW)
    assert 12_000 <= log.size_bytes < 20_000
    found = read_all(log)
    assert [record.offset for record in found] == list(range(log.first_offset, 1000))


def test_compaction_keeps_the_last_record_of_each_key_and_those_without(engine: Engine) -> None:
    log = engine.log(segment_bytes=3_000, cleanup="compact")
    sent = [Record(b"%d" % number, b"k%d" % (number % 10), timestamp=NOW) for number in range(1000)]
    sent[3] = Record(b"no key", timestamp=NOW)
    for first in range(0, 1000, 50):
        append(log, sent[first : first + 50])
        log.durable(sync=False)
    assert log.clean(NOW) > 0
    found = read_all(log)
    assert [record.offset for record in found] == sorted({record.offset for record in found})
    last = {record.key: record.payload for record in found if record.key is not None}
    assert last == {b"k%d" % number: b"%d" % (990 + number) for number in range(10)}
    assert any(record.payload == b"no key" for record in found)
    assert len(found) < 300
    chunk = log.read(10, 10**6)
    assert chunk.base_offset > 10
    log.close()
    engine.restart()
    assert read_all(engine.log(segment_bytes=3_000, cleanup="compact")) == found


def test_a_tombstone_removes_its_key_and_after_a_while_itself(engine: Engine) -> None:
    log = engine.log(segment_bytes=500, cleanup="compact", tombstone_seconds=60.0)
    for value in (b"v", None):
        append(log, [Record(value, b"gone", timestamp=NOW)])
        log.durable(sync=False)
    fill(log, 100)
    log.clean(NOW)
    assert [one.payload for one in read_all(log) if one.key == b"gone"] == [None]
    fill(log, 100)
    log.clean(NOW + 61_000)
    assert [one for one in read_all(log) if one.key == b"gone"] == []


def test_producers_are_remembered_after_a_restart(engine: Engine) -> None:
    from babelbus.records.format import mark_producer, rebase

    log = engine.log()
    fill(log, 5)
    batch = mark_producer(encode_batch(numbered(3)), 77, 40)
    log.append(rebase(batch, 5))
    log.producers.add(77, 40, 3, 5)
    log.durable(sync=False)
    before = log.producers.snapshot()
    for close in (False, True):
        if close:
            log.close()
        engine.restart()
        log = engine.log()
        assert log.producers.snapshot() == before


# -- a store -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", TOPICS)
def test_any_name_of_a_topic_comes_back_as_it_is(engine: Engine, topic: str) -> None:
    if isinstance(engine.store, FolderStore):
        engine.store.save_settings(topic, b"{}")
    fill(engine.log(topic, 2), 3)
    engine.restart()
    if isinstance(engine.store, FolderStore):
        assert engine.store.topics() == [topic]
        assert engine.store.load_settings(topic) == b"{}"
        assert engine.store.load_settings("nobody") is None
    assert engine.store.partition_count(topic) == 3
    assert engine.store.partition_count("nobody") == 0
    assert engine.log(topic, 2).next_offset == 3


def test_a_hidden_topic_is_gone_and_its_name_begins_anew(engine: Engine) -> None:
    log = engine.log("t")
    fill(log, 10)
    log.close()
    token = engine.store.hide("t")
    assert engine.store.partition_count("t") == 0
    engine.restart()
    assert engine.store.partition_count("t") == 0
    engine.store.erase(token)
    engine.store.erase(token)
    assert engine.log("t").next_offset == 0


# -- one writer, bad days ----------------------------------------------------------------------------------------------


def test_a_partition_that_is_opened_again_is_taken_from_its_writer(engine: Engine) -> None:
    stale = engine.log()
    fill(stale, 3)
    stale.durable()
    writer = engine.log()
    with pytest.raises(StaleWriterError):
        append(stale, numbered(1, first=3))
    assert append(writer, numbered(1, first=3)) == 3
    assert writer.durable() == 4
    assert len(read_all(writer)) == 4


def test_readers_go_on_while_the_writer_appends_flushes_and_removes(engine: Engine) -> None:
    log = engine.log(segment_bytes=2_000)
    fill(log, 200)
    stop, failures = threading.Event(), list[BaseException]()

    def read() -> None:
        try:
            while not stop.is_set():
                offset = log.first_offset
                while offset < log.first_offset + 150:
                    try:
                        chunk = log.read(offset, 700, 200)
                    except OffsetOutOfRangeError:  # the writer has removed it
                        break
                    found = [record.offset for record in iterate(decode_chunk(chunk.data))]
                    assert found == list(range(chunk.base_offset, chunk.next_offset))
                    if chunk.next_offset == offset:
                        break
                    offset = chunk.next_offset
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for first in range(200, 600, 10):
        append(log, numbered(10, first=first))
        log.durable(sync=first % 100 == 0)
        if first % 50 == 0:
            log.trim(first - 180)
    stop.set()
    for reader in readers:
        reader.join()
    assert failures == []
    assert (log.first_offset > 200, log.next_offset) == (True, 600)


def test_trim_removes_whole_parts_below_an_offset_and_no_record_above(engine: Engine) -> None:
    log = engine.log(segment_bytes=2_000)
    fill(log, 300)
    assert log.trim(0) == 0
    assert log.trim(200) > 0
    assert 0 < log.first_offset <= 200
    assert [number_of(record) for record in read_all(log)] == list(range(log.first_offset, 300))
    log.close()
    engine.restart()
    assert engine.log(segment_bytes=2_000).next_offset == 300


def test_what_was_durable_is_there_when_the_log_was_closed_and_opened_again(engine: Engine) -> None:
    log = engine.log()
    for first in range(0, 30, 10):
        append(log, numbered(10, first=first))
        log.durable()
    append(log, numbered(5, first=30))
    log.close()  # which makes the rest durable
    engine.restart()
    again = engine.log()
    assert [number_of(record) for record in read_all(again)] == list(range(35))
    assert again.durable() == 35


def test_the_parts_hold_all_records_without_a_gap(engine: Engine) -> None:
    log = engine.log(segment_bytes=1024)
    assert [part.newest_ms for part in log.parts()] == [-1]
    fill(log, 40)
    log.durable()
    parts = log.parts()
    assert len(parts) == log.part_count
    assert (parts[0].base_offset, parts[-1].next_offset) == (log.first_offset, log.next_offset)
    assert [part.base_offset for part in parts[1:]] == [part.next_offset for part in parts[:-1]]
    assert sum(part.size_bytes for part in parts) == log.size_bytes
    assert all(part.newest_ms >= 0 for part in parts)
    log.close()
