"""A running pipeline's metrics for Prometheus, on an endpoint of the runner's own: the server knows no pipeline."""

from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from babelbus.spark.pipelines.progress import Batch, Watcher

LABELS = ("pipeline", "sink")
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
COUNTERS = {
    "rows_in": "Rows read.",
    "rows_out": "Rows handed to the sink.",
    "rows_late": "Rows dropped because they came behind the watermark.",
    "rows_lost": "Offsets that were gone when their turn came.",
    "failures": "Times that the query failed.",
}
GAUGES = {
    "running": "1 while the query runs.",
    "lag_records": "Records that were there and not read yet at the end of the last batch.",
    "state_rows": "Rows in Spark's state stores.",
    "state_bytes": "Memory of Spark's state stores.",
}


class PipelineMetrics(Watcher):
    """Metrics of the queries of one pipeline; one label each for the pipeline and the sink."""

    def __init__(self, pipeline: str) -> None:
        registry = self.registry = CollectorRegistry()
        self._pipeline = pipeline
        self._server: WSGIServer | None = None
        prefix = "babelbus_pipeline"
        self._counters = {
            name: Counter(f"{prefix}_{name}_total", doc, LABELS, registry=registry) for name, doc in COUNTERS.items()
        }
        self._gauges = {name: Gauge(f"{prefix}_{name}", doc, LABELS, registry=registry) for name, doc in GAUGES.items()}
        self._seconds = Histogram(
            f"{prefix}_batch_seconds", "Duration of a batch.", LABELS, buckets=SECONDS, registry=registry
        )

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Start to serve `/metrics` in a thread until `close`; return the port (the system chooses for 0)."""
        server, _ = start_http_server(port, host, self.registry)
        self._server = server
        return int(server.server_port)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def started(self, sink: str) -> None:
        """Record that a query runs."""
        self._gauges["running"].labels(self._pipeline, sink).set(1)

    def batch(self, batch: Batch) -> None:
        """Count a batch."""
        at = batch.pipeline, batch.sink
        for name in ("rows_in", "rows_out", "rows_late", "rows_lost"):
            self._counters[name].labels(*at).inc(getattr(batch, name))
        for name in ("state_rows", "state_bytes"):
            self._gauges[name].labels(*at).set(getattr(batch, name))
        self._seconds.labels(*at).observe(batch.seconds)
        if batch.lag is not None:
            self._gauges["lag_records"].labels(*at).set(batch.lag)

    def failed(self, sink: str, reason: str, restart_seconds: float | None) -> None:
        """Count a failure."""
        self._counters["failures"].labels(self._pipeline, sink).inc()
        self._gauges["running"].labels(self._pipeline, sink).set(0)
