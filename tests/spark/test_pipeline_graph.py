"""The graph that a runner tells of its pipeline, and what it tells of failures; without Spark's JVM."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.cli.pipeline_report import ERROR_LENGTH_MAX, Reporter
from babelbus.spark.pipelines.graph import graph
from babelbus.spark.pipelines.load import load
from babelbus.web.pipelines import PipelineReport

EXAMPLES = Path(__file__).parents[2] / "examples" / "pipelines"


def edges(nodes: list[dict[str, Any]]) -> list[tuple[str, str, str, list[str]]]:
    return [(node["kind"], node["name"], node["about"], node["inputs"]) for node in nodes]


def test_a_step_of_sql_is_fed_by_the_names_in_its_text(tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(
        """
name: one
sources:
  a: {topic: [x, y]}
  b: {pattern: "plant/+"}
  unread: {state: true}
steps:
  both: {sql: "SELECT a.key, 'unread' AS note FROM a JOIN b ON a.key = b.key -- not unread"}
  other: {sql: "SELECT * FROM unread"}
sinks:
  files: {from: both, parquet: out}
  rows: {from: other, topic: true}
"""
    )
    drawn = graph(load(str(file)))
    assert edges(drawn["files"]) == [
        ("source", "a", "topic x, y", []),
        ("source", "b", "topics plant/+", []),
        ("step", "both", "SQL", ["a", "b"]),
        ("sink", "files", "parquet out", ["both"]),
    ]
    assert edges(drawn["rows"]) == [
        ("source", "unread", "state", []),
        ("step", "other", "SQL", ["unread"]),
        ("sink", "rows", "the topic of each row", ["other"]),
    ]


@pytest.mark.parametrize("file", [path.name for path in sorted(EXAMPLES.iterdir()) if path.suffix in (".py", ".yaml")])
def test_every_example_leads_from_its_sources_to_its_sinks(file: str) -> None:
    if file == "__init__.py":
        return
    loaded = load(str(EXAMPLES / file))
    drawn = graph(loaded)
    assert set(drawn) == set(loaded.pipeline.sinks)
    named = {node["name"] for nodes in drawn.values() for node in nodes}
    assert named == {*loaded.pipeline.sources, *loaded.pipeline.steps, *loaded.pipeline.sinks}
    for nodes in drawn.values():
        assert all(node["inputs"] for node in nodes if node["kind"] != "source")


class FakeApi:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def call(self, method: str, path: str, body: Any) -> None:
        self.told.append(body)


def test_a_report_has_the_graph_and_why_a_query_failed() -> None:
    api = FakeApi()
    nodes = [{"name": "out", "kind": "sink", "about": "console", "inputs": []}]
    reporter = Reporter(lambda: api, "p", {"out": nodes})  # type: ignore[arg-type, return-value]
    reporter.started("out")
    reporter.tell()
    reporter.failed("out", "e" * 5_000, 1.0)
    reporter.tell()
    first, second = (body["sinks"]["out"] for body in api.told)
    assert (first["running"], first["graph"], "error" in first) == (True, nodes, False)
    assert (second["running"], len(second["error"])) == (False, ERROR_LENGTH_MAX)
    assert second["error_seconds"] >= 0
    assert msgspec.convert(api.told[1], PipelineReport).sinks["out"].graph[0].name == "out"
