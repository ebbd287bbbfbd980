"""EventMesh end to end: a `babelbus serve` process and clients that speak over plain sockets.

Payloads of 100 bytes. Load clients write requests that were made before the clock starts, and count answers. Figures
whose name ends with `flushed` wait for `fdatasync` before each acknowledgement, the others for the write.
"""

import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from babelbus.protocols.eventmesh.stubs import legacy_pb2
from bench.frame import Reading, figure
from bench.workload import PAYLOAD, SECONDS, latency_note, scratch_folder
from bench.worterbuch import pipelined

MESSAGES = 100_000
CONNECTIONS = 32
MEMBERS = 4
SESSIONS = 1000
PUSHES = 20_000
NEW = 13
HEAD = struct.Struct(">13sii")
TOPIC = "bench"
TEXT = PAYLOAD.decode()
AGENT = {"version": "1", "purpose": "sub", "group": "bench", "pid": 1}
PACKAGE = "/eventmesh.common.protocol.grpc"
READ_BYTES = 2**20
WINDOW = 65_535
WINDOW_MAX = 2**31 - 1


class Started(msgspec.Struct, frozen=True):
    """A server that runs."""

    addresses: dict[str, str]
    pid: int

    def dial(self, listener: str) -> socket.socket:
        host, _, port = self.addresses[listener].rpartition(":")
        made = socket.create_connection((host, int(port)), timeout=30)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made


