"""The pages that need Spark, run as they stand there."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from babelbus.client import BlockingClient, Record
from babelbus.spark.pipelines.bus import Bus
from babelbus.spark.pipelines.check import check
from babelbus.spark.pipelines.load import load
from tests.documentation.pages import ROOT, Reader, blocks, has
from tests.spark.support import NOW
from tests.support.server import LiveServer, configure

PAGE = ROOT / "docs" / "pipeline.md"
PROJECT = ROOT / "examples" / "declarative" / "transformations" / "departures.py"
DELAYS = """
from pyspark.sql import functions as F

def by_hour(spark, late):
    return late.groupBy("carrier", F.window("timestamp", "1 hour")).count()
"""


@pytest.mark.skipif(
    importlib.util.find_spec("pyspark") is None or not has("java"), reason="Spark and Java are not installed"
)
@pytest.mark.timeout(1200)
def test_a_reader_of_the_parquet_recipe_can_do_what_it_says(tmp_path: Path) -> None:
    reader = Reader(tmp_path, seconds=250)
    try:
        reader.follow(ROOT / "docs" / "recipes" / "parquet.md")
    finally:
        reader.close()


def test_the_programs_of_the_page_of_pipelines_read_and_copy_a_topic(spark: SparkSession, tmp_path: Path) -> None:
    source, copy, _ = [block.text for block in blocks(PAGE) if block.language == "python"]
    sent = [Record(b"%d" % number, b"k", ((b"h", b"v"),), NOW + number) for number in range(3)]
    with LiveServer(configure(tmp_path)) as live, BlockingClient(live.address, identity=live.admin) as client:
        for topic in ("flights", "flights2"):
            client.create_topic(topic)
        client.publish_many("flights", sent)
        key = str(live.conf / "admin_key")
        there = source.replace("127.0.0.1:5320", live.address).replace("data/conf/admin_key", key)
        names: dict[str, Any] = {"spark": spark, "bus": {"url": f"jebp://{live.address}", "identity": key}}
        exec(there, names)
        flights = names["flights"]
        assert flights.isStreaming
        assert {"key", "value", "topic", "partition", "offset", "timestamp", "subject"} <= {*flights.columns}
        exec(copy, names)
        copied = list(client.follow("flights2", until_end=True))
    assert [(record.payload, record.key, record.timestamp) for record in copied] == [
        (record.payload, record.key, record.timestamp) for record in sent
    ]
    assert all((b"h", b"v") in record.headers for record in copied)


def test_the_pipeline_of_the_page_has_no_fault(spark: SparkSession, tmp_path: Path) -> None:
    (shown,) = [block.text for block in blocks(PAGE) if block.language == "yaml"]
    (tmp_path / "delays.yaml").write_text(shown, encoding="utf-8")
    (tmp_path / "delays.py").write_text(DELAYS, encoding="utf-8")
    with LiveServer(configure(tmp_path / "bus")) as live, BlockingClient(live.address, identity=live.admin) as client:
        for topic in ("flights", "delays"):
            client.create_topic(topic)
        bus = Bus(url=f"jebp://{live.address}", identity=str(live.conf / "admin_key"))
        found = check(spark, load(str(tmp_path / "delays.yaml")), bus)
    assert [finding for finding in found if finding.ok is False] == []


def test_the_flow_of_the_page_is_that_of_the_project_that_a_test_runs() -> None:
    shown = [block.text for block in blocks(PAGE) if block.language == "python"][-1]
    project = PROJECT.read_text(encoding="utf-8")
    assert all(part.strip() in project for part in shown.split("\n\n\n"))
