"""Engine `jetstream`: batches of 1,000 records of 100 bytes, acknowledged by NATS; the peer is NATS alone.

One process appends and waits for acknowledgements in a second thread, as the server does. The servers of NATS sync
their disks before they acknowledge. The peer publishes ready bytes in messages of the size of our frames, as many at
once, without an expected sequence.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

from babelbus.clock import SystemClock
from babelbus.config import JetstreamSettings
from babelbus.records.format import encode_payloads
from babelbus.storage.contract import LogSettings, PartitionLog
from babelbus.storage.files import LocalFiles
from bench.frame import Peer, PeerMissingError, Reading, figure
from bench.workload import PAYLOAD, SECONDS, scratch_folder
from tests.support.nats import NatsMissingError, nats_cluster, nats_server

BATCH_RECORDS = 1_000
PAYLOADS = [PAYLOAD] * BATCH_RECORDS
TIMESTAMPS = [1_700_000_000_000] * BATCH_RECORDS
OUTSTANDING = 64 * BATCH_RECORDS


@contextlib.contextmanager
def _servers(replicas: int) -> Iterator[str]:
    """Run one server of NATS or a cluster of three; gives the addresses."""
    try:
        if replicas == 1:
            with nats_server(sync="always") as server:
                yield server.url
        else:
            with nats_cluster(sync="always") as servers:
                yield ",".join(server.url for server in servers)
    except NatsMissingError as missing:
        raise PeerMissingError(str(missing)) from missing


def _publish(replicas: int) -> Iterator[Reading]:
    from babelbus.storage.jetstream import JetstreamStore

    with _servers(replicas) as url, scratch_folder() as folder:
        settings = JetstreamSettings(url, replicas=replicas, shards=1)
        store = JetstreamStore(settings, LocalFiles(), folder, SystemClock())
        try:
            log = store.open_partition("bench", 0, LogSettings())
            while True:
                yield Reading(_append(log))
        finally:
            store.close()


def _append(log: PartitionLog) -> float:
    """Encode and append batches for a while; give records/s, the last acknowledgement included."""
    begun, first = time.perf_counter(), log.next_offset
    stored, stopped = first, False
    wanted, news = threading.Semaphore(0), threading.Condition()

    def wait() -> None:
        nonlocal stored
        wanted.acquire()
        while not stopped:
            end = log.durable()
            with news:
                stored = end
                news.notify()
            wanted.acquire()

    waiting = threading.Thread(target=wait)
    waiting.start()
    while time.perf_counter() - begun < SECONDS:
        with news:
            news.wait_for(lambda: log.next_offset - stored < OUTSTANDING)
        log.append(encode_payloads(PAYLOADS, TIMESTAMPS, log.next_offset))
        wanted.release()
    log.durable()
    passed = time.perf_counter() - begun
    stopped = True
    wanted.release()
    waiting.join()
    return (log.next_offset - first) / passed


def _bare(replicas: int) -> Peer:
    """NATS alone: messages of the size of our frames, as many at once."""

    async def publish(url: str) -> Reading:
        import nats

        from babelbus.storage.jetstream.log import FRAME_BYTES
        from babelbus.storage.jetstream.shard import WINDOW

        batch = bytes(encode_payloads(PAYLOADS, TIMESTAMPS).data)
        records = FRAME_BYTES // (len(batch) // BATCH_RECORDS)
        frame = (batch * (FRAME_BYTES // len(batch) + 1))[:FRAME_BYTES]
        client = await nats.connect(url.split(","), pending_size=64 * 2**20)
        stream = client.jetstream()
        with contextlib.suppress(nats.js.errors.BadRequestError):
            await stream.add_stream(name="bench", subjects=["bench.*"], num_replicas=replicas)
        begun, count = time.perf_counter(), 0

        async def publisher() -> None:
            nonlocal count
            while time.perf_counter() - begun < SECONDS:
                await stream.publish("bench.0", frame, timeout=30)
                count += 1

        await asyncio.gather(*[publisher() for _ in range(WINDOW)])
        passed = time.perf_counter() - begun
        await client.close()
        return Reading(count * records / passed)

    def measure() -> Iterator[Reading]:
        with _servers(replicas) as url:
            while True:
                yield asyncio.run(publish(url))

    return Peer(f"nats alone, {replicas} replicas", measure)


@figure("cluster.publish_r1", unit="records/s", target=300_000, peers=[_bare(1)])
def publish_r1() -> Iterator[Reading]:
    """One server of NATS."""
    return _publish(1)


@figure("cluster.publish_r3", unit="records/s", target=100_000, peers=[_bare(3)])
def publish_r3() -> Iterator[Reading]:
    """Three servers of NATS on this machine; two of them have each record."""
    return _publish(3)
