"""What every protocol owes its clients and its server, over real sockets."""

import contextlib
import json
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from babelbus.clients.sbus import connect as connect_packets
from babelbus.config import (
    Config,
    EventmeshSettings,
    JebpSettings,
    ServerSettings,
    TopicDefaults,
    WorterbuchSettings,
    ZbusSettings,
)
from babelbus.core.access import SERVER
from babelbus.core.record import Event
from babelbus.protocols.connection import Connection
from babelbus.protocols.eventmesh.frames import FRAME_BYTES_MAX
from babelbus.protocols.eventmesh.messages import SubscriptionItem
from babelbus.protocols.eventmesh.service import EventmeshService
from babelbus.protocols.eventmesh.webhooks import WEBHOOK_BYTES_MAX
from babelbus.protocols.registry import SERVICES
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX
from babelbus.wire.websocket import Close, Decoder, Message, encode_texts
from babelbus.wire.websocket.upgrade import encode_upgrade_request, make_key
from tests.support.bus import SAFETY_NET_SECONDS, publish
from tests.support.eventmesh import AGENT, HEAD, NEW
from tests.support.eventmesh import frame as mesh_frame
from tests.support.http import ResponseDecoder
from tests.support.jebp import Caller, create, fetch, subscribe
from tests.support.server import LiveServer, configure

LARGE = b"x" * 16_384
"""Part of every answer to a large request."""
MANY = 450
"""Of requests, fewer bytes than one read takes: what is still unread when the server stops has not come."""
OUTBOX_BYTES_MAX = 65_536
MESSAGE_BYTES_MAX = 65_536
SLACK = 8
"""How many times its bound one connection may hold: what one read asked for is carried out in pieces."""


