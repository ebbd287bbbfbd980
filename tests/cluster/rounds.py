"""Rounds of torture: traffic of every protocol, faults, and a verdict. `python -m tests.cluster.rounds --help`

A round has topics and clients of its own; its faults follow from the seed and the number of the round, so that
`--seed S --first N --rounds 1` repeats one. A new cluster is made every ten rounds.
"""

import argparse
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from babelbus.client import BlockingClient
from babelbus.clients.jebp.errors import ClientError, TopicExistsError
from tests.cluster.checker import Violation, check
from tests.cluster.history import Event, History, Kind, write_history
from tests.cluster.workload import (
    LOST,
    PARTITIONS,
    REPLY_SECONDS,
    Actor,
    Consumer,
    EndReader,
    Follower,
    GroupMember,
    JebpPublisher,
    Listener,
    MeshConsumer,
    MeshPublisher,
    Mourner,
    Publisher,
    QueueConsumer,
    QueuePublisher,
    StateReader,
    StateWriter,
    StayingPublisher,
    Talker,
)
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.cluster import BusCluster, bus_cluster, until

ROUNDS_OF_A_CLUSTER = 10
SLOW_SECONDS = 0.03


class Verdict(msgspec.Struct, frozen=True):
    """The result of one round."""

    round: int
    seed: int
    faults: list[str]
    seconds: float
    counts: dict[str, int]
    violations: list[Violation]
    gaps: dict[str, float] = {}
    """By fault: the longest time without an acknowledgement of any publisher of the log."""


# -- faults ------------------------------------------------------------------------------------------------------------


class Faults:
    """What can happen to a cluster. Each method does it, and puts it right again."""

    def __init__(self, cluster: BusCluster, chance: random.Random, this: "Round") -> None:
        self._cluster, self._chance, self._round = cluster, chance, this

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

    def kill_and_restart_owner(self) -> None:
        """SIGKILL; it comes back at once."""
        owner = self._cluster.owner()
        owner.end()
        owner.start()

    def stop_owner(self) -> None:
        """SIGTERM: a planned move."""
        record, owner = self._cluster.lease(), self._cluster.owner()
        owner.end(signal.SIGTERM)
        self._moves(record)
        owner.start()

    def kill_member(self) -> None:
        """SIGKILL of a member that does not own."""
        owner = self._cluster.owner()
        member = self._chance.choice([member for member in self._cluster.members if member is not owner])
        member.end()
        self._round.progress(20, of_all=False)  # who stays at this member waits
        member.start()

    def pause_owner(self) -> None:
        """SIGSTOP for longer than the lease: the owner that comes back is a zombie."""
        record, owner = self._cluster.lease(), self._cluster.owner()
        owner.pause()
        try:
            self._moves(record)
            self._round.progress(20, of_all=False)
        finally:
            owner.resume()

    def partition_owner_from_nats(self) -> None:
        """The owner reaches no server of NATS until another member has taken over."""
        record, owner = self._cluster.lease(), self._cluster.owner()
        for way in owner.ways:
            way.partition()
        try:
            self._moves(record)
            self._round.progress(20, of_all=False)
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
            self._round.progress(10)
        finally:
            for way in ways:
                way.heal()

    def kill_nats_leader(self) -> None:
        """SIGKILL of the server of NATS that leads a stream; traffic goes on without it."""
        server = self._cluster.leader(self._chance.choice(["bb-0", "bb-1", "bb-lease"]))
        server.kill()
        try:
            self._round.progress(5)
        finally:
            server.start()

    def pause_nats_leader(self) -> None:
        """SIGSTOP of a leader, until traffic goes on without it."""
        server = self._cluster.leader(self._chance.choice(["bb-0", "bb-1", "bb-lease"]))
        server.pause()
        try:
            self._round.progress(5)
        finally:
            server.resume()

    def fill_disk_of_nats(self) -> None:
        """The disk of one server of NATS is full for a while; then there is room, and the server is started again."""
        disk, server = self._cluster.disk, self._cluster.servers[-1]
        assert disk is not None
        disk.fill()
        try:
            self._round.progress(20)
        finally:
            disk.free()
            server.kill()  # NATS turns JetStream off after the first error of its disk, until it is started again
            server.start()


ALL = [
    "kill_owner", "kill_and_restart_owner", "stop_owner", "kill_member", "pause_owner", "partition_owner_from_nats",
    "cut_nats", "partition_members_from_owner", "slow_ways", "kill_nats_leader", "pause_nats_leader",
    "fill_disk_of_nats", "kill_edge",
]  # fmt: skip


def possible(cluster: BusCluster) -> list[str]:
    """Return the faults that can be made here."""
    missing: set[str] = set()
    if cluster.disk is None:
        missing.add("fill_disk_of_nats")
    if cluster.processes == 1:
        missing.add("kill_edge")
    return [name for name in ALL if name not in missing]