@contextmanager
def server(folder: str, ack: str = "written") -> Iterator[Started]:
    """Run `babelbus serve` on a folder; it is killed at the end, as a crash would."""
    command = [str(Path(sys.executable).parent / "babelbus"), "serve", "--json", "--data-folder", f"{folder}/data"]
    process = subprocess.Popen(
        [*command, "--server-any-port", "--no-sbus-enabled", "--topics-ack", ack, "--log-level", "error",
         "--eventmesh-webhook-networks", "127.0.0.0/8"],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield Started(json.loads(process.stdout.readline())["addresses"], process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


# -- TCP ---------------------------------------------------------------------------------------------------------------


def frame(cmd: str, seq: str, body: object = None) -> bytes:
    header = json.dumps({"cmd": cmd, "command": cmd, "code": 0, "seq": seq}, separators=(",", ":")).encode()
    data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    return HEAD.pack(b"EventMesh0000", len(header) + len(data) + NEW, len(header)) + header + data


def publishes(count: int, cmd: str = "ASYNC_MESSAGE_TO_SERVER") -> bytes:
    """Return requests with a key each, as the examples of the SDKs make them; records of one key go one by one."""
    bodies = [
        {"topic": TOPIC, "properties": {"ttl": "30000", "keys": f"{number:016}"}, "body": TEXT}
        for number in range(count)
    ]
    return b"".join([frame(cmd, f"{number:010}", body) for number, body in enumerate(bodies)])


@contextmanager
def session(started: Started, *subscriptions: dict[str, str], group: str = "bench") -> Iterator[socket.socket]:
    """A session that listens to the subscriptions."""
    with started.dial("eventmesh-tcp") as made:
        asked = [frame("HELLO_REQUEST", "h", {**AGENT, "group": group})]
        asked += [frame("SUBSCRIBE_REQUEST", "s", {"topicList": [item]}) for item in subscriptions]
        asked += [frame("LISTEN_REQUEST", "l")] * bool(subscriptions)
        for one in asked:
            made.sendall(one)
            assert b'"code":0' in made.recv(READ_BYTES)
        yield made


def _publish(ack: str) -> Iterator[Reading]:
    requests = publishes(MESSAGES)
    with scratch_folder() as folder, server(folder, ack) as started, session(started) as made:
        while True:
            yield Reading(pipelined(made, requests, MESSAGES, b'"desc":"success"'))


@figure("eventmesh.tcp_publish", unit="msgs/s", target=120_000)
def tcp_publish() -> Iterator[Reading]:
    """One connection, pipelined, each message acknowledged after the write."""
    yield from _publish("written")


@figure("eventmesh.tcp_publish_flushed", unit="msgs/s", target=60_000)
def tcp_publish_flushed() -> Iterator[Reading]:
    """The same after the flush."""
    yield from _publish("flushed")


class _Member:
    """A subscriber that acknowledges each push."""

    def __init__(self, made: socket.socket) -> None:
        made.setblocking(False)
        self.socket = made
        self.count = 0
        self._data = b""
        self._unsent = b""

    def work(self) -> None:
        data = self._data + self.socket.recv(READ_BYTES)
        start, size, acks = 0, len(data), []
        while size - start >= HEAD.size:
            _, length, header = HEAD.unpack_from(data, start)
            end = start + HEAD.size + length - NEW
            if end > size:
                break
            head = data[start + HEAD.size : start + HEAD.size + header]
            seq = head[head.index(b'"seq":"') + 7 :].partition(b'"')[0]
            reply = b'{"cmd":"ASYNC_MESSAGE_TO_CLIENT_ACK","command":"ASYNC_MESSAGE_TO_CLIENT_ACK","seq":"%b"}' % seq
            acks.append(HEAD.pack(b"EventMesh0000", len(reply) + NEW, len(reply)) + reply)
            start = end
        self._data = data[start:]
        self.count += len(acks)
        self._unsent += b"".join(acks)
        self.flush()

    def flush(self) -> None:
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :] if self._unsent else b""
        except BlockingIOError:
            pass


@figure("eventmesh.tcp_deliver", unit="msgs/s", target=120_000)
def tcp_deliver() -> Iterator[Reading]:
    """A backlog of one group, four members, each push acknowledged."""
    requests = publishes(MESSAGES)
    item = {"topic": TOPIC, "mode": "CLUSTERING", "type": "ASYNC"}
    number = 0
    with scratch_folder() as folder, server(folder) as started:
        while True:
            number += 1
            with session(started, item, group=f"g{number}"):
                pass  # the group begins here
            with session(started) as publisher:
                pipelined(publisher, requests, MESSAGES, b'"desc":"success"')
            with ExitStack() as stack:
                begun = time.perf_counter()
                sockets = [stack.enter_context(session(started, item, group=f"g{number}")) for _ in range(MEMBERS)]
                members = {made.fileno(): _Member(made) for made in sockets}
                poller = select.epoll()
                for one in members:
                    poller.register(one, select.EPOLLIN)
                while sum(member.count for member in members.values()) < MESSAGES:
                    for one, _ in poller.poll(1):
                        members[one].work()
                    for member in members.values():
                        member.flush()
                poller.close()
                yield Reading(MESSAGES / (time.perf_counter() - begun))


@figure("eventmesh.request_reply", unit="ms", target=0.5, lower_is_better=True)
def request_reply() -> Iterator[Reading]:
    """One request in flight over TCP, p50 of the round trip."""
    item = {"topic": TOPIC, "mode": "CLUSTERING", "type": "SYNC"}
    body = {"topic": TOPIC, "properties": {"ttl": "30000"}, "body": TEXT}
    with (
        scratch_folder() as folder,
        server(folder) as started,
        session(started, item, group="responders") as responder,
        session(started) as requester,
    ):
        while True:
            found = []
            until = time.perf_counter() + SECONDS
            while time.perf_counter() < until:
                begun = time.perf_counter()
                requester.sendall(frame("REQUEST_TO_SERVER", "r", body))
                pushed = responder.recv(READ_BYTES)
                _, length, header = HEAD.unpack_from(pushed)
                message = json.loads(pushed[HEAD.size + header : HEAD.size + length - NEW])
                responder.sendall(frame("RESPONSE_TO_SERVER", "x", message))
                assert b"RESPONSE_TO_CLIENT" in requester.recv(READ_BYTES)
                found.append(time.perf_counter() - begun)
            yield Reading(sorted(found)[len(found) // 2] * 1000, note=latency_note(found))


@figure("server.idle_eventmesh_mib", unit="MiB", target=60, lower_is_better=True)
def idle_sessions() -> Iterator[Reading]:
    """Memory of 1,000 subscribed TCP sessions above that of the server without them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    item = {"topic": TOPIC, "mode": "CLUSTERING", "type": "ASYNC"}
    while True:
        with scratch_folder() as folder, server(folder) as started, ExitStack() as stack:
            before = _resident_mib(started.pid)
            for number in range(SESSIONS):
                stack.enter_context(session(started, item, group=f"g{number % 50}"))
            yield Reading(_resident_mib(started.pid) - before)


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# -- HTTP --------------------------------------------------------------------------------------------------------------


def http_publish() -> bytes:
    fields = {"producergroup": "P", "topic": TOPIC, "content": TEXT, "bizseqno": "1", "uniqueid": "2", "ttl": "30000"}
    form = urlencode(fields)
    lines = ["POST / HTTP/1.1", "Host: localhost", "code: 104", "version: 1.0", "protocoltype: eventmeshmessage"]
    lines += ["Content-Type: application/x-www-form-urlencoded", f"Content-Length: {len(form)}", "", form]
    return "\r\n".join(lines).encode()


@figure("eventmesh.http_publish", unit="msgs/s", target=15_000)
def http_publish_32() -> Iterator[Reading]:
    """32 keep-alive connections of one request at a time, each answered after the flush."""
    request = http_publish()
    with scratch_folder() as folder, server(folder, "flushed") as started, ExitStack() as stack:
        made = [stack.enter_context(started.dial("eventmesh-http")) for _ in range(CONNECTIONS)]
        connections = {one.fileno(): one for one in made}
        poller = select.epoll()
        for fileno in connections:
            poller.register(fileno, select.EPOLLIN)
        while True:
            done, begun = 0, time.perf_counter()
            for one in made:
                one.sendall(request)
            while time.perf_counter() < begun + SECONDS:
                for number, _ in poller.poll():
                    assert b'"retCode":0' in connections[number].recv(READ_BYTES)
                    connections[number].sendall(request)
                    done += 1
            seconds = time.perf_counter() - begun
            for one in made:
                one.recv(READ_BYTES)
            yield Reading(done / seconds)


HOOK = """
import asyncio, sys
ANSWER = b'HTTP/1.1 200 OK\\r\\ncontent-length: 13\\r\\n\\r\\n{"retCode":1}'
count = 0
class Hook(asyncio.Protocol):
    def connection_made(self, transport): self.transport, self.data = transport, b""
    def data_received(self, data):
        global count
        self.data += data
        while True:
            head, found, rest = self.data.partition(b"\\r\\n\\r\\n")
            if not found: return
            size = int(head.lower().split(b"content-length: ")[1].split(b"\\r\\n")[0])
            if len(rest) < size: return
            self.data = rest[size:]
            self.transport.write(ANSWER)
            if head.startswith(b"POST"):
                count += 1
                if not count % 1000: print(count, flush=True)
async def main():
    server = await asyncio.get_running_loop().create_server(Hook, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()
import uvloop
uvloop.run(main())
"""
"""A webhook that answers at once; it prints its port, then a line for each 1,000 pushes."""


@figure("eventmesh.http_push", unit="msgs/s", target=8_000)
def http_push() -> Iterator[Reading]:
    """A backlog that is pushed to one webhook of this machine, which answers at once."""
    with scratch_folder() as folder, server(folder) as started:
        hook = subprocess.Popen([sys.executable, "-c", HOOK], stdout=subprocess.PIPE, text=True)
        assert hook.stdout is not None
        try:
            url = f"http://127.0.0.1:{int(hook.stdout.readline())}/"
            count = wanted = 0
            with started.dial("eventmesh-http") as made:
                while True:
                    form = urlencode({"topic": json.dumps([{"topic": TOPIC}]), "url": url, "consumerGroup": "g"})
                    _ask(made, "206", form)
                    begun = time.perf_counter()
                    with session(started) as publisher:
                        pipelined(publisher, publishes(PUSHES), PUSHES, b'"desc":"success"')
                    wanted += PUSHES
                    while count < wanted:
                        count = int(hook.stdout.readline())
                    yield Reading(PUSHES / (time.perf_counter() - begun))
        finally:
            hook.kill()
            hook.wait()
            hook.stdout.close()


def _ask(made: socket.socket, code: str, form: str) -> None:
    head = f"POST / HTTP/1.1\r\nHost: localhost\r\ncode: {code}\r\nContent-Length: {len(form)}\r\n\r\n"
    made.sendall(head.encode() + form.encode())
    assert b'"retCode":0' in made.recv(READ_BYTES)


# -- gRPC --------------------------------------------------------------------------------------------------------------

IDENTITY = {"env": "e", "idc": "i", "ip": "1.1.1.1", "pid": "7", "sys": "s", "username": "u", "password": "p"}


def _header() -> Any:
    return legacy_pb2.RequestHeader(**IDENTITY, language="JAVA")


def _message() -> Any:
    return legacy_pb2.SimpleMessage(
        header=_header(), producerGroup="P", topic=TOPIC, content=TEXT, ttl="30000", uniqueId="1", seqNum="2"
    )


def _batch() -> Any:
    item = legacy_pb2.BatchMessage.MessageItem
    items = [item(content=TEXT, ttl="1", uniqueId=str(number), seqNum="2") for number in range(100)]
    return legacy_pb2.BatchMessage(header=_header(), producerGroup="P", topic=TOPIC, messageItem=items)


def _http2(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _field(kind: bytes, *texts: str) -> bytes:
    return kind + b"".join(bytes((len(text),)) + text.encode() for text in texts)


class _Calls:
    """One method of gRPC over one HTTP/2 connection, as far as a load needs it.

    gRPC's own client in Python takes 60 us for a message of a stream and 150 us for a call: it was the slower half.
    """

    def __init__(self, made: socket.socket, method: str, message: Any) -> None:
        self.messages = 0
        """Messages that came."""
        self.ended = 0
        """Calls that the server has ended."""
        self.answer = b""
        """How each message begins."""
        self._socket = made
        self._data = self._message = b""
        self._owed = 0
        self._stream = 1
        self._room = WINDOW
        self._headers = b"".join((
            b"\x83\x86", _field(b"\x04", f"{PACKAGE}.{method}"), _field(b"\x01", "localhost"),
            _field(b"\x00", "content-type", "application/grpc"), _field(b"\x00", "te", "trailers"),
        ))  # fmt: skip
        encoded = message.SerializeToString()
        self._body = b"\0" + len(encoded).to_bytes(4, "big") + encoded
        settings = b"\0\x04" + WINDOW_MAX.to_bytes(4, "big")
        window = (WINDOW_MAX - WINDOW).to_bytes(4, "big")
        made.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _http2(4, 0, 0, settings) + _http2(8, 0, 0, window))

    def begin(self, count: int, *, end: bool = True) -> None:
        """Begin calls; those that the server's window has no room for begin later."""
        self._owed += count
        frames = []
        while self._owed and self._room >= len(self._body):
            self._owed -= 1
            self._room -= len(self._body)
            frames += [_http2(1, 4, self._stream, self._headers), _http2(0, int(end), self._stream, self._body)]
            self._stream += 2
        self._socket.sendall(b"".join(frames))

    def work(self) -> None:
        """Read what has come."""
        data = self._data + self._socket.recv(READ_BYTES)
        start, size, replies = 0, len(data), b""
        while size - start >= 9:
            end = start + 9 + int.from_bytes(data[start : start + 3], "big")
            if end > size:
                break
            kind, flags, payload = data[start + 3], data[start + 4], data[start + 9 : end]
            start = end
            if kind == 0:
                self._count(payload)
            elif kind == 8 and not any(data[end - len(payload) - 4 : end - len(payload)]):
                self._room += int.from_bytes(payload, "big")
            elif kind in (4, 6) and not flags:  # settings and pings are acknowledged
                replies += _http2(kind, 1, 0, payload if kind == 6 else b"")
            assert kind not in (3, 7), payload  # nothing is reset
            self.ended += kind == 1 and flags & 1
        self._data = data[start:]
        if replies:
            self._socket.sendall(replies)

    def _count(self, payload: bytes) -> None:
        data = self._message + payload
        start = 0
        while len(data) - start >= 5:
            end = start + 5 + int.from_bytes(data[start + 1 : start + 5], "big")
            if end > len(data):
                break
            assert data.startswith(self.answer, start + 5)
            self.messages += 1
            start = end
        self._message = data[start:]


def _callers(method: str, message: Any, events: int) -> Iterator[Reading]:
    with scratch_folder() as folder, server(folder) as started, started.dial("eventmesh-grpc") as made:
        calls = _Calls(made, f"PublisherService/{method}", message)
        calls.answer = legacy_pb2.Response(respCode="0").SerializeToString()
        while True:
            before, begun = calls.ended, time.perf_counter()
            calls.begin(CONNECTIONS)
            while time.perf_counter() < begun + SECONDS:
                ended = calls.ended
                calls.work()
                calls.begin(calls.ended - ended)
            done, seconds = calls.ended - before, time.perf_counter() - begun
            while calls.ended < before + done + CONNECTIONS:
                calls.work()
            assert calls.messages == calls.ended
            yield Reading(done * events / seconds)


@figure("eventmesh.grpc_publish", unit="msgs/s", target=5_000)
def grpc_publish() -> Iterator[Reading]:
    """32 callers, one call at a time each, answered after the write."""
    yield from _callers("publish", _message(), 1)


@figure("eventmesh.grpc_batch", unit="msgs/s", target=100_000)
def grpc_batch() -> Iterator[Reading]:
    """32 callers with batches of 100."""
    yield from _callers("batchPublish", _batch(), 100)


@figure("eventmesh.grpc_stream", unit="msgs/s", target=20_000)
def grpc_stream() -> Iterator[Reading]:
    """A backlog of one group, delivered on one stream."""
    count = 20_000
    asked = legacy_pb2.Subscription(header=_header(), consumerGroup="g")
    asked.subscriptionItems.add(topic=TOPIC)
    with scratch_folder() as folder, server(folder) as started, started.dial("eventmesh-grpc") as made:
        calls = _Calls(made, "ConsumerService/subscribeStream", asked)
        calls.begin(1, end=False)
        while not calls.messages:
            calls.work()
        while True:
            wanted = calls.messages + count
            with session(started) as publisher:
                begun = time.perf_counter()
                pipelined(publisher, publishes(count), count, b'"desc":"success"')
            while calls.messages < wanted:
                calls.work()
            yield Reading(count / (time.perf_counter() - begun))
