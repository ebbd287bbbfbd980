"""Memory of closed connections is free without the cycle collector, for every stream protocol."""

import contextlib
import gc
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from babelbus.config import WorterbuchSettings
from babelbus.protocols.jebp.frames import encode_length
from babelbus.wire.websocket import encode_texts
from babelbus.wire.websocket.upgrade import encode_upgrade_request, make_key
from tests.protocols.eventmesh.test_grpc import Legacy
from tests.server.test_unfinished import UPLOADS
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.eventmesh import MeshClient
from tests.support.http2 import DATA, END_HEADERS, HEADERS, Upload, block, frame, message
from tests.support.jebp import create_topic, subscribe
from tests.support.server import LiveServer, configure

UPLOADS_COUNT = 8
CUT_BYTES = 2**21
ANNOUNCED_BYTES = 2**22
SUBSCRIBE = b'{"pSubscribe":{"transactionId":1,"requestPattern":"a/#","unique":false,"liveOnly":false}}'
JOIN = b'{"headers":{"cmd":"sub","mq":"Q","channel":"C","id":"1"}}'
POST = b"POST /api/v1/set/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % ANNOUNCED_BYTES
PUBLISH = b"POST / HTTP/1.1\r\nHost: localhost\r\nCode: 104\r\nContent-Length: %d\r\n\r\n" % ANNOUNCED_BYTES
UPGRADE = encode_upgrade_request("localhost", "/ws", key=make_key())
FRAME = b"\x81\xff" + ANNOUNCED_BYTES.to_bytes(8, "big") + b"mask"

Say = Callable[[LiveServer], socket.socket | Upload]
"""Connects and sends everything that comes before the payload that is cut."""


@pytest.fixture(scope="module", params=[True, False], ids=["uvloop", "asyncio"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("m")
    worterbuch = WorterbuchSettings(port=0, tcp_port=0, unix_path=str(folder / "w"))
    with LiveServer(configure(folder / "data", worterbuch=worterbuch), use_uvloop=request.param) as server:
        caller = server.caller()
        caller.ask(create_topic("Q"))
        caller.socket.close()
        with dial(server, "zbus") as sock:
            sock.sendall(b"GET /?cmd=create&mq=Q&channel=C HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(2**16).startswith(b"HTTP/1.1 200")
        yield server


def dial(live: LiveServer, listener: str) -> socket.socket:
    address = live.server.addresses[listener]
    host, _, port = address.rpartition(":")
    sock = socket.socket(socket.AF_INET if host else socket.AF_UNIX)
    sock.settimeout(SAFETY_NET_SECONDS)
    sock.connect((host, int(port)) if host else address)
    return sock


def says(listener: str, *pieces: bytes) -> Say:
    """Send each piece when the server has answered the piece before."""

    def say(live: LiveServer) -> socket.socket:
        sock = dial(live, listener)
        for number, piece in enumerate(pieces):
            if number:
                assert sock.recv(2**16)
            sock.sendall(piece)
        return sock

    return say


def say_jebp(live: LiveServer) -> socket.socket:
    caller = live.caller()
    caller.ask(subscribe("Q"))
    caller.socket.sendall(b"\x01" + encode_length(ANNOUNCED_BYTES))
    return caller.socket


def say_mesh(live: LiveServer) -> socket.socket:
    client = MeshClient(live.server.addresses["eventmesh-tcp"]).hello("pub")
    body = bytes(CUT_BYTES + 1)  # a frame of ANNOUNCED_BYTES is over the limit
    client.socket.sendall(client.frame("ASYNC_MESSAGE_TO_SERVER", body)[: -len(body)])
    return client.socket


def say_grpc(live: LiveServer) -> Upload:
    """A stream with a subscription, a call that waits for its deadline, and a call with a long message."""
    package, topic = "/eventmesh.common.protocol.grpc", "Q"
    made = Upload(live.server.addresses["eventmesh-grpc"], f"{package}.PublisherService/publish", ANNOUNCED_BYTES)
    stream = block(path=f"{package}.ConsumerService/subscribeStream", grpc_timeout="1H")
    asked = Legacy(None).subscription("g", topic).SerializeToString()
    made.send(frame(HEADERS, END_HEADERS, 3, stream) + frame(DATA, 0, 3, message(asked) + b"\0"))
    made.until(DATA, 3)
    return made


def cut_upload(live: LiveServer, say: Say) -> None:
    """Send half of something large, and end the connection."""
    with say(live) as sock:
        sock.sendall(b"x" * CUT_BYTES)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(2**16):  # the server has read everything when it closes
            pass
    live.until(lambda: not live.connections)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


def collect() -> set[str]:
    """The classes of protocols whose objects only the cycle collector could free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    kinds = {type(one) for one in gc.garbage}
    gc.garbage.clear()
    return {kind.__qualname__ for kind in kinds if kind.__module__.startswith(("babelbus.protocols", "babelbus.wire"))}


@pytest.mark.parametrize(
    "say",
    [
        pytest.param(say_grpc, id="eventmesh-grpc"),
        pytest.param(say_jebp, id="jebp"),
        pytest.param(says("eventmesh-http", PUBLISH), id="eventmesh-http"),
        pytest.param(say_mesh, id="eventmesh-tcp"),
        pytest.param(says("zbus", POST), id="zbus-http"),
        pytest.param(says("zbus", UPGRADE, encode_texts([JOIN], mask=True), FRAME), id="zbus-websocket"),
        pytest.param(says("worterbuch", POST), id="worterbuch-http"),
        pytest.param(
            says("worterbuch", UPGRADE, encode_texts([SUBSCRIBE], mask=True), FRAME), id="worterbuch-websocket"
        ),
        pytest.param(says("worterbuch-tcp", SUBSCRIBE + b"\n", b'{"'), id="worterbuch-tcp"),
        pytest.param(says("worterbuch-unix", SUBSCRIBE + b"\n", b'{"'), id="worterbuch-unix"),
    ],
)
def test_cut_uploads_leave_nothing_behind(live: LiveServer, say: Say) -> None:
    cut_upload(live, say)  # what is made once, for all connections
    with no_collector():
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(UPLOADS_COUNT):
            cut_upload(live, say)
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < CUT_BYTES
        assert collect() == set()


@pytest.mark.parametrize("name", UPLOADS)
def test_malformed_messages_leave_nothing_behind(live: LiveServer, name: str) -> None:
    """An error that is kept holds the frames that it went through, and they hold the bytes of the peer."""
    folder = Path(live.config.data.folder)

    def upload_garbage() -> None:
        with UPLOADS[name](live.server.addresses, folder, CUT_BYTES) as sock, contextlib.suppress(OSError):
            sock.sendall(b"x" * CUT_BYTES + b"\n")
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(2**16):
                pass
        live.until(lambda: not live.connections)

    upload_garbage()
    with no_collector():
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(UPLOADS_COUNT):
            upload_garbage()
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < CUT_BYTES
        assert collect() == set()
