"""Three protocols at once on one server: mixed traffic is published over all of them and consumed over all of them."""

import asyncio
import random
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing

import uvloop

from babelbus.client import Client
from bench import traffic
from bench.frame import Reading, figure
from bench.mixed import CHANNEL, CHUNK, PUBLISHED, Running, read_until, sealed, server
from bench.streams import READ_BYTES, Stream, count_of, exchange

SHARE = 20_000
"""Messages of each protocol, and messages that are published while consumers read."""
UNIFORM_SHARE = 80_000
"""The same of uniform traffic, which would be over too soon for a clock otherwise."""
LIVE_BATCH = 400
LIVE_CHUNK = 50
"""Live messages that are cut into a batch for each topic, and batches that are sent together."""
CONSUMERS = 2
WINDOW = 2_000
WAIT_SECONDS = 120

# Floors, provisional: 40 percent of a short run on a machine that others used too.
PUBLISH_FLOOR = 15_000
DELIVER_FLOOR = 20_000


class Load:
    """Encoded messages of a jebp, a zbus and a Wörterbuch client, the same number of each; and live ones."""

    def __init__(self, *, uniform: bool) -> None:
        self.share = UNIFORM_SHARE if uniform else SHARE
        jebp, zbus, worterbuch, live = (traffic.messages(self.share, seed=seed, uniform=uniform) for seed in range(4))
        self.topics = Counter(message.topic for message in (*jebp, *zbus, *worterbuch, *live))
        self._jebp = [traffic.jebp_plain(message) for message in jebp]
        if not uniform:  # a client of jebp/1.0 and our client in turn
            self._jebp[1::2] = traffic.jebp_keyed(jebp[1::2], producer=1)
        self._zbus = traffic.chunked(traffic.zbus_frames(zbus), CHUNK)
        self._worterbuch = traffic.chunked(traffic.worterbuch_publications(worterbuch, uniform=uniform), CHUNK)
        self.live = _batches(live)

    def publish(self, running: Running) -> float:
        """Send the messages of the three clients at once; return the acknowledged messages a second."""
        connection = running.jebp()
        with connection.socket as jebp, running.websocket() as zbus, running.worterbuch() as worterbuch:
            streams = [
                Stream(jebp, sealed(connection, self._jebp), connection.count),
                Stream(zbus, self._zbus, count_of(PUBLISHED)),
                Stream(worterbuch, self._worterbuch, count_of(b"\n")),
            ]
            return exchange(streams)


def _batches(live: Sequence[traffic.Message]) -> list[bytes]:
    """Return requests with batches by topic, as `Client.send` builds them of mixed records."""
    requests: list[bytes] = []
    sequences: Counter[str] = Counter()
    for at in range(0, len(live), LIVE_BATCH):
        by_topic: dict[str, list[traffic.Message]] = {}
        for message in live[at : at + LIVE_BATCH]:
            by_topic.setdefault(message.topic, []).append(message)
        for topic, batch in by_topic.items():
            requests.append(traffic.jebp_batch(batch, 1_000 + int(topic[-2:]), sequences[topic]))
            sequences[topic] += len(batch)
    return requests


def publishing(*, uniform: bool) -> Iterator[Reading]:
    load = Load(uniform=uniform)
    while True:
        with server(uniform=uniform) as running:
            yield Reading(load.publish(running))


@figure("bus.mixed_publish", unit="msgs/s", floor=PUBLISH_FLOOR, uniform="bus.uniform_publish")
def mixed_publish() -> Iterator[Reading]:
    """Send messages of a jebp, a zbus and a Wörterbuch client to the same 50 topics at once; all are acknowledged."""
    return publishing(uniform=False)


@figure("bus.uniform_publish", unit="msgs/s")
def uniform_publish() -> Iterator[Reading]:
    """Send the same number of messages that are all alike; for comparison."""
    return publishing(uniform=True)


def delivering(*, uniform: bool) -> Iterator[Reading]:
    load = Load(uniform=uniform)
    while True:
        with server(uniform=uniform) as running:
            load.publish(running)
            yield Reading(deliver(running, load))


