"""A pipeline at work: its queries are started, watched, started again when they fail, and stopped between batches."""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from babelbus.clock import Clock, SystemClock
from babelbus.errors import BabelbusError
from babelbus.spark.errors import CheckpointInUseError, QueryFailedError, WorkerLateError
from babelbus.spark.pipelines import progress
from babelbus.spark.pipelines.bus import Bus
from babelbus.spark.pipelines.frames import build
from babelbus.spark.pipelines.load import Loaded
from babelbus.spark.pipelines.model import read_trigger
from babelbus.spark.pipelines.progress import Batch, Watcher
from babelbus.spark.pipelines.session import cause, is_local
from babelbus.spark.pipelines.sinks import Target, identity, save, start

POLL_SECONDS = 0.2
BACKOFF_SECONDS_MAX = 60.0
BATCH_END_SECONDS_MAX = 60.0
"""Longest wait of a stop for the batch under way. A batch that is cut short is done again at the next start."""


class Policy(msgspec.Struct, frozen=True):
    """The settings of a run."""

    checkpoint: str
    trigger: str | None = None
    """For all sinks, instead of what the file says."""
    restarts_max: int = 0
    """Of one query, in a row: a batch that succeeds starts the count again."""
    backoff_seconds: float = 1.0
    """Before the first restart; doubled for each further one."""
    remote: bool = False
    """The checkpoint is where a Connect server is."""


