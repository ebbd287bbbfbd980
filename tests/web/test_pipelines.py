"""What pipelines tell, as Prometheus reads it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from babelbus.web.errors import TooManyPipelinesError
from babelbus.web.pipelines import (
    KEPT_SECONDS,
    LATE_SECONDS,
    LISTED_SECONDS,
    NAME_BYTES_MAX,
    NODES_MAX,
    PIPELINES_MAX,
    SINKS_MAX,
    Node,
    PipelineReport,
    Pipelines,
    SinkReport,
)
from tests.access.drivers import Admin
from tests.access.house import House
from tests.support.clock import ManualClock
from tests.web.test_admin import Caller, FakeServer, serve


def report(**said: Any) -> PipelineReport:
    return PipelineReport({"out": SinkReport(**said)})


class Shown:
    """Pipelines, and what is shown of them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.pipelines = Pipelines(self.clock)
        self._registry = CollectorRegistry()
        self._registry.register(self.pipelines)

    def lines(self) -> dict[str, float]:
        found = {}
        for line in generate_latest(self._registry).decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found


def test_the_last_word_of_a_pipeline_is_shown_and_forgotten_after_a_while() -> None:
    shown = Shown()
    at = '{pipeline="p",sink="out"}'
    shown.pipelines.tell("p", report(rows_in=3, running=True, batch_seconds=0.5))
    shown.pipelines.tell("p", report(rows_in=5, running=True, lag_records=7))
    lines = shown.lines()
    assert (lines[f"babelbus_pipeline_rows_in_total{at}"], lines[f"babelbus_pipeline_running{at}"]) == (5, 1)
    assert lines[f"babelbus_pipeline_lag_records{at}"] == 7
    shown.pipelines.tell("p", report(rows_in=5, running=True))
    assert f"babelbus_pipeline_lag_records{at}" not in shown.lines()  # it is not known, which is not none
    shown.clock.advance(LATE_SECONDS + 1)
    assert shown.lines()[f"babelbus_pipeline_running{at}"] == 0  # its process is gone
    shown.clock.advance(KEPT_SECONDS)
    assert shown.lines() == {}


def test_so_many_pipelines_are_shown_and_no_more() -> None:
    shown = Shown()
    for number in range(PIPELINES_MAX):
        shown.pipelines.tell(f"p{number}", report())
    shown.pipelines.tell("p0", report(rows_in=1))
    with pytest.raises(TooManyPipelinesError):
        shown.pipelines.tell("another", report())
    with pytest.raises(TooManyPipelinesError):
        shown.pipelines.tell("p0", PipelineReport({f"s{n}": SinkReport() for n in range(SINKS_MAX + 1)}))
    with pytest.raises(TooManyPipelinesError, match="name"):
        shown.pipelines.tell("p0", PipelineReport({"s" * (NAME_BYTES_MAX + 1): SinkReport()}))
    shown.clock.advance(KEPT_SECONDS + 1)
    shown.pipelines.tell("another", report())


def test_a_pipeline_tells_with_the_token_and_anybody_reads_the_metrics() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        body = {"sinks": {"out": {"rows_in": 4, "running": True}}}
        assert (await call("PUT", "/api/pipelines/p", body, authorization=None))[0] == 401
        assert await call("PUT", "/api/pipelines/p", body) == (200, {"pipeline": "p"})
        status, told = await call("PUT", "/api/pipelines/p", {"sinks": {"out": {"rows_in": "many"}}})
        assert (status, told["code"]) == (400, "bad_request")
        newer = {"sinks": {"out": {"rows_in": 4, "rows_of_tomorrow": 1}}}
        assert (await call("PUT", "/api/pipelines/p", newer))[0] == 200
        many: dict[str, Any] = {"sinks": {f"s{n}": {} for n in range(SINKS_MAX + 1)}}
        assert (await call("PUT", "/api/pipelines/p", many))[1]["code"] == "too_many_pipelines"
        async with call.session.get(f"{call.base}/metrics") as reply:
            assert 'babelbus_pipeline_rows_in_total{pipeline="p",sink="out"} 4.0' in await reply.text()

    serve(test)


WRONG_FIGURES = {
    "rows_in": -1, "rows_out": -1, "rows_late": -1, "rows_lost": -1, "failures": -1, "batches": -1, "state_rows": -1,
    "state_bytes": -1, "lag_records": -1, "batch_seconds": -0.5, "error_seconds": -0.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        *WRONG_FIGURES.items(),
        ("rows_in", 10**400),  # no float is as large: Prometheus would get no metric at all
        ("lag_records", 10**400),
        ("error_seconds", 1e300),  # JSON has no integer of so many milliseconds for the list
    ],
)
def test_a_figure_that_cannot_be_shown_is_refused(name: str, figure: float) -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        status, told = await call("PUT", "/api/pipelines/p", {"sinks": {"out": {name: figure}}})
        assert (status, told["code"]) == (400, "bad_request")
        assert name in told["error"]
        assert await call("GET", "/api/pipelines") == (200, {"pipelines": []})
        async with call.session.get(f"{call.base}/metrics") as reply:
            assert reply.status == 200

    serve(test)


