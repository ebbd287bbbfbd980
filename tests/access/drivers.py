"""One client for each door: the same verbs, each says whether the server did what it was asked for.

A verb returns `None` where the protocol has no answer; the test looks inside the server then, as it always does.
"""

import contextlib
import http.client
import json
import queue
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, ClassVar, Self
from urllib.parse import quote, urlencode

import grpc
import msgspec
import pyarrow as pa

from babelbus.client import BlockingClient as JebpClient
from babelbus.client import admin_of
from babelbus.clients.jebp.errors import ClientError as JebpError
from babelbus.clients.jebp.errors import NotAuthorisedError
from babelbus.clients.sbus import Client as SbusClient
from babelbus.clients.worterbuch.blocking import BlockingClient as TreeClient
from babelbus.clients.worterbuch.errors import ClientError as TreeError
from babelbus.clients.worterbuch.errors import UnauthorizedError
from babelbus.errors import BabelbusError
from babelbus.protocols.sbus.messages import Publish
from babelbus.protocols.zbus.codec import decode_message, encode_message
from babelbus.protocols.zbus.messages import Message
from babelbus.spark import connection, record_source
from babelbus.spark.options import parse
from babelbus.spark.reader import BatchReader
from babelbus.spark.schema import full_schema
from babelbus.spark.sink import Target, check_targets, commit, stage
from babelbus.spark.sink_options import parse_sink
from babelbus.wire.websocket import encode_texts
from tests.access.house import END, VALUE, House, Proof
from tests.protocols.eventmesh.test_grpc import Events as MeshCloudEvents
from tests.protocols.eventmesh.test_grpc import Legacy
from tests.protocols.eventmesh.test_http import Hook
from tests.protocols.eventmesh.test_http import ask as ask_mesh
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.console import PAGE
from tests.support.eventmesh import AGENT, MeshClient
from tests.support.signing import sign_frame, sign_request
from tests.support.web import Events
from tests.support.zbus import HttpClient, SocketClient

VERBS = {
    "publish": "publish",
    "request": "publish",
    "subscribe": "subscribe",
    "respond": "subscribe",
    "get": "subscribe",
    "read": "read",
    "consume": "consume",
    "write_state": "write-state",
    "manage": "manage",
}
"""Verb -> the action that it needs."""


class Driver(ABC):
    """A client of one door."""

    service: ClassVar[str]
    """Name in the registry of services, or another door."""
    name: ClassVar[str]
    listener: ClassVar[str]
    """Name of the listener; that of the driver unless another is given."""
    way: ClassVar[str] = ""
    """The way of a listener that has several: `websocket`, or a package of gRPC."""
    lacks: ClassVar[dict[str, str]]
    """Verbs that the door has not, and why."""
    also: ClassVar[dict[str, str]] = {}
    """Actions that verbs of this door need beside those of `VERBS`: they are granted all the time."""
    instead: ClassVar[dict[str, str]] = {}
    """Actions that verbs of this door need instead of those of `VERBS`."""
    refusals: ClassVar[tuple[type[Exception], ...]] = ()
    """What the client raises when a proof is refused as it connects; the other doors ask with each message."""
    wildcards: ClassVar[bool] = True
    """Whether subscriptions may be to patterns."""

    def __init_subclass__(cls) -> None:
        cls.listener = cls.__dict__.get("listener", cls.name)

    def __init__(self, house: House, proof: Proof) -> None:
        self.house = house
        self.proof = proof
        self._stack = contextlib.ExitStack()
        try:
            self.connect()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def address(self) -> str:
        return self.house.server.addresses[self.listener]

    @abstractmethod
    def connect(self) -> None:
        """Connect, and prove who it is."""

    @abstractmethod
    def is_cut(self) -> bool:
        """Whether the server closes the connection, or lets it do nothing any more."""

    def do_beside(self, step: Callable[[], object], end: Callable[[], object]) -> None:
        """Do a step in a thread; `end` makes the step give up, when the client closes."""

        def run() -> None:
            with contextlib.suppress(OSError, grpc.RpcError, StopIteration):
                step()

        thread = threading.Thread(target=run, daemon=True)
        self._stack.callback(thread.join, SAFETY_NET_SECONDS)
        self._stack.callback(end)
        thread.start()

    # Overridden where the door has the verb; `lacks` says why else.

    def publish(self, subject: str, payload: bytes) -> bool | None:
        raise NotImplementedError

    def request(self, subject: str) -> bool:
        raise NotImplementedError

    def subscribe(self, subject: str, *, below: bool = False) -> bool | None:
        """Subscribe to a subject and to `END`, `below` to all subjects below it; `hear` gives what came."""
        raise NotImplementedError

    def hear(self) -> list[str]:
        """The subjects of the events that came before that of `END`."""
        raise NotImplementedError

    def respond(self, subject: str) -> bool | None:
        """Register as a responder; the next question is answered."""
        raise NotImplementedError

    def get(self, subject: str) -> bool:
        raise NotImplementedError

    def read(self, subject: str) -> bool:
        raise NotImplementedError

    def consume(self, subject: str) -> bool:
        """Take a record of a new group."""
        raise NotImplementedError

    def write_state(self, subject: str, value: bytes) -> bool | None:
        raise NotImplementedError

    def manage(self, subject: str) -> bool:
        """Make a topic."""
        raise NotImplementedError


