"""Clients of an edge have their sessions at the core, over a socket pair and over TCP."""

import asyncio
import contextlib
import itertools
import json
import logging
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from babelbus.config import ServerSettings, TlsSettings
from babelbus.limited_log import LINES_MAX
from babelbus.link import core, peer
from babelbus.link.core import CoreLink
from babelbus.link.frames import (
    BLOCKED,
    DATA,
    EOF,
    HELLO,
    LINK_VERSION,
    LOST,
    MAGIC,
    OPEN,
    PING,
    READ_BYTES_MAX,
    READY,
    SECURE,
    TAKEN,
    TLS_RECORD_BYTES_MAX,
    WINDOW_BYTES,
    LinkError,
    LinkRefusedError,
    encode,
)
from babelbus.link.peer import FRAMES_MAX
from babelbus.link.transport import HIGH_BYTES, PASSED_BYTES_MAX
from babelbus.listening.certificates import Certificates
from babelbus.listening.crowd import Crowd
from babelbus.listening.transports import is_blocked
from tests.support.certificates import Authority
from tests.support.link import KINDS, NAME, Linked, Session, linked, until

MUCH = bytes(range(256)) * 4096
"""More than a window, a frame, and the buffers of sockets."""
TURNS = 30
"""Turns of the event loop in which an edge sends all that it may."""

pytestmark = pytest.mark.parametrize("kind", KINDS)


def run(test: object) -> None:
    asyncio.run(test)  # type: ignore[arg-type]


