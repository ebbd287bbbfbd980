"""Messages that do not come whole have a bound: for the process, for an address, for a client that is not known."""

import json
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from babelbus.config import Config, EventmeshSettings, JebpSettings, ServerSettings, WorterbuchSettings, ZbusSettings
from babelbus.protocols.jebp.frames import encode_length
from babelbus.protocols.jebp.identity import Identity
from babelbus.units import MIB
from babelbus.wire.websocket import Close, Deflater
from babelbus.wire.websocket.upgrade import encode_upgrade_request, make_key
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.child import Child
from tests.support.http2 import Upload
from tests.support.jebp import Caller
from tests.support.server import LiveServer, configure
from tests.support.web import SECRET, WebSocket, token

LONG = 4 * MIB
"""What an upload announces, and the limit of each protocol."""
PART = 3 * MIB
"""What an upload sends of it."""
ADDRESS_MAX, PROCESS_MAX = 8 * MIB, 10 * MIB
ONE_CHUNK = 2**18
"""One read of a socket, by which each upload may pass a bound."""
UPGRADE = encode_upgrade_request("localhost", "/ws", key=make_key())
POST = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n"
Socket = socket.socket | Upload
Say = Callable[[dict[str, str], Path, int], Socket]
"""Connects to one of some addresses, and sends everything that comes before so many bytes of a message."""


def dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.socket(socket.AF_INET if host else socket.AF_UNIX)
    sock.settimeout(SAFETY_NET_SECONDS)
    sock.connect((host, int(port)) if host else address)
    return sock


def says(listener: str, *pieces: bytes, head: Callable[[int], bytes]) -> Say:
    """Send each piece when the piece before is answered, then the head of a long message."""

    def say(addresses: dict[str, str], folder: Path, long: int) -> socket.socket:
        sock = dial(addresses[listener])
        for piece in pieces:
            sock.sendall(piece)
            assert sock.recv(2**16)
        sock.sendall(head(long))
        return sock

    return say


def say_jebp(addresses: dict[str, str], folder: Path, long: int) -> socket.socket:
    caller = Caller(addresses["jebp"], Identity.load(folder / "conf" / "admin_key")).connect()
    caller.socket.sendall(b"\x01" + encode_length(long))
    return caller.socket


def frame(long: int) -> bytes:
    return b"\x81\xff" + long.to_bytes(8, "big") + b"mask"


def chunk(long: int) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: localhost\r\ncmd: pub\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % long


def say_grpc(addresses: dict[str, str], folder: Path, long: int) -> Upload:
    return Upload(addresses["eventmesh-grpc"], "/eventmesh.common.protocol.grpc.PublisherService/publish", long)


UPLOADS: dict[str, Say] = {
    "eventmesh-grpc": say_grpc,
    "jebp": say_jebp,
    "zbus-http": says("zbus", head=lambda long: POST % (b"/", b"cmd: pub\r\n", long)),
    "zbus-chunks": says("zbus", head=chunk),
    "zbus-websocket": says("zbus", UPGRADE, head=frame),
    "worterbuch-http": says("worterbuch", head=lambda long: POST % (b"/api/v1/set/k", b"", long)),
    "worterbuch-websocket": says("worterbuch", UPGRADE, head=frame),
    "worterbuch-tcp": says("worterbuch-tcp", head=lambda long: b'{"'),
    "worterbuch-unix": says("worterbuch-unix", head=lambda long: b'{"'),
}


def configured(
    folder: Path, *, long: int = LONG, server: ServerSettings | None = None, auth_key_file: str | None = None
) -> Config:
    small = ServerSettings(unfinished_bytes_max=PROCESS_MAX, unfinished_bytes_per_address_max=ADDRESS_MAX)
    worterbuch = WorterbuchSettings(
        port=0,
        tcp_port=0,
        unix_path=str(folder / "w"),
        message_bytes_max=2 * long,
        deflate=True,
        auth_key_file=auth_key_file,
    )
    return configure(
        folder / "data",
        server=server or small,
        eventmesh=EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, grpc_bytes_max=2 * long),
        jebp=JebpSettings(port=0, frame_bytes_max=2 * long),
        worterbuch=worterbuch,
        zbus=ZbusSettings(port=0, package_bytes_max=2 * long),
    )


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(configured(tmp_path)) as server:
        yield server


def value(live: LiveServer, name: str, **labels: str) -> float:
    sample = live.server.metrics.registry.get_sample_value
    return live.call(lambda: sample(f"babelbus_{name}", labels)) or 0.0


def refused(live: LiveServer, protocol: str, reason: str) -> float:
    return value(live, "connections_refused_total", protocol=protocol, reason=reason)


