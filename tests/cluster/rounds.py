"""Rounds of torture: traffic of every protocol, faults, and a verdict. `python -m tests.cluster.rounds --help`

A round has topics and clients of its own; its faults follow from the seed and the number of the round, so that
`--seed S --first N --rounds 1` repeats one. A new cluster is made every ten rounds; in every other cluster each member
has two processes that accept clients.
"""

import argparse
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import msgspec

from babelbus.client import BlockingClient
from babelbus.clients.jebp.errors import ClientError, TopicExistsError
from tests.cluster.checker import check
from tests.cluster.faults import Faults, possible
from tests.cluster.history import Event, History, Kind, write_history
from tests.cluster.over_http import (
    RpcPublisher,
    StreamConsumer,
    Taker,
    WebhookConsumer,
    WebMeshPublisher,
    WebQueuePublisher,
)
from tests.cluster.quiet import QuietOnes
from tests.cluster.state import Frames, Mourner, StateReader, StateWatcher, StateWriter
from tests.cluster.summary import Verdict, Work, render, summarise
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
    Publisher,
    QueueConsumer,
    QueuePublisher,
    StayingPublisher,
    Talker,
)
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.cluster import BusCluster, bus_cluster, until

ROUNDS_OF_A_CLUSTER = 10
KEYS = 3
"""Keys of each client that writes the state."""
WORK: tuple[tuple[Kind, ...], ...] = (("sent", "set"), ("acked", "set_acked"), ("got", "found", "end"))
"""The kinds of events that count as sent, acknowledged and delivered."""


class Round:
    """The clients of one round, and what they noted."""

    def __init__(self, cluster: BusCluster, number: int, chance: random.Random, *, state: bool = True) -> None:
        self.history = History()
        self._cluster = cluster
        self._errors = {member: len(member.errors()) for member in cluster.members}
        parts = cluster, self.history, chance
        names = ("log", "queue", "mesh", "plant", "quiet", "state")
        log, queue, mesh, plant, quiet, prefix = (f"{name}{number}" for name in names)
        self.topics = {log: PARTITIONS, queue: 1, mesh: 1, plant: 1, quiet: 1}
        self.publishers: list[Publisher] = [
            JebpPublisher("hopping", log, *parts),
            StayingPublisher("staying", log, *parts),
            QueuePublisher("queueing", queue, *parts),
            WebQueuePublisher("posting", queue, *parts),
            MeshPublisher("meshing", mesh, *parts),
            WebMeshPublisher("webbing", mesh, *parts),
            RpcPublisher("calling", mesh, *parts),
        ]
        self._talker = Talker("talking", plant, *parts)
        self.consumers: list[Consumer] = [
            *[Follower(f"follower{partition}", log, partition, *parts) for partition in range(PARTITIONS)],
            GroupMember("member", log, *parts),
            GroupMember("mixed", mesh, *parts),
            QueueConsumer("worker", queue, *parts),
            Taker("taker", queue, *parts),
            MeshConsumer("mesh", mesh, *parts),
            WebhookConsumer("webhook", mesh, *parts),
            StreamConsumer("stream", mesh, *parts),
        ]
        self._others: list[Actor] = [Listener("listener", plant, *parts), EndReader("ends", log, *parts)]
        self._mourner = Mourner("mourner", prefix, *parts)
        self._quiet = QuietOnes(f"quiet-{prefix}", quiet, *parts) if state else None
        self._writers: list[StateWriter] = []
        self._watchers: list[StateWatcher] = []
        if state:
            written, web_written = (
                [f"{start}/{number}" for number in range(KEYS)] for start in (prefix, f"web-{prefix}")
            )
            self._writers = [
                StateWriter("writer", written, *parts), StateWriter("web writer", web_written, *parts, Frames),
            ]  # fmt: skip
            keys = [*written, *web_written]
            self._watchers = [
                StateWatcher("watcher", keys, *parts), StateWatcher("web watcher", keys, *parts, Frames),
            ]  # fmt: skip
            self._others += [
                StateReader("reader", keys, *parts), StateReader("web reader", keys, *parts, Frames),
                *self._watchers, self._mourner,
            ]  # fmt: skip

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
        if self._quiet is not None:
            self._needs(f"quiet clients before {name}", self._quiet.settle())
        with nullcontext() if self._quiet is None else self._quiet.working(name):
            self.history.add("round", "fault", value=name)
            try:
                getattr(faults, name)()
            except Exception:
                self.history.add("round", "due", value=f"{name}: {traceback.format_exc(limit=-2)}")
            self.history.add("round", "healed", value=name)
        self._needs(f"all go on after {name}", self.progress(20))

    def finish(self) -> None:
        """Stop the publishers, wait until the consumers have all, stop them, and read the log through two members."""
        if self._quiet is not None:
            self._quiet.finish()
        self._end([*self.publishers, self._talker, *self._writers])
        self._needs("an audit", until(lambda: self._audit("audit")))
        there = self._audited()
        for consumer in self.consumers:
            if consumer.style == "group":
                due, what = set(there[consumer.topic]), "all"
            elif consumer.style in ("queue", "stream"):
                due, what = set(there[consumer.topic][-1:]), "the newest"
            else:
                continue
            self._needs(f"{consumer.name} has {what}", self._until(partial(due.issubset, consumer.values)))
        for watcher in self._watchers:
            self._needs(f"{watcher.name} has the newest", self._until(partial(self._is_told, watcher)))
        if self._mourner in self._others:
            self.history.add("round", "due", value="will and lock")
            if self._mourner.wait(SAFETY_NET_SECONDS):
                self.history.add("round", "done", value="will and lock")
        self._end(self.actors)
        note_idle(self.actors, self.history)
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

    def _is_told(self, watcher: StateWatcher) -> bool:
        """Return whether a subscriber has the last acknowledged value of each key, or a newer one."""
        newest = {key: number for writer in self._writers for key, number in writer.values.items()}
        return all(watcher.values.get(key, 0) >= number for key, number in newest.items())

    def _audited(self) -> dict[str, list[str]]:
        """Return the values of each topic, in the order of the log if it has one partition."""
        found: dict[str, list[str]] = {topic: [] for topic in self.topics}
        for event in self.history.events():
            if event.kind == "read":
                found[event.topic].append(event.value)
        return found

    def work(self) -> dict[str, Work]:
        """Return by protocol what was sent, acknowledged and delivered."""
        found: dict[str, Work] = {}
        for actor in self.actors:
            counts = (sum(self.history.count(actor.name, kind) for kind in kinds) for kinds in WORK)
            found[actor.protocol] = found.get(actor.protocol, Work()) + Work(*counts)
        return found

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


