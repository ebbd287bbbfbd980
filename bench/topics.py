"""Ten thousand topics: the processor time of a start after a kill, and of one topic more.

Each topic has ten records of 100 bytes behind its last checkpoint. Its folder is a copy of the first one: to make ten
thousand topics by request takes minutes of flushes.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from babelbus.clock import SystemClock
from babelbus.records.format import encode_payloads
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk import FolderStore
from babelbus.storage.files import LocalFiles
from bench.frame import Reading, figure
from bench.jebp import Running
from bench.workload import PAYLOAD, scratch_folder

TOPICS = 10_000
CREATED = 20


def make_topics(folder: str) -> None:
    """Write a data folder with ten thousand topics."""
    store = FolderStore(LocalFiles(), folder, SystemClock())
    store.save_settings("first", b'{"partitions":1,"settings":{}}')
    log = store.open_partition("first", 0, LogSettings())
    log.append(encode_payloads([PAYLOAD] * 10, [SystemClock().now_ms()] * 10, 0))
    for number in range(TOPICS - 1):
        name = f"plant%2F{number // 100}%2F{number % 100}"
        shutil.copytree(f"{folder}/topics/first", f"{folder}/topics/{name}", copy_function=shutil.copyfile)


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _started(folder: str) -> Iterator[Running]:
    running = Running(folder, "written")
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


@figure("topics.start_10k_cpu_s", unit="s", target=5, lower_is_better=True)
def start() -> Iterator[Reading]:
    """Processor time of a server from its start until it listens."""
    with scratch_folder() as folder:
        make_topics(f"{folder}/data")
        while True:
            begun = time.perf_counter()
            with _started(folder) as running:
                taken = _processor_seconds(running.process.pid)
                yield Reading(taken, f"{time.perf_counter() - begun:.1f} s passed, {running.peak_mib:.0f} MiB")


@figure("topics.create_at_10k_cpu_ms", unit="ms", target=20, lower_is_better=True)
def create() -> Iterator[Reading]:
    """Processor time of the server for each of some topics that are created one after the other."""
    with scratch_folder() as folder:
        make_topics(f"{folder}/data")
        with _started(folder) as running:
            made = 0
            while True:
                before = _processor_seconds(running.process.pid)
                uvloop.run(_create(running, made))
                made += CREATED
                yield Reading((_processor_seconds(running.process.pid) - before) / CREATED * 1000)


async def _create(running: Running, first: int) -> None:
    async with running.client() as client:
        for number in range(first, first + CREATED):
            await client.create_topic(f"more/{number}")
