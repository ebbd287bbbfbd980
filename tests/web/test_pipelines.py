"""What pipelines tell, as Prometheus reads it."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from babelbus.clock import ManualClock
from babelbus.web.errors import TooManyPipelinesError
from babelbus.web.pipelines import (
    KEPT_SECONDS,
    LATE_SECONDS,
    NAME_BYTES_MAX,
    PIPELINES_MAX,
    SINKS_MAX,
    PipelineReport,
    Pipelines,
    SinkReport,
)
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
