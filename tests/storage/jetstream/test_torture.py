"""Servers of NATS are killed and paused, connections break, and the owner changes, while records are published.

Every record is different and is appended once. At the end each acknowledged one is at its offset, none is there twice,
and the offsets have no gap.
"""

import random
import shutil
import threading
from pathlib import Path

import pytest

pytest.importorskip("nats", reason="engine jetstream is not tested: the package nats-py is not installed")

from babelbus.errors import StorageError
from babelbus.records.record import Record
from babelbus.storage.jetstream import StreamLog
from tests.storage.helpers import append, read_all
from tests.storage.jetstream.test_store import Background, Place
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.nats import NatsServer, Relay, nats_cluster

NOW = 1_700_000_000_000
BATCH = 20


class Publisher:
    """Publishes different records to a log, and knows the offset of each one that was acknowledged."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.acked: dict[int, bytes] = {}
        self.refused = 0
        self._count = 0
        self._news = threading.Condition()
        self._stopped = False

    def run(self, log: StreamLog) -> None:
        while not self._stopped:
            sent = [b"%d-%d" % (self.name, self._count + number) for number in range(BATCH)]
            self._count += BATCH
            try:
                base = append(log, [Record(payload, timestamp=NOW) for payload in sent])
                log.durable()
            except StorageError as error:
                self.refused += 1
                if not error.retriable:
                    return
                continue
            with self._news:
                self.acked |= {base + number: payload for number, payload in enumerate(sent)}
                self._news.notify_all()

    def wait_for_more(self, count: int) -> None:
        with self._news:
            wanted = len(self.acked) + count
            assert self._news.wait_for(lambda: len(self.acked) >= wanted, SAFETY_NET_SECONDS)

    def stop(self) -> None:
        self._stopped = True


def check(log: StreamLog, acked: dict[int, bytes]) -> None:
    found = read_all(log)
    assert [record.offset for record in found] == list(range(log.next_offset))
    payloads = [record.payload for record in found]
    assert len(set(payloads)) == len(payloads)
    assert {offset: payloads[offset] for offset in acked} == acked


# nats-py leaves the socket of an attempt to connect again that failed to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("nats")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_acknowledged_is_lost_and_nothing_comes_twice_whatever_fails(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with nats_cluster() as servers:
        _torture(servers, chance, tmp_path, rounds=10)


def _torture(servers: list[NatsServer], chance: random.Random, tmp_path: Path, rounds: int) -> None:
    place = Place("", tmp_path)
    relays = [Relay(server.port) for server in servers]
    acked: dict[int, bytes] = {}
    owner = 0
    (tmp_path / "owner0").mkdir()

    def begin() -> tuple[StreamLog, Publisher, Background]:
        store = place.open(
            tmp_path / f"owner{owner}",
            servers=",".join(relay.url for relay in relays),
            replicas=3,
            timeout_seconds=20,
        )
        log = place.log(store)
        publisher = Publisher(owner)
        return log, publisher, Background(lambda: publisher.run(log))

    log, publisher, running = begin()
    for number in range(rounds):
        publisher.wait_for_more(200)
        fault = chance.choice(["kill", "kill leader", "pause leader", "cut", "lose", "take over"])
        print(f"round {number}: {fault}")
        leader = log.nats.call(log.nats.api(f"STREAM.INFO.{place.prefix}-0", None, 30), 60)["cluster"]["leader"]
        victim = next(server for server in servers if (server.name == leader) == (fault != "kill"))
        if fault.startswith("kill"):
            victim.kill()
            publisher.wait_for_more(200)
            victim.start()
        elif fault == "pause leader":
            victim.pause()
            publisher.wait_for_more(200)
            victim.resume()
        elif fault == "cut":
            for relay in relays:
                relay.cut()
        elif fault == "lose":
            for relay in relays:
                setattr(relay, chance.choice(["loses_replies", "loses_requests"]), True)
            doubts = log.shard.doubts
            while log.shard.doubts == doubts and log.shard.doubt_since is None:
                pass
            for relay in relays:
                relay.cut()
        else:
            before, stale, owner = publisher, running, owner + 1
            shutil.copytree(tmp_path / f"owner{owner - 1}", tmp_path / f"owner{owner}")
            log, publisher, running = begin()
            publisher.wait_for_more(20)
            assert stale.wait().error is None  # refused, and it knows
            acked |= before.acked
    publisher.wait_for_more(200)
    publisher.stop()
    assert running.wait().error is None
    acked |= publisher.acked
    check(log, acked)
    place.close()
    for relay in relays:
        relay.close()
