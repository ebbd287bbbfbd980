"""`babelbus pipeline`: run, check, list and show pipelines that are files (docs/pipeline.md)."""

import contextlib
import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from babelbus.cli.command import BusGroup, CommandError, examples
from babelbus.cli.output import escape, human_bytes, note, print_json, print_line, print_table
from babelbus.cli.pipeline_report import Reporter
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options
from babelbus.clock import SystemClock
from babelbus.spark.pipelines.progress import Batch, Watcher

if TYPE_CHECKING:
    from babelbus.cli.api import AdminApi
    from babelbus.spark.pipelines.bus import Bus
    from babelbus.spark.pipelines.load import Loaded
    from babelbus.spark.pipelines.session import Place

F = Callable[..., Any]
CONNECT_SCHEME = "sc://"
TWICE_SECONDS_MIN = 0.5
"""Two signals within this time count as one: `timeout` signals its child, and then the group with this process."""


@click.group(cls=BusGroup)
def pipeline() -> None:
    """Run data pipelines on Spark: files that name sources, steps in SQL or Python, and sinks."""


def _pairs(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r}: write NAME=VALUE", ctx, param)
        pairs[name] = text
    return pairs


_set_option = click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", callback=_pairs, help="Give a parameter of the file."
)
_SPARK_OPTIONS = (
    click.option(
        "--master", default="local[*]", show_default=True,
        help="Where Spark runs, as spark://host:7077, or sc://host:15002 for a Spark Connect server.",
    ),
    click.option("--remote", default="", metavar="URL", help="A Spark Connect server: the same as --master with it."),
    click.option("--conf", multiple=True, metavar="NAME=VALUE", callback=_pairs, help="A setting of the session."),
    click.option("--ship", is_flag=True, help="Send our own code to the executors, where it is not installed."),
    click.option(
        "--read", "way", type=click.Choice(["server", "files"]),
        help="Read records through the server, or in place from the files of the data folder."
        "  [default: files if the data folder is here and Spark is local, else server]",
    ),
)  # fmt: skip


def _spark_options(command: F) -> F:
    for option in reversed(_SPARK_OPTIONS):
        command = option(command)
    return command


@pipeline.command(
    epilog=examples(
        "babelbus pipeline run examples/pipelines/rollup.yaml",
        "babelbus pipeline run rollup.yaml --once --set topic=flights",
        "babelbus pipeline run rollup.yaml --master spark://host:7077 --ship --restarts 5 --metrics-port 8601",
    )
)
@click.argument("file")
@_set_option
@click.option("--once", is_flag=True, help="Process the records that exist now, and end.")
@click.option("--trigger", metavar="TIME", help="Time between two batches of all sinks, as 10s; asap for none.")
@click.option(
    "--checkpoint", metavar="FOLDER", help="Where Spark notes how far it is.  [default: ./checkpoints/<name>]"
)
@click.option(
    "--restarts", type=click.IntRange(0), default=3, show_default=True,
    help="Times in a row that a failed query is started again, after 1 s, 2 s, 4 s and so on.",
)  # fmt: skip
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve metrics for Prometheus on this port.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one batch a line.")
@_spark_options
@bus_options
def run(
    target: Target,
    file: str,
    settings: dict[str, str],
    once: bool,
    trigger: str | None,
    checkpoint: str | None,
    restarts: int,
    metrics_port: int | None,
    as_json: bool,
    **spark_options: Any,
) -> None:
    """Run the pipeline in FILE until Ctrl-C (or SIGTERM); the batch under way is finished first.

    A line describes each batch: rows read, rows written, lag (records not read yet), rows and memory of Spark's state,
    late rows, duration. The checkpoint has the position: the next run continues behind it.
    """
    if once and trigger:
        raise click.UsageError("--once and --trigger do not go together")
    _need_spark()
    from babelbus.spark.pipelines.graph import graph
    from babelbus.spark.pipelines.load import load
    from babelbus.spark.pipelines.metrics import PipelineMetrics
    from babelbus.spark.pipelines.model import Wrong, read_trigger
    from babelbus.spark.pipelines.run import Policy, Runner, lock
    from babelbus.spark.pipelines.session import session

    if trigger:
        try:
            read_trigger("--trigger", trigger)
        except Wrong as wrong:
            raise click.UsageError(str(wrong)) from None
    loaded = load(file, settings)
    name = loaded.pipeline.name
    place = _place(spark_options)
    folder = _checkpoint(checkpoint, name, place)

    def find_bus() -> "Bus":
        return _bus(target, place, spark_options["way"], awaited=True)

    bus = find_bus()
    if bus.url and not (target.remote or target.running()):
        note(f"no server runs on {target.folder}: what is read from or written to the bus waits for {bus.url}")
    watchers: list[Watcher] = []
    if metrics_port is not None:
        metrics = PipelineMetrics(name)
        note(f"metrics on http://127.0.0.1:{metrics.serve(metrics_port)}/metrics")
        watchers.append(metrics)
    policy = Policy(folder, "once" if once else trigger, restarts, remote=bool(place.remote))
    reporter = Reporter(_admin(target), name, graph(loaded))
    # Printed last: who has read the line of a batch finds the batch in the metrics.
    watchers += [reporter, _Printer(as_json)]
    # Locked before Spark starts: that takes seconds.
    with contextlib.nullcontext() if place.remote else lock(folder), _Stop() as stop, reporter:
        note(f"pipeline {name}: starting Spark on {place.remote or place.master}, checkpoint {folder}")
        with session(name, place, loaded.pipeline.spark | spark_options["conf"], checkpoint=folder) as spark:
            Runner(spark, loaded, find_bus, policy, watchers, stop=stop.begin()).run()
    note(f"pipeline {name}: {'stopped' if stop.asked.is_set() else 'done'}")


