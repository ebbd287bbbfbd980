"""The state of the Python client: a `babelbus serve` process, windows of 1,000 awaited calls, values of 100 bytes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import uvloop

from babelbus.client import Client, Entry
from bench.frame import Reading, figure
from bench.jebp import Running, server
from bench.peers import nats
from bench.workload import PAYLOAD, SECONDS

VALUE = PAYLOAD.decode("latin-1")
KEYS = [f"plant/line{number % 10}/s{number}" for number in range(1_000)]

Call = Callable[[Client, str], Awaitable[Entry | None]]


async def _call(running: Running, call: Call) -> float:
    async with running.client() as client:
        await asyncio.gather(*[client.state.set(key, VALUE) for key in KEYS])
        calls, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < SECONDS:
            await asyncio.gather(*[call(client, key) for key in KEYS])
            calls += len(KEYS)
        return calls / (time.perf_counter() - begun)


def calling(call: Call) -> Iterator[Reading]:
    """Answered calls a second over one connection."""
    with server("written") as running:
        while True:
            yield Reading(uvloop.run(_call(running, call)))


@figure("client.state_set", unit="sets/s", target=60_000, peers=[nats.PUT])
def state_set() -> Iterator[Reading]:
    """`state.set` of the client, each logged at `written` before its answer."""
    return calling(lambda client, key: client.state.set(key, VALUE))


@figure("client.state_get", unit="gets/s", target=60_000, peers=[nats.GET])
def state_get() -> Iterator[Reading]:
    """`state.get` of the client."""
    return calling(lambda client, key: client.state.get(key))
