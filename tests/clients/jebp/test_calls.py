"""Calls and streams of the client against the real server, over real sockets; faults come from a proxy that cuts."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.client import (
    BadArgumentError,
    Client,
    ConnectionLostError,
    OutcomeUnknownError,
    RequestTimeoutError,
    UnknownTopicError,
    UnsupportedByServerError,
)
from babelbus.clients.jebp import client as client_module
from babelbus.clients.jebp import connection, reconnect
from babelbus.clients.jebp.admin import Admin
from babelbus.core.catalog import UnknownTopicError as UnknownTopic
from babelbus.protocols.jebp.call_messages import Ask, Joined, Watching
from babelbus.protocols.jebp.calls import methods
from babelbus.protocols.jebp.calls.call import Call, Method, Stream
from babelbus.protocols.jebp.items import CALLS_MAX, ITEM, OPEN, SERVER_HEAD, encode_items
from babelbus.protocols.jebp.messages import CallItems, Data, Request, Subscribe
from tests.clients.jebp.test_client import Bus, CuttingProxy, running
from tests.clients.jebp.test_client_scripted import Script, with_peer
from tests.support.bus import SAFETY_NET_SECONDS


class Number(msgspec.Struct, frozen=True, array_like=True):
    number: int


class Count(Stream):
    """Counts up for each message, by the number of the message."""

    def __init__(self, call: Call, start: Number) -> None:
        self.call = call
        self.at = start.number
        call.send(msgspec.msgpack.encode(self.at))

    def receive(self, body: Data) -> None:
        self.at += msgspec.msgpack.decode(body, type=int)
        if self.at > 100:
            raise UnknownTopic("no topic is that high")
        if self.at < 0:
            self.call.end(self.at)
        else:
            self.call.send(msgspec.msgpack.encode(self.at))


class House:
    """What the methods of the tests share."""

    def __init__(self) -> None:
        self.calls = 0
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()

    def double(self, _call: Call, parameters: Number) -> int:
        self.calls += 1
        return 2 * parameters.number

    def wait(self, call: Call, _parameters: Number) -> Stream:
        self.calls += 1
        self.begun.set()

        async def work() -> None:
            await self.gate.wait()
            call.end(self.calls)

        return call.run(work())


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "GREETING_SECONDS", SAFETY_NET_SECONDS)
    monkeypatch.setattr(reconnect, "TIMEOUT_SECONDS", SAFETY_NET_SECONDS)


def with_house(
    folder: Path, monkeypatch: pytest.MonkeyPatch, test: Callable[[House, Bus, Client], Coroutine[Any, Any, None]]
) -> None:
    async def run() -> None:
        house = House()
        monkeypatch.setitem(methods.METHODS, "double", Method(Number, house.double))
        monkeypatch.setitem(methods.METHODS, "wait", Method(Number, house.wait))
        monkeypatch.setitem(methods.METHODS, "count", Method(Number, Count))
        async with running(folder) as bus, bus.client() as client:
            await test(house, bus, client)

    asyncio.run(run())


def test_calls_are_answered_together_with_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(house: House, bus: Bus, client: Client) -> None:
        await client.create_topic("t")
        doubled = [client.calls.call("double", Number(number), int, safe=True) for number in range(3_000)]
        published = [client.publish("t", b"x") for _ in range(100)]
        numbers, places = await asyncio.gather(asyncio.gather(*doubled), asyncio.gather(*published))
        assert numbers == [2 * number for number in range(3_000)]
        assert sorted(place.offset for place in places) == list(range(100))
        assert house.calls == 3_000

    with_house(tmp_path, monkeypatch, test)


def test_errors_have_the_class_of_their_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(house: House, bus: Bus, client: Client) -> None:
        with pytest.raises(UnsupportedByServerError, match="no method 'nothing'"):
            await client.calls.call("nothing", [], int, safe=True)
        with pytest.raises(BadArgumentError, match="double: Expected `int`") as caught:
            await client.calls.call("double", ["one"], int, safe=True)
        assert caught.value.code == "bad_argument"

    with_house(tmp_path, monkeypatch, test)


def test_a_stream_goes_both_ways_and_ends_from_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(house: House, bus: Bus, client: Client) -> None:
        async with await client.calls.stream("count", Number(3)) as stream:
            assert msgspec.msgpack.decode(await stream.first()) == 3
            for _ in range(3):
                stream.send(2)
            heard = []
            async for body in stream:
                heard.append(msgspec.msgpack.decode(body))
                if len(heard) == 3:
                    stream.send(-100)
            assert heard == [5, 7, 9]
            assert stream.result is not None
            assert msgspec.msgpack.decode(stream.result) == -91
        stream = await client.calls.stream("count", Number(3))
        stream.send(98)
        with pytest.raises(UnknownTopicError, match="no topic is that high"):
            async for _ in stream:
                pass
        stream = await client.calls.stream("count", Number(1))
        stream.close()
        assert [body async for body in stream] == []
        assert await client.calls.call("double", Number(1), int, safe=True) == 2

    with_house(tmp_path, monkeypatch, test)


def test_a_call_that_is_given_up_does_not_disturb_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(house: House, bus: Bus, client: Client) -> None:
        task = asyncio.create_task(client.calls.call("wait", Number(1), int, safe=True))
        await house.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        house.gate.set()
        assert await client.calls.call("wait", Number(1), int, safe=True) == 2

    with_house(tmp_path, monkeypatch, test)


def test_more_calls_than_a_connection_may_have_wait_for_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(house: House, bus: Bus, client: Client) -> None:
        tasks = [
            asyncio.create_task(client.calls.call("wait", Number(1), int, safe=True)) for _ in range(CALLS_MAX + 500)
        ]
        await house.begun.wait()
        house.gate.set()
        await asyncio.gather(*tasks)
        assert house.calls == CALLS_MAX + 500

    with_house(tmp_path, monkeypatch, test)


def test_a_wait_for_room_ends_in_time_and_calls_that_are_cancelled_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CALLS_AT_ONCE", 1)

    async def test(house: House, bus: Bus, client: Client) -> None:
        task = asyncio.create_task(client.calls.call("wait", Number(1), int, safe=True))
        await house.begun.wait()
        async with asyncio.timeout(SAFETY_NET_SECONDS / 2):
            with pytest.raises(RequestTimeoutError, match="double: too many calls"):
                await client.calls.call("double", Number(1), int, safe=True, timeout_seconds=0.05)
            task.cancel()
            assert await client.calls.call("double", Number(1), int, safe=True) == 2

    with_house(tmp_path, monkeypatch, test)


def test_a_call_without_an_answer_in_time_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(house: House, bus: Bus, client: Client) -> None:
        client._keeper._timeout_seconds = 0.2  # the next look at what is late
        client._keeper._watch()
        for safe in (True, False):
            with pytest.raises(RequestTimeoutError, match="wait: no answer in time"):
                await client.calls.call("wait", Number(1), int, safe=safe, timeout_seconds=0.05)
        house.gate.set()

    with_house(tmp_path, monkeypatch, test)


def test_a_lost_connection_sends_a_safe_call_again_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(house: House, bus: Bus, client: Client) -> None:
        async with CuttingProxy(bus.address, []) as proxy, bus.client(address=proxy.address) as mine:
            safe = asyncio.create_task(mine.calls.call("wait", Number(1), int, safe=True))
            unsafe = asyncio.create_task(mine.calls.call("wait", Number(1), int, safe=False))
            stream = await mine.calls.stream("count", Number(1))
            await stream.first()
            while house.calls < 2:
                await house.begun.wait()
            link = mine._keeper.link
            assert link is not None
            link._transport.abort()
            with pytest.raises(OutcomeUnknownError, match="it may be done or not"):
                await unsafe
            with pytest.raises(ConnectionLostError):
                await stream.first()
            house.gate.set()
            assert await safe == 3
            assert proxy.connections == 2

    with_house(tmp_path, monkeypatch, test)


def test_a_server_of_1_1_is_told_before_anything_is_sent() -> None:
    async def test(script: Script, client: Client) -> None:
        with pytest.raises(UnsupportedByServerError, match=r"speaks jebp/1\.1; double needs jebp/1\.2: upgrade"):
            await client.calls.call("double", Number(1), int, safe=True)
        assert script.seen == []

    with_peer(lambda script, request: b"\xa0\x30", test, version=b"jebp/1.1")


@pytest.mark.parametrize(
    "items",
    [
        [(9, 1, b"\xc0")],  # of a call that is not open
        [(0, 0, b"\xc0")],  # an item of a call with one answer
        [(0, 2, b"\xc0")],  # an error that is none
        [(0, 7, b"")],
    ],
)
def test_a_server_that_breaks_the_protocol_of_calls_loses_its_connection(items: list[tuple[int, int, Data]]) -> None:
    def answer(script: Script, request: Request) -> bytes:
        assert isinstance(request, CallItems)
        return encode_items(SERVER_HEAD, items)

    async def test(script: Script, client: Client) -> None:
        with pytest.raises(OutcomeUnknownError, match="broke the protocol"):
            await client.calls.call("double", Number(1), int, safe=False)

    with_peer(answer, test, version=b"jebp/1.2", reconnect=False)


def test_a_malformed_result_is_an_error_of_the_call() -> None:
    def answer(script: Script, request: Request) -> bytes:
        return encode_items(SERVER_HEAD, [(0, 1, b"\xa1x")])

    async def test(script: Script, client: Client) -> None:
        with pytest.raises(Exception, match="result is malformed"):
            await client.calls.call("double", Number(1), int, safe=True)

    with_peer(answer, test, version=b"jebp/1.2")


def test_a_silent_server_is_asked_for_a_sign_of_life_while_calls_are_open() -> None:
    probes: list[Request] = []

    async def test(script: Script, client: Client) -> None:
        script.mute = True
        stream = await client.calls.stream("count", Number(1))
        with pytest.raises(RequestTimeoutError, match="no answer for"):
            await stream.first()

    def answer(script: Script, request: Request) -> None:
        probes.append(request)

    with_peer(answer, test, version=b"jebp/1.2", request_timeout_seconds=0.2, reconnect=False)
    assert probes[1:] == [Subscribe(())]


READS: dict[str, Callable[[Client], Coroutine[Any, Any, Any]]] = {
    "match": lambda client: client.state.match("#"),
    "history": lambda client: client.state.history("k"),
    "as_of": lambda client: client.state.as_of(offset=0).get("k"),
    "topics": lambda client: client.topics.list(),
    "change": lambda client: client.topics.remove("t"),
}


def cut_off(client: Client) -> None:
    """End the connection of a client for good: nobody listens where it asks for the next one."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        client._keeper._address = f"127.0.0.1:{closed.getsockname()[1]}"
    link = client._keeper.link
    assert link is not None
    link.abort(ConnectionLostError("cut off"))


