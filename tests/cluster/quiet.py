"""Clients that are quiet while the owner fails: their connections go on (docs/cluster.md, "When the owner dies").

Before a fault they connect through members other than the owner, and the owner sends copies of their sessions. As soon
as another member owns the data, others change the key that they subscribe to, publish a message for the consumer among
them, and claim their locks. Then each of them is asked whether it is alive.
"""

import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from babelbus.client import BlockingClient
from tests.cluster.history import History
from tests.cluster.quiet_clients import NUMBERS, QuietClient, QuietConsumer, QuietState, grave_of
from tests.cluster.state import Frames, Lines, get
from tests.cluster.workload import LOST, REPLY_SECONDS, RefusedError
from tests.support.cluster import BusCluster, Member, until
from tests.support.zbus import SocketClient

FAILURES_OF_OWNER = {
    "kill_owner", "kill_and_restart_owner", "pause_owner", "partition_owner_from_nats", "move_owner", "stop_owner",
}  # fmt: skip
"""The faults that a quiet connection through another member must live through."""
QUIET_SECONDS = 3.0
"""Clients are quiet for so long before a fault: the owner looks once a second, and two looks make a copy."""
CHANGES = 3
"""How often the key that all subscribe to is changed behind a fault."""
COPIES = b"babelbus_cluster_session_copies "


