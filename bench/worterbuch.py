"""Wörterbuch end to end: a `babelbus serve` process with state logged at `written`, clients that speak plain sockets.

Values of 100 bytes. A load client writes requests that were made before the clock starts, and counts answers.
"""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from babelbus.clients.worterbuch.codec import encode_message
from babelbus.protocols.worterbuch.messages import ClientMessage, Get, PGet, PSubscribe, Set
from babelbus.wire.websocket import encode_texts
from babelbus.wire.websocket.upgrade import make_key
from bench.frame import Peer, Reading, figure
from bench.peers import redis
from bench.workload import SECONDS, scratch_folder

VALUE = b'"' + b"x" * 98 + b'"'
REQUESTS = 300_000
KEYS = 1000
TREE_KEYS = 1_000_000
SUBSCRIBERS = 100
READ_BYTES = 2**20
WINDOW_BYTES = 256 * 1024
"""Requests that are under way at once: some chunks of the server, little enough to stay in the sockets' buffers."""


class Started(msgspec.Struct, frozen=True):
    """A server that runs: where it listens, its process, and how long it took until it did."""

    tcp: tuple[str, int]
    web: tuple[str, int]
    admin: tuple[str, int]
    pid: int
    seconds: float


@contextmanager
def server(folder: str) -> Iterator[Started]:
    """Run `babelbus serve` on a folder; it is killed at the end, as a crash would."""
    command = [str(Path(sys.executable).parent / "babelbus"), "serve", "--json", "--data-folder", f"{folder}/data"]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--server-any-port", "--no-sbus-enabled", "--log-level", "error"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        addresses = json.loads(process.stdout.readline())["addresses"]
        seconds = time.perf_counter() - begun
        tcp, web, admin = (_address(addresses[name]) for name in ("worterbuch-tcp", "worterbuch", "admin"))
        yield Started(tcp, web, admin, process.pid, seconds)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def connect_tcp(started: Started) -> socket.socket:
    """Connect, and read the welcome."""
    made = socket.create_connection(started.tcp, timeout=30)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while not made.recv(65536).endswith(b"\n"):
        pass
    return made


def connect_ws(started: Started) -> socket.socket:
    """Connect, upgrade, and read the welcome."""
    made = socket.create_connection(started.web, timeout=30)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lines = ["GET /ws HTTP/1.1", "host: localhost", "connection: upgrade", "upgrade: websocket"]
    lines += ["sec-websocket-version: 13", f"sec-websocket-key: {make_key()}", "", ""]
    made.sendall("\r\n".join(lines).encode())
    received = b""
    while b"clientId" not in received:
        received += made.recv(65536)
    return made


def lines_of(messages: list[ClientMessage]) -> bytes:
    return b"".join([encode_message(message) + b"\n" for message in messages])


def frames_of(messages: list[ClientMessage]) -> bytes:
    return encode_texts([encode_message(message) for message in messages], mask=True)


