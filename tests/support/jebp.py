"""A scripted jebp client without a socket, and one on a blocking socket: they say exactly what a test tells them to."""

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from babelbus.client import Client as BusClient
from babelbus.config import JebpSettings
from babelbus.core.access import ADMIN_RIGHTS, CLIENT_RIGHTS
from babelbus.core.access import Identity as Client
from babelbus.protocols.contract import Outbox
from babelbus.protocols.jebp.calls.call import Method
from babelbus.protocols.jebp.calls.methods import METHODS
from babelbus.protocols.jebp.codec import decode_batches, encode_request
from babelbus.protocols.jebp.decoder import ClientDecoder
from babelbus.protocols.jebp.handshake import ClientHandshake, Established, ServerHandshake
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.jebp.messages import (
    FROM_OFFSET,
    FROM_TIMESTAMP,
    CallItems,
    CreateRecord,
    CreateRecords,
    CreateTopic,
    Fetch,
    RemoveTopic,
    Response,
    Subscribe,
)
from babelbus.protocols.jebp.session import Session
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import encode_batch
from babelbus.records.record import Record
from tests.support.bus import NOW, SAFETY_NET_SECONDS, Bus

SERVER = Identity(b"\x53" * 32)
ADMIN = Identity(b"\x43" * 32)
GUEST = Identity(b"\x44" * 32)
TIMEOUT_SECONDS = SAFETY_NET_SECONDS


encode = msgspec.msgpack.encode


def create(topic: str, payload: bytes, timestamp: int = NOW, *, valid: bool = True) -> bytes:
    return encode_request(CreateRecord(topic, timestamp, payload, checksum_valid=valid))


async def create_singly(client: BusClient, topic: str, payloads: Iterable[bytes]) -> None:
    """Publish over a client's connection with command 12: a request and an answer for each record."""
    link = await client._keeper.get(None)
    responses = await link.call(*[create(topic, payload) for payload in payloads])
    assert {said(response) for response in responses} == {"a130"}


def create_many(
    topic: str, payloads: Iterable[bytes], *, partition: int = -1, producer: int = -1, sequence: int = -1
) -> bytes:
    data = encode_batch([Record(payload, timestamp=NOW) for payload in payloads]).data
    return encode_request(CreateRecords(topic, partition, producer, sequence, data))


def subscribe(*topics: str) -> bytes:
    return encode_request(Subscribe(topics))


def fetch(offset: int, bytes_max: int = 65_536) -> bytes:
    return encode_request(Fetch(FROM_OFFSET, offset, bytes_max))


def fetch_time(timestamp: int, bytes_max: int = 65_536) -> bytes:
    return encode_request(Fetch(FROM_TIMESTAMP, timestamp, bytes_max))


def create_topic(topic: str) -> bytes:
    return encode_request(CreateTopic(topic))


def remove_topic(topic: str) -> bytes:
    return encode_request(RemoveTopic(topic))


def said(response: Response) -> str:
    """The two bytes in front of a response, and its content, in hex: `a130` is a record created."""
    return bytes((response.status, 0x31 if response.repeat else 0x30)).hex() + bytes(response.content).hex()


def fetched(response: Response) -> dict[tuple[str, int], list[bytes | None]]:
    """What a successful fetch brought: topic and partition -> payloads."""
    assert said(response)[:4] == "a030"
    return {
        (batch.topic, batch.partition): [record.payload for record in iterate(decode_chunk(bytes(batch.records)))]
        for batch in decode_batches(response.content)
    }


class Pipe:
    """The transport of a session: keeps what is written until the client takes it."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.writes = 0
        self.grown = asyncio.Event()

    def write(self, data: bytes | bytearray) -> None:
        self.written += data
        self.writes += 1
        self.grown.set()

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def take(self) -> bytes:
        taken = bytes(self.written)
        self.written.clear()
        self.grown.clear()
        return taken


class Wire:
    """The client's end of an established connection: seals what it says, opens what it hears."""

    def __init__(self, established: Established, *, frame_bytes_max: int = 16 * 2**20) -> None:
        self._sealer = established.sealer
        self._decoder = ClientDecoder(established.opener, frame_bytes_max=frame_bytes_max)
        self._decoder.receive_data(established.surplus)
        self.items: list[tuple[int, int, bytes]] = []
        """Number, kind and body of the items of calls that came."""
        self.frames = 0
        """Frames that these items came in."""

    def seal(self, requests: Sequence[bytes]) -> bytes:
        return bytes(self._sealer.seal_many(requests))

    def open(self, data: bytes) -> list[Response]:
        """The responses in these bytes; items of calls are kept for `items`."""
        self._decoder.receive_data(data)
        responses: list[Response] = []
        for message in self._decoder.events():
            if isinstance(message, CallItems):
                self.items += [(number, kind, bytes(body)) for number, kind, body in message.items]
                self.frames += 1
            else:
                responses.append(message)
        return responses


