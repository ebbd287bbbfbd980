"""The console's records: the end of a long topic on a page, and a search through many records beside a publisher.

The topics are written by the storage before the server starts: publishing fifty million records takes minutes.
"""

import asyncio
import http.client
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import quote

from babelbus.client import Client, Identity
from babelbus.clock import SystemClock
from babelbus.records.format import encode_payloads
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk import FolderStore
from babelbus.storage.files import LocalFiles
from babelbus.web.search.worker import WORK_SECONDS, Pace, idle_thread, step_back
from babelbus.web.token import read_token
from bench.frame import Reading, figure
from bench.workload import scratch_folder

LONG = 50_000_000
SEARCHED = 10_000_000
BATCH = 100_000
PAGES = 20
PUBLISHED_PER_SECOND = 200
QUIET_SECONDS = 2.0
TURNS = 15
"""Turns of quiet, control and search. All turns have one p99: that of two seconds would be that of four answers, and
one stall of the machine would decide it. Short turns, since the machine has calm and noisy minutes."""
BLOCK_SECONDS = WORK_SECONDS / 2
"""About as long as a search works between two system calls."""
BESIDE = 5_000_000
Span = tuple[float, float]
"""From when to when, as `time.perf_counter`."""
WANTED = 'payload contains "customer 1234567" or /id = 19876543'


def write_topic(folder: str, name: str, count: int, make: Callable[[int], bytes]) -> None:
    """Write the records of a topic, in batches."""
    store, now = FolderStore(LocalFiles(), folder, SystemClock()), SystemClock().now_ms()
    store.save_settings(name, b'{"partitions":1,"settings":{}}')
    log = store.open_partition(name, 0, LogSettings())
    for first in range(0, count, BATCH):
        payloads = [make(number) for number in range(first, min(first + BATCH, count))]
        log.append(encode_payloads(payloads, [now] * len(payloads), first))
    log.durable()
    log.close()
    store.close()


class Serving:
    """A server of ours with the folder, and its administration endpoint."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        command = [str(Path(sys.executable).parent / "babelbus"), "serve", "--json", "--data-folder", folder]
        options = ["--server-any-port", "--no-sbus-enabled", "--topics-ack", "written", "--log-level", "error"]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.addresses: dict[str, str] = json.loads(self.process.stdout.readline())["addresses"]
        self._token = read_token(folder)

    def lines(self, path: str) -> list[bytes]:
        """Return the lines of the answer to a request."""
        connection = http.client.HTTPConnection(self.addresses["admin"], timeout=600)
        connection.request("GET", path, headers={"authorization": f"Bearer {self._token}"})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        assert response.status == 200, content
        return content.splitlines()


@contextmanager
def serving(folder: str) -> Iterator[Serving]:
    """Run a server; it is killed at the end."""
    server = Serving(folder)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@figure("console.browse_end", unit="ms", target=50, lower_is_better=True)
def browse_end() -> Iterator[Reading]:
    """Read the last page of a topic of fifty million records, first time and again; the slowest counts."""
    with scratch_folder() as folder:
        write_topic(f"{folder}/data", "long", LONG, lambda number: b"%08d" % number)
        while True:
            with serving(f"{folder}/data") as server:
                server.lines("/api/topics")  # the endpoint is loaded with its first request
                taken = []
                for _ in range(PAGES):
                    begun = time.perf_counter()
                    (line,) = server.lines("/api/topics/long/records?last=1&count=50")
                    taken.append((time.perf_counter() - begun) * 1000)
                assert json.loads(line)["records"][-1]["offset"] == LONG - 1
            yield Reading(max(taken), f"median {sorted(taken)[PAGES // 2]:.1f} ms")


def order(number: int) -> bytes:
    """A record of the search: JSON of many sizes."""
    name = b"customer %d" % random.randrange(10_000_000)
    cents = random.randrange(10_000_000)
    return b'{"id":%d,"name":"%b","amount":%d.%02d,"paid":%b}' % (
        10_000_000 + number,
        name,
        cents // 100,
        cents % 100,
        b"true" if number % 3 else b"false",
    )


class Publisher:
    """Publishes records at a steady rate, each of which it waits for; a process, so that it shares nothing with us."""

    def __init__(self, server: Serving) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        place = server.addresses["jebp"], f"{server.folder}/conf/admin_key"
        self._process = context.Process(target=_publish, args=(*place, theirs))
        self._process.start()
        self._ours.recv()  # it is connected
        self._taken: list[tuple[float, float]] = []

    def p99_ms(self, spans: Sequence[Span]) -> float:
        """Return the 99th percentile of the answers in some spans of time."""
        taken = sorted(seconds for at, seconds in self._taken if any(begin <= at < end for begin, end in spans))
        return taken[int(len(taken) * 0.99)] * 1000

    def stop(self) -> None:
        self._ours.send(None)
        self._taken = self._ours.recv()
        self._process.join()


def _publish(address: str, key: str, pipe: Connection) -> None:
    os.setsid()  # as a client has: Linux shares the processor among sessions
    asyncio.run(_publish_until_told(address, key, pipe))


async def _publish_until_told(address: str, key: str, pipe: Connection) -> None:
    taken: list[tuple[float, float]] = []
    async with Client(address, identity=Identity.load(key)) as client:
        pipe.send(None)
        following = time.perf_counter()  # the same clock in all processes
        while not pipe.poll():
            begun = time.perf_counter()
            await client.publish("beside", b"a record beside the search")
            taken.append((begun, time.perf_counter() - begun))
            following = max(following + 1 / PUBLISHED_PER_SECOND, time.perf_counter())
            await asyncio.sleep(following - time.perf_counter())
    pipe.send(taken)


@contextmanager
def spinning() -> Iterator[None]:
    """Run a process that only spins, with the priority and the rests of the process that searches."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_spin, args=(theirs,))
    process.start()
    ours.recv()  # it spins
    try:
        yield
    finally:
        ours.send(None)
        process.join()


