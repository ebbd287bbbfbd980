"""Fronts of an edge: batches keep the order of each client, and edges of other machines have no fronts."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

from babelbus.link.client import UNTAKEN_BYTES_MAX, EdgeListener
from babelbus.link.core import CoreLink
from babelbus.link.frames import BATCH, HELLO, LINK_VERSION, OPEN, ListenerInfo, encode
from babelbus.listening.entrances import Entrance
from babelbus.listening.fronts import Find, FrontPlan, Way
from babelbus.listening.sockets import open_sockets
from tests.support.link import NAME, Linked, until

MUCH = 64 * 1024


class Front:
    """Puts bytes that begin with `b` into a batch, answers `w` with much, and sends all others to the session."""

    def __init__(self, fronts: "Fronts", way: Way) -> None:
        self.fronts = fronts
        self.way = way
        self.unsent = False

    def receive_data(self, data: bytes) -> None:
        if data.startswith(b"w"):
            self.fronts.writes += 1
            self.way.write(bytes(MUCH))
        elif data.startswith(b"b"):
            self.fronts.gathered.append((self, data))
            self.unsent = True
            self.way.gather(later=data.startswith(b"bl"))
        else:
            self.way.forward(data)

    def deliver(self, data: bytes) -> None:
        self.way.write(data, len(data))

    def close(self) -> None:
        self.way.end()


class Fronts:
    def __init__(self) -> None:
        self.gathered: list[tuple[Front, bytes]] = []
        self.sent: dict[int, list[Front]] = {}
        self.writes = 0

    def make(self, way: Way) -> Front:
        return Front(self, way)

    def flush(self, send: Callable[[bytes], int]) -> None:
        gathered, self.gathered = self.gathered, []
        for front, _ in gathered:
            front.unsent = False
        data = b"".join(b"%d %s\n" % (front.way.number, data) for front, data in gathered)
        self.sent[send(data)] = [front for front, _ in gathered]

    def settle(self, number: int, answer: bytes) -> None:
        for front in self.sent.pop(number):
            front.way.write(answer)


class Fronted(Linked):
    """A core and an edge with fronts; `batches` are those that came, by client."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[int, bytes]] = []
        self.answers: list[Callable[[bytes], None]] = []
        plan = FrontPlan(b"plan", self._make, self._receive)
        self.entrances.add(Entrance(NAME, self._make, self.door, front=plan))

    def _receive(self, data: bytes, find: Find, answer: Callable[[bytes], None]) -> None:
        for line in data.splitlines():
            number, _, text = line.partition(b" ")
            self.batches.append((int(number), text))
            linked = find(int(number))
            if linked is not None:
                linked.receive_aside(b"<" + text + b">")
        self.answers.append(answer)

    async def begin(self, fronts: Fronts) -> None:
        sockets = await open_sockets("127.0.0.1", 0)
        await self.edge.open([EdgeListener(NAME, sockets, fronts=fronts)])
        self.address = sockets[0].getsockname()
        ours, theirs = socket.socketpair()
        listeners = [ListenerInfo(NAME, front=b"plan")]
        _, welcome = await asyncio.gather(self.core.adopt(ours, "1", listeners), self.edge.connect_socket(theirs))
        assert welcome.listeners[0].front == b"plan"


@contextlib.asynccontextmanager
async def fronted() -> AsyncIterator[Fronted]:
    both = Fronted()
    await both.begin(Fronts())
    try:
        yield both
    finally:
        await both.close()


def test_what_is_sent_behind_a_batch_comes_behind_it() -> None:
    async def test() -> None:
        async with fronted() as both:
            _, writer = await both.dial()
            session = await both.session()
            (client,) = both.edge._link.clients.values()  # type: ignore[union-attr]
            for data in (b"1", b"b2", b"3", b"b4", b"b5"):
                client.data_received(data)
            client.eof_received()
            await until(lambda: session.events == ["eof"])
            assert session.received == b"1<b2>3<b4><b5>"
            assert [text for _, text in both.batches] == [b"b2", b"b4", b"b5"]
            assert len(both.answers) == 2
            writer.close()

    asyncio.run(test())