@pytest.mark.parametrize("name", READS)
def test_a_stream_that_reads_ends_in_time_when_the_server_does_not_come_back(name: str) -> None:
    async def test(script: Script, client: Client) -> None:
        cut_off(client)
        async with asyncio.timeout(SAFETY_NET_SECONDS):
            with pytest.raises(ConnectionLostError, match="no connection to"):
                await READS[name](client)

    with_peer(lambda script, request: None, test, version=b"jebp/1.2", request_timeout_seconds=0.2)


@pytest.mark.parametrize("name", list(READS)[:-1])
def test_a_stream_that_reads_is_not_asked_again_for_ever(name: str) -> None:
    def answer(script: Script, request: Request) -> None:
        asyncio.get_running_loop().call_soon(script.peers[-1].transport.abort)

    async def test(script: Script, client: Client) -> None:
        async with asyncio.timeout(SAFETY_NET_SECONDS):
            with pytest.raises((ConnectionLostError, RequestTimeoutError)):
                await READS[name](client)

    with_peer(answer, test, version=b"jebp/1.2", request_timeout_seconds=0.2)


def test_a_follower_until_the_end_is_not_asked_again_for_ever() -> None:
    async def test(script: Script, client: Client) -> None:
        async with asyncio.timeout(SAFETY_NET_SECONDS):
            with pytest.raises(RequestTimeoutError, match="gave no answer"):
                await anext(client.follow("t", until_end=True))

    with_peer(lambda script, request: None, test, request_timeout_seconds=0.2)


