"""`migrate` copies topics into engine `jetstream` as they are, goes on where it was stopped, and compares them."""

import itertools
import shutil
from pathlib import Path

import msgspec
import pytest

from babelbus.clock import SystemClock
from babelbus.config import Config, DataSettings, JetstreamSettings
from babelbus.core.settings import TopicSettings
from babelbus.errors import StorageError
from babelbus.records.format import encode_batch, mark_producer, rebase
from babelbus.records.record import Record
from babelbus.server.migrate import Migrated, migrate
from babelbus.storage import notes
from babelbus.storage.contract import LogSettings, PartitionLog
from babelbus.storage.disk import FolderStore
from babelbus.storage.errors import FolderLockedError
from babelbus.storage.files import LocalFiles
from babelbus.storage.jetstream import JetstreamStore
from tests.cli.shell import Served
from tests.storage.helpers import append, fill, numbered, read_all
from tests.support.clock import ManualClock
from tests.support.nats import NatsServer

NOW = 1_700_000_000_000
_prefixes = (f"moved{number}" for number in itertools.count())


class StoppedError(Exception):
    """A migration was stopped."""


class Bus:
    """A data folder with topics on the disk, and a cluster of NATS."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder / "data"
        self.folder.mkdir()
        self.config = Config(
            data=DataSettings(str(self.folder)),
            jetstream=JetstreamSettings(url, prefix=next(_prefixes), replicas=1, shards=2),
        )
        self.clock = ManualClock(NOW)

    def disk(self) -> FolderStore:
        return FolderStore(LocalFiles(), str(self.folder), self.clock)

    def make(self, topic: str, partitions: int = 1, **settings: object) -> list[PartitionLog]:
        kept = {"partitions": partitions, "settings": settings, "id": "abc"}
        self.disk().save_settings(topic, notes.encode(kept))
        layout = msgspec.convert(settings, TopicSettings).for_log(2**20)
        return [self.disk().open_partition(topic, number, layout) for number in range(partitions)]

    def engine(self, topic: str) -> str:
        content = self.disk().load_settings(topic)
        assert content is not None
        kept = notes.decode(content, dict, path=topic)
        assert (kept["id"], kept["partitions"]) == ("abc", kept["partitions"])
        return str(kept["settings"].get("engine", "disk"))

    def migrate(self, *topics: str, stop_at: int = 2**62, remove: bool = False) -> dict[str, Migrated]:
        done = 0

        def seen(size: int) -> None:
            nonlocal done
            done += size
            if done > stop_at:
                raise StoppedError

        moved = migrate(self.config, SystemClock(), topics, remove=remove, seen=seen)
        return {one.topic: one for one in moved}

    def moved(self) -> JetstreamStore:
        return JetstreamStore(self.config.jetstream, LocalFiles(), str(self.folder), self.clock)


@pytest.fixture
def bus(nats: NatsServer, tmp_path: Path) -> Bus:
    return Bus(tmp_path, nats.url)


def test_a_moved_topic_has_its_records_offsets_gaps_and_producers(bus: Bus) -> None:
    first, second = bus.make("a/b", 2, cleanup="compact", segment_bytes=2_000)
    sent = [Record(b"%d" % number, b"k%d" % (number % 50), timestamp=NOW + number) for number in range(1000)]
    for at in range(0, 1000, 50):
        append(first, sent[at : at + 50])
    first.durable()
    assert first.clean(NOW) > 0
    fill(second, 300)
    second.trim(200)
    batch = mark_producer(encode_batch(numbered(3)), 77, 40)
    second.append(rebase(batch, 300))
    second.producers.add(77, 40, 3, 300)
    before = [(log.first_offset, log.next_offset, log.compacted_until, read_all(log)) for log in (first, second)]
    for log in (first, second):
        log.close()
    moved = bus.migrate()
    assert moved["a/b"].copied_bytes == moved["a/b"].compared_bytes > 0
    assert bus.engine("a/b") == "jetstream"
    store = bus.moved()
    for number, (begin, end, until, records) in enumerate(before):
        log = store.open_partition("a/b", number, LogSettings())
        assert (log.first_offset, log.next_offset, log.compacted_until) == (begin, end, until)
        assert read_all(log) == records
        assert log.recovery.bad == []
    assert log.producers.next_sequence(77) == 43
    assert append(log, numbered(2, first=303)) == 303
    store.close()


def test_a_migration_that_was_stopped_goes_on(bus: Bus) -> None:
    (log,) = bus.make("a")
    append(log, [Record(b"x" * 1000, timestamp=NOW) for _ in range(3000)])
    total = log.size_bytes
    log.close()
    with pytest.raises(StoppedError):
        bus.migrate(stop_at=2_000_000)
    assert bus.engine("a") == "disk"
    (log,) = bus.make("a")
    append(log, numbered(10, first=3000))  # a server ran in between
    log.close()
    moved = bus.migrate(remove=True)["a"]
    assert moved.copied_bytes < total
    assert moved.compared_bytes > total
    assert bus.engine("a") == "jetstream"
    assert [path.name for path in (bus.folder / "topics" / "a").iterdir()] == ["settings.json"]
    assert bus.migrate()["a"].reason == "its engine is jetstream"


def test_a_topic_that_changed_between_two_runs_is_copied_anew(bus: Bus) -> None:
    (log,) = bus.make("a")
    append(log, [Record(b"x" * 1000, timestamp=NOW) for _ in range(3000)])
    log.close()
    with pytest.raises(StoppedError):
        bus.migrate(stop_at=2_000_000)
    shutil.rmtree(bus.folder / "topics" / "a" / "0")
    (log,) = bus.make("a")
    append(log, [Record(b"y" * 1000, timestamp=NOW) for _ in range(3000)])
    total = log.size_bytes
    log.close()
    assert bus.migrate()["a"].copied_bytes == total
    store = bus.moved()
    assert {record.payload for record in read_all(store.open_partition("a", 0, LogSettings()))} == {b"y" * 1000}
    store.close()


def test_a_damaged_topic_stays_on_the_disk(bus: Bus) -> None:
    (log,) = bus.make("a")
    fill(log, 100)
    log.close()
    path = next((bus.folder / "topics" / "a" / "0").glob("*.log"))
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError):
        bus.migrate("a")
    assert bus.engine("a") == "disk"


def test_topics_of_the_server_and_of_other_engines_stay(bus: Bus) -> None:
    bus.make("$state")[0].close()
    bus.make("rows", engine="db")[0].close()
    moved = bus.migrate()
    assert "stay in the data folder" in moved["$state"].reason
    assert moved["rows"].reason == "its engine is db"
    with pytest.raises(StorageError, match="no topic 'nobody'"):
        bus.migrate("nobody")


def test_a_folder_that_a_server_has_is_refused(bus: Bus) -> None:
    lock = LocalFiles().lock(str(bus.folder / "lock"))
    with pytest.raises(FolderLockedError):
        bus.migrate()
    lock.close()


def test_a_group_goes_on_where_it_was(nats: NatsServer, tmp_path: Path) -> None:
    server = Served(tmp_path)
    server.run("topics", "create", "jobs")
    server.run("publish", "jobs", input="\n".join(str(number) for number in range(10)))
    server.run("consume", "jobs", "--group", "w", "--from", "beginning", "--max", "4")
    server.run("state", "set", "plant/line", "7")
    assert server.stop() == 0
    settings = f'[jetstream]\nservers = "{nats.url}"\nreplicas = 1\nshards = 2\n'
    (tmp_path / "bus.toml").write_text(settings)
    assert "jobs: 1 partition moved" in server.run("migrate", "--config", "bus.toml", "--remove")
    rows = server.rows("migrate", "--config", "bus.toml", "jobs", "--json")
    assert [(row["topic"], row["reason"]) for row in rows] == [("jobs", "its engine is jetstream")]
    again = Served(tmp_path, "--config", "bus.toml")
    server.run("publish", "jobs", input="10")
    found = [row["payload"] for row in server.rows("consume", "jobs", "--group", "w", "--max", "7", "--json")]
    assert found == [str(number) for number in range(4, 11)]
    assert server.run("state", "get", "plant/line").strip() == "7"
    assert again.stop() == 0
