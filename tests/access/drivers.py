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
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self
from urllib.parse import quote, urlencode

import grpc
import msgspec
import pyarrow as pa

from babelbus.client import BlockingClient as JebpClient
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
from tests.protocols.eventmesh.test_grpc import Legacy
from tests.protocols.eventmesh.test_http import ask as ask_mesh
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.eventmesh import AGENT, MeshClient
from tests.support.signing import sign_frame, sign_request
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

    def address(self, listener: str) -> str:
        return self.house.server.addresses[listener]

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
        "consume": "readers keep their offsets themselves",
    }

    def connect(self) -> None:
        client = JebpClient(self.address("jebp"), identity=self.proof.identity, reconnect=False)
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
        client = SbusClient(self.address("sbus"), timeout_seconds=SAFETY_NET_SECONDS)
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
    refusals = (UnauthorizedError,)
    lacks: ClassVar = {
        "request": NO_REQUESTS,
        "respond": NO_REQUESTS,
        "read": NO_HISTORY,
        "consume": NO_GROUPS,
        "manage": NO_TOPICS,
    }

    def connect(self) -> None:
        client = TreeClient(f"tcp://{self.address('worterbuch-tcp')}", token=self.proof.jwt)
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


class TreeRest(Driver):
    service, name = "worterbuch", "worterbuch-http"
    lacks: ClassVar = {**Tree.lacks, "subscribe": "server-sent events have one subscription each: over TCP it is asked"}

    def connect(self) -> None:
        self.client = self._stack.enter_context(HttpClient(self.address("worterbuch")))

    def is_cut(self) -> bool:
        return self.ask("GET", "get", END) in (0, 401, 403)

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
    service, name = "zbus", "zbus-websocket"
    instead: ClassVar = {"respond": "consume"}
    lacks: ClassVar = {
        "request": "a url cannot name a subject of several elements here; over HTTP it is asked",
        "subscribe": "every subscriber is a member of a channel, which is a consumer group",
        "read": "offsets belong to channels: `consume`",
        "write_state": NO_STATE,
        "get": NO_STATE,
    }

    def connect(self) -> None:
        self.client = self._stack.enter_context(SocketClient(self.address("zbus")))

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
    service, name = "zbus", "zbus-http"
    lacks: ClassVar = {
        "subscribe": "over HTTP nothing is pushed",
        "respond": "over HTTP nothing is pushed",
        "read": "offsets belong to channels: `consume`",
        "write_state": NO_STATE,
        "get": NO_STATE,
    }

    def connect(self) -> None:
        self.client = self._stack.enter_context(HttpClient(self.address("zbus")))

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
        client = self._stack.enter_context(MeshClient(self.address("eventmesh-tcp")))
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
    service, name = "eventmesh", "eventmesh-http"
    lacks: ClassVar = {
        "subscribe": "a webhook is called in the name of who subscribed it: tests/protocols/eventmesh/test_access.py",
        "respond": "the same",
        "consume": "the same",
        "read": NO_HISTORY,
        "write_state": NO_STATE,
        "get": NO_STATE,
        "manage": "topics are made over the paths of the admin server",
    }

    def connect(self) -> None:
        self.client = self._stack.enter_context(HttpClient(self.address("eventmesh-http")))

    def is_cut(self) -> bool:
        return not self.publish("walk/a", VALUE)

    def ask(self, code: str, fields: dict[str, str]) -> int | None:
        proof = {"username": self.proof.name, "passwd": self.proof.password}
        try:
            return int(ask_mesh(self.client, code, fields, protocoltype="eventmeshmessage", **proof)["retCode"])
        except OSError:
            return None

    def publish(self, subject: str, payload: bytes) -> bool:
        fields = {"producergroup": "P", "topic": subject, "content": payload.decode(), "bizseqno": "1", "uniqueid": "2"}
        return self.ask("104", fields) == 0

    def request(self, subject: str) -> bool:
        ttl = str(int(SAFETY_NET_SECONDS * 1000))
        fields = {"producergroup": "P", "topic": subject, "content": VALUE.decode(), "ttl": ttl}
        return self.ask("101", fields) == 0


