"""A pool of zbus workers that share a queue: part of `make demo`.

The queue is the topic that jebp published to; each flight goes to one of the workers. They speak zbus over WebSocket as
its clients do: create the channel, subscribe with a window, ask for more when half of it is used up.
"""

import json
import socket
import threading

from babelbus.client import Record
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


class Worker(threading.Thread):
    """One connection that works until all flights are done, by whomever."""

    def __init__(self, address: str, queue: str, finished: threading.Event) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._queue = queue
        self._finished = finished
        self.done: dict[int, object] = {}
        """Offset -> flight."""

    def run(self) -> None:
        """Subscribe and work."""
        host, _, port = self._address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            key = make_key()
            connection.sendall(encode_upgrade_request(self._address, "/", key))
            head = b""
            while (answer := read_upgrade_response(head)) is None:
                head += connection.recv(READ_BYTES)
            check_upgrade_response(answer[0], key)
            decoder = Decoder(is_server=False, message_bytes_max=2**24)
            decoder.receive_data(answer[1])
            self._say(connection, cmd="create", mq=self._queue, channel=CHANNEL)
            self._say(connection, cmd="sub", mq=self._queue, channel=CHANNEL, window=str(WINDOW))
            connection.settimeout(0.2)
            while not self._finished.is_set():
                events = decoder.events()
                if not events:
                    try:
                        data = connection.recv(READ_BYTES)
                    except TimeoutError:
                        continue
                    if not data:
                        raise SystemExit("demo: the server closed a worker's connection")
                    decoder.receive_data(data)
                    continue
                self._work(connection, [event.data for event in events if isinstance(event, Message)])

    def _say(self, connection: socket.socket, **headers: str) -> None:
        connection.sendall(encode_texts([json.dumps({"headers": headers}).encode()], mask=True))

    def _work(self, connection: socket.socket, texts: list[bytes]) -> None:
        left = WINDOW
        for text in texts:
            message = json.loads(text)
            headers = message["headers"]
            if "status" in message:
                if message["status"] != 200:
                    raise SystemExit(f"demo: a worker was refused: {message}")
                continue
            self.done[int(headers["offset"])] = message["body"]
            left = int(headers["window"])
        if left <= WINDOW // 2:
            self._say(connection, cmd="sub", mq=self._queue, channel=CHANNEL, window=str(WINDOW), ack="false")


def share(address: str, queue: str, records: list[Record]) -> list[int]:
    """Let the workers take the whole queue; give how many flights each did. Each was done once, and is unchanged."""
    finished = threading.Event()
    workers = [Worker(address, queue, finished) for _ in range(WORKERS)]
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
