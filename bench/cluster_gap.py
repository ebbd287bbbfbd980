"""The gap of a cluster: how long nobody is acknowledged when the owner is killed, and when it is moved.

Three members and three servers of NATS on loopback, with the settings that a user gets. One client publishes record by
record and goes to another member when its connection ends or nothing is answered for a second.
"""

import contextlib
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from functools import partial

from babelbus.client import BlockingClient
from babelbus.clients.jebp.errors import ClientError, TopicExistsError
from babelbus.config import JetstreamSettings
from bench.frame import PeerMissingError, Reading, figure
from tests.support.cluster import BusCluster, Member, bus_cluster, listens, until
from tests.support.nats import NatsMissingError

TOPIC = "gap"
GAPS = 10
STEADY_ACKS = 20
KILLED_SECONDS_MAX = 12
MOVED_MS_MAX = 500


class _Publisher(threading.Thread):
    """Publishes through the members in turn, and keeps the time of the last acknowledgement."""

    def __init__(self, cluster: BusCluster) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self.count = 0
        self.last = self.longest = 0.0
        self.stopped = False

    def run(self) -> None:
        turn = 0
        while not self.stopped:
            turn += 1
            address = self._cluster.members[turn % len(self._cluster.members)].addresses["jebp"]
            if listens(address):
                with contextlib.suppress(OSError, ClientError):
                    self._publish(address)

    def _publish(self, address: str) -> None:
        with BlockingClient(
            address, identity=self._cluster.identity, reconnect=False, request_timeout_seconds=1.0
        ) as client:
            with contextlib.suppress(TopicExistsError):
                client.create_topic(TOPIC)
            while not self.stopped:
                client.publish(TOPIC, b"x" * 100)
                now = time.perf_counter()
                self.longest = max(self.longest, now - self.last if self.last else 0.0)
                self.last = now
                self.count += 1

    def wait_for(self, count: int) -> None:
        """Wait for so many more acknowledgements."""
        end = self.count + count
        assert until(lambda: self.count >= end), "nobody acknowledges"


def _serves(cluster: BusCluster, member: Member) -> bool:
    """Return whether a member passes clients on."""
    try:
        with BlockingClient(
            member.addresses["jebp"], identity=cluster.identity, reconnect=False, request_timeout_seconds=1.0
        ) as client:
            return bool(client.positions([TOPIC], None))
    except (OSError, ClientError):
        return False


def _gaps(number: int) -> Iterator[Reading]:
    """Yield the median of the longest times without an acknowledgement around ends of owners, by signal `number`."""
    try:
        with bus_cluster(lease_seconds=JetstreamSettings().lease_seconds) as cluster:
            cluster.start()
            publisher = _Publisher(cluster)
            publisher.start()
            while True:
                yield _measure(cluster, publisher, number)
    except NatsMissingError as missing:
        raise PeerMissingError(str(missing)) from missing


def _measure(cluster: BusCluster, publisher: _Publisher, number: int) -> Reading:
    gaps = []
    for _ in range(GAPS):
        publisher.wait_for(STEADY_ACKS)
        record, owner = cluster.lease(), cluster.owner()
        publisher.longest = 0.0
        owner.end(number)
        assert until(partial(cluster.has_moved_from, record)), "nobody takes over"
        publisher.wait_for(STEADY_ACKS)
        gaps.append(publisher.longest)
        owner.start()
        assert until(partial(_serves, cluster, owner)), "a member does not come back"
    return Reading(statistics.median(gaps), f"{min(gaps):.2f} to {max(gaps):.2f} s in {GAPS}")


@figure("cluster.gap_killed", unit="s", target=KILLED_SECONDS_MAX, lower_is_better=True)
def gap_killed() -> Iterator[Reading]:
    """SIGKILL of the owner, median of 10."""
    return _gaps(signal.SIGKILL)


@figure("cluster.gap_moved", unit="ms", target=MOVED_MS_MAX, lower_is_better=True)
def gap_moved() -> Iterator[Reading]:
    """SIGTERM of the owner, which gives the lease back, median of 10."""
    for reading in _gaps(signal.SIGTERM):
        yield Reading(reading.value * 1e3, reading.note)
