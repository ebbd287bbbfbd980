"""Redis Streams: Debian's `redis-server`, driven by its C client `redis-benchmark` and by PyPI `redis`.

Equal durability: `flushed` is `appendfsync always` (synced before the answer), `written` is `everysec` (answered
after the write). Snapshots are off. The Python client is at its best with `hiredis` (`pip install redis[hiredis]`): a
third faster when it adds, five times faster when it reads; the note of a figure says when it did without.
"""

import asyncio
import csv
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.frame import Peer, PeerMissingError, Reading
from bench.workload import CLIENTS, PAYLOAD, SECONDS, free_port, latency_note, scratch_folder, server_process

if TYPE_CHECKING:
    import redis

STREAM = "bench"
PIPELINE = 1_000
READ_ENTRIES = 200_000
READ_COUNT = 10_000

Job = Callable[[int], Reading]


@contextmanager
def server(*, flushed: bool) -> Iterator[int]:
    """Run a server with an empty store; yields its loopback port.

    Raises:
        PeerMissingError: the server is not installed.
    """
    binary = _binary("redis-server")
    with scratch_folder() as folder:
        port = free_port()
        fsync = "always" if flushed else "everysec"
        command = [binary, "--bind", "127.0.0.1", "--port", str(port), "--dir", folder, "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", fsync, "--auto-aof-rewrite-percentage", "0"]
        with server_process(command, port, os.path.join(folder, "log")):
            yield port


def _binary(name: str) -> str:
    binary = shutil.which(name)
    if binary is None:
        raise PeerMissingError(f"{name} is not installed: apt-get install redis-server")
    return binary


def connect(port: int) -> "redis.Redis":
    """A connection of the Python client.

    Raises:
        PeerMissingError: the client is not installed.
    """
    _require_client()
    import redis

    return redis.Redis(host="127.0.0.1", port=port)


def _require_client() -> None:
    if importlib.util.find_spec("redis") is None:
        raise PeerMissingError("the Python client of Redis is not installed: pip install redis")


def _client_note(*notes: str) -> str:
    return "; ".join((*notes, *([] if importlib.util.find_spec("hiredis") else ["without hiredis"])))


def pipelined(port: int) -> Reading:
    """One connection of the Python client, PIPELINE entries per round trip."""
    with connect(port) as client:
        added = 0
        start = time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            pipeline = client.pipeline(transaction=False)
            for _ in range(PIPELINE):
                pipeline.xadd(STREAM, {"f": PAYLOAD})
            added += len(pipeline.execute())
        return Reading(added / (time.perf_counter() - start), _client_note())


def one_at_a_time(port: int) -> Reading:
    """One connection of the Python client, an entry per round trip."""
    with connect(port) as client:
        latencies = []
        start = before = time.perf_counter()
        while before - start < SECONDS:
            client.xadd(STREAM, {"f": PAYLOAD})
            after = time.perf_counter()
            latencies.append(after - before)
            before = after
        return Reading(len(latencies) / (before - start), _client_note(latency_note(latencies)))


def many_clients(port: int) -> Reading:
    """CLIENTS connections of the asyncio client in one process, each an entry per round trip."""
    _require_client()
    return asyncio.run(_many_clients(port))


async def _many_clients(port: int) -> Reading:
    import redis.asyncio

    clients = [redis.asyncio.Redis(host="127.0.0.1", port=port, single_connection_client=True) for _ in range(CLIENTS)]
    for client in clients:
        await client.initialize()
    latencies: list[float] = []
    start = time.perf_counter()
    deadline = start + SECONDS

    async def add(client: "redis.asyncio.Redis") -> None:
        before = time.perf_counter()
        while before < deadline:
            await client.xadd(STREAM, {"f": PAYLOAD})
            after = time.perf_counter()
            latencies.append(after - before)
            before = after

    await asyncio.gather(*map(add, clients))
    rate = len(latencies) / (time.perf_counter() - start)
    for client in clients:
        await client.aclose()
    return Reading(rate, _client_note(latency_note(latencies)))


def benchmark(port: int, *, pipeline: int, clients: int, entries: int) -> Reading:
    """The C client: `clients` connections with `pipeline` commands per round trip, `entries` in all."""
    adding = ["XADD", STREAM, "*", "f", PAYLOAD.decode()]
    return benchmark_command(port, adding, pipeline=pipeline, clients=clients, entries=entries)


