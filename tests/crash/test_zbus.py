"""SIGKILL under zbus, on a real server: what was acknowledged is there, and channels go on where they were.

A message's id says who published it and its number: what was acknowledged must be there afterwards, in order, once. The
seed of a run is in the name of its test; BABELBUS_TEST_SEED chooses another first one.
"""

import contextlib
import itertools
import json
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import pytest

from babelbus.config import Config, GroupsSettings, TopicDefaults, ZbusSettings
from babelbus.core.groups.cursor_files import GroupFile
from babelbus.storage.files import LocalFiles
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.child import Child
from tests.support.server import configure
from tests.support.zbus import HttpClient, SocketClient, command, request_of

SEED = int(os.environ.get("BABELBUS_TEST_SEED", "1"))
QUICK = range(SEED, SEED + 2)
SLOW = range(SEED + 2, SEED + 42)
MQ = "work"
BURSTS = (1, 1, 3, 50, 200)
WINDOW = 40
Wire = TypeVar("Wire", bound=HttpClient | SocketClient)


def seeds() -> list[Any]:
    return [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)]


def settings(folder: Path, *, ack: str = "written") -> Config:
    topics = TopicDefaults(ack=ack, segment_bytes=2**16)  # type: ignore[arg-type]  # one of the three
    made = configure(folder, topics=topics, zbus=ZbusSettings(port=0))
    return msgspec.structs.replace(made, groups=GroupsSettings(commit_seconds=0.02))


def body(number: int) -> str:
    """A message's body: its number, and as many letters as the number says."""
    return f"{number} {'x' * (number * 7919 % 300)}"


class Worker(threading.Thread, Generic[Wire]):
    """Works on a connection until the server is gone; counts what it has done."""

    def __init__(self, client: Wire, name: str) -> None:
        super().__init__(daemon=True)
        self._client: Wire = client
        self._reached = threading.Condition()
        self.name = name
        self.count = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            while True:
                self._work()
        except ConnectionError:
            pass  # the server was killed
        except Exception as error:  # the test sees it
            self.failure = error
        finally:
            self._client.close()
            self._did(0)

    def _work(self) -> None:
        raise NotImplementedError

    def _did(self, count: int = 1) -> None:
        with self._reached:
            self.count += count
            self._reached.notify_all()

    def wait_for(self, count: int) -> None:
        """Return when it has done so much more, or has failed."""
        with self._reached:
            begun = self.count
            self._reached.wait_for(lambda: self.count >= begun + count or self.failure is not None, SAFETY_NET_SECONDS)


class Publisher(Worker[Wire]):
    """Publishes messages one behind the other, pipelined, in bursts; `count` is the number of the last ack."""

    def __init__(self, client: Wire, name: str, first: int, chance: random.Random) -> None:
        super().__init__(client, name)
        self.sent = self.count = first
        self._chance = chance

    def _work(self) -> None:
        burst = self._chance.choice(BURSTS)
        numbers = range(self.sent, self.sent + burst)
        self.sent += burst
        self._publish(numbers)
        for number in numbers:
            status, request_id = self._hear()
            assert (status, request_id) == (200, f"{self.name}-{number}")
            self._did()

    def _publish(self, numbers: Sequence[int]) -> None:
        raise NotImplementedError

    def _hear(self) -> tuple[int, str]:
        raise NotImplementedError


class HttpPublisher(Publisher[HttpClient]):
    def _publish(self, numbers: Sequence[int]) -> None:
        self._client.send(b"".join([self._request(number) for number in numbers]))

    def _request(self, number: int) -> bytes:
        request_id = f"{self.name}-{number}"
        headers = {"cmd": "pub", "mq": MQ, "id": request_id, "content_type": "text/plain"}
        return request_of("POST", "/", body(number).encode(), **headers)

    def _hear(self) -> tuple[int, str]:
        response = self._client.next()
        return response.status, response.headers["id"]