def test_bytes_go_both_ways_and_the_client_is_known(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            reader, writer = await both.dial()
            session = await both.session()
            transport = session.transport
            assert transport.get_extra_info("peername") == writer.get_extra_info("sockname")
            assert transport.get_extra_info("sockname") == both.address
            assert transport.get_extra_info("edge") == "edge"
            assert transport.get_extra_info("socket") is None
            writer.write(b"there")
            await until(lambda: session.received == b"there")
            transport.write(b"and ")
            transport.writelines([b"ba", b"ck"])
            assert await reader.readexactly(8) == b"and back"
            await until(lambda: transport.get_write_buffer_size() == 0)
            writer.close()
            assert await session.lost is None
            assert len(both.core.links) == 1
            assert both.door.count == 0

    run(test())


def test_long_data_comes_whole_both_ways(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            reader, writer = await both.dial()
            session = await both.session()
            writer.write(MUCH)
            session.transport.write(MUCH)
            assert await reader.readexactly(len(MUCH)) == MUCH
            await until(lambda: len(session.received) == len(MUCH))
            assert session.received == MUCH
            await until(lambda: session.transport.get_write_buffer_size() == 0)
            assert session.events == ["pause", "resume"]

    run(test())


def test_the_core_holds_a_window_of_a_client_that_it_does_not_read(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            _, writer = await both.dial()
            session = await both.session()
            transport = session.transport
            transport.pause_reading()
            writer.write(MUCH * 8)
            await until(lambda: transport.held_bytes >= WINDOW_BYTES)
            _, other = await both.dial()
            other.write(b"passes")
            second = await both.session(1)
            await until(lambda: second.received == b"passes")
            assert transport.held_bytes < WINDOW_BYTES + 2**18
            assert not session.received
            transport.resume_reading()
            await until(lambda: len(session.received) == len(MUCH) * 8)
            assert session.received == MUCH * 8

    run(test())


def test_a_client_with_tls_is_held_to_the_window_as_well(kind: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert_file, key_file = authority.issue("edge")
    tls = Certificates(TlsSettings(cert_file=str(cert_file), key_file=str(key_file))).make_tls("echo")

    class Slow(Session):
        most = 0

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.transport.pause_reading()
            self.wait(TURNS)

        def wait(self, turns: int) -> None:
            """Take the next frame some turns of the event loop later."""
            self.most = max(self.most, self.transport.held_bytes)
            if turns:
                asyncio.get_running_loop().call_soon(self.wait, turns - 1)
            else:
                self.transport.resume_reading()

    async def test() -> None:
        async with linked(kind, tls=tls) as both:
            both.make_session = Slow
            _, writer = await both.dial(tls=authority.client_context())
            session = await both.session()
            assert isinstance(session, Slow)
            (client,) = both.edge._link.clients.values()  # type: ignore[union-attr]
            # asyncio reads on below a TLS that is paused, and hands all of it over at once.
            session.transport.pause_reading()
            writer.write(MUCH * 8)
            await until(lambda: client.transport.get_read_buffer_size() >= TLS_RECORD_BYTES_MAX)
            session.wait(TURNS)
            await until(lambda: len(session.received) == 8 * len(MUCH) or session.lost.done())
            assert session.received == MUCH * 8
            assert session.most <= WINDOW_BYTES + READ_BYTES_MAX
            assert not both.lost

    run(test())


def test_bytes_that_a_client_does_not_take_are_counted_at_the_core(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            reader, _ = await both.dial()
            session = await both.session()
            transport = session.transport
            transport.set_write_buffer_limits(high=len(MUCH), low=0)
            assert not is_blocked(transport)
            for _ in range(16):
                transport.write(MUCH)
            await until(lambda: is_blocked(transport))
            assert transport.get_write_buffer_size() > len(MUCH)
            assert session.events == ["pause"]
            assert await reader.readexactly(16 * len(MUCH)) == 16 * MUCH
            await until(lambda: transport.get_write_buffer_size() == 0)
            assert not is_blocked(transport)
            assert session.events == ["pause", "resume"]

    run(test())


@pytest.mark.parametrize("end", ["close", "write_eof"])
def test_an_edge_holds_little_of_what_a_client_does_not_take(kind: str, end: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            reader, _ = await both.dial()
            session = await both.session()
            transport = session.transport
            for _ in range(16):
                transport.write(MUCH)
            transport.write(b"last")
            getattr(transport, end)()
            transport.write(b"nothing")
            (client,) = both.edge._link.clients.values()  # type: ignore[union-attr]
            await until(lambda: client.transport.get_write_buffer_size() > 0)
            assert transport.idle_protocol is None
            most, data = 0, bytearray()
            while part := await reader.read(2**16):
                most = max(most, client.transport.get_write_buffer_size())
                data += part
            assert most <= PASSED_BYTES_MAX + len(MUCH)
            assert data == 16 * MUCH + b"last"

    run(test())


def test_a_half_closed_client_gets_its_answers(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            both.keeps_open = True
            reader, writer = await both.dial()
            session = await both.session()
            session.transport.pause_reading()
            writer.write(b"question")
            writer.write_eof()
            _, other = await both.dial()
            other.write(b"x")
            await until(lambda: len(both.sessions) > 1 and both.sessions[1].received)
            assert session.events == []  # the end comes behind the data, which is not read
            session.transport.resume_reading()
            await until(lambda: session.events == ["eof"])
            assert session.received == b"question"
            session.transport.write(b"answer")
            session.transport.close()
            session.transport.write(b"nothing")
            assert await reader.read() == b"answer"
            assert await session.lost is None

    run(test())


def test_a_client_that_ends_is_closed_unless_its_session_wants_to_write(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            reader, writer = await both.dial()
            session = await both.session()
            writer.write_eof()
            assert await reader.read() == b""
            assert await session.lost is None
            assert session.events == ["eof"]

    run(test())


def test_a_session_may_end_what_it_sends_and_read_on(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            reader, writer = await both.dial()
            session = await both.session()
            session.transport.write(b"all")
            session.transport.write_eof()
            assert await reader.read() == b"all"
            writer.write(b"more")
            await until(lambda: session.received == b"more")

    run(test())


def test_many_bytes_count_as_not_taken_before_the_edge_has_said_a_word(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            reader, _ = await both.dial()
            transport = (await both.session()).transport
            transport.write(bytes(HIGH_BYTES))
            assert not is_blocked(transport)
            transport.write(b"x")
            assert is_blocked(transport)
            await reader.readexactly(HIGH_BYTES + 1)
            await until(lambda: not is_blocked(transport))

    run(test())


def test_abort_drops_what_waits(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            client = socket.create_connection(both.address)
            client.setblocking(False)
            session = await both.session()
            session.transport.write(MUCH * 16)
            await until(lambda: is_blocked(session.transport))
            session.transport.abort()
            assert session.transport.is_closing()
            assert await session.lost is None
            await until(lambda: both.edge.connections == 0)
            assert len(await _end_of(client)) < 16 * len(MUCH)

    run(test())


def test_the_door_of_the_core_refuses_over_all_edges(kind: str) -> None:
    async def test() -> None:
        async with linked(kind, connections_max=2) as both:
            second = both.make_edge("second")
            address = await both.open(second)
            await both.link(second, kind)
            first, _ = await both.dial()
            await both.session(0)
            await both.dial(address)
            await both.session(1)
            reader, _ = await both.dial(address)
            assert await _is_closed(reader)
            assert {link.name: link.connections for link in both.core.links} == {"edge": 1, "second": 1}
            await second.stop()
            await both.sessions[1].lost
            assert not first.at_eof()
            assert both.door.count == 1

    run(test())


def test_edges_of_one_name_are_one_line_of_each_metric(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            twin = both.make_edge("edge")
            address = await both.open(twin)
            await both.link(twin, kind)
            await both.dial()
            await both.session(0)
            await both.dial(address)
            await both.session(1)
            lines = [line for line in generate_latest(both.metrics.registry).decode().splitlines() if "edge" in line]
            assert 'babelbus_edge_connections{edge="edge"} 2.0' in lines
            assert len([line for line in lines if line.startswith("babelbus_edge_bytes{")]) == 1
            await twin.stop()

    run(test())


def test_the_sessions_end_with_the_link(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            reader, _ = await both.dial()
            session = await both.session()
            (link,) = both.core.links
            link.end("a test")
            assert isinstance(await session.lost, ConnectionResetError)
            assert await reader.read() == b""
            await until(lambda: both.lost != [])
            assert not both.edge.is_connected
            await both.link(both.edge, kind)
            await both.dial()
            await both.session(1)

    run(test())


def test_a_client_that_takes_nothing_does_not_outlive_its_link_for_long(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("babelbus.link.edge.LAST_SECONDS", 0.01)

    async def test() -> None:
        async with linked(kind) as both:
            with socket.create_connection(both.address):
                session = await both.session()
                (client,) = both.edge._link.clients.values()  # type: ignore[union-attr]
                session.transport.write(16 * MUCH)
                await until(lambda: client.transport.get_write_buffer_size() > 0)
                (link,) = both.core.links
                link.end("a test")
                await until(lambda: client.lost)

    run(test())


def test_clients_wait_for_a_link_within_bounds(kind: str) -> None:
    async def test() -> None:
        both = Linked()
        await both.core.listen("127.0.0.1", 0)
        edge = both.make_edge("patient", waiting_max=1, waiting_seconds=60.0)
        both.address = await both.open(edge)
        reader, writer = await both.dial()
        writer.write(b"early")
        await until(lambda: edge.connections == 1)
        refused, _ = await both.dial()
        assert await _is_closed(refused)
        await both.link(edge, kind)
        session = await both.session()
        await until(lambda: session.received == b"early")
        session.transport.write(b"late")
        assert await reader.readexactly(4) == b"late"
        await edge.stop()
        impatient = both.make_edge("impatient", waiting_max=1, waiting_seconds=0.01)
        both.address = await both.open(impatient)
        reader, _ = await both.dial()
        assert await _is_closed(reader)
        await impatient.stop()
        await both.close()

    run(test())


def test_one_address_does_not_take_all_places_of_those_who_wait(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        both = Linked()
        await both.core.listen("127.0.0.1", 0)
        crowd = Crowd(ServerSettings(handshakes_per_address_max=2, uncounted_networks=None))
        edge = both.make_edge("patient", waiting_max=10, waiting_seconds=60.0, crowd=crowd)
        both.address = await both.open(edge)
        await both.dial()
        await both.dial()
        await until(lambda: edge.connections == 2)
        refused, _ = await both.dial()
        assert await _is_closed(refused)
        await both.link(edge, kind)
        await both.session(1)
        await both.dial()  # with a link the core counts
        await both.session(2)
        (link,) = both.core.links
        link.end("a test")
        await until(lambda: edge.connections == 0)
        readers = [(await both.dial())[0] for _ in range(2)]
        await until(lambda: edge.connections == 2)
        await edge.stop()
        assert all([await _is_closed(reader) for reader in readers])
        assert crowd.refusal("127.0.0.1") is None
        await both.close()

    run(test())
    assert "refused: no core is linked, and 2 clients of its address have not proved who they are" in caplog.text


def test_when_the_core_stops_edges_accept_no_more_and_send_the_rest(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            reader, _ = await both.dial()
            session = await both.session()
            both.core.stop_accepting()
            session.transport.write(b"last words")
            await until(lambda: not both.edge._servers)
            with pytest.raises(OSError, match=r"."):
                await both.dial()
            session.transport.close()
            await both.core.close()
            assert await reader.read() == b"last words"

    run(test())


@pytest.mark.parametrize("error", [AssertionError("a defect"), LinkError("of another link")])
@pytest.mark.parametrize(
    "method", ["connection_made", "data_received", "eof_received", "pause_writing", "resume_writing"]
)
def test_a_session_that_fails_ends_its_client_alone(
    kind: str, method: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Session):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if method == "connection_made":
                raise error
            if method in ("pause_writing", "resume_writing"):
                transport.write(MUCH)

    def fail(*_: object) -> None:
        raise error

    async def test() -> None:
        async with linked(kind) as both:
            other, _ = await both.dial()
            witness = await both.session()
            both.make_session = Failing
            reader, writer = await both.dial()
            writer.write(b"poison")
            if method == "eof_received":
                writer.write_eof()
            assert await (await both.session(1)).lost is error
            await _is_closed(reader)
            witness.transport.write(b"serves")
            assert await other.readexactly(6) == b"serves"
            assert both.door.count == 1
            assert not both.lost

    if method != "connection_made":
        setattr(Failing, method, fail)
    run(test())
    assert "its connection ends, because its session failed" in caplog.text
    assert str(error) in caplog.text


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(64),
        encode(DATA, 1, b"before the hello"),
        encode(HELLO, 0, b"{}"),
        encode(HELLO, 0, json.dumps({"magic": "other", "version": LINK_VERSION, "name": "x"}).encode()),
    ],
)
def test_garbage_before_the_hello_ends_that_link_alone(kind: str, garbage: bytes) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            stranger = await _raw(both, kind)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(stranger, garbage)
            assert await _end_of(stranger) == b""
            reader, _ = await both.dial()
            (await both.session()).transport.write(b"serves")
            assert await reader.readexactly(6) == b"serves"

    run(test())


@pytest.mark.parametrize(
    "garbage",
    [
        encode(OPEN, 0, b'{"listener": "echo", "peer": null}'),
        encode(OPEN, 1, b'{"listener": "echo", "peer": null}') * 2,
        encode(OPEN, 1, b'{"listener": 1}'),
        encode(OPEN, 1, b'{"listener": "echo", "peer": []}'),
        encode(OPEN, 1, b'{"listener": "echo", "peer": ["10.0.0.1"]}'),
        encode(OPEN, 1, b'{"listener": "echo", "peer": [1, 2]}'),
        encode(OPEN, 1, b'{"listener": "echo", "peer": null, "local": ["10.0.0.1", "a"]}'),
        encode(OPEN, 1, b'{"listener": "echo", "peer": null}') + encode(TAKEN, 1, taken=5),
        encode(HELLO, 0, b"{}"),
        encode(3, 0, b"an edge refuses nobody"),
    ],
)
def test_garbage_of_an_edge_ends_its_link_alone(kind: str, garbage: bytes) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            edge = await _raw(both, kind)
            loop = asyncio.get_running_loop()
            hello = json.dumps({"magic": MAGIC, "version": LINK_VERSION, "name": "mad"}).encode()
            await loop.sock_sendall(edge, encode(HELLO, 0, hello) + garbage)
            await _end_of(edge)
            await until(lambda: [link.name for link in both.core.links] == ["edge"])
            for session in both.sessions:
                await session.lost
            assert both.door.count == 0

    run(test())


def test_data_over_the_window_ends_its_client_alone(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            edge = await _raw(both, kind)
            loop = asyncio.get_running_loop()
            hello = json.dumps({"magic": MAGIC, "version": LINK_VERSION, "name": "greedy"}).encode()
            opening = b'{"listener": "echo", "peer": null}'
            await loop.sock_sendall(edge, encode(HELLO, 0, hello) + encode(OPEN, 1, opening) + encode(OPEN, 2, opening))
            session = await both.session()
            session.transport.pause_reading()
            await loop.sock_sendall(edge, encode(DATA, 1, bytes(2**16)) * 100)
            assert await session.lost is None
            await loop.sock_sendall(edge, encode(DATA, 2, b"passes"))
            other = await both.session(1)
            await until(lambda: other.received == b"passes")
            edge.close()

    run(test())
    assert "client local of edge greedy is closed" in caplog.text


def test_thousands_of_clients_in_one_read_are_handled_in_turns_and_in_order(kind: str) -> None:
    async def test() -> None:
        async with linked(kind, connections_max=5000) as both:
            edge = await _raw(both, kind)
            loop = asyncio.get_running_loop()
            hello = json.dumps({"magic": MAGIC, "version": LINK_VERSION, "name": "many"}).encode()
            opening = b'{"listener": "echo", "peer": null}'
            frames = [encode(OPEN, number, opening) + encode(DATA, number, b"%d" % number) for number in range(1, 2001)]
            await loop.sock_sendall(edge, encode(HELLO, 0, hello) + b"".join(frames))
            await until(lambda: len(both.sessions) == 2000 and both.sessions[-1].received)
            assert [session.received for session in both.sessions] == [b"%d" % number for number in range(1, 2001)]
            edge.close()
            for session in both.sessions:
                assert isinstance(await session.lost, ConnectionResetError)
            assert both.door.count == 0

    run(test())


def test_a_frame_for_an_unknown_connection_is_dropped(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            edge = await _raw(both, kind)
            loop = asyncio.get_running_loop()
            hello = json.dumps({"magic": MAGIC, "version": LINK_VERSION, "name": "late"}).encode()
            opening = b'{"listener": "echo", "peer": ["10.0.0.1", 5]}'
            frames = [
                encode(HELLO, 0, hello),
                encode(DATA, 9, b"late"),
                encode(TAKEN, 9, taken=1),
                encode(OPEN, 1, opening),
            ]
            await loop.sock_sendall(edge, b"".join(frames))
            session = await both.session()
            assert session.transport.get_extra_info("peername") == ("10.0.0.1", 5)
            edge.close()

    run(test())


def test_the_end_of_a_client_comes_once_and_nothing_behind_it(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            both.keeps_open = True
            edge = await _raw(both, kind)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(edge, _hello("mad") + encode(OPEN, 1, OPENING) + encode(OPEN, 2, OPENING))
            first, second = await both.session(0), await both.session(1)
            second.transport.pause_reading()
            for number in (1, 2):
                frames = [encode(DATA, number), encode(DATA, number, b"all"), encode(EOF, number), encode(EOF, number)]
                await loop.sock_sendall(edge, b"".join([*frames, encode(DATA, number, b"late"), encode(EOF, number)]))
            await loop.sock_sendall(edge, encode(OPEN, 3, OPENING))
            await both.session(2)
            assert list(second.transport.held) == [b"all"]
            second.transport.resume_reading()
            await until(lambda: second.events == ["eof"])
            for session in (first, second):
                assert session.received == b"all"
                assert session.events == ["eof"]
            edge.close()

    run(test())


def _hello(name: str) -> bytes:
    return encode(HELLO, 0, json.dumps({"magic": MAGIC, "version": LINK_VERSION, "name": name}).encode())


OPENING = b'{"listener": "echo", "peer": null}'
PAYLOADS = {
    OPEN: [
        OPENING,
        b'{"listener": "other", "peer": ["10.0.0.1", 1]}',
        b'{"listener": "echo", "peer": ["::1", 1, 0, 0]}',
    ],
    SECURE: [b"{}", b'{"certificate": "AAAA", "fields": {"subject": 5}}'],
    LOST: [b"{}", b'{"reason": "tls", "text": "x"}', b'{"reason": "other"}'],
    DATA: [b"", b"x", bytes(2**16)],
}
BY_AN_EDGE = (READY, OPEN, SECURE, DATA, TAKEN, BLOCKED, EOF, LOST, PING)


@pytest.mark.parametrize("seed", range(3))
def test_frames_in_any_order_hurt_nobody_else(
    kind: str, seed: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    cert_file, key_file = Authority(tmp_path).issue("edge")
    tls = Certificates(TlsSettings(cert_file=str(cert_file), key_file=str(key_file))).make_tls("echo")

    class Moody(Session):
        """Writes, waits, ends and leaves as it likes."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.act()

        def data_received(self, data: bytes) -> None:
            assert data, "no data"
            self.act()

        def act(self) -> None:
            transport = self.transport
            chance.choice(
                [
                    lambda: transport.write(b"x" * chance.choice([1, 2**18])),
                    transport.pause_reading,
                    transport.resume_reading,
                    transport.write_eof,
                    transport.close,
                    transport.abort,
                ]
            )()

    def frame(numbers: Iterator[int]) -> bytes:
        kind, number = chance.choice(BY_AN_EDGE), chance.randrange(8)
        if kind == OPEN and chance.random() < 0.95:
            number = next(numbers)  # else it may be open
        count = chance.choice([0] * 40 + [1, 2**32 - 1]) if kind in (DATA, TAKEN) else 0
        return encode(kind, number, chance.choice(PAYLOADS.get(kind, [b""])), count)

    async def test() -> None:
        async with linked(kind) as both:
            both.entrances.by_name[NAME].tls = tls if seed else None
            both.keeps_open = True
            both.make_session = Moody
            loop = asyncio.get_running_loop()
            for number in range(40):
                edge = await _raw(both, kind)
                numbers = itertools.count(1)
                await loop.sock_sendall(edge, _hello(f"mad {number}"))
                assert await loop.sock_recv(edge, 2**10)
                with contextlib.suppress(OSError):
                    await loop.sock_sendall(edge, b"".join(frame(numbers) for _ in range(100)))
                    for _ in range(20):
                        await loop.sock_sendall(edge, frame(numbers))
                edge.close()
            await until(lambda: len(both.core.links) == 1)
            for session in list(both.sessions):
                await session.lost
            await until(lambda: both.door.count == 0)  # also of those whose handshake is not done
            assert both.edge.is_connected

    run(test())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_frame_that_the_core_fails_over_ends_its_link_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(CoreLink, "_secure", fail)

    async def test() -> None:
        async with linked(kind) as both:
            edge = await _raw(both, kind)
            frames = _hello("unlucky") + encode(PING) * 3 * FRAMES_MAX + encode(SECURE, 1, b"{}")
            await asyncio.get_running_loop().sock_sendall(edge, frames)
            await _end_of(edge)
            await until(lambda: [link.name for link in both.core.links] == ["edge"])

    run(test())
    assert "edge unlucky is lost, with 0 connections: a frame could not be handled: a defect" in caplog.text


def test_strangers_do_not_fill_the_log(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            hello = json.dumps({"magic": MAGIC, "version": LINK_VERSION + 1, "name": "stranger"}).encode()
            for _ in range(2 * LINES_MAX):
                stranger = await _raw(both, kind)
                await asyncio.get_running_loop().sock_sendall(stranger, encode(HELLO, 0, hello))
                await _end_of(stranger)

    run(test())
    assert caplog.text.count("link of stranger") == LINES_MAX


def test_a_listener_that_the_core_does_not_have_closes_the_client(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            both.entrances.by_name.clear()
            reader, _ = await both.dial()
            assert await _is_closed(reader)

    with caplog.at_level(logging.WARNING):
        run(test())
    assert "no listener 'echo' here" in caplog.text


@pytest.mark.parametrize(("version", "older"), [(LINK_VERSION - 1, "edge"), (LINK_VERSION + 1, "core")])
def test_another_version_is_refused_with_a_sentence(
    kind: str, version: int, older: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            monkeypatch.setattr("babelbus.link.edge.LINK_VERSION", version)
            other = both.make_edge("other")
            with pytest.raises(LinkRefusedError, match=f"version {version}: upgrade the {older}"):
                await both.link(other, kind)
            assert not other.is_connected

    run(test())


def test_an_edge_elsewhere_needs_the_key_of_the_core(kind: str) -> None:
    async def test() -> None:
        async with linked(kind) as both:
            await both.core.listen("127.0.0.1", 0, key="right")
            host, _, port = both.core.address.rpartition(":")
            for key in ("", "wrong", "ü"):
                other = both.make_edge("other")
                with pytest.raises(LinkRefusedError, match="the edge other has not the key of this core"):
                    await other.connect(host, int(port), key=key)
                assert not other.is_connected
            await both.make_edge("other").connect(host, int(port), key="right")

    run(test())


def test_an_edge_that_sends_nothing_for_long_is_gone(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer, "PING_SECONDS", 0.01)
    monkeypatch.setattr(core, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(core, "LOCAL_SILENCE_SECONDS", 0.2)

    async def test() -> None:
        async with linked(kind) as both:
            await both.dial()
            session = await both.session()
            link = both.edge._link
            assert link is not None
            assert link._timer is not None
            link._timer.cancel()  # as an edge whose event loop turns no more
            assert isinstance(await session.lost, ConnectionResetError)
            assert not both.core.links
            assert "with 1 connections: nothing was heard for 0.2 s" in caplog.text

    run(test())


class Greeting(Session):
    """A session that sends something at once, whatever the edge takes."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.write(MUCH[: 2**18])


CLIENTS = 150


def _come_and_go() -> bytes:
    """Return the frames of an edge whose clients come and leave."""
    hello = json.dumps({"magic": MAGIC, "version": LINK_VERSION, "name": "deaf"}).encode()
    opening = b'{"listener": "echo", "peer": null}'
    clients = [encode(OPEN, number, opening) + encode(LOST, number, b"{}") for number in range(1, CLIENTS + 1)]
    return encode(HELLO, 0, hello) + b"".join(clients)


def test_an_edge_that_does_not_read_makes_little_wait_for_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "UNTAKEN_BYTES_MAX", 2**18)

    async def test() -> None:
        async with linked(kind) as both:
            reader, _ = await both.dial()
            first = await both.session()
            both.make_session = Greeting
            edge = await _raw(both, kind)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(edge, _come_and_go())
            await until(lambda: any(link._is_full for link in both.core.links))
            for _ in range(100):  # turns of the event loop
                first.transport.write(b"x")
                await reader.readexactly(1)
            assert len(both.sessions) <= CLIENTS
            while len(both.sessions) <= CLIENTS:  # it goes on when the edge reads
                await loop.sock_recv(edge, 2**20)
            edge.close()
            await asyncio.gather(*[session.lost for session in both.sessions[1:]])

    run(test())


def test_an_edge_that_takes_nothing_is_gone(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core, "UNTAKEN_BYTES_MAX", 2**18)
    monkeypatch.setattr(peer, "PING_SECONDS", 0.01)
    monkeypatch.setattr(core, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(core, "LOCAL_SILENCE_SECONDS", 0.2)

    async def test() -> None:
        both = Linked()
        await both.core.listen("127.0.0.1", 0)
        both.make_session = Greeting
        edge = await _raw(both, kind)
        await asyncio.get_running_loop().sock_sendall(edge, _come_and_go())
        await until(lambda: "nothing was heard for 0.2 s" in caplog.text)
        edge.close()
        await both.close()

    run(test())


def test_an_edge_that_meets_no_core_says_so(kind: str) -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        ours.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        edge = Linked().make_edge("lonely")
        with pytest.raises(LinkError, match="no frame of a link"):
            await edge.connect_socket(theirs)
        ours.close()

    run(test())


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    """Return whether the other end closes without a word."""
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def _raw(both: Linked, kind: str) -> socket.socket:
    """Return a socket to the core whose bytes the test chooses."""
    if kind == "tcp":
        host, _, port = both.core.address.rpartition(":")
        one = socket.create_connection((host, int(port)))
    else:
        ours, one = socket.socketpair()
        link = CoreLink(both.core)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
    one.setblocking(False)
    return one


async def _end_of(one: socket.socket) -> bytes:
    """Return what comes until the other end closes."""
    loop = asyncio.get_running_loop()
    data = b""
    try:
        while part := await loop.sock_recv(one, 2**16):
            data += part
    except ConnectionResetError:
        pass
    one.close()
    return data
