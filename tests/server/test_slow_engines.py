"""An engine that hangs delays its own topics alone: a stopped PostgreSQL, and a disk whose every sync hangs."""

import concurrent.futures
import http.client
import threading
from pathlib import Path

import pytest

from babelbus.clients.sbus import Client
from babelbus.config import DbSettings
from babelbus.core.access import SERVER
from babelbus.protocols.sbus.session import UNSTORED_BYTES_MAX
from babelbus.storage.files import File, LocalFiles
from babelbus.web.token import read_token
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.jebp import Caller, create, create_topic, fetch, fetched, remove_topic, said, subscribe
from tests.support.postgres import PostgresServer
from tests.support.sbus import join, payloads, service_of
from tests.support.server import LiveServer, configure


def health(live: LiveServer) -> int:
    connection = http.client.HTTPConnection(live.server.addresses["admin"], timeout=SAFETY_NET_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


def publish_and_fetch(caller: Caller, topic: str, *payloads: bytes, offset: int = 0) -> list[bytes | None]:
    """Publish to one topic and read it, with the answers of both."""
    assert [said(answer) for answer in caller.ask(*(create(topic, payload) for payload in payloads))] == ["a130"] * len(
        payloads
    )
    _, answer = caller.ask(subscribe(topic), fetch(offset))
    return fetched(answer)[topic, 0]


# -- a database --------------------------------------------------------------------------------------------------------


def test_a_stopped_postgresql_delays_nobody_but_its_own_topics(postgres: PostgresServer, tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path, db=DbSettings(postgres.url()), admin=True)) as live:
        for name, engine in (("rows", "db"), ("cold", "db"), ("news", "disk"), ("quick", "memory")):
            live.call(
                lambda name=name, engine=engine: live.server.broker.create_topic(name, 1, {"engine": engine}, SERVER)  # type: ignore[misc]
            )
        with live.caller() as writer, live.caller() as reader, live.caller() as other:
            assert publish_and_fetch(other, "cold", b"c") == [b"c"]
            assert publish_and_fetch(other, "rows", b"0") == [b"0"]
            live.call(lambda: live.server.broker.topic("cold").partitions[0].forget_tail())
            flusher = live.server.broker.backends["db"].flusher
            postgres.pause()
            try:
                writer.send(create("rows", b"1"))
                live.until(lambda: flusher.begun_at is not None)
                reader.send(subscribe("cold"), fetch(0), create("news", b"behind"))
                assert publish_and_fetch(other, "news", b"a", b"b")[-2:] == [b"a", b"b"]
                assert publish_and_fetch(other, "quick", b"a") == [b"a"]
                assert publish_and_fetch(other, "news", b"c")[-1] == b"c"
                _, tail = other.ask(subscribe("rows"), fetch(0))  # what is in memory needs no database
                assert fetched(tail) == {("rows", 0): [b"0"]}
                assert health(live) == 200
                assert flusher.begun_at is not None
            finally:
                postgres.resume()
            assert said(writer.hear()[0]) == "a130"
            subscribed, records, created = reader.hear(3)  # in the order of the requests
            assert (said(subscribed), said(created)) == ("a030", "a130")
            assert fetched(records) == {("cold", 0): [b"c"]}
            _, answer = other.ask(subscribe("rows"), fetch(0))
            assert fetched(answer) == {("rows", 0): [b"0", b"1"]}


# -- a disk ------------------------------------------------------------------------------------------------------------


class _HeldFile:
    """An open file whose flushes stand at the gate."""

    def __init__(self, file: File, held: "HeldFiles") -> None:
        self._file = file
        self._held = held

    def flush(self) -> None:
        self._held.wait()
        self._file.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


