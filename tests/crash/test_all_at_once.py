"""All protocols on one server at once, until it is killed or its disk fails: nothing acknowledged is lost or doubled.

See rows 1 and 7 of the fault matrix. The seed is in the name of a test; BABELBUS_TEST_SEED chooses another first one.
"""

import errno
import json
import logging
import os
import random
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.clients.sbus import Client
from babelbus.clients.worterbuch.blocking import BlockingClient
from babelbus.config import Config, StateSettings, TopicDefaults, WorterbuchSettings
from babelbus.storage.files import File, LocalFiles
from tests.crash.test_kill import TOPIC, Publisher, numbers_of, record
from tests.crash.test_state import Writer, check, url
from tests.crash.test_zbus import MQ, HttpPublisher, SocketPublisher, check_log, take_all
from tests.crash.test_zbus import body as body_of
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.child import Child
from tests.support.jebp import Caller, create, create_topic, said
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient, SocketClient

SEED = int(os.environ.get("BABELBUS_TEST_SEED", "1"))
KILLS = [SEED, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(SEED + 1, SEED + 24))]
FAULTS = [
    *range(SEED, SEED + 2),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(SEED + 2, SEED + 42)),
]
PLANT = "plant"
"""Topic of what comes over sbus, which acknowledges nothing."""


def settings(folder: Path, ack: str = "flushed") -> Config:
    topics = TopicDefaults(ack=ack, segment_bytes=2**20)  # type: ignore[arg-type]  # one of the three
    worterbuch = WorterbuchSettings(port=0, tcp_port=0, unix_path=str(folder / "w.sock"))
    state = StateSettings(ack=ack, checkpoint_bytes=16_384)  # type: ignore[arg-type]  # the same
    return msgspec.structs.replace(configure(folder, topics=topics, worterbuch=worterbuch), state=state)


class Talker(threading.Thread):
    """Publishes numbers over sbus until the server is gone."""

    def __init__(self, address: str, first: int) -> None:
        super().__init__(daemon=True)
        self._client = Client(address, timeout_seconds=SAFETY_NET_SECONDS)
        self.sent = first

    def run(self) -> None:
        try:
            while True:
                self._client.publish(b"plant/line", b"%d" % self.sent)
                self.sent += 1
                if self.sent % 10 == 0:
                    self._client.whoami()  # waits: sbus has no other way to be slowed down
        except OSError:  # the server was killed
            self._client.close()


def talked(client: SocketClient, name: str) -> list[int]:
    """The numbers that topic `plant` has recorded."""
    client.do("create", mq=PLANT, channel=name, offset=0)
    return [int(message["body"]) for message in take_all(client, name, PLANT)]


@pytest.mark.parametrize("seed", KILLS)
def test_a_kill_under_all_protocols_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    ack = ("flushed", "written")[seed % 2]
    stored, lasts, spoken = 0, [0, 0], 0
    mq_lasts = {"http": 0, "socket": 0}
    for run in range(2):
        with Child(settings(tmp_path, ack)) as child, child.caller() as caller:
            address = child.addresses["zbus"]
            with SocketClient(address) as client:
                client.do("create", mq=MQ, mqType="disk")
                client.do("create", mq=PLANT, mqType="disk")
            caller.ask(create_topic(TOPIC))
            publisher = Publisher(caller, stored, chance)
            queues: list[Any] = [
                HttpPublisher(HttpClient(address), "http", mq_lasts["http"], chance),
                SocketPublisher(SocketClient(address), "socket", mq_lasts["socket"], chance),
            ]
            writers = [Writer(tmp_path, f"w{number}", last, chance) for number, last in enumerate(lasts)]
            talker = Talker(child.addresses["sbus"], spoken)
            threads: list[threading.Thread] = [publisher, *queues, *writers, talker]
            for thread in threads:
                thread.start()
            publisher.wait_for(chance.choice([1, 10, 200, 1000]))
            queues[seed % 2].wait_for(chance.choice([1, 50]))
            writers[0].wait_for(chance.choice([1, 500]))
            child.kill()
            for thread in threads:
                thread.join(SAFETY_NET_SECONDS)
                assert not thread.is_alive()
            assert not publisher.refused
            assert [one.failure for one in queues] == [None, None]
            assert [one.refused for one in writers] == [[], []]
        with Child(settings(tmp_path, ack)) as child, child.caller() as caller:
            numbers = numbers_of(caller)
            assert numbers == list(range(len(numbers)))
            assert stored + publisher.acknowledged <= len(numbers) <= stored + publisher.sent
            with SocketClient(child.addresses["zbus"]) as client:
                client.do("create", mq=MQ, channel=f"audit{run}", offset=0)
                check_log(take_all(client, f"audit{run}"), queues)
                heard = talked(client, f"audit{run}")
            assert heard == sorted(set(heard))
            assert not heard or heard[-1] < talker.sent
            with BlockingClient(url(tmp_path)) as state:
                for number, writer in enumerate(writers):
                    check(state, writer)
                    found = [value[0] for value in state.pget(f"{writer.prefix}/#").values()]
                    lasts[number] = max(found, default=0)
            stored, spoken = len(numbers), talker.sent
            mq_lasts = {one.name: one.sent for one in queues}
            assert "Traceback" not in child.said
            assert child.stop() == 0