def deliver(running: Running, load: Load) -> float:
    """Receive a backlog over jebp and zbus, and live messages over jebp, zbus and Wörterbuch, at the same time.

    Returns the messages a second over all consumers, until each consumer has its last message.
    """
    records = load.topics.total()
    ready = threading.Barrier(4)
    with ThreadPoolExecutor(3) as pool, running.worterbuch() as subscriber, ExitStack() as stack:
        consumers = [stack.enter_context(running.websocket()) for _ in range(CONSUMERS)]
        connection = running.jebp()
        publisher = Stream(
            stack.enter_context(connection.socket), sealed(connection, load.live, LIVE_CHUNK), connection.count
        )
        subscription = {"transactionId": 1, "requestPattern": "mixed/#", "unique": False, "liveOnly": True}
        subscriber.sendall(traffic.worterbuch_line("pSubscribe", **subscription))
        read_until(subscriber, b"\n")
        jobs = [
            pool.submit(read_events, subscriber, load.share, ready),
            pool.submit(consume, consumers, list(load.topics), records, ready),
            pool.submit(uvloop.run, follow(running, load.topics, ready)),
        ]
        ready.wait(WAIT_SECONDS)
        begun = time.perf_counter()
        exchange([publisher])
        for job in jobs:
            job.result(WAIT_SECONDS)
        return (load.share + 2 * records) / (time.perf_counter() - begun)


def read_events(subscriber: socket.socket, count: int, ready: threading.Barrier) -> None:
    """Read the events of a Wörterbuch subscription."""
    ready.wait(WAIT_SECONDS)
    while count > 0:
        data = subscriber.recv(READ_BYTES)
        assert data, "the server closed the connection of the subscriber"
        count -= data.count(b"\n")


def consume(consumers: Sequence[socket.socket], topics: Sequence[str], count: int, ready: threading.Barrier) -> None:
    """Receive the channel of every MQ over several WebSockets; windows are set again before any can be used up."""
    draw = random.Random(traffic.SEED)
    sub = {"channel": CHANNEL, "window": str(WINDOW), "ack": "false"}
    refill = b"".join([traffic.zbus_command("sub", draw, mq=topic, **sub) for topic in topics])
    counters = {consumer.fileno(): (consumer, count_of(b'"offset":"')) for consumer in consumers}
    used = Counter[int]()
    ready.wait(WAIT_SECONDS)
    with select.epoll() as poller:
        for number, (consumer, _) in counters.items():
            poller.register(number, select.EPOLLIN)
            consumer.sendall(refill)
        while count > 0:
            deliverable = poller.poll(WAIT_SECONDS)
            assert deliverable, f"{count} deliveries are missing"
            for number, _ in deliverable:
                consumer, count_deliveries = counters[number]
                data = consumer.recv(READ_BYTES)
                assert data, "the server closed the connection of a consumer"
                deliveries = count_deliveries(data)
                count -= deliveries
                used[number] += deliveries
                if used[number] >= WINDOW // 2:
                    used[number] = 0
                    consumer.sendall(refill)


async def follow(running: Running, topics: Counter[str], ready: threading.Barrier) -> None:
    """Read every topic from its beginning over one jebp connection."""

    async def read(topic: str, count: int) -> None:
        chunks = client.follow_batches(topic, offset=0, poll_seconds_max=0.02, bytes_max=2**18)
        async with aclosing(chunks):
            async for chunk in chunks:
                chunk.verify()
                count -= len(chunk)
                if count <= 0:
                    return

    async with Client(running.addresses["jebp"], identity=running.identity) as client:
        await asyncio.to_thread(ready.wait, WAIT_SECONDS)
        async with asyncio.timeout(WAIT_SECONDS):
            await asyncio.gather(*(read(topic, count) for topic, count in topics.items()))


@figure("bus.mixed_deliver", unit="msgs/s", floor=DELIVER_FLOOR, uniform="bus.uniform_deliver")
def mixed_deliver() -> Iterator[Reading]:
    """Receive a backlog of three protocols and live messages over jebp, zbus and Wörterbuch at once, from 50 topics."""
    return delivering(uniform=False)


@figure("bus.uniform_deliver", unit="msgs/s")
def uniform_deliver() -> Iterator[Reading]:
    """Receive the same number of messages that are all alike; for comparison."""
    return delivering(uniform=True)
