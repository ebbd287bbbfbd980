"""Edge processes (`server.processes`): 50 clients with one record at a time each, and what a record costs."""

import asyncio
import json
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import uvloop

from bench.frame import Reading, figure
from bench.jebp import TOPIC, Running, server
from bench.load import one_at_a_time
from bench.workload import CLIENTS, PAYLOAD, SECONDS
from tests.support.certificates import Authority

TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
EDGES = 2


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    with open(f"/proc/{pid}/stat") as status:
        fields = status.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_SECONDS


def edges_of(pid: int) -> list[int]:
    """Return the processes that a process has started, from whatever thread."""
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as children:
            found += map(int, children.read().split())
    return found


class Setter(asyncio.Protocol):
    """A client of Wörterbuch that sets its key, waits for the ack, and sets the key again."""

    def __init__(self, number: int) -> None:
        message = {"set": {"transactionId": 1, "key": f"setters/{number}", "value": PAYLOAD.decode("latin-1")}}
        self._request = json.dumps(message).encode() + b"\n"
        self.count = -1
        """Acks; the first line is the welcome."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]  # uvloop's is none by type

    def data_received(self, data: bytes) -> None:
        self.count += 1
        self.transport.write(self._request)


async def _set(address: str, context: ssl.SSLContext) -> int:
    """Return how many values fifty clients over TLS have set, one at a time each."""
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    setters = []
    for number in range(CLIENTS):
        make = partial(Setter, number)
        _, setter = await loop.create_connection(make, host, int(port), ssl=context, server_hostname="localhost")
        setters.append(setter)
    await asyncio.sleep(SECONDS)
    for setter in setters:
        setter.transport.abort()
    return sum(setter.count for setter in setters)


class Cost:
    """Records a second over all clients, and microseconds of processor time a record: server, edges, clients."""

    def __init__(self, running: Running, load: Callable[[], int]) -> None:
        pids = [running.process.pid, *edges_of(running.process.pid)]
        before, own = [cpu_seconds(pid) for pid in pids], time.process_time()
        records = load()
        self.rate = records / SECONDS
        spent = [(cpu_seconds(pid) - first) / records * 1e6 for pid, first in zip(pids, before, strict=True)]
        self.core, self.edges = spent[0], sum(spent[1:])
        self.client = (time.process_time() - own) / records * 1e6

    def __str__(self) -> str:
        edges = f", edges {self.edges:.1f}" if self.edges else ""
        return f"{self.rate:,.0f} records/s; us CPU a record: core {self.core:.1f}{edges}, clients {self.client:.1f}"


def create_load(running: Running) -> int:
    """Return how many records fifty jebp clients have created."""
    _, latencies = one_at_a_time(running.port, running.identity, TOPIC, PAYLOAD, clients=CLIENTS, seconds=SECONDS)
    return len(latencies)


def compared(load: Callable[[Running], int], *options: str) -> Iterator[Reading]:
    """Measure one process and two edges in turns."""
    while True:
        with server("flushed", *options) as running:
            alone = Cost(running, partial(load, running))
        with server("flushed", "--server-processes", str(EDGES), *options) as running:
            together = Cost(running, partial(load, running))
        yield Reading(together.rate / alone.rate, f"{together}; alone {alone}")


@figure("cluster.edges_50", unit="times one process", target=1.3)
def edges_50() -> Iterator[Reading]:
    """Fifty jebp connections, `flushed`: two edges beside the core, by one process; the load is on this machine."""
    return compared(create_load)


@figure("cluster.edges_50_tls", unit="times one process", target=1.3)
def edges_50_tls() -> Iterator[Reading]:
    """The same with values that Wörterbuch clients set over TLS, `written`."""
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        cert_file, key_file = authority.issue("server")
        context = authority.client_context()

        def load(running: Running) -> int:
            return uvloop.run(_set(running.addresses["worterbuch-tcp"], context))

        yield from compared(load, "--tls-cert-file", str(cert_file), "--tls-key-file", str(key_file))


@figure("cluster.short_way", unit="us CPU/record", lower_is_better=True)
def short_way() -> Iterator[Reading]:
    """Processor time of one process for a record of one of fifty connections, `flushed`: the way without a link."""
    with server("flushed") as running:
        while True:
            cost = Cost(running, partial(create_load, running))
            yield Reading(cost.core, str(cost))