def _spin(pipe: Connection) -> None:
    step_back()
    pipe.send(None)
    idle_thread().submit(_spin_until_told, pipe).result()


def _spin_until_told(pipe: Connection) -> None:
    pace = Pace(SystemClock())
    while not pipe.poll():
        until = time.perf_counter() + BLOCK_SECONDS
        while time.perf_counter() < until:
            pass
        pace.rest()


@contextmanager
def searching(count: int) -> Iterator[tuple[Serving, Callable[[], float]]]:
    """Run a server with records, and return how to search all of them: it returns the seconds of the search."""
    random.seed(7)
    with scratch_folder() as folder:
        write_topic(f"{folder}/data", "orders", count, order)
        write_topic(f"{folder}/data", "beside", 0, order)
        with serving(f"{folder}/data") as server:
            path = f"/api/topics/orders/search?filter={quote(WANTED)}&count=1000&budget_ms=60000"

            def search_all() -> float:
                begun = time.perf_counter()
                last = json.loads(server.lines(path)[-1])["progress"]
                assert (last["done"], last["records"]) == (True, count), last
                return time.perf_counter() - begun

            server.lines(f"{path}&offset={count - 1}")  # starts the process
            yield server, search_all


@figure("console.search", unit="records/s", target=500_000)
def search() -> Iterator[Reading]:
    """Search ten million records for one of them, beside a publisher."""
    with searching(SEARCHED) as (server, search_all):
        while True:
            publisher = Publisher(server)
            try:
                yield Reading(SEARCHED / search_all())
            finally:
                publisher.stop()


@figure("console.search_p99_percent", unit="%", target=20, lower_is_better=True)
def search_p99() -> Iterator[Reading]:
    """How much longer a publisher's p99 is beside a search than in quiet times before each search.

    A busy processor costs its neighbour time, whatever it does. So a process that only spins, with the priority of the
    search and its pace of work and rest, stands beside: what it costs is the machine.
    """
    with searching(BESIDE) as (server, search_all):
        search_all()  # the records are in memory from now on, in all turns
        while True:
            quiets, controls, searches = list[Span](), list[Span](), list[Span]()
            publisher = Publisher(server)
            try:
                for _ in range(TURNS):
                    quiets.append(_timed(lambda: time.sleep(QUIET_SECONDS)))
                    with spinning():
                        controls.append(_timed(lambda: time.sleep(QUIET_SECONDS)))
                    searches.append(_timed(search_all))
            finally:
                publisher.stop()
            quiet, control, search = map(publisher.p99_ms, (quiets, controls, searches))
            note = f"p99 quiet {quiet:.2f} ms, with the control {control:.2f} ms, with the search {search:.2f} ms"
            yield Reading(100 * (search / quiet - 1), note)


def _timed(act: Callable[[], object]) -> Span:
    """Return from when to when an act took place."""
    begun = time.perf_counter()
    act()
    return begun, time.perf_counter()
