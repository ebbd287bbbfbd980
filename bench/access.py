"""Access: the cost of asking the gate for each publication, of a decision, and of a revocation, with 10,000 rows.

Publications and the revocation go through real connections of a `babelbus serve` process, whose gate is turned on and
off by turns: both halves are measured in one process, by its processor time.
"""

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from babelbus.client import Client, Identity
from babelbus.core.access import Action, Row, Table
from babelbus.core.access.table import edits_for
from babelbus.protocols.worterbuch.messages import ClientMessage, Get, Set, Subscribe
from babelbus.web.token import read_token
from bench import worterbuch, zbus
from bench.frame import Reading, figure
from bench.workload import PAYLOAD, scratch_folder

ROWS = 10_000
SAMPLE = 5_000
SUBSCRIPTIONS = 1_000
TURNS = 24
BEST = 6
REQUESTS = 20_000
RECORDS = 100_000
TOPIC = zbus.MQ
ALLOWED = ("publish", "write-state", "subscribe")


def rows(who: str) -> list[dict[str, str]]:
    """10,000 rows, among them those that allow what is measured."""
    made = [
        {"who": who, "action": "publish", "pattern": f"plant/area{number % 100}/device{number}/#"}
        for number in range(ROWS // 2)
    ]
    made += [
        {"who": who, "action": "publish", "pattern": f"other/?/device{number}"}
        for number in range(ROWS // 2 - 2 * len(ALLOWED))
    ]
    made += [{"who": who, "action": action, "pattern": f"{TOPIC}/#"} for action in ALLOWED]
    return made + [{"who": who, "action": action, "pattern": "key/#"} for action in ALLOWED]


@figure("access.decision_us", unit="us", target=20, lower_is_better=True)
def decision() -> Iterator[Reading]:
    """Decide about a subject that was not asked for before, with 10,000 rows."""
    table = Table()
    table.apply(edits_for([Row(row["who"], row["action"], row["pattern"]) for row in rows("alice")]))
    rights = table.rights("alice")
    first = 0
    while True:
        subjects = [f"plant/area{one % 100}/device{one % ROWS}/v{first}" for one in range(SAMPLE)]
        begun = time.process_time()
        for subject in subjects:
            rights.may(Action.PUBLISH, subject)
        yield Reading((time.process_time() - begun) / SAMPLE * 1e6)
        first += 1


class Guarded:
    """A server with 10,000 rows for everybody, and its administration endpoint."""

    def __init__(self, folder: str) -> None:
        self.folder = f"{folder}/data"
        command = [str(Path(sys.executable).parent / "babelbus"), "serve", "--json", "--data-folder", self.folder]
        options = ["--server-any-port", "--no-sbus-enabled", "--topics-ack", "written", "--log-level", "error"]
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.addresses: dict[str, str] = json.loads(self._process.stdout.readline())["addresses"]
        self._admin = http.client.HTTPConnection(self.addresses["admin"], timeout=60)
        self._token = read_token(self.folder)
        self.ask("POST", "/api/topics", {"name": TOPIC})
        self.ask("POST", "/api/access/rows", {"rows": rows("*")})

    def ask(self, method: str, path: str, body: object) -> None:
        """Send a request, and check that the server did it."""
        headers = {"authorization": f"Bearer {self._token}"}
        self._admin.request(method, path, json.dumps(body), headers)
        response = self._admin.getresponse()
        content = response.read()
        assert response.status in (200, 201), content

    def enforce(self, on: bool) -> None:
        """Turn the gate on or off."""
        self.ask("PUT", "/api/access/mode", {"enforce": on})

    @property
    def processor_seconds(self) -> float:
        """The processor time of all threads, by the clock of the scheduler: in nanoseconds, not in ticks."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def dial(self, listener: str) -> socket.socket:
        host, _, port = self.addresses[listener].rpartition(":")
        made = socket.create_connection((host, int(port)), timeout=60)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def stop(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def guarded() -> Iterator[Guarded]:
    """Run a server; it is killed at the end, as a crash would."""
    with scratch_folder() as folder:
        server = Guarded(folder)
        try:
            yield server
        finally:
            server.stop()


Job = Callable[[], object]


def jebp_job(server: Guarded) -> tuple[Job, Job]:
    """Publish batches, on a connection of its own; what ends the connection."""
    loop = uvloop.new_event_loop()
    client = Client(server.addresses["jebp"], identity=Identity.load(f"{server.folder}/conf/admin_key"))
    loop.run_until_complete(client.__aenter__())
    payloads = [PAYLOAD] * RECORDS

    def close() -> None:
        loop.run_until_complete(client.close())
        loop.close()

    return lambda: loop.run_until_complete(client.publish_many(TOPIC, payloads)), close


def zbus_job(server: Guarded) -> tuple[Job, Job]:
    """Publish over WebSocket, each message answered."""
    made = zbus.upgrade(server.dial("zbus"))
    requests = zbus.publishes(REQUESTS)
    return lambda: worterbuch.pipelined(made, requests, REQUESTS, b"OK, PUB"), made.close


def worterbuch_job(server: Guarded) -> tuple[Job, Job]:
    """Set keys, each answered."""
    made = server.dial("worterbuch-tcp")
    while not made.recv(65536).endswith(b"\n"):
        pass
    value = b'"' + PAYLOAD + b'"'
    messages: list[ClientMessage] = [Set(number, f"key/{number % 1000}", value) for number in range(REQUESTS)]
    requests = worterbuch.lines_of(messages)
    return lambda: worterbuch.pipelined(made, requests, REQUESTS, b"\n"), made.close


@figure("access.publish_cost", unit="%", target=3, lower_is_better=True)
def publish_cost() -> Iterator[Reading]:
    """Publish batches of jebp, bodies of zbus and sets of Wörterbuch, asked and not asked by turns: the dearest."""
    with guarded() as server:
        while True:
            costs = {
                name: _cost(server, job)
                for name, job in (("jebp", jebp_job), ("zbus", zbus_job), ("Wörterbuch", worterbuch_job))
            }
            note = ", ".join(f"{name} {cost:+.1f} %" for name, cost in costs.items())
            yield Reading(max(costs.values()), note)


def _cost(server: Guarded, begin: Callable[[Guarded], tuple[Job, Job]]) -> float:
    """Return how much more processor time a job takes with the gate on, in percent.

    The best quarter of the turns counts, on the average: other work of the machine makes turns longer, never shorter,
    and a single best turn differs by 4 % from run to run.
    """
    spent: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(TURNS):
        for on in (False, True) if turn % 2 else (True, False):
            server.enforce(on)
            job, close = begin(server)
            job()  # the rights are compiled, the caches are warm
            before = server.processor_seconds
            job()
            spent[on].append(server.processor_seconds - before)
            close()
    asked, free = (sum(sorted(spent[on])[:BEST]) for on in (True, False))
    return (asked / free - 1) * 100


@figure("access.revoke_ms", unit="ms", target=50, lower_is_better=True)
def revoke() -> Iterator[Reading]:
    """Take away the rights of a Wörterbuch client with 1,000 subscriptions; its next event reaches nobody."""
    row = {"rows": [{"who": "*", "action": "subscribe", "pattern": "key/#"}]}
    keys = [f"key/{number}" for number in range(SUBSCRIPTIONS)]
    with guarded() as server:
        server.enforce(True)
        while True:
            listener, publisher = (Lines(server.dial("worterbuch-tcp")) for _ in range(2))
            listener.ask([Subscribe(number, key, None, True) for number, key in enumerate(keys, 1)])
            change: list[ClientMessage] = [Set(number, key, b"1") for number, key in enumerate(keys, 1)]
            publisher.ask(change)
            assert listener.read(SUBSCRIPTIONS).count(b'"state"') == SUBSCRIPTIONS
            begun = time.perf_counter()
            server.ask("DELETE", "/api/access/rows", row)
            milliseconds = (time.perf_counter() - begun) * 1e3
            publisher.ask(change)
            assert b'"state"' not in listener.ask([Get(SUBSCRIPTIONS + 1, keys[0])])
            server.ask("POST", "/api/access/rows", row)
            for one in (listener, publisher):
                one.close()
            yield Reading(milliseconds)


class Lines:
    """A Wörterbuch client over TCP."""

    def __init__(self, made: socket.socket) -> None:
        self._socket = made
        self.read(1)  # the welcome
        self.close = made.close

    def read(self, count: int) -> bytes:
        """Return so many lines."""
        data = b""
        while data.count(b"\n") < count:
            part = self._socket.recv(2**16)
            assert part, "the server closed the connection"
            data += part
        return data

    def ask(self, messages: list[ClientMessage]) -> bytes:
        """Send requests, and return their answers."""
        self._socket.sendall(worterbuch.lines_of(messages))
        return self.read(len(messages))