@pipeline.command(
    epilog=examples("babelbus pipeline check examples/pipelines/rollup.yaml", "babelbus pipeline check . --json")
)
@click.argument("path")
@_set_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one finding a line.")
@_spark_options
@bus_options
def check(target: Target, path: str, settings: dict[str, str], as_json: bool, **spark_options: Any) -> None:
    """Check the pipeline in PATH (or all those of a folder) without running it.

    Checks fields and names; SQL and Python steps, analysed by Spark on sources without rows; output modes and columns
    of sinks; and, if a server can be reached, whether its topics exist. Exit code 1 if there is a fault.
    """
    _need_spark()
    from babelbus.spark.errors import PipelineError
    from babelbus.spark.pipelines.check import check as look
    from babelbus.spark.pipelines.load import load
    from babelbus.spark.pipelines.session import session

    faults = 0
    rows: list[dict[str, Any]] = []
    loaded: list[Loaded] = []
    for file in _files(path):
        try:
            loaded.append(load(file, settings))
        except PipelineError as error:
            rows.append({"file": file, "field": error.field, "ok": False, "text": error.problem})
    if loaded:
        place, conf = _place(spark_options), spark_options["conf"]
        bus = _bus(target, place, spark_options["way"], awaited=False)
        with session("check", place, conf, checkpoint="") as spark:
            for entry in loaded:
                findings = look(spark, entry, bus, conf)
                rows += [{"file": entry.file, **msgspec.to_builtins(finding)} for finding in findings]
    for row in rows:
        faults += row["ok"] is False
        if as_json:
            print_json(row)
        else:
            mark = {True: "ok", False: "FAULT", None: "-"}[row["ok"]]
            print_line(escape(f"{mark:5}  {row['file']}: {row['field'] or 'file'}: {row['text']}"))
    if faults:
        raise CommandError(f"{faults} {'fault' if faults == 1 else 'faults'} in {path}")


