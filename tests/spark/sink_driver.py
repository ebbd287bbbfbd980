"""A Spark driver in a process of its own, to be killed: copies a topic to another one and ends when it has all.

Run as a program: `python -m tests.spark.sink_driver URL IDENTITY SOURCE TARGET CHECKPOINT`.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from babelbus.spark.java import java_home
from babelbus.spark.python import worker_python
from tests.spark.conftest import FAST_CHECKPOINTS

ROOT = Path(__file__).parent.parent.parent
RECORDS_PER_BATCH = "50"


class Driver:
    """One run; `kill` ends it with its JVM and its Python workers."""

    def __init__(self, *arguments: str) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `__exit__`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.sink_driver", *arguments],
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

    def wait(self) -> tuple[int, str]:
        """Give the exit code and what it said."""
        code = self._process.wait()
        self._said.seek(0)
        return code, self._said.read().decode("utf-8", "replace")

    def kill(self) -> None:
        """SIGKILL to all of it at once; what Spark started in sessions of their own goes too."""
        for pid in self._family(self._process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()

    def _family(self, pid: int) -> list[int]:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
            tasks = [one.name for one in Path(f"/proc/{pid}/task").iterdir()]
            for task in tasks:
                children += Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii").split()
        except FileNotFoundError:
            return [pid]
        return [pid, *(one for child in sorted(set(children)) for one in self._family(int(child)))]

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._said.close()


def main(url: str, identity: str, source: str, target: str, checkpoint: str) -> None:
    """Copy what there is."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "512m")
        .config("spark.sql.streaming.checkpointFileManagerClass", FAST_CHECKPOINTS)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    place = {"url": url, "identity": identity}
    rows = (
        spark.readStream.format("babelbus")
        .options(**place, assign=f'{{"{source}": [0]}}', startingOffsets="earliest")
        .option("maxOffsetsPerTrigger", RECORDS_PER_BATCH)
        .load()
    )
    query = (
        rows.select("key", "value")
        .writeStream.format("babelbus")
        .options(**place, topic=target, checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
