"""Connections that say and hear nothing for long: of Wörterbuch, with a lock and a will, and a consumer of zbus.

They have no threads: who drives them (`tests.cluster.quiet`) asks them whether they are alive.
"""

import itertools
import time
from typing import Any

from tests.cluster.history import History
from tests.cluster.state import Lines
from tests.cluster.workload import LOST, WINDOW, RefusedError
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.cluster import BusCluster, Member
from tests.support.zbus import SocketClient

NUMBERS = itertools.count()
"""What makes sessions, requests, values and promises unique."""
TOUCH, WAIT, FIRST_REQUEST = 1, 2, 10
"""Numbers of requests whose answers come later: the subscription, and the wait for a lock; then those of all others."""


class QuietClient:
    """A connection through one member. A session is a connection, and has a number that no other one has."""

    protocol: str

    def __init__(self, name: str, cluster: BusCluster, history: History) -> None:
        self.name, self.cluster, self.history = name, cluster, history
        self.session = 0
        self.member: Member | None = None
        """Where it is connected; None if it is not."""

    def begin(self, member: Member) -> None:
        """Connect.

        Raises:
            OSError, EOFError, RefusedError: try another member.
        """
        self.session += 1
        self.open(member)
        self.member = member

    def open(self, member: Member) -> None:
        """Connect, and do what others see."""
        raise NotImplementedError

    def close(self) -> None:
        """Disconnect."""
        raise NotImplementedError

    def answer(self) -> str:
        """Ask something, take all that came before the answer, and return the key that it must have heard of."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        return f"{self.name} {self.session}"

    def add(self, kind: Any, **more: object) -> None:
        """Note what this session did or saw."""
        self.history.add(self.name, kind, session=self.session, **more)

    def end(self) -> None:
        """Disconnect, if it is connected."""
        if self.member is not None:
            self.member = None
            self.close()

    def is_alive(self) -> bool:
        """Return whether the connection is still answered; it must be answered or end."""
        if self.member is None:
            return False
        words, begun = f"{self.label} is answered or closed, {next(NUMBERS)}", time.monotonic()
        self.history.add("round", "due", value=words)
        try:
            key = self.answer()
        except TimeoutError:
            self.end()
            return False
        except (*LOST, RefusedError):
            self.end()
        else:
            self.add("alive", topic=key, begun=begun)
        self.history.add("round", "done", value=words)
        return self.member is not None


class QuietState(QuietClient):
    """Holds a lock or waits for it, has a last will and grave goods, and subscribes to one key."""

    def __init__(
        self, name: str, prefix: str, lock: str, cluster: BusCluster, history: History,
        transport: type[Lines], *, waits: bool,
    ) -> None:  # fmt: skip
        super().__init__(name, cluster, history)
        self.protocol = transport.protocol
        self._transport = transport
        self._prefix, self._touched, self.lock, self._waits = prefix, f"{prefix}/touched", lock, waits
        self.holds = False
        self.wills: list[str] = []
        """Of all sessions."""

    @property
    def will(self) -> str:
        """The key that the last will of this session sets."""
        return f"{self._prefix}/will/{self.name}/{self.session}"

    def open(self, member: Member) -> None:
        self.holds = False
        client = self._client = self._transport(member.addresses[self.protocol])
        try:
            client.socket.settimeout(SAFETY_NET_SECONDS)
            own, grave = f"$SYS/clients/{client.client_id}", grave_of(self.will)
            self._ask(set={"key": grave, "value": 1})
            self._ask(set={"key": f"{own}/graveGoods", "value": [grave]})
            self._ask(set={"key": f"{own}/lastWill", "value": [{"key": self.will, "value": 1}]})
            self.history.add("round", "due", value=self.will)
            self.add("will", topic=self.will)
            self.wills.append(self.will)
            self._begun = time.monotonic()
            client.send({"subscribe": {"transactionId": TOUCH, "key": self._touched, "unique": False}})
            if self._waits:
                client.send({"acquireLock": {"transactionId": WAIT, "key": self.lock}})
            else:
                self._ask(lock={"key": self.lock})
                self.hold()
            self.answer()
        except BaseException:
            client.close()
            raise

    def hold(self) -> None:
        """Note that the lock is ours."""
        self.holds = True
        self.add("holds", topic=self.lock)

    def close(self) -> None:
        if self.holds:
            self.add("freed", topic=self.lock)
        self.holds = False
        self._client.close()

    def answer(self) -> str:
        number = FIRST_REQUEST + next(NUMBERS)
        self._client.send({"get": {"transactionId": number, "key": self._touched}})
        self._until(number)
        return self._touched

    def _ask(self, **request: dict[str, Any]) -> None:
        [(name, fields)] = request.items()
        number = FIRST_REQUEST + next(NUMBERS)
        self._client.send({name: {"transactionId": number, **fields}})
        if "ack" not in (answer := self._until(number)):
            raise RefusedError(answer)

    def _until(self, number: int) -> Any:
        """Take what comes, and return the answer with a number."""
        while True:
            message = self._client.next()
            [(kind, fields)] = message.items()
            if fields["transactionId"] == number:
                return message
            self._take(kind, fields)

    def _take(self, kind: str, fields: Any) -> None:
        if kind == "state" and fields["transactionId"] == TOUCH:
            self.add("found", topic=self._touched, number=int(fields["value"]), begun=self._begun)
        elif kind == "ack" and fields["transactionId"] == WAIT:
            self.hold()
        elif kind != "ack":
            raise RefusedError(fields)

    def gets_the_lock(self) -> bool:
        """Wait until the lock is granted; return False if the connection is lost before."""
        try:
            while not self.holds:
                [(kind, fields)] = self._client.next().items()
                self._take(kind, fields)
        except (*LOST, RefusedError):
            self.end()
        return self.holds


class QuietConsumer(QuietClient):
    """A consumer of zbus, one of a group, that has no work until it is asked whether it is alive."""

    protocol = "zbus"

    def __init__(self, topic: str, cluster: BusCluster, history: History) -> None:
        super().__init__("quiet consumer", cluster, history)
        self._topic = topic
        self.due = ""
        """The message that it gets next."""

    def open(self, member: Member) -> None:
        client = self._client = SocketClient(member.addresses["zbus"], timeout_seconds=SAFETY_NET_SECONDS)
        try:
            for command in (
                {"cmd": "create", "mq": self._topic, "channel": "quiet"},
                {"cmd": "sub", "mq": self._topic, "channel": "quiet", "window": WINDOW},
            ):
                if (answer := client.do(**command))["status"] != 200:
                    raise RefusedError(answer)
        except BaseException:
            client.close()
            raise
        self.add("joined", topic=self._topic, style="queue")

    def close(self) -> None:
        self._client.close()

    def answer(self) -> str:
        value = ""
        while value != self.due:
            message = self._client.next()
            if "body" not in message:
                raise RefusedError(message)
            value, offset = message["body"], int(message["headers"]["offset"])
            self.add("got", topic=self._topic, style="queue", value=value, partition=0, offset=offset)
        return ""


def grave_of(will: str) -> str:
    """Return the key that the grave goods beside a will delete."""
    return f"{will}/grave"
