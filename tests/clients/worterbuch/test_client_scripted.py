"""The client against a peer that says what a test wants: silence, late answers, signs of life."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from babelbus.clients.worterbuch.blocking import BlockingClient
from babelbus.clients.worterbuch.client import Client, connect
from babelbus.clients.worterbuch.errors import ConnectionLostError, RequestTimeoutError
from tests.support.bus import SAFETY_NET_SECONDS, in_loop, turns
from tests.support.worterbuch import ack, until

WELCOME = {"welcome": {"info": {"version": "1.4.0", "protocolVersion": "0.11"}, "clientId": "c1"}}

SECONDS = 0.2 * SAFETY_NET_SECONDS
"""Bounds of tests whose time jumps: no loop stands still for half of this, and three such jumps reach no safety net."""

Answer = Callable[[str, dict[str, Any]], dict[str, Any] | None]


class Peer(asyncio.Protocol):
    """A server whose answers are a function of a request's name and members; `None` is silence."""

    def __init__(self, answer: Answer) -> None:
        self.seen: list[tuple[str, Any]] = []
        """Name and key (without one, transaction id) of each request."""
        self.lost = asyncio.Event()
        self._answer = answer
        self._rest = b""

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.say(WELCOME)

    def say(self, message: object) -> None:
        self._transport.write(json.dumps(message).encode() + b"\n")

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            ((name, members),) = json.loads(line).items()
            self.seen.append((name, members.get("key", members["transactionId"])))
            answer = self._answer(name, members)
            if answer is not None:
                self.say(answer)


@asynccontextmanager
async def listening(answer: Answer = lambda name, members: None) -> AsyncIterator[tuple[Peer, str]]:
    peer = Peer(answer)
    server = await asyncio.get_running_loop().create_server(lambda: peer, "127.0.0.1", 0)
    async with server:
        yield peer, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await peer.lost.wait()


async def acquire_soon(client: Client, key: str) -> "asyncio.Task[None]":
    task = asyncio.create_task(client.acquire_lock(key))
    await asyncio.sleep(0)
    return task


async def client_is_heard(client: Client, peer: Peer) -> list[str]:
    """What the peer saw since the last look, when all that was written has arrived."""
    await client.send("mark", 1)
    await until(lambda: ("set", "mark") in peer.seen)
    names = [name for name, key in peer.seen if key == "l"]
    peer.seen.clear()
    return names


