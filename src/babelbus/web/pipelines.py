"""Pipelines as the server knows them: a pipeline runs in a process of its own, which reports here.

Reports are kept in memory. Prometheus sees them under the names that the runner's own endpoint uses, as far as both
have a figure (docs/pipeline.md); the console also sees the graph, the failures, and pipelines that are silent.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from babelbus.clock import Clock
from babelbus.core.access import Action, check_may, may
from babelbus.web.answers import answer, read_body
from babelbus.web.calls import Call, Route
from babelbus.web.errors import TooManyPipelinesError

LATE_SECONDS = 30.0
"""A pipeline whose last report is older counts as stopped: a runner reports every 5 s."""
KEPT_SECONDS = 300.0
"""How long Prometheus sees the last report: Prometheus asks less often than a short run lasts."""
LISTED_SECONDS = 86_400.0
"""How long the list of pipelines has the last report."""
NODES_MAX = 128
"""Most nodes of a pipeline's graph; what comes behind is left out."""
INPUTS_MAX = 32
TEXT_LENGTH_MAX = 1_000
PIPELINES_MAX = 256
SINKS_MAX = 64
NAME_BYTES_MAX = 128
LABELS = ("pipeline", "sink")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A figure that is counted. Prometheus cannot show an integer that is too large for a float, and then shows nothing."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""A time of at most some thousand years: a longer one has no milliseconds that JSON can carry."""
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


class Node(msgspec.Struct, frozen=True):
    """A source, a step or a sink of a pipeline, and the names of the nodes that feed it."""

    name: str
    kind: str
    about: str = ""
    inputs: list[str] = []


class SinkReport(msgspec.Struct, frozen=True):
    """The figures of a run for one sink so far. `lag_records` is `None` if the lag is unknown.

    Unknown fields are ignored: the runner may be upgraded before the server.
    """

    rows_in: Count = 0
    rows_out: Count = 0
    rows_late: Count = 0
    rows_lost: Count = 0
    failures: Count = 0
    batches: Count = 0
    batch_seconds: Seconds = 0.0
    running: bool = False
    lag_records: Count | None = None
    state_rows: Count = 0
    state_bytes: Count = 0
    watermark: str | None = None
    error: str = ""
    """Why the query failed last."""
    error_seconds: Seconds | None = None
    """How long ago that was."""
    graph: list[Node] = []
    """The nodes that lead to the sink, and the sink."""


class PipelineReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of PUT /api/pipelines/{name}: each report replaces the last."""

    sinks: dict[str, SinkReport]


Status = Literal["running", "stopped", "failed", "silent"]


class SinkInfo(msgspec.Struct, frozen=True):
    """A sink of a pipeline. The rates are those between the last two reports, `None` before the second one."""

    name: str
    status: Status
    rows_in: int
    rows_out: int
    rows_late: int
    rows_lost: int
    failures: int
    batches: int
    batch_seconds: float
    lag_records: int | None
    state_rows: int
    state_bytes: int
    watermark: str | None
    rows_in_per_second: float | None
    rows_out_per_second: float | None
    error: str
    error_ms: int | None


class PipelineInfo(msgspec.Struct, frozen=True):
    """A pipeline; `heard_ms` is when it reported last."""

    name: str
    heard_ms: int
    silent: bool
    """Whether it has not reported for `LATE_SECONDS`: its process is gone, or cannot reach the server."""
    sinks: list[SinkInfo]
    nodes: list[Node]
    """The graph; empty if the runner does not tell it."""


_FIGURES = sorted(set(SinkInfo.__struct_fields__) & set(SinkReport.__struct_fields__))


class _Told(msgspec.Struct, frozen=True):
    """A report and when it came; and when the report before came, with the rows of its sinks."""

    at: float
    at_ms: int
    report: PipelineReport
    before_at: float = 0.0
    before: dict[str, tuple[int, int]] = {}


class Pipelines(Collector):
    """The last reports of pipelines; one label each for the pipeline and the sink."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: dict[str, _Told] = {}

    def tell(self, name: str, report: PipelineReport) -> None:
        """Record the report of a pipeline.

        Raises:
            TooManyPipelinesError: too many pipelines or sinks, or a name is too long.
        """
        now = self._clock.monotonic()
        self._forget(LISTED_SECONDS)
        if len(self._told) >= PIPELINES_MAX and name not in self._told:
            self._forget(KEPT_SECONDS)
        if len(report.sinks) > SINKS_MAX or (name not in self._told and len(self._told) >= PIPELINES_MAX):
            raise TooManyPipelinesError(f"more than {PIPELINES_MAX} pipelines or {SINKS_MAX} sinks of one: not shown")
        if any(len(one.encode()) > NAME_BYTES_MAX for one in (name, *report.sinks)):
            raise TooManyPipelinesError(f"a name of more than {NAME_BYTES_MAX} bytes: not shown")
        last = self._told.get(name)
        told = _Told(now, self._clock.now_ms(), _bounded(report))
        if last is not None:
            rows = {sink: (one.rows_in, one.rows_out) for sink, one in last.report.sinks.items()}
            told = msgspec.structs.replace(told, before_at=last.at, before=rows)
        self._told[name] = told

    def all(self, wanted: Callable[[str], bool]) -> list[PipelineInfo]:
        """Return the pipelines whose names are wanted, by name."""
        self._forget(LISTED_SECONDS)
        now = self._clock.monotonic()
        return [_describe(name, told, now) for name, told in sorted(self._told.items()) if wanted(name)]

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
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
        for name, told in self._told.items():
            if now - told.at > KEPT_SECONDS:
                continue
            for sink, one in told.report.sinks.items():
                yield (name, sink), one, now - told.at > LATE_SECONDS

    def _forget(self, seconds: float) -> None:
        """Remove the pipelines that have been silent for so long."""
        now = self._clock.monotonic()
        for name in [name for name, told in self._told.items() if now - told.at > seconds]:
            del self._told[name]