class HeldFiles(LocalFiles):
    """The files of this machine, on a disk whose every sync waits while the gate is shut."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = 0

    def wait(self) -> None:
        self.waiting += 1
        assert self._open.wait(SAFETY_NET_SECONDS)
        self.waiting -= 1

    def shut(self) -> None:
        self._open.clear()

    def let_through(self) -> None:
        self._open.set()

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        return _HeldFile(super().open(path, create=create, write=write), self)  # type: ignore[return-value]

    def flush_folder(self, path: str) -> None:
        self.wait()
        super().flush_folder(path)


def test_a_disk_whose_every_sync_hangs_delays_no_topic_that_asks_for_none(tmp_path: Path) -> None:
    files = HeldFiles()
    with (
        LiveServer(configure(tmp_path, admin=True), files=files) as live,
        live.caller() as writer,
        live.caller() as other,
    ):
        topics = {
            "safe": {"ack": "flushed"},
            "written": {"ack": "written", "segment_bytes": 1024},
            "quick": {"engine": "memory"},
        }
        for name, settings in topics.items():
            live.call(lambda name=name, settings=settings: live.server.broker.create_topic(name, 1, settings, SERVER))  # type: ignore[misc]
        assert said(other.ask(create_topic("made"))[0]) == "a130"
        files.shut()
        try:
            writer.send(create("safe", b"waits"))
            live.until(lambda: files.waiting > 0)
            many = [b"%03d" % number + bytes(200) for number in range(40)]  # several segments, each with a new file
            for payload in many:
                assert publish_and_fetch(other, "written", payload)[0] == many[0]
            assert publish_and_fetch(other, "quick", b"a") == [b"a"]
            live.call(lambda: live.server.broker.topic("written").partitions[0].forget_tail())
            assert publish_and_fetch(other, "written", b"cold", offset=0)[:3] == many[:3]
            assert live.call(lambda: live.server.broker.topic("written").partitions[0].log.part_count) > 5
            assert health(live) == 200
            assert files.waiting > 0
        finally:
            files.let_through()
        assert said(writer.hear()[0]) == "a130"


def test_an_sbus_publisher_waits_for_a_disk_that_hangs_and_other_clients_of_the_bus_do_not(tmp_path: Path) -> None:
    files = HeldFiles()
    payload = bytes(100_000)
    with LiveServer(configure(tmp_path), files=files) as live:
        live.call(lambda: live.server.broker.create_topic("plant", 1, principal=SERVER))
        with join(live) as publisher, join(live, b"other") as other:
            files.shut()
            try:
                sent = publish_until_held(live, publisher, b"plant/x", payload)
                assert UNSTORED_BYTES_MAX < sent * len(payload) < 2 * UNSTORED_BYTES_MAX
                other.publish(b"other", b"heard")
                assert payloads(other, 1) == [b"heard"]
                other.whoami()
            finally:
                files.let_through()
            publisher.whoami()  # it is read again
        partition = live.server.broker.topic("plant").partition(0)
        live.until(lambda: partition.high_watermark == sent)


def publish_until_held(live: LiveServer, client: Client, key: bytes, payload: bytes) -> int:
    """Publish until the server reads no more from this client; return how many packets were sent."""
    connections = list(service_of(live).server.connections)
    sent = 0
    client.socket.setblocking(False)
    while True:
        try:
            client.publish(key, payload)
            sent += 1
        except BlockingIOError:
            if live.call(lambda: any(one._held for one in connections)):
                client.socket.settimeout(SAFETY_NET_SECONDS)
                return sent


def test_a_change_of_the_topics_that_hangs_delays_nobody_else(tmp_path: Path) -> None:
    files = HeldFiles()
    with (
        LiveServer(configure(tmp_path, admin=True), files=files) as live,
        live.caller() as creator,
        live.caller() as remover,
        live.caller() as other,
        concurrent.futures.ThreadPoolExecutor(2) as threads,
    ):
        topics = {"written": {"ack": "written"}, "quick": {"engine": "memory"}, "old": {}, "grows": {"ack": "written"}}
        for name, settings in topics.items():
            live.call(lambda name=name, settings=settings: live.server.broker.create_topic(name, 1, settings, SERVER))  # type: ignore[misc]
        live.until(lambda: live.server.topic_list.last.done)
        files.shut()
        try:
            # Requests of one client are carried out in order: the record waits for its topic.
            creator.send(create_topic("made"), create("made", b"behind"), create_topic("made"))
            live.until(lambda: files.waiting > 0)
            altered = threads.submit(
                live.call,
                lambda: live.server.broker.alter_topic("grows", {"partitions": 2, "retention_bytes": 77}, SERVER),
            )
            in_memory = threads.submit(
                live.call, lambda: live.server.broker.create_topic("m", 1, {"engine": "memory"}, SERVER)
            )
            remover.send(remove_topic("old"), create_topic("old"), create("old", b"new"))
            live.until(lambda: live.server.broker.find_topic("old") is None)
            for number in range(20):
                for name in ("written", "quick"):
                    assert publish_and_fetch(other, name, b"%d" % number)[0] == b"0"
            assert publish_and_fetch(other, "grows", b"while it is altered") == [b"while it is altered"]
            assert health(live) == 200
            assert not altered.done()
            assert not in_memory.done()
            assert not live.call(lambda: live.server.broker.has_topic("made"))
        finally:
            files.let_through()
        assert [said(answer) for answer in creator.hear(3)] == ["a130", "a130", "b630"]
        assert [said(answer) for answer in remover.hear(3)] == ["a230", "a130", "a130"]
        assert len(altered.result(SAFETY_NET_SECONDS).value.partitions) == 2
        assert in_memory.result(SAFETY_NET_SECONDS).value.settings.engine == "memory"
        assert publish_and_fetch(other, "old")[-1:] == [b"new"]


def test_a_mask_of_zbus_that_hangs_delays_nobody_else(tmp_path: Path) -> None:
    files = HeldFiles()
    with LiveServer(configure(tmp_path, admin=True), files=files) as live, live.caller() as other:
        live.call(lambda: live.server.broker.create_topic("quick", 1, {"engine": "memory"}, SERVER))
        files.shut()
        connection = http.client.HTTPConnection(live.server.addresses["zbus"], timeout=SAFETY_NET_SECONDS)
        try:
            connection.request("POST", "/", headers={"cmd": "create", "mq": "Q", "mqMask": "1"})
            live.until(lambda: files.waiting > 0)
            assert publish_and_fetch(other, "quick", b"a") == [b"a"]
            assert health(live) == 200
        finally:
            files.let_through()
        assert connection.getresponse().status == 200
        connection.close()
        live.until(lambda: live.server.broker.has_topic("Q"))


@pytest.mark.parametrize(
    "requests",
    [
        [("zbus", "POST", "/", {"cmd": "create", "mq": "quick", "channel": "C"}, None)],
        [
            ("admin", "POST", "/api/groups", {}, b'{"topic": "quick", "name": "g"}'),
            ("admin", "PATCH", "/api/topics/quick/groups/kept", {}, b'{"ack_seconds": 7}'),
            ("admin", "POST", "/api/topics/quick/groups/kept/seek", {}, b'{"at": "end"}'),
            ("admin", "DELETE", "/api/topics/quick/groups/old", {}, None),
        ],
    ],
)
def test_a_change_of_a_group_that_hangs_delays_nobody_else(
    tmp_path: Path, requests: list[tuple[str, str, str, dict[str, str], bytes | None]]
) -> None:
    files = HeldFiles()
    with LiveServer(configure(tmp_path, admin=True), files=files) as live, live.caller() as other:
        live.call(lambda: live.server.broker.create_topic("quick", 1, {"engine": "memory"}, SERVER))
        for name in ("kept", "old"):
            live.run(lambda name=name: live.server.broker.groups.create("quick", name, principal=SERVER).saved.wait())  # type: ignore[misc]
        token = {"Authorization": f"Bearer {read_token(str(tmp_path))}"}
        files.shut()
        connections = []
        try:
            for service, method, path, headers, body in requests:
                connection = http.client.HTTPConnection(live.server.addresses[service], timeout=SAFETY_NET_SECONDS)
                connection.request(method, path, body, headers | token)
                connections.append(connection)
            live.until(lambda: files.waiting > 0)
            assert publish_and_fetch(other, "quick", b"a") == [b"a"]
            assert health(live) == 200
        finally:
            files.let_through()
        for connection in connections:
            assert connection.getresponse().status in (200, 201)
            connection.close()


def test_a_client_that_is_lost_while_its_topic_is_made_has_its_records_stored(tmp_path: Path) -> None:
    files = HeldFiles()
    with LiveServer(configure(tmp_path), files=files) as live, live.caller() as other:
        files.shut()
        with live.caller() as creator:
            creator.send(create_topic("made"), create("made", b"last"), create_topic("more"), create("more", b"words"))
            live.until(lambda: files.waiting > 0)
            live.call(lambda: next(one for one in live.connections if one.busy).abort())
            live.until(lambda: len(live.connections) == 1)
        files.let_through()
        broker = live.server.broker
        live.until(lambda: broker.has_topic("more") and broker.topic("more").partitions[0].high_watermark == 1)
        assert publish_and_fetch(other, "made") == [b"last"]


def test_a_new_topic_costs_few_syncs(tmp_path: Path) -> None:
    class CountingFiles(LocalFiles):
        syncs = 0

        def replace_file(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
            self.syncs += 1
            super().replace_file(path, content, mode=mode)

        def flush_folder(self, path: str) -> None:
            self.syncs += 1
            super().flush_folder(path)

    files = CountingFiles()
    with LiveServer(configure(tmp_path), files=files) as live:
        before = files.syncs
        live.call(lambda: live.server.broker.create_topic("news", principal=SERVER))
        live.until(lambda: live.server.topic_list.last.done)
        assert files.syncs - before <= 8  # two folders, and two each for settings, checkpoint and list
