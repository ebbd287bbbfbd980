"""zbus end to end: a `babelbus serve` process with topics acknowledged at `written`, clients that speak plain sockets.

Bodies of 100 bytes, MQs on disk. A load client writes requests that were made before the clock starts, and counts
answers.
"""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from babelbus.wire.websocket import Decoder, encode_texts
from babelbus.wire.websocket.upgrade import make_key
from bench.frame import Reading, figure
from bench.workload import PAYLOAD, SECONDS, scratch_folder
from bench.worterbuch import READ_BYTES, pipelined

REQUESTS = 200_000
CONNECTIONS = 32
CONSUMERS = 4
WINDOW = 100
BATCH = 100
BACKLOG = 5_000_000
MQ = "bench"
TEXT = PAYLOAD.decode()


class Started(msgspec.Struct, frozen=True):
    """A server that runs."""

    address: tuple[str, int]
    pid: int


@contextmanager
def server(folder: str) -> Iterator[Started]:
    """Run `babelbus serve` on a folder; it is killed at the end, as a crash would."""
    command = [str(Path(sys.executable).parent / "babelbus"), "serve", "--json", "--data-folder", f"{folder}/data"]
    process = subprocess.Popen(
        [*command, "--server-any-port", "--no-sbus-enabled", "--topics-ack", "written", "--log-level", "error"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        host, _, port = json.loads(process.stdout.readline())["addresses"]["zbus"].rpartition(":")
        yield Started((host, int(port)), process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def connect(started: Started) -> socket.socket:
    """A connection that speaks HTTP."""
    made = socket.create_connection(started.address, timeout=30)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def connect_ws(started: Started) -> socket.socket:
    """A connection that has become a WebSocket."""
    return upgrade(connect(started))


def upgrade(made: socket.socket) -> socket.socket:
    """Make a connection a WebSocket."""
    lines = ["GET / HTTP/1.1", "host: localhost", "connection: upgrade", "upgrade: websocket"]
    lines += ["sec-websocket-version: 13", f"sec-websocket-key: {make_key()}", "", ""]
    made.sendall("\r\n".join(lines).encode())
    received = b""
    while not received.endswith(b"\r\n\r\n"):
        received += made.recv(65536)
    return made


def frames(messages: Sequence[object]) -> bytes:
    return encode_texts(list(map(msgspec.json.encode, messages)), mask=True)


def command(cmd: str, **headers: object) -> dict[str, object]:
    return {"headers": {"cmd": cmd, "mq": MQ, **headers}}


def publishes(count: int, *, ack: bool = True) -> bytes:
    unacked = {} if ack else {"ack": "false"}
    return frames([{**command("pub", id=str(number), **unacked), "body": TEXT} for number in range(count)])


def http_publish(request_id: str | None) -> bytes:
    lines = ["POST / HTTP/1.1", "Host: localhost", "cmd: pub", f"mq: {MQ}", "Content-Type: text/plain"]
    lines += [] if request_id is None else [f"id: {request_id}"]
    return "\r\n".join([*lines, f"Content-Length: {len(PAYLOAD)}", "", TEXT]).encode()


def create(made: socket.socket, channel: str | None = None) -> None:
    """Make the MQ, on a connection that is a WebSocket."""
    extra = {} if channel is None else {"channel": channel}
    made.sendall(frames([command("create", mqType="disk", **extra)]))
    assert b"OK, CREATE" in made.recv(65536)


@figure("zbus.pub_http", unit="msgs/s", target=120_000)
def pub_http() -> Iterator[Reading]:
    """One keep-alive connection, pipelined, each message stored and answered."""
    requests = b"".join([http_publish(str(number)) for number in range(REQUESTS)])
    with scratch_folder() as folder, server(folder) as started, connect_ws(started) as admin:
        create(admin)
        with connect(started) as made:
            while True:
                yield Reading(pipelined(made, requests, REQUESTS, b"OK, PUB"))


@figure("zbus.pub_ws", unit="msgs/s", target=150_000)
def pub_ws() -> Iterator[Reading]:
    """The same over WebSocket."""
    requests = publishes(REQUESTS)
    with scratch_folder() as folder, server(folder) as started, connect_ws(started) as made:
        create(made)
        while True:
            yield Reading(pipelined(made, requests, REQUESTS, b"OK, PUB"))


@figure("zbus.pub_32_connections", unit="msgs/s", target=40_000)
def pub_32_connections() -> Iterator[Reading]:
    """32 HTTP connections of one request at a time: `ab -k -c 32` where it is installed, else a client in Python."""
    with scratch_folder() as folder, server(folder) as started, connect_ws(started) as admin:
        create(admin)
        program = shutil.which("ab")
        if program is not None:
            while True:
                yield Reading(_apache_bench(program, folder, started), note="by ab")
        connections = {made.fileno(): made for made in (connect(started) for _ in range(CONNECTIONS))}
        poller = select.epoll()
        for number in connections:
            poller.register(number, select.EPOLLIN)
        try:
            while True:
                yield Reading(_one_at_a_time(poller, connections), note="by a client in Python")
        finally:
            poller.close()
            for made in connections.values():
                made.close()


def _apache_bench(program: str, folder: str, started: Started) -> float:
    """Let ab publish, and give how many messages a second it was answered."""
    body = Path(folder) / "body"
    body.write_bytes(PAYLOAD)
    host, port = started.address
    command = [program, "-q", "-k", "-c", str(CONNECTIONS), "-n", str(REQUESTS), "-p", str(body), "-T", "text/plain"]
    command += ["-H", "cmd: pub", "-H", f"mq: {MQ}", f"http://{host}:{port}/"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
    assert int(found["Complete requests"]) == int(found["Keep-Alive requests"]) == REQUESTS, said
    assert int(found["Failed requests"]) == 0, said
    assert "Non-2xx responses" not in found, said
    return float(found["Requests per second"].split()[0])


def _one_at_a_time(poller: select.epoll, connections: dict[int, socket.socket]) -> float:
    request = http_publish(None)
    done, begun = 0, time.perf_counter()
    until = begun + SECONDS
    for made in connections.values():
        made.sendall(request)
    while time.perf_counter() < until:
        for number, _ in poller.poll():
            made = connections[number]
            made.recv(65536)
            made.sendall(request)
            done += 1
    seconds = time.perf_counter() - begun
    for made in connections.values():
        made.recv(65536)
    return done / seconds


def _fill(made: socket.socket, count: int) -> None:
    """Publish messages without waiting for more than the last one."""
    step = min(count, 50_000)
    requests = publishes(step, ack=False)
    for _ in range(count // step):
        made.sendall(requests)
        made.sendall(frames([command("query", id="end", channel="c")]))
        received = b""
        while b'"end"' not in received:
            received += made.recv(65536)


@figure("zbus.sub_4_consumers", unit="msgs/s", target=120_000)
def sub_4_consumers() -> Iterator[Reading]:
    """A backlog on one channel, four consumers that refill a window of 100 when half of it is used up."""
    with scratch_folder() as folder, server(folder) as started, connect_ws(started) as admin:
        create(admin, "c")
        while True:
            _fill(admin, REQUESTS)
            yield Reading(_consume(started))


def _consume(started: Started) -> float:
    consumers = [connect_ws(started) for _ in range(CONSUMERS)]
    try:
        poller = select.epoll()
        by_number = {made.fileno(): made for made in consumers}
        for number in by_number:
            poller.register(number, select.EPOLLIN)
        refill = frames([command("sub", channel="c", window=WINDOW, ack="false")])
        marks = [b'"window":"%d"' % left for left in (WINDOW // 2, 0)]
        left, begun = REQUESTS, time.perf_counter()
        for made in consumers:
            made.sendall(refill)
        while left > 0:
            for number, _ in poller.poll():
                made = by_number[number]
                data = made.recv(READ_BYTES)
                left -= data.count(b'"offset"')
                if any(mark in data for mark in marks):
                    made.sendall(refill)
        seconds = time.perf_counter() - begun
        poller.close()
        return REQUESTS / seconds
    finally:
        for made in consumers:
            made.close()


@figure("zbus.take_100", unit="msgs/s", target=150_000)
def take_100() -> Iterator[Reading]:
    """One connection that takes 100 messages at a time."""
    with scratch_folder() as folder, server(folder) as started, connect_ws(started) as made:
        create(made, "c")
        request = frames([command("take", channel="c", window=BATCH, id="t")])
        while True:
            _fill(made, REQUESTS)
            decoder = Decoder(is_server=False, message_bytes_max=2**26)
            begun = time.perf_counter()
            for _ in range(REQUESTS // BATCH):
                made.sendall(request)
                while True:
                    decoder.receive_data(made.recv(READ_BYTES))
                    if decoder.events():
                        break
            yield Reading(REQUESTS / (time.perf_counter() - begun))


def _resident_mib(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@figure("server.backlog_rss_mib", unit="MiB", target=300, lower_is_better=True)
def backlog() -> Iterator[Reading]:
    """Memory of the server with 5 million messages that wait for their channel's consumer."""
    while True:
        with scratch_folder() as folder, server(folder) as started, connect_ws(started) as made:
            create(made, "c")
            _fill(made, BACKLOG)
            yield Reading(_resident_mib(started.pid))
