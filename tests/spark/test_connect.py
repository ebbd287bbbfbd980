"""Spark Connect: a server of it in a process of its own, pipelines that run there, and Spark's declarative ones."""

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.dataset as ds
import pytest

from babelbus.client import BlockingClient, Record
from babelbus.core.access import SERVER
from babelbus.spark.pipelines.session import CONNECT, ConnectMissingError, need_connect
from babelbus.spark.python import worker_python
from examples.flights import Flight, flights
from tests.spark.daemons import SPARK_HOME, daemon, environment, wait_for
from tests.spark.support import NOW
from tests.support.server import LiveServer, configure

PROJECT = Path(__file__).parents[2] / "examples" / "declarative"
LATE_MINUTES = 60
"""As in the project."""
PATIENT = ("--restarts", "20")
"""Spark gives the process of `foreachBatch` 10 s to start, too short on a busy machine: then it is started again."""
PIPELINE = """
name: connected
sources:
  raw: {topic: source, options: {startingOffsets: earliest}}
steps:
  copies: {sql: "SELECT key, value, timestamp FROM raw"}
  counts: {sql: "SELECT concat('counts/', string(key)) AS key, string(count(*)) AS value FROM raw GROUP BY key"}
sinks:
  copies: {from: copies, topic: sink}
  counts: {from: counts, state: counts, mode: update}
"""
ARCHIVE = """
name: archived
sources:
  raw: {topic: kept, options: {startingOffsets: earliest, maxOffsetsPerTrigger: 100}}
steps:
  values: {sql: "SELECT value FROM raw"}
sinks:
  files: {from: values, parquet: "FOLDER", compact_files: 2, trigger: asap}
"""
pytestmark = pytest.mark.timeout(1200)


