"""`migrate` with a cluster moves the whole folder, goes on where it was stopped, and lets no member serve a half."""

from pathlib import Path

import msgspec
import pytest

from babelbus.clock import SystemClock
from babelbus.config import ClusterSettings, Config
from babelbus.records.record import Record
from babelbus.server.migrate import Migrated
from babelbus.server.move_in import STEP_BYTES, EngineStaysError, move_in
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk import FolderStore
from babelbus.storage.errors import FolderLockedError
from babelbus.storage.files import LocalFiles
from babelbus.storage.jetstream import JetstreamStore, Ownership, ReplicatedFiles
from babelbus.storage.jetstream.errors import NatsRefusedError
from tests.server.test_migrate import NOW, Bus, StoppedError
from tests.storage.helpers import append, fill, numbered, read_all
from tests.support.nats import NatsServer


class Folder(Bus):
    """A data folder that is to move into a cluster."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder, url)
        self.config: Config = msgspec.structs.replace(self.config, cluster=ClusterSettings(enabled=True))

    def move(self, *, stop_at: int = 2**62, remove: bool = False) -> dict[str, Migrated]:
        done = 0

        def seen(size: int) -> None:
            nonlocal done
            done += size
            if done > stop_at:
                raise StoppedError

        return {one.topic: one for one in move_in(self.config, SystemClock(), remove=remove, seen=seen)}


class Member:
    """A member of the cluster with another folder, which is empty."""

    def __init__(self, folder: Folder, place: Path) -> None:
        place.mkdir(exist_ok=True)
        self._ownership = Ownership(folder.config.jetstream, LocalFiles(), str(place), SystemClock())
        self._ownership.connect("member")
        try:
            self._ownership.acquire()
            self.files = ReplicatedFiles(self._ownership, LocalFiles(), str(place), SystemClock())
        except BaseException:
            self._ownership.close()
            raise
        self.store = JetstreamStore(folder.config.jetstream, self.files, str(place), SystemClock(), self._ownership)
        self.catalog = FolderStore(self.files, str(place), SystemClock())

    def close(self) -> None:
        self._ownership.close()


@pytest.fixture
def folder(nats: NatsServer, tmp_path: Path) -> Folder:
    return Folder(tmp_path, nats.url)


def test_a_move_that_was_stopped_goes_on_and_nobody_serves_a_half(folder: Folder, tmp_path: Path) -> None:
    (log,) = folder.make("a")
    append(log, [Record(b"x" * 1000, timestamp=NOW) for _ in range(3000)])
    log.close()
    for one in folder.make("b", 2):
        fill(one, 30)
        one.close()
    folder.make("m", engine="memory")[0].close()
    part = bytes(range(256)) * (STEP_BYTES // 256) + b"the end"
    for name, content in (
        ("groups.0", b"g"),
        ("staging/t-1.part", part),
        ("conf/server_key", b"k"),
        ("zbus.json", b"z"),
    ):
        path = folder.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(StoppedError):
        folder.move(stop_at=2_000_000)
    with pytest.raises(NatsRefusedError, match="not moved in yet"):
        Member(folder, tmp_path / "member")
    moved = folder.move(remove=True)
    assert moved["a"].copied_bytes < moved["a"].compared_bytes
    assert moved[""].files == 4
    assert sorted(path.name for path in folder.folder.iterdir()) == ["cluster.json", "conf", "lock"]
    member = Member(folder, tmp_path / "member")
    place = str(tmp_path / "member")
    assert member.catalog.topics() == ["a", "b", "m"]
    assert member.files.read_file(f"{place}/staging/t-1.part") == part
    assert member.files.read_file(f"{place}/conf/server_key") == b"k"
    assert len(read_all(member.store.open_partition("a", 0, LogSettings()))) == 3000
    assert [one.payload for one in read_all(member.store.open_partition("b", 1, LogSettings()))] == [
        one.payload for one in numbered(30)
    ]
    member.close()
    assert "moved into its cluster before" in folder.move()[""].reason


def test_a_topic_of_a_database_keeps_the_folder_where_it_is(folder: Folder, tmp_path: Path) -> None:
    folder.make("a")[0].close()
    folder.make("rows", engine="db")[0].close()
    with pytest.raises(EngineStaysError, match="'rows' has engine db"):
        folder.move()
    assert not (folder.folder / "cluster.json").exists()


def test_a_second_folder_does_not_move_into_the_same_cluster(folder: Folder, nats: NatsServer, tmp_path: Path) -> None:
    folder.make("a")[0].close()
    folder.move()
    (tmp_path / "second").mkdir()
    second = Folder(tmp_path / "second", nats.url)
    second.config = msgspec.structs.replace(second.config, jetstream=folder.config.jetstream)
    second.make("b")[0].close()
    with pytest.raises(NatsRefusedError, match="has the data of a cluster already"):
        second.move()
    lock = LocalFiles().lock(str(folder.folder / "lock"))
    with pytest.raises(FolderLockedError):
        folder.move()
    lock.close()


def test_topics_that_are_in_nats_already_come_along(folder: Folder, tmp_path: Path) -> None:
    (log,) = folder.make("a")
    fill(log, 30)
    log.close()
    cluster, folder.config = folder.config, msgspec.structs.replace(folder.config, cluster=ClusterSettings())
    assert folder.migrate()["a"].copied_bytes > 0
    folder.config = cluster
    assert folder.move()["a"].copied_bytes == 0
    member = Member(folder, tmp_path / "member")
    assert len(read_all(member.store.open_partition("a", 0, LogSettings()))) == 30
    member.close()