class QuietOnes:
    """The quiet clients of a round, and those who work for them."""

    def __init__(self, prefix: str, topic: str, cluster: BusCluster, history: History, chance: random.Random) -> None:
        self._cluster, self._history, self._chance = cluster, history, random.Random(chance.random())
        self._touched, self._topic = f"{prefix}/touched", topic
        self._number = 0
        parts = cluster, history
        self._pairs = [
            (
                QuietState(f"holder {kind.protocol}", prefix, lock, *parts, kind, waits=False),
                QuietState(f"waiter {other.protocol}", prefix, lock, *parts, other, waits=True),
            )
            for kind, other, lock in ((Lines, Frames, f"{prefix}/lock/1"), (Frames, Lines, f"{prefix}/lock/2"))
        ]
        self._consumer = QuietConsumer(topic, *parts)
        self._teams: list[Sequence[QuietClient]] = [*self._pairs, [self._consumer]]
        self._clients = [client for team in self._teams for client in team]

    # -- around a fault ----------------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Connect who is not connected or at the owner, and wait until all have copies; return False without."""
        return until(self._is_settled)

    def _is_settled(self) -> bool:
        if self._number == 0:  # a subscription begins with a value: without one nobody knows what it has skipped
            self._insist(self._touch)
        owner = self._cluster.owner()
        for team in self._teams:
            if any(client.member in (None, owner) for client in team):
                for client in team:
                    client.end()
                for client in team:
                    if not self._insist(client.begin, but=owner):
                        return False
        begun = time.monotonic()
        copied = until(lambda: time.monotonic() - begun > QUIET_SECONDS and self._are_copied(owner))
        return copied and self._cluster.owner() is owner

    def _are_copied(self, owner: Member) -> bool:
        """Return whether the owner has sent so many copies; also if it is the owner no more, which ends the wait."""
        with suppress(OSError), urllib.request.urlopen(
            f"http://{owner.addresses['admin']}/metrics", timeout=REPLY_SECONDS
        ) as reply:  # fmt: skip
            counts = [float(line.removeprefix(COPIES)) for line in reply if line.startswith(COPIES)]
            if sum(counts) >= len(self._clients):
                return True
        return self._cluster.owner() is not owner

    @contextmanager
    def working(self, fault: str) -> Iterator[None]:
        """Work for the quiet clients as soon as another member owns the data, or the fault is over; then look at them.

        A connection that must live is a promise of the round.
        """
        owner, record, healed = self._cluster.owner(), self._cluster.lease(), threading.Event()
        due = {}
        for client in self._clients:
            client.add("quiet", value=fault)
            if fault in FAILURES_OF_OWNER and client.member is not owner:
                due[client] = f"{client.label} lives through {fault}, {next(NUMBERS)}"
                self._history.add("round", "due", value=due[client])

        work_done = f"work behind {fault}, {next(NUMBERS)}"
        self._history.add("round", "due", value=work_done)

        def work() -> None:
            if fault == "kill_owner_before_it_tells":
                with suppress(*LOST, RefusedError):
                    self._touch(self._chance.choice(self._cluster.members))
            until(lambda: healed.is_set() or self._cluster.has_moved_from(record))
            if self._work():
                self._history.add("round", "done", value=work_done)

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        try:
            yield
        finally:
            healed.set()
            worker.join()
        for client in self._look():
            client.add("lived", value=fault)
            if client in due:
                self._history.add("round", "done", value=due[client])

    def _work(self) -> bool:
        """Change the key that all subscribe to, publish a message for the consumer, and claim the locks."""
        work: list[Callable[[Member], object]] = [self._touch, self._publish]
        work += [partial(self._claim, holder.lock) for holder, _ in self._pairs]
        return all(map(self._insist, work))

    def _look(self) -> list[QuietClient]:
        """Return the clients whose connections live: they are asked after others have looked at their wills."""
        for pair in self._pairs:
            for client in pair:
                self._insist(partial(self._is_executed, client.will))
        # who waits for a lock comes first: if it has the lock, and the holder is answered later, both believe it
        return [client for client in reversed(self._clients) if client.is_alive()]

    # -- what others do ----------------------------------------------------------------------------------------------

    def _insist(self, do: Callable[[Member], object], *, but: Member | None = None) -> bool:
        """Try through one member after another until it works."""

        def works() -> bool:
            try:
                do(self._chance.choice([member for member in self._cluster.members if member is not but]))
            except (*LOST, RefusedError):
                return False
            return True

        return until(works)

    def _needs(self, words: str, is_so: bool) -> None:
        words = f"{words}, {next(NUMBERS)}"
        self._history.add("round", "due", value=words)
        if is_so:
            self._history.add("round", "done", value=words)

    def _touch(self, member: Member) -> None:
        with Lines(member.addresses["worterbuch-tcp"]) as client:
            for _ in range(CHANGES):
                self._number += 1
                about: dict[str, Any] = {"topic": self._touched, "number": self._number}
                self._history.add("toucher", "set", **about)
                try:
                    if "ack" not in (answer := client.ask("set", key=self._touched, value=self._number)):
                        raise RefusedError(answer)
                except (*LOST, RefusedError):
                    self._history.add("toucher", "set_unknown", **about)
                    raise
                self._history.add("toucher", "set_acked", **about)

    def _publish(self, member: Member) -> None:
        value = f"quiet-{next(NUMBERS)}"
        self._history.add("quiet publisher", "sent", topic=self._topic, value=value)
        try:
            with SocketClient(member.addresses["zbus"], timeout_seconds=REPLY_SECONDS) as client:
                if (answer := client.do("pub", value, mq=self._topic))["status"] != 200:
                    raise RefusedError(answer)
        except (*LOST, RefusedError):
            self._history.add("quiet publisher", "unknown", topic=self._topic, value=value)
            raise
        self._history.add("quiet publisher", "acked", topic=self._topic, value=value)
        self._consumer.due = value

    def _claim(self, lock: str, member: Member) -> bool:
        """Take a lock if it is free, and return whether it was."""
        session = next(NUMBERS)
        with Lines(member.addresses["worterbuch-tcp"]) as client:
            if "ack" not in client.ask("lock", key=lock):
                return False
            self._history.add("rival", "holds", topic=lock, session=session)
            self._history.add("rival", "freed", topic=lock, session=session)
            return True

    def _is_executed(self, will: str, member: Member) -> bool:
        """Return whether a will and the grave goods beside it are executed, and note if one of them is."""
        begun = time.monotonic()
        with Lines(member.addresses["worterbuch-tcp"]) as client:
            done = [get(client, will) is not None, get(client, grave_of(will)) is None]
        if any(done):
            self._history.add("looker", "executed", topic=will, begun=begun)
        return all(done)

    # -- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End all: the consumer gets what is left, waiters get their locks, wills are executed, and locks are free."""
        self._needs("the last message for the quiet consumer", self._insist(self._publish))
        if self._consumer.member is None:
            self._insist(self._consumer.begin)
        self._needs("the quiet consumer has the newest", self._consumer.is_alive())
        for holder, waiter in self._pairs:
            do_live = [waiter.is_alive(), holder.is_alive()]
            holder.end()
            if all(do_live):
                self._needs(f"{waiter.label} gets the lock", waiter.gets_the_lock())
        for client in self._clients:
            client.end()
        for holder, waiter in self._pairs:
            self._needs(f"{holder.lock} is free", self._until(partial(self._claim, holder.lock)))
            for will in (*holder.wills, *waiter.wills):
                if self._until(partial(self._is_executed, will)):
                    self._history.add("round", "done", value=will)
        self._needs("the log of the state", self._insist(self._read_log))

    def _until(self, is_so: Callable[[Member], bool]) -> bool:
        """Look through one member after another until it is so."""

        def looks(member: Member) -> None:
            if not is_so(member):
                raise RefusedError

        return self._insist(looks)

    def _read_log(self, member: Member) -> None:
        """Note how often each will was executed, and the values of the key that all subscribe to."""
        with BlockingClient(
            member.addresses["jebp"], identity=self._cluster.identity, reconnect=False,
            request_timeout_seconds=REPLY_SECONDS,
        ) as client:  # fmt: skip
            wills = [will for pair in self._pairs for one in pair for will in one.wills]
            counts = {will: len(client.state.history(will).revisions) for will in wills}
            values = [revision.value for revision in client.state.history(self._touched).revisions]
        for value in values:
            self._history.add("log of the state", "stored", topic=self._touched, number=value)
        for will, count in counts.items():
            self._history.add("log of the state", "executed", topic=will, number=count)
