"""Fronts of an edge: batches keep the order of each client, and clients go on when the core changes."""

import asyncio
import contextlib
import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from babelbus.link.client import UNTAKEN_BYTES_MAX, Client
from babelbus.link.core import CoreLink
from babelbus.link.frames import BATCH, HELLO, LINK_VERSION, OPEN, encode
from babelbus.link.transport import Absence, LinkedTransport
from babelbus.listening.entrances import Entrance
from babelbus.listening.fronts import Find, FrontPlan, Way
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.link import NAME, Linked, Session, until

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
    def __init__(self, plan: bytes = b"plan") -> None:
        assert plan == b"plan"
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
        self.edge = self.make_edge("m", make_fronts={NAME: Fronts}, waiting_max=5, waiting_seconds=SAFETY_NET_SECONDS)

    def _receive(self, data: bytes, find: Find, answer: Callable[[bytes], None]) -> None:
        for line in data.splitlines():
            number, _, text = line.partition(b" ")
            self.batches.append((int(number), text))
            linked = find(int(number))
            if linked is not None:
                linked.receive_aside(b"<" + text + b">")
        self.answers.append(answer)


@contextlib.asynccontextmanager
async def fronted(kind: str = "socketpair") -> AsyncIterator[Fronted]:
    both = Fronted()
    await both.core.listen("127.0.0.1", 0)
    both.address = await both.open(both.edge)
    await both.link(both.edge, kind)
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
            fronts: Fronts = own.fronts  # type: ignore[union-attr]
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


def test_clients_and_batches_of_a_listener_without_fronts_end_the_link() -> None:
    async def test() -> None:
        async with fronted() as both:
            both.entrances.add(Entrance("bare", both._make, both.door))
            for garbage in (
                encode(OPEN, 1, b'{"listener": "bare", "peer": null, "fronted": true}'),
                encode(BATCH, 1, b"\x04bare1 b\n"),
            ):
                ours, theirs = socket.socketpair()
                link = CoreLink(both.core)
                await asyncio.get_running_loop().create_unix_connection(lambda link=link: link, sock=ours)  # type: ignore[misc]
                hello = b'{"magic": "babelbus-link", "version": %d, "name": "m"}' % LINK_VERSION
                theirs.sendall(encode(HELLO, 0, hello) + garbage)
                await link.done
                assert link.end_reason == "edge m: there are no fronts of 'bare'"
                theirs.close()
            assert not both.sessions
            assert not both.batches

    asyncio.run(test())


def test_a_batch_comes_before_the_pause_and_what_comes_behind_it_waits_for_the_next_core() -> None:
    async def test() -> None:
        async with fronted("tcp") as first, fronted("tcp") as second:
            reader, writer = await first.dial()
            session = await first.session()
            (client,) = first.edge._link.clients.values()  # type: ignore[union-attr]
            client.data_received(b"bl1")  # waits for others
            first.core.stop_accepting()
            [link] = await first.core.pause_members(SAFETY_NET_SECONDS)
            assert session.received == b"<bl1>"
            assert link.batches[NAME] == 1
            writer.write(b"b2")
            first.answers[0](b"done")
            assert link.batches[NAME] == 0
            assert await reader.readexactly(4) == b"done"
            link.hand_over(session.transport, "session")
            following = Session(second.door)
            transport = LinkedTransport(Absence(), 0, following, {"peername": ("127.0.0.1", 1), "sockname": None})
            following.connection_made(transport)
            second.core.absent["session"] = transport
            await first.core.close()
            await until(lambda: not first.edge.is_connected)
            await second.edge.stop()
            await second.link(first.edge, "tcp")
            await until(lambda: following.received == b"<b2>")
            second.answers[0](b"too")
            assert await reader.readexactly(3) == b"too"
            assert not session.lost.done()

    asyncio.run(test())


def test_a_client_that_has_waited_for_a_core_has_a_front_as_one_that_comes_later() -> None:
    async def test() -> None:
        async with fronted("tcp") as first, fronted("tcp") as second:
            [link] = first.core.links
            link.end("killed")
            await until(lambda: not first.edge.is_connected)
            _, writer = await first.dial()
            writer.write(b"b1")
            await until(lambda: first.edge.connections == 1)
            await second.edge.stop()
            await second.link(first.edge, "tcp")
            await first.dial()
            await until(lambda: len(second.sessions) == 2)
            assert [one.is_fronted for one in first.edge._link.clients.values()] == [True, True]  # type: ignore[union-attr]
            await until(lambda: second.batches == [(1, b"b1")])

    asyncio.run(test())


def test_a_client_that_connects_while_its_core_leaves_has_no_front_of_that_core() -> None:
    async def test() -> None:
        async with fronted("tcp") as first, fronted("tcp") as second:
            edge = first.edge
            await first.dial()
            await first.session()
            (other,) = edge._link.clients.values()  # type: ignore[union-attr]
            make = partial(Client, edge, other.listener)
            other.data_received(b"bl1")  # waits for others, and is lost with the link
            edge.disconnect()
            await until(lambda: not edge.connections)
            ours, theirs = socket.socketpair()
            await asyncio.get_running_loop().connect_accepted_socket(make, ours)
            await until(lambda: edge.connections == 1)
            await second.edge.stop()
            await second.link(edge, "tcp")
            session = await second.session()
            theirs.sendall(b"b2")
            await until(lambda: session.received)
            assert session.received == b"<b2>"
            assert second.batches == [(1, b"b2")]
            theirs.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("key", "version", "is_shown"),
    [
        ("", LINK_VERSION, False),
        ("k", LINK_VERSION, False),
        ("key", LINK_VERSION - 1, False),
        ("key", LINK_VERSION, True),
    ],
)
def test_an_edge_gets_the_content_of_fronts_once_it_has_shown_the_key_of_its_core(
    key: str, version: int, is_shown: bool
) -> None:
    async def test() -> None:
        core = Fronted().core
        await core.listen("127.0.0.1", 0, key="key")
        core.serves = False  # it gathers copies
        host, _, port = core.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await until(lambda: core._all)
        [link] = core._all
        core.serve()  # all that are linked hear of it
        hello = b'{"magic": "babelbus-link", "version": %d, "name": "m", "key": "%s"}' % (version, key.encode())
        writer.write(encode(HELLO, 0, hello) + encode(BATCH, 1, b"\x04echo"))
        await until(lambda: link.name or link.end_reason)
        closing = asyncio.create_task(core.close())
        heard = await reader.read()
        assert (b64encode(b"plan") in heard) == is_shown
        writer.close()
        await closing

    asyncio.run(test())
