"""Spark reading five million records of 100 bytes in `local[2]`: through the files, over the bus, beside Parquet.

The records are made once and read by every figure; one Spark serves all, and each figure warms it first.
"""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from babelbus.clock import SystemClock
from babelbus.errors import BabelbusError
from babelbus.records.format import encode_payloads
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk.store import FolderStore
from babelbus.storage.files import LocalFiles
from bench.frame import Peer, PeerMissingError, Reading, figure
from bench.peers import kafka
from bench.workload import PAYLOAD, scratch_root

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORDS = 5_000_000
BATCH_RECORDS = 1_000
TOPIC = "numbers"
WARM_READINGS = 6
"""A JVM compiles what runs often: the seventh time five million records take two thirds of what they took at first."""
FAST_CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


@lru_cache(maxsize=1)
def _spark() -> "SparkSession":
    try:
        from pyspark.sql import SparkSession

        from babelbus.spark.java import fast_options, java_home
        from babelbus.spark.python import worker_python

        os.environ["JAVA_HOME"] = java_home()
    except (ImportError, BabelbusError) as error:
        raise PeerMissingError(str(error)) from error
    os.environ["PYSPARK_PYTHON"] = worker_python()
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "2g")
        .config("spark.jars", ",".join(_kafka_connector()))
        .config("spark.driver.extraJavaOptions", fast_options())
        .config("spark.sql.streaming.checkpointFileManagerClass", FAST_CHECKPOINTS)
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    atexit.register(session.stop)
    return session


def _kafka_connector() -> list[str]:
    try:
        return kafka.jars("spark")
    except PeerMissingError:
        return []  # the peer that needs it says so itself


@lru_cache(maxsize=1)
def _data() -> str:
    """Give a data folder with the records, as a server that has stopped leaves it."""
    folder = tempfile.mkdtemp(prefix="babelbus-bench-", dir=scratch_root())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    store = FolderStore(LocalFiles(), f"{folder}/data", SystemClock())
    store.save_settings(TOPIC, b'{"partitions": 1, "settings": {}}')
    log = store.open_partition(TOPIC, 0, LogSettings())
    while (base := log.next_offset) < RECORDS:
        offsets = range(base, base + BATCH_RECORDS)
        payloads = [b"%010d" % offset + PAYLOAD[10:] for offset in offsets]
        log.append(encode_payloads(payloads, [1_700_000_000_000 + offset for offset in offsets], base))
    log.close()
    return folder


def _by_path(*columns: str) -> "DataFrame":
    """Give the records; with `columns` these alone, for Spark does not tell a source in Python which it needs."""
    reader = _spark().read.format("babelbus")
    if columns:
        reader = reader.schema(", ".join(columns))
    return reader.options(path=f"{_data()}/data", subscribe=TOPIC).load()


@lru_cache(maxsize=1)
def _parquet() -> str:
    """Give a folder with the same rows, all columns of them, written by Spark as it does by default."""
    target = f"{_data()}/parquet"
    _by_path().write.parquet(target)
    return target


def _reading(make: Callable[[], "DataFrame"]) -> Iterator[Reading]:
    """Count and aggregate all rows, in records/s; the first times are for the JVM to get warm."""
    from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

    for number in count():
        begun = time.perf_counter()
        [row] = make().agg(F.count("*"), F.sum(F.length("value")), F.max("offset")).collect()
        seconds = time.perf_counter() - begun
        assert tuple(row) == (RECORDS, RECORDS * len(PAYLOAD), RECORDS - 1)
        if number >= WARM_READINGS:
            yield Reading(RECORDS / seconds, f"{seconds:.2f} s")


def _read_parquet() -> Iterator[Reading]:
    return _reading(lambda: _spark().read.parquet(_parquet()))


def _read_all(make: Callable[[], "DataFrame"]) -> Iterator[Reading]:
    """Let every column of every row go by, in records/s."""
    for number in count():
        begun = time.perf_counter()
        make().write.format("noop").mode("overwrite").save()
        seconds = time.perf_counter() - begun
        if number >= WARM_READINGS:
            yield Reading(RECORDS / seconds, f"{seconds:.2f} s")


@figure(
    "spark.read_path", unit="records/s", target=1_500_000, peers=[Peer("Parquet, the three columns", _read_parquet)]
)
def read_path() -> Iterator[Reading]:
    """Count and aggregate what the files hold; Spark reads all columns of ours, and those it needs of Parquet."""
    return _reading(_by_path)


@figure("spark.read_columns", unit="records/s", peers=[Peer("Parquet, the three columns", _read_parquet)])
def read_columns() -> Iterator[Reading]:
    """The same count by a query that names the two columns it needs: `.schema("value binary, offset bigint")`."""
    return _reading(lambda: _by_path("value binary", "offset bigint"))


@figure(
    "spark.read_vs_parquet",
    unit="records/s",
    peers=[Peer("Parquet, every column", lambda: _read_all(lambda: _spark().read.parquet(_parquet())))],
)
def read_vs_parquet() -> Iterator[Reading]:
    """The same rows with every column from both; half of Parquet's speed is the goal."""
    return _read_all(_by_path)


@figure("spark.read_url", unit="records/s", target=700_000)
def read_url() -> Iterator[Reading]:
    """The same count over the bus: a server in a process of its own ships the stored bytes."""
    program = str(Path(sys.executable).parent / "babelbus")
    command = [program, "serve", "--json", "--data-folder", f"{_data()}/data", "--server-any-port"]
    server = subprocess.Popen([*command, "--log-level", "error"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["addresses"]["jebp"]
        place = {"url": f"jebp://{address}", "identity": f"{_data()}/data/conf/admin_key"}
        assign = f'{{"{TOPIC}": [0]}}'
        yield from _reading(lambda: _spark().read.format("babelbus").options(**place, assign=assign).load())
    finally:
        server.kill()
        server.wait()
