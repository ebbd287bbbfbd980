"""The Spark session of a pipeline: this machine, a cluster, or Spark Connect."""

import importlib.util
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from babelbus.spark.errors import PipelineError, SparkError, WorkerLateError
from babelbus.spark.java import fast_options, java_home
from babelbus.spark.pipelines.model import Scalar
from babelbus.spark.python import worker_python

FAST_CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
"""Halves the cost of a batch where checkpoints are on a local disk; a rename is atomic there, in object stores not."""

SETTINGS: dict[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # 15 s by default, and on a busy machine a Python process may need longer for its first word.
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
_OF_SESSIONS = "spark.sql."
"""Prefix of the settings that a session may choose on a server that runs already."""
_LOCAL = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


REFUSAL_LOGS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
CONNECT = {
    "grpc": "grpcio",
    "grpc_status": "grpcio-status",
    "google.rpc": "googleapis-common-protos",
    "pandas": "pandas",
    "zstandard": "zstandard",
}
"""Modules that PySpark needs to speak to a Connect server, and the packages that they come with."""

REFUSALS = (PySparkException, Py4JError)
"""Errors with which Spark refuses something: some of the JVM's errors come as they are."""
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
JAVA_DEFAULTS = "spark.driver.defaultJavaOptions"
_LOG_SETTINGS = """rootLogger.level = off
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


class ConnectMissingError(SparkError):
    """Packages are not installed that a session on a Connect server needs."""

    def __init__(self, packages: list[str]) -> None:
        verb = "is" if len(packages) == 1 else "are"
        super().__init__(
            f"Spark Connect needs {', '.join(packages)}, which {verb} not installed: pip install 'babelbus[connect]'"
        )
        self.packages = packages


class Place(msgspec.Struct, frozen=True):
    """Where Spark runs: `master` (local[*], spark://host:7077, k8s://...) or `remote` (sc://host:15002)."""

    master: str = "local[*]"
    remote: str = ""
    ship: bool = False
    """Send our own code to the executors: for clusters whose Python has our requirements but not us."""


@contextmanager
def session(name: str, place: Place, settings: Mapping[str, Scalar], *, checkpoint: str) -> Iterator[SparkSession]:
    """Return a session, for a `with`; at its end it is stopped.

    Raises:
        JavaMissingError: there is no Java here; a remote session needs none.
        ConnectMissingError: the session is to be a remote one, and its packages are not installed.
        SparkError: Spark did not start.
    """
    wanted = text_options(settings)
    if place.remote:
        need_connect()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="babelbus-spark-") as folder:
        # PySpark leaves the pipes and sockets to its gateway for the garbage collector to close.
        warnings.simplefilter("ignore", ResourceWarning)
        # PySpark logs each refusal with the JVM's whole trace; who calls us gets the reason in a line.
        for refusals in REFUSAL_LOGS:
            PySparkLogger.getLogger(refusals).setLevel(logging.CRITICAL)
        builder = SparkSession.Builder().appName(f"babelbus {name}")
        if place.remote:
            builder = builder.remote(place.remote)
            wanted = {key: value for key, value in SETTINGS.items() if key.startswith(_OF_SESSIONS)} | wanted
        else:
            # The workers run the `python3` of PATH otherwise, which need not have PySpark.
            local = place.master.startswith("local")
            os.environ.setdefault("PYSPARK_PYTHON", worker_python() if local else sys.executable)
            os.environ["JAVA_HOME"] = java_home()
            builder = builder.master(place.master)
            # Spark's own words on standard error would bury ours; what a query fails of is told by the runner.
            java = wanted.pop(JAVA_OPTIONS, "")
            if local and JAVA_DEFAULTS not in wanted:  # on a cluster rows come to executors
                java = fast_options(java)
            java = f"-Dlog4j2.configurationFile={_log_settings(folder)} {java}".strip()
            defaults = SETTINGS | {JAVA_OPTIONS: java}
            defaults |= _LOCAL if local else {}
            if is_local(checkpoint):
                defaults["spark.sql.streaming.checkpointFileManagerClass"] = FAST_CHECKPOINTS
            wanted = defaults | wanted
        archive = _pack(folder) if place.ship else ""
        if archive and not place.remote:
            # What runs on the driver beside it (readers of streams, commits) gets no files that are sent to executors.
            paths = [archive, *filter(None, [os.environ.get("PYTHONPATH")])]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        for key, value in wanted.items():
            builder = builder.config(key, value)
        try:
            if not place.remote:
                with _held_signals():
                    _launch(SparkConf().setAll([("spark.master", place.master), *wanted.items()]))
            with _held_signals():
                spark = builder.getOrCreate()
        except Exception as error:
            where = place.remote or place.master
            raise SparkError(f"Spark did not start on {where}: {cause(error)}") from error
        try:
            if not place.remote:
                spark.sparkContext.setLogLevel("OFF")
            if archive:
                _ship(spark, archive, remote=bool(place.remote))
            yield spark
        finally:
            spark.stop()


def _launch(conf: SparkConf) -> None:
    """Start the JVM, unless this process has one, where signals do not reach it that are for us.

    `timeout`, a closed terminal and supervisors signal the whole process group or all processes of a service. A JVM
    that ended with the first of them would fail the batch under way; ours is stopped by us, and ends when its standard
    input does: however this process ends.
    """
    if SparkContext._gateway is not None:
        return
    gateway = launch_gateway(conf, {"start_new_session": True})  # type: ignore[no-untyped-call]
    signals = gateway.jvm.sun.misc
    signals.Signal.handle(signals.Signal("TERM"), signals.SignalHandler.SIG_IGN)
    SparkContext._ensure_initialized(gateway=gateway)


@contextmanager
def _held_signals() -> Iterator[None]:
    """Keep Ctrl-C and SIGTERM back until the end of a `with`: a JVM whose start is broken off would stay for ever.

    It also takes PySpark's own handler of Ctrl-C away, which cancels the batch under way.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: set[int] = set()
    held = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: came.add(number)) for number in held}
    try:
        yield
    except KeyboardInterrupt:  # of PySpark's handler
        came.add(signal.SIGINT)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for one in sorted(came):
            signal.raise_signal(one)


def need_connect() -> None:
    """Check that PySpark can speak to a Connect server.

    Raises:
        ConnectMissingError: packages are missing.
    """
    missing = [package for module, package in CONNECT.items() if not _is_there(module)]
    if missing:
        raise ConnectMissingError(missing)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what it is a part of is not there
        return False


def text_options(options: Mapping[str, Scalar]) -> dict[str, str]:
    """Return options as Spark takes them."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


def is_local(path: str) -> bool:
    """Return whether a path is of this machine's file system."""
    return "://" not in path


_OURS = re.compile(r"(?:babelbus|pyspark)[\w.]*(?:Error|Exception): (.+)|^(\w*(?:Error|Exception): .+)", re.MULTILINE)


def cause(error: BaseException) -> str:
    """Return the reason of a failure that Spark passed on: what Python raised in a worker, else what Spark says."""
    text = str(error)
    # What the JVM says by way of py4j begins with whom was called.
    text = text.partition("\n: ")[2] if text.startswith("An error occurred while calling") else text
    found = list(_OURS.finditer(text))
    if found:
        return (found[-1][1] or found[-1][2]).strip()
    # Without the traces of two languages that follow.
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


_LATE = "Python worker failed to connect back"


def refused(file: str, field: str, error: BaseException) -> PipelineError:
    """Return what to raise where Spark refused a part of a pipeline."""
    # Spark waits 10 s for some of its Python processes, which no setting changes; that is no fault of the pipeline.
    kind = WorkerLateError if _LATE in str(error) else PipelineError
    return kind(file, field, cause(error))


def _log_settings(folder: str) -> str:
    """Write what Spark's logger reads when the JVM starts, and return the path."""
    path = os.path.join(folder, "log4j2.properties")
    with open(path, "w", encoding="utf-8") as file:
        file.write(_LOG_SETTINGS)
    return path


def _pack(folder: str) -> str:
    """Write our package into a zip, and return its path."""
    path = os.path.join(folder, "babelbus.zip")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for parent, folders, files in os.walk(os.path.join(root, "babelbus")):
            folders[:] = [one for one in folders if one != "__pycache__"]
            for file in files:
                full = os.path.join(parent, file)
                archive.write(full, os.path.relpath(full, root))
    return path


def _ship(spark: SparkSession, path: str, *, remote: bool) -> None:
    """Send our package to the executors. Spark finds a format by its name only where it is installed."""
    from babelbus.spark.source import BabelbusDataSource

    if remote:
        spark.addArtifacts(path, pyfile=True)
    else:
        spark.sparkContext.addPyFile(path)
    spark.dataSource.register(BabelbusDataSource)
