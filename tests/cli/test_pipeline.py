"""`babelbus pipeline` as a person meets it; what pipelines do is tested in tests/spark."""

import contextlib
import json
import os
import signal
import threading
from pathlib import Path
from urllib.request import urlopen

import pytest

from babelbus.cli import main
from babelbus.cli.pipeline_report import Reporter
from babelbus.spark.pipelines.metrics import PipelineMetrics
from babelbus.spark.pipelines.progress import Batch, Watcher
from babelbus.spark.pipelines.run import lock
from tests.cli.shell import Served, Shell
from tests.support.bus import SAFETY_NET_SECONDS

EXAMPLES = Path(__file__).parents[2] / "examples" / "pipelines"
ONE = """
name: one
description: Payloads of a topic, longest first
parameters: {topic: words}
sources:
  raw: {topic: "${topic}", options: {startingOffsets: earliest}}
steps:
  sized: {sql: "SELECT string(value) AS word, length(value) AS size FROM raw"}
sinks:
  files: {from: sized, parquet: out, trigger: 100ms}
"""


def test_list_names_the_pipelines_of_a_folder_and_what_they_do(shell: Shell) -> None:
    rows = shell.rows("pipeline", "list", str(EXAMPLES), "--json")
    told = {row["name"]: row["description"] for row in rows}
    assert told["archive"] == "Topics to Parquet by topic and day, exactly once, small files merged"
    assert set(told) >= {"archive", "replay", "rollup", "enrich", "deduplicate", "quality", "traffic"}
    assert "rollup.yaml" in shell.run("pipeline", "list", str(EXAMPLES))


def test_list_shows_a_broken_file_beside_the_others(shell: Shell) -> None:
    (shell.folder / "one.yaml").write_text(ONE)
    (shell.folder / "two.yaml").write_text("name: 3")
    listed = shell.run_raw("pipeline", "list", ".", "--json")
    by_file = {row["file"]: row for row in map(json.loads, listed.stdout.splitlines())}
    assert by_file["./one.yaml"]["error"] == ""
    assert by_file["./two.yaml"]["error"].startswith("./two.yaml: ")
    assert (listed.returncode, "1 of 2 files in .: no pipeline" in listed.stderr) == (1, True)


def test_show_fills_parameters_in(shell: Shell) -> None:
    (shell.folder / "one.yaml").write_text(ONE)
    told = json.loads(shell.run("pipeline", "show", "one.yaml", "--set", "topic=news", "--json"))
    assert told["sources"]["raw"]["topic"] == "news"
    text = shell.run("pipeline", "show", "one.yaml")
    assert text.startswith("one: Payloads of a topic, longest first")
    assert "sink       files: from=sized  parquet=out" in text
    assert "trigger    1s" in text
    (shell.folder / "one.yaml").write_text(ONE + "trigger: 5m\nspark: {spark.sql.shuffle.partitions: 2}\n")
    text = shell.run("pipeline", "show", "one.yaml")
    assert "trigger    5m" in text
    assert "spark      spark.sql.shuffle.partitions: 2" in text


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (("show", "missing.yaml"), 1, "missing.yaml: there is no such file"),
        (("show", "one.yaml", "--set", "colour=red"), 1, "there is no parameter 'colour'"),
        (("show", "one.yaml", "--set", "colour"), 2, "write NAME=VALUE"),
        (("run", "one.yaml", "--once", "--trigger", "1s"), 2, "--once and --trigger do not go together"),
        (("run", "one.yaml", "--trigger", "soon"), 2, "'soon' is no duration"),
        (("run", "one.yaml", "--remote", "sc://a", "--master", "local[1]"), 2, "--master and --remote do not go"),
        (("run", "one.yaml", "--remote", "a:1"), 2, "'a:1' is no Spark Connect server"),
        (("run", "one.yaml", "--master", "sc://a"), 2, "with Spark Connect --checkpoint is needed"),
        (("run", "one.yaml", "--master", "sc://a", "--checkpoint", "here"), 2, "the whole path of a folder"),
        (("run", "one.yaml", "--read", "files"), 1, "there is no data folder"),
        (("run", "one.yaml", "--read", "server"), 1, "no server runs on"),
        (("list", "nowhere"), 1, "there is no file or folder nowhere"),
        (("check", "."), 1, "there is no pipeline in ."),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(shell: Shell, args: tuple[str, ...], code: int, told: str) -> None:
    if args != ("check", "."):
        (shell.folder / "one.yaml").write_text(ONE)
    assert told in shell.run("pipeline", *args, code=code)


