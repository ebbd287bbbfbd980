"""A running pipeline reports its state to the server, so that the server's metrics show it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from babelbus.cli.api import path_of
from babelbus.cli.command import CommandError
from babelbus.cli.output import note
from babelbus.clock import SystemClock
from babelbus.spark.pipelines.progress import Batch, Watcher

if TYPE_CHECKING:
    from babelbus.cli.api import AdminApi

TELL_SECONDS = 5.0
ERROR_LENGTH_MAX = 1_000


class Reporter(Watcher):
    """Records each batch and reports to the server from a thread of its own: a slow server delays no batch.

    Use it in a `with`; the last report says that nothing runs any more. While no server is found, nothing is reported.
    """

    def __init__(
        self,
        find_api: "Callable[[], AdminApi | None]",
        pipeline: str,
        graph: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    ) -> None:
        self._find_api = find_api
        self._pipeline = pipeline
        self._clock = SystemClock()
        self._failed_at: dict[str, float] = {}
        self._sinks: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._complained = False
        for sink, nodes in (graph or {}).items():
            self._sink(sink)["graph"] = nodes
        self._thread = threading.Thread(target=self._run, name="pipeline report", daemon=True)

    def started(self, sink: str) -> None:
        """Record that a query runs."""
        with self._lock:
            self._sink(sink)["running"] = True

    def batch(self, batch: Batch) -> None:
        """Count a batch."""
        with self._lock:
            sink = self._sink(batch.sink)
            sink["batches"] += 1
            sink["batch_seconds"] += batch.seconds
            for name in ("rows_in", "rows_out", "rows_late", "rows_lost"):
                sink[name] += getattr(batch, name)
            sink["state_rows"], sink["state_bytes"] = batch.state_rows, batch.state_bytes
            sink["lag_records"] = batch.lag if batch.lag is not None else sink["lag_records"]
            sink["watermark"] = batch.watermark

    def failed(self, sink: str, reason: str, restart_seconds: float | None) -> None:
        """Count a failure."""
        with self._lock:
            self._sink(sink)["failures"] += 1
            self._sink(sink)["running"] = False
            self._sink(sink)["error"] = reason[:ERROR_LENGTH_MAX]
            self._failed_at[sink] = self._clock.monotonic()

    def tell(self) -> None:
        """Send the state now; a failure is printed once, because the pipeline does not depend on the report."""
        with self._lock:
            now = self._clock.monotonic()
            sinks = {
                name: sink | ({"error_seconds": now - self._failed_at[name]} if name in self._failed_at else {})
                for name, sink in self._sinks.items()
            }
        try:
            api = self._find_api()
            if api is not None:
                api.call("PUT", path_of("pipelines", self._pipeline), {"sinks": sinks})
            self._complained = False
        except CommandError as error:
            if not self._complained:
                note(f"the server's metrics do not show this pipeline: {error}")
            self._complained = True

    def __enter__(self) -> "Reporter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with self._lock:
            for sink in self._sinks.values():
                sink["running"] = False
        self.tell()

    def _run(self) -> None:
        while not self._ended.wait(TELL_SECONDS):
            self.tell()

    def _sink(self, name: str) -> dict[str, Any]:
        counts = ("rows_in", "rows_out", "rows_late", "rows_lost", "failures", "batches", "state_rows", "state_bytes")
        new = {"running": False, "lag_records": None, "batch_seconds": 0.0} | dict.fromkeys(counts, 0)
        return self._sinks.setdefault(name, new)