class Place:
    """A server of ours, and a Connect server."""

    def __init__(self, folder: Path, live: LiveServer, url: str) -> None:
        self.folder, self.live, self.url = folder, live, url
        self.warehouse = folder / "warehouse"

    def client(self) -> BlockingClient:
        return BlockingClient(self.live.address, identity=self.live.admin)

    def create(self, *topics: str, **settings: object) -> None:
        for topic in topics:
            self.live.call(lambda name=topic: self.live.server.broker.create_topic(name, 1, dict(settings), SERVER))  # type: ignore[misc]

    def publish(self, topic: str, records: list[Record]) -> None:
        with self.client() as client:
            client.publish_many(topic, records)

    def read(self, topic: str) -> list[Record]:
        with self.client() as client:
            return list(client.follow(topic, until_end=True))

    def pipeline(self, command: str, *more: str) -> "subprocess.Popen[str]":
        """Our own command, with the Connect server as its Spark."""
        program = [sys.executable, "-c", "from babelbus.cli import main; main()", "pipeline", command, "one.yaml"]
        key = str(self.live.conf / "admin_key")
        return subprocess.Popen(
            [*program, "--json", "--master", self.url, "--server", self.live.address, "--identity", key, *more],
            cwd=self.folder, env=environment(sys.executable), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    missing = [package for module, package in CONNECT.items() if importlib.util.find_spec(module.split(".")[0]) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("connect")
    log = folder / "connect.log"
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.python.authenticate.socketTimeout": "120s",
    }
    named = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    server = ("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "--master", "local[2]")
    with (
        LiveServer(configure(folder / "data")) as live,
        daemon("deploy.SparkSubmit", environment(worker_python()), log, *server, *named, "spark-internal"),
    ):
        port = wait_for(log, r"Connect server started at: [^ ]*:(\d+)$")[1]
        yield Place(folder, live, f"sc://127.0.0.1:{port}")


def ended(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """What a command of ours has printed when it has ended well."""
    said, complaint = process.communicate()
    assert process.returncode == 0, complaint
    assert "Traceback" not in complaint
    return [json.loads(line) for line in said.splitlines()]


def test_a_pipeline_runs_on_a_connect_server_and_goes_on_where_it_was(place: Place) -> None:
    place.create("source", "sink")
    place.create("counts", retain="last")
    (place.folder / "one.yaml").write_text(PIPELINE)
    sent = [Record(b"%d" % n, b"k%d" % (n % 3), (), NOW + n) for n in range(300)]
    place.publish("source", sent[:200])
    at = (*PATIENT, "--checkpoint", str(place.folder / "checkpoint"))
    told = ended(place.pipeline("run", "--once", *at))
    assert {(row["sink"], row["rows_in"], row["rows_out"], row["lag"]) for row in told} == {
        ("copies", 200, 200, 0),
        ("counts", 200, 3, 0),
    }
    place.publish("source", sent[200:])
    process = place.pipeline("run", "--trigger", "100ms", *at)
    assert process.stdout is not None
    told = [json.loads(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    ended(process)
    assert sorted((row["sink"], row["rows_in"], row["lag"]) for row in told) == [
        ("copies", 100, 0),
        ("counts", 100, 0),
    ]
    assert [(one.key, one.payload, one.timestamp) for one in place.read("sink")] == [
        (one.key, one.payload, one.timestamp) for one in sent
    ]
    state = place.live.server.broker.state
    assert [place.live.call(lambda key=f"counts/k{n}": state.get(key)) for n in range(3)] == [b"100"] * 3  # type: ignore[misc]


@pytest.mark.slow
def test_a_connect_server_checks_a_pipeline_and_archives_each_record_once(place: Place) -> None:
    place.create("kept")
    archive = place.folder / "archive"
    (place.folder / "one.yaml").write_text(ARCHIVE.replace("FOLDER", str(archive)))
    place.publish("kept", [Record(b"%d" % n, timestamp=NOW + n) for n in range(450)])
    assert [row["ok"] for row in ended(place.pipeline("check"))] == [True] * 3
    told = ended(place.pipeline("run", "--once", *PATIENT, "--checkpoint", str(place.folder / "archive-checkpoint")))
    assert [row["rows_out"] for row in told] == [100] * 4 + [50]
    found = ds.dataset(str(archive), format="parquet").to_table(columns=["value"])
    assert sorted(int(value.as_py()) for value in found["value"]) == list(range(450))
    assert any("-to-" in path.name for path in archive.iterdir())  # small files were merged over there


def test_what_connect_needs_and_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("grpc", "pandas") else find(name))
    with pytest.raises(ConnectMissingError) as caught:
        need_connect()
    assert caught.value.packages[:1] == ["grpcio"]
    assert str(caught.value).endswith("not installed: pip install 'babelbus[connect]'")


def test_spark_s_declarative_pipelines_read_and_write_the_bus_each_record_once(place: Place, tmp_path: Path) -> None:
    place.create("flights", "late")
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("__pycache__"))
    spec = project / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("/tmp/babelbus-departures", str(tmp_path / "storage")))
    sent = [Record(one.payload, one.key, (), one.timestamp_ms) for one in islice(flights(), 300)]
    told = environment(sys.executable) | {
        "BABELBUS_SERVER": place.live.address,
        "BABELBUS_IDENTITY": str(place.live.conf / "admin_key"),
    }
    for part in (sent[:200], sent[200:]):
        place.publish("flights", part)
        done = subprocess.run(
            [str(SPARK_HOME / "bin" / "spark-pipelines"), "run", "--remote", place.url],
            cwd=project, env=told, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = [msgspec.json.decode(one.payload or b"", type=Flight) for one in sent]
    departures = ds.dataset(str(place.warehouse / "departures"), format="parquet", exclude_invalid_files=True)
    assert departures.to_table().num_rows == 300
    by_carrier: dict[str, list[int | None]] = defaultdict(list)
    for row in rows:
        by_carrier[row.carrier].append(row.dep_delay)
    delays = ds.dataset(str(place.warehouse / "delays"), format="parquet").to_table().to_pylist()
    assert {row["carrier"]: (row["flights"], row["departed"]) for row in delays} == {
        carrier: (len(all_), len([one for one in all_ if one is not None])) for carrier, all_ in by_carrier.items()
    }
    late = [(one.key, json.loads(one.payload or b"")["dep_delay"]) for one in place.read("late")]
    assert late == [
        (f"{row.carrier}{row.flight}".encode(), row.dep_delay) for row in rows if (row.dep_delay or 0) >= LATE_MINUTES
    ]