@pytest.mark.timeout(1200)
def test_check_tells_each_fault_in_a_line(served: Served) -> None:
    served.run("topics", "create", "words")
    (served.folder / "one.yaml").write_text(ONE)
    (served.folder / "schema.yaml").write_text(ONE.replace("raw: {", "raw: {json: a STRNG, "))
    (served.folder / "two.yaml").write_text(ONE.replace("string(value)", "colour"))
    (served.folder / "state.yaml").write_text(ONE.replace("parquet: out", "state: words, key: word"))
    checked = served.run_raw("pipeline", "check", ".", "--json")
    found = [json.loads(line) for line in checked.stdout.splitlines()]
    assert [(row["file"], row["field"], row["ok"]) for row in found] == [
        ("./one.yaml", "sources.raw", True),
        ("./one.yaml", "steps.sized", True),
        ("./one.yaml", "sinks.files", True),
        ("./schema.yaml", "sources.raw", True),
        ("./schema.yaml", "sources.raw.json", False),
        ("./schema.yaml", "steps.sized", None),
        ("./schema.yaml", "sinks.files", None),
        ("./state.yaml", "sources.raw", True),
        ("./state.yaml", "steps.sized", True),
        ("./state.yaml", "sinks.files.state", False),
        ("./two.yaml", "sources.raw", True),
        ("./two.yaml", "steps.sized", False),
        ("./two.yaml", "sinks.files", None),
    ]
    texts = {row["file"]: row["text"] for row in found if row["ok"] is False}
    assert "STRNG" in texts["./schema.yaml"]
    assert "babelbus topics alter words --retain last" in texts["./state.yaml"]
    assert "colour" in texts["./two.yaml"]
    assert checked.returncode == 1
    assert not any(word in checked.stderr for word in ("colour", "STRNG", "QueryContextLogger", "Traceback"))


@pytest.mark.timeout(1200)
def test_a_pipeline_runs_until_ctrl_c_with_a_line_for_each_batch_and_metrics(served: Served) -> None:
    (served.folder / "one.yaml").write_text(ONE.replace("words", "published"))
    served.run("topics", "create", "published")
    served.run("publish", "published", "one", "three")
    process = served.start("pipeline", "run", "one.yaml", "--json", "--metrics-port", "0")
    assert process.stdout is not None
    assert process.stderr is not None
    words: list[str] = []
    stderr = process.stderr
    reader = threading.Thread(target=lambda: words.extend(stderr), daemon=True)
    reader.start()
    batch = json.loads(process.stdout.readline())
    assert (batch["pipeline"], batch["sink"], batch["batch"], batch["rows_in"], batch["rows_out"], batch["lag"]) == (
        "one", "files", 0, 2, 2, 0
    )  # fmt: skip
    while not (addresses := [word for line in list(words) for word in line.split() if word.startswith("http://")]):
        assert process.poll() is None  # it was said before the batch, but on the other stream
    (address,) = addresses
    with urlopen(address, timeout=SAFETY_NET_SECONDS) as answer:
        assert 'babelbus_pipeline_rows_in_total{pipeline="one",sink="files"} 2.0' in answer.read().decode()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 0
    reader.join()
    process.stdout.close()
    process.stderr.close()
    with urlopen(f"http://{served.ready['addresses']['admin']}/metrics", timeout=SAFETY_NET_SECONDS) as answer:
        told = answer.read().decode()
    for name, value in (("rows_in_total", 2), ("rows_out_total", 2), ("running", 0), ("lag_records", 0)):
        assert f'babelbus_pipeline_{name}{{pipeline="one",sink="files"}} {value}.0' in told
    assert any("stopping after the batch under way" in line for line in words)
    assert not any("Traceback" in line for line in words)
    assert any(name.endswith(".parquet") for name in os.listdir(served.folder / "out"))