class Named(Legacy):
    """The messages of the older package, with the proof of a principal."""

    def __init__(self, channel: grpc.Channel, proof: Proof) -> None:
        super().__init__(channel)
        self._proof = proof

    def _header(self, **more: str) -> Any:
        header = super()._header(**more)
        header.username, header.password = self._proof.name, self._proof.password
        return header


class MeshGrpc(Driver):
    service, name = "eventmesh", "eventmesh-grpc"
    wildcards = False
    also: ClassVar = {"respond": "consume"}
    lacks: ClassVar = {
        "read": NO_HISTORY,
        "write_state": NO_STATE,
        "get": NO_STATE,
        "manage": "topics are made over the paths of the admin server",
    }

    def connect(self) -> None:
        channel = self._stack.enter_context(grpc.insecure_channel(self.address("eventmesh-grpc")))
        self.package = Named(channel, self.proof)

    def is_cut(self) -> bool:
        return not self.publish("walk/a", VALUE)

    def _code(self, name: str, message: Any) -> str:
        try:
            return self.package.code(self.package.ask(name, message))
        except grpc.RpcError as error:
            return str(error.code())

    def publish(self, subject: str, payload: bytes) -> bool:
        return self._code("publish", self.package.publication(subject, payload.decode())) == "0"

    def request(self, subject: str) -> bool:
        try:
            reply = self.package.ask("requestReply", self.package.publication(subject, VALUE.decode()))
        except grpc.RpcError:
            return False
        return bool(reply.content == '"yes"')

    def _listen(self, subject: str, mode: str, kind: str = "ASYNC") -> Any:
        group = f"group{self.house.next_number()}"
        try:
            return self._stack.enter_context(self.package.stream(group, subject, mode, kind))
        except (grpc.RpcError, PermissionError, AssertionError, StopIteration):
            return None

    def consume(self, subject: str) -> bool:
        stream = self._listen(subject, "CLUSTERING")
        if stream is None:
            return False
        self.house.emit(subject)
        return bool(stream.next().topic == subject)

    def subscribe(self, subject: str, *, below: bool = False) -> bool:
        self.stream = self._listen(f"{subject}/#" if below else subject, "BROADCASTING")
        if self.stream is not None:
            self.stream.say(self.package.subscription("ends", END, "BROADCASTING"))
            assert self.package.is_acknowledgement(self.stream.next())
        return self.stream is not None

    def hear(self) -> list[str]:
        heard: list[str] = []
        with contextlib.suppress(grpc.RpcError, StopIteration):
            while (topic := self.stream.next().topic) != END:
                heard.append(topic)
        return heard

    def respond(self, subject: str) -> bool:
        stream = self._listen(subject, "CLUSTERING", "SYNC")
        if stream is None:
            return False
        self.do_beside(lambda: stream.say(self.package.reply(stream.next(), '"yes"')), stream.cancel)
        return True


def shut_down(connection: socket.socket) -> None:
    """End a connection: to close it is not enough while a thread waits for what comes."""
    with contextlib.suppress(OSError):  # the server was first
        connection.shutdown(socket.SHUT_RDWR)


class Admin(Driver):
    service = name = "admin"
    lacks: ClassVar[dict[str, str]] = {}

    def connect(self) -> None:
        self._host, _, self._port = self.address("admin").rpartition(":")

    def _send(self, method: str, path: str, body: object, query: dict[str, str]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, int(self._port), timeout=SAFETY_NET_SECONDS)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {self.proof.token}"}
        connection.request(method, f"{path}?{urlencode(query)}", data, headers)
        return connection

    def open(self, method: str, path: str, **query: str) -> http.client.HTTPResponse:
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

        self.do_beside(answer, partial(shut_down, self._connection))
        return True


class Spark(Driver):
    """The parts of the Spark connector, as its driver and its tasks call them."""

    service = name = "spark"
    lacks: ClassVar = {
        **dict.fromkeys(("request", "respond", "get", "write_state"), "a Spark job reads and writes topics"),
        "subscribe": "a stream reads behind the end of the topic: `read`",
        "consume": "checkpoints are kept by Spark",
        "manage": NO_TOPICS,
    }

    def connect(self) -> None:
        self._place = {"url": f"jebp://{self.address('jebp')}", "identity": self.proof.key_file}
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
    *(Jebp, Spark, Sbus, Tree, TreeRest, ZbusSocket, ZbusHttp, MeshTcp, MeshHttp, MeshGrpc, Admin),
)
