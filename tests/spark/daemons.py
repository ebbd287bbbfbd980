"""Processes of Spark's own for tests: a master, a worker, a Connect server; and the Python that they run."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
def daemon(name: str, environment: dict[str, str], log: Path, *args: str) -> Iterator[int]:
    """A process of the class `name` of Spark's, in the log's folder, until the end of the block; gives its id."""
    command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.{name}", *args]
    with open(log, "wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=log.parent)
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:  # a machine that has no time for it
            process.kill()
            process.wait()


def family(pid: int) -> list[int]:
    """Give a process and all that descend from it, whatever sessions of their own they have started."""
    return [pid, *(one for child in children(pid) for one in family(child))]


def children(pid: int) -> list[int]:
    """Give the processes that a process has started."""
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):  # each thread has those that it started
            with suppress(FileNotFoundError):  # the thread has ended meanwhile
                found.update(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii").split()))
    except (FileNotFoundError, ProcessLookupError):  # so has the process
        pass
    return sorted(found)


def command_of(pid: int) -> list[str]:
    """Give the command line of a process, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill(pid: int) -> bool:
    """SIGKILL; say whether there was such a process."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


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