_STATE = "the rights of the state: tests/protocols/jebp/test_state_calls.py"
METHODS = {
    "methods": "it names the methods, and needs no right",
    "admin": "the driver `jebp admin` walks all its verbs",
    "consume": "consume",
    "emit": "publish",
    "request": "request",
    "respond": "respond",
    "subscribe": "subscribe",
    "state.get": "get",
    "state.set": "write_state",
    **dict.fromkeys(("state.get_many", "state.match", "state.list", "state.watch"), _STATE),
    **dict.fromkeys(("state.as_of", "state.history"), _STATE),
    **dict.fromkeys(("state.set_many", "state.compare_and_set", "state.delete", "state.delete_match"), _STATE),
    **dict.fromkeys(("state.lock", "state.will"), _STATE),
}
"""Methods of jebp/1.2: each has a verb of a driver here, or a reason why it needs none."""

NO_REQUESTS = "the protocol has no requests"
NO_STATE = "the protocol has no state"
NO_GROUPS = "the protocol has no consumer groups"
NO_TOPICS = "the protocol cannot make topics"
NO_HISTORY = "the protocol has no reading by offset or time"


class Jebp(Driver):
    service = name = "jebp"
    refusals = (NotAuthorisedError,)
    lacks: ClassVar = {
        "request": NO_REQUESTS,
        "respond": NO_REQUESTS,
        "subscribe": "live events are read behind the end of the topic: `read`",
    }

    def connect(self) -> None:
        client = JebpClient(self.address, identity=self.proof.identity, reconnect=False)
        self.client = self._stack.enter_context(contextlib.closing(client))
        self._stack.callback(self.client.close)
        self.client.__enter__()

    def is_cut(self) -> bool:
        return not self.read("walk/a")

    def _do(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except JebpError:
            return False
        return True

    def publish(self, subject: str, payload: bytes) -> bool:
        return self._do(lambda: self.client.publish(subject, payload))

    def read(self, subject: str) -> bool:
        def follow() -> None:
            assert list(self.client.follow(subject, offset=0, until_end=True))

        return self._do(follow)

    def get(self, subject: str) -> bool:
        return self._do(lambda: self.client.state.get(subject))

    def write_state(self, subject: str, value: bytes) -> bool:
        return self._do(lambda: self.client.state.set(subject, msgspec.Raw(value)))

    def manage(self, subject: str) -> bool:
        return self._do(lambda: self.client.create_topic(subject))

    def consume(self, subject: str) -> bool:
        group = f"group{self.house.next_number()}"

        async def take() -> None:
            async with self.client._twin.consume(subject, group, start="beginning") as consumer:
                assert await consumer.next(SAFETY_NET_SECONDS) is not None

        return self._do(lambda: self.client._portal.call(take()))


class JebpCalls(Jebp):
    """The calls and streams of jebp/1.2."""

    name, listener = "jebp-calls", "jebp"
    lacks: ClassVar = {}

    def publish(self, subject: str, payload: bytes) -> bool:
        return self._do(lambda: self.client.emit(subject, payload))

    def request(self, subject: str) -> bool:
        return self._do(lambda: self.client.request(subject, b"?", timeout=SAFETY_NET_SECONDS))

    def subscribe(self, subject: str, *, below: bool = False) -> bool:
        self.subscription = self.client.subscribe(f"{subject}/#" if below else subject, END)
        return self._do(self.subscription.begin)

    def hear(self) -> list[str]:
        heard = []
        while (event := next(self.subscription)).subject != END:
            heard.append(event.subject)
        return heard

    def respond(self, subject: str) -> bool:
        responder = self.client.respond(subject)

        def answer() -> None:
            with contextlib.suppress(JebpError):
                next(responder).reply(VALUE)

        if not self._do(responder.begin):
            return False
        self.do_beside(answer, responder.close)
        return True

    def consume(self, subject: str) -> bool:
        consumer = self.client.consume(subject, f"g{self.house.next_number()}", start="beginning")

        def take() -> None:
            next(consumer).ack()
            consumer.leave()

        return self._do(take)


class Sbus(Driver):
    service = name = "sbus"
    lacks: ClassVar = {
        "request": NO_REQUESTS,
        "respond": NO_REQUESTS,
        "read": NO_HISTORY,
        "consume": NO_GROUPS,
        "write_state": NO_STATE,
        "get": NO_STATE,
        "manage": NO_TOPICS,
    }

    def connect(self) -> None:
        client = SbusClient(self.address, timeout_seconds=SAFETY_NET_SECONDS)
        self.client = self._stack.enter_context(client)
        self.client.whoami()

    def is_cut(self) -> bool:
        try:
            self.client.whoami()
        except OSError:
            return True
        return False

    def publish(self, subject: str, payload: bytes) -> None:
        with contextlib.suppress(OSError):
            self.client.publish(subject.encode(), payload)
            self.client.whoami()

    def subscribe(self, subject: str, *, below: bool = False) -> None:
        with contextlib.suppress(OSError):
            self.client.subscribe(subject.encode() + (b"/" if below else b""))
            self.client.subscribe(END.encode())
            self.client.whoami()

    def hear(self) -> list[str]:
        heard: list[str] = []
        with contextlib.suppress(OSError):
            while isinstance(message := self.client.receive(), Publish):
                if message.key == END.encode():
                    break
                heard.append(message.key.decode())
        return heard


class Tree(Driver):
    service, name = "worterbuch", "worterbuch-tcp"
    scheme: ClassVar = "tcp"
    refusals = (UnauthorizedError,)
    lacks: ClassVar = {
        "request": NO_REQUESTS,
        "respond": NO_REQUESTS,
        "read": NO_HISTORY,
        "consume": NO_GROUPS,
        "manage": NO_TOPICS,
    }

    def connect(self) -> None:
        client = TreeClient(f"{self.scheme}://{self.address}", token=self.proof.jwt)
        self.client = self._stack.enter_context(client)

    def is_cut(self) -> bool:
        return not self._do(lambda: self.client.get("$SYS/version"))

    def _do(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except TreeError:
            return False
        return True

    def publish(self, subject: str, payload: bytes) -> bool:
        return self._do(lambda: self.client.publish(subject, json.loads(payload)))

    def subscribe(self, subject: str, *, below: bool = False) -> bool:
        self._heard: queue.SimpleQueue[str] = queue.SimpleQueue()

        def take(event: Any) -> None:
            for key in event.values:
                self._heard.put(key)

        def begin() -> None:
            if below:
                self.client.psubscribe(f"{subject}/#", take, live_only=True)
            else:
                self.client.subscribe(subject, take, live_only=True)

        self.client.subscribe(END, take, live_only=True)
        return self._do(begin)

    def hear(self) -> list[str]:
        return list(iter(partial(self._heard.get, timeout=SAFETY_NET_SECONDS), END))

    def get(self, subject: str) -> bool:
        return self._do(lambda: self.client.get(subject))

    def write_state(self, subject: str, value: bytes) -> bool:
        return self._do(lambda: self.client.set(subject, json.loads(value)))


class TreeSocket(Tree):
    name, listener, way = "worterbuch-websocket", "worterbuch", "websocket"
    scheme: ClassVar = "ws"


class TreeUnix(Tree):
    name = "worterbuch-unix"
    scheme: ClassVar = "unix"


class TreeRest(Driver):
    """REST, and server-sent events."""

    service, name, listener = "worterbuch", "worterbuch-http", "worterbuch"
    lacks: ClassVar = Tree.lacks

    def connect(self) -> None:
        self.client = self._stack.enter_context(HttpClient(self.address))

    def is_cut(self) -> bool:
        return self.ask("GET", "get", END) in (0, 401, 403)

    def _listen(self, path: str) -> Events:
        """Begin server-sent events, and give their response."""
        headers = {"authorization": f"Bearer {self.proof.jwt}"}
        return self._stack.enter_context(Events(self.address, f"/api/v1/{path}?liveOnly", **headers))

    def subscribe(self, subject: str, *, below: bool = False) -> bool:
        path = f"psubscribe/{subject}/%23" if below else f"subscribe/{subject}"
        if self._listen(path).response.status != 200:
            return False
        # Two streams have no order between them: one stream has both, and all else that is granted.
        self._events, self._wanted = self._listen("psubscribe/%23"), subject
        return True

    def hear(self) -> list[str]:
        heard: list[str] = []
        while True:
            (pair,) = self._events.next()["keyValuePairs"]
            if pair["key"] == END:
                return heard
            if pair["key"].startswith(self._wanted):
                heard.append(pair["key"])

    def ask(self, method: str, word: str, key: str, body: bytes = b"") -> int:
        headers = {"authorization": f"Bearer {self.proof.jwt}", "content-type": "application/json"}
        try:
            return self.client.ask(method, f"/api/v1/{word}/{key}", body, **headers).status
        except OSError:
            return 0

    def publish(self, subject: str, payload: bytes) -> bool:
        return self.ask("POST", "publish", subject, payload) == 200

    def get(self, subject: str) -> bool:
        return self.ask("GET", "get", subject) == 200

    def write_state(self, subject: str, value: bytes) -> bool:
        return self.ask("POST", "set", subject, value) == 200


class ZbusSocket(Driver):
    service, name, listener, way = "zbus", "zbus-websocket", "zbus", "websocket"
    instead: ClassVar = {"respond": "consume"}
    lacks: ClassVar = {
        "request": "a url cannot name a subject of several elements here; over HTTP it is asked",
        "subscribe": "every subscriber is a member of a channel, which is a consumer group",
        "read": "offsets belong to channels: `consume`",
        "write_state": NO_STATE,
        "get": NO_STATE,
    }

    def connect(self) -> None:
        self.client = self._stack.enter_context(SocketClient(self.address))

    def is_cut(self) -> bool:
        return self.ask("query", mq="walk/a").get("status") != 200

    def say(self, cmd: str, body: Any = None, **headers: Any) -> None:
        """Send a signed command, which no other message equals."""
        given = {"cmd": cmd, "id": f"{self.name}-{self.house.next_number()}", **headers}
        message: dict[str, Any] = {"headers": given} if body is None else {"headers": given, "body": body}
        text = json.dumps(message, separators=(",", ":")).encode()
        signed = sign_frame(decode_message(text), self.proof.api_key, self.proof.api_secret)
        self.client.send(encode_texts([encode_message(signed)], mask=True))

    def ask(self, cmd: str, body: Any = None, **headers: Any) -> dict[str, Any]:
        """Send a command and give its answer; a closed connection answers nothing."""
        try:
            self.say(cmd, body, **headers)
            return self.client.next()
        except OSError:
            return {}

    def publish(self, subject: str, payload: bytes) -> bool:
        return self.ask("pub", json.loads(payload), mq=subject).get("status") == 200

    def consume(self, subject: str) -> bool:
        channel = f"channel{self.house.next_number()}"
        made = self.ask("create", mq=subject, channel=channel, offset="0")
        taken = self.ask("take", mq=subject, channel=channel)
        if made.get("status") != 200:
            assert taken.get("status") != 200
        return taken.get("status") == 200

    def respond(self, subject: str) -> bool:
        # A channel of its own behind all records, else its first message is no question.
        place = {"mq": subject, "channel": f"channel{self.house.next_number()}"}
        made = self.ask("create", **place, offset=self.house.end_of(subject))
        begun = self.ask("sub", **place)
        if made.get("status") != 200 or begun.get("status") != 200:
            assert begun.get("status") != 200
            return False

        def answer() -> None:
            question = self.client.next()["headers"]
            self.say("route", "yes", target=question["source"], id=question["id"])

        self.do_beside(answer, partial(shut_down, self.client.socket))
        return True

    def manage(self, subject: str) -> bool:
        return self.ask("create", mq=subject).get("status") == 200


class ZbusHttp(Driver):
    service, name, listener = "zbus", "zbus-http", "zbus"
    lacks: ClassVar = {
        "subscribe": "over HTTP nothing is pushed",
        "respond": "over HTTP nothing is pushed",
        "read": "offsets belong to channels: `consume`",
        "write_state": NO_STATE,
        "get": NO_STATE,
    }

    def connect(self) -> None:
        self.client = self._stack.enter_context(HttpClient(self.address))

    def is_cut(self) -> bool:
        return self.ask("query", mq="walk/a") != 200

    def ask(self, cmd: str, body: bytes | None = None, **given: str) -> int:
        """Send a signed request, and give the status of its answer; a closed connection has none."""
        headers = {"cmd": cmd, "id": f"{self.name}-{self.house.next_number()}", **given}
        if body is not None:
            headers["content-type"] = "application/json"
        message = Message(headers, "/", "POST", None, body)
        names = ",".join(["url", "method", "body", *(f"h.{name}" for name in headers)])
        signed = sign_request(message, self.proof.api_key, self.proof.api_secret, names)
        try:
            return self.client.ask("POST", "/", body or b"", **signed.headers).status
        except OSError:
            return 0

    def publish(self, subject: str, payload: bytes) -> bool:
        return self.ask("pub", payload, mq=subject) == 200

    def request(self, subject: str) -> bool:
        return self.ask("pub", VALUE, mq=subject, ack="false") == 200

    def consume(self, subject: str) -> bool:
        channel = f"channel{self.house.next_number()}"
        self.ask("create", mq=subject, channel=channel, offset="0")
        return self.ask("take", mq=subject, channel=channel) == 200

    def manage(self, subject: str) -> bool:
        return self.ask("create", mq=subject) == 200


class ZbusMonitorSocket(ZbusSocket):
    name, listener = "zbus-monitor-websocket", "zbus-monitor"
    also: ClassVar = dict.fromkeys(VERBS, "admin")


class ZbusMonitor(ZbusHttp):
    name = listener = "zbus-monitor"
    also: ClassVar = dict.fromkeys(VERBS, "admin")


class MeshTcp(Driver):
    service, name = "eventmesh", "eventmesh-tcp"
    refusals = (PermissionError,)
    wildcards = False
    also: ClassVar = {"respond": "consume"}
    lacks: ClassVar = {
        "read": NO_HISTORY,
        "write_state": NO_STATE,
        "get": NO_STATE,
        "manage": "topics are made over the paths of the admin server",
    }

    def connect(self) -> None:
        self.group = f"group{self.house.next_number()}"
        self.client, self.publisher = self.begin("sub"), self.begin("pub")

    def begin(self, purpose: str) -> MeshClient:
        client = self._stack.enter_context(MeshClient(self.address))
        agent = {"username": self.proof.name, "password": self.proof.password, "group": self.group}
        answer = client.ask("HELLO_REQUEST", {**AGENT, **agent, "purpose": purpose})
        if answer["code"] != 0:
            raise PermissionError(answer)
        return client

    def is_cut(self) -> bool:
        return not self.publish("walk/a", VALUE)

    def ask(self, client: MeshClient, command: str, body: object = None) -> dict[str, Any]:
        try:
            return client.ask(command, body)
        except OSError:
            return {}

    def listen(self, subject: str, mode: str, kind: str = "ASYNC") -> bool:
        item = {"topic": subject, "mode": mode, "type": kind}
        answers = [self.ask(self.client, "SUBSCRIBE_REQUEST", {"topicList": [item]})]
        answers.append(self.ask(self.client, "LISTEN_REQUEST"))
        return answers[0].get("code") == 0

    def publish(self, subject: str, payload: bytes) -> bool:
        message = {"topic": subject, "properties": {}, "body": payload.decode()}
        return self.ask(self.publisher, "ASYNC_MESSAGE_TO_SERVER", message).get("code") == 0

    def request(self, subject: str) -> bool:
        message = {"topic": subject, "body": VALUE.decode(), "properties": {"ttl": str(int(SAFETY_NET_SECONDS * 1000))}}
        try:
            self.publisher.send("REQUEST_TO_SERVER", message, seq="r")
        except OSError:
            return False
        # A refused request gets silence; a reply from inside the server is there before the answer to the heartbeat.
        self.ask(self.publisher, "HEARTBEAT_REQUEST")
        came, self.publisher._came = self.publisher._came, deque()
        return any(header["cmd"] == "RESPONSE_TO_CLIENT" and header["code"] == 0 for header, _ in came)

    def subscribe(self, subject: str, *, below: bool = False) -> bool:
        end = self.listen(END, "BROADCASTING")
        return self.listen(f"{subject}/#" if below else subject, "BROADCASTING") and end

    def hear(self) -> list[str]:
        heard: list[str] = []
        with contextlib.suppress(OSError):
            while (topic := self.client.push()[1]["topic"]) != END:
                heard.append(topic)
        return heard

    def consume(self, subject: str) -> bool:
        if not self.listen(subject, "CLUSTERING"):
            return False
        self.house.emit(subject)
        return bool(self.client.push()[1]["topic"] == subject)

    def respond(self, subject: str) -> bool:
        if not self.listen(subject, "CLUSTERING", "SYNC"):
            return False

        def answer() -> None:
            _, body = self.client.push()
            self.client.send("RESPONSE_TO_SERVER", {**body, "body": '"yes"'})

        self.do_beside(answer, partial(shut_down, self.client.socket))
        return True


class MeshHttp(Driver):
    """The coded API: what is subscribed is pushed to a webhook."""

    service, name = "eventmesh", "eventmesh-http"
    wildcards = False
    also: ClassVar = {"respond": "consume"}
    lacks: ClassVar = {
        "read": NO_HISTORY,
        "write_state": NO_STATE,
        "get": NO_STATE,
        "manage": "topics are made over the paths of the admin server, and over those of the URI API",
    }

    def connect(self) -> None:
        self.client = self._stack.enter_context(HttpClient(self.address))
        self._hook: Hook | None = None

    def is_cut(self) -> bool:
        return not self.publish("walk/a", VALUE)

    @property
    def _shown(self) -> dict[str, str]:
        return {"username": self.proof.name, "passwd": self.proof.password}

    def ask(self, code: str, fields: dict[str, str], client: HttpClient | None = None) -> int | None:
        try:
            answer = ask_mesh(client or self.client, code, fields, protocoltype="eventmeshmessage", **self._shown)
        except OSError:
            return None
        return int(answer["retCode"])

    def publish(self, subject: str, payload: bytes) -> bool:
        fields = {"producergroup": "P", "topic": subject, "content": payload.decode(), "bizseqno": "1", "uniqueid": "2"}
        return self.ask("104", fields) == 0

    def request(self, subject: str) -> bool:
        ttl = str(int(SAFETY_NET_SECONDS * 1000))
        fields = {"producergroup": "P", "topic": subject, "content": VALUE.decode(), "ttl": ttl}
        return self.ask("101", fields) == 0

    def _begin(self, group: str, subject: str, mode: str, kind: str, url: str) -> bool:
        items = json.dumps([{"topic": subject, "mode": mode, "type": kind}])
        return self.ask("206", {"topic": items, "url": url, "consumerGroup": group}) == 0

    def _end(self, group: str, subject: str, url: str) -> None:
        self.ask("207", {"topic": json.dumps([subject]), "url": url, "consumerGroup": group})

    def _listen(self, subject: str, mode: str, kind: str = "ASYNC") -> bool:
        if self._hook is None:
            self._hook = self._stack.enter_context(Hook())
        group, url = f"group{self.house.next_number()}", self._hook.url
        if not self._begin(group, subject, mode, kind, url):
            return False
        self._stack.callback(self._end, group, subject, url)
        return True

    def _next(self) -> dict[str, str]:
        """The form of the next push."""
        assert self._hook is not None
        return self._hook.next()[0]

    def subscribe(self, subject: str, *, below: bool = False) -> bool:
        assert self._listen(END, "BROADCASTING")
        return self._listen(subject, "BROADCASTING")

    def hear(self) -> list[str]:
        heard: list[str] = []
        while (topic := self._next()["topic"]) != END:
            heard.append(topic)
        # Pushes have no order among topics: those that are under way have been decided on before.
        self.house.until(lambda: not calls_under_way(self.house))
        assert self._hook is not None
        while not self._hook.pushes.empty():
            heard.append(self._next()["topic"])
        return heard

    def consume(self, subject: str) -> bool:
        if not self._listen(subject, "CLUSTERING"):
            return False
        self.house.emit(subject)
        return self._next()["topic"] == subject

    def respond(self, subject: str) -> bool:
        if not self._listen(subject, "CLUSTERING", "SYNC"):
            return False
        hook = self._hook
        assert hook is not None

        def answer() -> None:
            pushed = hook.next()[0]
            if not pushed:
                return
            fields = {"origtopic": subject, "content": '"yes"', "extFields": pushed["extFields"], "producergroup": "P"}
            with HttpClient(self.address) as client:
                self.ask("301", fields, client)

        self.do_beside(answer, lambda: hook.pushes.put(({}, {})))
        return True


def calls_under_way(house: House) -> bool:
    """Whether a webhook is being called."""
    webhooks = house.server.services["eventmesh"].webhooks  # type: ignore[attr-defined]
    return any(
        pool.waiting or pool.opening or any(connection.call is not None for connection in pool.connections)
        for pool in webhooks.calls._pools.values()
    )


class MeshUri(MeshHttp):
    """The URI API of the same listener."""

    name, listener = "eventmesh-uri", "eventmesh-http"
    lacks: ClassVar = {
        **{verb: why for verb, why in MeshHttp.lacks.items() if verb != "manage"},
        "request": "the URI API has no requests",
        "respond": "the URI API has no requests",
    }

    def ask_path(self, path: str, body: object) -> bool:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            response = self.client.ask("POST", f"/eventmesh/{path}", data, **self._shown)
        except OSError:
            return False
        return bool(json.loads(response.body)["retCode"] == 0)

    def publish(self, subject: str, payload: bytes) -> bool:
        return self.ask_path(f"publish/{subject}", payload)

    def manage(self, subject: str) -> bool:
        return self.ask_path("topic/create", {"topic": subject})

    def _begin(self, group: str, subject: str, mode: str, kind: str, url: str) -> bool:
        items = [{"topic": subject, "mode": mode, "type": kind}]
        return self.ask_path("subscribe/local", {"url": url, "consumerGroup": group, "topic": items})

    def _end(self, group: str, subject: str, url: str) -> None:
        self.ask_path("unsubscribe/local", {"url": url, "consumerGroup": group, "topic": [subject]})


class MeshAdmin(Driver):
    """The paths of the admin server: who uses them is an administrator, and asked for the right all the same."""

    service, name = "eventmesh", "eventmesh-admin"
    also: ClassVar = {"publish": "admin", "manage": "admin"}
    lacks: ClassVar = dict.fromkeys(
        ("request", "subscribe", "respond", "get", "read", "consume", "write_state"),
        "the paths list clients, make topics and publish",
    )

    def connect(self) -> None:
        self.client = self._stack.enter_context(HttpClient(self.address))

    def is_cut(self) -> bool:
        return not self.publish("walk/a", VALUE)

    def ask(self, path: str, body: object) -> bool:
        proof = {"username": self.proof.name, "passwd": self.proof.password}
        try:
            data = json.dumps(body, separators=(",", ":")).encode()
            return self.client.ask("POST", path, data, **proof).status == 200
        except OSError:
            return False

    def publish(self, subject: str, payload: bytes) -> bool:
        event = {"specversion": "1.0", "id": "1", "source": "/", "type": "t", "subject": subject}
        content = {"datacontenttype": "application/json", "data": json.loads(payload)}
        return self.ask("/event", event | content)

    def manage(self, subject: str) -> bool:
        return self.ask("/topic", {"name": subject})


class MeshGrpc(Driver):
    service, name = "eventmesh", "eventmesh-grpc"
    way = Legacy.module.DESCRIPTOR.package
    package: ClassVar[Any] = Legacy
    wildcards = False
    also: ClassVar = {"respond": "consume"}
    lacks: ClassVar = {
        "read": NO_HISTORY,
        "write_state": NO_STATE,
        "get": NO_STATE,
        "manage": "topics are made over the paths of the admin server",
    }

    def connect(self) -> None:
        channel = self._stack.enter_context(grpc.insecure_channel(self.address))
        self.mesh = self.package(channel, self.proof.name, self.proof.password)

    def is_cut(self) -> bool:
        return not self.publish("walk/a", VALUE)

    def _code(self, name: str, message: Any) -> str:
        try:
            return str(self.mesh.code(self.mesh.ask(name, message)))
        except grpc.RpcError as error:
            return str(error.code())

    def _topic_of(self, message: Any) -> str:
        return str(message.topic)

    def _text_of(self, message: Any) -> str:
        return str(message.content)

    def publish(self, subject: str, payload: bytes) -> bool:
        return self._code("publish", self.mesh.publication(subject, payload.decode())) == "0"

    def request(self, subject: str) -> bool:
        try:
            reply = self.mesh.ask("requestReply", self.mesh.publication(subject, VALUE.decode()))
        except grpc.RpcError:
            return False
        return self._text_of(reply) == '"yes"'

    def _listen(self, subject: str, mode: str, kind: str = "ASYNC") -> Any:
        group = f"group{self.house.next_number()}"
        try:
            return self._stack.enter_context(self.mesh.stream(group, subject, mode, kind))
        except (grpc.RpcError, PermissionError, AssertionError, StopIteration):
            return None

    def consume(self, subject: str) -> bool:
        stream = self._listen(subject, "CLUSTERING")
        if stream is None:
            return False
        self.house.emit(subject)
        return self._topic_of(stream.next()) == subject

    def subscribe(self, subject: str, *, below: bool = False) -> bool:
        self.stream = self._listen(f"{subject}/#" if below else subject, "BROADCASTING")
        if self.stream is not None:
            self.stream.say(self.mesh.subscription("ends", END, "BROADCASTING"))
            assert self.mesh.is_acknowledgement(self.stream.next())
        return self.stream is not None

    def hear(self) -> list[str]:
        heard: list[str] = []
        with contextlib.suppress(grpc.RpcError, StopIteration):
            while (topic := self._topic_of(self.stream.next())) != END:
                heard.append(topic)
        return heard

    def respond(self, subject: str) -> bool:
        stream = self._listen(subject, "CLUSTERING", "SYNC")
        if stream is None:
            return False
        self.do_beside(lambda: stream.say(self.mesh.reply(stream.next(), '"yes"')), stream.cancel)
        return True


class MeshEvents(MeshGrpc):
    """The package of CloudEvents."""

    name, listener = "eventmesh-cloudevents", "eventmesh-grpc"
    way = MeshCloudEvents.module.DESCRIPTOR.package
    package: ClassVar[Any] = MeshCloudEvents

    def _topic_of(self, message: Any) -> str:
        return str(message.attributes["subject"].ce_string)

    def _text_of(self, message: Any) -> str:
        return str(message.text_data)


def shut_down(connection: socket.socket) -> None:
    """End a connection: to close it is not enough while a thread waits for what comes."""
    with contextlib.suppress(OSError):  # the server was first
        connection.shutdown(socket.SHUT_RDWR)


class Admin(Driver):
    service = name = "admin"
    lacks: ClassVar[dict[str, str]] = {}

    def connect(self) -> None:
        self._host, _, self._port = self.address.rpartition(":")

    def _send(self, method: str, path: str, body: object, query: dict[str, str]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, int(self._port), timeout=SAFETY_NET_SECONDS)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, f"{path}?{urlencode(query)}", data, self.proof_headers())
        return connection

    def proof_headers(self) -> dict[str, str]:
        """Headers that prove who it is."""
        return {"authorization": f"Bearer {self.proof.token}"}

    def open(self, method: str, path: str, **query: str) -> Any:
        """Send a request, and give its answer as it begins."""
        connection = self._stack.enter_context(contextlib.closing(self._send(method, path, None, query)))
        self._connection = connection.sock
        return self._stack.enter_context(contextlib.closing(connection.getresponse()))

    def ask(self, method: str, path: str, body: object = None, **query: str) -> int:
        with contextlib.closing(self._send(method, path, body, query)) as connection:
            response = connection.getresponse()
            response.read()
            return response.status

    def is_cut(self) -> bool:
        return self.ask("GET", "/api/state/value", key=END) in (401, 403)

    def publish(self, subject: str, payload: bytes) -> bool:
        return self.ask("POST", "/api/send", {"subject": subject, "payload": payload.decode()}) == 200

    def request(self, subject: str) -> bool:
        return self.ask("POST", "/api/request", {"subject": subject, "payload": "?"}) == 200

    def subscribe(self, subject: str, *, below: bool = False) -> bool:
        if self.open("GET", "/api/listen", pattern=f"{subject}/#" if below else subject).status != 200:
            return False
        # Two answers have no order between them: one answer has both, and all else that is granted.
        self._answer, self._wanted = self.open("GET", "/api/listen", pattern="#"), subject
        assert self._answer.readline() == b"\n"
        return True

    def hear(self) -> list[str]:
        heard: list[str] = []
        for line in self._answer:
            subject = json.loads(line)["subject"] if line != b"\n" else ""
            if subject == END:
                break
            if subject.startswith(self._wanted):
                heard.append(subject)
        return heard

    def get(self, subject: str) -> bool:
        return self.ask("GET", "/api/state/value", key=subject) == 200

    def read(self, subject: str) -> bool:
        return self.ask("GET", "/api/state/revisions", key=subject) == 200

    def consume(self, subject: str) -> bool:
        group = f"group{self.house.next_number()}"
        self.ask("POST", "/api/groups", {"topic": subject, "name": group, "start": {"at": "beginning"}})
        path = f"/api/topics/{quote(subject, safe='')}/groups/{group}/consume"
        response = self.open("GET", path, max="1")
        if response.status != 200:
            return False
        _, line = response.readline(), response.readline()
        return bool(json.loads(line)["deliveries"])

    def write_state(self, subject: str, value: bytes) -> bool:
        return self.ask("PUT", "/api/state/value", value, key=subject) == 200

    def manage(self, subject: str) -> bool:
        return self.ask("POST", "/api/topics", {"name": subject}) in (200, 201)

    def respond(self, subject: str) -> bool:
        response = self.open("GET", "/api/respond", subject=subject)
        if response.status != 200:
            return False
        name = json.loads(response.readline())["responder"]

        def answer() -> None:
            line = next((line for line in response if line != b"\n"), None)
            if line is not None:
                number = json.loads(line)["question"]["number"]
                self.ask("POST", f"/api/responders/{name}/reply", {"number": number, "payload": '"yes"'})

        self.do_beside(answer, self.hang_up)
        return True

    def hang_up(self) -> None:
        """End the answer that was opened last."""
        shut_down(self._connection)


class AdminRecords(Admin):
    """The records of the API of administration, as the console shows them."""

    name, listener = "admin records", "admin"
    lacks: ClassVar = dict.fromkeys(
        ("request", "respond", "subscribe", "get", "consume", "write_state", "manage"), "other requests of `Admin`"
    )

    def publish(self, subject: str, payload: bytes) -> bool:
        path = f"/api/topics/{quote(subject, safe='')}"
        return self.ask("POST", f"{path}/records", {"payload": payload.decode(), "subject": subject}) == 200

    def read(self, subject: str) -> bool:
        path = f"/api/topics/{quote(subject, safe='')}"
        ways = ("records", "records/0/0", "records/0/0/payload", "export", "follow")
        statuses = {self.open("GET", f"{path}/{way}").status for way in ways}
        statuses.add(self.open("GET", f"{path}/search", filter="payload exists").status)
        assert len(statuses) == 1, statuses
        return statuses == {200}


class AdminViews(Admin):
    """The parts of the state that pages show: each way to the same key must give the same answer."""

    name, listener = "admin views", "admin"
    also: ClassVar = {"write_state": "subscribe"}

    def fetch(self, path: str, **query: str) -> tuple[int, Any]:
        with contextlib.closing(self._send("GET", path, None, query)) as connection:
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def get(self, subject: str) -> bool:
        status, entry = self.fetch("/api/state/entry", key=subject)
        _, found = self.fetch("/api/state/search", pattern=subject)
        parent, _, name = subject.rpartition("/")
        _, level = self.fetch("/api/state/nodes", **({"parent": parent} if parent else {}))
        ways = {
            status == 200 and entry["value"] is not None,
            [node["key"] for node in found.get("nodes", ()) if "value" in node] == [subject],
            name in [node["name"] for node in level.get("nodes", ()) if "value" in node],
        }
        assert len(ways) == 1, (entry, found, level)
        return ways.pop()

    def read(self, subject: str) -> bool:
        status, answer = self.fetch("/api/state/differences", pattern=subject, from_time="1")
        return status == 200 and [row["key"] for row in answer["rows"]] == [subject]

    def write_state(self, subject: str, value: bytes) -> bool:
        digest = self.fetch("/api/state/entry", key=subject)[1].get("digest", "")
        return self.ask("PUT", "/api/state/value", value, key=subject, digest=digest) == 200


class Console(Admin):
    """The API of administration as a page of the console asks it: with the cookie of a log-in."""

    name, listener = "console", "admin"
    way = "console"
    refusals = (PermissionError,)

    def connect(self) -> None:
        super().connect()
        self._headers = dict(PAGE)
        with contextlib.closing(
            self._send("POST", "/api/console/login", {"token": self.proof.token}, {})
        ) as connection:
            response = connection.getresponse()
            if response.status != 200:
                raise PermissionError(response.read().decode())
            self._headers["cookie"] = str(response.headers["Set-Cookie"]).partition(";")[0]

    def proof_headers(self) -> dict[str, str]:
        return self._headers


class AdminLines:
    """An answer of the API over jebp, as that of HTTP."""

    def __init__(self, parts: Generator[tuple[int, bytes], None, None]) -> None:
        self._parts = parts
        self.status, self._data = next(parts)

    def readline(self) -> bytes:
        while b"\n" not in self._data:
            try:
                self._data += next(self._parts)[1]
            except (StopIteration, JebpError):
                return b""
        line, _, self._data = self._data.partition(b"\n")
        return line + b"\n"

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")


def end_quietly(parts: Generator[tuple[int, bytes], None, None]) -> None:
    """End an answer; the client may be closed already."""
    with contextlib.suppress(JebpError):
        parts.close()


class AdminJebp(Admin):
    """The API of administration over the connection of jebp, with the key of the client."""

    service = "jebp"
    name = "jebp admin"
    listener = "jebp"
    refusals = (NotAuthorisedError,)

    def connect(self) -> None:
        self.client = JebpClient(self.address, identity=self.proof.identity, reconnect=False)
        self._stack.callback(self.client.close)
        self.client.__enter__()
        self._api = admin_of(self.client)

    def open(self, method: str, path: str, **query: str) -> Any:
        parts = self._api.parts(method, f"{path}?{urlencode(query)}", b"")
        self._stack.callback(end_quietly, parts)  # if it was left to the collector, another test would hear of it
        return AdminLines(parts)

    def ask(self, method: str, path: str, body: object = None, **query: str) -> int:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        try:
            return self._api.ask(method, f"{path}?{urlencode(query)}", data, SAFETY_NET_SECONDS)[0]
        except JebpError:  # the connection is cut
            return 401

    def hang_up(self) -> None:
        self.client.close()


class Spark(Driver):
    """The parts of the Spark connector, as its driver and its tasks call them."""

    service = name = "spark"
    listener = "jebp"
    lacks: ClassVar = {
        **dict.fromkeys(("request", "respond", "get", "write_state"), "a Spark job reads and writes topics"),
        "subscribe": "a stream reads behind the end of the topic: `read`",
        "consume": "checkpoints are kept by Spark",
        "manage": NO_TOPICS,
    }

    def connect(self) -> None:
        self._place = {"url": f"jebp://{self.address}", "identity": self.proof.key_file}
        self._stack.callback(close_connections)

    def is_cut(self) -> bool:
        return not self.read("walk/a")

    def publish(self, subject: str, payload: bytes) -> bool:
        options = parse_sink({**self._place, "topic": subject}, "batch")
        transaction = f"save {self.house.next_number()}"
        rows = pa.RecordBatch.from_pydict({"value": [payload]})
        try:
            check_targets(options)
            staged = stage(iter([rows]), options, Target(transaction, 0, "", 0, 0))
            commit(options, transaction, 0, [staged])
        except BabelbusError:
            return False
        return True

    def read(self, subject: str) -> bool:
        options = parse({**self._place, "subscribe": subject}, "batch")
        reader = BatchReader(options, full_schema(include_headers=False))
        try:
            return any(batch.num_rows for task in reader.partitions() for batch in reader.read(task))
        except BabelbusError:
            return False


def close_connections() -> None:
    """Close the connections that the process of a Spark task keeps."""
    for kept in (connection._open, record_source._open):
        for one in kept.values():
            one.close()
        kept.clear()


DRIVERS: tuple[type[Driver], ...] = (
    *(Jebp, JebpCalls, Spark, Sbus, Tree, TreeSocket, TreeUnix, TreeRest),
    *(ZbusSocket, ZbusHttp, ZbusMonitorSocket, ZbusMonitor),
    *(MeshTcp, MeshHttp, MeshUri, MeshGrpc, MeshEvents, MeshAdmin, Admin, Console, AdminRecords, AdminViews, AdminJebp),
)