OPENINGS: dict[str, Callable[[Client], Coroutine[Any, Any, Any]]] = {
    **READS,
    "consume": lambda client: client.consume("t", "g").join(),
    "consume, as an iterator": lambda client: client.consume("t", "g").take(),
    "subscribe": lambda client: client.subscribe("a/#").begin(),
    "respond": lambda client: client.respond("a/#").begin(),
    "watch": lambda client: client.state.watch("#").__anext__(),
    "lock": lambda client: client.state.lock("k", timeout=0).acquire(),
    "admin": lambda client: anext(Admin(client.calls).parts("GET", "/api/listen", b"", 0.2)),
}


@pytest.mark.parametrize("name", OPENINGS)
def test_a_stream_that_a_live_server_never_answers_ends_in_time(name: str) -> None:
    async def test(script: Script, client: Client) -> None:
        async with asyncio.timeout(SAFETY_NET_SECONDS):
            with pytest.raises(RequestTimeoutError, match="no answer"):
                await OPENINGS[name](client)

    with_peer(lambda script, request: None, test, version=b"jebp/1.2", request_timeout_seconds=0.2)


def test_a_stream_that_was_answered_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(script: Script, client: Client) -> None:
        link = client._keeper.link
        assert link is not None
        async with client.consume("t", "g"), client.subscribe("a/#"):
            link.check_calls(asyncio.get_running_loop().time() + 3_600, 7_200)
            assert [call.deadline for call in link._calls.values()] == [inf, inf]
            link.abort(ConnectionLostError("enough"))

    with_peer(answer_openings, test, version=b"jebp/1.2", reconnect=False)


