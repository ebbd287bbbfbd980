"""Commands end with a clear error when the server is silent, or is none of ours."""

import socket
import threading
from collections.abc import Iterator

import pytest

from babelbus.cli.api import AdminApi
from babelbus.cli.api_http import HttpTransport, bearer
from babelbus.cli.command import CommandError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def api(listener: socket.socket) -> AdminApi:
    host, port = listener.getsockname()
    return AdminApi(HttpTransport(f"{host}:{port}", bearer("token")))


@pytest.mark.parametrize("data", [b"", HEAD + b'{"a":'])
def test_a_silent_server_is_told_from_a_refusal(listener: socket.socket, data: bytes) -> None:
    taken: list[socket.socket] = []

    def serve() -> None:
        for _ in range(2):
            taken.append(listener.accept()[0])
            taken[-1].sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(CommandError, match=r"does not answer: nothing came for 0\.05 s; the server hangs"):
        api(listener).call("GET", "/api/topics", timeout_seconds=0.05)
    with pytest.raises(CommandError, match="the request may be done or not; the server hangs"):
        api(listener).call("POST", "/api/topics", {}, timeout_seconds=0.05)
    thread.join()
    for connection in taken:
        connection.close()


def test_an_answer_in_lines_that_are_no_json_is_told_of(listener: socket.socket) -> None:
    def serve() -> None:
        with listener.accept()[0] as connection:
            connection.recv(65_536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n<html>hello\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(CommandError, match="is no administration endpoint of Babelbus"):
        list(api(listener).lines("/api/listen", {}, dict[str, object]))
    thread.join()
