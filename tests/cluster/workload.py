"""Clients of every protocol, each in a thread, that go from member to member of a cluster and note what they see.

A client that loses its connection, or hears nothing for too long, goes to a random member, as programs do that know
several addresses. One client of jebp stays at its member and sends again by itself, which may store nothing twice.
"""

import asyncio
import json
import random
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, closing
from typing import Any, TypeVar

from babelbus.client import BlockingClient, Client
from babelbus.clients.jebp.errors import ClientError
from babelbus.clients.sbus import Client as SbusClient
from babelbus.errors import BabelbusError
from babelbus.protocols.sbus.messages import WHOAMI, Control, Message, Publish
from tests.cluster.history import History, Kind, Style
from tests.support.cluster import BusCluster, Member
from tests.support.eventmesh import AGENT, MeshClient
from tests.support.zbus import SocketClient

PARTITIONS = 2
REPLY_SECONDS = 6.0
"""A client that waits longer for an answer goes to another member; the outcome is unknown."""
QUIET_SECONDS = 6.0
"""A consumer that hears nothing for so long goes to another member."""
PAUSE_SECONDS = 0.05
PACE_SECONDS = 0.01
"""Between what one publisher sends: the machine should be busy with faults, not with traffic alone."""
LOOK_SECONDS = 0.5
WINDOW = 20
LOST = (OSError, ClientError, EOFError)
T = TypeVar("T")


class RefusedError(Exception):
    """The server answered with an error: the client goes to another member."""


