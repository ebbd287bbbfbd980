"""The client against the real server, over real sockets; faults of the network come from a proxy that cuts."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.client import (
    BlockingClient,
    Client,
    ClientClosedError,
    ClientError,
    ConnectionLostError,
    Flushed,
    Identity,
    InvalidRecordError,
    LocalProtocolError,
    NoRightsError,
    NotAuthorisedError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    Position,
    Published,
    Record,
    RecordTooLargeError,
    RequestError,
    TopicExistsError,
    UnknownTopicError,
    UntrustedServerError,
)
from babelbus.clients.jebp import connection, reconnect
from babelbus.config import Config
from babelbus.core.access import SERVER
from babelbus.server.access import ClientEntry
from babelbus.server.app import Server
from babelbus.testing.ports import free_ports
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.server import connections_of

PAYLOADS = [b"%05d" % number for number in range(5_000)]
PATIENT: dict[str, Any] = {"request_timeout_seconds": SAFETY_NET_SECONDS}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a starved machine its time: deadlines are tested in `test_client_scripted`."""
    monkeypatch.setattr(connection, "GREETING_SECONDS", SAFETY_NET_SECONDS)
    monkeypatch.setattr(reconnect, "TIMEOUT_SECONDS", SAFETY_NET_SECONDS)


def configure(folder: Path, port: int = 0, partitions: int = 1) -> Config:
    config = Config()
    replace = msgspec.structs.replace
    return replace(
        config,
        data=replace(config.data, folder=str(folder)),
        jebp=replace(config.jebp, port=port, handshake_seconds=SAFETY_NET_SECONDS),
        admin=replace(config.admin, enabled=False),
        worterbuch=replace(config.worterbuch, enabled=False),
        zbus=replace(config.zbus, enabled=False),  # its port is fixed, and other tests run beside this one
        eventmesh=replace(config.eventmesh, enabled=False),
        sbus=replace(config.sbus, enabled=False),
        topics=replace(config.topics, partitions=partitions),
    )


class Bus:
    """A server that can be stopped and started again on its port, and its administrator."""

    def __init__(self, folder: Path, partitions: int = 1) -> None:
        self.folder = folder
        self.partitions = partitions
        self.port = free_ports(1)[0]

    async def start(self) -> None:
        self.server = Server(configure(self.folder, self.port, self.partitions))
        await self.server.start()
        self.address = self.server.addresses["jebp"]

    async def stop(self) -> None:
        await self.server.stop()

    @property
    def admin(self) -> Identity:
        return Identity.load(self.folder / "conf" / "admin_key")

    def client(self, **options: Any) -> Client:
        options.setdefault("identity", self.admin)
        return Client(options.pop("address", self.address), **PATIENT, **options)


@asynccontextmanager
async def running(folder: Path, partitions: int = 1) -> AsyncIterator[Bus]:
    bus = Bus(folder, partitions)
    await bus.start()
    try:
        yield bus
    finally:
        await bus.stop()