def test_the_batch_of_a_client_that_leaves_comes_before_its_loss() -> None:
    async def test() -> None:
        async with fronted() as both:
            await both.dial()
            session = await both.session()
            (client,) = both.edge._link.clients.values()  # type: ignore[union-attr]
            client.data_received(b"b1")
            client.connection_lost(None)  # in the same turn
            client.transport.abort()
            await session.lost
            assert session.received == b"<b1>"

    asyncio.run(test())


def test_one_batch_has_the_requests_of_a_turn_and_one_answer_serves_all() -> None:
    async def test() -> None:
        async with fronted() as both:
            dialled = [await both.dial() for _ in range(5)]
            await both.session(4)
            for client in both.edge._link.clients.values():  # type: ignore[union-attr]
                client.data_received(b"b")
            await until(lambda: len(both.batches) == 5)
            assert len(both.answers) == 1
            both.answers[0](b"done")
            for reader, _ in dialled:
                assert await reader.readexactly(4) == b"done"

    asyncio.run(test())


def test_a_batch_that_waits_for_others_is_sent_in_the_end() -> None:
    async def test() -> None:
        async with fronted() as both:
            await both.dial()
            session = await both.session()
            (client,) = both.edge._link.clients.values()  # type: ignore[union-attr]
            client.data_received(b"bl1")
            await until(lambda: session.received == b"<bl1>")
            client.data_received(b"bl2")
            client.data_received(b"x")  # sends what waits
            await until(lambda: session.received == b"<bl1><bl2>x")

    asyncio.run(test())


def test_batches_that_go_to_a_session_at_rest_leave_the_window_as_it_was() -> None:
    async def test() -> None:
        async with fronted() as both:
            await both.dial()
            session = await both.session()
            (client,) = both.edge._link.clients.values()  # type: ignore[union-attr]
            for _ in range(100):
                session.transport.pause_reading()
                client.data_received(b"b" * 4096)
                client.data_received(b"x")
                await until(lambda: session.transport.held_bytes > 4096)
                session.transport.resume_reading()
                await until(lambda: not session.transport.held_bytes)
            assert len(session.received) == 100 * 4099
            session.transport.write(b"ack")
            await until(lambda: client.outstanding == 0)

    asyncio.run(test())


def test_a_client_that_takes_nothing_of_its_front_is_not_read_for_a_while() -> None:
    async def test() -> None:
        async with fronted() as both:
            client = socket.create_connection(both.address)
            client.setblocking(False)
            session = await both.session()
            loop = asyncio.get_running_loop()
            (own,) = both.edge._link.clients.values()  # type: ignore[union-attr]
            fronts = own.listener.fronts
            assert isinstance(fronts, Fronts)
            while not own.paused:
                before = fronts.writes
                await loop.sock_sendall(client, b"w")
                await until(lambda before=before: fronts.writes > before)
            assert own.transport.get_write_buffer_size() < UNTAKEN_BYTES_MAX + 2 * MUCH
            await loop.sock_sendall(client, b"x")
            received = 0
            while received < fronts.writes * MUCH:
                received += len(await loop.sock_recv(client, 2**20))
            await until(lambda: session.received == b"x")
            assert not own.paused
            client.close()

    asyncio.run(test())


def test_an_edge_of_another_machine_has_no_fronts() -> None:
    async def test() -> None:
        async with fronted() as both:
            for garbage in (
                encode(OPEN, 1, b'{"listener": "echo", "peer": null, "fronted": true}'),
                encode(BATCH, 1, b"\x04echo1 b\n"),
            ):
                ours, theirs = socket.socketpair()
                link = CoreLink(both.core)
                await asyncio.get_running_loop().create_unix_connection(lambda link=link: link, sock=ours)  # type: ignore[misc]
                hello = b'{"magic": "babelbus-link", "version": %d, "name": "m"}' % LINK_VERSION
                theirs.sendall(encode(HELLO, 0, hello) + garbage)
                await link.done
                assert link.end_reason == "edge m has no fronts of 'echo'"
                theirs.close()
            assert not both.sessions
            assert not both.batches

    asyncio.run(test())