@pipeline.command("list", epilog=examples("babelbus pipeline list examples/pipelines"))
@click.argument("path", default=".")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one pipeline a line.")
def list_(path: str, as_json: bool) -> None:
    """List the pipelines in a folder; files that cannot be read are named too, and make the exit code 1."""
    _need_spark()
    from babelbus.spark.errors import PipelineError
    from babelbus.spark.pipelines.load import load

    rows = []
    for file in _files(path):
        try:
            entry = load(file, {}).pipeline
        except PipelineError as error:
            rows.append({"file": file, "name": "", "description": "", "error": str(error)})
            continue
        rows.append({"file": file, "name": entry.name, "description": entry.description, "error": ""})
    if as_json:
        for row in rows:
            print_json(row)
    else:
        print_table(
            ("File", "Name", "Description"),
            [(row["file"], row["name"] or "-", row["error"] or row["description"]) for row in rows],
        )
    broken = sum(bool(row["error"]) for row in rows)
    if broken:
        raise CommandError(f"{broken} of {len(rows)} {'file' if len(rows) == 1 else 'files'} in {path}: no pipeline")


@pipeline.command(epilog=examples("babelbus pipeline show examples/pipelines/rollup.yaml --set window='1 hour'"))
@click.argument("file")
@_set_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(file: str, settings: dict[str, str], as_json: bool) -> None:
    """Show the parts of the pipeline in FILE, with its parameters filled in."""
    _need_spark()
    from babelbus.spark.pipelines.load import load

    loaded = load(file, settings)
    loaded_pipeline = loaded.pipeline
    fields = {name: _short(part) for name, part in msgspec.to_builtins(loaded_pipeline).items() if part}
    if as_json:
        print_json(fields)
        return
    print_line(escape(f"{loaded_pipeline.name}: {loaded_pipeline.description or '(no description)'}"))
    print_line(escape(f"  {'trigger':10} {loaded_pipeline.trigger}"))
    for part in ("spark", "parameters", "sources", "steps", "sinks"):
        for name, entry in (fields.get(part) or {}).items():
            text = entry if not isinstance(entry, dict) else "  ".join(f"{k}={_one_line(v)}" for k, v in entry.items())
            print_line(escape(f"  {part.removesuffix('s'):10} {name}: {text}"))


def _short(part: Any) -> Any:
    """Return the fields of each entry without the empty ones."""
    if not isinstance(part, dict):
        return part
    return {name: _short(value) for name, value in part.items() if value not in (None, {}, [], False, "")}


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())


def _files(path: str) -> list[str]:
    from babelbus.spark.pipelines.load import find

    if not os.path.exists(path):
        raise CommandError(f"there is no file or folder {path}")
    files = list(find(path))
    if not files:
        raise CommandError(f"there is no pipeline in {path}")
    return files


def _need_spark() -> None:
    """Check that Spark is installed: it is an extra.

    Raises:
        CommandError: a module of Spark is missing.
    """
    for module in ("pyspark", "yaml", "pyarrow"):
        if importlib.util.find_spec(module) is None:
            raise CommandError(f"pipelines need {module}, which is not installed: pip install 'babelbus[spark]'")


def _place(options: dict[str, Any]) -> "Place":
    """Return where Spark runs."""
    from babelbus.spark.pipelines.session import Place

    master, remote = options["master"], options["remote"]
    if remote and master != "local[*]":
        raise click.UsageError("--master and --remote do not go together")
    if master.startswith(CONNECT_SCHEME):
        master, remote = "", master
    elif remote and not remote.startswith(CONNECT_SCHEME):
        raise click.UsageError(f"--remote: {remote!r} is no Spark Connect server: write {CONNECT_SCHEME}host:15002")
    return Place(master, remote, options["ship"])


def _checkpoint(given: str | None, name: str, place: "Place") -> str:
    """Return Spark's checkpoint folder; with a Connect server it must be an option, as its disk is unknown here."""
    if place.remote:
        if given is None or not ("://" in given or os.path.isabs(given)):
            raise click.UsageError(
                "with Spark Connect --checkpoint is needed: the whole path of a folder that the Connect server reaches"
            )
        return given
    folder = given or os.path.join("checkpoints", name)
    return folder if "://" in folder else os.path.abspath(folder)