def listed(shown: Shown) -> list[Any]:
    found: list[Any] = msgspec.to_builtins(shown.pipelines.all(lambda name: True))
    return found


def test_a_pipeline_is_listed_with_its_rates_and_its_failure() -> None:
    shown = Shown()
    began = shown.clock.now_ms()
    shown.pipelines.tell("p", report(rows_in=100, rows_out=10, running=True))
    (pipeline,) = listed(shown)
    (sink,) = pipeline["sinks"]
    assert (pipeline["heard_ms"], pipeline["silent"], pipeline["nodes"]) == (began, False, [])
    assert (sink["status"], sink["rows_in"], sink["rows_in_per_second"]) == ("running", 100, None)
    shown.clock.advance(5)
    shown.pipelines.tell("p", report(rows_in=600, rows_out=20, running=True, watermark="2026-01-01T00:00:00Z"))
    ((sink,),) = [one["sinks"] for one in listed(shown)]
    assert (sink["rows_in_per_second"], sink["rows_out_per_second"]) == (100.0, 2.0)
    assert sink["watermark"] == "2026-01-01T00:00:00Z"
    shown.clock.advance(5)
    shown.pipelines.tell("p", report(rows_in=600, failures=1, error="no such topic", error_seconds=2.5))
    ((sink,),) = [one["sinks"] for one in listed(shown)]
    assert (sink["status"], sink["error"], sink["error_ms"]) == ("failed", "no such topic", began + 7_500)
    shown.clock.advance(5)
    shown.pipelines.tell("p", report(rows_in=1, running=True))  # another run
    assert listed(shown)[0]["sinks"][0]["rows_in_per_second"] is None


def test_a_silent_pipeline_stays_in_the_list_for_a_day() -> None:
    shown = Shown()
    shown.pipelines.tell("p", report(running=True))
    shown.clock.advance(LATE_SECONDS + 1)
    (pipeline,) = listed(shown)
    assert (pipeline["silent"], pipeline["sinks"][0]["status"]) == (True, "silent")
    shown.clock.advance(KEPT_SECONDS)
    assert shown.lines() == {}
    assert len(listed(shown)) == 1
    shown.clock.advance(LISTED_SECONDS)
    assert listed(shown) == []


def test_a_graph_is_listed_once_and_bounded() -> None:
    shown = Shown()
    source, step = Node("in", "source", "topic a"), Node("rows", "step", "SQL", ["in"])
    sinks = {
        name: SinkReport(graph=[source, step, Node(name, "sink", "console", ["rows"])]) for name in ("out", "rows")
    }
    shown.pipelines.tell("p", PipelineReport(sinks))
    nodes = listed(shown)[0]["nodes"]
    assert [(node["kind"], node["name"], node["inputs"]) for node in nodes] == [
        ("source", "in", []),
        ("step", "rows", ["in"]),
        ("sink", "out", ["rows"]),
        ("sink", "rows", ["rows"]),
    ]
    long = Node("n" * 10_000, "step", "a" * 10_000, ["i" * 10_000] * 1_000)
    many = SinkReport(graph=[long, *(Node(f"n{n}", "step") for n in range(1_000))], error="e" * 10_000)
    shown.pipelines.tell("p", PipelineReport({"out": many}))
    (pipeline,) = listed(shown)
    assert len(pipeline["nodes"]) == NODES_MAX
    assert len(msgspec.json.encode(pipeline)) < 20_000


def test_pipelines_are_listed_over_http_as_a_runner_tells_them() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        node = {"name": "out", "kind": "sink", "about": "topic b", "inputs": ["in"]}
        sink = {"rows_in": 4, "running": True, "graph": [{"name": "in", "kind": "source"}, node]}
        assert (await call("PUT", "/api/pipelines/p", {"sinks": {"out": sink}}))[0] == 200
        assert (await call("GET", "/api/pipelines", authorization=None))[0] == 401
        status, told = await call("GET", "/api/pipelines")
        assert (status, [pipeline["name"] for pipeline in told["pipelines"]]) == (200, ["p"])
        assert told["pipelines"][0]["nodes"][1] == node

    serve(test)


def test_only_pipelines_that_may_be_read_are_listed(tmp_path: Path) -> None:
    with House(tmp_path) as house, Admin(house, house.alice) as alice, Admin(house, house.bob) as bob:
        house.grant("alice publish $pipelines/#", "bob read $pipelines/mine")
        for name in ("mine", "other"):
            assert alice.ask("PUT", f"/api/pipelines/{name}", {"sinks": {"out": {}}}) == 200
        assert bob.ask("PUT", "/api/pipelines/mine", {"sinks": {}}) == 403
        names = [one["name"] for one in json.loads(bob.open("GET", "/api/pipelines").read())["pipelines"]]
        assert names == ["mine"]
        assert json.loads(alice.open("GET", "/api/pipelines").read()) == {"pipelines": []}
