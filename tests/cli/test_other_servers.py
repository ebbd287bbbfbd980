"""Commands end with a clear error when the server is silent, or is none of ours."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.cli.api import AdminApi
from babelbus.cli.api_http import HttpTransport, bearer
from babelbus.cli.command import CommandError
from tests.cli.shell import Served
from tests.support.bus import SAFETY_NET_SECONDS

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


@pytest.mark.parametrize(
    "greeting", [b"\x01\x01\x08jebp/1.2", b'{"welcome":{}}\n', b"\x00\x00\x12\x04\x00\x00\x00\x00\x00"]
)
def test_the_port_of_another_protocol_is_told_without_its_bytes(listener: socket.socket, greeting: bytes) -> None:
    def serve() -> None:
        with listener.accept()[0] as connection:
            connection.recv(65_536)
            connection.sendall(greeting)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(CommandError) as error:
        api(listener).call("GET", "/api/topics")
    thread.join()
    host, port = listener.getsockname()
    assert str(error.value) == (
        f"{host}:{port} does not speak HTTP: this may be the port of another protocol; "
        "'babelbus serve' prints that of admin"
    )


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


@pytest.mark.parametrize("way", ["http", "jebp"])
def test_an_answer_in_lines_that_its_server_does_not_end_is_no_whole_one(tmp_path: Path, way: str) -> None:
    served = Served(tmp_path)
    try:
        line = json.dumps({"key": "large/%d", "value": "x" * 3_000})
        served.run("state", "import", "-", input="\n".join(line % number for number in range(12_000)))
        options = ["--data-folder", "data"] if way == "http" else ["--server", served.ready["addresses"]["jebp"]]
        export = served.start("state", "export", *options, "-")
        assert export.stdout is not None
        assert export.stdout.read(1000).startswith("{")  # 36 MB do not fit between the two: there is more to come
        served.process.kill()
        _, told = export.communicate(timeout=SAFETY_NET_SECONDS)
        assert export.returncode == 1
        assert "ended the connection before the end of its answer" in told
    finally:
        served.kill_started()