def _bus(target: Target, place: "Place", way: str | None, *, awaited: bool) -> "Bus":
    """Return the way to the bus: from the options, else to the server on the data folder, else the folder alone.

    With `awaited` a server that does not run yet is expected at the address of the configuration.
    """
    from babelbus.spark.pipelines.bus import Bus

    local = not place.remote and place.master.startswith("local")
    here = os.path.isdir(os.path.join(target.folder, "topics"))
    if way == "files" and not here:
        raise CommandError(f"--read files: there is no data folder {target.folder}")
    named = bool(target.remote or target.admin)
    files = way == "files" or (way is None and here and local and not named)
    path = target.folder if files else ""
    identity = os.path.abspath(target.key_path())
    awaited = awaited and os.path.exists(identity) and target.config.jebp.port > 0
    if not named and not awaited and target.running() is None:
        if way == "server":
            raise CommandError(f"--read server: no server runs on {target.folder}; name one with --server")
        return Bus(path=path)
    arguments = target.client_arguments()
    return Bus(
        url=f"jebp://{arguments['address']}",
        path=path,
        identity=identity,
        fingerprint=arguments["server_fingerprint"] or "",
        keeps_state=_keeps_state(_admin(target)),
    )


def _keeps_state(find_api: "Callable[[], AdminApi | None]") -> Callable[[str], bool | None]:
    """Return a function that asks the server, if its endpoint is in reach, whether a topic keeps state."""

    def ask(topic: str) -> bool | None:
        try:
            api = find_api()
            return None if api is None else bool(api.topic(topic)["settings"].get("retain") == "last")
        except CommandError:
            return None  # no such topic, or no server: its writer will meet the error

    return ask


def _admin(target: Target) -> "Callable[[], AdminApi | None]":
    """Return a function that finds the administration endpoint in reach: of the options, else of the server here.

    Each call looks again: the server may have been started since the last call.
    """
    named = bool(target.remote or target.admin)

    def find() -> "AdminApi | None":
        running = target.running()
        if not named and (running is None or "admin" not in running.addresses):
            return None
        return target.api()

    return find


class _StoppedEarlyError(BaseException):
    """A stop was requested before a query existed. No `Exception`, so that no handler takes it for a failure."""


class _Stop:
    """Makes Ctrl-C and SIGTERM request a stop, for a `with`: at once while starting, then behind the running batch."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._clock = SystemClock()
        self._runs = False
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Stop":
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        return kind is _StoppedEarlyError

    def begin(self) -> threading.Event:
        """Return the event that is set by a stop request from now on; until now a request was raised."""
        self._runs = True
        return self.asked

    def _ask(self, *_: object) -> None:
        if self.asked.is_set():
            if self._clock.monotonic() - self._asked_at < TWICE_SECONDS_MIN:
                return
            raise KeyboardInterrupt  # second request: at once
        self.asked.set()
        self._asked_at = self._clock.monotonic()
        if not self._runs:
            raise _StoppedEarlyError
        note("stopping after the batch under way; press again to stop at once")


class _Printer(Watcher):
    """Prints a line for each batch."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def started(self, sink: str) -> None:
        note(f"{sink}: started")

    def batch(self, batch: Batch) -> None:
        if self._as_json:
            print_json(batch)
            return
        lag = "-" if batch.lag is None else f"{batch.lag:,}"
        state = f"{batch.state_rows:,} rows {human_bytes(batch.state_bytes)}" if batch.state_rows else "-"
        late = f"  late {batch.rows_late:,}" if batch.rows_late else ""
        lost = f"  lost {batch.rows_lost:,}" if batch.rows_lost else ""
        print_line(
            f"{batch.sink}  batch {batch.batch}  in {batch.rows_in:,}  out {batch.rows_out:,}  lag {lag}"
            f"  state {state}{late}{lost}  {batch.seconds:.2f} s"
        )

    def skipped(self, sink: str, reason: str) -> None:
        note(escape(f"{sink}: nothing to do: it {reason}"))

    def failed(self, sink: str, reason: str, restart_seconds: float | None) -> None:
        if restart_seconds is not None:
            note(escape(f"{sink}: failed, starting again in {restart_seconds:g} s: {reason}"))
