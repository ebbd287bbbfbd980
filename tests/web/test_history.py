"""The history: its rings, the busiest topics and groups, its cost, and who may see it."""

import asyncio
import math
import time
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.access import SERVER
from babelbus.web.history import GROUPS_MAX, RINGS, SERIES_MAX, TOPICS_MAX, History, Series, decode, encode
from tests.access.house import House
from tests.support.console import Browser
from tests.web.test_admin import Caller, FakeServer, serve

PROTOCOLS = ("jebp", "zbus", "worterbuch", "sbus", "eventmesh", "admin")


# -- points ----------------------------------------------------------------------------------------------------------


@given(st.floats(min_value=1e-4, max_value=1e15))
def test_a_point_is_near_its_figure(value: float) -> None:
    kept = decode(encode(value))
    assert kept is not None
    assert abs(kept - value) <= value * 0.001


@given(st.integers(min_value=0, max_value=1_000))
def test_small_integers_are_exact(value: int) -> None:
    assert decode(encode(value)) == value


def test_what_is_no_figure_stays_none() -> None:
    assert decode(encode(math.nan)) is None
    assert decode(encode(-5.0)) == 0
    assert decode(encode(1e300)) is not None
    assert decode(encode(1e-300)) is not None


# -- rings -----------------------------------------------------------------------------------------------------------


def test_long_steps_are_means_or_the_worst_of_their_seconds() -> None:
    mean, worst = Series("a", "records/s", "a"), Series("b", "seconds", "b", is_worst=True)
    for tick in range(130):
        mean.value = worst.value = tick % 10
        mean.push(tick)
        worst.push(tick)
    assert mean.points(1, 130, 3) == [7, 8, 9]
    assert mean.points(10, 130, 2) == [4.5, 4.5]
    assert worst.points(10, 130, 2) == [9, 9]
    assert mean.points(60, 120, 3) == [None, 4.5, 4.5]


def test_a_ring_forgets_its_oldest_point() -> None:
    series = Series("a", "records/s", "a")
    for tick in range(RINGS[1] + 5):
        series.value = tick
        series.push(tick)
    points = series.points(1, RINGS[1] + 5, RINGS[1])
    assert (points[0], points[-1]) == (5, RINGS[1] + 4)


def test_seconds_that_nobody_looked_at_have_no_figure() -> None:
    series = Series("a", "records/s", "a")
    tick = 0
    for gap in (0, 3, 25, 700, 200_000):
        series.skip(tick, gap)
        tick += gap
        series.value = 7
        series.push(tick)
        tick += 1
        points = series.points(1, tick, RINGS[1])
        assert points[-1] == 7
        assert points[-1 - gap if gap < RINGS[1] else 0 : -1] == [None] * min(gap, RINGS[1] - 1)
    assert series.points(60, tick - tick % 60, RINGS[60]) == [None] * RINGS[60]


# -- sampling --------------------------------------------------------------------------------------------------------


def look(test: Callable[[Caller, FakeServer, History], Coroutine[Any, Any, None]]) -> None:
    async def run(call: Caller, bus: FakeServer) -> None:
        history = History(bus.broker, bus.bus.metrics, bus.clock, "/", PROTOCOLS, lambda: 0.25)
        bus.history = history
        await test(call, bus, history)

    serve(run)


def turn(bus: FakeServer, history: History, seconds: int = 1) -> None:
    for _ in range(seconds):
        bus.bus.clock.advance(1)
        history.sample()


async def points(call: Caller, *names: str, **query: object) -> dict[str, list[float | None]]:
    more = "".join(f"&{name}={value}" for name, value in query.items())
    status, body = await call("GET", f"/api/history?series={','.join(names)}{more}")
    assert status == 200, body
    return {one["name"]: one["points"] for one in body["series"]}