class Actor(threading.Thread):
    """One client. `session` works with one member until it is over; `stop` ends it."""

    protocol: str
    """The listener of a member that it connects to, or how it uses the listener."""
    proof: Kind
    """The kind of event that shows that it did something."""

    def __init__(self, name: str, cluster: BusCluster, history: History, chance: random.Random) -> None:
        super().__init__(name=name, daemon=True)
        self.cluster, self.history, self.chance = cluster, history, random.Random(chance.random())
        self.stopping = threading.Event()
        self.failure = ""
        self.losses = 0
        """How often a session has ended."""
        self.sessions = 0

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                member = self.chance.choice(self.cluster.members)
                self.sessions += 1
                try:
                    self.session(member)
                except (*LOST, RefusedError):
                    self.losses += 1
                self.stopping.wait(PAUSE_SECONDS)
        except BaseException:
            self.failure = traceback.format_exc()
            self.history.add(self.name, "due", value=self.failure)

    def session(self, member: Member) -> None:
        """Work with a member.

        Raises:
            OSError, ClientError, EOFError, RefusedError: go to another member.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """Ask it to end."""
        self.stopping.set()

    def listen(self, take: Callable[[], bool]) -> None:
        """Take what comes, until nothing comes for a while or the client is stopped.

        `take` returns whether anything came within `LOOK_SECONDS`.
        """
        quiet = 0.0
        while not self.stopping.is_set() and quiet < QUIET_SECONDS:
            quiet = 0.0 if take() else quiet + LOOK_SECONDS

    def listen_to(self, client: Any, take: Any) -> None:
        """Take what comes to a blocking client, until nothing comes for a while or the client is stopped."""
        client.socket.settimeout(LOOK_SECONDS)

        def took() -> bool:
            try:
                take(client)
            except TimeoutError:
                return False
            return True

        self.listen(took)


class Publisher(Actor):
    """Publishes numbers, which begin with its name."""

    proof: Kind = "acked"

    def __init__(self, name: str, topic: str, cluster: BusCluster, history: History, chance: random.Random) -> None:
        super().__init__(name, cluster, history, chance)
        self.topic = topic
        self._next = 0

    def goes_on(self) -> bool:
        """Wait for the next turn; return False when it is to stop."""
        return not self.stopping.wait(PACE_SECONDS)

    def value(self) -> str:
        """Return a value that was not sent before, and note that it is sent."""
        value = f"{self.name}-{self._next}"
        self._next += 1
        self.history.add(self.name, "sent", topic=self.topic, value=value)
        return value

    def acked(self, value: str, partition: int = -1, offset: int = -1) -> None:
        """Note an acknowledgement."""
        self.history.add(self.name, "acked", topic=self.topic, value=value, partition=partition, offset=offset)

    def unknown(self, value: str) -> None:
        """Note that nobody knows whether the record is stored."""
        self.history.add(self.name, "unknown", topic=self.topic, value=value)

    def publish(self, send: Callable[[str], bool]) -> None:
        """Send one value with a function that returns whether it was acknowledged."""
        value = self.value()
        try:
            if not send(value):
                raise RefusedError(value)
        except (*LOST, RefusedError):
            self.unknown(value)
            raise
        self.acked(value)


class JebpPublisher(Publisher):
    """One record or a batch at a time; gives up with its connection."""

    protocol = "jebp"
    reconnect = False
    timeout_seconds = REPLY_SECONDS

    def session(self, member: Member) -> None:
        with closing(
            BlockingClient(
                member.addresses["jebp"],
                identity=self.cluster.identity,
                reconnect=self.reconnect,
                request_timeout_seconds=self.timeout_seconds,
                reconnect_seconds_max=1.0,
            )
        ) as client:
            client.__enter__()
            while self.goes_on():
                self._publish(client, [self.value() for _ in range(self.chance.choice([1, 1, 5, 30]))])

    def _publish(self, client: BlockingClient, values: list[str]) -> None:
        partition = self.chance.randrange(PARTITIONS)
        try:
            stored = client.publish_many(self.topic, [value.encode() for value in values], partition=partition)
        except BabelbusError:
            for value in values:
                self.unknown(value)
            raise
        (batch,) = stored
        for number, value in enumerate(values):
            self.acked(value, batch.partition, batch.base_offset + number)


class StayingPublisher(JebpPublisher):
    """Keeps one client, which connects and sends again by itself: each record is stored once."""

    reconnect = True
    timeout_seconds = 300.0


class QueuePublisher(Publisher):
    """Publishes over zbus, some messages at a time."""

    protocol = "zbus"

    def session(self, member: Member) -> None:
        with SocketClient(member.addresses["zbus"], timeout_seconds=REPLY_SECONDS) as client:
            while self.goes_on():
                waiting = [self.value() for _ in range(self.chance.choice([1, 1, 4]))]
                try:
                    for value in waiting:
                        client.say("pub", value, mq=self.topic, id=value)
                    for _ in range(len(waiting)):
                        answer = client.next()
                        if answer["status"] != 200:
                            raise RefusedError(answer)
                        assert answer["headers"]["id"] == waiting[0]
                        self.acked(waiting.pop(0))
                finally:
                    for value in waiting:
                        self.unknown(value)


class MeshPublisher(Publisher):
    """Publishes over EventMesh."""

    protocol = "eventmesh-tcp"

    def session(self, member: Member) -> None:
        with MeshClient(member.addresses["eventmesh-tcp"], timeout_seconds=REPLY_SECONDS) as client:
            greet(client, "pub")
            while self.goes_on():
                self.publish(lambda value: client.publish(self.topic, value)["code"] == 0)


class Talker(Publisher):
    """Publishes over sbus, which acknowledges nothing, on the machine of the owner."""

    protocol = "sbus"
    proof = "done"

    def session(self, member: Member) -> None:
        client = SbusClient(member.addresses["sbus"], timeout_seconds=REPLY_SECONDS)
        try:
            while self.goes_on():
                client.publish(f"{self.topic}/line".encode(), self.value().encode())
                client.whoami()  # waits: sbus has no other way to be slowed down
                self.history.add(self.name, "done", value="talked")
        finally:
            client.close()


def greet(client: MeshClient, purpose: str, **agent: object) -> None:
    """Say hello, and go elsewhere if the answer is an error."""
    answer = client.ask("HELLO_REQUEST", {**AGENT, "purpose": purpose, **agent})
    if answer["code"] != 0:
        raise RefusedError(answer)


# -- consumers ---------------------------------------------------------------------------------------------------------


class Consumer(Actor):
    """Reads a topic; a session that hears nothing for a while ends."""

    style: Style
    proof: Kind = "got"

    def __init__(self, name: str, topic: str, cluster: BusCluster, history: History, chance: random.Random) -> None:
        super().__init__(name, cluster, history, chance)
        self.topic = topic
        self.values: set[str] = set()

    def joined(self) -> None:
        """Note the begin of a session."""
        self.history.add(self.name, "joined", topic=self.topic, session=self.sessions, style=self.style)

    def got(self, value: str, partition: int = -1, offset: int = -1, *, session: int = 0) -> None:
        """Note a record, of this session unless another one is named."""
        self.history.add(
            self.name, "got", topic=self.topic, session=session or self.sessions, style=self.style,
            value=value, partition=partition, offset=offset,
        )  # fmt: skip
        self.values.add(value)


class AsyncConsumer(Consumer):
    """A consumer with the asynchronous client of jebp."""

    protocol = "jebp"

    def session(self, member: Member) -> None:
        asyncio.run(self._session(member))

    async def _session(self, member: Member) -> None:
        client = Client(
            member.addresses["jebp"],
            identity=self.cluster.identity,
            reconnect=False,
            request_timeout_seconds=REPLY_SECONDS,
        )
        async with client:
            self.joined()
            await self.consume(client)

    async def consume(self, client: Client) -> None:
        """Read until the session is over."""
        raise NotImplementedError

    async def each(self, source: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yield what comes, until nothing comes for a while or the consumer is stopped."""
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while True:
            task = asyncio.ensure_future(anext(source))
            try:
                while not task.done():
                    await asyncio.wait({task}, timeout=LOOK_SECONDS)
                    if self.stopping.is_set() or loop.time() - heard > QUIET_SECONDS:
                        return
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.wait({task})
            heard = loop.time()
            yield task.result()


