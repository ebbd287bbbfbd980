"""Lists of topics, searched, sorted and in pages, and where the settings of a topic come from."""

import time
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from babelbus.config import Config, TopicDefaults
from babelbus.core.access import SERVER
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from tests.web.test_admin import Caller, FakeServer, serve


async def page(call: Caller, **query: object) -> tuple[list[str], Any]:
    """The names of a page, and the answer."""
    status, body = await call("GET", f"/api/topics?{urlencode(query)}")
    assert status == 200, body
    return [topic["name"] for topic in body["topics"]], body


async def fill(bus: FakeServer, **counts: int) -> None:
    for name, count in counts.items():
        bus.bus.topic(name, partitions=2)
        for number in range(count):
            events = [Event(name, b"x" * 100)]
            await bus.broker.publish(Publication(SERVER, "test", events, name, partition=number % 2)).wait()


def test_topics_are_searched_sorted_and_cut_into_pages() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        await fill(bus, apples=2, Pears=5, plums=0, grapes=5)
        names, body = await page(call, search="P", count=2)
        assert (names, body["total"]) == (["apples", "grapes"], 4)
        assert (await page(call, search="p", offset=2, count=2))[0] == ["Pears", "plums"]
        assert (await page(call, search="p", offset=4, count=2))[0] == []
        assert (await page(call, search="P", descending=1))[0] == ["plums", "Pears", "grapes", "apples"]
        assert (await page(call, search="nothing"))[1] == {"topics": [], "total": 0}
        for order in ("records", "bytes", "published"):
            names, body = await page(call, sort=order, descending=1, count=3)
            assert names == ["grapes", "Pears", "apples"], order
            assert [topic["published"] for topic in body["topics"]] == [5, 5, 2]
        every = (await call("GET", "/api/topics"))[1]
        assert sorted(every) == ["topics"]
        assert "published" not in every["topics"][0]

    serve(test)


@pytest.mark.parametrize("name", ["{a}", "a}{b", "100%", "plant/line 1", "<b>&amp;</b>", "Wörterbuch"])
def test_a_topic_of_any_name_is_found(name: str) -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        await fill(bus, **{name: 1})
        status, body = await call("GET", f"/api/topics/{quote(name, safe='')}")
        assert (status, body.get("name")) == (200, name)

    serve(test)


@pytest.mark.parametrize("query", ["sort=size", "offset=-1", "count=x", "offset=1.5", f"count={2**63}"])
def test_a_wrong_parameter_is_named(query: str) -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        status, body = await call("GET", f"/api/topics?{query}")
        assert (status, body["code"]) == (400, "bad_request")

    serve(test)


def test_each_setting_says_where_its_value_comes_from() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        made = {"name": "orders", "settings": {"ack": "written", "retention_seconds": "7d"}}
        assert (await call("POST", "/api/topics", made))[0] == 201
        sources = (await call("GET", "/api/topics/orders"))[1]["sources"]
        assert sources | {"ack": "topic", "retention_seconds": "topic", "engine": "default"} == sources
        assert set(sources.values()) == {"topic", "default"}

    serve(test)


def test_a_value_of_the_configuration_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(topics=TopicDefaults(retention_seconds=3600.0, ack="written"))
    monkeypatch.setattr("tests.web.test_admin.Config", lambda: config)

    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("orders", retention_seconds=3600.0, ack="flushed")
        sources = (await call("GET", "/api/topics/orders"))[1]["sources"]
        assert (sources["retention_seconds"], sources["ack"], sources["cleanup"]) == ("config", "topic", "default")

    serve(test)


def test_a_topic_shows_its_segments_and_when_retention_takes_them() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        topic = bus.bus.topic("orders", segment_bytes=1024, retention_seconds=60.0, retention_bytes=4_000)
        for _ in range(40):
            event = Event("orders", b"x" * 100)
            bus.bus.clock.advance(1)
            await bus.broker.publish(Publication(SERVER, "test", [event], "orders")).wait()
        (partition,) = (await call("GET", "/api/topics/orders?parts=1"))[1]["partitions"]
        parts = partition["parts"]
        assert len(parts) == partition["segments"] > 3
        assert [part["first_offset"] for part in parts[1:]] == [part["next_offset"] for part in parts[:-1]]
        assert sum(part["bytes"] for part in parts) == partition["bytes"]
        newest = bus.bus.clock.now_ms()
        assert (parts[-1]["newest_ms"], parts[-1]["removed_ms"]) == (newest, newest + 60_000)
        assert parts[0]["removed_ms"] < parts[-1]["removed_ms"]
        assert partition["bytes_left"] == max(4_000 + parts[0]["bytes"] - partition["bytes"], 0)
        bus.bus.clock.advance((parts[0]["removed_ms"] - newest) / 1000 + 1)
        await bus.broker.clean()
        left = (await call("GET", "/api/topics/orders?parts=1"))[1]["partitions"][0]["parts"]
        assert left[0]["first_offset"] > 0
        assert topic.partition(0).log.first_offset == left[0]["first_offset"]
        plain = (await call("GET", "/api/topics/orders"))[1]["partitions"][0]
        assert "parts" not in plain
        assert "bytes_left" not in plain

    serve(test)


def test_an_empty_topic_without_retention_has_nothing_to_come() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("orders")
        (partition,) = (await call("GET", "/api/topics/orders?parts=1"))[1]["partitions"]
        (part,) = partition["parts"]
        assert (part["newest_ms"], part["removed_ms"], partition["bytes_left"]) == (None, None, None)

    serve(test)


def test_a_page_of_ten_thousand_topics_costs_the_loop_a_fraction_of_a_second() -> None:
    """The bench says how much (`console.topics`); a list that grew with the square of the topics would fail here."""

    async def test(call: Caller, bus: FakeServer) -> None:
        for number in range(2_000):
            bus.bus.topic(f"site/{number % 7}/line{number}", engine="memory")
        began = time.process_time()
        for order in ("name", "records", "bytes", "published"):
            names, body = await page(call, search="LINE1", sort=order, offset=100, count=50)
            assert (len(names), body["total"]) == (50, 1111)
        assert time.process_time() - began < 5

    serve(test)
