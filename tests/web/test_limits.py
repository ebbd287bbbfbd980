"""Clients that hold connections to the administration listener without asking for anything."""

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.config import AdminSettings
from babelbus.limited_log import LINES_MAX
from babelbus.web import admin
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.server import LiveServer, configure

REQUEST = b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n"


def serve(folder: Path, **settings: float) -> LiveServer:
    config = configure(folder)
    return LiveServer(
        type(config)(
            **{name: getattr(config, name) for name in config.__struct_fields__ if name != "admin"},
            admin=AdminSettings(port=0, **settings),  # type: ignore[arg-type]  # as the test gives them
        )
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


def test_connections_over_the_limit_are_closed_and_the_others_served(crowded: LiveServer) -> None:
    with dial(crowded) as first, dial(crowded) as second:
        assert ask(first).startswith(b"HTTP/1.1 200")
        assert ask(second).startswith(b"HTTP/1.1 200")
        with dial(crowded) as third:
            assert is_cut(third)
        assert refused(crowded, "limit") == 1
        assert ask(first).startswith(b"HTTP/1.1 200")
        sample = crowded.server.metrics.registry.get_sample_value
        assert crowded.call(lambda: sample("babelbus_connections", {"protocol": "admin"})) == 2
    crowded.until(lambda: sample("babelbus_connections", {"protocol": "admin"}) == 0)
    with dial(crowded) as fourth:
        assert ask(fourth).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("begun", [b"", REQUEST[:-2]])
def test_a_client_that_sends_no_whole_request_is_closed_and_one_that_did_is_not(tmp_path: Path, begun: bytes) -> None:
    with serve(tmp_path, handshake_seconds=1.0) as live, dial(live) as quick:
        assert ask(quick).startswith(b"HTTP/1.1 200")
        with dial(live) as slow:
            slow.sendall(begun)
            assert is_cut(slow)
        assert refused(live, "handshake") == 1
        assert ask(quick).startswith(b"HTTP/1.1 200")  # its deadline is over by now too


def test_half_of_a_log_in_is_not_waited_for_longer_than_a_first_request(tmp_path: Path) -> None:
    half = (
        b"POST /api/console/login HTTP/1.1\r\nHost: localhost\r\nX-Babelbus-Console: 1\r\n"
        b'Content-Length: 100\r\n\r\n{"token":'
    )
    with serve(tmp_path, handshake_seconds=1.0) as live, dial(live) as client:
        client.sendall(half)
        assert client.recv(65536).startswith(b"HTTP/1.1 408 ")


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


def test_a_connection_without_a_next_request_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "IDLE_SECONDS", 0.05)
    with serve(tmp_path) as live, dial(live) as client:
        client.sendall(REQUEST + REQUEST[:-2])
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        assert is_cut(client)