def everyone(fingerprint: str) -> Client | None:
    """The access list of these tests: the administrator, and everybody else as an ordinary client."""
    rights = ADMIN_RIGHTS if fingerprint == ADMIN.fingerprint else CLIENT_RIGHTS
    return Client("jebp:test", "test", rights)


class Conversation:
    """A session of a real broker and the client that speaks to it, in one event loop and without a socket."""

    def __init__(
        self,
        bus: Bus,
        *,
        identity: Identity = ADMIN,
        settings: JebpSettings = JebpSettings(),  # noqa: B008  # frozen
        bytes_max: int = 8 * 2**20,
        authorise: Callable[[str], Client | None] = everyone,
        server_handshake: ServerHandshake | None = None,
        client_handshake: ClientHandshake | None = None,
        methods: Mapping[str, Method] = METHODS,
    ) -> None:
        self.pipe = Pipe()
        self.outbox = Outbox(self.pipe, bytes_max)
        self.closed = False
        self.session = Session(
            bus.broker,
            self.outbox,
            self._close,
            identity=SERVER,
            authorise=authorise,
            settings=settings,
            metrics=bus.metrics,
            handshake=server_handshake,
            methods=methods,
        )
        self._shake = client_handshake or ClientHandshake(identity, bool, bare_certificates=settings.bare_certificates)
        self._wire: Wire | None = None

    def _close(self) -> None:
        self.closed = True

    def connect(self) -> "Conversation":
        """Do the handshake."""
        while self._shake.established is None:
            self.receive(self._shake.receive_data(self.pipe.take()))
        self.wire = Wire(self._shake.established)
        return self

    def receive(self, data: bytes) -> None:
        """Hand bytes to the session as a connection does."""
        self.outbox.holding = True
        try:
            self.session.receive_data(data)
        finally:
            self.outbox.release()

    def send(self, *requests: bytes) -> None:
        """Send requests in one chunk."""
        self.receive(self.wire.seal(requests))

    def call(self, *items: tuple[int, int, object]) -> list[tuple[int, int, object]]:
        """Send items (number, kind, message) in one frame, and give those that came back at once."""
        self.send(encode_request(CallItems([(number, kind, encode(body)) for number, kind, body in items])))
        return self.items()

    def items(self) -> list[tuple[int, int, object]]:
        """Take the items that came so far."""
        assert self.answers() == []
        items, self.wire.items = self.wire.items, []
        return [(number, kind, msgspec.msgpack.decode(body)) for number, kind, body in items]

    async def next_items(self) -> list[tuple[int, int, object]]:
        """Wait for items."""
        while not (items := self.items()):
            await self.pipe.grown.wait()
        return items

    def answers(self) -> list[Response]:
        """Take what the session has answered so far."""
        return self.wire.open(self.pipe.take())

    async def hear(self, count: int) -> list[Response]:
        """Wait until `count` answers came, and give them; more are a failure."""
        heard = self.answers()
        while len(heard) < count:
            await self.pipe.grown.wait()
            heard += self.answers()
        assert len(heard) == count
        return heard

    async def ask(self, *requests: bytes) -> list[Response]:
        """Send requests in one chunk and wait for their answers."""
        self.send(*requests)
        return await self.hear(len(requests))

    async def say(self, *requests: bytes) -> list[str]:
        """As `ask`, with the answers in hex."""
        return [said(response) for response in await self.ask(*requests)]


class Caller:
    """A client on a blocking socket, for tests of a whole server."""

    def __init__(self, address: str, identity: Identity = ADMIN, *, receive_bytes: int | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(TIMEOUT_SECONDS)
        self.socket.connect((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._heard: list[Response] = []
        self.identity = identity

    def connect(self) -> "Caller":
        """Do the handshake.

        Raises:
            ConnectionError: the server closed.
        """
        shake = ClientHandshake(self.identity, bool)
        while shake.established is None:
            self.socket.sendall(shake.receive_data(self._receive()))
        self.wire = Wire(shake.established)
        return self

    def _receive(self) -> bytes:
        data = self.socket.recv(2**18)
        if not data:
            raise ConnectionError("the server closed the connection")
        return data

    def send(self, *requests: bytes) -> None:
        self.socket.sendall(self.wire.seal(requests))

    def hear(self, count: int = 1) -> list[Response]:
        """Wait for the next `count` answers.

        Raises:
            ConnectionError: the server closed before.
        """
        while len(self._heard) < count:
            self._heard += self.wire.open(self._receive())
        heard, self._heard = self._heard[:count], self._heard[count:]
        return heard

    def ask(self, *requests: bytes) -> list[Response]:
        self.send(*requests)
        return self.hear(len(requests))

    def is_closed(self) -> bool:
        """Wait until the server closes; nothing may come before."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