# -- a disk that fails -------------------------------------------------------------------------------------------------


class FailingFile:
    def __init__(self, file: File, disk: "FailingFiles") -> None:
        self._file, self._disk = file, disk

    def pwrite(self, data: bytes | bytearray | memoryview, position: int) -> None:
        written = self._disk.short_write(len(data))
        if written is not None:
            self._file.pwrite(memoryview(data)[:written], position)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._file.pwrite(data, position)

    def flush(self) -> None:
        self._disk.fail(errno.EIO)
        self._file.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


class FailingFiles(LocalFiles):
    """The files of this machine; `rate` of the calls that change or open them fail."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.rate = 0.0
        self.failures = 0

    def fail(self, number: int) -> None:
        if self._chance.random() < self.rate:
            self.failures += 1
            raise OSError(number, os.strerror(number))

    def short_write(self, size: int) -> int | None:
        """Return how much of a write reaches the disk before the write fails, None if it works."""
        if self._chance.random() >= self.rate:
            return None
        self.failures += 1
        return self._chance.randint(0, size)

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        self.fail(errno.EMFILE)
        return FailingFile(super().open(path, create=create, write=write), self)  # type: ignore[return-value]

    def replace_file(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self.fail(errno.EIO)
        super().replace_file(path, content, mode=mode)

    def rename(self, source: str, target: str) -> None:
        self.fail(errno.EIO)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self.fail(errno.EIO)
        super().unlink(path)

    def flush_folder(self, path: str) -> None:
        self.fail(errno.EIO)
        super().flush_folder(path)


class Log:
    """Numbers that were sent to one place of the bus one by one, and those that were acknowledged."""

    def __init__(self, send: Callable[[int], bool]) -> None:
        self._send = send
        self.sent = 0
        self.acknowledged: list[int] = []

    def add(self) -> bool:
        number = self.sent
        self.sent += 1
        taken = self._send(number)
        if taken:
            self.acknowledged.append(number)
        return taken

    def check(self, found: Iterable[int]) -> None:
        """Check that everything acknowledged is there, in order and once; an error meant *unknown*."""
        numbers = list(found)
        assert numbers == sorted(set(numbers))
        assert set(self.acknowledged) <= set(numbers) <= set(range(self.sent))


class Clients:
    """One client of each protocol that acknowledges."""

    def __init__(self, live: LiveServer) -> None:
        self._caller: Caller = live.caller()
        self._zbus = SocketClient(live.server.addresses["zbus"])
        host, _, port = live.server.addresses["worterbuch-tcp"].rpartition(":")
        self._socket = socket.create_connection((host, int(port)), SAFETY_NET_SECONDS)
        self._lines = self._socket.makefile("rb")
        assert b"welcome" in self._lines.readline()
        self.logs = [Log(self._create), Log(self._publish), Log(self._set)]

    def _create(self, number: int) -> bool:
        return said(self._caller.ask(create(TOPIC, record(number)))[0]) == "a130"

    def _publish(self, number: int) -> bool:
        answer = self._zbus.do("pub", body_of(number), mq=MQ, id=f"p-{number}")
        return bool(answer["status"] == 200)

    def _set(self, number: int) -> bool:
        request = {"set": {"transactionId": number, "key": f"k/{number}", "value": number}}
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        (kind,) = json.loads(self._lines.readline())
        return bool(kind == "ack")

    def close(self) -> None:
        self._caller.socket.close()
        self._zbus.close()
        self._lines.close()
        self._socket.close()


def check_all(live: LiveServer, logs: list[Log], channel: str) -> None:
    news, queue, keys = logs
    with live.caller() as caller, SocketClient(live.server.addresses["zbus"]) as client:
        news.check(numbers_of(caller))
        client.do("create", mq=MQ, channel=channel, offset=0)
        found = take_all(client, channel)
        queue.check(int(message["headers"]["id"].partition("-")[2]) for message in found)
        assert all(message["body"] == body_of(int(message["headers"]["id"][2:])) for message in found)
    state = live.server.broker.state
    values = {number: live.call(lambda number=number: state.find(f"k/{number}")) for number in range(keys.sent)}  # type: ignore[misc]
    keys.check(number for number, value in values.items() if value == b"%d" % number)


@pytest.mark.parametrize("seed", FAULTS)
def test_a_disk_that_fails_now_and_then_loses_nothing_acknowledged(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(seed)
    files = FailingFiles(chance)
    caplog.set_level(logging.ERROR)
    with LiveServer(settings(tmp_path), files=files) as live:
        with live.caller() as caller, SocketClient(live.server.addresses["zbus"]) as client:
            assert said(caller.ask(create_topic(TOPIC))[0]) == "a130"
            client.do("create", mq=MQ, mqType="disk")
        clients = Clients(live)
        logs = clients.logs
        for _ in range(4):
            files.rate = chance.choice([0.02, 0.1, 0.5])
            for _ in range(25):
                for log in logs:
                    log.add()
            files.rate = 0.0
            for log in logs:  # what is well again takes records again, without a restart
                while not log.add():
                    pass
        assert files.failures
        check_all(live, logs, "before")
        clients.close()
    with LiveServer(settings(tmp_path)) as live:
        check_all(live, logs, "after")
    assert not [record.exc_text for record in caplog.records if record.exc_info]