def note_idle(actors: Iterable[Actor], history: History) -> None:
    """Note each client that did nothing: what a round says about its protocol is worth nothing."""
    for actor in actors:
        if history.count(actor.name, actor.proof) == 0:
            history.add(actor.name, "due", value=f"one '{actor.proof}' of this client of {actor.protocol}")


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
            this.fault(name, Faults(cluster, chance, this.progress))
        this.finish()
    except Exception:  # what was seen until then is judged, and kept
        this.history.add("round", "due", value=traceback.format_exc(limit=-4))
    finally:
        for actor in this.actors:
            actor.stop()
    events = this.history.events()
    verdict = Verdict(
        number, seed, faults, round(time.monotonic() - begun, 1),
        dict(Counter(event.kind for event in events)), this.work(), check(events), gaps(events),
        count_by_fault(events, "quiet"), count_by_fault(events, "lived"),
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


def count_by_fault(events: Iterable[Event], kind: Kind) -> dict[str, int]:
    """Return how many events of a kind name each fault."""
    return dict(Counter(event.value for event in events if event.kind == kind))


def run_rounds(folder: Path, seed: int, first: int, count: int, *, lease_seconds: float) -> int:
    """Run rounds, write verdicts and histories into a folder, and return how many rounds found something."""
    folder.mkdir(parents=True, exist_ok=True)
    verdicts: list[Verdict] = []
    number = first
    with ExitStack() as stack:
        file = stack.enter_context((folder / "verdicts.jsonl").open("ab"))
        stack.callback(conclude, folder, verdicts)
        while number < first + count:
            passed = number // ROUNDS_OF_A_CLUSTER
            end = min(first + count, (passed + 1) * ROUNDS_OF_A_CLUSTER)
            with bus_cluster(lease_seconds=lease_seconds, processes=1 + passed % 2) as cluster:
                cluster.start()
                while number < end:
                    verdict, events = run_round(cluster, number, seed)
                    verdicts.append(verdict)
                    file.write(msgspec.json.encode(verdict) + b"\n")
                    file.flush()
                    write_history(folder / f"round-{number}.jsonl.gz", events)
                    told = "; ".join(f"{one.promise}: {one.words}" for one in verdict.violations) or "good"
                    print(f"round {number}: {', '.join(verdict.faults)}: {verdict.seconds} s: {told}", flush=True)
                    number += 1
                    if verdict.violations:
                        for member in cluster.members:
                            (folder / f"round-{verdict.round}-{member.name}.log").write_text(member.said())
                        break  # a new cluster: what is broken should not break the next round
    return sum(bool(verdict.violations) for verdict in verdicts)


def conclude(folder: Path, verdicts: Sequence[Verdict]) -> None:
    """Print the table of all rounds, and write it as text and as JSON."""
    summary = summarise(verdicts)
    text = render(summary)
    (folder / "verdict.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    (folder / "verdict.txt").write_text(text)
    print(text, end="", flush=True)


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
    print(f"Histories, and this table as verdict.txt and verdict.json, are in {options.folder}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
