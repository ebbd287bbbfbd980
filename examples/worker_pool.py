"""zbus workers: part of `make demo`.

Workers share a queue, which is the topic that jebp published to; each flight goes to one of the workers. Another
worker is a service that answers questions of any protocol. They speak zbus over WebSocket as its clients do: create
the channel, subscribe with a window, ask for more when half of it is used up.
"""

import json
import socket
import threading
from types import TracebackType
from typing import Any

from babelbus.client import Record
from babelbus.protocols.zbus.signature import canonical_text, digest
from babelbus.wire.websocket import (
    Decoder,
    Message,
    check_upgrade_response,
    encode_texts,
    encode_upgrade_request,
    make_key,
    read_upgrade_response,
)

CHANNEL = "workers"
WORKERS = 4
WINDOW = 200
READ_BYTES = 2**18
SECONDS = 120.0


class Connection:
    """One connection of a zbus client."""

    def __init__(self, address: str, worker: tuple[str, str]) -> None:
        self._api_key, self._secret = worker
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=SECONDS)
        key = make_key()
        self._socket.sendall(encode_upgrade_request(address, "/", key))
        head = b""
        while (answer := read_upgrade_response(head)) is None:
            head += self._socket.recv(READ_BYTES)
        check_upgrade_response(answer[0], key)
        self._decoder = Decoder(is_server=False, message_bytes_max=2**24)
        self._decoder.receive_data(answer[1])

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._socket.close()

    def say(self, body: object = None, **headers: str) -> None:
        """Send a message with its signature."""
        signed = {**headers, "apiKey": self._api_key}
        message: dict[str, object] = {"headers": signed} if body is None else {"headers": signed, "body": body}
        signed["signature"] = digest(self._secret, canonical_text(json.dumps(message).encode()))
        self._socket.sendall(encode_texts([json.dumps(message).encode()], mask=True))

    def receive(self, seconds: float = SECONDS) -> list[dict[str, Any]]:
        """Return the messages that came; raise `TimeoutError` if there is none for so long."""
        self._socket.settimeout(seconds)
        while not (events := self._decoder.events()):
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise SystemExit("demo: the server closed a worker's connection")
            self._decoder.receive_data(data)
        messages = [json.loads(event.data) for event in events if isinstance(event, Message)]
        refused = next((message for message in messages if message.get("status", 200) != 200), None)
        if refused is not None:
            raise SystemExit(f"demo: a worker was refused: {refused}")
        return messages

    def work_on(self, queue: str, channel: str) -> None:
        """Create queue and channel, and subscribe."""
        self.say(cmd="create", mq=queue, channel=channel)
        self.say(cmd="sub", mq=queue, channel=channel, window=str(WINDOW))


class Worker(threading.Thread):
    """One connection that works until all flights are done, by whomever."""

    def __init__(self, address: str, worker: tuple[str, str], queue: str, finished: threading.Event) -> None:
        super().__init__(daemon=True)
        self._address, self._worker = address, worker
        self._queue = queue
        self._finished = finished
        self.done: dict[int, object] = {}
        """Offset -> flight."""

    def run(self) -> None:
        """Subscribe and work."""
        with Connection(self._address, self._worker) as connection:
            connection.work_on(self._queue, CHANNEL)
            while not self._finished.is_set():
                try:
                    messages = connection.receive(0.2)
                except TimeoutError:
                    continue
                self._work(connection, messages)

    def _work(self, connection: Connection, messages: list[dict[str, Any]]) -> None:
        left = WINDOW
        for message in messages:
            if "status" not in message:
                self.done[int(message["headers"]["offset"])] = message["body"]
                left = int(message["headers"]["window"])
        if left <= WINDOW // 2:
            connection.say(cmd="sub", mq=self._queue, channel=CHANNEL, window=str(WINDOW), ack="false")


class Service(threading.Thread):
    """A worker that answers the next question with the flight of its key."""

    def __init__(self, address: str, worker: tuple[str, str], queue: str, flights: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self._flights = flights
        self._connection = Connection(address, worker)
        self._connection.work_on(queue, queue)
        self._messages: list[dict[str, Any]] = []
        for _ in ("create", "sub"):
            self._next()

    def _next(self) -> dict[str, Any]:
        while not self._messages:
            self._messages = self._connection.receive()
        return self._messages.pop(0)

    def run(self) -> None:
        """Answer one question."""
        with self._connection as connection:
            question = self._next()
            headers = question["headers"]
            connection.say(self._flights[question["body"]], cmd="route", target=headers["source"], id=headers["id"])


def share(address: str, proof: tuple[str, str], queue: str, records: list[Record]) -> list[int]:
    """Let the workers take the whole queue; give how many flights each did. Each was done once, and is unchanged."""
    finished = threading.Event()
    workers = [Worker(address, proof, queue, finished) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    try:
        waited = threading.Event()
        for _ in range(int(SECONDS * 20)):
            if sum(len(worker.done) for worker in workers) >= len(records):
                break
            waited.wait(0.05)
    finally:
        finished.set()
    for worker in workers:
        worker.join(SECONDS)
    counts = [len(worker.done) for worker in workers]
    together: dict[int, object] = {}
    for worker in workers:
        together.update(worker.done)
    if sum(counts) != len(records) or len(together) != len(records):
        raise SystemExit(f"demo: {len(records):,} flights were in the queue, the workers did {sum(counts):,}")
    for offset, record in enumerate(records):
        if together[offset] != json.loads(record.payload or b""):
            raise SystemExit(f"demo: the flight at offset {offset} is not what was published")
    return counts