class Follower(AsyncConsumer):
    """Reads one partition by offset, and goes on where it was."""

    style = "follow"

    def __init__(
        self, name: str, topic: str, partition: int, cluster: BusCluster, history: History, chance: random.Random
    ) -> None:
        super().__init__(name, topic, cluster, history, chance)
        self._partition = partition
        self._offset = 0

    async def consume(self, client: Client) -> None:
        batches = client.follow_batches(self.topic, offset=self._offset, partition=self._partition)
        async with aclosing(batches), aclosing(self.each(batches)) as each:  # type: ignore[type-var]
            async for batch in each:
                for record in batch.records():
                    assert record.payload is not None
                    self.got(record.payload.decode(), self._partition, record.offset)
                    self._offset = record.offset + 1


class GroupMember(AsyncConsumer):
    """A member of a consumer group of jebp, which acks everything."""

    style = "group"

    async def consume(self, client: Client) -> None:
        consumer = client.consume(self.topic, f"group-{self.name}", start="beginning", window=WINDOW)
        async with consumer, aclosing(self.each(consumer)) as each:  # type: ignore[type-var]
            async for message in each:
                assert message.payload is not None
                self.got(message.payload.decode(), message.partition, message.offset)
                message.ack()


class QueueConsumer(Consumer):
    """A channel of zbus. What was on its way to a connection that is lost counts as delivered."""

    style = "queue"
    protocol = "zbus"

    def session(self, member: Member) -> None:
        with SocketClient(member.addresses["zbus"], timeout_seconds=REPLY_SECONDS) as client:
            if client.do("create", mq=self.topic, channel="reader")["status"] != 200:
                raise RefusedError(self.topic)
            client.say("sub", mq=self.topic, channel="reader", window=WINDOW, ack=False)
            self.joined()
            self.listen_to(client, self._take)

    def _take(self, client: SocketClient) -> None:
        message = client.next()
        if "status" in message:
            raise RefusedError(message)
        self.got(message["body"], 0, int(message["headers"]["offset"]))
        if message["headers"]["window"] == "0":
            client.say("sub", mq=self.topic, channel="reader", window=WINDOW, ack=False)


class MeshConsumer(Consumer):
    """A consumer group of EventMesh."""

    style = "group"
    protocol = "eventmesh-tcp"

    def session(self, member: Member) -> None:
        with MeshClient(member.addresses["eventmesh-tcp"], timeout_seconds=REPLY_SECONDS) as client:
            greet(client, "sub", group=f"group-{self.topic}")
            item = {"topic": self.topic, "mode": "CLUSTERING", "type": "ASYNC"}
            for command, body in (("SUBSCRIBE_REQUEST", {"topicList": [item]}), ("LISTEN_REQUEST", None)):
                if client.ask(command, body)["code"] != 0:
                    raise RefusedError(command)
            self.joined()
            self.listen_to(client, self._take)

    def _take(self, client: MeshClient) -> None:
        header, body = client.next()
        if not header["cmd"].endswith("_TO_CLIENT"):
            raise RefusedError(header)  # the server leaves, and says so
        self.got(body["body"])
        client.send(f"{header['cmd']}_ACK", json.dumps(body), seq=header["seq"])


class Listener(Consumer):
    """Hears a topic over sbus while it is there."""

    style = "live"
    protocol = "sbus"

    def session(self, member: Member) -> None:
        client = SbusClient(member.addresses["sbus"], timeout_seconds=REPLY_SECONDS)
        try:
            client.subscribe(f"{self.topic}/".encode())
            client.control(WHOAMI)
            early: list[Message] = []
            while not isinstance(message := client.receive(), Control):  # others publish all the time
                early.append(message)
            self.joined()
            for message in early:
                self._hear(message)
            self.listen_to(client, lambda client: self._hear(client.receive()))
        finally:
            client.close()

    def _hear(self, message: Message) -> None:
        if isinstance(message, Publish) and message.payload is not None:
            self.got(message.payload.decode())


class EndReader(AsyncConsumer):
    """Asks for the ends of partitions."""

    style = "live"
    proof = "end"

    async def consume(self, client: Client) -> None:
        while not self.stopping.is_set():
            begun = time.monotonic()
            (positions,) = await client.positions([self.topic], None)
            for partition, bounds in enumerate(positions.partitions):
                self.history.add(
                    self.name, "end", topic=self.topic, partition=partition, offset=bounds.high_watermark, begun=begun
                )
            await asyncio.sleep(PAUSE_SECONDS)