def pipelined(made: socket.socket, requests: bytes, count: int, mark: bytes) -> float:
    """Send requests as fast as they are taken, with a bounded number under way; give the answers a second."""
    room = threading.Semaphore(0)
    view = memoryview(requests)
    share = len(requests) / count

    def send() -> None:
        sent = 0
        while sent < len(view):
            made.sendall(view[sent : sent + WINDOW_BYTES])
            sent += WINDOW_BYTES
            room.acquire()

    begun = time.perf_counter()
    sender = threading.Thread(target=send)
    sender.start()
    room.release(2)
    answered, released = 0, 0
    rest = b""
    while answered < count:
        data = rest + made.recv(READ_BYTES)
        answered += data.count(mark)
        rest = data[-(len(mark) - 1) :] if len(mark) > 1 else b""
        due = int(answered * share // WINDOW_BYTES)
        if due > released:
            room.release(due - released)
            released = due
    seconds = time.perf_counter() - begun
    room.release(10**6)
    sender.join()
    return count / seconds


def sets() -> list[ClientMessage]:
    return [Set(number, f"bench/{number % KEYS}/value", VALUE) for number in range(1, REQUESTS + 1)]


def gets() -> list[ClientMessage]:
    return [Get(number, f"bench/{number % KEYS}/value") for number in range(1, REQUESTS + 1)]


def _redis(command: list[str]) -> Callable[[], Iterator[Reading]]:
    def measure() -> Iterator[Reading]:
        with redis.server(flushed=False) as port:
            while True:
                yield redis.benchmark_command(port, command, pipeline=500, clients=1, entries=REQUESTS)

    return measure


REDIS_SET = Peer("redis-benchmark SET", _redis(["SET", "key:__rand_int__", "x" * 100]))
REDIS_GET = Peer("redis-benchmark GET", _redis(["GET", "key:__rand_int__"]))


@figure("worterbuch.set_tcp", unit="sets/s", target=250_000, peers=[REDIS_SET])
def set_tcp() -> Iterator[Reading]:
    """One connection, pipelined, each set acknowledged and logged."""
    requests = lines_of(sets())
    with scratch_folder() as folder, server(folder) as started, connect_tcp(started) as made:
        while True:
            yield Reading(pipelined(made, requests, REQUESTS, b"\n"))


@figure("worterbuch.set_distinct", unit="sets/s", target=225_000)
def set_distinct() -> Iterator[Reading]:
    """A million sets of as many keys over one connection; each time in a new server."""
    while True:
        with scratch_folder() as folder, server(folder) as started, connect_tcp(started) as made:
            before = _processor_seconds(started.pid)
            rate = _fill(made)
            spent = (_processor_seconds(started.pid) - before) / TREE_KEYS
            yield Reading(rate, f"{spent * 1e6:.1f} us of the server's processor time a set")


@figure("worterbuch.set_ws", unit="sets/s", target=200_000)
def set_ws() -> Iterator[Reading]:
    """The same over WebSocket."""
    requests = frames_of(sets())
    with scratch_folder() as folder, server(folder) as started, connect_ws(started) as made:
        while True:
            yield Reading(pipelined(made, requests, REQUESTS, b'"ack"'))


@figure("worterbuch.get_tcp", unit="gets/s", target=350_000, peers=[REDIS_GET])
def get_tcp() -> Iterator[Reading]:
    """One connection, pipelined, values of 100 bytes."""
    requests = lines_of(gets())
    with scratch_folder() as folder, server(folder) as started, connect_tcp(started) as made:
        pipelined(made, lines_of(sets()), REQUESTS, b"\n")
        while True:
            yield Reading(pipelined(made, requests, REQUESTS, b"\n"))


def round_trips(made: socket.socket, encode: Callable[[int], bytes]) -> Reading:
    """Send a request, take its line of an answer, then send the next; return the median in microseconds.

    The client waits actively, and a request is encoded before its clock starts: a client that sleeps until its answer
    comes measures the wake-up of its own processor as well.

    Raises:
        TimeoutError: no answer came within 30 seconds.
    """
    made.setblocking(False)
    latencies, number, until = list[float](), 0, time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        number += 1
        request = encode(number)
        begun = time.perf_counter()
        made.sendall(request)
        _receive_line(made, begun + 30)
        latencies.append(time.perf_counter() - begun)
    latencies.sort()
    return Reading(statistics.median(latencies) * 1e6, f"p99 {latencies[len(latencies) * 99 // 100] * 1e6:.0f} us")


def _receive_line(made: socket.socket, deadline: float) -> None:
    received = b""
    while not received.endswith(b"\n"):
        try:
            data = made.recv(65536)
        except BlockingIOError:
            if time.perf_counter() > deadline:
                raise TimeoutError(f"no answer within 30 seconds, but {received!r}") from None
            continue
        if not data:
            raise ConnectionResetError(f"the server closed the connection behind {received!r}")
        received += data


def _redis_round_trips() -> Iterator[Reading]:
    with redis.server(flushed=False) as port, socket.create_connection(("127.0.0.1", port)) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = b"*3\r\n$3\r\nSET\r\n$9\r\nbench/rtt\r\n$%d\r\n%b\r\n" % (len(VALUE), VALUE)
        while True:
            yield round_trips(made, lambda _: request)


@figure(
    "worterbuch.rtt_p50_us",
    unit="us",
    target=60,
    lower_is_better=True,
    peers=[Peer("Redis SET with the same client", _redis_round_trips)],
)
def rtt() -> Iterator[Reading]:
    """One connection, a set and its ack, then the next; the client waits actively."""
    with scratch_folder() as folder, server(folder) as started, connect_tcp(started) as made:
        while True:
            yield round_trips(made, lambda number: encode_message(Set(number, "bench/rtt", VALUE)) + b"\n")


def _fill(made: socket.socket) -> float:
    """Set a million keys; return the sets a second, without the time in which requests are made."""
    step, seconds = 50_000, 0.0
    for begin in range(0, TREE_KEYS, step):
        messages: list[ClientMessage] = [
            Set(number, f"plant/{number // 1000}/{number // 10 % 100}/{number % 10}", VALUE)
            for number in range(begin + 1, begin + step + 1)
        ]
        seconds += step / pipelined(made, lines_of(messages), step, b"\n")
    return TREE_KEYS / seconds


def _processor_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@figure("worterbuch.pget_ms", unit="ms", target=1.0, lower_is_better=True)
def pget() -> Iterator[Reading]:
    """A `pGet` that finds 10 keys among a million."""
    with scratch_folder() as folder, server(folder) as started, connect_tcp(started) as made:
        _fill(made)
        while True:
            latencies = []
            for number in range(1, 501):
                before = time.perf_counter()
                made.sendall(encode_message(PGet(number, f"plant/{number}/{number % 100}/?")) + b"\n")
                received = b""
                while not received.endswith(b"\n"):
                    received += made.recv(READ_BYTES)
                latencies.append(time.perf_counter() - before)
                assert received.count(b'"key"') == 10, received
            yield Reading(statistics.median(latencies) * 1e3)


@figure("worterbuch.bytes_per_key", unit="bytes", target=400, lower_is_better=True)
def bytes_per_key() -> Iterator[Reading]:
    """Memory of a key beyond key and value, of a million."""
    while True:
        with scratch_folder() as folder, server(folder) as started, connect_tcp(started) as made:
            before = _resident_bytes(started.pid)
            _fill(made)
            grown = _resident_bytes(started.pid) - before
            keys = sum(
                len(f"plant/{number // 1000}/{number // 10 % 100}/{number % 10}") for number in range(1, TREE_KEYS + 1)
            )
            whole = (before + grown) / 2**20
            note = f"{grown / 2**20:.0f} MiB in all, {whole:.0f} MiB with the server itself"
            yield Reading((grown - keys) / TREE_KEYS - len(VALUE), note)


@figure("worterbuch.load_1m_keys_s", unit="s", target=10, lower_is_better=True)
def load_1m_keys() -> Iterator[Reading]:
    """From the start of the process until it listens, after a kill, with a million keys."""
    with scratch_folder() as folder:
        with server(folder) as started, connect_tcp(started) as made:
            _fill(made)
        while True:
            with server(folder) as started, connect_tcp(started) as made:
                yield Reading(started.seconds)


@figure("worterbuch.fanout_100", unit="deliveries/s", target=400_000)
def fanout_100() -> Iterator[Reading]:
    """One publisher, 100 subscribers that read all; the readers are a process of their own."""
    with scratch_folder() as folder, server(folder) as started:
        while True:
            yield Reading(_fan_out(started))


def _fan_out(started: Started) -> float:
    """Publish for some time; give the deliveries a second that reached the subscribers."""
    sets_sent = 20_000
    requests = lines_of([Set(number, f"fan/{number % 16}", VALUE) for number in range(1, sets_sent + 1)])
    ready_read, ready_write = os.pipe()
    done_read, done_write = os.pipe()
    child = os.fork()
    if not child:
        try:
            _subscribe(started, sets_sent, ready_write, done_write)
        finally:
            os._exit(0)
    try:
        assert os.read(ready_read, 1) == b"r"
        with connect_tcp(started) as publisher:
            begun = time.perf_counter()
            pipelined(publisher, requests, sets_sent, b"\n")
            assert os.read(done_read, 1) == b"d"
            return sets_sent * SUBSCRIBERS / (time.perf_counter() - begun)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for descriptor in (ready_read, ready_write, done_read, done_write):
            os.close(descriptor)


def _subscribe(started: Started, expected: int, ready: int, done: int) -> None:
    """Read all events on all connections; tell when the subscriptions stand and when the last event came."""
    import select

    subscribers = [connect_tcp(started) for _ in range(SUBSCRIBERS)]
    for one in subscribers:
        one.sendall(encode_message(PSubscribe(1, "fan/?", live_only=True)) + b"\n")
        assert one.recv(65536).endswith(b"\n")
        one.setblocking(False)
    os.write(ready, b"r")
    poller = select.epoll()
    by_number = {one.fileno(): one for one in subscribers}
    for number in by_number:
        poller.register(number, select.EPOLLIN)
    left = expected * SUBSCRIBERS
    while left > 0:
        for number, _ in poller.poll():
            left -= by_number[number].recv(READ_BYTES).count(b"\n")
    os.write(done, b"d")
