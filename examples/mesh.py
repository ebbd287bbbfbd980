"""EventMesh on the bus: part of `make demo`.

A subscriber over TCP hears the flights that jebp publishes, and a client asks for a flight, which a zbus worker
answers. Both speak EventMesh as its Java SDK from 1.9 on does: a head with two lengths, a JSON header, a JSON body.
"""

import json
import socket
import struct
import threading
from types import TracebackType
from typing import Any

from babelbus.client import Record
from examples.worker_pool import Service

HEAD = struct.Struct(">13sii")
MAGIC = b"EventMesh0000"
SURPLUS = 13
"""Bytes that a frame counts beside header and body, of the 21 in front of them."""
SECONDS = 60.0
READ_BYTES = 2**20
QUESTIONS = "timetable"
USER = "passenger"


class Mesh:
    """One connection of a group."""

    def __init__(self, address: str, group: str, user: str, password: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=SECONDS)
        self._data = bytearray()
        self.ask("HELLO_REQUEST", {
            "version": "1.10.0", "purpose": "sub", "group": group, "username": user, "password": password,
        })  # fmt: skip

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._socket.close()

    def send(self, command: str, body: object = None, seq: str = "1") -> None:
        """Send a frame."""
        header = json.dumps({
            "cmd": command, "code": 0, "seq": seq, "properties": {"protocoltype": "eventmeshmessage"},
        }).encode()  # fmt: skip
        data = b"" if body is None else json.dumps(body).encode()
        self._socket.sendall(HEAD.pack(MAGIC, len(header) + len(data) + SURPLUS, len(header)) + header + data)

    def receive(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return header and body of the next frame."""
        while True:
            if len(self._data) >= HEAD.size:
                _, length, size = HEAD.unpack_from(self._data)
                end = HEAD.size + length - SURPLUS
                if len(self._data) >= end:
                    header = json.loads(self._data[HEAD.size : HEAD.size + size])
                    body = self._data[HEAD.size + size : end]
                    del self._data[:end]
                    return header, json.loads(body) if body else {}
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise SystemExit("demo: the server closed an EventMesh connection")
            self._data += data

    def try_to(self, command: str, body: object = None) -> dict[str, Any]:
        """Send a request, and return the header of its answer."""
        self.send(command, body)
        return self.receive()[0]

    def ask(self, command: str, body: object = None) -> None:
        """Send a request, and wait until it is granted."""
        header = self.try_to(command, body)
        if header["code"] != 0:
            raise SystemExit(f"demo: EventMesh refused {command}: {header}")

    def listen(self, topic: str) -> None:
        """Subscribe to a topic; messages come from now on."""
        self.ask("SUBSCRIBE_REQUEST", {"topicList": [{"topic": topic, "mode": "CLUSTERING", "type": "ASYNC"}]})
        self.ask("LISTEN_REQUEST")


class Listener(threading.Thread):
    """Hears a number of messages of a topic, each acknowledged."""

    def __init__(self, address: str, password: str, topic: str, count: int) -> None:
        super().__init__(daemon=True)
        self.heard: list[bytes] = []
        self._count = count
        self._mesh = Mesh(address, "demo", USER, password)
        self._mesh.listen(topic)

    def run(self) -> None:
        """Receive until all messages are there."""
        with self._mesh as mesh:
            while len(self.heard) < self._count:
                header, body = mesh.receive()
                self.heard.append(body["body"].encode())
                mesh.send(f"{header['cmd']}_ACK", seq=header["seq"])


def ask_for(address: str, password: str, zbus: str, worker: tuple[str, str], records: list[Record]) -> str:
    """Ask for the last flight by its key, and return the key; the answer of a zbus worker is that flight."""
    flights = {(record.key or b"").decode(): json.loads(record.payload or b"") for record in records}
    key = (records[-1].key or b"").decode()
    service = Service(zbus, worker, QUESTIONS, flights)
    service.start()
    with Mesh(address, "askers", USER, password) as asker:
        asker.send("REQUEST_TO_SERVER", {"topic": QUESTIONS, "body": key, "properties": {"ttl": "30000"}})
        _, reply = asker.receive()
    service.join(SECONDS)
    if json.loads(reply["body"]) != flights[key]:
        raise SystemExit(f"demo: the answer to {key} is not the flight: {reply}")
    return key


def be_refused(address: str, password: str, topic: str) -> str:
    """Publish to a topic without the right to it; return what the server says."""
    with Mesh(address, "demo", USER, password) as mesh:
        header = mesh.try_to("ASYNC_MESSAGE_TO_SERVER", {"topic": topic, "body": "{}", "properties": {}})
    if header["code"] == 0:
        raise SystemExit(f"demo: a message to {topic} without the right to it was taken")
    return str(header.get("desc"))
