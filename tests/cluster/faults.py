"""The faults of the torture."""

import os
import random
import signal
import time
from collections.abc import Callable

from tests.support.cluster import BusCluster, until

SLOW_SECONDS = 0.03


class Faults:
    """What can happen to a cluster. Each method does it, and puts it right again."""

    def __init__(self, cluster: BusCluster, chance: random.Random, progress: Callable[..., bool]) -> None:
        """Take `progress(count, of_all=...)`, which waits for further acknowledgements of publishers."""
        self._cluster, self._chance, self._progress = cluster, chance, progress

    def _lasts(self, seconds: float) -> None:
        """Let a fault last for a while: its length is a part of it."""
        begun = time.monotonic()
        until(lambda: time.monotonic() - begun > seconds)

    def _moves(self, record: str) -> None:
        assert until(lambda: self._cluster.has_moved_from(record)), "nobody took over"

    def kill_owner(self) -> None:
        """SIGKILL; it comes back when another member has taken over."""
        record, owner = self._cluster.lease(), self._cluster.owner()
        owner.end()
        self._moves(record)
        owner.start()

    def kill_owner_before_it_tells(self) -> None:
        """SIGKILL while the answers of NATS are on their way: changes are stored that the owner has told nobody."""
        record, owner = self._cluster.lease(), self._cluster.owner()
        for way in owner.ways:
            way.slow_down(SLOW_SECONDS)
        self._lasts(self._chance.uniform(0, 5 * SLOW_SECONDS))
        owner.end()
        for way in owner.ways:
            way.heal()
        self._moves(record)
        owner.start()

    def kill_and_restart_owner(self) -> None:
        """SIGKILL; it comes back at once."""
        owner = self._cluster.owner()
        owner.end()
        owner.start()

    def move_owner(self) -> None:
        """The owner gives the data to another member, and goes on as a member: sessions go on."""
        record, owner = self._cluster.lease(), self._cluster.owner()
        assert until(owner.gives_the_data_away), "no other member takes the data"
        self._moves(record)

    def stop_owner(self) -> None:
        """SIGTERM: the owner gives the data away, and ends."""
        record, owner = self._cluster.lease(), self._cluster.owner()
        owner.end(signal.SIGTERM)
        self._moves(record)
        owner.start()

    def kill_member(self) -> None:
        """SIGKILL of a member that does not own."""
        owner = self._cluster.owner()
        member = self._chance.choice([member for member in self._cluster.members if member is not owner])
        member.end()
        self._progress(20, of_all=False)  # who stays at this member waits
        member.start()

    def pause_owner(self) -> None:
        """SIGSTOP for longer than the lease: the owner that comes back is a zombie."""
        record, owner = self._cluster.lease(), self._cluster.owner()
        owner.pause()
        try:
            self._moves(record)
            self._progress(20, of_all=False)
        finally:
            owner.resume()

    def partition_owner_from_nats(self) -> None:
        """The owner reaches no server of NATS until another member has taken over."""
        record, owner = self._cluster.lease(), self._cluster.owner()
        for way in owner.ways:
            way.partition()
        try:
            self._moves(record)
            self._progress(20, of_all=False)
        finally:
            for way in owner.ways:
                way.heal()

    def kill_edge(self) -> None:
        """SIGKILL of a process that accepts clients for the owner; the owner starts it again."""
        os.kill(self._chance.choice(self._cluster.owner().edges()), signal.SIGKILL)

    def cut_nats(self) -> None:
        """All connections between members and NATS break."""
        for member in self._cluster.members:
            for way in member.ways:
                way.cut()

    def partition_members_from_owner(self) -> None:
        """No member reaches the owner for as long as a lease; the owner has its lease all the time."""
        link = self._cluster.owner().link
        link.partition()
        try:
            self._lasts(self._cluster.lease_seconds)
        finally:
            link.heal()

    def slow_ways(self) -> None:
        """The owner's ways to NATS, and the ways of the others to it, are slow."""
        owner = self._cluster.owner()
        ways = [*owner.ways, owner.link]
        for way in ways:
            way.slow_down(SLOW_SECONDS)
        try:
            self._progress(10)
        finally:
            for way in ways:
                way.heal()

    def kill_nats_leader(self) -> None:
        """SIGKILL of the server of NATS that leads a stream; traffic goes on without it."""
        server = self._cluster.leader(self._chance.choice(["bb-0", "bb-1", "bb-lease"]))
        server.kill()
        try:
            self._progress(5)
        finally:
            server.start()

    def pause_nats_leader(self) -> None:
        """SIGSTOP of a leader, until traffic goes on without it."""
        server = self._cluster.leader(self._chance.choice(["bb-0", "bb-1", "bb-lease"]))
        server.pause()
        try:
            self._progress(5)
        finally:
            server.resume()

    def fill_disk_of_nats(self) -> None:
        """The disk of one server of NATS is full for a while; then there is room, and the server is started again."""
        disk, server = self._cluster.disk, self._cluster.servers[-1]
        assert disk is not None
        disk.fill()
        try:
            self._progress(20)
        finally:
            disk.free()
            server.kill()  # NATS turns JetStream off after the first error of its disk, until it is started again
            server.start()


ALL = [
    "kill_owner", "kill_owner_before_it_tells", "kill_and_restart_owner", "move_owner", "stop_owner", "kill_member",
    "pause_owner",
    "partition_owner_from_nats", "cut_nats", "partition_members_from_owner", "slow_ways", "kill_nats_leader",
    "pause_nats_leader", "fill_disk_of_nats", "kill_edge",
]  # fmt: skip


def possible(cluster: BusCluster) -> list[str]:
    """Return the faults that can be made here."""
    missing: set[str] = set()
    if cluster.disk is None:
        missing.add("fill_disk_of_nats")
    if cluster.processes == 1:
        missing.add("kill_edge")
    return [name for name in ALL if name not in missing]