def benchmark_command(port: int, words: list[str], *, pipeline: int, clients: int, entries: int) -> Reading:
    """The C client with any command."""
    command = [_binary("redis-benchmark"), "-h", "127.0.0.1", "-p", str(port), "--csv"]
    command += ["-r", "1000", "-c", str(clients), "-P", str(pipeline), "-n", str(entries), *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    row = next(csv.DictReader(line for line in ran.stdout.splitlines() if line.startswith('"')))
    note = f"p50 {float(row['p50_latency_ms']):.2f} ms, p99 {float(row['p99_latency_ms']):.2f} ms"
    return Reading(float(row["rps"]), note)


def read(port: int) -> Reading:
    """Read the stream from its start with XRANGE, READ_COUNT entries at a time, in MB/s of payload."""
    with connect(port) as client:
        received, after = 0, "-"
        start = time.perf_counter()
        while time.perf_counter() - start < 2 * SECONDS:
            entries: Any = client.xrange(STREAM, min=after, count=READ_COUNT)
            if not entries:
                break
            received += len(entries)
            after = f"({entries[-1][0].decode()}"
        rate = received * len(PAYLOAD) / 1e6 / (time.perf_counter() - start)
        return Reading(rate, _client_note(f"{rate * 1e6 / len(PAYLOAD):,.0f} records/s"))


def _peer(name: str, job: Job, *, flushed: bool, prepare: Job | None = None) -> Peer:
    def measure() -> Iterator[Reading]:
        with server(flushed=flushed) as port:
            if prepare is not None:
                prepare(port)
            while True:
                yield job(port)

    return Peer(name, measure)


def _benchmark(*, pipeline: int, clients: int, entries: int) -> Job:
    return lambda port: benchmark(port, pipeline=pipeline, clients=clients, entries=entries)


C_PIPELINED = _benchmark(pipeline=PIPELINE, clients=1, entries=400_000)
C_STRONGEST = _benchmark(pipeline=100, clients=CLIENTS, entries=400_000)  # the best of the combinations tried
C_ONE_AT_A_TIME = _benchmark(pipeline=1, clients=1, entries=5_000)
C_MANY_CLIENTS = _benchmark(pipeline=1, clients=CLIENTS, entries=40_000)

PUBLISH_FLUSHED = _peer("redis-py publish flushed", pipelined, flushed=True)
PUBLISH_WRITTEN = _peer("redis-py publish written", pipelined, flushed=False)
ONE_AT_A_TIME_FLUSHED = _peer("redis-py one at a time flushed", one_at_a_time, flushed=True)
MANY_CLIENTS_FLUSHED = _peer(f"redis-py {CLIENTS} clients flushed", many_clients, flushed=True)
BENCHMARK_FLUSHED = _peer("redis-benchmark publish flushed", C_PIPELINED, flushed=True)
BENCHMARK_STRONGEST_FLUSHED = _peer(f"redis-benchmark {CLIENTS} clients pipelined flushed", C_STRONGEST, flushed=True)
BENCHMARK_WRITTEN = _peer("redis-benchmark publish written", C_PIPELINED, flushed=False)
BENCHMARK_ONE_AT_A_TIME_FLUSHED = _peer("redis-benchmark one at a time flushed", C_ONE_AT_A_TIME, flushed=True)
BENCHMARK_MANY_CLIENTS_FLUSHED = _peer(f"redis-benchmark {CLIENTS} clients flushed", C_MANY_CLIENTS, flushed=True)
FETCH = _peer(
    "redis-py fetch",
    read,
    flushed=False,
    prepare=_benchmark(pipeline=PIPELINE, clients=1, entries=READ_ENTRIES),
)

PUBLISHING = (
    PUBLISH_FLUSHED,
    PUBLISH_WRITTEN,
    ONE_AT_A_TIME_FLUSHED,
    MANY_CLIENTS_FLUSHED,
    BENCHMARK_FLUSHED,
    BENCHMARK_STRONGEST_FLUSHED,
    BENCHMARK_WRITTEN,
    BENCHMARK_ONE_AT_A_TIME_FLUSHED,
    BENCHMARK_MANY_CLIENTS_FLUSHED,
)
READING = (FETCH,)
