"""Clients that hold connections to the administration listener without asking for anything."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import babelbus
from babelbus.config import AdminSettings, ServerSettings, TlsSettings
from babelbus.core.access import SERVER, Principal
from babelbus.identities.tokens import make_token
from babelbus.limited_log import LINES_MAX, LimitedLog
from babelbus.listening.crowd import Crowd
from babelbus.listening.door import Door
from babelbus.metrics import Metrics
from babelbus.web import admin
from babelbus.web.token import read_token
from tests.support.bus import NOW, SAFETY_NET_SECONDS
from tests.support.certificates import Authority
from tests.support.clock import ManualClock
from tests.support.server import LiveServer, configure
from tests.web.test_state import Api

LONG_SECONDS = 30.0
"""Longer than a first request takes, and shorter than a connection may be idle between two."""
REQUEST = b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_OF_A_LOGIN = (
    b"POST /api/console/login HTTP/1.1\r\nHost: localhost\r\nX-Babelbus-Console: 1\r\n"
    b'Content-Length: 100\r\n\r\n{"token":'
)


def serve(folder: Path, *, use_uvloop: bool = True, **settings: float) -> LiveServer:
    config = configure(folder)
    return LiveServer(
        type(config)(
            **{name: getattr(config, name) for name in config.__struct_fields__ if name != "admin"},
            admin=AdminSettings(port=0, **settings),  # type: ignore[arg-type]  # as the test gives them
        ),
        use_uvloop=use_uvloop,
    )


def dial(live: LiveServer) -> socket.socket:
    host, _, port = live.server.addresses["admin"].partition(":")
    return socket.create_connection((host, int(port)), timeout=SAFETY_NET_SECONDS)


def ask(client: socket.socket) -> bytes:
    client.sendall(REQUEST)
    return client.recv(65536)


def is_cut(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def refused(live: LiveServer, reason: str) -> float:
    labels = {"protocol": "admin", "reason": reason}
    sample = live.server.metrics.registry.get_sample_value
    return live.call(lambda: sample("babelbus_connections_refused_total", labels)) or 0.0


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[LiveServer]:
    with serve(tmp_path, connections_max=2) as live:
        yield live


def is_served(live: LiveServer, client: socket.socket) -> bool:
    """Whether a request with the token is answered; from then on the client has proved who it is."""
    token = read_token(live.config.data.folder).encode()
    client.sendall(b"GET /api/server HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n" % token)
    return client.recv(65536).startswith(b"HTTP/1.1 200")


def open_connections(live: LiveServer) -> float | None:
    return live.server.metrics.registry.get_sample_value("babelbus_connections", {"protocol": "admin"})


def test_connections_over_the_limit_are_closed_and_the_others_served(crowded: LiveServer) -> None:
    with dial(crowded) as first, dial(crowded) as second:
        assert is_served(crowded, first)
        assert is_served(crowded, second)
        with dial(crowded) as third:
            assert is_cut(third)
        assert refused(crowded, "limit") == 1
        assert ask(first).startswith(b"HTTP/1.1 200")
        assert crowded.call(lambda: open_connections(crowded)) == 2
    crowded.until(lambda: open_connections(crowded) == 0)
    with dial(crowded) as fourth:
        assert ask(fourth).startswith(b"HTTP/1.1 200")


def test_who_has_proved_nothing_and_asked_nothing_for_longest_gives_way_to_new_clients(crowded: LiveServer) -> None:
    with dial(crowded) as first, dial(crowded) as second:
        assert ask(first).startswith(b"HTTP/1.1 200")
        assert ask(second).startswith(b"HTTP/1.1 200")
        assert ask(first).startswith(b"HTTP/1.1 200")
        with dial(crowded) as third:
            assert is_cut(second)
            assert is_served(crowded, third)
            with dial(crowded) as fourth:
                assert is_cut(first)
                assert is_served(crowded, fourth)
                assert refused(crowded, "limit") == 2
                with dial(crowded) as fifth:
                    assert is_cut(fifth)
    crowded.until(lambda: open_connections(crowded) == 0)


@pytest.mark.parametrize("begun", [b"", REQUEST[:-2], HALF_OF_A_LOGIN], ids=["nothing", "head", "log-in"])
def test_clients_that_begin_requests_and_never_prove_anything_keep_nobody_out(
    crowded: LiveServer, begun: bytes
) -> None:
    with dial(crowded) as first, dial(crowded) as second:
        first.sendall(begun)
        second.sendall(begun)
        crowded.until(lambda: open_connections(crowded) == 2)
        with dial(crowded) as third, dial(crowded) as fourth:
            assert is_served(crowded, third)
            assert is_served(crowded, fourth)
            assert is_cut(first)
            assert is_cut(second)


def test_clients_that_do_not_end_their_tls_handshake_keep_nobody_out(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    config = configure(tmp_path / "data", tls=TlsSettings(cert_file=str(cert), key_file=str(key)))
    admin = AdminSettings(port=0, connections_max=1)
    with (
        LiveServer(msgspec.structs.replace(config, admin=admin)) as live,
        dial(live) as silent,
        dial(live) as plain,
        authority.client_context().wrap_socket(plain, server_hostname="localhost") as client,
    ):
        assert is_served(live, client)
        assert is_cut(silent)


class FakeTransport(asyncio.Transport):
    """The transport of a client of an address."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1)})
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_a_client_of_the_address_with_the_most_gives_way() -> None:
    metrics, clock = Metrics(), ManualClock(NOW)
    limited_log, crowd = LimitedLog(logging.getLogger("test"), clock), Crowd(ServerSettings())
    door = Door("admin", metrics, limited_log, crowd, connections_max=3, handshake_seconds=1, is_admin=True)
    single, *many = (FakeTransport(address) for address in ("192.0.2.1", *["198.51.100.1"] * 5))
    places = [door.enter(transport) for transport in (single, *many)]
    assert [transport.aborted for transport in (single, *many)] == [False, True, True, True, False, False]
    for place in places:  # those that gave way are told that their connections are lost
        assert place is not None
        place.leave()
    assert (door.count, crowd._counts, door.unproved.first()) == (0, {}, None)


