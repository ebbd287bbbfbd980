"""A Spark driver in a process of its own, to be killed: copies a topic to another one and ends when it has all.

Run as a program: `python -m tests.spark.sink_driver WORK`, the work as JSON.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from pyspark.sql import DataFrame, SparkSession

from babelbus.spark.java import java_home
from babelbus.spark.python import worker_python
from tests.spark.cluster import CONF, SHORT_LIVED
from tests.spark.conftest import FAST_CHECKPOINTS
from tests.spark.daemons import family, kill
from tests.spark.gate import ROW_BY_ROW, stop_at

ROOT = Path(__file__).parent.parent.parent
RECORDS_PER_BATCH = 50
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": SHORT_LIVED,
    # 15 s by default: a worker that is late would be one more failure of a task than the test has counted.
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.sql.streaming.checkpointFileManagerClass": FAST_CHECKPOINTS,
}


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver is to do."""

    url: str
    identity: str
    source: str
    target: str
    checkpoint: str = ""
    master: str = "local[2]"
    tasks: int = 1
    """Of each batch."""
    gate: str = ""
    """`Gate.place`, where there is one."""
    once: bool = False
    """As one save, not as a stream."""
    folder: str = ""
    """The server's, when it is to be read in place."""


class Driver:
    """One run; `kill` ends it with its JVM and its Python workers."""

    def __init__(self, work: Work) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `__exit__`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.sink_driver", msgspec.json.encode(work).decode()],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
                "PYSPARK_PYTHON": worker_python(),
                "JAVA_HOME": java_home(),
            },
            start_new_session=True,
            stderr=self._said,
        )

    def runs_for(self, seconds: float) -> bool:
        """Say whether it still runs after this time; returns at once when it ends."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    @property
    def pid(self) -> int:
        return self._process.pid

    def goes_on_for(self, seconds: float) -> None:
        """Wait so long, and see that it has not ended."""
        assert self.runs_for(seconds), self.wait()

    def wait(self) -> tuple[int, str]:
        """Give the exit code and what it said."""
        code = self._process.wait()
        self._said.seek(0)
        return code, self._said.read().decode("utf-8", "replace")

    def kill(self) -> None:
        """SIGKILL to all of it at once; what Spark started in sessions of their own goes too."""
        for pid in family(self._process.pid):
            kill(pid)
        self._process.wait()

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._said.close()


def copy_once(spark: SparkSession, work: Work) -> None:
    """Copy what there is with one save of one task."""
    rows = spark.read.format("babelbus").options(**_source(work)).load()
    _select(rows, work).coalesce(1).write.format("babelbus").options(**_sink(work)).mode("append").save()


def copy_stream(spark: SparkSession, work: Work) -> None:
    """Copy what there is, batch after batch."""
    given = {"maxOffsetsPerTrigger": str(RECORDS_PER_BATCH), "minPartitions": str(work.tasks)}
    rows = spark.readStream.format("babelbus").options(**_source(work), **given).load()
    query = (
        _select(rows, work)
        .writeStream.format("babelbus")
        .options(**_sink(work), checkpointLocation=work.checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def _place(work: Work) -> dict[str, str]:
    return {"url": work.url, "identity": work.identity}


def _source(work: Work) -> dict[str, str]:
    given = {"path": work.folder} if work.folder else _place(work)
    return given | {"assign": f'{{"{work.source}": [0]}}', "startingOffsets": "earliest"}


def _sink(work: Work) -> dict[str, str]:
    return _place(work) | {"topic": work.target}


def _select(rows: DataFrame, work: Work) -> DataFrame:
    value = rows["value"]
    if work.gate:
        value = stop_at(work.gate)(value).alias("value")
        for name, setting in ROW_BY_ROW.items():
            rows.sparkSession.conf.set(name, setting)
    return rows.select("key", value)


def main(work: Work) -> None:
    """Copy what there is."""
    builder = SparkSession.builder.master(work.master)
    for name, value in {**SETTINGS, **(CONF if work.master.startswith("spark:") else {})}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    (copy_once if work.once else copy_stream)(spark, work)
    spark.stop()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Work))
