"""The files of a cluster: what the next owner finds, and bad days. The contract is in tests/storage/test_files.py."""

import base64
import errno
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("nats", reason="engine jetstream is not tested: the package nats-py is not installed")


from babelbus.clock import SystemClock
from babelbus.config import JetstreamSettings
from babelbus.storage.files import FileSystem, LocalFiles
from babelbus.storage.jetstream import JetstreamStore, Ownership, ReplicatedFiles, read_small_file
from babelbus.storage.jetstream.content import CHUNK_BYTES
from babelbus.storage.jetstream.errors import NatsRefusedError, StreamAlteredError
from babelbus.storage.jetstream.frame import COVERED_FROM, HEAD, Frame, crc_of, decode, encode
from babelbus.storage.memory import MemoryFiles
from tests.storage.jetstream.test_store import Background
from tests.support.nats import NatsServer, Relay, ask_jetstream, nats_cluster, send_to_nats

_prefixes = itertools.count()


class House:
    """A cluster of one prefix. Each `open` is the take-over by another member, whose folder is empty unless named."""

    def __init__(self, server: NatsServer, folder: Path) -> None:
        self.server, self.prefix, self._folder = server, f"files{next(_prefixes)}", folder
        self._numbers = itertools.count()
        self._opened: list[Ownership] = []

    def member(self, folder: str | None = None, **settings: Any) -> tuple[Ownership, str]:
        chosen: dict[str, Any] = {
            "servers": self.server.url,
            "prefix": self.prefix,
            "replicas": 1,
            "shards": 1,
            "lease_seconds": 0,
        }
        folder = folder or f"{self._folder}/{next(self._numbers)}"
        LocalFiles().make_folder(folder)
        ownership = Ownership(JetstreamSettings(**(chosen | settings)), LocalFiles(), folder, SystemClock())
        ownership.connect("tests")
        self._opened.append(ownership)
        return ownership, folder

    def open(self, folder: str | None = None, **settings: Any) -> "Files":
        ownership, folder = self.member(folder, **settings)
        return Files(ReplicatedFiles(ownership, LocalFiles(), folder, SystemClock()), folder, ownership)

    def ask(self, call: str, content: Any = None) -> dict[str, Any]:
        return ask_jetstream(self.server.url, call, content)

    def subjects(self) -> dict[str, int]:
        info = self.ask(f"STREAM.INFO.{self.prefix}-files", {"subjects_filter": ">"})
        there: dict[str, int] = info["state"].get("subjects") or {}
        return {name.removeprefix(f"{self.prefix}.files."): count for name, count in there.items()}

    def publish(self, subject: str, content: bytes) -> None:
        send_to_nats(self.server.url, f"{self.prefix}.files.{subject}", content)

    def last(self, subject: str) -> Frame:
        """The last message of a subject."""
        asked = {"last_by_subj": f"{self.prefix}.files.{subject}"}
        message = self.ask(f"STREAM.MSG.GET.{self.prefix}-files", asked)["message"]
        frame = decode(base64.b64decode(message["data"]), message["seq"])
        assert frame is not None
        return frame

    def close(self) -> None:
        for ownership in self._opened:
            ownership.close()


class Files:
    """The files of a member, by their names in its folder."""

    def __init__(self, files: FileSystem, folder: str, ownership: Ownership) -> None:
        self.files, self.folder, self.ownership = files, folder, ownership

    def put(self, name: str, content: bytes) -> None:
        self.files.replace_file(f"{self.folder}/{name}", content)

    def append(self, name: str, content: bytes) -> None:
        file = self.files.open(f"{self.folder}/{name}", create=True)
        file.pwrite(content, file.size())
        file.flush()
        file.close()

    def all(self) -> dict[str, bytes]:
        return dict(walk(self.files, self.folder, ""))


def walk(files: FileSystem, folder: str, below: str) -> Iterator[tuple[str, bytes]]:
    for name in files.list_folder(f"{folder}/{below}".rstrip("/")):
        path = f"{below}{name}"
        try:
            yield path, files.read_file(f"{folder}/{path}")
        except FileNotFoundError:
            yield from walk(files, folder, f"{path}/")


@pytest.fixture
def house(nats: NatsServer, tmp_path: Path) -> Iterator[House]:
    house = House(nats, tmp_path)
    yield house
    house.close()