def test_rates_are_told_by_protocol_and_topic() -> None:
    async def test(call: Caller, bus: FakeServer, history: History) -> None:
        bus.bus.topic("orders")
        traffic = bus.bus.metrics.topic_published("jebp", "orders")
        live = bus.bus.metrics.live_delivered("zbus")
        bus.bus.metrics.connections.labels("zbus").set(3)
        turn(bus, history, 12)
        for _ in range(12):
            traffic.inc(5, 50)
            live.inc(2, 20)
            bus.bus.metrics.topic_published("admin", "orders").inc(1, 1)
            turn(bus, history)
        shown = await points(call, "published.jebp", "live.zbus", "connections.zbus", "topic.orders.published", count=2)
        assert shown == {
            "published.jebp": [5, 5],
            "live.zbus": [2, 2],
            "connections.zbus": [3, 3],
            "topic.orders.published": [6, 6],
        }
        for name in ("loop_lag", "memory", "cpu", "log_bytes", "groups_lag", "state_keys", "flush"):
            assert (await points(call, name, count=1))[name][0] is not None, name
        assert (await points(call, "loop_lag", step=10, count=1))["loop_lag"] == [0.25]
        total = (await points(call, "published.jebp"))["published.jebp"]
        assert sum(point for point in total if point) == 60
        await asyncio.to_thread(lambda: None)
        bus.bus.metrics.registry.collect()  # what is settled counts all the same
        traffic.settle()
        turn(bus, history)
        assert (await points(call, "published.jebp", count=1))["published.jebp"] == [0]

    look(test)


def test_the_list_says_what_there_is_and_what_is_left_out() -> None:
    async def test(call: Caller, bus: FakeServer, history: History) -> None:
        busiest = TOPICS_MAX + 4
        for number in range(TOPICS_MAX + 5):
            bus.bus.topic(f"t{number}", engine="memory")
            bus.bus.metrics.topic_published("jebp", f"t{number}").inc(number + 1, 1)
        for number in range(GROUPS_MAX + 3):
            bus.broker.groups.create("t1", f"g{number}", principal=SERVER)
        turn(bus, history, 2)
        status, body = await call("GET", "/api/history")
        assert status == 200
        names = [one["name"] for one in body["series"]]
        assert len(names) <= SERIES_MAX
        assert body["left_out"] == {"topics": 5, "groups": 3}
        assert f"topic.t{busiest}.published" in names
        assert "topic.t1.published" not in names
        assert all(one["unit"] and one["label"] for one in body["series"])
        bus.bus.metrics.topic_published("jebp", "t1").inc(1_000, 1)
        turn(bus, history, 10)
        names = [one["name"] for one in (await call("GET", "/api/history"))[1]["series"]]
        assert "topic.t1.published" in names  # it has the place of a quiet topic
        await bus.broker.remove_topic("t1", SERVER)
        bus.bus.metrics.forget_topic("t1")
        turn(bus, history, 30)
        _, body = await call("GET", "/api/history?series=topic.t1.published,memory")
        assert (body["missing"], [one["name"] for one in body["series"]]) == (["topic.t1.published"], ["memory"])
        assert not [one for one in history.series if one.startswith("group.")]

    look(test)


def test_the_lag_of_groups_is_told() -> None:
    async def test(call: Caller, bus: FakeServer, history: History) -> None:
        bus.bus.topic("orders")
        await call("POST", "/api/groups", {"topic": "orders", "name": "billing", "start": {"at": "beginning"}})
        turn(bus, history, 2)
        await call("POST", "/api/send", {"subject": "orders", "payload": "x"})
        turn(bus, history, 2)
        shown = await points(call, "group.orders.billing.lag", "groups_lag", count=3)
        assert shown == {"group.orders.billing.lag": [0, 1, 1], "groups_lag": [0, 1, 1]}

    look(test)


def test_a_name_with_a_comma_is_written_with_a_percent_sign() -> None:
    async def test(call: Caller, bus: FakeServer, history: History) -> None:
        bus.bus.topic("t")
        bus.broker.groups.create("t", "a,b%", principal=SERVER)
        turn(bus, history, 2)
        names = [one["name"] for one in (await call("GET", "/api/history"))[1]["series"]]
        assert "group.t.a%2Cb%25.lag" in names
        assert await points(call, "group.t.a%252Cb%2525.lag")

    look(test)


@pytest.mark.parametrize("query", ["step=2", "step=x", "count=0", "series=" + "a," * 200])
def test_a_wrong_question_is_refused(query: str) -> None:
    async def test(call: Caller, bus: FakeServer, history: History) -> None:
        asked = query if query.startswith("series") else f"series=memory&{query}"
        assert (await call("GET", f"/api/history?{asked}"))[0] == 400

    look(test)


