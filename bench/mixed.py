"""Mixed traffic, one protocol at a time: `babelbus serve` with topics acknowledged at `written`, plain sockets.

Users send such traffic: every message differs from the next in topic, size, key, headers and kind (bench/traffic.py).
Requests are encoded before the clock starts. Each reading has a server of its own: versions and producers begin anew.
"""

import json
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from babelbus.client import Identity
from bench import traffic
from bench.frame import Reading, figure
from bench.load import SealedConnection
from bench.streams import Stream, count_of, exchange
from bench.workload import scratch_folder

REQUESTS = 60_000
CHUNK = 400
CHANNEL = "c"
PUBLISHED = b"OK, PUB"

# Floors, provisional: 40 percent of a short run on a machine that others used too.
ZBUS_WS_FLOOR = 15_000
ZBUS_HTTP_FLOOR = 6_500
WORTERBUCH_SET_FLOOR = 40_000
JEBP_FLOOR = 60_000
JEBP_KEYED_FLOOR = 9_000


class Running:
    """A server process, and plain connections to it."""

    def __init__(self, folder: str) -> None:
        command = [str(Path(sys.executable).parent / "babelbus"), "serve", "--json", "--data-folder", f"{folder}/data"]
        options = ["--server-any-port", "--no-sbus-enabled", "--topics-ack", "written", "--log-level", "error"]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.addresses: dict[str, str] = json.loads(self.process.stdout.readline())["addresses"]
        self.identity = Identity.load(f"{folder}/data/conf/admin_key")

    def connect(self, listener: str) -> socket.socket:
        host, _, port = self.addresses[listener].rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=30)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def http(self) -> socket.socket:
        return self.connect("zbus")

    def websocket(self) -> socket.socket:
        connection = self.connect("zbus")
        lines = ["GET / HTTP/1.1", "Host: localhost", "Connection: Upgrade", "Upgrade: websocket"]
        lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "", ""]
        connection.sendall("\r\n".join(lines).encode())
        read_until(connection, b"\r\n\r\n")
        return connection

    def worterbuch(self) -> socket.socket:
        connection = self.connect("worterbuch-tcp")
        read_until(connection, b"\n")
        return connection

    def jebp(self) -> SealedConnection:
        return SealedConnection(int(self.addresses["jebp"].rpartition(":")[2]), self.identity)

    def create(self, topics: Sequence[str]) -> None:
        """Add the topics, on disk, each with a zbus channel at its beginning."""
        draw = random.Random(traffic.SEED)
        with self.websocket() as connection:
            for topic in topics:
                command = traffic.zbus_command("create", draw, mq=topic, mqType="disk", channel=CHANNEL)
                connection.sendall(command)
                assert b"OK, CREATE" in connection.recv(65536)


def read_until(connection: socket.socket, end: bytes) -> None:
    received = b""
    while not received.endswith(end):
        received += connection.recv(65536)


@contextmanager
def server(*, uniform: bool = False) -> Iterator[Running]:
    """Start a server with the topics of the traffic; kill the server at the end."""
    with scratch_folder() as folder:
        running = Running(folder)
        try:
            running.create(traffic.topics(uniform=uniform))
            yield running
        finally:
            running.process.kill()
            running.process.wait()
            assert running.process.stdout is not None
            running.process.stdout.close()


def alone(connect: Callable[[Running], socket.socket], requests: Sequence[bytes], mark: bytes) -> Iterator[Reading]:
    """Send requests over one connection, pipelined; `mark` is in each answer once."""
    chunks = traffic.chunked(requests, CHUNK)
    while True:
        with server() as running, connect(running) as connection:
            yield Reading(exchange([Stream(connection, chunks, count_of(mark))]))


@figure("zbus.mixed_ws", unit="msgs/s", floor=ZBUS_WS_FLOOR, uniform="zbus.pub_ws")
def zbus_ws() -> Iterator[Reading]:
    """Send frames that publish JSON, text and base64 to 50 MQs over one WebSocket, pipelined."""
    return alone(Running.websocket, traffic.zbus_frames(traffic.messages(REQUESTS)), PUBLISHED)


@figure("zbus.mixed_http", unit="msgs/s", floor=ZBUS_HTTP_FLOOR, uniform="zbus.pub_http")
def zbus_http() -> Iterator[Reading]:
    """Send POST by headers, POST by query and the browser's GET to 50 MQs over one connection, pipelined."""
    return alone(Running.http, traffic.http_requests(traffic.messages(REQUESTS)), PUBLISHED)


@figure("worterbuch.mixed_set", unit="requests/s", floor=WORTERBUCH_SET_FLOOR, uniform="worterbuch.set_tcp")
def worterbuch_set() -> Iterator[Reading]:
    """Send sets (half), cSet, publish, get and delete over one TCP connection, pipelined."""
    return alone(Running.worterbuch, traffic.worterbuch_requests(REQUESTS), b"\n")


def sealed(connection: SealedConnection, requests: Sequence[bytes], size: int = CHUNK) -> traffic.Chunks:
    """Return requests sealed for a connection, `size` of them in a chunk."""
    parts = [requests[at : at + size] for at in range(0, len(requests), size)]
    return [(connection.seal(part), len(part)) for part in parts]


def jebp_alone(requests: Sequence[bytes]) -> Iterator[Reading]:
    """Send requests over one encrypted connection, pipelined."""
    while True:
        with server() as running:
            connection = running.jebp()
            with connection.socket as plain:
                yield Reading(exchange([Stream(plain, sealed(connection, requests), connection.count)]))


@figure("jebp.mixed", unit="records/s", floor=JEBP_FLOOR, uniform="jebp.publish_written")
def jebp() -> Iterator[Reading]:
    """Send single records by command 12 to 50 topics over one encrypted connection, pipelined."""
    return jebp_alone([traffic.jebp_plain(message) for message in traffic.messages(REQUESTS)])


@figure("jebp.mixed_keyed", unit="records/s", floor=JEBP_KEYED_FLOOR)
def jebp_keyed() -> Iterator[Reading]:
    """Send single records with key and headers by command 13, as `Client.publish` does, to 50 topics, pipelined."""
    return jebp_alone(traffic.jebp_keyed(traffic.messages(REQUESTS), producer=1))
