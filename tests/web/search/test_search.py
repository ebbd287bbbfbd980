"""Search over real sockets, with the real process, on every engine."""

import asyncio
import json
import os
import queue
import signal
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from babelbus.core.access import SERVER
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from babelbus.storage.contract import Store
from babelbus.storage.files import FileSystem, LocalFiles
from babelbus.storage.sql.store import DatabaseStore
from babelbus.web.search import process, routes
from babelbus.web.search.process import SearchEndedError, Searcher
from babelbus.web.search.tasks import Task
from tests.access.house import House
from tests.support.bus import NOW, SAFETY_NET_SECONDS, in_loop
from tests.support.clock import ManualClock
from tests.support.console import Browser
from tests.support.worterbuch import until
from tests.web.test_admin import TOKEN, Caller, FakeServer, serve

ENGINES = ("disk", "disk of the tests", "memory", "db")


class Engine:
    """How a topic of an engine is made."""

    def __init__(self, name: str, folder: Path) -> None:
        self.files: FileSystem | None = LocalFiles() if name == "disk" else None
        self.others: dict[str, Store] = {}
        if name == "db":
            self.others["db"] = DatabaseStore(f"sqlite:///{folder / 'records.sqlite'}", LocalFiles(), ManualClock(NOW))
        self.settings: dict[str, Any] = {"engine": name.partition(" ")[0]}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.chdir(tmp_path)
    return Engine(request.param, tmp_path)


async def put(bus: FakeServer, topic: str, payloads: list[bytes]) -> None:
    events = [Event(topic, payload, b"key%d" % number) for number, payload in enumerate(payloads)]
    await bus.broker.publish(Publication(SERVER, "test", events, topic)).wait()


@asynccontextmanager
async def searching(call: Caller, topic: str, wanted: str, **query: object) -> AsyncIterator[Any]:
    text = urlencode({"filter": wanted, **query})
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with call.session.get(f"{call.base}/api/topics/{topic}/search?{text}", headers=headers) as reply:
        yield reply


async def search(call: Caller, topic: str, wanted: str, **query: object) -> tuple[list[int], dict[str, Any]]:
    """Return the offsets that were found, and the last progress."""
    async with searching(call, topic, wanted, **query) as reply:
        assert reply.status == 200, await reply.text()
        lines = [json.loads(line) for line in (await reply.read()).splitlines()]
    return [line["record"]["offset"] for line in lines if "record" in line], lines[-1]["progress"]


def test_a_search_finds_the_records_and_says_how_far_it_came(engine: Engine) -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("orders", **engine.settings)
        await put(bus, "orders", [b'{"n":%d,"text":"%s"}' % (number, b"x" * (number % 50)) for number in range(3_000)])
        assert await search(call, "orders", "/n = 2718") == (
            [2718],
            {
                "partition": 0,
                "offset": 3_000,
                "end_offset": 3_000,
                "records": 3_000,
                "hits": 1,
                "time_ms": NOW,
                "done": True,
                "why": "end",
                "text": "All records up to the end of the topic were searched.",
                "next": "0:3000",
            },
        )
        hits, progress = await search(call, "orders", "not /n < 2990")
        assert hits == list(range(2990, 3_000))
        hits, progress = await search(call, "orders", "/n >= 10", count=5)
        assert (hits, progress["why"], progress["done"]) == ([10, 11, 12, 13, 14], "count", False)
        assert (progress["next"], progress["records"]) == ("0:15", 15)
        hits, progress = await search(call, "orders", "/n >= 10", count=5, **{"from": progress["next"]})
        assert hits == [15, 16, 17, 18, 19]
        assert (await search(call, "orders", 'key = "key7"', offset=8))[0] == []
        assert (await search(call, "orders", 'key = "key7"', offset=7))[0] == [7]
        assert (await search(call, "orders", 'key = "key7"', time_ms=NOW + 1))[1]["records"] == 0

    serve(test, engine.files, engine.others)


def test_a_search_goes_through_segments_and_large_records(engine: Engine) -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        segments = {} if engine.settings["engine"] == "db" else {"segment_bytes": 2**16}
        bus.bus.topic("large", **engine.settings, **segments)
        for number in range(12):
            await put(bus, "large", [b"%d" % number + b"." * 30_000, b"needle %d" % number])
        await put(bus, "large", [b"y" * 3_000_000 + b"needle", b"end"])
        hits, progress = await search(call, "large", 'payload contains "needle"')
        assert hits == [*range(1, 24, 2), 24]
        assert (progress["records"], progress["offset"]) == (26, 26)

    serve(test, engine.files, engine.others)


def test_compacted_and_removed_records_are_passed(engine: Engine) -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        if engine.settings["engine"] == "db":
            pytest.skip("compaction of a database is tested with the database")
        topic = bus.bus.topic("keys", cleanup="compact", segment_bytes=2**16, **engine.settings)
        for number in range(300):
            record = Event("keys", b"needle %05d" % number * 50, b"same")
            await bus.broker.publish(Publication(SERVER, "test", [record], "keys")).wait()
        await topic.partitions[0].clean(bus.clock.now_ms())
        hits, progress = await search(call, "keys", 'payload contains "needle"', count=1000)
        assert 0 < len(hits) < 300
        assert (hits[-1], progress["done"], progress["offset"]) == (299, True, 300)
        assert progress["records"] == len(hits)

    serve(test, engine.files, engine.others)


