"""The same pipeline on a Spark cluster: a master and two workers, whose Python does not have Babelbus installed."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from babelbus.client import BlockingClient, Record
from tests.spark.cluster import CONF, Cluster
from tests.spark.daemons import environment
from tests.spark.support import NOW
from tests.support.server import LiveServer, configure

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
    outside = environment(bare_python(tmp_path / "python"))
    outside.pop("PYTHONPATH", None)
    (tmp_path / "cluster.yaml").write_text(PIPELINE)
    with LiveServer(configure(tmp_path / "data")) as live:
        with BlockingClient(live.address, identity=live.admin) as client:
            client.create_topic("source")
            client.create_topic("sink")
            client.publish_many("source", [Record(b"%d" % n, b"k%d" % n, (), NOW + n) for n in range(COUNT)])
        with Cluster(tmp_path, outside) as cluster:
            settings = [part for name, value in CONF.items() for part in ("--conf", f"{name}={value}")]
            done = subprocess.run(
                [
                    sys.executable, "-c", "from babelbus.cli import main; main()",
                    "pipeline", "run", "cluster.yaml", "--once", "--json", "--ship",
                    "--master", cluster.address, *settings,
                    "--server", live.address, "--identity", str(live.conf / "admin_key"),
                ],
                cwd=tmp_path, env=outside, capture_output=True, text=True, check=False,
            )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        assert sum(json.loads(line)["rows_out"] for line in done.stdout.splitlines()) == COUNT
        assert all(list(folder.glob("app-*/*")) for folder in cluster.work_folders)  # both had an executor
        with BlockingClient(live.address, identity=live.admin) as client:
            found = list(client.follow("sink", until_end=True))
    assert sorted(int(record.payload or b"") for record in found) == [2 * n for n in range(COUNT)]