def with_bus(folder: Path, test: Callable[[Bus, Client], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a test with a server, and a client that has made the topic `t`."""

    async def run() -> None:
        async with running(folder, options.pop("partitions", 1)) as bus, bus.client(**options) as client:
            await client.create_topic("t")
            await test(bus, client)

    asyncio.run(run())


async def read_all(client: Client, topic: str = "t", **options: Any) -> list[Record]:
    return [record async for record in client.follow(topic, until_end=True, **options)]


class CuttingProxy:
    """Stands between client and server, and cuts a connection once it has carried so many bytes of answers."""

    def __init__(self, target: str, cut_after: list[int]) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.cuts = cut_after
        self.connections = 0

    async def __aenter__(self) -> "CuttingProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        left = self.cuts.pop(0) if self.cuts else None
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)

        async def forward() -> None:
            while data := await reader.read(2**16):
                up_writer.write(data)

        task = asyncio.create_task(forward())
        try:
            while data := await up_reader.read(2**16):
                if left is not None:
                    data = data[:left]
                    left -= len(data)
                writer.write(data)
                if left == 0:
                    await writer.drain()
                    break
        except ConnectionError:
            pass
        finally:
            task.cancel()
            for one in (writer, up_writer):
                one.transport.abort()


def test_a_record_comes_back_as_it_was_published(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        headers = ((b"ct", b"text"), (b"none", None))
        assert await client.publish("t", b"hello", key=b"k", headers=headers, timestamp=17) == Position(0, 0)
        assert await client.publish("t", None, key=b"k", timestamp=18) == Position(0, 1)
        assert await read_all(client) == [
            Record(b"hello", b"k", headers, 17, 0, 0),
            Record(None, b"k", (), 18, 0, 1),
        ]

    with_bus(tmp_path, check)


def test_a_list_is_stored_in_order_in_batches_whose_places_are_given(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        placed = await client.publish_many("t", PAYLOADS, batch_records=700)
        assert placed == [Published(0, at, min(700, 5_000 - at)) for at in range(0, 5_000, 700)]
        records = await read_all(client)
        assert [record.payload for record in records] == PAYLOADS
        assert [record.offset for record in records] == list(range(5_000))
        assert client.acknowledged == 5_000

    with_bus(tmp_path, check)


def test_batches_are_cut_by_bytes_too_and_a_larger_record_goes_alone(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        payloads = [b"a" * 400, b"b" * 400, b"c" * 3_000, b"d", b"e"]
        placed = await client.publish_many("t", payloads)
        assert [one.count for one in placed] == [2, 1, 2]
        assert [record.payload for record in await read_all(client)] == payloads

    with_bus(tmp_path, check, batch_bytes_max=1_000)


def test_records_without_a_time_get_this_machines_and_the_others_keep_theirs(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        await client.publish_many("t", [b"a", b"b"], timestamps=[0, 5])
        await client.publish_many("t", [Record(b"c", timestamp=6), Record(b"d", b"key")])
        times = [record.timestamp for record in await read_all(client)]
        assert times[1:3] == [5, 6]
        assert min(times[0], times[3]) > 1_600_000_000_000

    with_bus(tmp_path, check)


def test_what_was_sent_is_stored_in_order_when_flush_returns(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        for payload in PAYLOADS:
            client.send("t", payload)
            if client.full:
                await client.drain()
        flushed = await client.flush()
        assert flushed.records == 5_000
        assert flushed.batches > 5_000 * 39 // 4_096
        assert [record.payload for record in await read_all(client)] == PAYLOADS
        assert await client.flush() == Flushed(0, 0)

    with_bus(tmp_path, check, batch_bytes_max=4_096, in_flight_bytes_max=16_384)


def test_what_was_sent_goes_out_after_the_linger_time_by_itself(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        client.send("t", b"one")
        client.send("t", b"two")
        async for record in client.follow("t", offset=0):
            if record.offset == 1:
                break
        assert client.acknowledged == 2

    with_bus(tmp_path, check)


def test_refusals_of_topics_have_their_own_errors(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        with pytest.raises(TopicExistsError):
            await client.create_topic("t")
        with pytest.raises(UnknownTopicError):
            await client.remove_topic("nope")
        with pytest.raises(LocalProtocolError):
            await client.create_topic("a,b")
        await client.remove_topic("t")
        with pytest.raises(UnknownTopicError):
            await client.fetch("t")
        guest = Identity.generate()
        bus.server._lists.put(ClientEntry(guest.fingerprint, "guest", admin=False))
        async with bus.client(identity=guest) as other:
            with pytest.raises(NoRightsError):
                await other.create_topic("u")
            with pytest.raises(NoRightsError):
                await other.remove_topic("t")

    with_bus(tmp_path, check)


def test_a_topic_made_again_under_its_name_is_read_from_its_own_beginning(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        await client.publish("t", b"old")
        assert len((await client.fetch("t")).batches) == 1
        await client.remove_topic("t")
        await client.create_topic("t")
        assert (await client.fetch("t")).batches == []
        assert await client.publish("t", b"new") == Position(0, 0)
        assert [record.payload for record in await read_all(client)] == [b"new"]

    with_bus(tmp_path, check)


def test_a_refused_batch_does_not_stop_those_behind_it(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        await client.publish("t", b"0")
        tasks = [
            asyncio.create_task(client.publish("t", b"%d" % number, partition=7 if number == 3 else -1))
            for number in range(1, 8)
        ]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results].count(RequestError) == 1
        assert isinstance(results[2], RequestError)
        assert [record.payload for record in await read_all(client)] == [b"0", b"1", b"2", b"4", b"5", b"6", b"7"]

    with_bus(tmp_path, check)


def test_what_cannot_be_stored_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        wrongs: list[dict[str, Any]] = [
            {"headers": ((b"$batch", b""),)},
            {"headers": ((b"h", b""),) * 127},
            {"timestamp": -1},
        ]
        for wrong in wrongs:
            with pytest.raises(InvalidRecordError):
                client.send("t", b"x", **wrong)
            with pytest.raises(InvalidRecordError):
                await client.publish("t", b"x", **wrong)
        with pytest.raises(LocalProtocolError):
            await client.publish("t", bytes(2**24))
        with pytest.raises(LocalProtocolError):
            await client.publish_many("t", [b"x"], timestamps=[])
        assert await client.publish("t", b"fine", headers=((b"h", b""),) * 126) == Position(0, 0)

    with_bus(tmp_path, check)


def test_flush_tells_of_a_batch_that_was_refused(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        client.send("nope", b"x")
        client.send("t", b"y")
        with pytest.raises(RequestError, match="nope"):
            await client.flush()
        assert [record.payload for record in await read_all(client)] == [b"y"]

    with_bus(tmp_path, check)


def test_fetch_starts_at_an_offset_a_time_or_the_first_record(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        await client.publish_many("t", PAYLOADS, timestamps=list(range(1, 5_001)))
        starts: list[tuple[dict[str, int], int]] = [({}, 0), ({"offset": 4_000}, 4_000), ({"timestamp": 3_001}, 3_000)]
        for options, first in starts:
            fetched = await client.fetch("t", offset=options.get("offset"), timestamp=options.get("timestamp"))
            (batch,) = fetched.batches
            assert (batch.topic, batch.partition, batch.base_offset, batch.next_offset) == ("t", 0, first, 5_000)
            assert [record.payload for record in batch.records()] == PAYLOADS[first:]
            assert batch.columns().offsets.tolist() == list(range(first, 5_000))
        assert (await client.fetch("t", offset=5_000)).batches == []
        assert (await client.fetch("t", timestamp=9_000)).batches == []
        with pytest.raises(OffsetOutOfRangeError):
            await client.fetch("t", offset=5_001)
        with pytest.raises(RecordTooLargeError):
            await client.fetch("t", offset=0, bytes_max=20)
        with pytest.raises(LocalProtocolError):
            await client.fetch("t", offset=1, timestamp=1)

    with_bus(tmp_path, check)


def test_fetches_of_many_tasks_do_not_mix_their_topics(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        for name in ("a", "b", "c"):
            await client.create_topic(name)
            await client.publish(name, name.encode())

        async def read(name: str) -> None:
            for _ in range(30):
                (batch,) = (await client.fetch(name)).batches
                assert [record.payload for record in batch.records()] == [name.encode()]

        await asyncio.gather(*(read(name) for name in "abcabc"))

    with_bus(tmp_path, check)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1_000])
def test_the_end_of_a_topic_is_found(tmp_path: Path, count: int) -> None:
    async def check(bus: Bus, client: Client) -> None:
        await client.publish_many("t", PAYLOADS[:count])
        assert await client.first_offset("t") == 0
        assert await client.end_offset("t") == count

    with_bus(tmp_path, check)


def test_following_until_the_end_stops_there_from_any_start(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        assert await read_all(client) == []
        await client.publish_many("t", PAYLOADS, timestamps=list(range(1, 5_001)))
        assert len(await read_all(client)) == 5_000
        assert len(await read_all(client, offset=4_990)) == 10
        assert len(await read_all(client, timestamp=4_990)) == 11
        assert await read_all(client, offset=5_000) == []
        with pytest.raises(OffsetOutOfRangeError):
            await read_all(client, offset=5_001)
        small = [len(batch) async for batch in client.follow_batches("t", until_end=True, bytes_max=10_000)]
        assert sum(small) == 5_000
        assert len(small) > 15

    with_bus(tmp_path, check)


def test_following_until_the_end_does_not_wait_for_ever_for_a_server_that_has_gone(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        await client.publish_many("t", PAYLOADS)
        batches = client.follow_batches("t", until_end=True, bytes_max=1_000)
        async with asyncio.timeout(SAFETY_NET_SECONDS):
            await anext(batches)
            client._requests.timeout_seconds = 0.05
            await bus.stop()
            with pytest.raises(ConnectionLostError, match="no connection to"):
                async for _ in batches:
                    pass
        await bus.start()

    with_bus(tmp_path, check)


def test_following_asks_for_more_when_a_record_is_larger_than_the_chunk(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        await client.publish_many("t", [b"a", bytes(100_000), b"c"])
        sizes = [batch.next_offset async for batch in client.follow_batches("t", until_end=True, bytes_max=1_000)]
        assert sizes[-1] == 3

    with_bus(tmp_path, check)


def test_a_follower_sees_what_is_published_later(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        async def follow() -> list[bytes | None]:
            seen = []
            async for record in client.follow("t"):
                seen.append(record.payload)
                if len(seen) == 20:
                    break
            return seen

        task = asyncio.create_task(follow())
        for number in range(20):
            await client.publish("t", b"%d" % number)
        assert await task == [b"%d" % number for number in range(20)]

    with_bus(tmp_path, check)


def test_one_partition_of_several_is_followed(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        await bus.server.broker.alter_topic("t", {"partitions": 3}, principal=SERVER)
        for number in range(3):
            assert await client.publish("t", b"%d" % number, partition=number) == Position(number, 0)
        for number in range(3):
            assert [one.payload for one in await read_all(client, partition=number)] == [b"%d" % number]

    with_bus(tmp_path, check)


def test_an_unknown_client_is_told_its_fingerprint(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as bus:
            stranger = Identity.generate()
            with pytest.raises(NotAuthorisedError, match=stranger.fingerprint):
                await bus.client(identity=stranger).__aenter__()

    asyncio.run(run())


def test_another_server_than_the_expected_one_is_not_spoken_to(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as bus:
            with pytest.raises(UntrustedServerError) as caught:
                await bus.client(server_fingerprint="0" * 64).__aenter__()
            real = Identity.load(tmp_path / "conf" / "server_key").fingerprint
            assert (caught.value.fingerprint, caught.value.expected) == (real, "0" * 64)
            async with bus.client(server_fingerprint=real) as client:
                assert client.server_fingerprint == real

    asyncio.run(run())


def test_nobody_there_is_a_lost_connection() -> None:
    async def run() -> None:
        with pytest.raises(ConnectionLostError, match="cannot connect"):
            await Client("127.0.0.1:1", identity=Identity.generate()).__aenter__()

    asyncio.run(run())


@pytest.mark.parametrize("cut", [340, 371, 400, 460, 700])
def test_batches_are_stored_once_when_the_connection_breaks_among_their_acks(tmp_path: Path, cut: int) -> None:
    async def check(bus: Bus, client: Client) -> None:
        async with (
            CuttingProxy(bus.address, [cut, cut + 31, cut + 97]) as proxy,
            bus.client(address=proxy.address) as other,
        ):
            placed = await other.publish_many("t", PAYLOADS, batch_records=100)
            assert proxy.connections > 1
        assert [one.base_offset for one in placed] == list(range(0, 5_000, 100))
        assert [record.payload for record in await read_all(client)] == PAYLOADS

    with_bus(tmp_path, check)


def test_a_follower_goes_on_at_its_offset_after_the_connection_broke(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        await client.publish_many("t", PAYLOADS)
        async with CuttingProxy(bus.address, [20_000] * 5) as proxy, bus.client(address=proxy.address) as other:
            records = []
            async for batch in other.follow_batches("t", until_end=True, bytes_max=12_000):
                records += [record.payload for record in batch.records()]
            assert proxy.connections > 4
        assert records == PAYLOADS

    with_bus(tmp_path, check)


def test_a_publisher_and_a_follower_live_through_a_restart_of_the_server(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        async def follow() -> list[bytes | None]:
            seen: list[bytes | None] = []
            async for record in client.follow("t", offset=0):
                seen.append(record.payload)
                if len(seen) == 2 * len(PAYLOADS):
                    break
            return seen

        follower = asyncio.create_task(follow())
        await client.publish_many("t", PAYLOADS, batch_records=50)
        publisher = asyncio.create_task(client.publish_many("t", PAYLOADS, batch_records=50))
        await client.fetch("t")  # a round trip, in which batches went out
        await bus.stop()
        await bus.start()
        await publisher
        assert await follower == [*PAYLOADS, *PAYLOADS]

    with_bus(tmp_path, check)


def test_a_program_is_told_when_its_connection_is_lost_and_when_it_is_there_again(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        told: asyncio.Queue[ClientError | None] = asyncio.Queue()
        async with bus.client(on_connection=told.put_nowait):
            assert told.empty()
            await bus.stop()
            assert isinstance(await told.get(), ConnectionLostError)
            await bus.start()
            assert await told.get() is None
        assert told.empty()  # who closes a client knows that

    with_bus(tmp_path, check)


def start_process(folder: Path, port: int) -> tuple["subprocess.Popen[str]", str]:
    """Start a server that can be killed, and give its address."""
    script = (
        "import sys, msgspec\n"
        "from babelbus.server.process import run\n"
        "from babelbus.config import Config\n"
        "config = msgspec.json.decode(sys.argv[1], type=Config)\n"
        "run(config, lambda server: print(server.addresses['jebp'], flush=True))\n"
    )
    config = msgspec.json.encode(configure(folder, port)).decode()
    process = subprocess.Popen([sys.executable, "-c", script, config], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_every_record_is_there_once_when_the_server_is_killed_under_a_publisher(tmp_path: Path) -> None:
    payloads = PAYLOADS * 20
    (port,) = free_ports(1)
    process, address = start_process(tmp_path, port)
    processes = [process]

    async def run() -> None:
        async with Client(address, identity=Identity.load(tmp_path / "conf" / "admin_key"), **PATIENT) as client:
            await client.create_topic("t")
            publisher = asyncio.create_task(client.publish_many("t", payloads, batch_records=200))
            await client.fetch("t")  # a round trip, in which batches went out
            processes[-1].kill()
            processes[-1].communicate()
            assert not publisher.done()
            processes.append(start_process(tmp_path, port)[0])
            placed = await publisher
            assert [one.base_offset for one in placed] == list(range(0, len(payloads), 200))
            assert [record.payload for record in await read_all(client)] == payloads

    try:
        asyncio.run(run())
    finally:
        processes[-1].kill()
        processes[-1].communicate()


def test_the_outcome_of_requests_that_may_not_be_repeated_is_unknown_after_a_loss(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        async with CuttingProxy(bus.address, [330, 360]) as proxy, bus.client(address=proxy.address) as other:

            async def create_many() -> None:
                for number in range(9):
                    await other.create_topic(f"t{number}")

            with pytest.raises(OutcomeUnknownError):
                await create_many()

    with_bus(tmp_path, check)


def test_without_reconnect_a_loss_ends_the_client(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        async with CuttingProxy(bus.address, [400]) as proxy:
            other = bus.client(address=proxy.address, reconnect=False)
            await other.__aenter__()
            with pytest.raises(ConnectionLostError):
                await other.publish_many("t", PAYLOADS, batch_records=100)
            with pytest.raises(ConnectionLostError):
                await other.fetch("t")
            assert not other.connected
            await other.close()

    with_bus(tmp_path, check)


def test_a_closed_client_refuses_and_one_that_was_never_entered_too(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        other = bus.client()
        with pytest.raises(ClientClosedError):
            await other.publish("t", b"x")
        async with other:
            waiting = asyncio.create_task(anext(other.follow("t")))
            await other.publish("t", b"x", partition=0)
        with pytest.raises(ClientClosedError):
            other.send("t", b"x")
        with pytest.raises(ClientClosedError):
            await other.fetch("t")
        with pytest.raises(ClientClosedError):
            await other.__aenter__()
        await asyncio.gather(waiting, return_exceptions=True)

    with_bus(tmp_path, check)


class Background:
    """A bus in a thread of its own, for clients that block."""

    def __init__(self, folder: Path) -> None:
        self.bus = Bus(folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Bus:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.bus.start(), self._loop).result()
        return self.bus

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.bus.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def test_the_blocking_client_does_the_same(tmp_path: Path) -> None:
    with Background(tmp_path) as bus, BlockingClient(bus.address, identity=bus.admin, **PATIENT) as client:
        client.create_topic("t")
        assert client.publish("t", b"a") == Position(0, 0)
        assert client.publish_many("t", [b"b", b"c"]) == [Published(0, 1, 2)]
        client.send("t", b"d")
        assert client.flush().records == 1
        assert client.publish("t", b"e") == Position(0, 4)
        assert (client.first_offset("t"), client.end_offset("t")) == (0, 5)
        assert [record.payload for record in client.follow("t", until_end=True)] == [b"a", b"b", b"c", b"d", b"e"]
        assert [len(batch) for batch in client.follow_batches("t", offset=2, until_end=True)] == [3]
        assert next(client.follow("t", offset=4)).payload == b"e"
        assert client.fetch("t", offset=5).batches == []
        assert client.acknowledged == 5
        with pytest.raises(TopicExistsError):
            client.create_topic("t")
        client.remove_topic("t")
    with pytest.raises(ClientClosedError):
        client.publish("t", b"x")


def test_threads_share_a_blocking_client_and_each_keeps_its_order(tmp_path: Path) -> None:
    with Background(tmp_path) as bus:
        options: dict[str, Any] = {"in_flight_bytes_max": 20_000, "batch_bytes_max": 4_000}
        with BlockingClient(bus.address, identity=bus.admin, **PATIENT, **options) as client:
            client.create_topic("t")

            def send(name: bytes) -> None:
                for number in range(2_000):
                    client.send("t", b"%s%d" % (name, number))

            threads = [threading.Thread(target=send, args=(name,)) for name in (b"a", b"b", b"c")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert client.flush().records == 6_000
            stored = [record.payload or b"" for record in client.follow("t", until_end=True)]
        for name in (b"a", b"b", b"c"):
            assert [one for one in stored if one.startswith(name)] == [b"%s%d" % (name, i) for i in range(2_000)]


def test_following_can_be_interrupted_and_the_client_goes_on(tmp_path: Path) -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with Background(tmp_path) as bus, BlockingClient(bus.address, identity=bus.admin, **PATIENT) as client:
            client.create_topic("quiet")
            sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the signal may come as soon as it is sent
                sender.start()
                next(client.follow("quiet"))
            sender.join()
            assert client.publish("quiet", b"on") == Position(0, 0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_value_that_no_record_can_have_costs_no_other_record(tmp_path: Path) -> None:
    wrong: Any = "text"
    header: Any = ((b"name", wrong),)

    async def test(bus: Bus, client: Client) -> None:
        for options in ({"payload": wrong}, {"payload": b"", "key": wrong}):
            client.send("t", b"sent")
            with pytest.raises(TypeError, match="encode it first"):
                client.send("t", **options)
        assert (await client.flush()).records == 2
        client.send("t", b"", headers=header)
        with pytest.raises(TypeError):
            await client.flush()
        good, bad = client.publish("t", b"published"), client.publish("t", b"", headers=header)
        async with asyncio.timeout(SAFETY_NET_SECONDS):
            results = await asyncio.gather(good, bad, return_exceptions=True)
        assert (type(results[0]), type(results[1])) == (Position, TypeError)

        def work() -> None:
            with BlockingClient(bus.address, identity=bus.admin, **PATIENT) as mine:
                mine.send("t", b"of a thread")
                with pytest.raises(TypeError, match="encode it first"):
                    mine.send("t", wrong)
                mine.send("t", b"of a thread")
                assert mine.flush().records == 2

        await asyncio.to_thread(work)

    with_bus(tmp_path, test)


def test_a_client_without_a_connection_raises_a_new_error_with_its_own_traceback_each_time(tmp_path: Path) -> None:
    async def send(client: Client) -> None:
        client.send("t", b"x")

    async def check(bus: Bus, client: Client) -> None:
        mine = bus.client(reconnect=False)
        await mine.__aenter__()
        link = mine._keeper.link
        assert link is not None
        waiting = [asyncio.create_task(mine.create_topic(f"t{number}")) for number in range(2)]
        waiting += [asyncio.create_task(mine.topics.remove("t")) for _ in range(2)]
        await asyncio.sleep(0)
        link.abort(ConnectionLostError("cut off"))
        await asyncio.gather(*waiting, return_exceptions=True)
        calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
            lambda: mine.publish("t", b"x"),
            lambda: mine.publish_many("t", [b"x"]),
            lambda: mine.fetch("t"),
            lambda: mine.emit("t", b"x"),
            lambda: mine.create_topic("u"),
            lambda: send(mine),
        ]
        for call in calls:
            errors: list[ConnectionLostError] = []
            for _ in range(3):
                with pytest.raises(ConnectionLostError, match="cut off") as raised:
                    await call()
                errors.append(raised.value)
            assert len(set(map(id, errors))) == 3
            assert len({len(traceback.extract_tb(error.__traceback__)) for error in errors}) == 1
        for kept in (mine._keeper.dead, mine._producer.closed, link.lost_error):
            assert kept is not None
            assert kept.__traceback__ is None
        await mine.close()

    with_bus(tmp_path, check)


def test_waiting_publishers_of_a_client_that_is_closed_get_an_error_each(tmp_path: Path) -> None:
    async def check(bus: Bus, client: Client) -> None:
        mine = bus.client()
        await mine.__aenter__()
        publishing = [asyncio.ensure_future(mine.publish("t", b"x")) for _ in range(3)]
        await asyncio.sleep(0)
        await mine.close()
        errors = await asyncio.gather(*publishing, return_exceptions=True)
        assert [type(error) for error in errors] == [ClientClosedError] * 3
        assert len(set(map(id, errors))) == 3

    with_bus(tmp_path, check)


@pytest.mark.parametrize("turns", [0, 1, 2, 4, 8, 16, 32, 64])
def test_a_client_that_is_closed_while_it_connects_ends_and_leaves_nothing_behind(tmp_path: Path, turns: int) -> None:
    complaints: list[dict[str, Any]] = []

    async def check(bus: Bus, client: Client) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))
        tasks, connections = asyncio.all_tasks(), set(connections_of(bus.server))
        mine = bus.client()
        entering = asyncio.create_task(mine.__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        entered = entering.done()
        await mine.close()
        if not entered:
            with pytest.raises(ClientClosedError, match="the client was closed"):
                await entering
        assert not mine.connected
        with pytest.raises(ClientClosedError):
            await mine.publish("t", b"x")
        with pytest.raises(ClientClosedError, match="the client was closed"):
            await mine.__aenter__()
        async with asyncio.timeout(SAFETY_NET_SECONDS):
            while not set(connections_of(bus.server)) <= connections:  # noqa: ASYNC110  # it has no event of its own
                await asyncio.sleep(0)
        assert asyncio.all_tasks() <= tasks

    with_bus(tmp_path, check)
    assert complaints == []


def test_a_client_that_is_closed_before_a_silent_server_has_greeted_ends_at_once() -> None:
    async def check() -> None:
        greeted = asyncio.Event()

        async def never_greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            greeted.set()
            assert await reader.read() == b""
            writer.close()

        server = await asyncio.start_server(never_greet, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = Client(address, identity=Identity.generate(), **PATIENT)
        entering = asyncio.create_task(client.__aenter__())
        await greeted.wait()
        async with asyncio.timeout(SAFETY_NET_SECONDS / 2):
            closing = asyncio.create_task(client.close())
            for _ in range(2):
                await asyncio.sleep(0)
            await client.close()  # while the other one ends `entering`
            await closing
            with pytest.raises(ClientClosedError):
                await entering
        server.close()

    asyncio.run(check())