def test_a_batch_is_in_the_metrics_before_its_line_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    class Runner:
        def __init__(
            self, spark: object, loaded: object, find_bus: object, policy: object, watchers: list[Watcher], stop: object
        ) -> None:
            self.watchers = watchers

        def run(self) -> None:
            for watcher in self.watchers:
                watcher.batch(Batch("one", "files", 0, 2, 2, 0, 0, 0, 0, 0, 0.1, None))

    def count(*_: object) -> None:
        printed.append(capsys.readouterr().out)

    for watcher in (PipelineMetrics, Reporter):
        monkeypatch.setattr(watcher, "batch", count)
    monkeypatch.setattr(PipelineMetrics, "serve", lambda *_: 8601)
    monkeypatch.setattr("babelbus.spark.pipelines.run.Runner", Runner)
    monkeypatch.setattr("babelbus.spark.pipelines.session.session", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(ONE)
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", "run", "one.yaml", "--json", "--metrics-port", "0", "--data-folder", str(tmp_path / "data")])
    assert ended.value.code == 0
    assert printed == ["", ""]
    assert '"batch":0' in capsys.readouterr().out.replace(" ", "")


COPY = """
name: copy
sources:
  raw: {topic: words, options: {startingOffsets: earliest}}
sinks:
  out: {from: raw, topic: copied, options: {requestTimeoutMs: 3000}}
"""


@pytest.mark.timeout(1200)
def test_a_pipeline_finds_a_server_that_is_started_after_it(shell: Shell) -> None:
    (shell.folder / "copy.yaml").write_text(COPY)
    served = Served(shell.folder)
    for topic in ("words", "copied"):
        served.run("topics", "create", topic)
    served.run("publish", "words", "one", "two")
    assert served.stop() == 0
    process = shell.start("pipeline", "run", "copy.yaml", "--json", "--restarts", "1000")
    assert process.stdout is not None
    assert process.stderr is not None
    words = []
    for line in process.stderr:
        words.append(line)
        if "failed, starting again" in line:
            break
    assert any(f"no server runs on {shell.data}" in line for line in words), words
    stderr = process.stderr
    reader = threading.Thread(target=lambda: words.extend(stderr), daemon=True)  # a full pipe would stop the pipeline
    reader.start()
    served = Served(shell.folder)  # on other ports than before
    try:
        assert json.loads(process.stdout.readline())["rows_out"] == 2
        assert served.run("fetch", "copied", "--json").count("\n") == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 0, words
        reader.join()
        process.stdout.close()
        process.stderr.close()
    finally:
        assert served.stop() == 0


@pytest.mark.timeout(1200)
def test_a_checkpoint_that_is_in_use_is_refused_before_spark_starts(shell: Shell) -> None:
    (shell.folder / "rate.yaml").write_text(RATE)
    with lock(str(shell.folder / "checkpoints" / "rate")):
        told = shell.run("pipeline", "run", "rate.yaml", code=1)
    assert "is in use: the pipeline runs already" in told
    assert "starting Spark" not in told


RATE = """
name: rate
sources:
  raw: {format: rate, options: {rowsPerSecond: 5}}
sinks:
  out: {from: raw, format: noop, trigger: 200ms}
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("batches", [0, 2])
def test_sigterm_to_the_whole_group_ends_a_pipeline_as_a_stop_does(shell: Shell, batches: int) -> None:
    (shell.folder / "rate.yaml").write_text(RATE)
    process = shell.start("pipeline", "run", "rate.yaml", "--json", start_new_session=True)
    assert process.stdout is not None
    assert process.stderr is not None
    said = process.stderr.readline()
    assert "starting Spark" in said
    for _ in range(batches):
        assert process.stdout.readline()
    os.killpg(process.pid, signal.SIGTERM)
    _, told = process.communicate(timeout=300)  # its end is also that of the JVM, which has the same standard error
    assert process.returncode == 0, told
    assert "pipeline rate: stopped" in told
    assert "refused" not in told
    assert "Traceback" not in told
    assert ("stopping after the batch under way" in told) == (batches > 0)


@pytest.mark.timeout(1200)
def test_the_jvm_ends_with_a_runner_that_was_killed(shell: Shell) -> None:
    (shell.folder / "rate.yaml").write_text(RATE)
    process = shell.start("pipeline", "run", "rate.yaml", "--json")
    assert process.stdout is not None
    assert process.stdout.readline()
    process.kill()
    process.communicate(timeout=300)  # comes back when nobody has its standard error any more
    assert process.returncode == -signal.SIGKILL