def test_a_loop_that_was_held_leaves_a_gap_and_true_rates() -> None:
    async def test(call: Caller, bus: FakeServer, history: History) -> None:
        bus.bus.topic("orders")
        traffic = bus.bus.metrics.topic_published("jebp", "orders")
        traffic.inc(10, 1)
        turn(bus, history, 2)
        traffic.inc(50, 1)
        bus.bus.clock.advance(5)
        history.sample()
        assert (await points(call, "published.jebp", count=6))["published.jebp"] == [0, None, None, None, None, 10]

    look(test)


def test_the_start_of_the_server_is_shown_while_it_is_in_sight() -> None:
    async def test(call: Caller, bus: FakeServer, history: History) -> None:
        turn(bus, history, 20)
        _, body = await call("GET", "/api/history?series=memory&count=30")
        assert body["resets_ms"] == [history.started_ms]
        assert body["end_ms"] == bus.clock.now_ms()
        assert (await call("GET", "/api/history?series=memory&count=5"))[1]["resets_ms"] == []

    look(test)


# -- cost ------------------------------------------------------------------------------------------------------------


def test_the_memory_of_the_history_stays_below_a_megabyte() -> None:
    async def test(call: Caller, bus: FakeServer, history: History) -> None:
        metrics = bus.bus.metrics
        for number in range(1_000):
            bus.bus.topic(f"t{number}", engine="memory")
        for number in range(GROUPS_MAX * 2):
            bus.broker.groups.create("t1", f"g{number}", principal=SERVER)

        def count() -> None:
            for protocol in PROTOCOLS:
                metrics.live_delivered(protocol).inc(1, 1)
                metrics.live_received(protocol).inc(1, 1)
                metrics.connections.labels(protocol).set(1)
                for number in range(1_000):
                    metrics.topic_published(protocol, f"t{number}").inc(number, 1)
                    metrics.topic_fetched(protocol, f"t{number}").inc(number, 1)

        count()
        tracemalloc.start()
        try:
            before = tracemalloc.take_snapshot()
            for _ in range(25):
                turn(bus, history)
                count()
            after = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        grown = [one for one in after.compare_to(before, "filename") if "/web/history.py" in one.traceback[0].filename]
        assert len(history.series) > SERIES_MAX - 10
        assert sum(one.size_diff for one in grown) < 1_000_000
        assert len(history.series) <= SERIES_MAX

    look(test)


def test_a_second_costs_a_fraction_of_a_thousandth() -> None:
    """The figure is of the bench; this bound only holds off what would grow with records or with time."""

    async def test(call: Caller, bus: FakeServer, history: History) -> None:
        for number in range(100):
            bus.bus.topic(f"t{number}", engine="memory")
            bus.bus.metrics.topic_published("jebp", f"t{number}").inc(1, 1)
        turn(bus, history, 20)
        began = time.process_time()
        turn(bus, history, 100)
        assert (time.process_time() - began) / 100 < 0.05

    look(test)


# -- rights ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("history")) as house:
        yield house


def count_all(house: House) -> None:
    for traffic in house.server.metrics.published.values():
        traffic.inc(5, 5)


def test_who_may_not_read_the_metrics_sees_no_history(house: House) -> None:
    with Browser(house.server.addresses["admin"]) as one:
        bearer = {"Authorization": f"Bearer {house.alice.token}"}
        house.grant("alice read walk/a")
        assert one.ask("GET", "/api/history", headers=bearer).status == 403
        house.grant("alice read walk/a", "alice read $metrics")
        house.call(lambda: count_all(house))
        history = house.server.history
        assert history is not None
        house.until(lambda: bool(history.topics))
        names = [series["name"] for series in one.ask("GET", "/api/history", headers=bearer).body["series"]]
        assert "memory" in names
        assert {name for name in names if name.startswith("topic.")} <= {"topic.walk/a.published"}
        assert one.ask("GET", "/api/history", headers=bearer, series="topic.walk/b.published").body["missing"]


def test_the_server_looks_once_a_second_and_not_without_the_console(house: House, tmp_path: Path) -> None:
    history = house.server.history
    assert history is not None
    ticks = history.ticks
    house.until(lambda: history.ticks > ticks)