@pytest.mark.parametrize("begun", [b"", REQUEST[:-2]])
def test_a_client_that_sends_no_whole_request_is_closed_and_one_that_did_is_not(tmp_path: Path, begun: bytes) -> None:
    with serve(tmp_path, use_uvloop=False, handshake_seconds=LONG_SECONDS) as live, dial(live) as quick:
        assert ask(quick).startswith(b"HTTP/1.1 200")
        sample = live.server.metrics.registry.get_sample_value
        with dial(live) as slow:
            slow.sendall(begun)
            live.until(lambda: sample("babelbus_connections", {"protocol": "admin"}) == 2)
            live.skip(LONG_SECONDS)
            assert is_cut(slow)
        assert refused(live, "handshake") == 1
        assert ask(quick).startswith(b"HTTP/1.1 200")  # its deadline is over by now too


def test_half_of_a_log_in_is_not_waited_for_longer_than_a_first_request(tmp_path: Path) -> None:
    with serve(tmp_path, handshake_seconds=3.0) as live, dial(live) as client:
        client.sendall(HALF_OF_A_LOGIN)
        assert client.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_pages_that_strangers_ask_for_and_do_not_read_are_kept_once(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    content = b"x" * 2**23
    (site / "large.html").write_bytes(content)
    request = b"GET /docs/large.html HTTP/1.1\r\nHost: localhost\r\n\r\n"
    admin = AdminSettings(port=0, docs_folder=str(site))
    with LiveServer(msgspec.structs.replace(configure(tmp_path / "data"), admin=admin)) as live:
        with dial(live) as first, dial(live) as second:
            assert ask(first).startswith(b"HTTP/1.1 200")  # loads the endpoint
            endpoint = live.server.administration.endpoint
            assert endpoint is not None

            def unsent() -> list[int]:
                guests: list[Any] = list(endpoint._limits._guests)
                return [transport.get_write_buffer_size() for transport in guests]

            first.sendall(request)
            second.sendall(request)
            live.until(lambda: len(unsent()) == 2 and min(unsent()) > 0)
            assert max(live.call(unsent)) < 2**20
            assert len(endpoint._pages._sent) == 1
            received = bytearray()
            while len(received) < len(content):
                received += first.recv(2**20)
            assert received.endswith(content[-(2**20) :])
        live.until(lambda: not endpoint._pages._sent)


def test_half_of_a_long_body_takes_room_from_its_principal_alone(tmp_path: Path) -> None:
    token = make_token(0)
    half = (
        b"POST /api/send HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n"
        b"Authorization: Bearer %s\r\n\r\n" % token.secret.encode()
    ) + b" " * 400_000
    config = configure(tmp_path, admin=True, server=ServerSettings(unfinished_bytes_max=2**20))
    with LiveServer(config) as live, dial(live) as third:
        live.run(lambda: live.server.gate.put([Principal("guest", (), (token.credential,))], SERVER))
        assert is_served(live, third)  # loads the endpoint
        endpoint = live.server.administration.endpoint
        assert endpoint is not None
        with dial(live) as first, dial(live) as second:
            first.sendall(half)
            live.until(lambda: endpoint._room.taken == 400_000)
            second.sendall(half)
            assert second.recv(65536).startswith(b"HTTP/1.1 503 ")
            status, _ = Api(live)("POST", "/api/send", b'{"subject":"a","payload":"%s"}' % (b"x" * 2**21))
            assert status == 200
        live.until(lambda: endpoint._room.taken == 0)


def test_bytes_that_are_no_http_cost_a_line_of_the_log_each_and_a_few_a_minute(
    crowded: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(LINES_MAX + 5):
        with dial(crowded) as client:
            client.sendall(b"GET /\xff\x00 HTTP/one\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.0 400")
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == LINES_MAX + 1
    assert "admin 127.0.0.1: closed, since it sent no HTTP request" in lines[0].getMessage()
    assert not [line for line in lines if line.exc_info]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nCookie: session=hidden; %b\r\n\r\n" % (b"x" * 20_000), "a line is too long"),
        (b"GET /hidden%b HTTP/1.1\r\nHost: a\r\n\r\n" % (b"x" * 20_000), "a line is too long"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: hidden\x00\r\n\r\n", "Invalid header value char"),
        (b"GET http://[::1/hidden HTTP/1.1\r\nHost: a\r\n\r\n", "the target is no URL"),
        (b"GET / HTTP/1.1\r\n\r\n", "Missing 'Host' header in request."),
    ],
)
def test_what_is_no_http_is_logged_with_a_reason_and_without_its_text(
    crowded: LiveServer, caplog: pytest.LogCaptureFixture, request_: bytes, reason: str
) -> None:
    with dial(crowded) as client:
        client.sendall(request_)
        assert client.recv(65536).startswith(b"HTTP/1.0 400")
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.endswith(f"no HTTP request: {reason}")


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST,
        b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /api/topics HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PUT /ready HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
        b"GET /ready HTTP/1.1\r\nHost: localhost\r\nExpect: miracles\r\n\r\n",
        b"GET /console/index.html HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/one\r\n\r\n",
        b"GET /ready HTTP/1.1\r\n\r\n",
        b"GET /ready HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 10_000 + b"\r\n\r\n",
    ],
    ids=["answer", "no page", "no proof", "no method", "expectation", "file", "no HTTP", "no host", "long header"],
)
def test_no_answer_to_strangers_names_a_release(crowded: LiveServer, request_: bytes) -> None:
    with dial(crowded) as client:
        client.sendall(request_)
        answer = client.recv(65536)
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert b"\r\nserver: babelbus" in head
    for name in (b"aiohttp", b"python", babelbus.__version__.encode()):
        assert name not in head


def test_a_connection_without_a_next_request_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "IDLE_SECONDS", 0.05)
    with serve(tmp_path) as live, dial(live) as client:
        client.sendall(REQUEST + REQUEST[:-2])
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        assert is_cut(client)
