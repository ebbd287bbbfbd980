"""jebp end to end: a `babelbus serve` process, a client on the other core, every byte encrypted. 100-byte payloads."""

import asyncio
import json
import os
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import uvloop

from babelbus.client import Client, Identity
from babelbus.protocols.jebp.codec import RECORD_FIELDS
from babelbus.protocols.jebp.fields import encode_name_field
from babelbus.protocols.jebp.messages import Response
from babelbus.protocols.jebp.status import is_success
from babelbus.server.allocator import keep_freed_memory
from bench.frame import Reading, figure
from bench.load import one_at_a_time
from bench.peers import kafka, nats, redis
from bench.workload import CLIENTS, PAYLOAD, SECONDS, latency_note, scratch_folder

TOPIC = "bench"
CALL_RECORDS = 100_000
PLAIN_CHUNK = 512
PLAIN_CHUNKS_MAX = 8
BATCH_RECORDS = 1_000
FETCH_BYTES = 2**20
FETCH_RECORDS = 1_000_000
GROWTH_RECORDS = 5_000_000


class Running:
    """A server process of ours."""

    def __init__(self, folder: str, ack: str, *more: str) -> None:
        command = [str(Path(sys.executable).parent / "babelbus"), "serve", "--json", "--data-folder", f"{folder}/data"]
        options = ["--server-any-port", "--log-level", "error", "--topics-ack", ack, *more]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.addresses: dict[str, str] = json.loads(self.process.stdout.readline())["addresses"]
        self.address = self.addresses["jebp"]
        self.identity = Identity.load(f"{folder}/data/conf/admin_key")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def peak_mib(self) -> float:
        """Peak resident size of the process."""
        with open(f"/proc/{self.process.pid}/status") as status:
            line = next(line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024

    def client(self) -> Client:
        return Client(self.address, identity=self.identity, in_flight_bytes_max=4 * 2**20)


@contextmanager
def server(ack: str, *options: str) -> Iterator[Running]:
    """Run a server whose topics answer at the level `ack`, with the topic `bench`."""
    with scratch_folder() as folder:
        running = Running(folder, ack, *options)

        async def prepare() -> None:
            async with running.client() as client:
                await client.create_topic(TOPIC)

        try:
            uvloop.run(prepare())
            yield running
        finally:
            running.process.kill()  # its data is thrown away
            running.process.wait()


Publish = Callable[[Client, list[bytes]], Awaitable[object]]


async def plain(client: Client, payloads: list[bytes]) -> None:
    """Command 12: a request and an answer for each record, up to 4,096 of them on the way."""
    link = await client._keeper.get(None)
    prefix, pack, crc32 = b"\x12" + encode_name_field(TOPIC), RECORD_FIELDS.pack, zlib.crc32
    calls: deque[asyncio.Future[list[Response]]] = deque()
    for at in range(0, len(payloads), PLAIN_CHUNK):
        chunk = payloads[at : at + PLAIN_CHUNK]
        calls.append(link.call(*[prefix + pack(crc32(payload), 0) + payload for payload in chunk]))
        while len(calls) == PLAIN_CHUNKS_MAX or (calls and at + PLAIN_CHUNK >= len(payloads)):
            answers = await calls.popleft()
            assert answers.count(answers[0]) == len(answers), "a record was refused"
            assert is_success(answers[0].status), answers[0]


def batches(client: Client, payloads: list[bytes]) -> Awaitable[object]:
    """Command 13: a request and an answer for a thousand records."""
    return client.publish_many(TOPIC, payloads, batch_records=BATCH_RECORDS)


async def _publish(running: Running, publish: Publish) -> float:
    payloads = [PAYLOAD] * CALL_RECORDS
    async with running.client() as client:
        await publish(client, payloads[:BATCH_RECORDS])
        records, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < SECONDS:
            await publish(client, payloads)
            records += CALL_RECORDS
        return records / (time.perf_counter() - begun)


def publishing(ack: str, publish: Publish) -> Iterator[Reading]:
    """Acknowledged records a second over one connection."""
    with server(ack) as running:
        while True:
            yield Reading(uvloop.run(_publish(running, publish)))


@figure(
    "jebp.publish_flushed",
    unit="records/s",
    target=60_000,
    peers=[nats.PUBLISH_FLUSHED, redis.PUBLISH_FLUSHED],
)
def publish_flushed() -> Iterator[Reading]:
    """Command 12, pipelined, one connection, each record on disk before its ack."""
    return publishing("flushed", plain)


@figure(
    "jebp.publish_written",
    unit="records/s",
    target=80_000,
    peers=[nats.PUBLISH_WRITTEN, redis.PUBLISH_WRITTEN],
)
def publish_written() -> Iterator[Reading]:
    """Command 12, pipelined, one connection, each record written before its ack."""
    return publishing("written", plain)


@figure(
    "jebp.publish_batch_flushed",
    unit="records/s",
    target=400_000,
    peers=[
        nats.PUBLISH_FLUSHED,
        redis.PUBLISH_FLUSHED,
        redis.BENCHMARK_FLUSHED,
        redis.BENCHMARK_STRONGEST_FLUSHED,
        kafka.PUBLISH_FLUSHED,
    ],
)
def publish_batch_flushed() -> Iterator[Reading]:
    """Command 13, batches of 1,000, one connection, each record on disk before its ack."""
    return publishing("flushed", batches)


@figure("jebp.publish_batch_written", unit="records/s", peers=[redis.BENCHMARK_WRITTEN, kafka.PUBLISH_WRITTEN])
def publish_batch_written() -> Iterator[Reading]:
    """Command 13, batches of 1,000, one connection, each record written before its ack."""
    return publishing("written", batches)


def waiting(clients: int) -> Iterator[Reading]:
    """Connections that each wait for the ack of one record before they send the next."""
    with server("flushed") as running:
        while True:
            rate, latencies = one_at_a_time(
                running.port, running.identity, TOPIC, PAYLOAD, clients=clients, seconds=SECONDS
            )
            yield Reading(rate, latency_note(latencies))


@figure(
    "jebp.publish_one_at_a_time",
    unit="records/s",
    target=2_500,
    peers=[
        nats.ONE_AT_A_TIME_FLUSHED,
        redis.ONE_AT_A_TIME_FLUSHED,
        redis.BENCHMARK_ONE_AT_A_TIME_FLUSHED,
        kafka.ONE_AT_A_TIME_FLUSHED,
    ],
)
def publish_one_at_a_time() -> Iterator[Reading]:
    """One connection, `flushed`."""
    return waiting(1)


@figure(
    "jebp.publish_50_clients",
    unit="records/s",
    target=15_000,
    peers=[nats.MANY_CLIENTS_FLUSHED, redis.MANY_CLIENTS_FLUSHED, redis.BENCHMARK_MANY_CLIENTS_FLUSHED],
)
def publish_50_clients() -> Iterator[Reading]:
    """Fifty connections, `flushed`."""
    return waiting(CLIENTS)


async def _fill(running: Running, records: int) -> None:
    async with running.client() as client:
        for _ in range(records // CALL_RECORDS):
            await batches(client, [PAYLOAD] * CALL_RECORDS)


async def _fetch(running: Running) -> Reading:
    async with running.client() as client:
        size = records = 0
        begun = time.perf_counter()
        async with aclosing(client.follow_batches(TOPIC, offset=0, bytes_max=FETCH_BYTES)) as chunks:
            async for chunk in chunks:
                chunk.verify()  # checks the CRC of every record
                size += len(chunk.data)
                records += len(chunk)
                if records >= FETCH_RECORDS:
                    break
        passed = time.perf_counter() - begun
    assert records == FETCH_RECORDS
    return Reading(size / passed / 1e6, f"{records / passed:,.0f} records/s")


@figure("jebp.fetch_mb", unit="MB/s", target=200, peers=[nats.FETCH, nats.CONSUME, redis.FETCH])
def fetch_mb() -> Iterator[Reading]:
    """Record bytes of a million records, 1 MiB a request, decrypted and every CRC checked by the client."""
    with server("written") as running:
        uvloop.run(_fill(running, FETCH_RECORDS))
        keep_freed_memory()  # as the server and the command line do
        while True:
            yield uvloop.run(_fetch(running))


@figure("server.rss_growth_mib", unit="MiB", target=200, lower_is_better=True)
def rss_growth_mib() -> Iterator[Reading]:
    """Peak resident size of the server beyond its start while 5 million records pass in and out."""

    async def read(running: Running) -> None:
        async with running.client() as client:
            async for _batch in client.follow_batches(TOPIC, offset=0, bytes_max=FETCH_BYTES, until_end=True):
                pass

    records = int(os.environ.get("BENCH_GROWTH_RECORDS", GROWTH_RECORDS))
    while True:
        with server("flushed") as running:
            before = running.peak_mib
            uvloop.run(_fill(running, records))
            uvloop.run(read(running))
            grown = running.peak_mib - before
        yield Reading(grown, f"{before:.0f} MiB at start")
