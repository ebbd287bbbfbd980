"""The console: a page of ten thousand topics, a page that is open beside full load, and the memory of the history.

The cost of an open page is the processor time of the server for what the overview asks for: at full load the event loop
has no time to give away, so a hundredth of its time is a hundredth of the rate.
"""

import http.client
import json
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from babelbus.web.token import read_token
from bench.frame import Reading, figure
from bench.topics import TOPICS, make_topics
from bench.workload import scratch_folder

PAGES = 10
BUSY_TOPICS = 100
ROUNDS = 20
SECONDS_OF_POLL = 2.0
"""How often the overview asks."""
SERIES = (
    "published.jebp,published.admin,fetched.jebp,live.zbus,connections.jebp,loop_lag,memory,cpu,disk_free,log_bytes"
)
POLLS = ("/api/status", f"/api/history?series={SERIES}&step=1", "/api/changes?count=20")


class Serving:
    """A server in a process of its own, and a connection to its administration endpoint."""

    def __init__(self, folder: str) -> None:
        command = [str(Path(sys.executable).parent / "babelbus"), "serve", "--json", "--data-folder", folder]
        options = ["--server-any-port", "--no-sbus-enabled", "--topics-ack", "written", "--log-level", "error"]
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        addresses = json.loads(self._process.stdout.readline())["addresses"]
        self._admin = http.client.HTTPConnection(addresses["admin"], timeout=60)
        self._token = read_token(folder)

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Return the answer of a request, which must have worked."""
        headers = {"authorization": f"Bearer {self._token}"}
        self._admin.request(method, path, None if body is None else json.dumps(body), headers)
        response = self._admin.getresponse()
        content = response.read()
        assert response.status in (200, 201), content
        return json.loads(content)

    @property
    def processor_seconds(self) -> float:
        """The processor time of all threads, by the clock of the scheduler: in nanoseconds, not in ticks."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def stop(self) -> None:
        """End the process, as a crash would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def serving(folder: str) -> Iterator[Serving]:
    """Run a server on a data folder."""
    server = Serving(folder)
    try:
        yield server
    finally:
        server.stop()


@figure("console.topics_10k_ms", unit="ms", target=100, lower_is_better=True)
def topics() -> Iterator[Reading]:
    """The slowest of some pages of 10,000 topics, searched and sorted by the server."""
    with scratch_folder() as folder:
        make_topics(f"{folder}/data")
        with serving(f"{folder}/data") as server:
            server.ask("GET", "/api/server")  # the first connection loads the endpoint
            while True:
                slowest = 0.0
                for order in ("name", "records", "bytes", "published"):
                    for page in range(PAGES):
                        begun = time.perf_counter()
                        query = f"search=plant&sort={order}&descending={page % 2}&offset={page * 50}&count=50"
                        answer = server.ask("GET", f"/api/topics?{query}")
                        slowest = max(slowest, time.perf_counter() - begun)
                        assert (len(answer["topics"]), answer["total"]) == (50, TOPICS - 1)
                yield Reading(slowest * 1000)


@figure("console.open_page_percent", unit="%", target=2, lower_is_better=True)
def open_page() -> Iterator[Reading]:
    """The part of a core that an open overview takes, of a server with a hundred topics in use."""
    with scratch_folder() as folder, serving(f"{folder}/data") as server:
        for number in range(BUSY_TOPICS):
            server.ask("POST", "/api/topics", {"name": f"site/line{number}"})
            server.ask("POST", "/api/send", {"subject": f"site/line{number}", "payload": "1"})
        while True:
            begun = server.processor_seconds
            for _ in range(ROUNDS):
                for path in POLLS:
                    server.ask("GET", path)
            taken = (server.processor_seconds - begun) / ROUNDS
            yield Reading(taken / SECONDS_OF_POLL * 100, f"{taken * 1000:.1f} ms for each {SECONDS_OF_POLL:g} s")


@figure("console.history_mb", unit="MB", target=1, lower_is_better=True)
def history() -> Iterator[Reading]:
    """The memory of the history of a server with as many series as there may be."""
    from babelbus.web.history import RINGS, SERIES_MAX, Series

    while True:
        tracemalloc.start()
        kept = [Series(f"topic.site/line{number}.published", "records/s", f"{number}") for number in range(SERIES_MAX)]
        for tick in range(RINGS[1]):
            for series in kept:
                series.value = tick
                series.push(tick)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        yield Reading(taken / 1e6, f"{len(kept)} series")