def test_the_next_owner_has_every_file_as_it_was_stored(house: House) -> None:
    first = house.open()
    large = random.Random(1).randbytes(3 * CHUNK_BYTES + 1000)
    first.put("topics/a.b/settings.json", b"{}")
    first.put("topics/a b/settings.json", b"1")
    first.put("topics/a b/settings.json", b"2")
    first.put("groups.0", large)
    first.put("empty", b"")
    for start in range(0, len(large), 50_000):
        first.append("staging/x-1.part", large[start : start + 50_000])
    first.put("conf/gone", large)
    first.files.unlink(f"{first.folder}/conf/gone")
    first.files.make_folder(f"{first.folder}/topics/.removed-1")
    first.files.rename(f"{first.folder}/topics/a.b", f"{first.folder}/topics/.removed-1/a.b")
    file = first.files.open(f"{first.folder}/never", create=True)
    file.pwrite(b"not flushed", 0)
    expected = {
        "topics/.removed-1/a.b/settings.json": b"{}",
        "topics/a b/settings.json": b"2",
        "groups.0": large,
        "empty": b"",
        "staging/x-1.part": large,
    }
    second = house.open()
    assert second.all() == expected
    assert not second.files.exists(f"{second.folder}/never")
    second.append("staging/x-1.part", b"more")
    assert house.open().all() == expected | {"staging/x-1.part": large + b"more"}


def test_a_small_file_is_read_without_the_lease(house: House) -> None:
    files = house.open()
    files.put("conf/admin_token", b"secret")
    files.put("conf/gone", b"x")
    files.files.unlink(f"{files.folder}/conf/gone")
    files.put("groups.0", bytes(2 * CHUNK_BYTES))
    other, _ = house.member()
    assert read_small_file(other, "conf/admin_token") == b"secret"
    assert read_small_file(other, "conf/gone") is read_small_file(other, "conf/never") is None
    with pytest.raises(StreamAlteredError, match="cannot be read"):
        read_small_file(other, "groups.0")
    files.put("conf/admin_token", b"new")
    assert read_small_file(other, "conf/admin_token") == b"new"
    empty = House(house.server, Path(files.folder) / "other")
    assert read_small_file(empty.member()[0], "conf/admin_token") is None
    empty.close()


def test_what_stays_on_the_disk_of_a_member_is_not_in_the_stream(house: House, tmp_path: Path) -> None:
    first = house.open()
    first.files.make_folder(f"{first.folder}/state")
    first.put("state/checkpoint", b"cache")
    first.files.replace_file(f"{tmp_path}/elsewhere", b"mine")
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"
    assert Path(first.folder, "state/checkpoint").read_bytes() == b"cache"
    assert house.open().all() == {}


def test_removed_files_leave_nothing_in_the_stream(house: House) -> None:
    files = house.open()
    for number in range(20):
        files.append(f"staging/{number}", bytes(2 * CHUNK_BYTES))
    files.files.remove_tree(f"{files.folder}/staging")
    files.put("groups.0", bytes(2 * CHUNK_BYTES))
    files.put("groups.0", bytes(2 * CHUNK_BYTES))
    left = [name for name in house.subjects() if "$epoch" not in name]
    assert len(left) == 3  # the entry and two chunks


def test_chunks_of_a_write_that_a_crash_cut_short_are_removed_at_the_next_start(house: House) -> None:
    files = house.open()
    files.put("kept", bytes(2 * CHUNK_BYTES))
    house.publish("$chunk.orphan.0", b"first of two")
    house.publish("$chunk.orphan.1", b"second of two")
    house.open()
    assert not any("orphan" in name for name in house.subjects())
    assert len([name for name in house.subjects() if name.startswith("$chunk")]) == 2


