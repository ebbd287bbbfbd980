"""The client against a peer that says what a test wants: refusals, silence, another version, answers too many."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from babelbus.client import (
    Client,
    ConnectionLostError,
    Identity,
    OutcomeUnknownError,
    Position,
    Published,
    RequestError,
    RequestTimeoutError,
    UnsupportedByServerError,
)
from babelbus.clients.jebp import connection, reconnect
from babelbus.protocols.jebp.box import Sealer
from babelbus.protocols.jebp.decoder import ServerDecoder
from babelbus.protocols.jebp.fields import encode_numbers
from babelbus.protocols.jebp.frames import encode_frame
from babelbus.protocols.jebp.handshake import ServerHandshake
from babelbus.protocols.jebp.identity import Identity as ServerIdentity
from babelbus.protocols.jebp.messages import CreateRecords, RecordsCreated, Request, Subscribe
from babelbus.records.columns import decode_chunk, iterate
from tests.support.clock import ManualClock

CREATED = b"\xa1\x30"
AGAIN = b"\xb3\x31"
REFUSED = b"\xb3\x30"
SUBSCRIBED = b"\xa0\x30"
UNKNOWN = b"\xb0\x30"

Answer = Callable[[Request], "bytes | list[bytes] | None"]


class Peer(asyncio.Protocol):
    """A server whose answers are a function: contents to send, `None` for silence."""

    def __init__(self, script: "Script") -> None:
        self._script = script
        self._handshake = ServerHandshake(script.identity, version=script.version)
        self._decoder: ServerDecoder | None = None
        self._sealer: Sealer

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._script.peers.append(self)
        transport.write(self._handshake.begin())

    def data_received(self, data: bytes) -> None:
        if self._decoder is None:
            self.transport.write(self._handshake.receive_data(data))
            established = self._handshake.established
            if established is None:
                return
            self._sealer = established.sealer
            self._decoder = ServerDecoder(established.opener)
            data = established.surplus
        self._decoder.receive_data(data)
        for request in self._decoder.events():
            probe = request == Subscribe(()) and not self._script.mute
            answer = SUBSCRIBED if probe else self._script.answer(request)
            if answer is not None:
                self.transport.write(self._sealer.seal_many([answer] if isinstance(answer, bytes) else answer))


class Script:
    """What the peers of a test say, and what they have stored the way the real server does."""

    def __init__(self, answer: "Callable[[Script, Request], bytes | list[bytes] | None]", version: bytes) -> None:
        self.identity = ServerIdentity.generate()
        self.version = version
        self.peers: list[Peer] = []
        self.seen: list[Request] = []
        self.stored: list[bytes | None] = []
        self.turn = 0
        self.mute = False
        """Whether the request that every connection begins with goes to the test, too."""
        self._answer = answer
        self._batches: dict[tuple[int, int], int] = {}
        self._next: dict[int, int] = {}

    def answer(self, request: Request) -> bytes | list[bytes] | None:
        self.seen.append(request)
        self.turn += 1
        return self._answer(self, request)

    def store(self, request: Request) -> bytes:
        """Do what the server does with sequence numbers."""
        assert isinstance(request, CreateRecords)
        payloads = [record.payload for record in iterate(decode_chunk(bytes(request.records)))]
        known = (request.producer_id, request.first_sequence)
        if known not in self._batches:
            if self._next.get(request.producer_id, request.first_sequence) != request.first_sequence:
                return AGAIN
            self._next[request.producer_id] = request.first_sequence + len(payloads)
            self._batches[known] = len(self.stored)
            self.stored += payloads
        return CREATED + encode_numbers(RecordsCreated(0, self._batches[known]))

    def batches(self) -> list[CreateRecords]:
        return [request for request in self.seen if isinstance(request, CreateRecords)]


def with_peer(
    answer: Callable[[Script, Request], bytes | list[bytes] | None],
    test: Callable[[Script, Client], Coroutine[Any, Any, None]],
    *,
    version: bytes = b"jebp/1.1",
    **options: Any,
) -> None:
    @asynccontextmanager
    async def listening(script: Script) -> AsyncIterator[str]:
        server = await asyncio.get_running_loop().create_server(lambda: Peer(script), "127.0.0.1", 0)
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        for peer in script.peers:
            peer.transport.abort()

    async def run() -> None:
        script = Script(answer, version)
        async with (
            listening(script) as address,
            Client(address, identity=Identity.generate(), **options) as client,
        ):
            await test(script, client)

    asyncio.run(run())


PAYLOADS = [b"%d" % number for number in range(10)]


def test_the_first_batch_goes_alone_and_the_others_together() -> None:
    def answer(script: Script, request: Request) -> bytes | list[bytes] | None:
        answers.append(script.store(request))
        if script.turn == 1:
            in_flight.append(len(script.batches()))
            return answers.pop(0)
        if script.turn < 10:
            return None  # silent until the last one is there: so nine were on the way at once
        return answers

    answers: list[bytes] = []
    in_flight: list[int] = []

    async def check(script: Script, client: Client) -> None:
        placed = await client.publish_many("t", PAYLOADS, batch_records=1)
        assert placed == [Published(0, number, 1) for number in range(10)]
        assert in_flight == [1]
        assert [batch.first_sequence for batch in script.batches()] == list(range(10))
        assert len({batch.producer_id for batch in script.batches()}) == 1

    with_peer(answer, check)


def test_batches_that_could_not_be_stored_are_sent_again_in_order_under_their_numbers() -> None:
    def answer(script: Script, request: Request) -> bytes | list[bytes] | None:
        return AGAIN if script.turn in (3, 4, 15) else script.store(request)

    async def check(script: Script, client: Client) -> None:
        await client.publish_many("t", PAYLOADS, batch_records=1)
        assert script.stored == PAYLOADS
        assert len(script.batches()) > 10
        assert len({batch.producer_id for batch in script.batches()}) == 1

    with_peer(answer, check)


def test_behind_a_batch_that_was_refused_the_others_get_numbers_without_a_hole() -> None:
    def answer(script: Script, request: Request) -> bytes | list[bytes] | None:
        return REFUSED if script.turn == 4 else script.store(request)

    async def check(script: Script, client: Client) -> None:
        calls = []
        for one in PAYLOADS:  # each in a turn of its own: those of one turn are one batch
            calls.append(asyncio.create_task(client.publish("t", one)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [number for number, result in enumerate(results) if isinstance(result, RequestError)] == [3]
        assert script.stored == PAYLOADS[:3] + PAYLOADS[4:]
        assert len({batch.producer_id for batch in script.batches()}) == 2

    with_peer(answer, check)


def test_records_that_are_published_in_one_turn_are_one_batch_behind_what_was_sent_before() -> None:
    async def check(script: Script, client: Client) -> None:
        client.send("t", b"sent")
        places = await asyncio.gather(*(client.publish("t", one) for one in PAYLOADS))
        assert places == [Position(0, 1 + number) for number in range(len(PAYLOADS))]
        assert script.stored == [b"sent", *PAYLOADS]
        assert len(script.batches()) == 2

    with_peer(lambda script, request: script.store(request), check)


def test_a_record_that_is_refused_does_not_cost_the_others_of_its_turn() -> None:
    def answer(script: Script, request: Request) -> bytes | list[bytes] | None:
        assert isinstance(request, CreateRecords)
        if any(one.payload == b"3" for one in iterate(decode_chunk(bytes(request.records)))):
            return REFUSED
        return script.store(request)

    async def check(script: Script, client: Client) -> None:
        results = await asyncio.gather(*(client.publish("t", one) for one in PAYLOADS), return_exceptions=True)
        assert [number for number, result in enumerate(results) if isinstance(result, RequestError)] == [3]
        assert script.stored == PAYLOADS[:3] + PAYLOADS[4:]

    with_peer(answer, check)


def test_what_is_no_record_costs_nobody_else_anything() -> None:
    async def check(script: Script, client: Client) -> None:
        wrong: Any = "text"
        calls = [client.publish("t", wrong), client.publish("t", b"x"), client.publish("t", b"y", key=wrong)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [TypeError, Position, TypeError]

    with_peer(lambda script, request: script.store(request), check)


def test_a_batch_that_can_never_be_stored_is_given_up_in_the_end() -> None:
    clock = ManualClock()

    def answer(script: Script, request: Request) -> bytes:
        clock.advance(16)
        return AGAIN

    async def check(script: Script, client: Client) -> None:
        with pytest.raises(RequestError) as caught:
            await client.publish("t", b"x")
        assert caught.value.repeat
        assert len(script.batches()) > 1

    with_peer(answer, check, request_timeout_seconds=30, clock=clock)


def test_a_server_that_cannot_store_is_told_of_at_once_and_in_the_end_with_how_many_records_are_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason = "topic 't': the server cannot store at present (its disk may be full): 5 of 10 records are stored"
    warnings: list[list[str]] = []
    clock = ManualClock()

    def answer(script: Script, request: Request) -> bytes | list[bytes] | None:
        if script.turn > 1:
            clock.advance(16)
            warnings.append(caplog.messages[:])
            return AGAIN
        return script.store(request)

    async def check(_: Script, client: Client) -> None:
        with pytest.raises(RequestError) as caught:
            await client.publish_many("t", PAYLOADS, batch_records=5)
        assert str(caught.value).startswith(f"{reason}; given up after ")

    with_peer(answer, check, request_timeout_seconds=30, clock=clock)
    assert warnings[:2] == [[], [f"{reason}; trying for 30 s"]]
    assert len(caplog.messages) == 1


def test_a_server_that_stores_and_breaks_off_before_each_answer_stores_each_batch_once() -> None:
    def answer(script: Script, request: Request) -> bytes | list[bytes] | None:
        stored = script.store(request)
        if script.turn in (1, 4, 8):
            script.peers[-1].transport.abort()
            return None
        return stored

    async def check(script: Script, client: Client) -> None:
        await client.publish_many("t", PAYLOADS, batch_records=2)
        assert script.stored == PAYLOADS
        assert len(script.peers) == 4

    with_peer(answer, check)


def test_a_server_that_is_silent_gets_its_connection_closed_and_the_outcome_is_unknown() -> None:
    async def check(script: Script, client: Client) -> None:
        with pytest.raises(RequestTimeoutError):
            await client.publish("t", b"x")
        with pytest.raises(RequestTimeoutError):
            await client.fetch("t")
        with pytest.raises(OutcomeUnknownError):
            await client.create_topic("t")

    with_peer(lambda script, request: None, check, request_timeout_seconds=0.1)


def test_the_time_of_a_batch_behind_one_that_is_stuck_runs_from_its_submission() -> None:
    clock = ManualClock()
    clock.advance(1)

    async def check(script: Script, client: Client) -> None:
        stuck = [client._producer.submit("t", 0, b"x", 1) for _ in range(2)]
        clock.advance(30)
        assert client._keeper.link is not None
        client._keeper.link.abort(RequestTimeoutError("stuck"))
        client._producer.expire(None)
        assert [type(done.exception()) for done in stuck] == [RequestTimeoutError] * 2

    with_peer(lambda script, request: None, check, clock=clock)


def test_answers_that_nobody_asked_for_end_the_connection() -> None:
    async def check(script: Script, client: Client) -> None:
        assert (await client.publish("t", b"x")).offset == 0
        with pytest.raises(ConnectionLostError, match="broke the protocol"):
            await client.publish("t", b"y")

    with_peer(lambda script, request: [script.store(request), CREATED], check, reconnect=False)


def test_a_broken_answer_to_a_batch_ends_the_connection_and_the_batch_is_sent_again() -> None:
    def answer(script: Script, request: Request) -> bytes | list[bytes] | None:
        stored = script.store(request)
        return CREATED + b"short" if script.turn == 1 else stored

    async def check(script: Script, client: Client) -> None:
        assert await client.publish("t", b"x") == Position(0, 0)
        assert script.stored == [b"x"]

    with_peer(answer, check)


def test_a_server_that_does_not_know_our_commands_is_told_by_one_error() -> None:
    async def check(script: Script, client: Client) -> None:
        for command, call in (
            ("13", client.publish("t", b"x")),
            ("13", client.publish_many("t", [b"x"])),
            ("24", client.positions(["t"])),
            ("25", client.fetch_partition("t", 0)),
            ("25", anext(client.follow("t"))),
            ("26", client.move_group("t", "g", {0: 1})),
            ("14", client.transaction("t").writer(0, "p").stage("t", [b"x"])),
        ):
            with pytest.raises(UnsupportedByServerError, match=f"understand command {command}; Babelbus 0.1 or newer"):
                await call

    with_peer(lambda script, request: UNKNOWN, check, version=b"jebp/1.0")


def connect_to(greeting: bytes, *, then_close: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """Connect to a server that says this and no more; return the error, and what the loop complained about."""
    complaints: list[dict[str, Any]] = []

    class Other(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transports.append(transport)
            transport.write(greeting)
            if then_close:
                transport.close()

    transports: list[Any] = []

    async def run() -> str:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: complaints.append(context))
        server = await loop.create_server(Other, "127.0.0.1", 0)
        with pytest.raises(ConnectionLostError) as caught:
            await Client(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", identity=Identity.generate()).__aenter__()
        for transport in transports:
            transport.abort()
        server.close()
        await asyncio.sleep(0)  # in which connections hear of their end
        await asyncio.sleep(0)
        return str(caught.value)

    return asyncio.run(run()), complaints


def test_a_port_of_another_protocol_is_told_with_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "GREETING_SECONDS", 0.05)
    for greeting, reason in ((b"", "said nothing for 0.05 s"), (b'{"welcome":{}}\n', "frame starts with 7b, not 01")):
        told, complaints = connect_to(greeting)
        assert reason in told
        assert told.endswith("that of jebp is 5320 unless jebp.port is set")
        assert complaints == []
    told, complaints = connect_to(b"", then_close=True)
    assert "the server ended the connection during the handshake" in told
    assert complaints == []


def test_a_handshake_that_is_never_finished_is_one_error_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "TIMEOUT_SECONDS", 0.05)
    told, complaints = connect_to(encode_frame(b"jebp/1.1"))
    assert "no handshake with 127.0.0.1" in told
    assert complaints == []
