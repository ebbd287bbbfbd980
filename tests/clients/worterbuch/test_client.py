"""Our client against a whole server: TCP, WebSocket and unix sockets, in a loop and in threads."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.clients.worterbuch.blocking import BlockingClient
from babelbus.clients.worterbuch.client import Event, Versioned, connect
from babelbus.clients.worterbuch.errors import (
    ConnectionLostError,
    KeyLockedError,
    NoSuchValueError,
    RequestError,
    UnauthorizedError,
    VersionedError,
)
from babelbus.config import WorterbuchSettings
from babelbus.errors import LocalProtocolError
from tests.support.bus import in_loop
from tests.support.server import LiveServer, configure
from tests.support.web import SECRET, token


def serve(folder: Path, **settings: object) -> LiveServer:
    chosen = WorterbuchSettings(port=0, tcp_port=0, unix_path=str(folder / "w.sock"), **settings)  # type: ignore[arg-type]
    return LiveServer(configure(folder / "data", worterbuch=chosen))


def urls(live: LiveServer) -> dict[str, str]:
    addresses = live.server.addresses
    return {
        "tcp": f"tcp://{addresses['worterbuch-tcp']}",
        "ws": f"ws://{addresses['worterbuch']}/ws",
        "unix": f"unix://{addresses['worterbuch-unix']}",
    }


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(tmp_path_factory.mktemp("w")) as server:
        yield server


@pytest.fixture(params=["tcp", "ws", "unix"])
def url(live: LiveServer, request: pytest.FixtureRequest) -> str:
    found: str = urls(live)[request.param]
    with BlockingClient(found) as client:
        client.pdelete("#", quiet=True)
    return found


def test_values_come_back_as_they_were_set(url: str) -> None:
    @in_loop
    async def talk() -> None:
        async with await connect(url) as client:
            values = {"a/b": {"x": [1, None, True]}, "größe": "ü", "null": None, "big": "x" * 2**20}
            await asyncio.gather(*[client.set(key, value) for key, value in values.items()])
            assert [await client.get(key) for key in values] == list(values.values())
            assert await client.pget("a/#") == {"a/b": {"x": [1, None, True]}}
            assert sorted(await client.ls()) == ["$SYS", "a", "big", "größe", "null"]
            assert await client.ls("a") == ["b"]
            assert await client.pls("?") != []
            assert await client.delete("null") is None
            with pytest.raises(NoSuchValueError, match="null"):
                await client.get("null")
            with pytest.raises(NoSuchValueError):
                await client.delete("null")
            assert set(await client.pdelete("?")) == {"größe", "big"}
            assert await client.pdelete("a/#", quiet=True) == {}
            with pytest.raises(RequestError, match="wildcard") as caught:
                await client.set("a/?", 1)
            assert caught.value.code == 0
            with pytest.raises(LocalProtocolError):
                await client.set("\ud800", 1)
            assert await client.get("$SYS/clients") >= 1

    talk()


def test_compare_and_set_is_for_one_of_many(url: str) -> None:
    @in_loop
    async def talk() -> None:
        async with await connect(url) as client, await connect(url) as other:

            async def count(one: object) -> None:
                del one
                for _ in range(20):
                    while True:
                        try:
                            found = await client.cget("n")
                        except NoSuchValueError:
                            found = Versioned(0, 0)
                        try:
                            await other.cset("n", found.value + 1, found.version)
                            break
                        except VersionedError:
                            continue

            with pytest.raises(VersionedError) as caught:
                await client.cset("n", 1, 7)
            assert caught.value.code == 18
            await asyncio.gather(*map(count, range(3)))
            assert await client.cget("n") == Versioned(60, 60)
            with pytest.raises(VersionedError):
                await client.set("n", 1)

    talk()


def test_subscriptions_give_events_to_iterators_and_callbacks(url: str) -> None:
    @in_loop
    async def talk() -> None:
        async with await connect(url) as client:
            heard: list[Event] = []
            await client.set("s/a", 1)
            one = await client.subscribe("s/a")
            await client.subscribe("s/a", heard.append, unique=True, live_only=True)
            some = await client.psubscribe("s/#")
            children = await client.subscribe_ls("s")
            await client.set("s/a", 1)
            await client.publish("s/b", "event")
            await client.set("s/c", 2)
            await client.delete("s/a")
            assert [await anext(one) for _ in range(3)] == [
                Event({"s/a": 1}),
                Event({"s/a": 1}),
                Event(deleted={"s/a": 1}),
            ]
            assert [await anext(some) for _ in range(5)] == [
                Event({"s/a": 1}),
                Event({"s/a": 1}),
                Event({"s/b": "event"}),
                Event({"s/c": 2}),
                Event(deleted={"s/a": 1}),
            ]
            assert [sorted(await anext(children)) for _ in range(3)] == [["a"], ["a", "c"], ["c"]]
            assert heard == [Event(deleted={"s/a": 1})]
            await one.close()
            await one.close()
            assert [event async for event in one] == []
            with pytest.raises(RequestError):
                await client.psubscribe("#/x")

    talk()


def test_locks_are_held_in_turn(url: str) -> None:
    @in_loop
    async def talk() -> None:
        order: list[int] = []
        clients = [await connect(url) for _ in range(5)]
        await clients[0].lock("l")
        with pytest.raises(KeyLockedError):
            await clients[1].lock("l")

        async def work(number: int) -> None:
            async with clients[number].locked("l"):
                order.append(number)

        tasks = []
        for number in range(1, 5):
            tasks.append(asyncio.create_task(work(number)))
            await asyncio.sleep(0)
            assert await clients[number].ls() is not None  # its place is taken
        await clients[0].close()  # gives back what it holds
        await asyncio.gather(*tasks)
        assert order == [1, 2, 3, 4]
        for client in clients:
            await client.close()

    talk()


def test_a_lock_that_is_no_longer_awaited_goes_to_the_next(url: str) -> None:
    @in_loop
    async def talk() -> None:
        async with await connect(url) as holder, await connect(url) as leaver, await connect(url) as other:
            await holder.lock("l")
            task = asyncio.create_task(leaver.acquire_lock("l"))
            await asyncio.sleep(0)
            await leaver.ls()  # its place is taken
            task.cancel()
            await asyncio.wait([task])
            await leaver.ls()
            await holder.release_lock("l")
            await other.lock("l")

    talk()


def test_what_is_sent_without_waiting_is_there_after_a_flush(url: str) -> None:
    @in_loop
    async def talk() -> None:
        async with await connect(url) as client:
            for number in range(3000):
                await client.send(f"n/{number}", number, in_flight_max=100)
            await client.flush()
            assert await client.pget("n/#") == {f"n/{number}": number for number in range(3000)}
            await client.send("bad/#", 1)
            await client.send("fine", 1)
            with pytest.raises(RequestError, match="wildcard"):
                await client.flush()
            await client.flush()
            assert await client.get("fine") == 1

    talk()


def test_threads_have_the_same_client(url: str) -> None:
    with BlockingClient(url) as client, BlockingClient(url) as other:
        client.set_name("one")
        client.set_grave_goods(["g/#"])
        client.set_last_will({"w": "gone"})
        client.set("g/x", 1)
        events = other.psubscribe("?/#", live_only=True)
        with client.locked("l"), pytest.raises(KeyLockedError):
            other.lock("l")
        client.send_many((f"m/{number}", number) for number in range(10))
        client.flush()
        assert other.pget("m/#") == {f"m/{number}": number for number in range(10)}
        assert next(event for event in events if "m/9" in event.values) == Event({"m/9": 9})
        client.cset("c", 1, 0)
        assert client.cget("c") == Versioned(1, 1)
        client.publish("p", 1)
        with client.locked("l2"):
            pass
        ended = other.subscribe("w", live_only=True)
        client.close()
        assert next(ended) == Event({"w": "gone"})
        with pytest.raises(NoSuchValueError):
            other.get("g/x")
        with pytest.raises(ConnectionLostError):
            client.get("w")
        ended.close()
        assert list(ended) == []


def test_a_server_that_goes_is_an_error_for_who_waits_and_who_asks(tmp_path: Path) -> None:
    with serve(tmp_path) as live, BlockingClient(urls(live)["tcp"]) as client:
        events = client.subscribe("k", live_only=True)
        live.ask_to_stop()
        with pytest.raises(ConnectionLostError):
            next(events)
        with pytest.raises(ConnectionLostError):
            client.get("k")


def test_wrong_addresses_and_silent_servers_are_told(live: LiveServer, tmp_path: Path) -> None:
    for wrong in ("http://x", "nonsense", "unix://", "tcp://"):
        with pytest.raises(LocalProtocolError):
            BlockingClient(wrong)
    with pytest.raises(ConnectionLostError):
        BlockingClient(f"unix://{tmp_path}/none")
    with pytest.raises(ConnectionLostError):
        BlockingClient(f"ws://{live.server.addresses['worterbuch']}/nothing/there")
    with pytest.raises(ConnectionLostError, match="no greeting"):
        BlockingClient(f"tcp://{live.server.addresses['jebp']}", timeout_seconds=0.05)


def test_a_token_is_shown_to_the_server_and_judged(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "key").chmod(0o600)
    with serve(tmp_path, auth_key_file=str(tmp_path / "key")) as live:
        for url in urls(live).values():
            with BlockingClient(url, token=token({"read": ["a/#"], "write": ["a/#"]})) as client:
                client.set("a/b", 1)
                with pytest.raises(UnauthorizedError, match="b"):
                    client.set("b", 1)
                with pytest.raises(UnauthorizedError):
                    client.delete("a/b")
            with pytest.raises(UnauthorizedError):
                BlockingClient(url, token="nothing")
            with BlockingClient(url) as client, pytest.raises((UnauthorizedError, ConnectionLostError)):
                client.get("a/b")