def test_all_partitions_are_searched_and_a_search_goes_on_in_the_right_one() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("wide", 3)
        for number in range(30):
            event = Event("wide", b"a%d" % number)
            await bus.broker.publish(Publication(SERVER, "test", [event], "wide")).wait()
        hits, progress = await search(call, "wide", 'payload contains "a"', count=100)
        assert (len(hits), progress["partition"], progress["done"]) == (30, 2, True)
        found: list[int] = []
        place = "0:0"
        while True:
            hits, progress = await search(call, "wide", 'payload contains "a"', count=4, **{"from": place})
            found += hits
            place = progress["next"]
            if progress["done"]:
                break
        assert sorted(found) == sorted([*range(10)] * 3)

    serve(test)


def test_a_wrong_filter_is_answered_with_its_column() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("orders")
        for query, code in (
            ("filter=%2Fa+%3D", "invalid_filter"),
            ("", "bad_request"),
            ("filter=key+exists&from=x", "bad_request"),
            ("filter=key+exists&partition=9", "unknown_partition"),
        ):
            status, body = await call("GET", f"/api/topics/orders/search?{query}")
            assert (status >= 400, body["code"]) == (True, code)
            assert body.get("column", 5) == 5
        assert (await call("GET", "/api/topics/none/search?filter=key+exists"))[0] == 404

    serve(test)


def test_a_search_ends_with_its_time() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("orders")
        await put(bus, "orders", [b"x" * 100_000] * 30)
        async with searching(call, "orders", 'payload = "y"', budget_ms=1000) as reply:
            first = json.loads(await reply.content.readline())["progress"]
            assert (first.get("why", ""), first["done"]) == ("", False)
            bus.bus.clock.advance(2)
            last = json.loads((await reply.read()).splitlines()[-1])["progress"]
        assert last["why"] in ("budget", "end")  # the answer may have been written before the clock went on

    serve(test)


def test_a_process_that_dies_is_told_and_the_next_search_has_another_one() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("orders")
        await put(bus, "orders", [b"x"] * 10)
        assert (await search(call, "orders", 'payload = "x"'))[1]["done"]
        searcher = call.api.search.searcher
        first = searcher.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        hits, progress = await search(call, "orders", 'payload = "x"')
        assert (hits, progress["why"]) == ([], "ended")
        assert "process that searches has ended" in progress["text"]
        hits, progress = await search(call, "orders", 'payload = "x"', **{"from": progress["next"]})
        assert (len(hits), searcher.pid != first) == (10, True)

    serve(test)


@in_loop
async def test_somebody_who_gives_up_leaves_no_answer_for_the_next_one() -> None:
    searcher = Searcher()
    try:
        task = Task("payload exists", "t", "", 0, 0, 0, 10, 10, 1.0, b"")
        given_up = asyncio.ensure_future(searcher.run(task))
        await asyncio.sleep(0)
        given_up.cancel()
        outcome = await searcher.run(Task("payload exists", "t", "", 0, 0, 7, 10, 10, 1.0, b""))
        assert outcome.offset == 7
    finally:
        searcher.close()
    assert searcher.pid is None
    with pytest.raises(SearchEndedError):
        await searcher.run(task)


@in_loop
async def test_an_idle_process_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_SECONDS", 0.0)
    searcher = Searcher()
    await searcher.run(Task("payload exists", "t", "", 0, 0, 0, 10, 10, 1.0, b""))
    stopped = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, stopped.set)  # behind the timer of the idle process
    await stopped.wait()
    assert searcher.pid is None


@in_loop
async def test_a_process_that_ends_slowly_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    searcher = Searcher()
    await searcher.run(Task("payload exists", "t", "", 0, 0, 0, 10, 10, 1.0, b""))
    running = searcher._process
    assert running is not None
    waits: queue.Queue[threading.Thread] = queue.Queue()
    wait = running.wait

    def wait_slowly(timeout: float | None = None) -> int:
        waits.put(threading.current_thread())
        return wait(timeout)

    monkeypatch.setattr(running, "wait", wait_slowly)
    searcher.close()
    assert await asyncio.to_thread(waits.get) is not threading.current_thread()


def test_a_reader_that_takes_nothing_does_not_keep_the_place_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "READER_SECONDS", 0.2)

    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("orders")
        await put(bus, "orders", [b"x" + b"\x01" * 65_000] * 60)  # 24 MB as JSON
        host, _, port = call.base.removeprefix("http://").partition(":")
        query = urlencode({"filter": "payload exists", "count": 60, "bytes_max": 65_536, "budget_ms": 300})
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((host, int(port)))
            reader.sendall(
                f"GET /api/topics/orders/search?{query} HTTP/1.1\r\nHost: {host}:{port}\r\n"
                f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
            )
            search = call.api.search
            async with asyncio.timeout(SAFETY_NET_SECONDS):
                await until(lambda: search.slots.taken)
                await until(lambda: not search.slots.taken)

    serve(test)


def test_a_right_that_is_taken_away_during_a_step_takes_the_records_of_the_step_with_it(tmp_path: Path) -> None:
    with House(tmp_path) as house, ThreadPoolExecutor(1) as pool, Browser(house.server.addresses["admin"]) as alice:
        house.grant("alice read #")
        house.emit("walk/a", "walk/a")
        assert alice.log_in(token=house.alice.token).status == 200
        ask = partial(alice.ask, "GET", "/api/topics/walk%2Fa/search", filter="payload exists")
        assert ask().body.count(b'"record"') >= 2
        assert house.server.administration.api is not None
        searcher = house.server.administration.api.search.searcher
        assert searcher.pid is not None
        os.kill(searcher.pid, signal.SIGSTOP)
        try:
            told = pool.submit(ask)
            while not house.call(searcher._turn.locked):
                assert not told.done()
            house.grant("alice publish #")
        finally:
            os.kill(searcher.pid, signal.SIGCONT)
        body = told.result(SAFETY_NET_SECONDS).body
        assert b'"record"' not in body
        assert json.loads(body.splitlines()[-1])["progress"]["why"] == "removed"
