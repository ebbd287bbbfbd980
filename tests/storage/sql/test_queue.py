"""What is queued for a database: bounded, in order, written together, and refused while the database is away."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from babelbus.core.access import SERVER
from babelbus.core.broker import Broker
from babelbus.core.settings import TopicSettings
from babelbus.metrics import Metrics
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk.store import FolderStore
from babelbus.storage.errors import BackendBusyError, DiskError, StaleWriterError
from babelbus.storage.files import LocalFiles
from babelbus.storage.memory import MemoryFiles
from babelbus.storage.sql.log import DatabaseLog
from babelbus.storage.sql.queue import QueuedLog
from babelbus.storage.sql.store import DatabaseStore
from tests.storage.helpers import NOW, append, number_of, numbered, read_all
from tests.support.bus import done, events, in_loop, publish, stored
from tests.support.clock import ManualClock
from tests.support.postgres import PostgresServer

END_SESSIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'babelbus'"


MADE: list[DatabaseStore] = []


@pytest.fixture(autouse=True)
def close_stores() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


def make(url: str, **options: int) -> DatabaseStore:
    MADE.append(DatabaseStore(url, LocalFiles(), ManualClock(NOW), **options))
    return MADE[-1]


def open_log(folder: Path, **options: int) -> QueuedLog:
    return make(f"sqlite:///{folder}/db.sqlite", **options).open_partition("t", 0, LogSettings())


def test_what_is_queued_has_offsets_and_is_stored_by_the_next_write(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert [append(log, numbered(3, first=first)) for first in (0, 3)] == [0, 3]
    assert log.next_offset == 6
    assert log.read(0, 1000).data == b""
    assert log.durable(sync=False) == 6
    assert [number_of(record) for record in read_all(log)] == list(range(6))


def test_a_full_queue_refuses_until_it_is_written(tmp_path: Path) -> None:
    log = open_log(tmp_path, queue_bytes_max=400)
    append(log, numbered(5))
    append(log, numbered(1, first=5))
    with pytest.raises(BackendBusyError, match="bytes wait for the database"):
        append(log, numbered(5, first=6))
    assert log.durable() == 6
    assert append(log, numbered(50, first=6, bytes_each=100)) == 6  # a large batch goes alone
    assert log.durable() == 56


def test_what_the_database_refuses_takes_what_is_queued_behind_it_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    append(log, numbered(1))
    log.durable()
    append(log, numbered(1, first=1))
    append(log, numbered(1, first=2))
    with monkeypatch.context() as patch:
        patch.setattr(DatabaseLog, "append", refuse)
        with pytest.raises(DiskError):
            log.durable()
    assert log.next_offset == 1
    assert append(log, numbered(1, first=1)) == 1
    assert log.durable() == 2


def refuse(_log: DatabaseLog, _batch: object) -> int:
    raise DiskError("the database is away")


def test_a_writer_that_was_replaced_is_refused(tmp_path: Path) -> None:
    store = make(f"sqlite:///{tmp_path}/db.sqlite")
    log = store.open_partition("t", 0, LogSettings())
    append(log, numbered(1))
    log.durable()
    again = store.open_partition("t", 0, LogSettings())
    with pytest.raises(StaleWriterError):
        append(log, numbered(1, first=1))
    assert append(again, numbered(1, first=1)) == 1


# -- under the broker --------------------------------------------------------------------------------------------------


def broker_on(store: DatabaseStore, catalog: MemoryFiles) -> Broker:
    """A broker that keeps its topics of engine `db` in this store."""
    disk = FolderStore(catalog, "data", ManualClock(NOW))
    broker = Broker(
        cast("Any", {"disk": disk, "db": store}),
        defaults=TopicSettings(),
        checkpoint_bytes=2**20,
        clock=ManualClock(NOW),
        metrics=Metrics(),
        loop=asyncio.get_running_loop(),
    )
    broker.open()
    return broker


@pytest.mark.parametrize("ack", ["accepted", "written", "flushed"])
@in_loop
async def test_a_broker_publishes_reads_and_starts_again_on_a_database(ack: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/db.sqlite"
    catalog = MemoryFiles()
    broker = broker_on(make(url), catalog)
    topic = await broker.create_topic("news", 2, {"ack": ack, "engine": "db"}, principal=SERVER)
    receipts = await done(publish(topic, events(*(b"%d" % number for number in range(100)))))
    assert [receipt.error for receipt in receipts] == [None, None]
    for partition in topic.partitions:
        await partition.wait(partition.next_offset - 1)
    kept = [await stored(partition) for partition in topic.partitions]
    assert sorted(int(one or b"-1") for part in kept for one in part) == list(range(100))
    await broker.close()
    broker = broker_on(make(url), catalog)
    assert [await stored(partition) for partition in broker.topic("news").partitions] == kept
    await broker.remove_topic("news", principal=SERVER)
    await broker.close()
    assert make(url).partition_count("news") == 0


@in_loop
async def test_a_database_that_lacks_a_topic_of_the_catalog_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Perhaps it is the wrong one: publishers would fill it, and groups begin anew."""
    url = f"sqlite:///{tmp_path}/db.sqlite"
    catalog = MemoryFiles()
    broker = broker_on(make(url), catalog)
    await done(publish(await broker.create_topic("news", 1, {"engine": "db"}, principal=SERVER), events(b"x")))
    await broker.close()
    (tmp_path / "elsewhere").mkdir()
    broker = broker_on(make(f"sqlite:///{tmp_path}/elsewhere/db.sqlite"), catalog)
    assert "topic 'news': 1 of its 1 partitions are not there (engine db)" in caplog.text
    await broker.close()
    caplog.clear()
    broker = broker_on(make(url), catalog)
    assert await stored(broker.topic("news").partitions[0]) == [b"x"]
    assert "news" not in caplog.text
    await broker.close()


@in_loop
async def test_publishers_go_on_by_themselves_after_a_lost_connection(postgres: PostgresServer) -> None:
    broker = broker_on(DatabaseStore(postgres.url(), LocalFiles(), ManualClock(NOW)), MemoryFiles())
    topic = await broker.create_topic("news", 1, {"ack": "flushed", "engine": "db"}, principal=SERVER)
    await done(publish(topic, events(b"before")))
    postgres.sql(END_SESSIONS)
    refused = 0
    while True:  # a publisher that sends again until it is answered
        (receipt,) = await done(publish(topic, events(b"after")))
        if receipt.error is None:
            break
        assert isinstance(receipt.error, DiskError)
        refused += 1
    assert refused > 0
    assert await stored(topic.partitions[0]) == [b"before", b"after"]
    await broker.close()