def upload(sock: Socket, size_bytes: int) -> bool:
    """Send a part of a long message; return whether the server took it and waits for more."""
    try:
        sock.sendall(b"x" * size_bytes)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def is_served(addresses: dict[str, str]) -> None:
    """Check that a client with small messages is answered."""
    with dial(addresses["worterbuch-tcp"]) as sock, sock.makefile("rb") as lines:
        assert b"welcome" in lines.readline()
        for number in range(10):
            sock.sendall(b'{"set":{"transactionId":%d,"key":"k","value":1}}\n' % number)
            assert lines.readline() == b'{"ack":{"transactionId":%d}}\n' % number


@pytest.mark.parametrize("name", UPLOADS)
def test_uploads_of_one_address_share_its_budget_and_others_are_served(live: LiveServer, name: str) -> None:
    protocol = name.partition("-")[0]
    addresses, folder = live.server.addresses, Path(live.config.data.folder)
    socks = [UPLOADS[name](addresses, folder, LONG) for _ in range(6)]
    try:
        for sock in socks:
            upload(sock, PART)
            assert value(live, "unfinished_bytes") <= ADDRESS_MAX
            is_served(addresses)
        live.until(lambda: len(live.connections) == 2)
        assert refused(live, protocol, "address_memory") == 4
        assert value(live, "protocol_errors_total", protocol=protocol) == 0
    finally:
        for sock in socks:
            sock.close()
    live.until(lambda: not live.connections)
    assert value(live, "unfinished_bytes") == 0


def test_all_addresses_share_the_budget_of_the_process(live: LiveServer) -> None:
    addresses, folder = live.server.addresses, Path(live.config.data.folder)
    names = ["worterbuch-unix", "worterbuch-unix", "worterbuch-tcp", "zbus-http"]
    socks = [UPLOADS[name](addresses, folder, LONG) for name in names]
    for sock in socks:
        upload(sock, PART)
        assert value(live, "unfinished_bytes") <= PROCESS_MAX
        is_served(addresses)
    live.until(lambda: len(live.connections) == 3)
    assert refused(live, "worterbuch", "memory") + refused(live, "zbus", "memory") == 1
    for sock in socks:
        sock.close()


def answers(sock: Socket) -> bytes:
    """Return what comes until the server closes."""
    data = b""
    try:
        while part := sock.recv(2**16):
            data += part
    except ConnectionResetError:
        pass
    return data


def test_a_client_whose_upload_is_given_up_is_told_to_try_again_later(live: LiveServer) -> None:
    addresses, folder = live.server.addresses, Path(live.config.data.folder)
    sample = live.server.metrics.registry.get_sample_value
    for name, expected in (
        ("worterbuch-http", b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n"),
        ("zbus-chunks", b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n"),
        ("zbus-websocket", (1013).to_bytes(2, "big") + b"unfinished messages of one address take more than"),
    ):
        largest = UPLOADS[name](addresses, folder, LONG)
        upload(largest, PART)
        live.until(lambda: (sample("babelbus_unfinished_bytes") or 0) >= PART)
        others = [UPLOADS["zbus-http"](addresses, folder, LONG) for _ in range(3)]
        for other in others:
            upload(other, PART - ONE_CHUNK)
        assert expected in answers(largest)
        for sock in (*others, largest):
            sock.close()
        live.until(lambda: not live.connections)


def test_a_message_over_the_part_of_others_passes_while_there_is_room(live: LiveServer) -> None:
    addresses = live.server.addresses
    with dial(addresses["worterbuch"]) as sock:
        body = b'"' + b"x" * (2 * LONG - 10) + b'"'
        sock.sendall(POST % (b"/api/v1/set/long", b"", len(body)) + body)
        assert sock.recv(2**16).startswith(b"HTTP/1.1 200")


# -- compressed --------------------------------------------------------------------------------------------------------


def test_messages_of_one_chunk_are_decompressed_one_after_the_other(live: LiveServer) -> None:
    with WebSocket(live, deflate=True) as client:
        assert client.deflate is not None
        text = b'{"set":{"transactionId":%d,"key":"k","value":1}}'
        texts = [(text % number).ljust(2 * MIB) for number in range(30)]
        bombs = Deflater(client.deflate, is_server=False).encode_texts(texts)
        assert len(bombs) < ONE_CHUNK
        del texts
        tracemalloc.start()
        try:
            client.socket.sendall(bombs)
            for number in range(30):
                assert client.next() == {"ack": {"transactionId": number}}
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 5 * 2 * MIB


def test_a_bomb_is_refused_before_it_takes_more_memory_than_there_is_room(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path, long=32 * MIB)) as live, WebSocket(live, deflate=True) as client:
        assert client.deflate is not None
        bomb = Deflater(client.deflate, is_server=False).encode_texts([b" " * 64 * MIB])
        tracemalloc.start()
        try:
            client.socket.sendall(bomb)
            event = client.event()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert isinstance(event, Close)
        assert event.code == 1009
        assert peak < 3 * ADDRESS_MAX
        is_served(live.server.addresses)


# -- before a client is known ------------------------------------------------------------------------------------------

EARLY = ServerSettings().unauthenticated_bytes_max


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[LiveServer]:
    """A server whose clients prove who they are."""
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "keys").write_text("known secret\n")
    for name in ("key", "keys"):
        (tmp_path / name).chmod(0o600)
    made = configured(tmp_path, auth_key_file=str(tmp_path / "key"))
    zbus = ZbusSettings(port=0, package_bytes_max=LONG, auth_file=str(tmp_path / "keys"))
    with LiveServer(msgspec.structs.replace(made, zbus=zbus)) as server:
        yield server


