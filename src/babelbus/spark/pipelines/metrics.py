"""A running pipeline's metrics for Prometheus, on an endpoint of the runner's own: the server knows no pipeline."""

from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from babelbus.spark.pipelines.progress import Batch

LABELS = ("pipeline", "sink")
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class PipelineMetrics:
    """Metrics of the queries of one pipeline; one label each for the pipeline and the sink."""

    def __init__(self, pipeline: str) -> None:
        self.registry = CollectorRegistry()
        self._pipeline = pipeline
        self._server: WSGIServer | None = None

        def counter(name: str, doc: str) -> Counter:
            return Counter(f"babelbus_pipeline_{name}", doc, LABELS, registry=self.registry)

        def gauge(name: str, doc: str) -> Gauge:
            return Gauge(f"babelbus_pipeline_{name}", doc, LABELS, registry=self.registry)

        self._rows_in = counter("rows_in_total", "Rows read.")
        self._rows_out = counter("rows_out_total", "Rows handed to the sink.")
        self._rows_late = counter("rows_late_total", "Rows dropped because they came behind the watermark.")
        self._rows_lost = counter("rows_lost_total", "Offsets that were gone when their turn came.")
        self._failures = counter("failures_total", "Times that the query failed.")
        self._running = gauge("running", "1 while the query runs.")
        self._lag = gauge("lag_records", "Records that were there and not read yet at the end of the last batch.")
        self._state_rows = gauge("state_rows", "Rows in Spark's state stores.")
        self._state_bytes = gauge("state_bytes", "Memory of Spark's state stores.")
        self._seconds = Histogram(
            "babelbus_pipeline_batch_seconds", "Duration of a batch.", LABELS, buckets=SECONDS, registry=self.registry
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
        self._running.labels(self._pipeline, sink).set(1)

    def batch(self, batch: Batch) -> None:
        """Count a batch."""
        at = batch.pipeline, batch.sink
        self._rows_in.labels(*at).inc(batch.rows_in)
        self._rows_out.labels(*at).inc(batch.rows_out)
        self._rows_late.labels(*at).inc(batch.rows_late)
        self._rows_lost.labels(*at).inc(batch.rows_lost)
        self._state_rows.labels(*at).set(batch.state_rows)
        self._state_bytes.labels(*at).set(batch.state_bytes)
        self._seconds.labels(*at).observe(batch.seconds)
        if batch.lag is not None:
            self._lag.labels(*at).set(batch.lag)

    def skipped(self, sink: str, reason: str) -> None:
        """Count nothing."""

    def failed(self, sink: str, reason: str, restart_seconds: float | None) -> None:
        """Count a failure."""
        self._failures.labels(self._pipeline, sink).inc()
        self._running.labels(self._pipeline, sink).set(0)
