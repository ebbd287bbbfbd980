"""SIGKILL of executors of a cluster, and of the Python processes of tasks, in the middle of what they copy.

Row 22 of the fault matrix in docs/design/reliability.md. BABELBUS_TEST_SEED chooses other moments and victims. A gate
stops a task at a row, so that the kill hits a batch that is under way for certain; other kills come at any time after
that.
"""

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from babelbus.records.record import Record
from babelbus.spark.python import worker_python
from tests.spark.cluster import Cluster
from tests.spark.copying import POLL_SECONDS, SECONDS_MAX, Copy
from tests.spark.daemons import environment, kill
from tests.spark.gate import ROW_BY_ROW, Gate, Visit
from tests.spark.python_workers import daemons, is_connected, workers
from tests.spark.sink_driver import RECORDS_PER_BATCH, copy_once
from tests.spark.support import NOW, numbered

pytestmark = pytest.mark.timeout(1800)
SEED = int(os.environ.get("BABELBUS_TEST_SEED", "1"))
VALUE_BYTES = 2**18
PIECE_VALUES = 96
"""So large a piece of the log is in no socket's buffer: who reads it waits in the middle when a task stops."""
ROLES = ("read", "stop", "write")
"""What the three Python processes of a task do."""


def until_staged(copy: Copy, before: set[Path], goes_on: Callable[[float], None]) -> None:
    """Return when there is a part that was not there before."""
    deadline = time.monotonic() + SECONDS_MAX
    while not copy.parts() - before:
        goes_on(POLL_SECONDS)
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("seed", "batches", "stops"),
    [(SEED, 3, 1), *(pytest.param(seed, 60, 12, marks=pytest.mark.slow) for seed in range(SEED, SEED + 3))],
)
def test_what_is_copied_on_a_cluster_whose_executors_are_killed_again_and_again_is_there_once(
    tmp_path: Path, seed: int, batches: int, stops: int
) -> None:
    chance = random.Random(seed)
    # Each in a batch of its own, for a task may fail three times; and not in the first, so that something is there.
    chosen = sorted(chance.sample(range(1, batches), stops))
    rows = [number * RECORDS_PER_BATCH + chance.randrange(RECORDS_PER_BATCH) for number in chosen]
    with (
        Copy(tmp_path, numbered(batches * RECORDS_PER_BATCH)) as copy,
        Cluster(tmp_path, environment(worker_python())) as cluster,
        Gate(rows) as gate,
        copy.driver(master=cluster.address, tasks=2, gate=gate.place) as driver,
    ):
        for row in rows:
            before = copy.parts()
            held = gate.wait(row, driver.goes_on_for)
            until_staged(copy, before, driver.goes_on_for)  # by the other task of the batch, or by this one
            assert copy.copied() == row - row % RECORDS_PER_BATCH  # what was committed: the batches before this one
            holder = cluster.executor_of(held.pid)
            assert kill(holder)
            again = gate.wait(row, driver.goes_on_for)
            assert cluster.executor_of(again.pid) != holder
            gate.open(row)
            if row != rows[-1]:
                driver.goes_on_for(chance.uniform(0, 0.3))  # into this batch or another; whatever it hits is right
                assert kill(chance.choice(cluster.executors()))
        code, said = driver.wait()
        assert code == 0, said
        assert copy.found() == copy.expected


def large() -> list[Record]:
    count = PIECE_VALUES * min(os.cpu_count() or 1, 8)  # it is read in as many pieces as there are cores
    return [Record(b"%d " % number + bytes(VALUE_BYTES), timestamp=NOW + number) for number in range(count)]


def of_role(role: str, held: Visit, below: int, port: int) -> list[int]:
    """Give the processes of a role in a task that is held at a gate.

    What reads does so in place, so only what writes is connected to the server. Others may be among them that are about
    to end, of an attempt that has failed.
    """
    if role == "stop":
        return [held.pid]
    return [one for one in workers(below) if one != held.pid and is_connected(one, port) == (role == "write")]


def kill_all(pids: list[int]) -> int:
    """Give how many of them there were."""
    return sum(map(kill, pids))


def test_a_task_whose_python_processes_are_killed_is_tried_again_where_spark_may(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    stop = chance.randrange(2, PIECE_VALUES // 4)
    roles = chance.sample(ROLES, 3)  # three failures of a task are borne
    with (
        Copy(tmp_path, large()) as copy,
        Gate([stop]) as gate,
        copy.driver(master="local[2,4]", once=True, folder=str(copy.folder), gate=gate.place) as driver,
    ):
        for role in roles:
            before = copy.parts()
            held = gate.wait(stop, driver.goes_on_for)
            until_staged(copy, before, driver.goes_on_for)  # the rows before this one
            victims = of_role(role, held, driver.pid, copy.port)
            if role == roles[0]:  # for the next attempt Spark has to start another daemon
                assert kill_all(daemons(driver.pid))
            assert kill_all(victims)
            assert copy.copied() == 0
            held.go()
        gate.wait(stop, driver.goes_on_for)
        gate.open(stop)
        code, said = driver.wait()
        assert code == 0, said
        assert copy.found() == copy.expected


def kill_once(role: str, copy: Copy, gate: Gate, stop: int, ended: threading.Event) -> None:
    """Kill a process of a save of this process' Spark in the middle of it."""

    def goes_on_for(seconds: float) -> None:
        assert not ended.wait(seconds)

    before = copy.parts()
    held = gate.wait(stop, goes_on_for)
    until_staged(copy, before, goes_on_for)
    assert kill_all(of_role(role, held, os.getpid(), copy.port))
    held.go()


@pytest.mark.slow
def test_a_save_whose_python_process_is_killed_fails_where_spark_tries_once_and_can_be_done_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    stop = random.Random(SEED).randrange(2, PIECE_VALUES // 4)
    try:
        with Copy(tmp_path, large()) as copy, Gate([stop]) as gate, ThreadPoolExecutor(1) as pool:
            work = copy.work(folder=str(copy.folder), gate=gate.place)
            for role in ROLES:
                ended = threading.Event()
                killing = pool.submit(kill_once, role, copy, gate, stop, ended)
                try:
                    with pytest.raises(Py4JJavaError, match=r"failed 1 times.*Python worker exited unexpectedly"):
                        copy_once(spark, work)
                finally:
                    ended.set()
                killing.result()
                assert copy.copied() == 0
            gate.open(stop)
            copy_once(spark, work)
            assert copy.found() == copy.expected
    finally:
        for name in ROW_BY_ROW:  # other tests have the same Spark
            spark.conf.unset(name)