@pytest.mark.parametrize("name", ["worterbuch-http", "worterbuch-websocket", "worterbuch-tcp", "zbus-http", "jebp"])
def test_a_client_that_is_not_known_may_send_a_small_part_alone(locked: LiveServer, name: str) -> None:
    addresses, folder = locked.server.addresses, Path(locked.config.data.folder)
    protocol = name.partition("-")[0]
    say = says("jebp", head=lambda long: b"\x01" + encode_length(long)) if name == "jebp" else UPLOADS[name]
    with say(addresses, folder, LONG) as sock:
        upload(sock, EARLY + ONE_CHUNK)
        said = answers(sock)
        assert b"HTTP/1.1 413" in said or "http" not in name
    if name == "jebp":  # its handshake has a limit of its own
        assert value(locked, "protocol_errors_total", protocol="jebp") == 1
    else:
        assert refused(locked, protocol, "unauthenticated") == 1


def test_a_bomb_of_a_client_that_is_not_known_is_refused(locked: LiveServer) -> None:
    with WebSocket(locked, deflate=True) as client:
        assert client.deflate is not None
        client.socket.sendall(Deflater(client.deflate, is_server=False).encode_texts([b" " * (EARLY + 1)]))
        event = client.event()
        assert isinstance(event, Close)
        assert event.code == 1009


def test_a_client_that_is_known_may_send_long_messages(locked: LiveServer) -> None:
    bearer = token({"write": ["#"]})
    long = "x" * 10 * EARLY
    body = json.dumps(long).encode()
    with dial(locked.server.addresses["worterbuch"]) as sock:
        sock.sendall(POST % (b"/api/v1/set/k", f"Authorization: Bearer {bearer}\r\n".encode(), len(body)))
        sock.sendall(body)
        assert sock.recv(2**16).startswith(b"HTTP/1.1 200")
    with WebSocket(locked) as client:
        assert "authorized" in client.ask({"authorizationRequest": {"authToken": bearer}})
        assert client.ask({"set": {"transactionId": 1, "key": "k", "value": long}}) == {"ack": {"transactionId": 1}}
    with dial(locked.server.addresses["zbus"]) as sock:
        sock.sendall(POST % (b"/", b"cmd: pub\r\napiKey: known\r\nsignature: 0\r\n", len(body)) + body)
        assert sock.recv(2**16).startswith(b"HTTP/1.1 403")  # it came whole: its signature is wrong


# -- the memory of the process -----------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


@pytest.mark.parametrize(
    ("count", "size_bytes", "budget"),
    [(24, 3 * MIB, 16 * MIB), pytest.param(200, 30 * MIB, 128 * MIB, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", UPLOADS)
def test_slow_and_cut_uploads_leave_the_memory_of_the_process_below_its_budget(
    tmp_path: Path, name: str, count: int, size_bytes: int, budget: int
) -> None:
    server = ServerSettings(unfinished_bytes_per_address_max=budget)
    with Child(configured(tmp_path, long=size_bytes, server=server)) as child:
        is_served(child.addresses)
        before = resident_bytes(child.pid)
        socks = []
        for number in range(count):
            sock = UPLOADS[name](child.addresses, child.folder, 2 * size_bytes)
            upload(sock, size_bytes)
            if number % 2:
                sock.close()
            else:
                socks.append(sock)
            assert resident_bytes(child.pid) - before < budget + 32 * MIB
        is_served(child.addresses)
        for sock in socks:
            sock.close()
        assert child.stop() == 0
        assert "Traceback" not in child.said