class SocketPublisher(Publisher[SocketClient]):
    def _publish(self, numbers: Sequence[int]) -> None:
        self._client.say_all([command("pub", body(number), mq=MQ, id=f"{self.name}-{number}") for number in numbers])

    def _hear(self) -> tuple[int, str]:
        answer = self._client.next()
        return answer["status"], answer["headers"]["id"]


class Consumer(Worker[Wire]):
    """Gets messages of a channel; `offsets` are theirs. At most `WINDOW` of them are on their way to it."""

    def __init__(self, client: Wire, channel: str) -> None:
        super().__init__(client, channel)
        self.offsets: list[int] = []

    def _got(self, messages: Sequence[dict[str, Any]]) -> None:
        for message in messages:
            assert message["body"] == body(int(message["headers"]["id"].rpartition("-")[2]))
            self.offsets.append(int(message["headers"]["offset"]))
        self._did(len(messages))


class Subscriber(Consumer[SocketClient]):
    """Has them pushed, and fills its window when it is empty."""

    def __init__(self, client: SocketClient, channel: str) -> None:
        super().__init__(client, channel)
        client.say("sub", mq=MQ, channel=channel, window=WINDOW, ack=False)

    def _work(self) -> None:
        message = self._client.next()
        assert "status" not in message, message
        self._got([message])
        if message["headers"]["window"] == "0":
            self._client.say("sub", mq=MQ, channel=self.name, window=WINDOW, ack=False)


class Taker(Consumer[HttpClient]):
    """Takes them over HTTP."""

    def _work(self) -> None:
        response = self._client.do("take", mq=MQ, channel=self.name, window=str(WINDOW))
        assert response.status in (200, 604), response
        self._got(json.loads(response.body))


def take_all(client: SocketClient, channel: str, mq: str = MQ) -> list[dict[str, Any]]:
    """Everything that a channel has not read."""
    found: list[dict[str, Any]] = []
    while (answer := client.do("take", mq=mq, channel=channel, window=1000))["status"] == 200:
        found += answer["body"]
    assert answer["status"] == 604
    return found


def stored_position(folder: Path, channel: str, mq: str = MQ) -> int:
    """The cursor of a channel as it is on disk."""
    groups = GroupFile(LocalFiles(), str(folder)).load()[1]
    [found] = [group for group in groups if (group.topic, group.name) == (mq, channel)]
    return found.cursors[0].committed


def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; it is asked again and again. A server that never gets there is killed."""
    for _ in itertools.repeat(None):
        if condition():
            return


def check_log(found: list[dict[str, Any]], publishers: Sequence[Publisher[Any]]) -> None:
    """Each publisher's messages are there in order and once, those that were acknowledged and perhaps more."""
    assert [int(message["headers"]["offset"]) for message in found] == list(range(len(found)))
    for publisher in publishers:
        own = [message for message in found if message["headers"]["id"].startswith(f"{publisher.name}-")]
        assert [message["headers"]["id"] for message in own] == [f"{publisher.name}-{at}" for at in range(len(own))]
        assert [message["body"] for message in own] == [body(at) for at in range(len(own))]
        assert publisher.count <= len(own) <= publisher.sent
        publisher.sent = len(own)