class Talk(ABC):
    """One client of one listener, which counts the answers that came whole."""

    service: ClassVar[str]
    garbage: ClassVar[bytes]
    """Ends the connection of who sends it."""
    closes_when_oversized: ClassVar[bool] = True
    answers_more: ClassVar[bool] = True
    """Whether an answer may be larger than its request."""

    def __init__(self, live: LiveServer, receive_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(SAFETY_NET_SECONDS)
        host, _, port = live.server.addresses[self.listener].rpartition(":")
        self.socket.connect((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    listener: ClassVar[str]

    @abstractmethod
    def small(self, count: int) -> bytes:
        """The bytes of requests with small answers."""

    @abstractmethod
    def large(self, count: int) -> bytes:
        """The bytes of requests whose answers hold `LARGE`."""

    @abstractmethod
    def oversized(self) -> bytes:
        """The beginning of a message over the limit."""

    @abstractmethod
    def feed(self, data: bytes) -> int:
        """Take bytes of the server; return how many answers are whole with them."""

    @property
    @abstractmethod
    def left(self) -> int:
        """Bytes of an answer that has not come whole."""

    def hear(self, count: int) -> None:
        """Wait for so many answers, no more."""
        while count > 0:
            data = self.socket.recv(2**16)
            assert data, "closed"
            count -= self.feed(data)
        assert (count, self.left) == (0, 0)

    def ask(self, count: int = 1) -> None:
        self.socket.sendall(self.small(count))
        self.hear(count)

    def rest(self) -> int:
        """Read until the server closes; return how many whole answers came."""
        count = 0
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(2**16):
                count += self.feed(data)
        assert self.left == 0
        return count

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


class JebpTalk(Talk):
    service = listener = "jebp"
    garbage = b"\0\0\0\x40" + bytes(64)

    def __init__(self, live: LiveServer, receive_bytes: int | None = None) -> None:
        self._caller = Caller(live.address, live.admin, receive_bytes=receive_bytes).connect()
        self.socket = self._caller.socket
        self._left = 0
        self.socket.sendall(self._caller.wire.seal([subscribe("large")]))
        self.hear(1)

    def small(self, count: int) -> bytes:
        return self._caller.wire.seal([create("small", b"%d" % number) for number in range(count)])

    def large(self, count: int) -> bytes:
        return self._caller.wire.seal([fetch(0)] * count)

    def oversized(self) -> bytes:
        return self._caller.wire.seal([create("small", bytes(2 * MESSAGE_BYTES_MAX))])

    def feed(self, data: bytes) -> int:
        answers = self._caller.wire.open(data)
        return len(answers)

    @property
    def left(self) -> int:
        return 0  # a frame that is not whole does not open: the next one would not either


class LineTalk(Talk):
    service = "worterbuch"
    listener = "worterbuch-tcp"
    garbage = b"no JSON\n"

    def __init__(self, live: LiveServer, receive_bytes: int | None = None) -> None:
        super().__init__(live, receive_bytes)
        self._buffer = b""
        self.hear(1)  # the welcome

    def _requests(self, key: str, count: int) -> list[bytes]:
        return [json.dumps({"get": {"transactionId": number, "key": key}}).encode() for number in range(count)]

    def small(self, count: int) -> bytes:
        return b"".join(text + b"\n" for text in self._requests("small", count))

    def large(self, count: int) -> bytes:
        return b"".join(text + b"\n" for text in self._requests("large", count))

    def oversized(self) -> bytes:
        return b"x" * (2 * MESSAGE_BYTES_MAX)

    def feed(self, data: bytes) -> int:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            json.loads(line)
        return len(lines)

    @property
    def left(self) -> int:
        return len(self._buffer)


class HttpTalk(Talk):
    garbage = b"no HTTP\r\n\r\n"

    def __init__(self, live: LiveServer, receive_bytes: int | None = None) -> None:
        super().__init__(live, receive_bytes)
        self._decoder = ResponseDecoder(body_bytes_max=2**30)

    small_path: ClassVar[str]
    large_path: ClassVar[str]

    def small(self, count: int) -> bytes:
        return (f"GET {self.small_path} HTTP/1.1\r\nhost: localhost\r\n\r\n" * count).encode()

    def large(self, count: int) -> bytes:
        return (f"GET {self.large_path} HTTP/1.1\r\nhost: localhost\r\n\r\n" * count).encode()

    def oversized(self) -> bytes:
        return b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (2 * MESSAGE_BYTES_MAX)

    def feed(self, data: bytes) -> int:
        self._decoder.receive_data(data)
        return len(self._decoder.responses())

    @property
    def left(self) -> int:
        return len(self._decoder._held)


class WebSocketTalk(Talk):
    garbage = b"\xff" * 16  # reserved bits and an unknown opcode
    greetings = 0

    def __init__(self, live: LiveServer, receive_bytes: int | None = None) -> None:
        super().__init__(live, receive_bytes)
        self.socket.sendall(encode_upgrade_request("localhost", "/ws", make_key()))
        responses = ResponseDecoder()
        while not responses.responses():
            responses.receive_data(self.socket.recv(2**16))
        self._decoder = Decoder(is_server=False, message_bytes_max=2**30)
        first = self.feed(responses.unread())
        self.hear(self.greetings - first)

    @abstractmethod
    def message(self, large: bool) -> Any:
        """A request."""

    def small(self, count: int) -> bytes:
        return encode_texts([json.dumps(self.message(False)).encode()] * count, mask=True)

    def large(self, count: int) -> bytes:
        return encode_texts([json.dumps(self.message(True)).encode()] * count, mask=True)

    def oversized(self) -> bytes:
        return encode_texts([b"x" * (2 * MESSAGE_BYTES_MAX)], mask=True)[:100]

    def feed(self, data: bytes) -> int:
        self._decoder.receive_data(data)
        events = self._decoder.events()
        assert all(isinstance(event, Message | Close) for event in events)
        return sum(isinstance(event, Message) for event in events)

    @property
    def left(self) -> int:
        return self._decoder.unfinished_bytes


class WorterbuchHttp(HttpTalk):
    service = listener = "worterbuch"
    small_path, large_path = "/api/v1/get/small", "/api/v1/get/large"

    def oversized(self) -> bytes:
        return super().oversized().replace(b"POST /", b"POST /api/v1/set/small")


class WorterbuchWebSocket(WebSocketTalk):
    service = listener = "worterbuch"
    greetings = 1

    def message(self, large: bool) -> Any:
        return {"get": {"transactionId": 1, "key": "large" if large else "small"}}


class ZbusHttp(HttpTalk):
    service = listener = "zbus"
    small_path, large_path = "/", "/large.txt"


class ZbusWebSocket(WebSocketTalk):
    service = listener = "zbus"

    def message(self, large: bool) -> Any:
        # `query` describes all MQs, whose names are long.
        return {"headers": {"cmd": "query", "id": "1"} if large else {"cmd": "query", "mq": "small", "id": "1"}}


class MeshTalk(Talk):
    """EventMesh over TCP: heartbeats, whose answers repeat the `seq`."""

    service, listener = "eventmesh", "eventmesh-tcp"
    garbage = b"no frame of EventMesh"
    answers_more = False

    def __init__(self, live: LiveServer, receive_bytes: int | None = None) -> None:
        super().__init__(live, receive_bytes)
        self._buffer = b""
        self.socket.sendall(mesh_frame(NEW, {"cmd": "HELLO_REQUEST", "seq": "1"}, AGENT))
        self.hear(1)

    def small(self, count: int) -> bytes:
        return mesh_frame(NEW, {"cmd": "HEARTBEAT_REQUEST", "seq": "2"}) * count

    def large(self, count: int) -> bytes:
        return mesh_frame(NEW, {"cmd": "HEARTBEAT_REQUEST", "seq": LARGE.decode()}) * count  # which the answer repeats

    def oversized(self) -> bytes:
        return HEAD.pack(b"EventMesh0000", 2 * FRAME_BYTES_MAX, 100)

    def feed(self, data: bytes) -> int:
        self._buffer += data
        count = 0
        while len(self._buffer) >= HEAD.size:
            end = HEAD.size + HEAD.unpack_from(self._buffer)[1] - NEW
            if len(self._buffer) < end:
                break
            self._buffer = self._buffer[end:]
            count += 1
        return count

    @property
    def left(self) -> int:
        return len(self._buffer)


class MeshHttp(HttpTalk):
    service, listener = "eventmesh", "eventmesh-http"
    small_path, large_path = "/?code=201", "/eventmesh/subscrition/query"


class SbusTalk(Talk):
    """Packets: each `whoami` has an answer, and a large one is a message that comes back to who sent it."""

    service = listener = "sbus"
    garbage = b"no command"
    closes_when_oversized = False

    def __init__(self, live: LiveServer, receive_bytes: int | None = None) -> None:
        self.socket = connect_packets(live.server.addresses["sbus"])
        self.socket.settimeout(SAFETY_NET_SECONDS)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 212_992)  # more than the server takes
        self.socket.sendall(b"SUB large")

    def small(self, count: int) -> bytes:
        return b"CMSG !/cred/whoami"

    def large(self, count: int) -> bytes:
        return b"MSG large\0" + LARGE

    def oversized(self) -> bytes:
        return b"MSG large\0" + bytes(PACKET_BYTES_MAX - 9)

    def ask(self, count: int = 1) -> None:
        for _ in range(count):
            self.socket.sendall(self.small(1))
        self.hear(count)

    def feed(self, data: bytes) -> int:
        return 1

    @property
    def left(self) -> int:
        return 0


TALKS: list[type[Talk]] = [
    *(JebpTalk, LineTalk, WorterbuchHttp, WorterbuchWebSocket, ZbusHttp, ZbusWebSocket, MeshTalk, MeshHttp, SbusTalk)
]
STREAMS = [talk for talk in TALKS if talk is not SbusTalk]


PROCESSES = (1, 2)
"""In one process, and with edges in front: over a link, each session is what it is over a socket."""


def configured(folder: Path, processes: int = 1) -> Config:
    root = folder / "files"
    root.mkdir()
    (root / "large.txt").write_bytes(LARGE)
    return configure(
        folder / "data",
        topics=TopicDefaults(engine="memory", ack="accepted"),
        server=ServerSettings(outbox_bytes_max=OUTBOX_BYTES_MAX, drain_seconds=SAFETY_NET_SECONDS, processes=processes),
        jebp=JebpSettings(port=0, frame_bytes_max=MESSAGE_BYTES_MAX),
        worterbuch=WorterbuchSettings(port=0, tcp_port=0, message_bytes_max=MESSAGE_BYTES_MAX),
        eventmesh=EventmeshSettings(
            tcp_port=0, http_port=0, grpc_port=0, body_bytes_max=MESSAGE_BYTES_MAX, webhook_consent=False
        ),
        zbus=ZbusSettings(port=0, package_bytes_max=MESSAGE_BYTES_MAX, web_root=str(root)),
    )


async def fill(live: LiveServer) -> None:
    """Make what the requests ask for."""
    broker = live.server.broker
    for topic in ("large", "small", *(f"{'long' * 50}{number}" for number in range(60))):
        await broker.create_topic(topic, 1, {"engine": "memory"}, principal=SERVER)
    publish(broker, [Event("large", LARGE)])
    for key, value in (("large", LARGE.decode()), ("small", "small")):
        broker.state.set(key, json.dumps(value).encode())
    broker.state.commit("test")
    mesh = live.server.services["eventmesh"]
    assert isinstance(mesh, EventmeshService)
    item = SubscriptionItem("small", "BROADCASTING")
    for start in range(0, len(LARGE), WEBHOOK_BYTES_MAX // 2):  # one answer describes them all
        path = f"{start}{LARGE[: WEBHOOK_BYTES_MAX // 2].decode()}"
        await mesh.webhooks.subscribe("group", [item], f"http://127.0.0.1:1/{path}")


@pytest.fixture(scope="module", params=PROCESSES)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(configured(tmp_path_factory.mktemp("services"), request.param)) as live:
        live.run(lambda: fill(live))
        yield live


def counted(live: LiveServer, name: str, **labels: str) -> float:
    sample = live.server.metrics.registry.get_sample_value
    return live.call(lambda: sample(f"babelbus_{name}", labels)) or 0.0


def test_every_service_is_covered() -> None:
    assert {talk.service for talk in TALKS} == set(SERVICES)


@pytest.mark.parametrize("talk", STREAMS)
def test_requests_may_be_cut_anywhere(shared: LiveServer, talk: type[Talk]) -> None:
    with talk(shared) as client:
        for byte in client.small(3):
            client.socket.sendall(bytes((byte,)))
        client.hear(3)


@pytest.mark.parametrize("talk", TALKS)
def test_who_breaks_the_protocol_loses_the_connection_and_nobody_else(
    shared: LiveServer, talk: type[Talk], caplog: pytest.LogCaptureFixture
) -> None:
    before = counted(shared, "protocol_errors_total", protocol=talk.service)
    with talk(shared) as other, talk(shared) as client, caplog.at_level(logging.INFO):
        client.ask()
        client.socket.sendall(client.garbage)
        client.rest()
        assert counted(shared, "protocol_errors_total", protocol=talk.service) == before + 1
        other.ask()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("talk", TALKS)
def test_a_message_over_the_limit_is_refused_before_it_is_held(shared: LiveServer, talk: type[Talk]) -> None:
    with talk(shared) as other, talk(shared) as client:
        client.socket.sendall(client.oversized())
        if talk.closes_when_oversized:
            client.rest()
        else:
            client.ask()
        other.ask()


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("talk", [talk for talk in STREAMS if talk.answers_more])
def test_who_does_not_read_is_bounded_and_gets_every_answer_when_the_server_stops(
    tmp_path: Path, talk: type[Talk], processes: int
) -> None:
    with LiveServer(configured(tmp_path, processes)) as live:
        live.run(lambda: fill(live))
        with talk(live) as other, talk(live, receive_bytes=2**14) as client:
            client.ask()
            (connection,) = [
                one for one in live.connections if one.peer == "{}:{}".format(*client.socket.getsockname())
            ]
            requests = client.large(MANY)
            assert len(requests) < 2**15  # TCP passes more than half a window on before the rest is written
            client.socket.sendall(requests)
            live.until(lambda: connection.outbox_bytes >= OUTBOX_BYTES_MAX)
            assert live.call(lambda: is_put_off(connection))
            assert live.call(lambda: connection.outbox_bytes) < SLACK * OUTBOX_BYTES_MAX
            other.ask()
            live.ask_to_stop()
            live.until(lambda: live.server.stopping)
            assert client.rest() == MANY
            other.rest()


def is_put_off(connection: Connection) -> bool:
    """Whether the session keeps to its contract: there is more to do, and it says so."""
    session = connection._session
    assert session is not None
    return session.busy and session.established and connection.unsent


@pytest.mark.parametrize("talk", STREAMS)
def test_a_session_tells_what_it_does(shared: LiveServer, talk: type[Talk]) -> None:
    before = set(shared.connections)
    with talk(shared) as client:
        client.ask()
        (connection,) = set(shared.connections) - before
        session = connection._session
        assert session is not None
        assert shared.call(lambda: session.established)
        shared.until(lambda: not session.busy)
        shared.call(session.resume)  # nothing is put off: nothing happens
        shared.call(session.end_waits)
        shared.call(session.access_changed)
        client.ask()
    shared.until(lambda: connection not in shared.connections)


def test_packets_that_wait_for_a_client_are_sent_before_the_server_stops(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path)) as live, SbusTalk(live) as client, SbusTalk(live) as talker:
        client.ask()
        for _ in range(MANY // 10):
            talker.socket.sendall(talker.large(1))
            talker.hear(1)
        assert live.server.services["sbus"].unsent
        talker.ask()
        live.ask_to_stop()
        assert client.rest() == MANY // 10