@pytest.mark.parametrize("seed", range(6))
def test_random_writes_are_those_of_a_local_file_system(house: House, seed: int) -> None:
    """Each change is made here and in memory; a member with an empty folder takes over again and again."""
    chance, model = random.Random(seed), MemoryFiles()
    files = house.open()
    names = [f"f/{number}" for number in range(5)]
    for _ in range(120):
        name = chance.choice(names)
        deed = chance.randrange(8)
        size = chance.choice([0, 10, 1000, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
        content, at = chance.randbytes(size), chance.choice([0, 5, CHUNK_BYTES, 2 * CHUNK_BYTES + 7])
        cut = chance.choice([1, CHUNK_BYTES, CHUNK_BYTES + 1])
        if deed == 7:
            files = house.open()
        for system, folder in ((files.files, files.folder), (model, "")):
            path = f"{folder}/{name}"
            if deed == 0:
                system.replace_file(path, content)
            elif deed == 1:
                system.unlink(path)
            elif deed == 2 and system.exists(path):
                system.rename(path, f"{folder}/f/renamed")
            elif deed == 3:
                file = system.open(path, create=True)
                file.truncate(at)
                file.flush()
            elif deed in (4, 5, 6):
                file = system.open(path, create=True)
                file.pwrite(content, file.size() if deed == 4 else at)
                file.truncate(max(file.size() - (cut if deed == 6 else 0), 0))
                file.flush()
        assert files.all() == dict(walk(model, "", ""))
    assert house.open().all() == dict(walk(model, "", ""))


def test_an_owner_whose_place_was_taken_is_refused(house: House) -> None:
    first = house.open()
    first.put("groups.0", b"old")
    second = house.open()
    second.put("groups.0", b"new")
    with pytest.raises(OSError, match="has taken it") as refused:
        first.put("groups.0", b"late")
    assert refused.value.errno == errno.EROFS
    with pytest.raises(OSError, match="has taken it"):
        first.files.unlink(f"{first.folder}/groups.0")
    assert second.all() == house.open().all() == {"groups.0": b"new"}


def test_a_write_with_an_unknown_outcome_is_looked_for_before_it_is_sent_again(house: House) -> None:
    relay = Relay(house.server.port)
    files = house.open(servers=relay.url)
    files.put("groups.0", b"old")
    relay.loses_replies = True
    writing = Background(lambda: files.put("groups.0", b"new"))
    while house.subjects()["$file.groups%2E0"] != 2:
        pass
    relay.cut()
    assert writing.wait().error is None
    assert files.all() == {"groups.0": b"new"}
    assert house.subjects()["$file.groups%2E0"] == 2
    relay.close()


def test_while_nats_is_away_a_write_fails_and_later_writes_work(house: House) -> None:
    relay = Relay(house.server.port)
    files = house.open(servers=relay.url, timeout_seconds=3.0)
    files.put("groups.0", b"old")
    relay.loses_requests = relay.loses_replies = True
    with pytest.raises(OSError, match=r"NATS|acknowledge") as away:
        files.put("groups.0", b"new")
    assert away.value.errno == errno.EIO
    assert files.all() == {"groups.0": b"old"}
    relay.cut()
    again = Background(lambda: files.put("groups.1", b"x"))
    while again.wait().error is not None:
        again = Background(lambda: files.put("groups.1", b"x"))
    assert files.all() == house.open().all()
    assert files.all()["groups.1"] == b"x"
    relay.close()


def test_a_full_stream_is_a_full_disk(house: House) -> None:
    files = house.open()
    files.put("groups.0", b"old")
    config = house.ask(f"STREAM.INFO.{house.prefix}-files")["config"]
    assert "error" not in house.ask(f"STREAM.UPDATE.{house.prefix}-files", config | {"max_bytes": 100_000})
    with pytest.raises(OSError, match="refused a message") as full:
        files.put("groups.0", bytes(CHUNK_BYTES))
    assert full.value.errno == errno.ENOSPC
    assert "error" not in house.ask(f"STREAM.UPDATE.{house.prefix}-files", config)
    files.put("groups.0", b"new")
    assert house.open().all() == {"groups.0": b"new"}


@pytest.mark.parametrize("deed", ["altered", "removed", "purged", "foreign", "deleted", "edited", "replaced"])
def test_a_stream_that_somebody_touched_is_refused(house: House, deed: str) -> None:
    first = house.open()
    first.put("conf/server_key", b"secret")
    first.put("groups.0", b"x")
    stream = f"{house.prefix}-files"
    config = house.ask(f"STREAM.INFO.{stream}")["config"]
    folder = first.folder
    if deed == "altered":
        house.publish("$file.groups%2E0", b"BBF1 something else")
    elif deed == "removed":
        sequence = house.ask(
            f"STREAM.MSG.GET.{stream}", {"last_by_subj": f"{house.prefix}.files.$file.conf.server_key"}
        )
        house.ask(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence["message"]["seq"]})
    elif deed == "purged":
        JetstreamStore(first.ownership.settings, first.files, folder, SystemClock(), first.ownership)
        house.ask(f"STREAM.PURGE.{stream}")
    elif deed == "foreign":
        house.publish("$file.other", b"hello")
    elif deed in ("deleted", "replaced"):
        house.ask(f"STREAM.DELETE.{stream}")
        if deed == "replaced":
            house.ask(f"STREAM.CREATE.{stream}", config | {"metadata": {}})
    else:
        house.ask(f"STREAM.UPDATE.{stream}", config | {"max_age": 10**12})
    with pytest.raises(StreamAlteredError):
        house.open(folder)


@pytest.mark.parametrize("chunks", [b">", b"*", b"", b"a.b", b"0" * 15, b"0" * 17, b"\xff" * 16, b"0123456789abcde\n"])
def test_a_file_whose_chunks_have_no_name_of_ours_is_refused(house: House, chunks: bytes) -> None:
    first = house.open()
    first.put("small", b"x")
    first.put("large", bytes(2 * CHUNK_BYTES))
    entry = house.last("$file.large")
    house.publish("$file.large", encode(entry.head, chunks, crc_of(chunks)))
    sequence = house.last("$file.large").head.sequence
    before = house.subjects()
    with pytest.raises(StreamAlteredError, match=rf"{house.prefix}-files, sequence {sequence}: .*large"):
        house.open()
    after = house.subjects()
    assert {name for name in before if "$chunk" in name} <= {*after}


def test_a_file_that_is_said_to_be_larger_than_a_message_is_refused(house: House) -> None:
    first = house.open()
    first.put("small", b"x")
    entry = house.last("$file.small")
    house.publish("$file.small", encode(msgspec.structs.replace(entry.head, base_offset=2**62), b"x", crc_of(b"x")))
    with pytest.raises(StreamAlteredError, match="small is damaged"):
        house.open()


def test_a_file_whose_name_is_no_text_is_refused(house: House) -> None:
    first = house.open()
    first.put("small", b"x")
    message = bytearray(encode(house.last("$file.small").head, b"x", crc_of(b"x")))
    message[HEAD.size] = 0xFF
    message[4:8] = crc_of(bytes(message[COVERED_FROM : HEAD.size + 5])).to_bytes(4, "big")
    house.publish("$file.small", bytes(message))
    with pytest.raises(StreamAlteredError, match="small is damaged"):
        house.open()


def test_a_deleted_stream_is_not_made_anew_by_a_member_with_an_empty_folder(house: House) -> None:
    first = house.open()
    JetstreamStore(first.ownership.settings, first.files, first.folder, SystemClock(), first.ownership)
    house.ask(f"STREAM.DELETE.{house.prefix}-files")
    with pytest.raises(NatsRefusedError, match="somebody deleted the stream"):
        house.open()


def test_the_folder_of_a_server_of_its_own_is_refused(house: House, tmp_path: Path) -> None:
    LocalFiles().make_folder(f"{tmp_path}/own/topics/orders")
    with pytest.raises(NatsRefusedError, match="babelbus migrate"):
        house.open(f"{tmp_path}/own")
    house.open()
    with pytest.raises(NatsRefusedError, match="babelbus migrate"):
        house.open(f"{tmp_path}/own")


def test_the_folder_of_another_cluster_is_refused(house: House, nats: NatsServer, tmp_path: Path) -> None:
    folder = house.open().folder
    with pytest.raises(NatsRefusedError, match="belongs to"):
        house.open(folder, prefix="other")
    house.ask(f"STREAM.DELETE.{house.prefix}-files")
    other = House(nats, tmp_path / "other")
    other.prefix = house.prefix
    other.open()
    with pytest.raises(StreamAlteredError, match="belongs to another installation"):
        house.open(folder)
    other.close()


@pytest.mark.usefixtures("nats")
def test_a_write_that_was_acknowledged_outlives_the_leader(tmp_path: Path) -> None:
    with nats_cluster() as servers:
        house = House(servers[0], tmp_path)
        urls = ",".join(server.url for server in servers)
        files = house.open(servers=urls, replicas=3, timeout_seconds=60.0)
        for number in range(60):
            if number == 20:
                leader = house.ask(f"STREAM.INFO.{house.prefix}-files")["cluster"]["leader"]
                next(server for server in servers if server.name == leader).kill()
                house.server = next(server for server in servers if server.name != leader)
            files.append("staging/x.part", b"%d " % number * 5000)
            files.put(f"notes/{number % 7}", b"%d" % number)
        expected = files.all()
        assert len(expected["staging/x.part"]) == sum(len(b"%d " % number) * 5000 for number in range(60))
        assert house.open(servers=urls, replicas=3, timeout_seconds=60.0).all() == expected
        house.close()
