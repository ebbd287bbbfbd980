"""Clients of Wörterbuch, over TCP and WebSocket, that write, read and watch the state, and leave a last will."""

import json
import random
import socket
import time
from collections.abc import Sequence
from typing import Any

from babelbus.protocols.worterbuch.errors import ErrorCode
from tests.cluster.history import History
from tests.cluster.workload import LOST, PACE_SECONDS, PAUSE_SECONDS, REPLY_SECONDS, Actor, RefusedError
from tests.support.cluster import BusCluster, Member, until
from tests.support.zbus import SocketClient


class Lines:
    """A connection of Wörterbuch, as lines of JSON."""

    protocol = "worterbuch-tcp"

    def __init__(self, address: str) -> None:
        self._connect(address)
        try:
            self.client_id = self.next()["welcome"]["clientId"]
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), REPLY_SECONDS)
        self._data = b""

    def send(self, *messages: dict[str, Any]) -> None:
        """Send messages with one write."""
        self.socket.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    def next(self) -> Any:
        """Return the next message."""
        while b"\n" not in self._data:
            data = self.socket.recv(2**16)
            if not data:
                raise EOFError("the server closed the connection")
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        return json.loads(line)

    def ask(self, name: str, **fields: Any) -> Any:
        """Send a request and return what comes next."""
        self.send({name: {"transactionId": 1, **fields}})
        return self.next()

    def close(self) -> None:
        """Disconnect."""
        self.socket.close()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Frames(Lines):
    """The same in WebSocket."""

    protocol = "worterbuch"

    def _connect(self, address: str) -> None:
        self._client = SocketClient(address, path="/ws", timeout_seconds=REPLY_SECONDS)
        self.socket = self._client.socket

    def send(self, *messages: dict[str, Any]) -> None:
        """Send messages with one write."""
        self._client.say_all(messages)

    def next(self) -> Any:
        """Return the next message."""
        return self._client.next()

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


class StateActor(Actor):
    """A client of Wörterbuch, over TCP or WebSocket."""

    def __init__(
        self, name: str, cluster: BusCluster, history: History, chance: random.Random, transport: type[Lines] = Lines
    ) -> None:
        super().__init__(name, cluster, history, chance)
        self.protocol = transport.protocol
        self._transport = transport

    def connect(self, member: Member) -> Lines:
        """Connect to a member."""
        return self._transport(member.addresses[self.protocol])


class KeyActor(StateActor):
    """A client that uses some keys."""

    def __init__(
        self,
        name: str,
        keys: Sequence[str],
        cluster: BusCluster,
        history: History,
        chance: random.Random,
        transport: type[Lines] = Lines,
    ) -> None:
        super().__init__(name, cluster, history, chance, transport)
        self.keys = keys
        self.values: dict[str, int] = {}
        """The newest value of each key that was acknowledged to the client, or found by it."""


class StateWriter(KeyActor):
    """Counts upwards in its keys, which it shares with nobody."""

    proof = "set_acked"
    _last = 0

    def session(self, member: Member) -> None:
        with self.connect(member) as client:
            while not self.stopping.wait(PACE_SECONDS):
                self._set(client, self.chance.choice([1, 1, 5]))

    def _set(self, client: Lines, count: int) -> None:
        waiting = []
        for _ in range(count):
            self._last += 1
            key = self.keys[self._last % len(self.keys)]
            waiting.append((key, self._last))
            self.history.add(self.name, "set", topic=key, number=self._last)
        try:
            client.send(*[{"set": {"transactionId": number, "key": key, "value": number}} for key, number in waiting])
            while waiting:
                answer = client.next()
                key, number = waiting[0]
                if "ack" not in answer:
                    raise RefusedError(answer)
                assert answer["ack"]["transactionId"] == number
                self.history.add(self.name, "set_acked", topic=key, number=number)
                self.values[key] = number
                waiting.pop(0)
        finally:
            for key, number in waiting:
                self.history.add(self.name, "set_unknown", topic=key, number=number)


class StateReader(KeyActor):
    """Reads keys of writers."""

    proof = "found"

    def session(self, member: Member) -> None:
        with self.connect(member) as client:
            for _ in range(100):  # and on to another member
                if self.stopping.wait(PAUSE_SECONDS / 2):
                    return
                for key in self.keys:
                    self.look(client, key)

    def look(self, client: Lines, key: str) -> None:
        """Read a key and note its value."""
        begun = time.monotonic()
        self.values[key] = get(client, key) or 0
        self.history.add(self.name, "found", topic=key, number=self.values[key], begun=begun)


class StateWatcher(StateReader):
    """Subscribes to keys: each session is told of each value once, upwards."""

    def session(self, member: Member) -> None:
        with self.connect(member) as client:
            self._begun = time.monotonic()
            client.send(*[
                {"subscribe": {"transactionId": number, "key": key, "unique": False}}
                for number, key in enumerate(self.keys)
            ])  # fmt: skip
            self.listen_to(client, self._take)

    def _take(self, client: Lines) -> None:
        message = client.next()
        if "err" in message:
            raise RefusedError(message)
        if "state" in message:
            key, number = self.keys[message["state"]["transactionId"]], int(message["state"]["value"])
            self.history.add(
                self.name, "found", topic=key, number=number, begun=self._begun, session=self.sessions
            )  # fmt: skip
            self.values[key] = number


def get(client: Lines, key: str) -> int | None:
    """Return the value of a key, None if it has none."""
    answer = client.ask("get", key=key)
    if "state" in answer:
        return int(answer["state"]["value"])
    if answer.get("err", {}).get("errorCode") == ErrorCode.NO_SUCH_VALUE:
        return None
    raise RefusedError(answer)


class Mourner(StateActor):
    """Has a lock and a last will; after each loss of its connection the will must be executed and the lock be free."""

    proof = "done"

    def __init__(self, name: str, prefix: str, cluster: BusCluster, history: History, chance: random.Random) -> None:
        super().__init__(name, cluster, history, chance)
        self._prefix = prefix
        self._number = 0
        self._due: list[str] = []

    def session(self, member: Member) -> None:
        with self.connect(member) as client:
            if self._due and not self._is_done(client):
                return  # soon again, through another member
            self._number += 1
            key = f"{self._prefix}/will/{self._number}"
            will = [{"key": key, "value": 1}]
            for request in (
                {"name": "set", "key": f"$SYS/clients/{client.client_id}/lastWill", "value": will},
                {"name": "lock", "key": f"{self._prefix}/lock"},
            ):
                if "ack" not in (answer := client.ask(**request)):
                    raise RefusedError(answer)
            self._due = [key]
            self.history.add(self.name, "due", value=key)
            while not self.stopping.wait(PAUSE_SECONDS):
                get(client, f"{self._prefix}/0")  # until the connection is lost

    def _is_done(self, client: Lines) -> bool:
        """Return whether the last will is executed and the lock is free."""
        if get(client, self._due[0]) is None:
            return False
        answer = client.ask("lock", key=f"{self._prefix}/lock")
        if "ack" not in answer or "ack" not in client.ask("releaseLock", key=f"{self._prefix}/lock"):
            return False
        self.history.add(self.name, "done", value=self._due.pop())
        return True

    def wait(self, seconds: float) -> bool:
        """Stop; then see that the last session's will and lock are dealt with, too."""
        self.stop()
        self.join(seconds)

        def is_done() -> bool:
            if not self._due:
                return True
            try:
                with self.connect(self.chance.choice(self.cluster.members)) as client:
                    return self._is_done(client)
            except (*LOST, RefusedError):
                return False

        return until(is_done, seconds)
