"""Pipelines as files, without Spark: what is read of them, what is refused, and what a batch tells."""

import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from babelbus.spark.errors import CheckpointInUseError, PipelineError
from babelbus.spark.pipelines import progress
from babelbus.spark.pipelines.bus import Bus
from babelbus.spark.pipelines.load import Loaded, find, load
from babelbus.spark.pipelines.metrics import PipelineMetrics
from babelbus.spark.pipelines.parquet import JOURNAL, MERGED, DamagedArchiveError, finish_merge, merge
from babelbus.spark.pipelines.run import lock
from babelbus.spark.pipelines.session import cause
from babelbus.spark.pipelines.sinks import DeltaFolder, DeltaMissingError, need_delta
from tests.support.bus import SAFETY_NET_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EXAMPLES = Path(__file__).parents[2] / "examples" / "pipelines"
GOOD = """
name: good
parameters: {topic: flights, most: 10}
sources:
  raw: {topic: "${topic}", options: {maxOffsetsPerTrigger: "${most}"}}
steps:
  long: {sql: "SELECT * FROM raw WHERE length(value) > ${most}"}
sinks:
  out: {from: long, topic: "long_${topic}"}
"""


def write(folder: Path, text: str, name: str = "one.yaml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def refused(folder: Path, text: str, name: str = "one.yaml", **settings: str) -> str:
    with pytest.raises(PipelineError) as caught:
        load(write(folder, text, name), settings)
    assert caught.value.file == str(folder / name)
    assert str(caught.value).count("\n") == 0
    return f"{caught.value.field}: {caught.value.problem}"


def test_parameters_are_put_in_wherever_they_are_named_and_numbers_stay_numbers(tmp_path: Path) -> None:
    one = load(write(tmp_path, GOOD)).pipeline
    assert (one.sources["raw"].topic, one.sources["raw"].options) == ("flights", {"maxOffsetsPerTrigger": 10})
    assert one.steps["long"].sql == "SELECT * FROM raw WHERE length(value) > 10"
    other = load(write(tmp_path, GOOD), {"topic": "news", "most": "7"}).pipeline
    assert (other.sinks["out"].topic, other.parameters) == ("long_news", {"topic": "news", "most": 7})
    part = GOOD.replace("{maxOff", "{assign: '{\"flights\": [0]}', maxOff")
    assert load(write(tmp_path, part)).pipeline.sources["raw"].options["assign"] == '{"flights": [0]}'
    dollar = load(write(tmp_path, GOOD.replace("SELECT *", "SELECT '$$', *"))).pipeline
    assert dollar.steps["long"].sql == "SELECT '$', * FROM raw WHERE length(value) > 10"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("name: good", "name: a/b", "name: 'a/b' is no name"),
        ("name: good", "", "object missing required field `name`"),
        ("name: good", "name: good\nspeed: 1", "object contains unknown field `speed`"),
        ("sinks:", "sink:", "object contains unknown field `sink`"),
        ("topic: \"${topic}\",", "topic: \"${topik}\",", "sources.raw.topic: there is no parameter 'topik'"),
        ("topic: \"${topic}\",", "topic: {a: 1},", "sources.raw.topic: expected"),
        ("topic: \"${topic}\",", "", "sources.raw: exactly one of topic, pattern, state, parquet, format says where"),
        ("topic: \"${topic}\",", "topic: a, state: true,", "topic and state were given"),
        ("topic: \"${topic}\",", "topic: a, schema: a INT,", "sources.raw.schema: goes with parquet and format"),
        ("raw: {topic", "1a: {topic", "sources: '1a' is no name"),
        ("raw: {topic", "spark: {topic", "sources.spark: the name is taken by the session"),
        ("  long: {sql", "  raw: {sql", "steps.raw: the name is taken by sources.raw"),
        ("  long: {sql", "  RAW: {sql", "steps.RAW: SQL takes it for sources.raw"),
        ("most: 10}", "most: }", "parameters.most: a text, a number, true or false is needed, not None"),
        ("{maxOff", "{assign: [1], maxOff", "sources.raw.options.assign: a text, a number, true or false is needed"),
        ("sources:", "spark: {a: {}}\nsources:", "spark.a: a text, a number, true or false is needed, not {}"),
        ("most: 10}", "most: 10, on: 1}", ": line 3: the key True is no text: write it in quotes"),
        ("most: 10}", "most: 2026-02-30}", ": line 3: '2026-02-30' is no timestamp: write a text in quotes"),
        ("most: 10}", "most: !!timestamp now}", ": line 3: 'now' is no timestamp: write a text in quotes"),
        ("most: 10}", "most: !!int ''}", ": line 3: '' is no int: write a text in quotes"),
        ("most: 10}", "most: !!map 1}", ": it is no YAML: expected a mapping node, but found scalar"),
        ("options: {", "options: &all {all: *all, ", ": a part of it contains itself"),
        ("{sql:", "{python: 'm:f', sql:", "steps.long: give exactly one of sql and python"),
        ("from: long", "from: short", "sinks.out.from: there is no source or step 'short'; there are: raw, long"),
        ("from: long", "from: long, mode: often", "sinks.out.mode: invalid enum value 'often'"),
        ("from: long", "from: long, console: true", "sinks.out: exactly one of topic, state"),
        ("from: long", "from: long, trigger: soon", "sinks.out.trigger: 'soon' is no duration"),
        ("from: long", "from: long, partition_by: [a]", "sinks.out.partition_by: goes with parquet and delta"),
        ("{maxOff", "{Subscribe: b, maxOff", "sources.raw.options.Subscribe: does not go with topic"),
        ("{maxOff", "{assign: '{\"b\": [0]}', maxOff", "sources.raw.options.assign: is of b, and topic is flights"),
        ("{maxOff", "{maxoffsetspertrigger: 1, maxOff", "is the same as maxoffsetspertrigger: give one"),
        ("from: long", "from: long, options: {topic: b}", "sinks.out.options.topic: does not go with topic"),
        (
            "from: long", "from: long, dead_letters: d, options: {deadLetterTopic: e}",
            "sinks.out.options.deadLetterTopic: does not go with topic",
        ),
        ('topic: "long_${topic}"', "parquet: a, mode: update", "sinks.out.mode: parquet files take append only"),
        ('topic: "long_${topic}"', "parquet: a, compact_files: 1", "sinks.out.compact_files: 1 is too few"),
        ('topic: "long_${topic}"', "format: babelbus, mode: update", "sinks.out.mode: update goes with topic"),
        ('topic: "long_${topic}"', "parquet: a, key: b", "sinks.out.key: goes with topic and state, not with parquet"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_file(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in GOOD
    assert told in refused(tmp_path, GOOD.replace(old, new, 1))


def test_a_file_that_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    assert "it is no YAML" in refused(tmp_path, "name: [")
    twice = GOOD + "steps:\n  short: {sql: SELECT 1}\n"
    assert refused(tmp_path, twice) == ": line 10: the key 'steps' is there twice: write it once"
    assert "a pipeline is a mapping" in refused(tmp_path, "- 1")
    assert "has no variable 'pipeline'" in refused(tmp_path, "x = 1", "none.py")
    assert "ZeroDivisionError when the file is run: division by zero" in refused(tmp_path, "1 / 0", "zero.py")
    assert "SystemExit when the file is run: 3" in refused(tmp_path, "raise SystemExit(3)", "exit.py")
    listed = PYTHON.replace('"name"', '"steps": [], "name"')
    assert load(write(tmp_path, listed, "empty.py")).pipeline.steps.keys() == {"first", "second"}
    assert "steps: a mapping of names" in refused(tmp_path, listed.replace("[]", "[1]"), "listed.py")
    assert "ends in .yaml, .yml, .py" in refused(tmp_path, "", "one.toml")
    assert "no parameter 'colour' to set; there are: topic, most" in refused(tmp_path, GOOD, colour="red")
    assert "parameters.most: 'many' is no int, as 10 is" in refused(tmp_path, GOOD, most="many")
    with pytest.raises(PipelineError, match="there is no such file"):
        load(str(tmp_path / "missing.yaml"))
    with pytest.raises(PipelineError, match="it is a folder: name a file in it"):
        load(str(tmp_path))
    for name in ("broken.yaml", "broken.py"):
        (tmp_path / name).symlink_to("/proc/self/mem")  # refused also to root
        assert str(tmp_path / name) in set(find(str(tmp_path)))
        with pytest.raises(PipelineError, match=f"{name}: .*Input/output error"):
            load(str(tmp_path / name))
    (tmp_path / "binary.py").write_bytes(bytes(range(256)))
    assert str(tmp_path / "binary.py") not in set(find(str(tmp_path)))


PYTHON = '''
"""What it is for.

And more.
"""
pipeline = {
    "name": "python",
    "parameters": {"least": 3},
    "sources": {"raw": {"topic": "a"}},
    "sinks": {"out": {"from": "second", "console": True}},
}
def _helper(spark): ...
def other(frame): ...
def first(spark, raw, least): return (spark, raw, least)
def second(spark, first, width=7): return (first, width)
'''


def test_the_functions_of_a_python_file_are_its_steps(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, PYTHON, "python.py"))
    assert loaded.pipeline.description == "What it is for."
    assert list(loaded.pipeline.steps) == ["first", "second"]
    assert loaded.functions["first"]("s", raw="r", least=3) == ("s", "r", 3)
    assert (
        "steps.first.python: its parameter 'raw' is no source, parameter or step above it; there are: least, row"
        in (refused(tmp_path, PYTHON.replace('"raw": {', '"row": {'), "renamed.py"))
    )


def test_a_yaml_file_takes_functions_from_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, "raise SystemExit(3)", "exit.py")
    write(tmp_path, "def keep(spark, raw): return raw\ndef wrong(raw): ...", "steps_of.py")
    text = GOOD.replace('{sql: "SELECT * FROM raw WHERE length(value) > ${most}"}', "{python: 'steps_of.py:keep'}")
    assert load(write(tmp_path, text)).functions["long"]("s", 5) == 5
    for old, told in (
        ("steps_of.py:gone", "steps_of.py has no function 'gone'"),
        ("steps_of.py:wrong", "the first parameter of its function must be 'spark'"),
        ("none.py:keep", "there is no file"),
        ("no_such_module:keep", "module 'no_such_module' cannot be imported"),
        (".relative:keep", "module '.relative' cannot be imported: TypeError"),
        ("exit.py:keep", "steps.long.python: exit.py: SystemExit when the file is run: 3"),
        ("builtins:dict", "steps.long.python: 'builtins:dict' does not tell its parameters"),
        ("keep", "'keep' names no function"),
    ):
        assert told in refused(tmp_path, text.replace("steps_of.py:keep", old))


def test_every_example_is_found_and_read() -> None:
    found: list[Loaded] = [load(file) for file in find(str(EXAMPLES))]
    names = {one.pipeline.name for one in found}
    assert names >= {"archive", "replay", "rollup", "enrich", "deduplicate", "quality", "traffic"}
    assert all(one.pipeline.description for one in found)


@pytest.mark.parametrize("file", list(find(str(EXAMPLES))))
def test_every_example_says_how_to_make_the_topics_of_its_sinks(file: str) -> None:
    text = Path(file).read_text(encoding="utf-8")
    for sink in load(file).pipeline.sinks.values():
        topic = sink.topic or sink.state
        assert not topic or f"babelbus topics create {topic}" in text


@pytest.mark.parametrize("topics", [".*", "flights|traffic|gaps|plant.*"])
def test_the_traffic_pipeline_does_not_read_its_own_topics(topics: str) -> None:
    pattern = load(str(EXAMPLES / "traffic.py"), {"topics": topics}).pipeline.sources["records"].pattern
    assert pattern is not None
    names = ["flights", "plant/1", "traffic", "gaps"]
    assert [name for name in names if re.fullmatch(pattern, name)] == ["flights", "plant/1"]


def test_the_bus_of_the_command_line_is_for_those_that_name_none() -> None:
    bus = Bus(url="jebp://a:1", path="/data", identity="key")
    assert bus.options({}) == {"path": "/data"}
    assert bus.options({}, writing=True) == {"url": "jebp://a:1", "identity": "key"}
    assert bus.options({"kafka.bootstrap.servers": "b:2"}) == {"kafka.bootstrap.servers": "b:2"}
    assert bus.options({"groupId": "g"}) == {"url": "jebp://a:1", "identity": "key", "groupId": "g"}
    assert Bus(path="/data").options({"groupId": "g"}) == {"path": "/data", "groupId": "g"}


def spark_progress(**more: Any) -> str:
    return json.dumps(
        {
            "batchId": 4,
            "numInputRows": 10,
            "durationMs": {"addBatch": 100, "triggerExecution": 1500},
            "sources": [{"endOffset": {"a": {"0": 5, "1": 7}}, "latestOffset": {"a": {"0": 9, "1": 7, "2": 1}}}],
            "stateOperators": [{"numRowsTotal": 3, "memoryUsedBytes": 9, "numRowsDroppedByWatermark": 2}],
            "sink": {"numOutputRows": -1},
            "observedMetrics": {"out": {"rows": 8}},
        }
        | more
    )


def test_figures_that_spark_does_not_count_are_not_negative() -> None:
    """RocksDB says -1 where it does not count its rows, and the server refuses a report with a negative figure."""
    operators = [{"numRowsTotal": -1, "memoryUsedBytes": -1}, {"numRowsTotal": 3, "memoryUsedBytes": 9}]
    batch = progress.read(spark_progress(stateOperators=operators), "p", "s")
    assert batch is not None
    assert (batch.state_rows, batch.state_bytes) == (3, 9)


def test_a_batch_tells_rows_lag_and_state() -> None:
    batch = progress.read(spark_progress(), "p", "s")
    assert batch is not None
    assert (batch.rows_in, batch.rows_out, batch.rows_late, batch.lag, batch.state_rows, batch.seconds) == (
        10, 8, 2, 4, 3, 1.5
    )  # fmt: skip
    field = {"name": "rows", "type": "long", "nullable": False, "metadata": {}}
    remote = spark_progress(
        sources=[{"numInputRows": 6}, {"numInputRows": 4}],
        observedMetrics={"out": {"values": [8], "schema": {"type": "struct", "fields": [field]}}},
    ).replace('"numInputRows": 10, ', "", 1)
    there = progress.read(remote, "p", "s")
    assert there is not None
    assert (there.rows_in, there.rows_out) == (10, 8)
    text = [{"endOffset": '{"a":{"0":5}}', "latestOffset": '{"a":{"0":6}}'}]  # as Spark Connect has them
    assert progress.lag(text[0]["endOffset"], text[0]["latestOffset"]) == 1
    other = progress.read(spark_progress(sources=[{"endOffset": 3, "latestOffset": None}]), "p", "s")
    assert other is not None
    assert other.lag is None
    assert progress.read(spark_progress(durationMs={"triggerExecution": 1}), "p", "s") is None


def test_metrics_are_served_for_prometheus() -> None:
    metrics = PipelineMetrics("p")
    batch = progress.read(spark_progress(), "p", "s")
    assert batch is not None
    metrics.started("s")
    metrics.batch(batch)
    metrics.batch(batch)
    with urlopen(f"http://127.0.0.1:{metrics.serve(0)}/metrics", timeout=SAFETY_NET_SECONDS) as answer:
        text = answer.read().decode()
    metrics.close()
    for name, value in (("rows_in_total", 20), ("lag_records", 4), ("running", 1), ("batch_seconds_count", 2)):
        assert f'babelbus_pipeline_{name}{{pipeline="p",sink="s"}} {value}.0' in text


def test_two_runs_do_not_share_a_checkpoint(tmp_path: Path) -> None:
    with lock(str(tmp_path / "c")), pytest.raises(CheckpointInUseError, match="in use"), lock(str(tmp_path / "c")):
        pass
    with lock(str(tmp_path / "c")):
        pass


def test_the_cause_of_a_failure_is_what_python_said() -> None:
    text = 'Query x: Traceback (most recent call last):\n File "a"\nbabelbus.spark.errors.OptionError: option x\n'
    assert cause(Exception(text + "\tat org.apache.spark.Foo")) == "option x"
    java = "An error occurred while calling o1.load.\n: org.apache.spark.X: [NOT_FOUND] no nope\n\tat org"
    assert cause(Exception(java)) == "org.apache.spark.X: [NOT_FOUND] no nope"
    assert cause(Exception("[A_B] This is it.\n\tat org...")) == "[A_B] This is it."


class Rows:
    """A frame of Spark's, as far as a Delta table asks for one."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def toArrow(self) -> pa.Table:  # noqa: N802 - Spark's name
        return pa.table({"n": list(self.numbers)})


def test_a_delta_table_takes_each_batch_of_a_query_once(tmp_path: Path) -> None:
    delta = pytest.importorskip("deltalake")
    path = str(tmp_path / "table")

    def write_batch(batch: int, *numbers: int, query: str = "q") -> None:
        DeltaFolder(path, [], query, {})(cast("DataFrame", Rows(*numbers)), batch)

    write_batch(0, 1, 2)
    write_batch(0, 1, 2)
    write_batch(1, 3)
    write_batch(1, 3)
    write_batch(0, 4, query="other")
    assert sorted(delta.DeltaTable(path).to_pyarrow_table().column("n").to_pylist()) == [1, 2, 3, 4]


def test_without_the_package_a_delta_sink_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeltaMissingError, match="pip install deltalake"):
        need_delta()


def put(folder: Path, name: str, *numbers: int) -> None:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"n": list(numbers)}), folder / name)


def rows(folder: Path) -> list[int]:
    names = sorted(path for path in folder.iterdir() if path.name.endswith(".parquet") and path.name[0] not in "_.")
    return [number for path in names for number in pq.read_table(path).column("n").to_pylist()]


def archive(folder: Path) -> Path:
    for batch in range(4):
        put(folder, f"batch-{batch:010d}-00000.parquet", batch * 10, batch * 10 + 1)
    return folder


def test_small_files_of_finished_batches_become_one_in_order(tmp_path: Path) -> None:
    folder = archive(tmp_path / "day")
    assert not merge(str(folder), 3, 4)  # batch 3 may come again
    assert merge(str(folder), 4, 4)
    assert [path.name for path in folder.iterdir()] == ["batch-0000000000-to-0000000003-00000.parquet"]
    assert rows(folder) == [0, 1, 10, 11, 20, 21, 30, 31]


@pytest.mark.parametrize("removed", range(5))
def test_a_merge_that_was_killed_is_finished_or_undone(tmp_path: Path, removed: int) -> None:
    folder = archive(tmp_path / "day")
    expected = rows(folder)
    put(folder, MERGED, *expected)
    finish_merge(str(folder))  # without a journal it may be torn
    assert rows(folder) == expected
    old = sorted(path.name for path in folder.iterdir())
    put(folder, MERGED, *expected)
    (folder / JOURNAL).write_text(json.dumps({"new": "batch-0000000000-to-0000000003-00000.parquet", "old": old}))
    for name in old[:removed]:
        (folder / name).unlink()
    if removed == 4:
        (folder / MERGED).rename(folder / "batch-0000000000-to-0000000003-00000.parquet")
    finish_merge(str(folder))
    assert rows(folder) == expected
    assert len(list(folder.iterdir())) == 1
    (folder / JOURNAL).write_text("{")
    with pytest.raises(DamagedArchiveError, match="compare the files"):
        finish_merge(str(folder))
