"""Spark writing two million records of 100 bytes to a server in a process of its own, exactly once, `flushed` acks."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from babelbus.client import BlockingClient, Identity
from bench.frame import Peer, Reading, figure
from bench.spark import _spark
from bench.workload import PAYLOAD, scratch_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RECORDS = 2_000_000


def _rows() -> "DataFrame":
    """Give the records; Spark makes them while they are written, by two copies each (`rpad` would take longer than all
    the rest: it copies its padding byte by byte)."""
    number, rest = 10**9, PAYLOAD[10:].decode()
    return _spark().range(0, RECORDS, 1, 4).selectExpr(f"cast(concat(id + {number}, '{rest}') as binary) as value")


def _writing(save: Callable[["DataFrame"], None]) -> Iterator[Reading]:
    """Write all rows, in records/s; the first time is for the JVM to get warm."""
    warm = False
    while True:
        begun = time.perf_counter()
        save(_rows())
        seconds = time.perf_counter() - begun
        if warm:
            yield Reading(RECORDS / seconds, f"{seconds:.2f} s")
        warm = True


def _write_parquet() -> Iterator[Reading]:
    with scratch_folder() as folder:
        yield from _writing(lambda rows: rows.write.mode("overwrite").parquet(f"{folder}/rows"))


@figure("spark.write", unit="records/s", target=150_000, peers=[Peer("Parquet", _write_parquet)])
def write() -> Iterator[Reading]:
    """Stage and commit, each save into a topic of its own; what is there afterwards is counted."""
    topic, numbers = "", count()
    with scratch_folder() as folder:
        program = str(Path(sys.executable).parent / "babelbus")
        command = [program, "serve", "--json", "--data-folder", f"{folder}/data", "--server-any-port"]
        server = subprocess.Popen([*command, "--log-level", "error"], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = json.loads(server.stdout.readline())["addresses"]["jebp"]
            identity = f"{folder}/data/conf/admin_key"
            with BlockingClient(address, identity=Identity.load(identity)) as client:

                def save(rows: "DataFrame") -> None:
                    nonlocal topic
                    if topic:
                        client.remove_topic(topic)
                    topic = f"written/{next(numbers)}"
                    client.create_topic(topic)
                    options = {"url": f"jebp://{address}", "identity": identity, "topic": topic}
                    rows.write.format("babelbus").options(**options).mode("append").save()

                for reading in _writing(save):
                    assert client.end_offset(topic) == RECORDS
                    yield reading
        finally:
            server.kill()
            server.wait()
