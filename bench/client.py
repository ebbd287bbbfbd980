"""The Python client as programs use it: a `babelbus serve` process on the other core, every byte encrypted.

aiokafka has the same jobs, but is left out: Kafka is measured with its own tool (bench/peers/kafka.py).
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import uvloop

from babelbus.client import BlockingClient
from bench.frame import Reading, figure
from bench.jebp import TOPIC, Running, server
from bench.load import one_at_a_time
from bench.peers import nats
from bench.start import compile_once
from bench.workload import PAYLOAD, SECONDS

WINDOW = 1_000
CONSUMED = 300_000
BATCH_RECORDS = 1_000


async def _publish(running: Running) -> float:
    async with running.client() as client:
        await asyncio.gather(*[client.publish(TOPIC, PAYLOAD) for _ in range(WINDOW)])
        records, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < SECONDS:
            await asyncio.gather(*[client.publish(TOPIC, PAYLOAD) for _ in range(WINDOW)])
            records += WINDOW
        return records / (time.perf_counter() - begun)


@figure("client.publish", unit="records/s", target=60_000, peers=[nats.PUBLISH_FLUSHED])
def publish() -> Iterator[Reading]:
    """`await client.publish(...)`, a thousand calls together, each record on disk before its call returns."""
    with server("flushed") as running:
        while True:
            yield Reading(uvloop.run(_publish(running)))


async def _fill(running: Running) -> None:
    async with running.client() as client:
        await client.publish_many(TOPIC, [PAYLOAD] * CONSUMED, batch_records=BATCH_RECORDS)


async def _consume(running: Running, group: str) -> float:
    async with running.client() as client, client.consume(TOPIC, group, start="beginning") as messages:
        begun, count = time.perf_counter(), 0
        async for message in messages:
            message.ack()
            count += 1
            if count == CONSUMED:
                break
        return CONSUMED / (time.perf_counter() - begun)


@figure("client.consume", unit="records/s", target=150_000, peers=[nats.CONSUME_ACKED])
def consume() -> Iterator[Reading]:
    """A backlog through `async for message in client.consume(...)` with the default window, each message acked."""
    with server("written") as running:
        uvloop.run(_fill(running))
        number = 0
        while True:
            number += 1
            yield Reading(uvloop.run(_consume(running, f"g{number}")))


async def _one_at_a_time(running: Running) -> float:
    async with running.client() as client:
        await client.publish(TOPIC, PAYLOAD)
        records, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < SECONDS:
            await client.publish(TOPIC, PAYLOAD)
            records += 1
        return records / (time.perf_counter() - begun)


@figure("client.one_at_a_time", unit="records/s", target=2_100, peers=[nats.ONE_AT_A_TIME_FLUSHED])
def alone() -> Iterator[Reading]:
    """`await client.publish(...)` one after the other, flushed; beside the bare protocol in the same run."""
    with server("flushed") as running:
        while True:
            bare, _ = one_at_a_time(running.port, running.identity, TOPIC, PAYLOAD, clients=1, seconds=SECONDS)
            rate = uvloop.run(_one_at_a_time(running))
            yield Reading(rate, f"bare protocol {bare:,.0f}/s, {bare / rate:.2f} times")


def _consume_blocking(client: BlockingClient, group: str) -> float:
    with client.consume(TOPIC, group, start="beginning") as messages:
        begun = time.perf_counter()
        for count, message in enumerate(messages, 1):
            message.ack()
            if count == CONSUMED:
                break
        return CONSUMED / (time.perf_counter() - begun)


@figure("client.blocking", unit="records/s", target=75_000)
def blocking() -> Iterator[Reading]:
    """The backlog of `client.consume` through `for message in client.consume(...)` of the blocking client."""
    with server("written") as running:
        uvloop.run(_fill(running))
        number = 0
        with BlockingClient(running.address, identity=running.identity) as client:
            while True:
                number += 1
                rate = _consume_blocking(client, f"b{number}")
                beside = uvloop.run(_consume(running, f"a{number}"))
                yield Reading(rate, f"asynchronous {beside:,.0f}/s, {rate / beside:.2f} of it")


@figure("client.import_ms", unit="ms", target=60, lower_is_better=True)
def import_ms() -> Reading:
    """`from babelbus import Client` in a new process, processor time; beside `import babelbus`, which loads nothing."""

    def measure(code: str) -> float:
        timed = f"import time; a = time.process_time(); {code}; print((time.process_time() - a) * 1e3)"
        return float(subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True).stdout)

    compile_once()
    return Reading(measure("from babelbus import Client"), f"import babelbus {measure('import babelbus'):.1f} ms")
