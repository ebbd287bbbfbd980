"""The figures of each batch of a query: rows, lag, state, time; from Spark's progress, which is JSON."""

from typing import Any

import msgspec

from babelbus.spark.plan import LOST, NOTE

OBSERVED, ROWS = "out", "rows"
"""Under which names the rows that reach a sink are counted: Spark counts those of some sinks only."""


class Batch(msgspec.Struct, frozen=True):
    """One batch of one sink's query."""

    pipeline: str
    sink: str
    batch: int
    rows_in: int
    rows_out: int
    rows_late: int
    """Dropped because they came behind the watermark."""
    rows_lost: int
    """Offsets that were gone when their turn came, where `failOnDataLoss` is `false`."""
    lag: int | None
    """Records of the bus that were there and not read yet; `None` when no source is on the bus, and for a batch that is
    done again after a crash: Spark does not ask then."""
    state_rows: int
    state_bytes: int
    seconds: float
    watermark: str | None


class Watcher:
    """Receives the events of a run; a subclass handles those that it needs."""

    def started(self, sink: str) -> None:
        """Record that a query runs."""

    def batch(self, batch: Batch) -> None:
        """Record a batch that is done."""

    def skipped(self, sink: str, reason: str) -> None:
        """Record that a save is skipped, since it was done before."""

    def failed(self, sink: str, reason: str, restart_seconds: float | None) -> None:
        """Record that a query failed, and when it is started again (`None`: never)."""


class _Operator(msgspec.Struct):
    rows: int = msgspec.field(default=0, name="numRowsTotal")
    memory: int = msgspec.field(default=0, name="memoryUsedBytes")
    late: int = msgspec.field(default=0, name="numRowsDroppedByWatermark")


class _Source(msgspec.Struct):
    description: str = ""
    start: Any = msgspec.field(default=None, name="startOffset")
    end: Any = msgspec.field(default=None, name="endOffset")
    latest: Any = msgspec.field(default=None, name="latestOffset")
    rows: int = msgspec.field(default=0, name="numInputRows")


class _Sink(msgspec.Struct, frozen=True):
    rows: int = msgspec.field(default=-1, name="numOutputRows")


class _Progress(msgspec.Struct):
    batch: int = msgspec.field(name="batchId")
    rows_in: int | None = msgspec.field(default=None, name="numInputRows")
    durations: dict[str, int] = msgspec.field(default={}, name="durationMs")
    times: dict[str, str] = msgspec.field(default={}, name="eventTime")
    operators: list[_Operator] = msgspec.field(default=[], name="stateOperators")
    sources: list[_Source] = []
    sink: _Sink = _Sink()
    observed: dict[str, Any] = msgspec.field(default={}, name="observedMetrics")


def read(text: str, pipeline: str, sink: str) -> Batch | None:
    """Read one progress of Spark's; `None` when it tells only that nothing happened.

    A progress from Spark Connect says some of it in other places.
    """
    progress = msgspec.json.decode(text, type=_Progress)
    if "addBatch" not in progress.durations:
        return None
    counted = _counted(progress.observed.get(OBSERVED))
    lags = [lag(source.end, source.latest) for source in progress.sources]
    known = [one for one in lags if one is not None]
    return Batch(
        pipeline=pipeline,
        sink=sink,
        batch=progress.batch,
        rows_in=sum(one.rows for one in progress.sources) if progress.rows_in is None else progress.rows_in,
        rows_out=counted if counted is not None else max(0, progress.sink.rows),
        rows_late=sum(operator.late for operator in progress.operators),
        rows_lost=sum(lost(source.start, source.end) for source in progress.sources),
        lag=sum(known) if known else None,
        state_rows=sum(max(0, operator.rows) for operator in progress.operators),  # -1: RocksDB does not count them
        state_bytes=sum(max(0, operator.memory) for operator in progress.operators),
        seconds=progress.durations.get("triggerExecution", 0) / 1000,
        watermark=progress.times.get("watermark"),
    )


def _counted(observed: Any) -> int | None:
    """Return the rows that were counted; a progress from Spark Connect has the values beside their schema."""
    if not isinstance(observed, dict):
        return None
    if "schema" in observed:
        names = [field["name"] for field in observed["schema"]["fields"]]
        observed = dict(zip(names, observed["values"], strict=True))
    found = observed.get(ROWS)
    return found if isinstance(found, int) else None


def lag(end: Any, latest: Any) -> int | None:
    """Return how many offsets lie between two positions of our source, `{"topic": {"0": 42}}`; `None` for others'."""
    ends, tips = _flat(end), _flat(latest)
    if ends is None or tips is None:
        return None
    return sum(max(0, tip - ends.get(at, tip)) for at, tip in tips.items())


def lost(start: Any, end: Any) -> int:
    """Return how many offsets were lost between two positions of our source; 0 for others'."""
    before, after = ((_parsed(one) or {}).get(LOST, 0) for one in (start, end))
    return max(0, after - before) if isinstance(before, int) and isinstance(after, int) else 0


def _parsed(offset: Any) -> dict[str, Any] | None:
    if isinstance(offset, str):
        try:
            offset = msgspec.json.decode(offset)
        except msgspec.DecodeError:
            return None
    return offset if isinstance(offset, dict) else None


def _flat(position: Any) -> dict[tuple[str, str], int] | None:
    offset = _parsed(position)
    if offset is None:
        return None
    offset = {topic: one for topic, one in offset.items() if not topic.startswith(NOTE)}
    if not all(isinstance(one, dict) for one in offset.values()):
        return None
    found = {(topic, number): at for topic, partitions in offset.items() for number, at in partitions.items()}
    return found if all(isinstance(at, int) for at in found.values()) else None
