"""Jebp clients that are only a load.

Some create one record each, wait for its ack, and do it again; one sends many. All seal their requests before.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Sequence

import uvloop

from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.decoder import ClientDecoder
from babelbus.protocols.jebp.handshake import ClientHandshake
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.jebp.messages import CreateRecord, Response

SEALED_AHEAD = 256
"""Requests of a connection that are sealed at a time."""
ANSWER_BYTES = 21
"""The frame of an answer to a record: head, tag and status."""


class OneAtATime(asyncio.Protocol):
    """One connection: a record, its ack, the next record. `latencies` are seconds from write to ack.

    Requests are sealed many at a time before they are sent, and acks are opened at the end, by `check`: the server is
    measured, as with redis-benchmark, which makes its request once. A client that sealed and opened each message in
    its turn took a third of the machine.
    """

    def __init__(self, identity: Identity, topic: str, payload: bytes, on_ready: Callable[[], None]) -> None:
        self._handshake = ClientHandshake(identity, trust=lambda _fingerprint: True)
        self._requests = [encode_request(CreateRecord(topic, 0, payload))] * SEALED_AHEAD
        self._on_ready = on_ready
        self._decoder: ClientDecoder | None = None
        self._frames: list[bytes] = []
        self._answers: list[bytes] = []
        self._missing_bytes = 0
        self._sent_at = 0.0
        self.running = False
        self.latencies: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # uvloop's is none by type
        self._transport.write(self._handshake.begin())

    def data_received(self, data: bytes) -> None:
        if self._decoder is None:
            self._transport.write(self._handshake.receive_data(data))
            established = self._handshake.established
            if established is not None:
                self._sealer, self._decoder = established.sealer, ClientDecoder(established.opener)
                self._seal()
                self._on_ready()
            return
        self._answers.append(data)
        self._missing_bytes -= len(data)
        if self._missing_bytes <= 0:
            self.latencies.append(time.perf_counter() - self._sent_at)
            if self.running:
                self.send()

    def send(self) -> None:
        self._missing_bytes = ANSWER_BYTES
        self._sent_at = time.perf_counter()
        self._transport.write(self._frames.pop())
        if not self._frames:
            self._seal()

    def _seal(self) -> None:
        sealed = bytes(self._sealer.seal_many(self._requests))
        size = len(sealed) // SEALED_AHEAD
        self._frames = [sealed[at : at + size] for at in range(0, len(sealed), size)]
        self._frames.reverse()

    def check(self) -> None:
        """Open all answers, and check that each says that its record was created."""
        assert self._decoder is not None
        self._decoder.receive_data(b"".join(self._answers))
        answers = self._decoder.events()
        assert len(answers) == len(self.latencies)
        refused = [answer for answer in answers if not isinstance(answer, Response) or answer.status != 0xA1]
        assert not refused, refused[0]

    def close(self) -> None:
        self._transport.close()


async def _run(
    port: int, identity: Identity, topic: str, payload: bytes, clients: int, seconds: float
) -> tuple[float, list[float]]:
    loop = asyncio.get_running_loop()
    ready = asyncio.Semaphore(0)
    protocols = []
    for _ in range(clients):
        _, protocol = await loop.create_connection(
            lambda: OneAtATime(identity, topic, payload, ready.release), "127.0.0.1", port
        )
        protocols.append(protocol)
    for _ in range(clients):
        await ready.acquire()
    begun = time.perf_counter()
    for protocol in protocols:
        protocol.running = True
        protocol.send()
    await asyncio.sleep(seconds)
    passed = time.perf_counter() - begun
    latencies = []
    for protocol in protocols:
        protocol.running = False
        latencies += protocol.latencies
        protocol.close()
        protocol.check()
    return len(latencies) / passed, latencies


def one_at_a_time(
    port: int, identity: Identity, topic: str, payload: bytes, *, clients: int, seconds: float
) -> tuple[float, list[float]]:
    """Give acknowledged records a second over all connections, and the latency of each in seconds."""
    return uvloop.run(_run(port, identity, topic, payload, clients, seconds))


class SealedConnection:
    """A jebp connection on a plain socket, for requests that are sealed before the clock starts."""

    def __init__(self, port: int, identity: Identity) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = ClientHandshake(identity, trust=lambda _fingerprint: True)
        self.socket.sendall(handshake.begin())
        while handshake.established is None:
            self.socket.sendall(handshake.receive_data(self.socket.recv(65536)))
        self._sealer = handshake.established.sealer
        self._decoder = ClientDecoder(handshake.established.opener)
        self._decoder.receive_data(handshake.established.surplus)

    def seal(self, requests: Sequence[bytes]) -> bytes:
        """Return the frames of requests; send the frames in the order in which they were sealed."""
        return bytes(self._sealer.seal_many(requests))

    def count(self, data: bytes) -> int:
        """Return how many requests were answered with success by what one read brought."""
        self._decoder.receive_data(data)
        answers = self._decoder.events()
        refused = [answer for answer in answers if not isinstance(answer, Response) or answer.status != 0xA1]
        assert not refused, refused[0]
        return len(answers)
