"""The same pipeline on a Spark cluster: a master and two workers, whose Python does not have Babelbus installed."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest

from babelbus.client import BlockingClient, Record
from babelbus.spark.java import java_home
from tests.spark.support import NOW
from tests.support.server import LiveServer, configure

SPARK_HOME = Path(next(iter(pyspark.__path__)))
COUNT = 2000
PIPELINE = """
name: cluster
sources:
  raw: {topic: source, options: {assign: '{"source": [0]}', startingOffsets: earliest, minPartitions: 4}}
steps:
  doubled: {sql: "SELECT key, string(2 * int(string(value))) AS value FROM raw"}
sinks:
  out: {from: doubled, topic: sink}
"""


@contextmanager
def part(name: str, environment: dict[str, str], log: Path, *args: str) -> Iterator[None]:
    """A process of Spark's, until the end of the block."""
    command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *args]
    with open(log, "wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def wait_for(log: Path, pattern: str) -> str:
    """Give what the log says, as soon as it says it: `tail` sleeps for us until something is written."""
    with subprocess.Popen(["tail", "-n", "+1", "-F", str(log)], stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        try:
            for line in tail.stdout:
                match = re.search(pattern, line)
                if match is not None:
                    return match[0]
        finally:
            tail.terminate()
    raise AssertionError(f"{log} never says {pattern}")


def bare_python(folder: Path) -> str:
    """Make an environment with all packages of this one, but not ours: the line that names our source is not read."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = str(folder / "bin" / "python")
    assert subprocess.run([python, "-c", "import pyspark, msgspec"], check=False).returncode == 0
    found = subprocess.run([python, "-c", "import babelbus"], check=False, capture_output=True, cwd=folder)
    assert found.returncode != 0
    return python


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pipeline_runs_on_two_workers_that_have_nothing_of_ours_but_what_is_sent(tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("BABELBUS_", "PYTHONPATH"))
    }
    environment |= {
        "SPARK_HOME": str(SPARK_HOME),
        "JAVA_HOME": java_home(),
        "PYSPARK_PYTHON": bare_python(tmp_path / "python"),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    (tmp_path / "cluster.yaml").write_text(PIPELINE)
    master = tmp_path / "master.log"
    with LiveServer(configure(tmp_path / "data")) as live:
        with BlockingClient(live.address, identity=live.admin) as client:
            client.create_topic("source")
            client.create_topic("sink")
            client.publish_many("source", [Record(b"%d" % n, b"k%d" % n, (), NOW + n) for n in range(COUNT)])
        at = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        with part("master.Master", environment, master, *at):
            address = wait_for(master, r"spark://127\.0\.0\.1:\d+")
            worker = ("worker.Worker", environment)
            about = (*at, "--cores", "1", "--memory", "600m", "--work-dir")
            one, two = tmp_path / "one", tmp_path / "two"
            with (
                part(*worker, tmp_path / "one.log", *about, str(one), address),
                part(*worker, tmp_path / "two.log", *about, str(two), address),
            ):
                for log in ("one.log", "two.log"):
                    wait_for(tmp_path / log, "Successfully registered with master")
                done = subprocess.run(
                    [
                        sys.executable, "-c", "from babelbus.cli import main; main()",
                        "pipeline", "run", "cluster.yaml", "--once", "--json", "--ship",
                        "--master", address, "--conf", "spark.executor.memory=512m",
                        "--conf", "spark.executor.cores=1", "--conf", "spark.driver.host=127.0.0.1",
                        "--server", live.address, "--identity", str(live.conf / "admin_key"),
                    ],
                    cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
                )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        assert sum(json.loads(line)["rows_out"] for line in done.stdout.splitlines()) == COUNT
        assert all(list(folder.glob("app-*/*")) for folder in (one, two))  # both had an executor
        with BlockingClient(live.address, identity=live.admin) as client:
            found = list(client.follow("sink", until_end=True))
    assert sorted(int(record.payload or b"") for record in found) == [2 * n for n in range(COUNT)]
