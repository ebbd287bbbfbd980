"""Pipelines in the server's metrics: a pipeline runs in a process of its own, which reports here.

Reports are kept in memory and shown to Prometheus under the names that the runner's own endpoint uses, as far as both
have a figure (docs/pipeline.md).
"""

from collections.abc import Iterator, Sequence

import msgspec
from aiohttp import web
from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from babelbus.clock import Clock
from babelbus.core.access import Action, check_may
from babelbus.web.answers import answer, read_body
from babelbus.web.calls import Call, Route
from babelbus.web.errors import TooManyPipelinesError

LATE_SECONDS = 30.0
"""A pipeline whose last report is older counts as stopped: a runner reports every 5 s."""
KEPT_SECONDS = 300.0
"""How long the last report is shown: Prometheus asks less often than a short run lasts."""
PIPELINES_MAX = 256
SINKS_MAX = 64
NAME_BYTES_MAX = 128
LABELS = ("pipeline", "sink")
SUBJECT = "$pipelines"
"""A report needs the right to publish `$pipelines/NAME`."""
_COUNTERS = {
    "rows_in": "Rows read",
    "rows_out": "Rows handed to the sink",
    "rows_late": "Rows dropped because they came behind the watermark",
    "rows_lost": "Offsets that were gone when their turn came",
    "failures": "Times that the query failed",
    "batches": "Batches done",
    "batch_seconds": "Time that they took",
}
_GAUGES = {
    "running": "1 while the query runs",
    "lag_records": "Records that were there and not read yet at the end of the last batch",
    "state_rows": "Rows in Spark's state stores",
    "state_bytes": "Memory of Spark's state stores",
}


class SinkReport(msgspec.Struct, frozen=True):
    """The figures of a run for one sink so far. `lag_records` is `None` if the lag is unknown.

    Unknown fields are ignored: the runner may be upgraded before the server.
    """

    rows_in: int = 0
    rows_out: int = 0
    rows_late: int = 0
    rows_lost: int = 0
    failures: int = 0
    batches: int = 0
    batch_seconds: float = 0.0
    running: bool = False
    lag_records: int | None = None
    state_rows: int = 0
    state_bytes: int = 0


class PipelineReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of PUT /api/pipelines/{name}: each report replaces the last."""

    sinks: dict[str, SinkReport]


class Pipelines(Collector):
    """The last reports of pipelines; one label each for the pipeline and the sink."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: dict[str, tuple[float, PipelineReport]] = {}

    def tell(self, name: str, report: PipelineReport) -> None:
        """Record the report of a pipeline.

        Raises:
            TooManyPipelinesError: too many pipelines or sinks, or a name is too long.
        """
        self._forget()
        if len(report.sinks) > SINKS_MAX or (name not in self._told and len(self._told) >= PIPELINES_MAX):
            raise TooManyPipelinesError(f"more than {PIPELINES_MAX} pipelines or {SINKS_MAX} sinks of one: not shown")
        if any(len(one.encode()) > NAME_BYTES_MAX for one in (name, *report.sinks)):
            raise TooManyPipelinesError(f"a name of more than {NAME_BYTES_MAX} bytes: not shown")
        self._told[name] = self._clock.monotonic(), report

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        self._forget()
        for field, doc in _COUNTERS.items():
            family = CounterMetricFamily(f"babelbus_pipeline_{field}", doc, labels=LABELS)
            for labels, report, _ in self._reports():
                family.add_metric(labels, getattr(report, field))
            yield family
        for field, doc in _GAUGES.items():
            gauge = GaugeMetricFamily(f"babelbus_pipeline_{field}", doc, labels=LABELS)
            for labels, report, late in self._reports():
                value = getattr(report, field)
                if value is not None:
                    gauge.add_metric(labels, 0.0 if late and field == "running" else float(value))
            yield gauge

    def _reports(self) -> Iterator[tuple[tuple[str, str], SinkReport, bool]]:
        now = self._clock.monotonic()
        for name, (told_at, report) in self._told.items():
            for sink, one in report.sinks.items():
                yield (name, sink), one, now - told_at > LATE_SECONDS

    def _forget(self) -> None:
        now = self._clock.monotonic()
        for name in [name for name, (told_at, _) in self._told.items() if now - told_at > KEPT_SECONDS]:
            del self._told[name]


class PipelineRoutes:
    """The request with which a pipeline tells how it is."""

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (("PUT", "/api/pipelines/{name}", self._tell),)

    async def _tell(self, call: Call) -> web.Response:
        name = call.path_values["name"]
        check_may(call.principal, Action.PUBLISH, f"{SUBJECT}/{name}")
        self._pipelines.tell(name, await read_body(call, PipelineReport))
        return answer({"pipeline": name})