CALLS: dict[str, Callable[[Client], Awaitable[object]]] = {
    "get": lambda client: client.get("k"),
    "cGet": lambda client: client.cget("k"),
    "pGet": lambda client: client.pget("#"),
    "set": lambda client: client.set("k", 1),
    "cSet": lambda client: client.cset("k", 1, 0),
    "publish": lambda client: client.publish("k", 1),
    "delete": lambda client: client.delete("k"),
    "pDelete": lambda client: client.pdelete("#"),
    "ls": lambda client: client.ls(),
    "pLs": lambda client: client.pls(),
    "lock": lambda client: client.lock("k"),
    "releaseLock": lambda client: client.release_lock("k"),
    "subscribe": lambda client: client.subscribe("k"),
    "pSubscribe": lambda client: client.psubscribe("#"),
    "subscribeLs": lambda client: client.subscribe_ls(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_request_without_an_answer_ends_in_time(name: str) -> None:
    @in_loop
    async def talk() -> None:
        time = Watch()
        async with listening() as (peer, url):
            client = await connect(url, request_timeout_seconds=SECONDS)
            asked = asyncio.ensure_future(CALLS[name](client))
            await until(lambda: peer.seen)
            await time.skip(SECONDS)
            text = rf"^{name}: no answer within {SECONDS:g} s; it may be done or not$"
            with pytest.raises(RequestTimeoutError, match=text):
                await asked
            await client.close()

    talk()


def test_sent_values_without_answers_end_in_time() -> None:
    @in_loop
    async def talk() -> None:
        time = Watch()
        async with listening() as (_, url):
            client = await connect(url, request_timeout_seconds=SECONDS)
            await client.send("k", 1)
            flushed = asyncio.create_task(client.flush())
            await turns()
            await time.skip(SECONDS)
            with pytest.raises(RequestTimeoutError, match="flush"):
                await flushed
            await client.close()
        async with listening() as (_, url):
            client = await connect(url, request_timeout_seconds=SECONDS)
            sent = asyncio.create_task(client.send("k", 1, in_flight_max=1))
            await turns()
            await time.skip(SECONDS)
            with pytest.raises(RequestTimeoutError, match="send"):
                await sent
            await client.close()

    talk()


def test_a_thread_that_asks_a_silent_server_gets_the_same_error() -> None:
    @in_loop
    async def talk() -> None:
        async with listening() as (_, url):

            def ask() -> None:
                client = BlockingClient(url, request_timeout_seconds=2.0)  # so that it asks before it looks for silence
                with pytest.raises(RequestTimeoutError):
                    client.get("k")
                client.close()

            await asyncio.to_thread(ask)

    talk()


class Watch:
    """Lets the loop's time jump."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._real = self._loop.time
        self._skipped = 0.0
        self._loop.time = lambda: self._real() + self._skipped  # type: ignore[method-assign]

    async def skip(self, seconds: float) -> None:
        self._skipped += seconds
        for _ in range(10):  # the question, its answer, and what both bring about
            await asyncio.sleep(0.001)


def test_a_lock_is_awaited_as_long_as_the_server_gives_signs_of_life() -> None:
    def answer(name: str, members: dict[str, Any]) -> dict[str, Any] | None:
        return None if name == "acquireLock" else {"state": {"transactionId": members["transactionId"], "value": "TCP"}}

    @in_loop
    async def talk() -> None:
        time = Watch()
        async with listening(answer) as (peer, url):
            client = await connect(url, request_timeout_seconds=SECONDS)
            task = await acquire_soon(client, "l")
            await until(lambda: peer.seen)
            for asked in range(3):
                await time.skip(SECONDS / 2)
                await until(lambda asked=asked: len(peer.seen) > 1 + asked)  # type: ignore[misc]
            assert peer.seen[1:] == [("get", "$SYS/clients/c1/protocol")] * 3
            assert not task.done()
            peer.say(ack(1))
            await task
            await client.close()

    talk()


def test_a_silent_server_loses_the_connection_of_those_that_await_a_lock_or_events() -> None:
    def answer(name: str, members: dict[str, Any]) -> dict[str, Any] | None:
        return ack(members["transactionId"]) if name == "subscribe" else None

    @in_loop
    async def talk() -> None:
        time = Watch()
        async with listening(answer) as (peer, url):
            client = await connect(url, request_timeout_seconds=SECONDS)
            events = await client.subscribe("k")
            task = await acquire_soon(client, "l")
            for _ in range(3):
                await time.skip(SECONDS / 2)
                await until(lambda: len(peer.seen) == 3)
            with pytest.raises(ConnectionLostError, match="the server was silent for "):
                await task
            with pytest.raises(ConnectionLostError, match="the server was silent"):
                await anext(events)
            assert not client.connected

    talk()


def test_a_lock_that_is_given_up_is_not_kept() -> None:
    @in_loop
    async def talk() -> None:
        async with listening() as (peer, url):
            client = await connect(url)
            task = await acquire_soon(client, "l")
            other = await acquire_soon(client, "l")
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert await client_is_heard(client, peer) == ["acquireLock", "acquireLock"]  # the other still waits
            other.cancel()
            await asyncio.wait([other])
            assert await client_is_heard(client, peer) == ["releaseLock"]
            await client.close()
        async with listening() as (peer, url):
            time = Watch()
            client = await connect(url, request_timeout_seconds=SECONDS)
            locked = asyncio.create_task(client.lock("l"))
            await until(lambda: peer.seen)
            await time.skip(SECONDS)
            with pytest.raises(RequestTimeoutError):
                await locked
            assert await client_is_heard(client, peer) == ["lock", "releaseLock"]
            await client.close()

    talk()


def test_a_subscription_that_is_given_up_ends_on_the_server() -> None:
    @in_loop
    async def talk() -> None:
        async with listening() as (peer, url):
            client = await connect(url)
            task = asyncio.create_task(client.subscribe("k"))
            await until(lambda: peer.seen)
            task.cancel()
            await until(lambda: len(peer.seen) == 2)
            assert peer.seen == [("subscribe", "k"), ("unsubscribe", 1)]
            await client.close()

    talk()


def test_a_call_from_another_loop_is_refused() -> None:
    @in_loop
    async def talk() -> None:
        async with listening() as (peer, url):
            client = await connect(url)
            errors: list[RuntimeError] = []

            async def ask() -> None:
                with pytest.raises(RuntimeError) as caught:
                    await client.get("k")
                errors.append(caught.value)

            thread = threading.Thread(target=lambda: asyncio.run(ask()))
            thread.start()
            await asyncio.to_thread(thread.join)
            assert "another event loop" in str(errors[0])
            assert not peer.seen
            await client.close()

    talk()