def answer_openings(script: Script, request: Request) -> bytes | None:
    """Answer the first message of `consume` and `subscribe`, and nothing else."""
    assert isinstance(request, CallItems)
    items: list[tuple[int, int, Data]] = []
    for number, kind, body in request.items:
        if kind == OPEN:
            method, _ = msgspec.msgpack.decode(body)
            first = Joined("explicit", 30.0, "none", False) if method == "consume" else Watching([True])
            items.append((number, ITEM, msgspec.msgpack.encode(first)))
    return encode_items(SERVER_HEAD, items) if items else None


@pytest.mark.parametrize("name", ["consume", "subscribe"])
def test_an_end_that_a_live_server_never_confirms_is_not_waited_for(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(script: Script, client: Client) -> None:
        async with asyncio.timeout(SAFETY_NET_SECONDS):
            async with client.consume("t", "g") if name == "consume" else client.subscribe("a/#"):
                pass
        assert client.connected
        assert caplog.messages == [f"{name}: the server has not confirmed the end for 1.5 s"]

    with_peer(answer_openings, test, version=b"jebp/1.2", request_timeout_seconds=1.5)


def test_callers_that_give_up_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def give_up(wait: Coroutine[Any, Any, Any]) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait, 0.001)

    async def test(house: House, bus: Bus, client: Client) -> None:
        stream = await client.calls.stream("count", Number(1))
        await stream.first()
        monkeypatch.setattr(client._producer, "held_bytes", client.in_flight_bytes_max)
        for _ in range(3):
            await give_up(stream.first())
            await give_up(client.drain())
        assert (len(stream._waiters), len(client._producer._waiting_for_room)) == (0, 0)
        cut_off(client)
        for _ in range(3):
            await give_up(client.positions())
        assert len(client._keeper._waiting) == 0

    with_house(tmp_path, monkeypatch, test)


def test_a_request_without_a_connection_ends_at_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REPLY_GRACE_SECONDS", 3_600.0)

    async def test(house: House, bus: Bus, client: Client) -> None:
        cut_off(client)
        async with asyncio.timeout(SAFETY_NET_SECONDS):
            with pytest.raises(ConnectionLostError, match="no connection to"):
                await client.request("calc/double", b"1", timeout=0.05)

    with_house(tmp_path, monkeypatch, test)


def test_a_request_without_room_ends_at_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REPLY_GRACE_SECONDS", 3_600.0)
    monkeypatch.setattr(connection, "CALLS_AT_ONCE", 1)

    async def test(house: House, bus: Bus, client: Client) -> None:
        waiting = asyncio.create_task(client.calls.call("wait", Number(1), int, safe=True))
        await house.begun.wait()
        async with asyncio.timeout(SAFETY_NET_SECONDS):
            with pytest.raises(RequestTimeoutError, match="request: too many calls"):
                await client.request("calc/double", b"1", timeout=0.05)
        house.gate.set()
        await waiting

    with_house(tmp_path, monkeypatch, test)


def test_a_request_tells_the_server_what_the_wait_for_a_connection_has_left_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def note(_call: Call, ask: Ask) -> None:
        asked.append(ask.timeout_seconds)

    monkeypatch.setitem(methods.METHODS, "request", Method(Ask, note))

    async def test(house: House, bus: Bus, client: Client) -> None:
        cut_off(client)
        task = asyncio.create_task(client.request("calc/double", timeout=SAFETY_NET_SECONDS))
        while not client._keeper._waiting:  # noqa: ASYNC110  # it has no event of its own
            await asyncio.sleep(0)
        client._keeper._address = bus.address
        with pytest.raises(Exception, match="result is malformed"):
            await task
        assert 0 < asked[0] < SAFETY_NET_SECONDS

    with_house(tmp_path, monkeypatch, test)