@pytest.mark.parametrize("seed", seeds())
def test_after_a_kill_every_acknowledged_message_is_there_and_no_channel_skips_one(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    mq_type = ("disk", "disk", "db")[seed % 3]
    ack = ("written", "flushed")[seed % 2]
    lasts = {"http": 0, "socket": 0}
    positions = {"pushed": 0, "taken": 0}
    durable: dict[str, int] = {}
    publishers: list[Publisher[Any]] = []
    consumers: list[Consumer[Any]] = []
    for run in range(3):  # each stands on what the ones before left, and the last one only looks
        with Child(settings(tmp_path, ack=ack)) as child:
            address = child.addresses["zbus"]
            with SocketClient(address) as client:
                for channel in positions:
                    client.do("create", mq=MQ, mqType=mq_type, channel=channel)
                client.do("create", mq=MQ, channel=f"audit{run}", offset=0)
                found = take_all(client, f"audit{run}")
                check_log(found, publishers)
                for consumer in consumers:
                    check_channel(client, consumer, positions[consumer.name], durable[consumer.name], found)
                positions = dict.fromkeys(positions, len(found))
                lasts |= {publisher.name: publisher.sent for publisher in publishers}
            if run == 2:
                child.kill()
                return
            publishers = [
                HttpPublisher(HttpClient(address), "http", lasts["http"], chance),
                SocketPublisher(SocketClient(address), "socket", lasts["socket"], chance),
            ]
            consumers = [Subscriber(SocketClient(address), "pushed"), Taker(HttpClient(address), "taken")]
            workers: list[Worker[Any]] = [*publishers, *consumers]
            for worker in workers:
                worker.start()
            chance.choice(publishers).wait_for(chance.choice([1, 30, 300, 1500]))
            chance.choice(consumers).wait_for(1)
            durable = {channel: stored_position(tmp_path, channel) for channel in positions}
            child.kill()
            for worker in workers:
                worker.join(SAFETY_NET_SECONDS)
                assert not worker.is_alive()
                assert worker.failure is None, f"{worker.name}: {worker.failure!r}\n{child.said}"


def check_channel(
    client: SocketClient, consumer: Consumer[Any], begun: int, durable: int, found: list[dict[str, Any]]
) -> None:
    """A channel that began at an offset goes on where it was, or earlier, and skips at most what was on its way.

    Its cursor on disk was at `durable` or behind. Afterwards the channel has read all that is there.
    """
    got = consumer.offsets
    assert got == list(range(begun, begun + len(got)))  # in order, and none twice while the server ran
    position = client.do("query", mq=MQ, channel=consumer.name)["body"]["offset"]
    assert durable <= position <= begun + len(got) + WINDOW
    again = take_all(client, consumer.name)
    assert [one["headers"]["id"] for one in again] == [one["headers"]["id"] for one in found[position:]]


def test_what_was_answered_about_queues_and_channels_survives_a_kill_and_bindings_do_not(tmp_path: Path) -> None:
    with Child(settings(tmp_path)) as child, SocketClient(child.addresses["zbus"]) as client:
        client.do("create", mq="masked", mqType="disk", mqMask=2, channel="C", channelMask=4, filter="a.*")
        client.do("create", mq="removed", mqType="disk", channel="C")
        client.do("create", mq=MQ, mqType="db", channel="stays")
        client.do("create", mq=MQ, channel="removed")
        client.do("create", mq="passing", mqType="disk", mqMask=1, channel="C")
        client.do("sub", mq="passing", channel="C")
        client.do("bind", [{"url": "/bound", "mq": MQ}], mq=MQ)
        client.do("pub", "kept", mq=MQ)
        client.do("create", mq="masked", mqMask=3)
        client.do("remove", mq=MQ, channel="removed")
        assert client.do("remove", mq="removed")["status"] == 200
        child.kill()
    with Child(settings(tmp_path)) as child, SocketClient(child.addresses["zbus"]) as client:
        told = {queue["name"]: queue for queue in client.do("query")["body"]}
        assert told.keys() == {"masked", MQ, "passing"}
        [channel] = told["masked"]["channels"]
        assert (told["masked"]["type"], told["masked"]["mask"]) == ("disk", 3)
        assert (channel["name"], channel["mask"], channel["filter"]) == ("C", 4, "a.*")
        assert (told[MQ]["type"], [one["name"] for one in told[MQ]["channels"]]) == ("db", ["stays"])
        assert [one["body"] for one in take_all(client, "stays")] == ["kept"]
        with HttpClient(child.addresses["zbus"]) as web:
            assert web.ask("GET", "/bound/x").status == 404
        # Its subscribers went with the server, not from it: so it goes with the next one.
        with SocketClient(child.addresses["zbus"]) as passing:
            passing.do("sub", mq="passing", channel="C")
        until(lambda: client.do("query", mq="passing")["status"] == 404)


def test_a_cursor_that_was_saved_is_where_a_channel_goes_on_after_a_kill(tmp_path: Path) -> None:
    with Child(settings(tmp_path)) as child, SocketClient(child.addresses["zbus"]) as client:
        client.do("create", mq=MQ, mqType="disk", channel="C")
        for number in range(9):
            client.do("pub", number, mq=MQ)
        client.do("take", mq=MQ, channel="C", window=3)
        client.say("sub", mq=MQ, channel="C", window=2, ack=False)
        assert [client.next()["body"] for _ in range(2)] == [3, 4]
        until(lambda: stored_position(tmp_path, "C") == 5)
        child.kill()
    with Child(settings(tmp_path)) as child, SocketClient(child.addresses["zbus"]) as client:
        assert [message["body"] for message in take_all(client, "C")] == [5, 6, 7, 8]


def test_a_memory_mq_is_there_and_empty_after_a_kill_and_its_channels_skip_nothing_that_comes(tmp_path: Path) -> None:
    with Child(settings(tmp_path)) as child, SocketClient(child.addresses["zbus"]) as client:
        client.do("create", mq="M", mqMask=2, channel="C")
        for number in range(5):
            client.do("pub", number, mq="M")
        client.do("take", mq="M", channel="C", window=4)
        until(lambda: stored_position(tmp_path, "C", "M") == 4)
        child.kill()
    with Child(settings(tmp_path)) as child, SocketClient(child.addresses["zbus"]) as client:
        told = client.do("query", mq="M")["body"]
        assert (told["type"], told["mask"], told["size"], told["messageDepth"]) == ("memory", 2, 0, 0)
        assert take_all(client, "C", "M") == []
        client.do("pub", "new", mq="M")
        assert [message["body"] for message in take_all(client, "C", "M")] == ["new"]


def test_an_orderly_stop_loses_no_message_that_is_on_its_way_to_a_consumer_that_reads(tmp_path: Path) -> None:
    count = 10_000
    begun = 0
    for _ in range(2):
        with Child(settings(tmp_path)) as child:
            with SocketClient(child.addresses["zbus"]) as client:
                client.do("create", mq=MQ, mqType="disk", channel="C")
                for first in range(0, 0 if begun else count, 500):
                    client.say_all([command("pub", "x" * 1000, mq=MQ) for _ in range(first, first + 500)])
                    assert {client.next()["status"] for _ in range(500)} == {200}
            with SocketClient(child.addresses["zbus"]) as consumer:
                consumer.say("sub", mq=MQ, channel="C", ack=False)
                got = [int(consumer.next()["headers"]["offset"]) for _ in range(100)]
                stopping = threading.Thread(target=child.stop)
                stopping.start()
                with contextlib.suppress(ConnectionResetError):
                    while True:
                        got.append(int(consumer.next()["headers"]["offset"]))
                stopping.join(SAFETY_NET_SECONDS)
            assert got == list(range(begun, begun + len(got)))
            begun += len(got)
            if begun == count:
                return


def test_a_full_disk_refuses_publications_and_channels_go_on_and_with_room_all_is_well_again(tmp_path: Path) -> None:
    with Child(settings(tmp_path)) as child, SocketClient(child.addresses["zbus"]) as client:
        client.do("create", mq=MQ, mqType="disk", channel="C")
        assert client.do("pub", "first", mq=MQ)["status"] == 200
        child.limit_files(4096)
        answers = [client.do("pub", "x" * 8192, mq=MQ, id=str(number)) for number in range(3)]
        assert [(answer["status"], answer["headers"]["id"]) for answer in answers] == [
            (500, "0"),
            (500, "1"),
            (500, "2"),
        ]
        with HttpClient(child.addresses["zbus"]) as web:
            assert web.do("pub", b"x" * 8192, mq=MQ).status == 500
        assert [message["body"] for message in take_all(client, "C")] == ["first"]
        child.limit_files(-1)
        until(lambda: client.do("pub", "last", mq=MQ)["status"] == 200)
        assert [message["body"] for message in take_all(client, "C")] == ["last"]
