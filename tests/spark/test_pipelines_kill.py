"""A pipeline whose process is killed again and again: what comes out is what went in, once."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from babelbus.client import BlockingClient, Record
from tests.spark.support import NOW
from tests.support.server import LiveServer, configure

COUNT = 1500
KILLS = 2
PIPELINE = """
name: killed
sources:
  raw: {topic: source, options: {startingOffsets: earliest, maxOffsetsPerTrigger: 100}}
steps:
  dated: {sql: "SELECT to_date(timestamp) AS date, string(value) AS value FROM raw"}
sinks:
  copy: {from: raw, topic: sink, trigger: asap}
  files: {from: dated, parquet: archive, partition_by: [date], compact_files: 3, trigger: asap}
"""


def command(live: LiveServer, *more: str) -> list[str]:
    program = [sys.executable, "-c", "from babelbus.cli import main; main()", "pipeline", "run", "killed.yaml"]
    return [*program, "--json", "--data-folder", str(live.config.data.folder), "--server", live.address,
            "--identity", str(live.conf / "admin_key"), "--read", "files", *more]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_output_equals_input_once_after_kills_at_any_moment(tmp_path: Path) -> None:
    (tmp_path / "killed.yaml").write_text(PIPELINE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BABELBUS_")}
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    with LiveServer(configure(tmp_path / "data")) as live:
        with BlockingClient(live.address, identity=live.admin) as client:
            client.create_topic("source")
            client.create_topic("sink")
            client.publish_many("source", [Record(b"%d" % n, timestamp=NOW + n) for n in range(COUNT)])
        for _ in range(KILLS):
            process = subprocess.Popen(
                command(live), cwd=tmp_path, env=environment, stdout=subprocess.PIPE, start_new_session=True
            )
            assert process.stdout is not None
            for _ in range(chance.randint(1, 12)):
                assert process.stdout.readline()
            os.killpg(process.pid, signal.SIGKILL)  # Python, the JVM and its workers
            process.communicate()
        done = subprocess.run(
            command(live, "--once"), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert all(json.loads(line)["rows_out"] <= 100 for line in done.stdout.splitlines())
        with BlockingClient(live.address, identity=live.admin) as client:
            copied = [int(record.payload or b"") for record in client.follow("sink", until_end=True)]
    archived = ds.dataset(str(tmp_path / "archive"), format="parquet").to_table(columns=["value"])
    assert copied == list(range(COUNT)), f"seed {seed}"
    assert sorted(int(value.as_py()) for value in archived["value"]) == list(range(COUNT)), f"seed {seed}"