class Runner:
    """Runs one pipeline in one session. All calls are of one thread; `stop` is set by any.

    `find_bus` is called at each start of a query: the server may be at another address than at the last start.
    """

    def __init__(
        self,
        spark: SparkSession,
        loaded: Loaded,
        find_bus: Callable[[], Bus],
        policy: Policy,
        watchers: Sequence[Watcher],
        *,
        stop: threading.Event | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._spark = spark
        self._loaded = loaded
        self._find_bus = find_bus
        self._policy = policy
        self._watchers = watchers
        self._stop = stop or threading.Event()
        self._clock = clock or SystemClock()

    def run(self) -> None:
        """Run until everything is done (`once`), or `stop` is set.

        Raises:
            PipelineError: Spark or the bus refused the pipeline; nothing was started, or all was stopped again.
            QueryFailedError: a query failed for good; the others were stopped.
        """
        jobs = [_Job(target) for target in self._targets()]
        try:
            for job in jobs:
                self._begin(job)
            while not self._stop.is_set() and any(not job.done for job in jobs):
                self._stop.wait(POLL_SECONDS)
                for job in jobs:
                    self._look(job)
        finally:
            self._end(jobs)

    def _targets(self) -> Iterator[Target]:
        pipeline, bus = self._loaded.pipeline, self._find_bus()
        for name, sink in pipeline.sinks.items():
            text = self._policy.trigger or sink.trigger or pipeline.trigger
            yield Target(
                self._loaded.file, name, sink, bus, self._policy.checkpoint, read_trigger("trigger", text),
                identity(pipeline, name), self._policy.remote,
            )  # fmt: skip

    def _begin(self, job: "_Job") -> None:
        """Start a query for the first time: what Spark refuses then, it would refuse again."""
        try:
            self._start(job)
        except WorkerLateError as error:
            self._fail(job, error.problem, error)

    def _start(self, job: "_Job") -> None:
        # Built anew for each start: a frame of Spark's remembers files and views of the time it was made.
        frame = build(self._spark, self._loaded, job.target.bus)[job.target.sink.input]
        if not frame.isStreaming:
            self._save(job, frame)
            return
        job.query = start(frame, job.target)
        job.start_at = None
        self._tell(lambda watcher: watcher.started(job.target.name))

    def _save(self, job: "_Job", frame: DataFrame) -> None:
        """Write a frame that is no stream to a sink, once, as one batch."""
        self._tell(lambda watcher: watcher.started(job.target.name))
        begun = self._clock.monotonic()
        rows = save(frame, job.target)
        seconds = self._clock.monotonic() - begun
        name = self._loaded.pipeline.name
        job.done = True
        if rows is None:
            where = os.path.join(self._policy.checkpoint, job.target.name)
            reason = f"was done before, says {where}; with another --checkpoint it is again"
            self._tell(lambda watcher: watcher.skipped(job.target.name, reason))
            return
        batch = Batch(name, job.target.name, 0, rows, rows, 0, 0, None, 0, 0, seconds, None)
        self._tell(lambda watcher: watcher.batch(batch))

    def _look(self, job: "_Job") -> None:
        """Check what became of one query since the last check."""
        if job.done:
            return
        if job.query is None:
            assert job.start_at is not None
            if self._clock.monotonic() >= job.start_at:
                self._restart(job)
            return
        active = job.query.isActive  # asked first: what ends in between is reported with the next look
        if self._tell_news(job):
            job.failures = 0
        if active:
            return
        error = job.query.exception()
        if error is None:
            job.done = True
            return
        self._fail(job, cause(error), error)

    def _restart(self, job: "_Job") -> None:
        try:
            job.target = msgspec.structs.replace(job.target, bus=self._find_bus())
            self._start(job)
        except BabelbusError as error:
            self._fail(job, str(error), error)

    def _fail(self, job: "_Job", reason: str, error: BaseException) -> None:
        job.query = None
        job.failures += 1
        if job.failures > self._policy.restarts_max:
            job.done = True
            self._tell(lambda watcher: watcher.failed(job.target.name, reason, None))
            again = f" {job.failures} times in a row" if job.failures > 1 else ""
            raise QueryFailedError(
                f"{self._loaded.file}: sinks.{job.target.name}: the query failed{again}: {reason}"
            ) from error
        seconds = min(self._policy.backoff_seconds * 2 ** (job.failures - 1), BACKOFF_SECONDS_MAX)
        job.start_at = self._clock.monotonic() + seconds
        self._tell(lambda watcher: watcher.failed(job.target.name, reason, seconds))

    def _end(self, jobs: "list[_Job]") -> None:
        """Stop what still runs, when the batch under way has ended where that comes soon enough.

        Where the next one follows without a pause it has begun by then: it is cut short, and done at the next start.
        """
        deadline = self._clock.monotonic() + BATCH_END_SECONDS_MAX
        pause = threading.Event()
        for job in jobs:
            query = job.query
            if query is None:
                continue
            done = _last_batch(query)
            while (
                query.isActive
                and query.status["isTriggerActive"]
                and _last_batch(query) == done
                and self._clock.monotonic() < deadline
            ):
                pause.wait(0.02)
            if query.isActive:
                query.stop()
            self._tell_news(job)

    def _tell(self, event: Callable[[Watcher], None]) -> None:
        for watcher in self._watchers:
            event(watcher)

    def _tell_news(self, job: "_Job") -> bool:
        """Send the watchers the batches that were done since the last call; return whether there were any."""
        news = job.news(self._loaded.pipeline.name)
        for batch in news:
            for watcher in self._watchers:
                watcher.batch(batch)
        return bool(news)


def _last_batch(query: StreamingQuery) -> int:
    """Return the number of the last batch that a query has done, -1 before its first."""
    last = query.lastProgress
    return -1 if last is None else last.batchId


class _Job:
    """One sink and its query."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.query: StreamingQuery | None = None
        self.failures = 0
        self.start_at: float | None = None
        self.done = False
        self._last = -1

    def news(self, pipeline: str) -> list[Batch]:
        """Return the batches that were done since the last call (the last 100 of them: Spark keeps no more)."""
        assert self.query is not None
        last = self.query.lastProgress
        if last is None or last.batchId == self._last:
            return []
        found = []
        for one in self.query.recentProgress:
            batch = progress.read(one.json, pipeline, self.target.name) if one.batchId > self._last else None
            if batch is not None:
                found.append(batch)
                self._last = batch.batch
        return found


@contextmanager
def lock(folder: str) -> Iterator[None]:
    """Keep a checkpoint's folder for ourselves, for a `with`; one that is not on this machine cannot be locked.

    Raises:
        CheckpointInUseError: another process has locked it.
    """
    if not is_local(folder):
        yield
        return
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointInUseError(
                f"the checkpoint {folder} is in use: the pipeline runs already; name another with --checkpoint"
            ) from None
        yield
    finally:
        os.close(descriptor)