# -- a round -----------------------------------------------------------------------------------------------------------


class Round:
    """The clients of one round, and what they noted."""

    def __init__(self, cluster: BusCluster, number: int, chance: random.Random, *, state: bool = True) -> None:
        self.history = History()
        self._cluster = cluster
        self._errors = {member: len(member.errors()) for member in cluster.members}
        parts = cluster, self.history, chance
        log, queue, mesh, plant, prefix = (f"{name}{number}" for name in ("log", "queue", "mesh", "plant", "state"))
        self.topics = {log: PARTITIONS, queue: 1, mesh: 1, plant: 1}
        self.publishers: list[Publisher] = [
            JebpPublisher("hopping", log, *parts),
            StayingPublisher("staying", log, *parts),
            QueuePublisher("queueing", queue, *parts),
            MeshPublisher("meshing", mesh, *parts),
        ]
        self._talker = Talker("talking", plant, *parts)
        self.consumers: list[Consumer] = [
            *[Follower(f"follower{partition}", log, partition, *parts) for partition in range(PARTITIONS)],
            GroupMember("member", log, *parts),
            GroupMember("mixed", mesh, *parts),
            QueueConsumer("worker", queue, *parts),
            MeshConsumer("mesh", mesh, *parts),
        ]
        self._others: list[Actor] = [Listener("listener", plant, *parts), EndReader("ends", log, *parts)]
        self._mourner = Mourner("mourner", prefix, *parts)
        self._writers: list[Actor] = []
        if state:
            self._writers = [StateWriter("writer", prefix, *parts)]
            self._others += [StateReader(f"reader{number}", prefix, *parts) for number in range(2)]
            self._others.append(self._mourner)

    @property
    def actors(self) -> list[Actor]:
        """All clients."""
        return [*self.publishers, self._talker, *self.consumers, *self._writers, *self._others]

    def make_topics(self) -> None:
        """Make the topics, through whatever member answers."""
        for topic, partitions in self.topics.items():

            def make(topic: str = topic, partitions: int = partitions) -> bool:
                for member in self._cluster.members:
                    try:
                        with BlockingClient(
                            member.addresses["jebp"], identity=self._cluster.identity, reconnect=False,
                            request_timeout_seconds=REPLY_SECONDS,
                        ) as client:  # fmt: skip
                            client.topics.create(topic, partitions=partitions)
                            return True
                    except TopicExistsError:
                        return True
                    except LOST:
                        continue
                return False

            if not until(make):
                raise AssertionError(f"topic {topic} cannot be made")

    def start(self) -> None:
        """Start all clients, and wait until each does its work."""
        for consumer in self.consumers:  # first: some groups begin behind the newest record
            consumer.start()
            self._needs(f"{consumer.name} joins", self._until(partial(self._has_joined, consumer)))
        for actor in self.actors:
            if actor.ident is None:
                actor.start()
        self._needs("warm", self.progress(20))
        for consumer in self.consumers:
            self._needs(f"{consumer.name} begins", self._until(partial(bool, consumer.values)))

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition, but not if a client has failed: its failure is in the history."""
        until(lambda: condition() or any(actor.failure for actor in self.actors))
        return condition()

    def _needs(self, words: str, is_so: bool) -> None:
        self.history.add("round", "due", value=words)
        if is_so:
            self.history.add("round", "done", value=words)

    def progress(self, count: int, *, of_all: bool = True) -> bool:
        """Return True when all publishers, or one, have so many more acknowledgements; False if that takes too long."""
        ends = [(actor.name, kind, self.history.count(actor.name, kind) + count) for actor, kind in self._steady]
        test = all if of_all else any
        return self._until(lambda: test(self.history.count(name, kind) >= end for name, kind, end in ends))

    @property
    def _steady(self) -> list[tuple[Actor, Kind]]:
        """The clients that should always go on, and what shows that they do."""
        publishers: list[tuple[Actor, Kind]] = [(actor, "acked") for actor in self.publishers]
        return [*publishers, *[(actor, "set_acked") for actor in self._writers]]

    def _has_joined(self, consumer: Consumer) -> bool:
        return self.history.count(consumer.name, "joined") > 0

    def fault(self, name: str, faults: Faults) -> None:
        """Make a fault, heal it, and wait until all publishers go on."""
        self.history.add("round", "fault", value=name)
        try:
            getattr(faults, name)()
        except Exception:
            self.history.add("round", "due", value=f"{name}: {traceback.format_exc(limit=-2)}")
        self.history.add("round", "healed", value=name)
        self._needs(f"all go on after {name}", self.progress(20))

    def finish(self) -> None:
        """Stop the publishers, wait until the consumers have all, stop them, and read the log through two members."""
        self._end([*self.publishers, self._talker, *self._writers])
        self._needs("an audit", until(lambda: self._audit("audit")))
        for consumer in self.consumers:
            if consumer.style == "group":
                self._needs(f"{consumer.name} has all", self._until(partial(self._has_all, consumer)))
        if self._mourner in self._others:
            self.history.add("round", "due", value="will and lock")
            if self._mourner.wait(SAFETY_NET_SECONDS):
                self.history.add("round", "done", value="will and lock")
        self._end(self.actors)
        self._needs("another audit", until(lambda: self._audit("audit again")))
        for member, before in self._errors.items():
            for text in member.errors()[before:]:
                self.history.add(member.name, "due", value=text)

    def _end(self, actors: Sequence[Actor]) -> None:
        for actor in actors:
            actor.stop()
        for actor in actors:
            actor.join(SAFETY_NET_SECONDS)
            self._needs(f"{actor.name} ends", not actor.is_alive())

    def _has_all(self, consumer: Consumer) -> bool:
        return {
            event.value for event in self.history.events() if event.kind == "read" and event.topic == consumer.topic
        } <= consumer.values

    def _audit(self, who: str) -> bool:
        """Read all topics through a random member; return whether that worked."""
        member = random.choice(self._cluster.members)
        found: list[tuple[str, int, int, str]] = []
        try:
            with BlockingClient(
                member.addresses["jebp"], identity=self._cluster.identity, reconnect=False,
                request_timeout_seconds=REPLY_SECONDS,
            ) as client:  # fmt: skip
                for topic, partitions in self.topics.items():
                    for partition in range(partitions):
                        found += [
                            (topic, partition, record.offset, (record.payload or b"").decode())
                            for record in client.follow(topic, offset=0, partition=partition, until_end=True)
                        ]
        except (OSError, ClientError):
            return False
        for topic, partition, offset, value in found:
            self.history.add(
                f"{who} of {member.name}", "read", topic=topic, partition=partition, offset=offset, value=value
            )
        return True


def run_round(
    cluster: BusCluster, number: int, seed: int, names: Sequence[str] | None = None, *, state: bool = True
) -> tuple[Verdict, list[Event]]:
    """Run a round; its faults are drawn, if they are not named."""
    chance = random.Random(f"{seed}/{number}")
    drawn = [chance.choice(possible(cluster)) for _ in range(chance.choice([1, 1, 2]))]
    faults = list(names or drawn)
    begun = time.monotonic()
    this = Round(cluster, number, chance, state=state)
    try:
        this.make_topics()
        this.start()
        for name in faults:
            this.fault(name, Faults(cluster, chance, this))
        this.finish()
    finally:
        for actor in this.actors:
            actor.stop()
    events = this.history.events()
    verdict = Verdict(
        number, seed, faults, round(time.monotonic() - begun, 1),
        dict(Counter(event.kind for event in events)), check(events), gaps(events),
    )  # fmt: skip
    return verdict, events


def gaps(events: Iterable[Event]) -> dict[str, float]:
    """Return for each fault the longest time without an acknowledgement of the publishers with jebp."""
    found: dict[str, float] = {}
    fault, last = "", 0.0
    for event in events:
        if event.kind == "fault":
            fault, last = event.value, event.at
        elif event.kind == "acked" and event.offset >= 0 and fault:
            found[fault] = round(max(found.get(fault, 0.0), event.at - last), 2)
            last = event.at
    return found


def run_rounds(folder: Path, seed: int, first: int, count: int, *, lease_seconds: float) -> int:
    """Run rounds, write verdicts and histories into a folder, and return how many rounds found something."""
    folder.mkdir(parents=True, exist_ok=True)
    failures, number = 0, first
    with (folder / "verdicts.jsonl").open("ab") as file:
        while number < first + count:
            end = min(first + count, (number // ROUNDS_OF_A_CLUSTER + 1) * ROUNDS_OF_A_CLUSTER)
            with bus_cluster(lease_seconds=lease_seconds) as cluster:
                cluster.start()
                while number < end:
                    verdict, events = run_round(cluster, number, seed)
                    file.write(msgspec.json.encode(verdict) + b"\n")
                    file.flush()
                    write_history(folder / f"round-{number}.jsonl.gz", events)
                    told = "; ".join(f"{one.promise}: {one.words}" for one in verdict.violations) or "good"
                    print(f"round {number}: {', '.join(verdict.faults)}: {verdict.seconds} s: {told}", flush=True)
                    number += 1
                    if verdict.violations:
                        failures += 1
                        for member in cluster.members:
                            (folder / f"round-{verdict.round}-{member.name}.log").write_text(member.said())
                        break  # a new cluster: what is broken should not break the next round
    return failures


def main() -> int:
    """Run rounds as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lease-seconds", type=float, default=6.0)
    parser.add_argument("--folder", type=Path, default=Path("build/torture-cluster"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the six processes first
    failures = run_rounds(
        options.folder, options.seed, options.first, options.rounds, lease_seconds=options.lease_seconds
    )
    print(f"{options.rounds} rounds, {failures} with something broken; histories are in {options.folder}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