class PipelineRoutes:
    """The requests with which a pipeline tells how it is, and with which pipelines are listed."""

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (
            ("GET", "/api/pipelines", self._list),
            ("PUT", "/api/pipelines/{name}", self._tell),
        )

    async def _list(self, call: Call) -> web.Response:
        """Return the pipelines that the caller may read."""
        principal = call.principal
        shown = self._pipelines.all(lambda name: may(principal, Action.READ, f"{SUBJECT}/{name}"))
        return answer({"pipelines": shown})

    async def _tell(self, call: Call) -> web.Response:
        name = call.path_values["name"]
        check_may(call.principal, Action.PUBLISH, f"{SUBJECT}/{name}")
        self._pipelines.tell(name, await read_body(call, PipelineReport))
        return answer({"pipeline": name})


def _bounded(report: PipelineReport) -> PipelineReport:
    """Return a report without more than a page shows: a runner is a client, and reports stay in memory."""
    left, sinks = NODES_MAX, {}
    for name, sink in report.sinks.items():
        nodes = [
            Node(_cut(node.name), _cut(node.kind), _cut(node.about), [_cut(one) for one in node.inputs[:INPUTS_MAX]])
            for node in sink.graph[:left]
        ]
        left -= len(nodes)
        watermark = None if sink.watermark is None else _cut(sink.watermark)
        error = sink.error[:TEXT_LENGTH_MAX]
        sinks[name] = msgspec.structs.replace(sink, graph=nodes, watermark=watermark, error=error)
    return PipelineReport(sinks)


def _cut(text: str) -> str:
    return text[:NAME_BYTES_MAX]


def _describe(name: str, told: _Told, now: float) -> PipelineInfo:
    silent = now - told.at > LATE_SECONDS
    nodes = {(node.kind == "sink", node.name): node for sink in told.report.sinks.values() for node in sink.graph}
    sinks = [_describe_sink(sink, told, silent) for sink in told.report.sinks]
    return PipelineInfo(name, told.at_ms, silent, sinks, list(nodes.values()))


def _describe_sink(name: str, told: _Told, silent: bool) -> SinkInfo:
    report, seconds = told.report.sinks[name], told.at - told.before_at
    rows_in, rows_out = told.before.get(name, (0, 0))
    if name not in told.before or rows_in > report.rows_in or seconds <= 0 or silent:  # the first, or another run
        rates: tuple[float | None, float | None] = None, None
    else:
        rates = (report.rows_in - rows_in) / seconds, max(report.rows_out - rows_out, 0) / seconds
    status: Status = "running" if report.running else "failed" if report.error else "stopped"
    figures: dict[str, Any] = {field: getattr(report, field) for field in _FIGURES}
    return SinkInfo(
        name=name,
        status="silent" if silent and report.running else status,
        rows_in_per_second=rates[0],
        rows_out_per_second=rates[1],
        error_ms=None if report.error_seconds is None else told.at_ms - round(report.error_seconds * 1000),
        **figures,
    )
