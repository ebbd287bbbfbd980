"""Processes of Spark's own for tests: a master, a worker, a Connect server; and the Python that they run."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from babelbus.spark.java import java_home

SPARK_HOME = Path(next(iter(pyspark.__path__)))


def environment(python: str) -> dict[str, str]:
    """What a process of Spark's is told: nothing of ours, and which Python its workers are."""
    ours = ("BABELBUS_", "SPARK_", "PYSPARK_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {
        "SPARK_HOME": str(SPARK_HOME),
        "JAVA_HOME": java_home(),
        "PYSPARK_PYTHON": python,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@contextmanager
def daemon(name: str, environment: dict[str, str], log: Path, *args: str) -> Iterator[None]:
    """A process of the class `name` of Spark's, in the log's folder, until the end of the block."""
    command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.{name}", *args]
    with open(log, "wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=log.parent)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def wait_for(log: Path, pattern: str) -> re.Match[str]:
    """Give what the log says, as soon as it says it: `tail` sleeps for us until something is written."""
    with subprocess.Popen(["tail", "-n", "+1", "-F", str(log)], stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        try:
            for line in tail.stdout:
                match = re.search(pattern, line)
                if match is not None:
                    return match
        finally:
            tail.terminate()
    raise AssertionError(f"{log} never says {pattern}")
